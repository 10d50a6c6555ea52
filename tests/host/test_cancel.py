"""Cancelled at any moment: no connection is kept, no transaction open, and no job half done. FAULTS 85."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import AsyncAdaptedQueuePool
from sqlalchemy.exc import DBAPIError

from fencedjobs import AsyncStore, JobLease
from tests.databases import ASYNC_DRIVERS, Database
from tests.host.engines import SQLALCHEMY
from tests.hosts import MORE_DRIVERS, Host, Order, hosted, on

CANCELS = 100
#: older versions of SQLAlchemy lose a connection when its closing is cancelled, too
TWICE = SQLALCHEMY >= (2, 0, 58)
Verb = Callable[[AsyncStore, JobLease, int], Awaitable[object]]


async def completing(store: AsyncStore, lease: JobLease, number: int) -> None:
    async with store.completing(lease) as uow:
        uow.session.add(Order(id=number, note=lease.id))
        await uow.jobs.enqueue(f"{lease.id} followed")


async def begin(store: AsyncStore, lease: JobLease, number: int) -> None:
    async with store.begin() as uow:
        await uow.jobs.complete(lease)
        uow.session.add(Order(id=number, note=lease.id))
        await uow.jobs.enqueue(f"{lease.id} followed")


async def claims(store: AsyncStore, lease: JobLease, number: int) -> None:
    await store.enqueue(f"{lease.id} claimed")
    await store.claim("other", ttl=600, id=f"{lease.id} claimed")


async def renews(store: AsyncStore, lease: JobLease, number: int) -> None:
    await store.renew(lease, ttl=900)
    await store.checkpoint(lease, {"page": number})
    await store.enqueue_many([{"id": f"{lease.id} many {n}"} for n in range(3)])


VERBS: list[Verb] = [completing, begin, claims, renews]


async def interrupt(verb: Awaitable[object], wait: float, twice: bool) -> bool:
    """Cancel the verb after some time, perhaps a second time while it is tidying up; whether it was."""
    task = asyncio.ensure_future(verb)
    if wait > 0:
        await asyncio.sleep(wait)
    task.cancel()
    if twice:
        await asyncio.sleep(0)
        task.cancel()
    # A driver may give its own error when its connection is closed under it.
    with suppress(asyncio.CancelledError, DBAPIError):
        await task
    return task.cancelled() or task.exception() is not None


DRIVERS = (*ASYNC_DRIVERS, *(name for name, (*_, asynchronous) in MORE_DRIVERS.items() if asynchronous))


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is only freed by the garbage collector may stay for long."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@on("sqlite", "postgresql", "mariadb", drivers=DRIVERS)
def test_random_cancellations(database: Database, driver: str) -> None:
    if not TWICE and database.backend == "mariadb":
        pytest.skip("this version loses a connection when its return to the pool is cancelled")
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    pool: dict[str, Any] = {
        "poolclass": AsyncAdaptedQueuePool,
        "pool_size": 3,
        "max_overflow": 0,
        "pool_timeout": 10,
    }
    with hosted(database, driver, **pool) as host:
        assert host.async_engine is not None
        store = AsyncStore(host.async_engine)
        host.store.enqueue_many([{"id": f"j{n}"} for n in range(4 * CANCELS)])
        free = host.store.claim_many("w", ttl=900, limit=4 * CANCELS)
        leases: list[JobLease] = []

        async def run() -> int:
            cancelled, lasting = 0, dict[Verb, float]()
            while cancelled < CANCELS:
                verb = VERBS[len(leases) % len(VERBS)]
                leases.append(free.pop())  # runs out if nothing is ever cancelled
                attempt = verb(store, leases[-1], len(leases))
                if verb not in lasting:  # let it end, to see how long it takes
                    begun = time.perf_counter()
                    await attempt
                    lasting[verb] = time.perf_counter() - begun
                else:
                    wait = chance.uniform(-0.1, 1) * lasting[verb]
                    cancelled += await interrupt(attempt, wait, TWICE and chance.random() < 0.3)
            return cancelled

        assert host.runner is not None
        assert host.runner.run(run()) >= CANCELS
        assert host.left_behind() == [], f"seed {seed}"
        require_consistent(host, leases, f"seed {seed}")


def require_consistent(host: Host, leases: list[JobLease], seed: str) -> None:
    """Each job is done with its effects, or held without any, and then it can be done."""
    notes = set(host.notes())
    for lease in leases:
        record, followed = host.store.get(lease.id), host.store.get(f"{lease.id} followed")
        assert record is not None
        done = record.state == "done"
        assert (lease.id in notes, followed is not None) == (done, done), seed
        assert done or (record.state, record.owner, record.fence) == ("leased", "w", 1), seed
    left = [lease for lease in leases if host.state(lease) == "leased"]
    assert host.store.complete_many(left) == [], seed
