"""What no raw limit is there for: wake-ups, memory, the import. Each has a bound of its own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL

from benchmarks.bases import engine_of
from benchmarks.ours import CONCURRENCY, PAYLOAD, Ours, noop, observed
from fencedjobs import JobState, Store, Worker

POLL: Final = 0.25  # seconds; the worker's own
CHUNK: Final = 2000  # jobs that are enqueued at once
PAUSE: Final = 0.4  # seconds in which a worker is idle again


def wake_up(url: URL, times: int) -> float:
    """Median milliseconds from an enqueue to the start of the handler, of a worker that is idle."""
    engine = engine_of(url)
    store, started, began = Store(engine), threading.Event(), [0.0]
    worker = Worker(store, poll=POLL, maintenance=None, observe=observed)

    @worker.handler("noop")
    def starts(ctx: Any) -> None:
        began[0] = time.perf_counter()
        started.set()

    thread = threading.Thread(target=worker.run)
    thread.start()
    taken = []
    for _ in range(times):
        time.sleep(PAUSE)
        started.clear()
        asked = time.perf_counter()
        store.enqueue(payload=PAYLOAD, kind="noop")
        assert started.wait(30)
        taken.append((began[0] - asked) * 1e3)
    worker.stop()
    thread.join()
    engine.dispose()
    return statistics.median(taken)


def memory(url: URL, few: int, many: int) -> float:
    """Resident memory of a worker's process after many jobs, over that after few."""
    code = f"from benchmarks.other import measured; measured({url.render_as_string(False)!r}, {few}, {many})"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    before, after = map(int, told.split())
    return after / before


def measured(url: str, few: int, many: int) -> None:
    """In a process of its own: how much memory it has after ``few`` jobs, and after ``many``."""
    from sqlalchemy import make_url

    own = Ours(make_url(url))
    engine = engine_of(own.engine.url, pool_size=CONCURRENCY)
    worker = Worker(Store(engine), concurrency=CONCURRENCY, maintenance=None, poll=0.05, observe=observed)
    worker.handler("noop")(noop)
    thread = threading.Thread(target=worker.run)
    thread.start()
    done = 0
    for number in (few, many):
        while done < number:
            own.enqueue_kind(min(number - done, CHUNK))
            done += min(number - done, CHUNK)
            while own.store.counts().get("default", {}).get(JobState.DONE, 0) < done:
                time.sleep(0.05)
        print(_resident())
    worker.stop()
    thread.join()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def importing(times: int) -> float:
    """Milliseconds that `import fencedjobs` takes beyond `import sqlalchemy`."""
    alone, both = [], []
    for _ in range(times):
        alone.append(_import("sqlalchemy"))
        both.append(_import("sqlalchemy, fencedjobs"))
    return statistics.median(both) - statistics.median(alone)


def _import(names: str) -> float:
    code = f"import time; t = time.perf_counter(); import {names}; print(time.perf_counter() - t)"
    return 1e3 * float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
