"""What must hold after the story, each read from the database over a connection of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, select

from fencedjobs.cli.demo.orders import Order
from fencedjobs.cli.demo.stage import Stage
from fencedjobs.values import JobRecord, JobState


@dataclass(frozen=True)
class Invariant:
    """A sentence, whether it holds, and what was found."""

    name: str
    holds: bool
    found: str


@dataclass(frozen=True)
class Facts:
    """The rows of the run as they are now, by order."""

    jobs: dict[str, Any]
    shipments: Sequence[Any]


def read(engine: Engine, stage: Stage) -> Facts:
    """Read the jobs and the shipments of this run."""
    jobs, shipments = stage.jobs(), stage.shipments()
    with engine.connect() as connection:
        rows = connection.execute(select(jobs).where(jobs.c.queue == stage.queue)).all()
        shipped = connection.execute(select(shipments).order_by(shipments.c.number)).all()
    return Facts({stage.order_id(row.id): row for row in rows}, shipped)


def check(orders: Sequence[Order], facts: Facts, before: JobRecord | None, refused: bool) -> list[Invariant]:
    """Judge the facts; ``before`` is the first job as it was when A came back."""
    wanted = {order.id: order for order in reversed(orders)}  # of an id that comes twice the first counts
    first = orders[0].id
    return [
        _all_done(wanted, facts),
        _shipped_once(wanted, facts),
        _fences(wanted, facts, first),
        _late_changed_nothing(facts, first, before, refused),
    ]


def _all_done(wanted: dict[str, Order], facts: Facts) -> Invariant:
    done = [order for order, row in facts.jobs.items() if row.state == JobState.DONE and order in wanted]
    other = len(facts.jobs) - len(done)
    found = f"{len(done)} of {len(wanted)} done" + (f", {other} others" if other else "")
    return Invariant("every order is done, once", len(done) == len(wanted) and not other, found)


def _shipped_once(wanted: dict[str, Order], facts: Facts) -> Invariant:
    fences = {order: row.fence for order, row in facts.jobs.items()}
    expected = Counter((order.id, order.qty, fences.get(order.id)) for order in wanted.values())
    shipped = Counter((row.order_id, row.qty, row.fence) for row in facts.shipments)
    wrong = list((shipped - expected) + (expected - shipped))
    pieces = sum(row.qty for row in facts.shipments)
    found = f"{len(facts.shipments)} shipments with {pieces} pieces for {len(wanted)} orders"
    if wrong:
        found += f"; wrong (order, pieces, fence): {wrong[:3]}"
    return Invariant("every order has one shipment, with the fence that completed it", not wrong, found)


def _fences(wanted: dict[str, Order], facts: Facts, first: str) -> Invariant:
    fences = {order: row.fence for order, row in facts.jobs.items()}
    expected = {order: 2 if order == first else 1 for order in wanted}
    wrong = [order for order in expected if fences.get(order) != expected[order]]
    found = f"{first}: {fences.get(first)}" + (
        f", the {len(wanted) - 1} others: 1" if len(wanted) > 1 else ""
    )
    if wrong:
        found = "wrong: " + ", ".join(f"{o}: {fences.get(o)}, not {expected[o]}" for o in wrong[:3])
    return Invariant("fences: 2 for the order that was claimed twice, 1 for the others", not wrong, found)


def _late_changed_nothing(facts: Facts, first: str, before: JobRecord | None, refused: bool) -> Invariant:
    name = "A's late completion was refused and changed nothing"
    row, by_a = facts.jobs.get(first), [s for s in facts.shipments if s.courier == "A"]
    if not refused or by_a:
        return Invariant(name, False, f"refused: {refused}; shipments by A: {len(by_a)}")
    if row is None or before is None:
        return Invariant(name, False, f"there is no job for {first}")
    marks = ("state", "owner", "last_owner", "fence", "until", "attempts", "finished_at")
    changed = [mark for mark in marks if getattr(row, mark) != getattr(before, mark)]
    found = f"{first} is {row.state} by {row.last_owner} with fence {row.fence}, as before A came back"
    return Invariant(name, not changed, f"changed: {', '.join(changed)}" if changed else found)
