"""The same work as `limit` does, by fencedjobs as its users call it, with every safety on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import URL, Column, Integer, MetaData, String, Table, insert
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.bases import engine_of
from fencedjobs import AsyncStore, AsyncWorker, Store, Worker, schema
from fencedjobs.metrics import Observed
from fencedjobs.models import Base
from fencedjobs.relay import Relay

PAYLOAD: Final = {"x": 1}
TTL: Final = 60.0
_EMPTY: Final[dict[str, Callable[[list[str]], list[str]]]] = {
    "postgresql": lambda names: [f"TRUNCATE {', '.join(names)} RESTART IDENTITY", "VACUUM ANALYZE"],
    "mysql": lambda names: [f"TRUNCATE TABLE {name}" for name in names],
    "sqlite": lambda names: [f"DELETE FROM {name}" for name in (*names, "sqlite_sequence")],
}
CONCURRENCY: Final = 100
business = Table("business", MetaData(), Column("id", Integer, primary_key=True), Column("job", String(255)))


class Ours:
    """A store on an engine with the default pool."""

    def __init__(self, url: URL) -> None:
        self._url = url
        self.engine = engine_of(url)
        self.store = Store(self.engine)

    def make(self) -> None:
        schema.upgrade(self.engine)
        business.create(self.engine)

    def close(self) -> None:
        self.engine.dispose()

    def clear(self) -> None:
        """Empty the tables, which number their rows from the start again."""
        names = [table.name for table in (*reversed(Base.metadata.sorted_tables), business)]
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in _EMPTY[self.engine.dialect.name](names):
                connection.exec_driver_sql(statement)

    # --- jobs ---

    def enqueue_each(self, number: int) -> None:
        for _ in range(number):
            self.store.enqueue(payload=PAYLOAD)

    def enqueue_many(self, number: int) -> None:
        self.store.enqueue_many({"payload": PAYLOAD} for _ in range(number))

    def enqueue_kind(self, number: int) -> None:
        """Jobs for a worker."""
        self.store.enqueue_many({"payload": PAYLOAD, "kind": "noop"} for _ in range(number))

    def drain(self, number: int, batch: int) -> None:
        while number > 0:
            leases = self.store.claim_many(ttl=TTL, limit=batch)
            assert leases
            assert not self.store.complete_many(leases)
            number -= len(leases)

    def drain_singly(self, number: int) -> None:
        for _ in range(number):
            lease = self.store.claim(ttl=TTL)
            assert lease is not None
            self.store.complete(lease)

    # --- events and messages ---

    def fill_outbox(self, number: int) -> None:
        with self.store.begin() as uow:
            for n in range(number):
                uow.outbox.add(f"{n}", PAYLOAD, topic="t")

    def relay(self, send: Callable[[Any], bool], *, batch: int, each: bool) -> None:
        Relay(self.store, send, mark_every=1 if each else batch).run(until_empty=True)

    def accept_all(self, ids: Sequence[str]) -> int:
        return sum(self.store.inbox.accept(id, PAYLOAD) for id in ids)


def noop(ctx: Any) -> None:
    """A handler that does nothing."""


async def async_noop(ctx: Any) -> None:
    """A handler that does nothing, on a loop."""


def writes(ctx: Any) -> None:
    """A handler with a row of the application's, in one transaction with the completion."""
    with ctx.transaction() as uow:
        uow.session.execute(insert(business).values(job=ctx.id))


def observed(what: Observed, /, **facts: Any) -> None:
    """Metrics are on: each observation comes here."""


HANDLERS: Final[dict[str, Callable[[Any], Any]]] = {"noop": noop, "writes": writes}


def work(url: URL, handler: str, concurrency: int, ready: Callable[[], None]) -> None:
    """A `Worker` until the queue is empty."""
    engine = engine_of(url, pool_size=concurrency)
    worker = Worker(Store(engine), concurrency=concurrency, observe=observed)
    worker.handler("noop")(HANDLERS[handler])
    ready()
    worker.run(until_empty=True)
    engine.dispose()


def work_async(url: URL, driver: str, concurrency: int, ready: Callable[[], None]) -> None:
    """An `AsyncWorker` until the queue is empty."""

    async def body() -> None:
        engine = create_async_engine(url.set(drivername=driver), pool_size=concurrency)
        worker = AsyncWorker(AsyncStore(engine), concurrency=concurrency, observe=observed)
        worker.handler("noop")(async_noop)
        ready()
        await worker.run(until_empty=True)
        await engine.dispose()

    asyncio.run(body())
