"""What the child processes of the worker's tests do; imported by them, so without pytest.

Each child keeps a book outside of the database: one JSON line for everything that it observes and that its
handlers do, written at once, so that a kill loses nothing that happened before it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, insert, select
from sqlalchemy.ext.asyncio import create_async_engine

from fencedjobs import AsyncStore, Retry, Store
from fencedjobs.aio_worker import AsyncWorker
from fencedjobs.metrics import Observed
from fencedjobs.worker import Worker

#: the business: one row for each effect, and nothing that would hide a second one
EFFECTS: Final = Table(
    "effects",
    MetaData(),
    Column("n", Integer, primary_key=True),
    Column("job", String(255)),
    Column("fence", Integer),
    Column("pid", Integer),
)


class Book:
    """A file of JSON lines; written whole, line by line, by any thread."""

    def __init__(self, path: str) -> None:
        self._directory = Path(path).parent
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def first(self, job: str) -> bool:
        """Whether no handler has started this job before, in any process.

        Not the same as the first attempt: on a slow machine that can be over before its handler starts.
        """
        try:
            (self._directory / f"started-{job}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def __call__(self, event: str, /, **facts: Any) -> None:
        line = {"event": event, "at": time.monotonic(), "pid": os.getpid(), **facts}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def read(*paths: Path) -> list[dict[str, Any]]:
    """What was written so far, in the order of time; a line that its process did not finish is left out."""
    lines = [line for path in paths if path.exists() for line in path.read_bytes().splitlines(True)]
    found = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return sorted(found, key=lambda line: float(line["at"]))


# --- handlers -------------------------------------------------------------------------------------


def burn(seconds: float) -> None:
    """Python code that never waits."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def hold_the_interpreter(seconds: float) -> float:
    """One call of C code that lets no other thread run; how long it really took."""
    before = time.perf_counter()
    sum(range(500_000))
    pace = 500_000 / (time.perf_counter() - before)
    before = time.perf_counter()
    while (left := seconds - (time.perf_counter() - before)) > 0:
        sum(range(int(pace * left * 1.2)))
    return time.perf_counter() - before


def before_the_effect(ctx: Any, book: Book) -> float:
    """What a handler does first, as its payload says; the seconds it is to sleep then."""
    todo = ctx.payload or {}
    first = book.first(ctx.id)
    book("start", id=ctx.id, fence=ctx.fence, attempt=ctx.attempt)
    if todo.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    if todo.get("fails") and first:
        book("ready", id=ctx.id, fence=ctx.fence)
        raise ValueError("the first time always fails")
    if first and "burns" in todo:
        burn(todo["burns"])
    if first and "holds" in todo:
        book("held", id=ctx.id, seconds=hold_the_interpreter(todo["holds"]))
    if first and "blocks" in todo:
        time.sleep(todo["blocks"])
    return float(todo.get("sleeps", 0.0) if first or todo.get("always") else 0.0)


def a_row(ctx: Any) -> Any:
    return insert(EFFECTS).values(job=ctx.id, fence=ctx.fence, pid=os.getpid())


def signalling(book: Book, ctx: Any) -> None:
    """In a thread: a signal that does not interrupt what the main thread waits in."""
    book("start", id=ctx.id, fence=ctx.fence)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(60)


def sync_handlers(book: Book) -> dict[str, Callable[..., Any]]:
    def effect(ctx: Any) -> None:
        time.sleep(before_the_effect(ctx, book))
        book("ready", id=ctx.id, fence=ctx.fence)
        with ctx.transaction({"fence": ctx.fence}) as uow:
            uow.session.execute(a_row(ctx))

    def report(ctx: Any) -> Any:
        time.sleep(before_the_effect(ctx, book))
        book("ready", id=ctx.id, fence=ctx.fence)
        return {"fence": ctx.fence}

    return {"effect": effect, "report": report, "signal": partial(signalling, book)}


def async_handlers(book: Book) -> dict[str, Callable[..., Any]]:
    async def effect(ctx: Any) -> None:
        await asyncio.sleep(before_the_effect(ctx, book))
        book("ready", id=ctx.id, fence=ctx.fence)
        async with ctx.transaction({"fence": ctx.fence}) as uow:
            await uow.session.execute(a_row(ctx))

    async def report(ctx: Any) -> Any:
        await asyncio.sleep(before_the_effect(ctx, book))
        book("ready", id=ctx.id, fence=ctx.fence)
        return {"fence": ctx.fence}

    return {"effect": effect, "report": report, "signal": partial(signalling, book)}


# --- what runs in a child -------------------------------------------------------------------------


def observer(book: Book) -> Callable[..., None]:
    def observe(what: Observed, /, **facts: Any) -> None:
        book(what.value, **{name: value for name, value in facts.items() if name not in ("kind", "queue")})

    return observe


def working(url: str, is_async: bool, path: str, options: dict[str, Any], until_empty: bool) -> None:
    """A worker of either form, until it is told to stop."""
    book = Book(path)
    move_the_clock(options.pop("skew", 0.0))
    options = {"poll": 0.1, "maintenance": None, "retry": Retry(base=0), "observe": observer(book), **options}
    try:
        if is_async:
            asyncio.run(_working(url, book, options, until_empty))
        else:
            worker = Worker(Store(create_engine(url)), **options)
            run(worker, book, until_empty)
    except BaseException as error:
        book("died", error=repr(error))
        raise


def move_the_clock(seconds: float) -> None:
    """Of this process, as far as Python asks for the time of day."""
    right = time.time
    time.time = lambda: right() + seconds


def run(worker: Worker, book: Book, until_empty: bool) -> None:
    for kind, handler in sync_handlers(book).items():
        worker.handler(kind)(handler)
    worker.run(until_empty=until_empty)


async def _working(url: str, book: Book, options: dict[str, Any], until_empty: bool) -> None:
    engine = create_async_engine(url)
    worker = AsyncWorker(AsyncStore(engine), **options)
    for kind, handler in async_handlers(book).items():
        worker.handler(kind)(handler)
    await worker.run(until_empty=until_empty)
    await engine.dispose()


# --- starting them --------------------------------------------------------------------------------


def children() -> ForkServerContext:
    """Children are forked from a fresh process that has imported this module, not from the tests'."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "psycopg", "pymysql", "asyncpg", "aiomysql", "aiosqlite"])
    return context


@dataclass
class Staff:
    """Workers as child processes on one database, and their books."""

    url: str
    async_url: str | None
    directory: Path
    processes: list[Any] = field(default_factory=list)

    def start(self, *, until_empty: bool = False, is_async: bool | None = None, **options: Any) -> Child:
        """One more worker; async if there is a driver for that, and nothing else is asked for."""
        is_async = self.async_url is not None if is_async is None else is_async
        url = self.async_url if is_async else self.url
        assert url is not None
        path = self.directory / f"book-{len(self.processes)}.jsonl"
        process = children().Process(
            target=working, args=(url, is_async, str(path), options, until_empty), daemon=True
        )
        process.start()
        self.processes.append(process)
        return Child(process, path)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All that is in the books, of all workers."""
        return read(*sorted(self.directory.glob("book-*.jsonl")))

    def close(self) -> None:
        """Whatever the test finds: no child outlives it, not a stopped one either."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


@dataclass
class Child:
    """One worker in a process of its own."""

    process: ForkServerProcess
    path: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended by itself meanwhile
            os.kill(self.pid, number)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read(self.path)

    def of(self, event: str) -> list[dict[str, Any]]:
        """What it has noted under this name."""
        return [line for line in self.lines if line["event"] == event]

    def awaits(self, event: str, count: int = 1, within: float = 20) -> list[dict[str, Any]]:
        """Wait until it has noted so many of these."""
        end = time.monotonic() + within
        while len(found := self.of(event)) < count:
            assert time.monotonic() < end, f"no {event} in time: {self.lines[-20:]}"
            assert self.process.is_alive() or len(self.of(event)) >= count, (
                f"it has ended: {self.lines[-20:]}"
            )
            time.sleep(0.005)
        return found

    def ended(self, within: float = 20) -> int | None:
        """Its exit code; `None` if it does not end in time."""
        self.process.join(within)
        return self.process.exitcode


@contextmanager
def staff(url: str, async_url: str | None, directory: Path) -> Iterator[Staff]:
    """A staff that is gone at the end."""
    staff = Staff(url, async_url, directory)
    try:
        yield staff
    finally:
        staff.close()


def effects(engine: Engine) -> list[tuple[str, int]]:
    """The business rows: of which job, under which fence."""
    with engine.connect() as connection:
        rows = connection.execute(select(EFFECTS.c.job, EFFECTS.c.fence).order_by(EFFECTS.c.n))
        return [(job, fence) for job, fence in rows]
