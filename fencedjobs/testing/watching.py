"""What the database holds, as others see it: read on a connection that nothing else is done on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection

from fencedjobs.line import apart
from fencedjobs.testing.blocking import Blocking
from fencedjobs.testing.cuts import can_cut, engine_of
from fencedjobs.transaction import Transaction


class Watcher:
    """Reads what is committed, each statement by itself, while nobody is writing.

    It has a connection beside those of the store, and no transactions: a machine looks at every row
    after every step, and beginning and ending would be most of that. A database in memory has one
    connection for everybody; there the store's own reading transactions serve.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._engine = apart(engine_of(store)) if can_cut(engine_of(store)) else None
        self._connection: Connection | None = None

    def read(self, work: Callable[[Transaction], Any]) -> Any:
        """What ``work`` answers, which writes nothing."""
        if self._engine is None:
            return read(self._store, work)
        return self._run(lambda: work(Transaction(self._connected, schema=self._schema)))

    def close(self) -> None:
        """Close the connection; raises nothing, so that what was found comes out."""
        if self._engine is not None:
            with suppress(Exception):
                self._run(self._let_go)

    @property
    def _schema(self) -> str | None:
        schema: str | None = self._store.schema
        return schema

    def _run(self, work: Callable[[], Any]) -> Any:
        return self._store.sync(lambda core: work()) if isinstance(self._store, Blocking) else work()

    def _connected(self) -> Connection:
        if self._connection is None:
            assert self._engine is not None
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        return self._connection

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._engine is not None:
            self._engine.dispose()


def read(store: Any, work: Callable[[Transaction], Any]) -> Any:
    """What ``work`` answers in a transaction of the store's that has written nothing."""
    if isinstance(store, Blocking):
        return store.sync(lambda core: core.run(work, reading=True))
    return store.run(work, reading=True)
