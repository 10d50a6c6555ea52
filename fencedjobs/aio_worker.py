"""The worker on asyncio: handlers are tasks of the caller's event loop.

The engine room is the same, in threads with connections of their own, so that a handler that blocks
the loop keeps its lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

from fencedjobs.aio import AsyncStore
from fencedjobs.attempt import Attempt
from fencedjobs.context import AsyncContext
from fencedjobs.errors import InvalidValue
from fencedjobs.relay import signals
from fencedjobs.room import Room
from fencedjobs.threads import Slots
from fencedjobs.worker import NOTICED, WorkerBase, WorkerOptions, interrupt_on_loss, work

_LAST_WORDS = 1.0  # seconds in which cancelled handlers may clean up


class AsyncWorker(WorkerBase):
    """`Worker` for an `AsyncStore`: async handlers run as tasks of the loop that `run` is awaited on.

    A handler is cancelled when its lease is lost, when it runs too long, and when the worker stops
    without it. Handlers that are not async run in threads; they end their job by what they return.
    """

    def __init__(self, store: AsyncStore, **options: Unpack[WorkerOptions]) -> None:
        if not isinstance(store, AsyncStore):
            raise InvalidValue("store", f"must be an AsyncStore, got {type(store).__name__}")
        super().__init__(store.sync_store, **options)
        self._async_store = store

    async def run(self, *, until_empty: bool = False) -> int:
        """Work until `stop`, SIGTERM or SIGINT; how many jobs were completed. See `Worker.run`.

        When this task is cancelled, handlers are cancelled and their jobs given back.
        """
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        room = self._opened(until_empty)
        tasks = _Tasks(self._async_store, room, self._concurrency, loop)
        with signals(self.stop), _ticking(loop):
            room.start(tasks, lambda: loop.call_soon_threadsafe(over.set))
            try:
                await _uninterrupted(over, room.stop)
            finally:
                await tasks.gone()
                completed = self._closed(room)
        return completed


@contextmanager
def _ticking(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Have the loop look up now and then; see `NOTICED`."""
    timer: asyncio.TimerHandle | None = None

    def tick() -> None:
        nonlocal timer
        timer = loop.call_later(NOTICED, tick)

    tick()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


async def _uninterrupted(over: asyncio.Event, stop: Callable[[], object]) -> None:
    """Wait for the end. A cancellation hastens it, however often it comes, and is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not over.is_set():
        try:
            await over.wait()
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
            stop()
    if cancelled is not None:
        raise cancelled


class _Tasks:
    """Handlers as tasks of a loop, or in threads if they are not async."""

    def __init__(self, store: AsyncStore, room: Room, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._room = room
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = Slots(size, self._work)

    def start(self, attempts: list[Attempt]) -> None:
        """Called in the room's thread: one hand-over for all."""
        self._slots.start([attempt for attempt in attempts if not attempt.handler.is_async])
        coming = [attempt for attempt in attempts if attempt.handler.is_async]
        if coming:
            self._loop.call_soon_threadsafe(self._begin, coming)

    def abandon(self, attempt: Attempt) -> None:
        if not attempt.handler.is_async:
            self._slots.abandon()

    def close(self) -> None:
        self._slots.close()

    async def gone(self) -> None:
        """Cancelled handlers have had the time to clean up."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_WORDS)

    def _begin(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            task = self._loop.create_task(self._run(attempt))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, attempt: Attempt) -> None:
        if not attempt.begin():
            return
        interrupt_on_loss(attempt)
        result: Any = None
        failure: BaseException | None = None
        try:
            result = await attempt.handler.function(self._context(attempt))
        except BaseException as error:  # noqa: BLE001 - whatever it raises is its failure, not the worker's
            failure = error
        self._room.finished(attempt, result, failure)

    def _work(self, attempt: Attempt) -> bool:
        return work(self._room, attempt, partial(attempt.handler.function, self._context(attempt)))

    def _context(self, attempt: Attempt) -> AsyncContext:
        return AsyncContext(self._store, attempt, self._room.committed)
