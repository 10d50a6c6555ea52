"""The relay on asyncio: the same batches, with senders that are awaited."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple, Unpack

from sqlalchemy.util import greenlet_spawn

from fencedjobs.aio import AsyncStore
from fencedjobs.batch import Batch, acknowledge
from fencedjobs.relay import Blocked, RelayBase, RelayOptions, signals
from fencedjobs.values import Event

A = TypeVarTuple("A")
T = TypeVar("T")

AsyncSend = Callable[[Event], Awaitable[Any] | Any]


class AsyncRelay(RelayBase):
    """`Relay` for an `AsyncStore` and a sender that is awaited; the options are the same.

    Lanes are worked on one after the other. When its task is cancelled, the event that is being
    sent stays pending, and the lane is given back. A sender that is not async works, too, and blocks
    the loop meanwhile.
    """

    def __init__(self, store: AsyncStore, send: AsyncSend, **options: Unpack[RelayOptions]) -> None:
        super().__init__(store.sync_store, send, **options)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Finish the event that is being sent, mark it, give the lane back and return from `run`."""
        self._stopped.set()

    async def run(self, *, until_empty: bool = False) -> int:
        """Relay until `stop`, SIGTERM or SIGINT; how many events were sent. See `Relay.run`."""
        total = 0
        loop = asyncio.get_running_loop()
        with signals(lambda: loop.call_soon_threadsafe(self.stop)):
            while not self._stopped.is_set():
                due = (lane for lane in self._lanes if lane.is_due() and not self._stopped.is_set())
                batches = [await self._turn(lane) for lane in due]
                total += sum(batch.sent for batch in batches)
                moved = any(batch.moved for batch in batches)
                if until_empty and self._is_done(moved):
                    break
                if not moved:
                    await self._wait(self._pause())
        return total

    async def _turn(self, lane: Any) -> Batch:
        batch = self._new_batch(lane.name)
        try:
            await self._work(batch)
            lane.succeeded()
        except Exception as error:  # noqa: BLE001 - whatever the sender or the database raises: wait, go on
            self._failed(lane, error)
        return batch

    async def _work(self, batch: Batch) -> None:
        try:
            await _finished(batch.open)
            await self._send_all(batch)
        except BaseException:
            with suppress(Exception):  # the error that ended the batch comes out, not what follows from it
                await _finished(batch.close)
            raise
        await _finished(batch.close)

    async def _send_all(self, batch: Batch) -> None:
        while not self._stopped.is_set() and await _finished(batch.next) is not None:
            event = batch.copy()
            try:
                answer = self._send(event)
                acknowledge(event.id, await answer if inspect.isawaitable(answer) else answer)
            except Exception as error:
                if not await _finished(batch.failed, error):
                    raise Blocked from error
            else:
                await _finished(batch.acknowledged)

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)


async def _finished(step: Callable[[*A], T], *args: *A) -> T:
    """A short transaction to its end, also when the task is cancelled meanwhile: only then it is known."""
    task = asyncio.ensure_future(greenlet_spawn(step, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):
            await asyncio.shield(task)
        raise
