"""Pools with one connection for everybody: a transaction that somebody has open is never ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, SingletonThreadPool, StaticPool, create_engine, event, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from fencedjobs import AsyncStore, Store, UnitOfWork, UnsupportedDatabase, schema
from fencedjobs.own import Patience, Transactions
from tests.hosts import Base, Order, told

ENGINES: dict[str, dict[str, Any]] = {
    "in memory": {},
    "in memory, for all threads": {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}},
    "a file": {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}},
    "a file, one for each thread": {"poolclass": SingletonThreadPool},
}


@pytest.fixture(params=[(name, begins) for name in ENGINES for begins in (False, True)], ids=str)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    name, begins = request.param
    url = f"sqlite:///{tmp_path}/one.db" if "file" in name else "sqlite://"
    engine = create_engine(url, **ENGINES[name])
    if begins:
        event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    schema.upgrade(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(Order)) or 0


def test_it_works_while_nobody_else_is_in_a_transaction(engine: Engine) -> None:
    store = Store(engine)
    store.enqueue("j")
    lease = store.claim("w", ttl=60)
    assert lease is not None
    with store.completing(lease) as uow:
        uow.session.add(Order(id=1, note="a"))
    assert (store.counts(), count(engine)) == ({"default": {"done": 1}}, 1)


@pytest.mark.parametrize("used", [False, True], ids=["first use", "used before"])
def test_an_open_transaction_of_the_host_is_not_ended(engine: Engine, used: bool) -> None:
    store = Store(engine)
    if used:
        store.enqueue("before")
    with Session(engine) as session:
        session.add(Order(id=1, note="a"))
        session.flush()
        for verb in (lambda: store.enqueue("j"), store.counts, lambda: store.begin().__enter__()):
            error = told(verb)
            assert isinstance(error, UnsupportedDatabase), repr(error)
            assert "UnitOfWork(session)" in str(error)
        UnitOfWork(session).jobs.enqueue("k")
        session.add(Order(id=2, note="b"))
        session.commit()
    assert count(engine) == 2
    assert store.get("j") is None
    assert store.get("k") is not None


def test_a_store_in_its_own_block_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transactions, "patience", lambda self, seconds=0: Patience(self.sleep, 0.05))
    store = Store(engine)
    with store.begin() as uow:
        uow.jobs.enqueue("j")
        assert isinstance(told(lambda: store.enqueue("k")), UnsupportedDatabase)
    assert store.get("j") is not None
    assert store.get("k") is None


def test_threads_take_turns(engine: Engine) -> None:
    if isinstance(engine.pool, SingletonThreadPool):
        return  # each thread has its own, and in memory its own database
    store = Store(engine)
    names = [f"j{n}" for n in range(60)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(store.enqueue, names)) == names
        leases = [lease for lease in threads.map(lambda _: store.claim("w", ttl=60), names) if lease]
    assert sorted(lease.id for lease in leases) == sorted(names)
    assert {lease.fence for lease in leases} == {1}


@pytest.fixture
async def memory() -> Any:
    engine = create_async_engine("sqlite+aiosqlite://")
    async with engine.begin() as connection:
        await connection.run_sync(schema.upgrade)
        await connection.run_sync(Base.metadata.create_all)
    yield engine
    await engine.dispose()


async def test_tasks_take_turns(memory: AsyncEngine) -> None:
    store = AsyncStore(memory)
    names = [f"j{n}" for n in range(40)]
    assert await asyncio.gather(*(store.enqueue(name) for name in names)) == names
    leases = await asyncio.gather(*(store.claim("w", ttl=60) for _ in names))
    assert sorted(lease.id for lease in leases if lease) == sorted(names)


async def test_an_open_transaction_of_the_async_host_is_not_ended(memory: AsyncEngine) -> None:
    store = AsyncStore(memory)
    async with AsyncSession(memory) as session:
        session.add(Order(id=1, note="a"))
        await session.flush()
        for verb in (store.enqueue("j"), store.counts(), store.begin().__aenter__()):
            with pytest.raises(UnsupportedDatabase):
                await verb
        await session.commit()
    async with memory.connect() as connection:
        assert await connection.scalar(select(func.count()).select_from(Order)) == 1
    assert await store.get("j") is None
