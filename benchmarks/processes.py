"""Worker processes that start together: how long until the last of them has found the queue empty."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any

from sqlalchemy import URL

from benchmarks.limit import limit_of

Work = Callable[..., None]  # (url, …, ready)


def timed(url: URL, processes: int, work: Work, *arguments: Any) -> float:
    """Seconds from the start until all processes have ended their work, set-up of processes excluded."""
    context = multiprocessing.get_context("spawn")
    go, ends = context.Event(), context.SimpleQueue()
    readies = [context.Event() for _ in range(processes)]
    children = [
        context.Process(target=_child, args=(work, url, arguments, ready, go, ends), daemon=True)
        for ready in readies
    ]
    for child in children:
        child.start()
    for ready in readies:
        if not ready.wait(60):
            raise RuntimeError("a worker process did not get ready")
    start = time.perf_counter()
    go.set()
    last = max(float(ends.get()) for _ in children)
    for child in children:
        child.join(10)
    return last - start


def _child(work: Work, url: URL, arguments: Any, ready: Event, go: Event, ends: Any) -> None:
    def begin() -> None:
        ready.set()
        go.wait()

    work(url, *arguments, begin)
    ends.put(time.perf_counter())


def raw(url: URL, batch: int, ready: Callable[[], None]) -> None:
    """The limit, until the queue is empty."""
    limit = limit_of(url)
    ready()
    while jobs := limit.claim(batch):
        limit.complete_many(jobs)
    limit.close()


def raw_with_business(url: URL, batch: int, ready: Callable[[], None]) -> None:
    """The limit with a row of the application's in the transaction of each completion."""
    limit = limit_of(url)
    ready()
    while limit.drain_with_business(batch):
        pass
    limit.close()
