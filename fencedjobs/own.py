"""Short transactions of our own: how they begin, end, and are tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from fencedjobs import dialects
from fencedjobs.errors import OutcomeUnknown
from fencedjobs.transaction import Clock, Transaction

T = TypeVar("T")

PATIENCE: Final = 10.0  # seconds in which a transaction that met a deadlock or a busy database is repeated


class Patience:
    """How long to try again: pauses with full jitter, up to a time in all."""

    def __init__(self, sleep: Callable[[float], None], seconds: float = PATIENCE) -> None:
        self._sleep = sleep
        self._seconds = seconds
        self._end: float | None = None
        self._bound = 0.004

    def __call__(self) -> bool:
        """Wait a little; false when the time is over."""
        now = time.monotonic()
        self._end = now + self._seconds if self._end is None else self._end
        if now >= self._end:
            return False
        self._sleep(random.uniform(0, self._bound))
        self._bound = min(2 * self._bound, 0.25)
        return True


class Transactions:
    """Short transactions of our own on an engine: READ COMMITTED, repeated as a whole where need be."""

    def __init__(self, engine: Engine, *, schema: str | None = None, clock: Clock | None = None) -> None:
        self.engine = engine
        self._schema = schema
        self._clock = clock

    def run(self, verb: Callable[[Transaction], T], *, subject: Any = None, reading: bool = False) -> T:
        """Run ``verb`` in a transaction of its own; again as a whole where the database asks for it."""
        patience = self.patience()
        while True:
            try:
                with self._transaction(subject, patience, reading) as tx:
                    return verb(tx)
            except DBAPIError as error:
                # A connection lost before COMMIT was sent has changed nothing either.
                again = dialects.is_transient(error) or error.connection_invalidated
                if not (again and patience()):
                    raise

    @contextmanager
    def _transaction(self, subject: Any, patience: Patience, reading: bool) -> Iterator[Transaction]:
        with self.engine.connect() as connection:
            connection.execution_options(**dialects.isolation(connection.dialect))
            was_open = self.is_shared() and dialects.is_open(connection)
            connection.begin()
            tx = Transaction(lambda: connection, schema=self._schema, clock=self._clock)
            tx.subject = subject
            try:
                dialects.begun(connection, was_open=was_open, reading=reading)
                yield tx
            except BaseException:
                dialects.rollback(connection)
                raise
            with answered(lambda: tx.subject, lambda: dialects.rollback(connection)):
                dialects.commit(connection, patience=patience)

    def is_shared(self) -> bool:
        """Whether the pool gives one connection to several users at once."""
        return isinstance(self.engine.pool, (StaticPool, SingletonThreadPool))

    def patience(self, seconds: float = PATIENCE) -> Patience:
        """A new time in which to try again."""
        return Patience(self.sleep, seconds)

    def sleep(self, seconds: float) -> None:
        """Wait between two tries."""
        time.sleep(seconds)


@contextmanager
def answered(subject: Callable[[], Any], undo: Callable[[], None]) -> Iterator[None]:
    """Around COMMIT: an error that is not the database's own answer leaves the outcome unknown."""
    try:
        yield
    except BaseException as error:
        undo()
        unanswered = isinstance(error, (DBAPIError, OSError)) and not dialects.says_no(error)
        if unanswered:
            raise OutcomeUnknown(subject()) from error
        raise
