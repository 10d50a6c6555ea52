"""Connections that are lost at COMMIT: just before it is sent, or after it was done and before its answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import SingletonThreadPool, StaticPool
from sqlalchemy.util import await_only

from fencedjobs import dialects, direct
from fencedjobs.errors import OutcomeUnknown
from fencedjobs.testing.model import Disagreement

BEFORE, AFTER = "before", "after"


class Cut:
    """In a with block, the connection of the next COMMIT on an engine is closed, `BEFORE` it or `AFTER` it.

    Closed is the driver's own connection, so that what follows is what the driver raises on one that
    is gone. Before: the transaction is rolled back, as a server does with what it loses. After: it is
    committed, and nobody hears it. `fired` tells whether there was a COMMIT at all.
    """

    def __init__(self, engine: Engine, when: str) -> None:
        self._engine = engine
        self._when = when
        self._listeners = (
            ("before_cursor_execute", self._send),
            ("after_cursor_execute", self._sent),
            ("commit", self._commit),
        )
        self._tells = False
        self._waits = False  # for the end of a statement that is its own COMMIT
        self.fired = False

    def __enter__(self) -> Self:
        self._tells = direct.tell(self._engine)
        for name, listener in self._listeners:
            event.listen(self._engine, name, listener)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, listener in self._listeners:
            event.remove(self._engine, name, listener)
        if self._tells:
            direct.tell_no_more(self._engine)

    def _send(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement == "COMMIT":
            self._commit(connection)

    def _commit(self, connection: Any) -> None:
        if self.fired:
            return
        self.fired = True
        if self._when == AFTER and dialects.is_single(connection):
            self._waits = True
            return
        driver = connection.connection.driver_connection
        if getattr(driver, "in_transaction", True):  # SQLite's begins none for a verb that wrote nothing
            cursor = connection.connection.dbapi_connection.cursor()
            cursor.execute("COMMIT" if self._when == AFTER else "ROLLBACK")
            cursor.close()
        _close(driver)

    def _sent(self, connection: Any, cursor: Any, *_: Any) -> None:
        """The statement that was its own COMMIT has ended; who asks now hears of the driver what is wrong."""
        if not self._waits:
            return
        self._waits = False
        self.fired = cursor.rowcount != 0  # else a transaction may follow that does change something
        if self.fired:
            _close(connection.connection.driver_connection)
            connection.connection.dbapi_connection.cursor().execute("SELECT 1")


def _close(driver: Any) -> None:
    """Close the connection below whatever SQLAlchemy has put around it, which must not know."""
    closing = driver.close()
    if inspect.isawaitable(closing):
        await_only(closing)
        return
    with suppress(AttributeError):  # some drivers refuse to close twice, and the pool would log it
        driver.close = lambda: None


def can_cut(engine: Engine) -> bool:
    """Whether a connection can be lost without losing the database, which one in memory is."""
    return not isinstance(engine.pool, (StaticPool, SingletonThreadPool))


def engine_of(store: Any) -> Engine:
    """The engine that the connections of a store, also of an async one, come from."""
    inner = getattr(store, "_inner", store)
    engine: Engine = getattr(inner, "sync_store", inner).transactions.engine
    return engine


def severed(store: Any, when: str | None, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """The answer of a call to the store, and whether its connection was lost, `BEFORE` or `AFTER` a COMMIT.

    `Disagreement` if the connection was lost and the call does not say that the outcome is unknown:
    before COMMIT it may say as well that the database is gone.
    """
    if when is None or not can_cut(engine := engine_of(store)):
        return call(), None
    with Cut(engine, when) as cut:
        try:
            got = call()
        except OutcomeUnknown:
            return None, when
        except DBAPIError as error:
            if when == AFTER:
                raise Disagreement(f"committed, and said to have failed: {error}") from error
            return None, when
    if cut.fired:
        raise Disagreement(f"its connection was lost {when} COMMIT, and it answered {got!r}")
    return got, None
