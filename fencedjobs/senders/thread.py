"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from fencedjobs.errors import FencedJobsError

T = TypeVar("T")

_PATIENCE: Final = 2.0  # seconds for what still runs when the thread is told to stop


class LoopThread:
    """Runs coroutines for other threads. Its own starts at first use, and keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    @property
    def is_running(self) -> bool:
        return self._loop is not None and self._pid == os.getpid()

    def run(self, coroutine: Coroutine[Any, Any, T], *, within: float) -> T:
        """The coroutine's result; cancelled, and `TimeoutError`, if it takes more than ``within`` seconds.

        It is cancelled as well when waiting for it is interrupted: nobody would know what it did.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        except BaseException:
            coroutine.close()
            raise
        try:
            return future.result(within)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread, if there is one; `run` starts another."""
        with self._lock:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_PATIENCE)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            if self._pid != os.getpid():  # its thread did not come along, and its sockets are the parent's
                raise FencedJobsError("this sender was used before the process forked: make one per process")
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then end what a library left running on it."""
    loop.run_forever()
    end = loop.time() + _PATIENCE / 2
    while (left := asyncio.all_tasks(loop)) and loop.time() < end:
        for task in left:  # some libraries begin something new, or wait once more, when they are cancelled
            task.cancel()
        loop.run_until_complete(asyncio.wait(left, timeout=_PATIENCE / 10))
    loop.close()
