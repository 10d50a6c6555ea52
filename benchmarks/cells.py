"""What is measured: each cell the same work by the raw limit and by us, taken in turn on one database."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import URL

from benchmarks import growth, other, ours, processes
from benchmarks.bases import URLS
from benchmarks.limit import Limit, limit_of
from benchmarks.ours import Ours
from fencedjobs.dialects import async_url

BATCH: Final = 100
THREADS: Final = 100  # handlers at once in a Worker
TASKS: Final = 100
WRITERS: Final = 16  # handlers at once that need a connection each


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
    """Medians of one cell: rates of both sides, or a measure by itself that must stay below its goal."""

    cell: str
    database: str
    ratio: float
    goal: float
    rates: tuple[float, float] | None = None  #: of the limit, and ours

    @property
    def reached(self) -> bool:
        return self.ratio <= self.goal if self.rates is None else self.ratio >= self.goal

    def row(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "cell": self.cell,
            "database": self.database,
            "ratio": round(self.ratio, 3),
            "goal": self.goal,
            "reached": self.reached,
        }

    def __str__(self) -> str:
        rates = ("", "") if self.rates is None else tuple(f"{rate:,.0f}" for rate in self.rates)
        sign, mark = ("≤", "≥")[self.rates is not None], "" if self.reached else "  not reached"
        return (
            f"{self.database:11} {self.cell:43}{rates[0]:>10}{rates[1]:>10}"
            f"{self.ratio:>8.2f}  {sign} {self.goal:.2f}{mark}"
        )


def measure(cell: Cell, bench: Bench, database: str, repetitions: int) -> Result:
    """Medians of the rates of both sides, taken in turn, each on empty tables."""
    rates: dict[Side, list[float]] = {cell.limit: [], cell.ours: []}
    for _ in range(repetitions):
        for side, into in rates.items():
            bench.clear()
            number, seconds = side(bench)
            into.append(number / seconds)
    limit, own = (statistics.median(each) for each in rates.values())
    return Result(cell.name, database, own / limit, cell.goals[database], (limit, own))


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
        threads = WRITERS if handler == "writes" else THREADS
        return n, processes.timed(bench.url, count, ours.work, handler, threads)

    return run


def _work_async(number: int) -> Side:
    def run(bench: Bench) -> Measured:
        n, driver = bench.n(number), async_url(bench.url).drivername
        bench.ours.enqueue_kind(n)
        return n, processes.timed(bench.url, 1, ours.work_async, driver, TASKS)

    return run


def acknowledged(event: Any) -> bool:
    return True


def _relay(side: str, number: int, *, batch: int, each: bool) -> Side:
    def run(bench: Bench) -> Measured:
        n, contender = bench.n(number), getattr(bench, side)
        contender.fill_outbox(n)
        return n, seconds(lambda: contender.relay(acknowledged, batch=batch, each=each))

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


RAW_DRAIN: Final = _raw_work(20_000, 1, processes.raw)
OWN_DRAIN: Final = _work(20_000, 1)
CELLS: Final = (
    Cell(
        "enqueue, each its own transaction",
        _goals(0.75, 0.70, 0.30),
        _each("limit", 2000),
        _each("ours", 2000),
    ),
    Cell("enqueue_many, 10,000", _goals(0.55, 0.55, 0.25), _bulk("limit"), _bulk("ours")),
    Cell(
        "claim 100, complete 100",
        _goals(0.75, 0.75, 0.35),
        _drain("limit", 20_000),
        _drain("ours", 20_000),
    ),
    Cell(
        "one at a time",
        _goals(0.85, 0.85, 0.40),
        _drain("limit", 2000, singly=True),
        _drain("ours", 2000, singly=True),
    ),
    Cell("Worker, 1 process", _goals(0.55, 0.60, 0.20), RAW_DRAIN, OWN_DRAIN),
    Cell("Worker, 2 processes", _goals(0.50, 0.50), _raw_work(40_000, 2, processes.raw), _work(40_000, 2)),
    Cell("AsyncWorker, 1 process", _goals(0.50), RAW_DRAIN, _work_async(20_000)),
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


Wanted = Callable[[str], bool]  # whether a cell of this name is to be measured


def run(database: str, url: URL, wanted: Wanted, repetitions: int, scale: float) -> Iterator[Result]:
    """The cells that have a raw limit."""
    limit, own = limit_of(url), Ours(url)
    try:
        limit.make()
        own.make()
        bench = Bench(url, limit, own, scale)
        for cell in CELLS:
            if database in cell.goals and wanted(cell.name):
                yield measure(cell, bench, database, repetitions)
        bench.clear()
    finally:
        limit.close()
        own.close()


def bounds(database: str, url: URL, wanted: Wanted, scale: float) -> Iterator[Result]:
    """The cells that have a bound of their own, on the tables that `run` has made."""
    if wanted(name := "wake-up of an idle worker, ms"):
        goal = 10.0 if database == "postgresql" else 1e3 * other.POLL / 2 + 10.0
        yield Result(name, database, other.wake_up(url, max(5, int(30 * scale))), goal)
    if wanted(name := "memory after 100,000 jobs / after 10,000"):
        many = max(20_000, int(100_000 * scale))
        yield Result(name, database, other.memory(url, many // 10, many), 1.05)


def grown(database: str, wanted: Wanted, scale: float) -> Iterator[Result]:
    """A claim beside many rows, over a claim from an empty table."""
    for scenario in growth.SCENARIOS:
        rows = growth.LEASED if scenario == "leased" else int(1_000_000 * scale)
        names = [f"claim {limit} beside {rows:,} {scenario}" for limit in (1, BATCH)]
        if any(map(wanted, names)):
            ratios = growth.ratios(URLS[database], scenario, rows)
            yield from (Result(name, database, ratio, 1.3) for name, ratio in zip(names, ratios, strict=True))
