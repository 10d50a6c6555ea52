"""The threads of a worker: the slots that handlers run in, and the parts that never wait for a handler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from fencedjobs.attempt import Attempt


def start(name: str, work: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """Start a thread that does not keep the process alive: what it leaves is covered by its lease."""
    thread = threading.Thread(target=work, args=arguments, name=f"fencedjobs-{name}", daemon=True)
    thread.start()
    return thread


class Slots:
    """As many threads as handlers may run at once. One that hangs is replaced."""

    def __init__(self, size: int, work: Callable[[Attempt], bool]) -> None:
        self._size = size
        self._work = work
        self._queue: SimpleQueue[Attempt | None] = SimpleQueue()
        self._threads = 0
        self._lock = threading.Lock()

    def start(self, attempts: list[Attempt]) -> None:
        """Have handlers called. Never more attempts are given than there is room for."""
        for attempt in attempts:
            with self._lock:
                if self._threads < self._size:
                    start("handler", self._run)
                    self._threads += 1
            self._queue.put(attempt)

    def abandon(self) -> None:
        """A handler was given up: its thread does not count any more, and ends when the handler returns."""
        with self._lock:
            self._threads -= 1

    def close(self) -> None:
        """End the threads, as soon as their handlers return."""
        with self._lock:
            for _ in range(self._threads):
                self._queue.put(None)

    def _run(self) -> None:
        while (attempt := self._queue.get()) is not None:
            if not self._work(attempt):
                return
