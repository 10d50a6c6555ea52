"""Planted faults: each mistake of the catalogue switched on by itself, and looked for.

    with planted("complete_by_id"):
        ...  # every store of this process has it now

A checker is worth what it catches, so `python -m fencedjobs.testing.faults --url …` plants one after
the other on an empty database and looks for each with the stage that must find it. Never plant one
where work is done.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from fencedjobs import (
    enqueue,
    guards,
    inbox,
    job_sql,
    lanes,
    leases,
    locks,
    outbox,
    row_leases,
    schema,
)
from fencedjobs.errors import FencedJobsError
from fencedjobs.store import Store
from fencedjobs.testing import event_mistakes, event_stages, mistakes, stages
from fencedjobs.testing.machines import Effort
from fencedjobs.testing.planting import FAULTS, Fault, patched
from fencedjobs.testing.ways import SHORTEST

RANDOM: Final = (stages.machine, event_stages.outbox)
OTHERS: Final = (
    stages.races,
    stages.transactions,
    event_stages.inbox_races,
    event_stages.guards,
    event_stages.conflicts,
    event_stages.mended,
    event_stages.unknown,
    event_stages.clocks,
    event_stages.plans,
)
SOUND: Final = 20  # examples that a store without a fault must pass before the hunt
CATALOGUE: Final[tuple[ModuleType, ...]] = (mistakes, event_mistakes)  # importing them fills FAULTS
_BUILDERS: Final = (leases, job_sql, enqueue, row_leases, locks, outbox, lanes, inbox, guards)


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have this mistake in every store of the process."""
    with patched(FAULTS[name].patches()):
        _forget_statements()
        try:
            yield
        finally:
            _forget_statements()


def _forget_statements() -> None:
    """Statements are built once and remembered."""
    for module in _BUILDERS:
        for found in vars(module).values():
            if hasattr(found, "cache_clear"):
                found.cache_clear()


# --- finding them ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caught:
    """What it took to find a fault, and what was seen: an answer or a row that is wrong, or an error."""

    effort: Effort
    seconds: float
    seen: BaseException


def options(fault: Fault, examples: int, start: int, *, known: bool = True) -> dict[str, Any]:
    """What its stage is told of how much to try: the random ones have a seed.

    ``known``: the machine goes the shortest way first, which is known; else it is all chance.
    """
    how: dict[str, Any] = {"examples": examples, "start": start} if fault.look in RANDOM else {}
    return how | ({"way": SHORTEST[fault.name]} if known and fault.name in SHORTEST else {})


def hunt(name: str, store: Store, **how: Any) -> Caught | None:
    """Plant a fault and look for it with its stage, on empty tables; ``None`` if it was not caught."""
    effort, began = Effort(), time.monotonic()
    try:
        with planted(name):
            FAULTS[name].look(store, effort, **how)
    except (AssertionError, FencedJobsError, DBAPIError) as seen:
        return Caught(effort, time.monotonic() - began, seen)
    finally:
        stages.emptied(store)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Plant each fault on each database, and print as a table what it took to catch it."""
    parser = argparse.ArgumentParser(
        prog="python -m fencedjobs.testing.faults", description=main.__doc__,
        epilog="The exit code is 1 if a fault was missed, or a sound store blamed.",
    )  # fmt: skip
    parser.add_argument("--url", action="append", required=True, help="an empty database; may be repeated")
    parser.add_argument("--examples", type=int, default=300, help="at most, of the machine for one fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--random", action="store_true", help="go no way that is known beforehand")
    parser.add_argument("--only", nargs="*", default=list(FAULTS), choices=list(FAULTS), metavar="FAULT")
    asked = parser.parse_args(arguments)
    logging.getLogger("fencedjobs").setLevel(logging.CRITICAL)  # relays tell of each failure
    opened = [Store(create_engine(url)) for url in asked.url]
    for store in opened:
        schema.upgrade(store.transactions.engine)
        if not stages.is_empty(store):
            parser.error(f"there are rows in {store.transactions.engine.url!r}")
    names = (store.transactions.engine.url.get_backend_name() for store in opened)
    _write("fault", "what it does", "stage", *names)
    _write(*["---"] * (3 + len(opened)))
    good = [_sound(opened, asked)]
    good += [_line(FAULTS[name], opened, asked) for name in asked.only]
    for store in opened:
        store.transactions.engine.dispose()
    return 0 if all(good) else 1


def sound(store: Store, examples: int, start: int) -> Effort:
    """Run all stages with no fault planted; what the random ones took. A store that is blamed raises."""
    effort = Effort()
    for stage in RANDOM:
        stage(store, effort, examples=examples, start=start)
        stages.emptied(store)
    for other in OTHERS:
        other(store, Effort())
        stages.emptied(store)
    return effort


def _sound(opened: list[Store], asked: argparse.Namespace) -> bool:
    """The line of a store without a fault, which all stages must pass; whether it did."""
    cells = []
    for store in opened:
        try:
            cells.append(f"passed: {sound(store, min(asked.examples, SOUND), asked.seed)}")
        except AssertionError as blamed:
            cells.append(f"blamed: {blamed}")
        finally:
            stages.emptied(store)
    _write("none", "the store as it is", "all", *cells)
    return all(cell.startswith("passed") for cell in cells)


def _write(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def _line(fault: Fault, opened: list[Store], asked: argparse.Namespace) -> bool:
    """One line of the table; whether the fault was caught wherever it can occur, and nowhere else."""
    how = options(fault, asked.examples, asked.seed, known=not asked.random)
    caught = [hunt(fault.name, store, **how) for store in opened]
    occurs = [fault.occurs_on(store) for store in opened]
    cells = [
        str(one.effort) if one else "missed" if due else "cannot occur"
        for one, due in zip(caught, occurs, strict=True)
    ]
    _write(fault.name, fault.told, fault.stage, *cells)
    return [one is not None for one in caught] == occurs


if __name__ == "__main__":
    raise SystemExit(main())
