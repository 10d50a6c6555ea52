"""One interface over `Worker` and `AsyncWorker`, so that a test is written once and runs in both."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from fencedjobs import AsyncStore, Retry, Store
from fencedjobs.aio_worker import AsyncWorker
from fencedjobs.worker import Worker
from tests.databases import Database
from tests.proxy import Proxy
from tests.relay.helpers import Seen as Seen

AT_ONCE = Retry(base=0)


class Workers:
    """Makes workers of one form on one database; ``store`` is a sync store on it, ``seen`` what they tell."""

    def __init__(self, database: Database, driver: str | None, store: Store) -> None:
        self.database = database
        self.driver = driver
        self.store = store
        self.seen = Seen()
        self.options: dict[str, Any] = {
            "poll": 0.05, "maintenance": None, "retry": AT_ONCE, "observe": self.seen, "grace": 5.0,
        }  # fmt: skip
        self.running: Any = None

    def run(
        self,
        handlers: dict[str, Callable[..., Any]],
        *,
        until_empty: bool = True,
        pool: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        **options: Any,
    ) -> int:
        """Run a worker with these handlers to its end; how many jobs it completed."""
        options = {**self.options, **options}
        if self.driver is None:
            engine = create_engine(self.database.url, **(pool or {}))
            try:
                worker: Any = self._with(Worker(Store(engine), **options), handlers, limits)
                completed: int = worker.run(until_empty=until_empty)
            finally:
                engine.dispose()
            return completed
        return asyncio.run(self._run(handlers, until_empty, pool, limits, options))

    async def _run(self, handlers: Any, until_empty: bool, pool: Any, limits: Any, options: Any) -> int:
        assert self.driver is not None
        engine = create_async_engine(self.database.async_url(self.driver), **(pool or {}))
        try:
            worker = self._with(AsyncWorker(AsyncStore(engine), **options), handlers, limits)
            return await worker.run(until_empty=until_empty)
        finally:
            await engine.dispose()

    def _with(self, worker: Any, handlers: dict[str, Callable[..., Any]], limits: Any) -> Any:
        for kind, handler in handlers.items():
            worker.handler(kind, **((limits or {}).get(kind, {})))(handler)
        self.running = worker
        return worker

    @contextmanager
    def in_background(self, handlers: dict[str, Callable[..., Any]], **options: Any) -> Any:
        """A worker in another thread, stopped at the end of the block."""
        answer: list[Any] = []

        def body() -> None:
            try:
                answer.append(self.run(handlers, until_empty=False, **options))
            except BaseException as error:  # noqa: BLE001 - it is raised below
                answer.append(error)

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        until(lambda: (self.running is not None and self.running._room is not None) or bool(answer))
        try:
            yield self.running
        finally:
            if self.running is not None:
                self.running.stop()
            thread.join(20)
        assert not thread.is_alive(), "the worker did not stop"
        if isinstance(answer[0], BaseException):
            raise answer[0]

    def states(self) -> dict[str, str]:
        """The state of every job of the test, by id."""
        return {id: str(record.state) for id, record in self.records().items()}

    def records(self) -> dict[str, Any]:
        records = {id: self.store.get(id) for id in self.ids}
        return {id: record for id, record in records.items() if record is not None}

    @property
    def ids(self) -> list[str]:
        with self.engine.connect() as connection:
            return [row[0] for row in connection.exec_driver_sql("SELECT id FROM fenced_jobs ORDER BY seq")]

    @property
    def engine(self) -> Engine:
        return self.store.transactions.engine


class Remote(Workers):
    """Workers on the other side of a line that can be cut; ``store`` is on this side."""

    def __init__(self, database: Database, driver: str | None, store: Store, line: Proxy) -> None:
        super().__init__(replace(database, url=database.url.set(port=line.port)), driver, store)
        self.line = line

    def quick(self) -> dict[str, Any]:
        """Options of an engine that connects fast: TLS takes 0.1 s for each connection."""
        plain = self.driver is None and self.database.backend == "mariadb"
        return {"connect_args": {"ssl_disabled": True}} if plain else {}

    def run(self, handlers: Any, *, pool: dict[str, Any] | None = None, **options: Any) -> int:
        return super().run(handlers, pool={**self.quick(), **(pool or {})}, **options)


@asynccontextmanager
async def transaction(ctx: Any, result: Any = None) -> AsyncIterator[Any]:
    """``ctx.transaction`` of either form, with ``execute`` to be awaited."""
    opened = ctx.transaction(result)
    if hasattr(opened, "__aenter__"):
        async with opened as uow:
            yield uow.session.execute
    else:
        with opened as uow:

            async def execute(*args: Any) -> Any:
                return uow.session.execute(*args)

            yield execute


async def settled(answer: Any) -> Any:
    """What a verb of either form answers."""
    return await answer if asyncio.iscoroutine(answer) else answer


def until(condition: Callable[[], bool], seconds: float = 10, every: float = 0.005) -> None:
    """Wait for something that another thread or process does; fail if it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(every)
