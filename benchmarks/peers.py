"""Other queues, each as its documentation recommends, on a database of its own with the same settings.

Each is installed by whoever wants to measure it (`pip install procrastinate pgqueuer huey`); one that is
not there is left out. Jobs are no-ops; `drain` counts until the last one is finished in the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final

from sqlalchemy import URL, text

from benchmarks.bases import engine_of

CONCURRENCY: Final = 100


class Peer(ABC):
    """One other queue on one database."""

    name: ClassVar[str]
    package: ClassVar[str]
    database: ClassVar[str]

    def __init__(self, url: URL) -> None:
        self.url = url
        self.dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self.done = 0

    @classmethod
    def is_installed(cls) -> bool:
        return importlib.util.find_spec(cls.package) is not None

    @abstractmethod
    def make(self) -> None:
        """Create its tables."""

    @abstractmethod
    def enqueue_each(self, number: int) -> float:
        """Seconds for jobs in transactions of their own."""

    @abstractmethod
    def enqueue_many(self, number: int) -> float:
        """Seconds by its way to add many."""

    @abstractmethod
    def drain(self, number: int) -> float:
        """Seconds until one worker process has finished what is there."""

    @abstractmethod
    def left(self) -> int:
        """Jobs that are not finished."""

    def count(self, sql: str) -> int:
        engine = engine_of(self.url)
        with engine.connect() as connection:
            number = int(connection.execute(text(sql)).scalar_one())
        engine.dispose()
        return number


async def until_empty(peer: Peer, work: Awaitable[Any], number: int) -> float:
    """Run a worker until all is done, and stop it."""
    task = asyncio.ensure_future(work)
    start = time.perf_counter()
    while peer.done < number:
        await asyncio.sleep(0.002)
        if task.done():
            await task
    while await asyncio.to_thread(peer.left):
        await asyncio.sleep(0.005)
    taken = time.perf_counter() - start
    task.cancel()
    with contextlib.suppress(BaseException):
        await task
    return taken


async def timed(work: Awaitable[Any]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


class Procrastinate(Peer):
    """psycopg, its own worker."""

    name = package = "procrastinate"
    database = "postgresql"

    def _app(self) -> Any:
        import procrastinate

        app = procrastinate.App(
            connector=procrastinate.PsycopgConnector(conninfo=self.dsn, min_size=1, max_size=20)
        )

        @app.task(queue="q", name="noop")
        async def noop(x: int) -> None:
            self.done += 1

        self._noop = noop
        return app

    def _run(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        async def body() -> Any:
            async with self._app().open_async() as app:
                return await work(app)

        return asyncio.run(body())

    def make(self) -> None:
        self._run(lambda app: app.schema_manager.apply_schema_async())

    def enqueue_each(self, number: int) -> float:
        async def each() -> None:
            for _ in range(number):
                await self._noop.defer_async(x=1)

        return float(self._run(lambda app: timed(each())))

    def enqueue_many(self, number: int) -> float:
        many = [{"x": 1}] * number
        return float(self._run(lambda app: timed(self._noop.configure().batch_defer_async(*many))))

    def drain(self, number: int) -> float:
        def work(app: Any) -> Awaitable[float]:
            worker = app.run_worker_async(
                queues=["q"], concurrency=CONCURRENCY, install_signal_handlers=False
            )
            return until_empty(self, worker, number)

        return float(self._run(work))

    def left(self) -> int:
        return self.count("SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')")


class PgQueuer(Peer):
    """asyncpg, its own worker, batches of 100."""

    name = package = "pgqueuer"
    database = "postgresql"

    def _run(self, work: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        import asyncpg
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        async def body() -> Any:
            connection = await asyncpg.connect(self.dsn)
            driver = AsyncpgDriver(connection)
            try:
                return await work(driver, Queries(driver))
            finally:
                with contextlib.suppress(Exception):
                    await connection.close()

        return asyncio.run(body())

    def make(self) -> None:
        self._run(lambda driver, queries: queries.install())

    def enqueue_each(self, number: int) -> float:
        async def each(queries: Any) -> None:
            for _ in range(number):
                await queries.enqueue("noop", b"x", 0)

        return float(self._run(lambda driver, queries: timed(each(queries))))

    def enqueue_many(self, number: int) -> float:
        many = (["noop"] * number, [b"x"] * number, [0] * number)
        return float(self._run(lambda driver, queries: timed(queries.enqueue(*many))))

    def drain(self, number: int) -> float:
        def work(driver: Any, queries: Any) -> Awaitable[float]:
            from pgqueuer import PgQueuer as Manager

            manager = Manager(driver)

            @manager.entrypoint("noop")
            async def noop(job: Any) -> None:
                self.done += 1

            return until_empty(self, manager.qm.run(batch_size=CONCURRENCY), number)

        return float(self._run(work))

    def left(self) -> int:
        return self.count("SELECT count(*) FROM pgqueuer")


class Huey(Peer):
    """SqliteHuey without fsync; it takes a task out of the queue before it runs."""

    name = package = "huey"
    database = "sqlite"

    def make(self) -> None:
        from huey import SqliteHuey

        self._huey = SqliteHuey("bench", filename=str(self.url.database), results=False, fsync=False)

        @self._huey.task(name="noop")
        def noop(x: int) -> None:
            self.done += 1

        self._noop: Any = noop

    def enqueue_each(self, number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            self._noop(1)
        return time.perf_counter() - start

    enqueue_many = enqueue_each  # it has no other way

    def drain(self, number: int) -> float:
        consumer = self._huey.create_consumer(
            workers=1, periodic=False, initial_delay=0.01, check_worker_health=False
        )
        start = time.perf_counter()
        consumer.start()
        end = threading.Event()
        while self.done < number:
            end.wait(0.002)
        taken = time.perf_counter() - start
        consumer.stop(graceful=True)
        return taken

    def left(self) -> int:
        return 0


PEERS: Final[tuple[type[Peer], ...]] = (Procrastinate, PgQueuer, Huey)
