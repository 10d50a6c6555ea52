"""An async relay whose task is cancelled: at whatever point, nothing is half done, and the lane is free."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import event as listen
from sqlalchemy.ext.asyncio import AsyncEngine

from fencedjobs import AsyncStore
from fencedjobs.aio_relay import AsyncRelay
from fencedjobs.metrics import Observed
from fencedjobs.values import Event


async def filled(engine: AsyncEngine, *names: str) -> AsyncStore:
    store = AsyncStore(engine)
    for name in names:
        await store.outbox.add(name, name, topic="t")
    return store


async def state(store: AsyncStore, id: str) -> str:
    found = await store.outbox.get(id)
    assert found is not None
    return found.state.value


async def lane_is_free(store: AsyncStore) -> bool:
    lock = await store.locks.get("outbox:default")
    return lock is None or lock.owner is None


async def test_cancelled_while_sending_the_event_stays_pending_and_the_lane_is_free(
    async_engine: AsyncEngine,
) -> None:
    store = await filled(async_engine, "a", "b")
    sending = asyncio.Event()

    async def send(event: Event) -> bool:
        if event.id == "b":
            sending.set()
            await asyncio.sleep(60)
        return True

    task = asyncio.create_task(AsyncRelay(store, send, mark_every=100).run())
    await sending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [await state(store, id) for id in ("a", "b")] == ["sent", "pending"]
    assert await lane_is_free(store)


async def test_cancelled_at_any_statement_it_leaves_nothing_half_done(async_engine: AsyncEngine) -> None:
    """What was acknowledged is marked, what was not is pending, and no connection is in use."""
    n = 1
    while await cancelled_at(async_engine, n):
        n += 1
    assert n > 6, "there is an end of it"


async def cancelled_at(engine: AsyncEngine, nth: int) -> bool:
    """Cancel a relay when its ``nth`` statement begins; whether it had as many."""
    names = [f"{nth}-{n}" for n in range(2)]
    store = await filled(engine, *names)
    acknowledged: list[str] = []
    begun = 0

    async def send(event: Event) -> bool:
        acknowledged.append(event.id)
        return True

    task = asyncio.create_task(AsyncRelay(store, send).run(until_empty=True))

    def count(*_: Any) -> None:
        nonlocal begun
        if not task.done():
            begun += 1
            if begun == nth:
                task.cancel()

    listen.listen(engine.sync_engine, "before_cursor_execute", count)
    with suppress(asyncio.CancelledError):
        await task
    listen.remove(engine.sync_engine, "before_cursor_execute", count)
    pool: Any = engine.pool
    assert pool.checkedout() == 0
    assert await lane_is_free(store)
    for name in names:
        assert await state(store, name) == ("sent" if name in acknowledged else "pending")
    await AsyncRelay(store, send).run(until_empty=True)
    assert acknowledged == names, "no loss, and without a crash no duplicate"
    return task.cancelled()


async def test_trouble_at_the_end_does_not_hide_what_ended_the_batch(async_engine: AsyncEngine) -> None:
    """The lane was lost while acknowledged events were gathered: that is told, and only that."""
    store = await filled(async_engine, "a", "b")
    seen: list[str] = []

    async def send(event: Event) -> bool:
        if event.id == "b":
            found = await store.locks.get("outbox:default")
            assert found is not None
            await store.locks.release(found)  # type: ignore[arg-type]
            await store.locks.claim("outbox:default", "another", ttl=60)
            relay.stop()
        return True

    def observe(what: Observed, /, **facts: Any) -> None:
        seen.append(what.value)

    relay = AsyncRelay(store, send, mark_every=2, observe=observe)
    assert await relay.run() == 0
    assert seen == ["relay.lane_lost"]
    assert [await state(store, id) for id in ("a", "b")] == ["pending", "pending"]


async def test_a_sender_that_is_not_async_is_not_asked_again_for_want_of_an_await(
    async_engine: AsyncEngine,
) -> None:
    store = await filled(async_engine, "a", "b")
    got: list[str] = []

    def send(event: Event) -> bool:
        got.append(event.id)
        return True

    assert await AsyncRelay(store, send).run(until_empty=True) == 2
    assert got == ["a", "b"]
