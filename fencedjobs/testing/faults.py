"""Planted faults: each mistake of the catalogue switched on by itself, and looked for.

    with planted("complete_by_id"):
        ...  # every store of this process has it now

A checker is worth what it catches, so `python -m fencedjobs.testing.faults --url …` plants one after
the other on an empty database and looks for each with the stage that must find it. Never plant one
where work is done.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from fencedjobs import enqueue, job_sql, leases, locks, row_leases, schema
from fencedjobs.errors import FencedJobsError
from fencedjobs.store import Store
from fencedjobs.testing import stages
from fencedjobs.testing.machines import Effort
from fencedjobs.testing.mistakes import FAULTS, Fault, patched
from fencedjobs.testing.model import Disagreement

SOUND: Final = 50  # examples that a store without a fault must pass before the hunt
_BUILDERS: Final[tuple[ModuleType, ...]] = (leases, job_sql, enqueue, row_leases, locks)


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


def hunt(name: str, store: Store, **options: Any) -> Caught | None:
    """Plant a fault and look for it with its stage, on empty tables; ``None`` if it was not caught."""
    effort, began = Effort(), time.monotonic()
    try:
        with planted(name):
            getattr(stages, FAULTS[name].stage)(store, effort, **options)
    except (Disagreement, FencedJobsError, DBAPIError) as seen:
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
    parser.add_argument("--only", nargs="*", default=list(FAULTS), choices=list(FAULTS), metavar="FAULT")
    asked = parser.parse_args(arguments)
    opened = [Store(create_engine(url)) for url in asked.url]
    for store in opened:
        schema.upgrade(store.transactions.engine)
        if not stages.is_empty(store):
            parser.error(f"there are jobs or locks in {store.transactions.engine.url!r}")
    names = (store.transactions.engine.url.get_backend_name() for store in opened)
    _write("fault", "what it does", "stage", *names)
    _write(*["---"] * (3 + len(opened)))
    good = [_sound(opened, asked)]
    good += [_line(FAULTS[name], opened, asked) for name in asked.only]
    for store in opened:
        store.transactions.engine.dispose()
    return 0 if all(good) else 1


def _sound(opened: list[Store], asked: argparse.Namespace) -> bool:
    """The line of a store without a fault, which all stages must pass; whether it did."""
    cells = []
    for store in opened:
        effort = Effort()
        try:
            stages.machine(store, effort, examples=min(asked.examples, SOUND), start=asked.seed)
            stages.races(store, Effort(), rounds=5)
            stages.transactions(store, Effort())
            cells.append(f"passed: {effort}")
        except Disagreement as blamed:
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
    options = {"examples": asked.examples, "start": asked.seed} if fault.stage == "machine" else {}
    caught = [hunt(fault.name, store, **options) for store in opened]
    occurs = [fault.occurs_on(store) for store in opened]
    cells = [
        str(one.effort) if one else "missed" if due else "cannot occur"
        for one, due in zip(caught, occurs, strict=True)
    ]
    _write(fault.name, fault.told, fault.stage, *cells)
    return [one is not None for one in caught] == occurs


if __name__ == "__main__":
    raise SystemExit(main())
