"""What only the async form has: many tasks on one loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from fencedjobs import AsyncStore, AsyncUnitOfWork, InvalidValue, JobLease, LeaseLost
from tests.jobs.helpers import T


async def test_of_eight_tasks_exactly_one_gets_the_job(async_engine: AsyncEngine) -> None:
    store = AsyncStore(async_engine)
    for turn in range(4):
        await store.enqueue(f"j{turn}", now=T)
        answers = await asyncio.gather(*(store.claim(f"w{n}", ttl=9, now=T) for n in range(8)))
        won = [lease for lease in answers if lease is not None]
        assert [(lease.id, lease.fence) for lease in won] == [(f"j{turn}", 1)]


async def test_eight_tasks_do_forty_jobs_once(async_engine: AsyncEngine) -> None:
    store = AsyncStore(async_engine)
    names = await store.enqueue_many([{"id": f"j{n}"} for n in range(40)], now=T)

    async def work(owner: str) -> list[str]:
        done = []
        while lease := await store.claim(owner, ttl=60, now=T):
            await store.complete(await store.renew(lease, ttl=60, now=T), now=T)
            done.append(lease.id)
        return done

    answers = await asyncio.gather(*(work(f"w{n}") for n in range(8)))
    assert Counter(id for answer in answers for id in answer) == Counter(names)


async def test_the_verbs_join_the_caller_s_async_transaction(async_engine: AsyncEngine) -> None:
    store = AsyncStore(async_engine)
    async with async_sessionmaker(async_engine)() as session:
        uow = AsyncUnitOfWork(session)
        assert await uow.jobs.enqueue("rolled-back", now=T) == "rolled-back"
        await session.rollback()
        assert await uow.jobs.enqueue_many([{"id": "kept"}], now=T) == ["kept"]
        await session.commit()
    assert await store.get("rolled-back") is None
    lease = await store.claim("w", ttl=9, id="kept", now=T)
    assert lease is not None
    async with store.begin() as own:
        await own.jobs.complete(lease, {"ok": 1}, now=T)
    with pytest.raises(LeaseLost) as lost:
        await store.complete(lease, now=T)
    assert lost.value.completed is True


async def test_a_claim_that_is_cancelled_holds_nothing(async_engine: AsyncEngine) -> None:
    """Either it was committed and shows in the row, or it was not; the connection is free in any case."""
    store = AsyncStore(async_engine)
    await store.enqueue("j", max_attempts=10**6, now=T)
    for n in range(10):
        task = asyncio.create_task(store.claim("w", ttl=1, id="j", now=T + 10 * n))
        for _ in range(n):
            await asyncio.sleep(0)
        task.cancel()
        lease: JobLease | None = None
        with suppress(asyncio.CancelledError):
            lease = await task
        record = await asyncio.wait_for(store.get("j"), 10)
        assert record is not None
        assert lease is None or record.fence == lease.fence
        assert await asyncio.wait_for(store.claim("x", ttl=1, id="j", now=T + 10 * n + 5), 10) is not None


def test_an_async_engine_goes_with_the_async_store_and_a_sync_one_does_not(async_engine: AsyncEngine) -> None:
    with pytest.raises(InvalidValue, match="bind"):
        AsyncStore(async_engine.sync_engine)  # type: ignore[arg-type]
