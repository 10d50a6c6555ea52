"""A connection of its own to the store's database, for one thread that no handler shares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import SingletonThreadPool, StaticPool
from sqlalchemy.util import greenlet_spawn

from fencedjobs.errors import UnsupportedDatabase
from fencedjobs.store import Store

T = TypeVar("T")


class Line:
    """The verbs of a store on connections that belong to the thread that made the line.

    Neither the pool of the store's engine nor, with an async driver, its event loop is used: whatever
    handlers do to those, this line goes on.
    """

    def __init__(self, store: Store) -> None:
        engine = apart(store.transactions.engine)
        self.store = store.on(engine)
        self._runner = asyncio.Runner() if engine.dialect.is_async else None

    def call(self, verb: Callable[[Store], T]) -> T:
        """What the verb answers; its errors come out."""
        if self._runner is None:
            return verb(self.store)
        return self._runner.run(greenlet_spawn(verb, self.store))

    def close(self) -> None:
        """Close the connections; raises nothing, for they may be broken."""
        with suppress(Exception):
            self.call(lambda store: store.transactions.engine.dispose())
        if self._runner is not None:
            with suppress(Exception):
                self._runner.close()

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def apart(engine: Engine) -> Engine:
    """An engine of the same making, with connections of its own.

    What listens to the engine's *pool* (settings of new connections) comes along.
    """
    pool = engine.pool
    if isinstance(pool, (StaticPool, SingletonThreadPool)):
        raise UnsupportedDatabase(
            f"a worker needs several connections to one database, and a {type(pool).__name__} has only one "
            "(as for a database in memory): use a file or a server"
        )
    if engine.dialect.is_async:
        from sqlalchemy.ext.asyncio import (
            create_async_engine,
        )  # needs greenlet, which a sync app may not have

        new = create_async_engine(engine.url, pool=pool.recreate()).sync_engine
    else:
        new = create_engine(engine.url, pool=pool.recreate())
    return new.execution_options(**engine.get_execution_options())


class Backoff:
    """How long a part of a worker waits after failures in a row, and when it may try again."""

    def __init__(self, least: float, most: float) -> None:
        self._least = least
        self._most = most
        self.failures = 0
        self._not_before = 0.0

    def failed(self) -> float:
        """Count one more; the seconds to wait."""
        wait: float = min(self._most, self._least * 2.0 ** min(self.failures, 30))
        self.failures += 1
        self._not_before = time.monotonic() + wait
        return wait

    def succeeded(self) -> None:
        self.failures = 0
        self._not_before = 0.0

    @property
    def wait(self) -> float:
        """Seconds until it may try again."""
        return max(0.0, self._not_before - time.monotonic())
