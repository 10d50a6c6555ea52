"""The relay on asyncio: the same batches, with senders that are awaited."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Unpack

from sqlalchemy.util import greenlet_spawn

from fencedjobs.aio import AsyncStore
from fencedjobs.relay import Batch, Blocked, RelayBase, RelayOptions, acknowledge
from fencedjobs.values import Event

AsyncSend = Callable[[Event], Awaitable[Any]]


class AsyncRelay(RelayBase):
    """`Relay` for an `AsyncStore` and a sender that is awaited; the options are the same.

    Lanes are worked on one after the other. When its task is cancelled, the event that is being
    sent stays pending, and the lane is given back.
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
        with _signals(self.stop):
            while not self._stopped.is_set():
                sent = 0
                for lane in self._lanes:
                    sent += await self._turn(lane) if lane.is_due() else 0
                total += sent
                if until_empty and self._is_empty(sent):
                    break
                if not sent:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._stopped.wait(), self._pause())
        return total

    async def _turn(self, lane: Any) -> int:
        batch = self._new_batch(lane.name)
        try:
            await greenlet_spawn(batch.open)
            try:
                await self._send_all(batch)
            finally:
                await asyncio.shield(greenlet_spawn(batch.close))
            lane.succeeded()
        except Exception as error:  # noqa: BLE001 - whatever the sender or the database raises: wait, go on
            self._failed(lane, error)
        return batch.sent

    async def _send_all(self, batch: Batch) -> None:
        while not self._stopped.is_set() and await greenlet_spawn(batch.next) is not None:
            event = batch.copy()
            try:
                acknowledge(event.id, await self._send(event))
            except Exception as error:
                if not await greenlet_spawn(batch.failed, error):
                    raise Blocked from error
            else:
                await greenlet_spawn(batch.acknowledged)


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT stop the relay while it runs, where the loop can handle signals."""
    loop = asyncio.get_running_loop()
    handled = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, or Windows
            loop.add_signal_handler(number, stop)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
