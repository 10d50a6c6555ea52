"""What is measured: each cell the same work by the raw limit and by us, taken in turn on one database."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import URL, make_url

from benchmarks import ours, processes
from benchmarks.bases import URLS, engine_of, scratch
from benchmarks.limit import Limit, limit_of
from benchmarks.ours import Ours
from fencedjobs.dialects import async_url

BATCH: Final = 100
THREADS: Final = 100  # handlers at once in a Worker; PostgreSQL itself allows 100 connections
TASKS: Final = 100


@dataclass
class Bench:
    """Both sides on one database; ``scale`` shortens the work."""

    url: URL
    limit: Limit
    ours: Ours
    scale: float

    def n(self, number: int) -> int:
        return max(BATCH, int(number * self.scale))

    def clear(self) -> None:
        self.limit.clear()
        self.ours.clear()


Measured = tuple[int, float]  # how much work in how many seconds
Side = Callable[[Bench], Measured]


@dataclass(frozen=True)
class Cell:
    """One row of the table, and the ratio to reach on each database."""

    name: str
    goals: Mapping[str, float]
    limit: Side
    ours: Side


@dataclass(frozen=True)
class Result:
    """Medians of one cell."""

    cell: str
    database: str
    limit: float
    ours: float
    goal: float

    @property
    def ratio(self) -> float:
        return self.ours / self.limit

    @property
    def reached(self) -> bool:
        return self.ratio >= self.goal

    def row(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "cell": self.cell,
            "database": self.database,
            "limit": round(self.limit),
            "ours": round(self.ours),
            "ratio": round(self.ratio, 3),
            "goal": self.goal,
            "reached": self.reached,
        }


def measure(cell: Cell, bench: Bench, database: str, repetitions: int) -> Result:
    """Medians of the rates of both sides, taken in turn, each on empty tables."""
    rates: dict[Side, list[float]] = {cell.limit: [], cell.ours: []}
    for _ in range(repetitions):
        for side, into in rates.items():
            bench.clear()
            number, seconds = side(bench)
            into.append(number / seconds)
    limit, own = (statistics.median(each) for each in rates.values())
    return Result(cell.name, database, limit, own, cell.goals[database])


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --- the cells ------------------------------------------------------------------------------------


def _each(side: str, number: int) -> Side:
    def run(bench: Bench) -> Measured:
        n = bench.n(number)
        return n, seconds(lambda: getattr(bench, side).enqueue_each(n))

    return run


def _bulk(side: str) -> Side:
    def run(bench: Bench) -> Measured:
        return 10_000, seconds(lambda: getattr(bench, side).enqueue_many(10_000))

    return run


def _drain(side: str, number: int, *, singly: bool = False) -> Side:
    def run(bench: Bench) -> Measured:
        n, contender = bench.n(number), getattr(bench, side)
        contender.enqueue_many(n)
        if singly:
            return n, seconds(lambda: contender.drain_singly(n))
        return n, seconds(lambda: contender.drain(n, BATCH))

    return run


def _raw_work(number: int, count: int, work: processes.Work) -> Side:
    def run(bench: Bench) -> Measured:
        n = bench.n(number)
        bench.limit.enqueue_many(n)
        return n, processes.timed(bench.url, count, work, BATCH)

    return run


def _work(number: int, count: int, handler: str = "noop") -> Side:
    def run(bench: Bench) -> Measured:
        n = bench.n(number)
        bench.ours.enqueue_kind(n)
        return n, processes.timed(bench.url, count, ours.work, handler, THREADS)

    return run


def _work_async(number: int) -> Side:
    def run(bench: Bench) -> Measured:
        n, driver = bench.n(number), async_url(bench.url).drivername
        bench.ours.enqueue_kind(n)
        return n, processes.timed(bench.url, 1, ours.work_async, driver, TASKS)

    return run


def _sent(event: Any) -> bool:
    return True


def _relay(side: str, number: int, *, batch: int, each: bool) -> Side:
    def run(bench: Bench) -> Measured:
        n, contender = bench.n(number), getattr(bench, side)
        contender.fill_outbox(n)
        return n, seconds(lambda: contender.relay(_sent, batch=batch, each=each))

    return run


def _inbox(side: str, number: int, *, duplicates: bool) -> Side:
    def run(bench: Bench) -> Measured:
        n, contender = bench.n(number), getattr(bench, side)
        ids = [f"message-{i:08}" for i in range(n)]
        if duplicates:
            contender.accept_all(ids)
        return n, seconds(lambda: contender.accept_all(ids))

    return run


def _goals(postgresql: float, mariadb: float | None = None, sqlite: float | None = None) -> dict[str, float]:
    goals = {"postgresql": postgresql, "mariadb": mariadb, "sqlite": sqlite}
    return {name: goal for name, goal in goals.items() if goal is not None}


CELLS: Final = (
    Cell("enqueue, each its own transaction", _goals(0.75, 0.70, 0.30), _each("limit", 2000), _each("ours", 2000)),
    Cell("enqueue_many, 10,000", _goals(0.55, 0.55, 0.25), _bulk("limit"), _bulk("ours")),
    Cell("claim 100, complete 100", _goals(0.75, 0.75, 0.35), _drain("limit", 20_000), _drain("ours", 20_000)),
    Cell(
        "one at a time",
        _goals(0.85, 0.85, 0.40),
        _drain("limit", 2000, singly=True),
        _drain("ours", 2000, singly=True),
    ),
    Cell(
        "Worker, 1 process", _goals(0.55, 0.60, 0.20), _raw_work(20_000, 1, processes.raw), _work(20_000, 1)
    ),
    Cell("Worker, 2 processes", _goals(0.50, 0.50), _raw_work(40_000, 2, processes.raw), _work(40_000, 2)),
    Cell("AsyncWorker, 1 process", _goals(0.50), _raw_work(20_000, 1, processes.raw), _work_async(20_000)),
    Cell(
        "Worker, business row in ctx.transaction()",
        _goals(0.80, 0.80, 0.50),
        _raw_work(4000, 1, processes.raw_with_business),
        _work(4000, 1, "writes"),
    ),
    Cell(
        "relay, each marked after its ack",
        _goals(0.80, 0.75, 0.40),
        _relay("limit", 3000, batch=16, each=True),
        _relay("ours", 3000, batch=16, each=True),
    ),
    Cell(
        "relay, mark_every=100",
        _goals(0.50, 0.50, 0.25),
        _relay("limit", 10_000, batch=100, each=False),
        _relay("ours", 10_000, batch=100, each=False),
    ),
    Cell(
        "inbox, new",
        _goals(0.70, 0.70, 0.30),
        _inbox("limit", 2000, duplicates=False),
        _inbox("ours", 2000, duplicates=False),
    ),
    Cell(
        "inbox, duplicates",
        _goals(0.40, 0.40, 0.30),
        _inbox("limit", 2000, duplicates=True),
        _inbox("ours", 2000, duplicates=True),
    ),
)


def run(database: str, wanted: Callable[[Cell], bool], repetitions: int, scale: float) -> list[Result]:
    """All cells of one database, in a database of their own."""
    results = []
    with scratch(URLS[database], "fj_bench") as url:
        limit, own = limit_of(url), Ours(url)
        try:
            limit.make()
            own.make()
            bench = Bench(url, limit, own, scale)
            for cell in CELLS:
                if database in cell.goals and wanted(cell):
                    results.append(measure(cell, bench, database, repetitions))
                    print_result(results[-1])
        finally:
            limit.close()
            own.close()
    return results


def print_result(result: Result) -> None:
    mark = "" if result.reached else "  not reached"
    print(
        f"{result.database:11} {result.cell:43}{result.limit:>10,.0f}{result.ours:>10,.0f}"
        f"{result.ratio:>7.2f}  (goal {result.goal:.2f}){mark}",
        flush=True,
    )
