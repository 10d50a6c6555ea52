"""Short transactions of our own: how they begin, end, and are tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import Pool, SingletonThreadPool, StaticPool

from fencedjobs import dialects
from fencedjobs.dialects import Channel
from fencedjobs.direct import Direct, NotDirect
from fencedjobs.errors import UnsupportedDatabase
from fencedjobs.transaction import Clock, SeveralStatements, Transaction, answered

T = TypeVar("T")

PATIENCE: Final = 10.0  # seconds in which a transaction that met a deadlock or a busy database is repeated

_SHARED: Final = (
    "this pool shares one connection (StaticPool, or SingletonThreadPool within a thread), and somebody is "
    "in the middle of a transaction on it, which the store's own would end; use UnitOfWork(session) there"
)
_TURNS: Final[WeakKeyDictionary[Pool, Lock]] = WeakKeyDictionary()
_ANSWERED: Final = "fencedjobs.answered"


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
    """Short transactions of our own on an engine: READ COMMITTED, repeated as a whole where need be.

    A verb that is one statement goes without BEGIN and COMMIT where that saves something. Only on a
    connection that has answered a moment ago: one that was closed meanwhile shows at BEGIN, when it is
    certain that nothing has been done.
    """

    trusted: float = 1.0  #: seconds after its last answer in which a connection is taken to be alive

    def __init__(
        self, engine: Engine, *, schema: str | None = None, clock: Clock | None = None, notify: bool = True
    ) -> None:
        self.engine = engine
        self._options: dict[str, Any] = {"schema": schema, "clock": clock, "notify": notify}

    def run(
        self,
        verb: Callable[[Transaction], T],
        *,
        subject: Any = None,
        reading: bool = False,
        current: bool = False,
        single: bool = False,
        direct: bool = True,
    ) -> T:
        """Run ``verb`` in a transaction of its own; again as a whole where the database asks for it.

        ``reading``: it writes nothing, so there is nothing to commit. ``current``: it must come after
        whoever is writing all the same. ``single``: what it does is one statement, or it asks for more
        (`SeveralStatements`): before it has changed anything, or in a transaction, which is undone.
        ``direct``: it executes statements, and has no other use for a connection.
        """
        patience = self.patience()
        while True:
            try:
                with self.alone() as options, self._connection(direct and not options) as connection:
                    if isinstance(connection, Connection) and options:
                        connection.execution_options(**options)
                    tx = Transaction(lambda: connection, **self._options)
                    tx.subject, tx.may_start_over = subject, single
                    return self._carried_out(verb, tx, connection, patience, reading, current, bool(options))
            except SeveralStatements:
                single = False
            except NotDirect:
                direct = False
            except Exception as error:
                dialects.explain(error, self.engine.dialect)
                if not isinstance(error, DBAPIError):
                    raise
                # A connection lost before COMMIT was sent has changed nothing either.
                again = dialects.is_transient(error) or error.connection_invalidated
                if not (again and patience()):
                    raise
                direct = direct and not error.connection_invalidated  # SQLAlchemy has the whole pool renewed

    def _carried_out(
        self,
        verb: Callable[[Transaction], T],
        tx: Transaction,
        connection: Channel,
        patience: Patience,
        reading: bool,
        current: bool,
        several: bool,
    ) -> T:
        """Begin, have the verb do its work, and commit; on an error roll back."""
        try:
            connection.begin()
            may_be_single = tx.may_start_over and not several and self._is_alive(connection)
            tx.single = may_be_single and dialects.single(connection)
            if not tx.single:
                dialects.begun(connection, reading=reading and not current)
            answer = verb(tx)
            if not (reading or tx.is_committed):  # else there is nothing whose outcome could be unknown
                with answered(lambda: tx.subject):
                    dialects.commit(connection, patience=patience, single=tx.single)
        except BaseException:
            dialects.rollback(connection, single=tx.single)
            raise
        if tx.single:
            dialects.end_single(connection)
        else:
            dialects.rollback(connection)
        connection.info[_ANSWERED] = time.monotonic()
        return answer

    def _connection(self, direct: bool) -> Channel:
        return (
            Direct(self.engine) if direct and dialects.may_be_direct(self.engine) else self.engine.connect()
        )

    def _is_alive(self, connection: Channel) -> bool:
        return time.monotonic() - float(connection.info.get(_ANSWERED, 0.0)) < self.trusted

    def alone(self) -> AbstractContextManager[dict[str, Any]]:
        """The execution options of a connection of ours, which nobody else uses meanwhile.

        Some pools, made for in-memory databases, give one connection to everybody. Beginning, and
        even looking (the pool rolls back what comes back to it), would end a transaction that
        somebody has open on it: then it is refused.
        """
        pool = self.engine.pool
        if isinstance(pool, (StaticPool, SingletonThreadPool)):
            return self._turn(pool)
        return nullcontext(dialects.isolation(self.engine))

    @contextmanager
    def _turn(self, pool: StaticPool | SingletonThreadPool) -> Iterator[dict[str, Any]]:
        if dialects.capabilities(self.engine.dialect).read_committed:
            raise UnsupportedDatabase(f"{type(pool).__name__} shares one connection; use another pool")
        patience, turn = self.patience(), _TURNS.setdefault(pool, Lock())
        while isinstance(pool, StaticPool) and not turn.acquire(blocking=False):
            if not patience():
                raise UnsupportedDatabase(_SHARED)
        try:
            self._require_free(pool)
            yield {}
        finally:
            if isinstance(pool, StaticPool):
                turn.release()

    def _require_free(self, pool: StaticPool | SingletonThreadPool) -> None:
        if isinstance(pool, StaticPool):
            driver = pool.connection.driver_connection
        else:
            with self.engine.connect() as connection:  # the one that this thread has, if it has one
                driver = connection.connection.driver_connection
        if driver is not None and dialects.hides_transactions(driver):
            raise UnsupportedDatabase(
                "this pool shares one connection, and in the driver's autocommit=False mode it cannot be "
                "seen whether somebody is in the middle of a transaction on it; use another pool or mode"
            )
        if dialects.is_open(driver):
            raise UnsupportedDatabase(_SHARED)

    def patience(self, seconds: float = PATIENCE) -> Patience:
        """A new time in which to try again."""
        return Patience(self.sleep, seconds)

    def sleep(self, seconds: float) -> None:
        """Wait between two tries."""
        time.sleep(seconds)
