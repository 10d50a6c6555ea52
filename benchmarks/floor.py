"""What our SQL costs by itself: each cell again, with the statements that it sent, by the bare driver alone.

Between the limit and this is what our SQL does more than the limit's: wider rows, more indexes, more round
trips. Between this and ours is what Python costs: SQLAlchemy, checks, values.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Engine, event

from benchmarks.bases import URLS, described, scratch
from benchmarks.cells import BATCH, acknowledged, seconds
from benchmarks.limit import Limit, limit_of
from benchmarks.ours import Ours
from fencedjobs import direct

Work = Callable[[Any], Any]


@dataclass(frozen=True)
class Cell:
    """Work for either side: what is there before, what is measured, and how much that is."""

    name: str
    number: int
    work: Work
    before: Work = lambda side: None


_IDS: Final = [f"message-{n:08}" for n in range(1000)]
CELLS: Final = (
    Cell("enqueue, each its own transaction", 1000, lambda side: side.enqueue_each(1000)),
    Cell("enqueue_many, 10,000", 10_000, lambda side: side.enqueue_many(10_000)),
    Cell(
        "claim 100, complete 100",
        10_000,
        lambda side: side.drain(10_000, BATCH),
        lambda side: side.enqueue_many(10_000),
    ),
    Cell("one at a time", 1000, lambda side: side.drain_singly(1000), lambda side: side.enqueue_many(1000)),
    Cell(
        "relay, each marked after its ack",
        1000,
        lambda side: side.relay(acknowledged, batch=16, each=True),
        lambda side: side.fill_outbox(1000),
    ),
    Cell(
        "relay, mark_every=100",
        10_000,
        lambda side: side.relay(acknowledged, batch=100, each=False),
        lambda side: side.fill_outbox(10_000),
    ),
    Cell("inbox, new", 1000, lambda side: side.accept_all(_IDS)),
    Cell(
        "inbox, duplicates",
        1000,
        lambda side: side.accept_all(_IDS),
        lambda side: side.accept_all(_IDS),
    ),
)


@dataclass
class Tape:
    """Everything that an engine asks of its driver, to be asked again."""

    steps: list[Callable[[Any], None]] = field(default_factory=list)

    def record(self, engine: Engine, work: Callable[[], Any]) -> None:
        """Do the work, and keep what is sent for it."""
        listeners: list[tuple[Any, str, Callable[..., None]]] = [
            (engine, "before_cursor_execute", self._executed),
            (engine, "commit", lambda connection: self.steps.append(_commit)),
            (engine, "rollback", lambda connection: self.steps.append(_rollback)),
            (engine.pool, "reset", lambda dbapi, record, state: self.steps.append(_rollback)),
        ]
        for target, name, listener in listeners:
            event.listen(target, name, listener)
        work()
        for target, name, listener in listeners:
            event.remove(target, name, listener)

    def _executed(
        self, connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        alone = getattr(connection.connection.dbapi_connection, "autocommit", None)

        def execute(driver: Any) -> None:
            if isinstance(alone, bool) and driver.autocommit != alone:
                driver.autocommit = alone
            cursor = driver.cursor()
            (cursor.executemany if many else cursor.execute)(statement, parameters)
            if cursor.description:
                cursor.fetchall()
            cursor.close()

        self.steps.append(execute)

    def play(self, driver: Any) -> None:
        """The same again, by a connection of the driver."""
        for step in self.steps:
            step(driver)


def _commit(driver: Any) -> None:
    driver.commit()


def _rollback(driver: Any) -> None:
    driver.rollback()


def measure(cell: Cell, limit: Limit, ours: Ours) -> tuple[float, float, float]:
    """Jobs, events or messages per second: of the limit, of ours, and of our SQL by the driver alone."""
    limit.clear()
    ours.clear()
    cell.before(limit)
    raw = seconds(lambda: cell.work(limit))
    ours.clear()
    before, tape = Tape(), Tape()
    before.record(ours.engine, lambda: cell.before(ours))
    own = seconds(lambda: tape.record(ours.engine, lambda: cell.work(ours)))
    ours.clear()
    pooled = ours.engine.raw_connection()
    before.play(pooled.driver_connection)
    alone = seconds(lambda: tape.play(pooled.driver_connection))
    pooled.invalidate()
    return cell.number / raw, cell.number / own, cell.number / alone


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floor", description=__doc__)
    parser.add_argument("--database", nargs="*", default=list(URLS), choices=URLS)
    parser.add_argument("--reps", type=int, default=3)
    options = parser.parse_args()
    for database in options.database:
        with scratch(URLS[database], "fj_floor") as url:
            limit, ours = limit_of(url), Ours(url)
            direct.tell(ours.engine)
            limit.make()
            ours.make()
            print(
                f"\n{described(url)}\n{'':36}{'limit/s':>10}{'our SQL/s':>10}{'ours/s':>10}   over the limit"
            )
            for cell in CELLS:
                runs = [measure(cell, limit, ours) for _ in range(options.reps)]
                raw, own, alone = (statistics.median(column) for column in zip(*runs, strict=True))
                shares = f"{alone / raw:>9.2f}{own / raw:>10.2f}"
                print(f"{cell.name:36}{raw:>10,.0f}{alone:>10,.0f}{own:>10,.0f}{shares}", flush=True)
            limit.close()
            ours.close()


if __name__ == "__main__":
    main()
