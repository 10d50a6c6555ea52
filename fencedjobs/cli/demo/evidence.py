"""What is evident in both databases, each read over a connection of its own, and what must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, select

from fencedjobs.cli.demo.invariants import Invariant
from fencedjobs.cli.demo.orders import Order
from fencedjobs.cli.demo.stage import DELIVERIES, DIES_WITH, STOCK, Stage
from fencedjobs.models import InboxMessage, tables
from fencedjobs.values import EventState


@dataclass(frozen=True)
class Sight:
    """One order at one moment: here in the shop's outbox, there in the warehouse."""

    order: str
    here: str | None  #: the state of its event
    there: bool  #: whether it is in the inbox
    stock: int

    def told(self) -> str:
        """In words."""
        there = "in the inbox" if self.there else "not in the inbox"
        return f"{self.order}: {self.here} here; {there} there, stock {self.stock}"

    def is_pending_here_and_done_there(self) -> bool:
        """The doubt that the chapter is about."""
        return self.here == EventState.PENDING and self.there


@dataclass(frozen=True)
class Outcome:
    """The rows of both databases in the end."""

    events: dict[str, str]  #: by order, the state of its event
    inbox: Sequence[Any]
    deliveries: Sequence[tuple[str, int]]  #: order and fence of each request, in the order they came
    stock: int


def see(shop: Engine, warehouse: Engine, stage: Stage, order: str) -> Sight:
    """Look at one order in both databases."""
    outcome = read(shop, warehouse, stage)
    there = any(row.id == stage.job_id(order) for row in outcome.inbox)
    return Sight(order, outcome.events.get(order), there, outcome.stock)


def read(shop: Engine, warehouse: Engine, stage: Stage) -> Outcome:
    """Read the events of this run, and all that the warehouse has."""
    events, inbox = stage.events(), tables(None)[InboxMessage.__tablename__]
    with shop.connect() as connection:
        rows = connection.execute(
            select(events.c.id, events.c.state).where(events.c.lane == stage.lane)
        ).all()
    with warehouse.connect() as connection:
        messages = connection.execute(select(inbox.c.id, inbox.c.duplicates, inbox.c.conflicts)).all()
        listed = select(DELIVERIES.c.order_id, DELIVERIES.c.fence).order_by(DELIVERIES.c.number)
        deliveries = [(row.order_id, row.fence) for row in connection.execute(listed)]
        stock = connection.scalar(select(STOCK.c.pieces)) or 0
    return Outcome({stage.order_id(row.id): row.state for row in rows}, messages, deliveries, stock)


def check(
    orders: Sequence[Order], stage: Stage, outcome: Outcome, sights: Sequence[Sight], exit_code: int | None
) -> list[Invariant]:
    """Judge the end, and what was seen after the death and after the cut."""
    wanted = {order.id: order for order in reversed(orders)}  # of an id that comes twice the first counts
    return [
        _all_sent(wanted, outcome),
        _stock(wanted, outcome),
        _once(wanted, stage, outcome),
        _death(outcome, sights, exit_code),
        _cut(outcome, sights),
    ]


def _all_sent(wanted: dict[str, Order], outcome: Outcome) -> Invariant:
    sent = [order for order, state in outcome.events.items() if state == EventState.SENT and order in wanted]
    other = len(outcome.events) - len(sent)
    found = f"{len(sent)} of {len(wanted)} sent" + (f", {other} others" if other else "")
    return Invariant(
        "every shipped order has one event, and it is sent", len(sent) == len(wanted) and not other, found
    )


def _stock(wanted: dict[str, Order], outcome: Outcome) -> Invariant:
    ordered = sum(order.qty for order in wanted.values())
    found = f"stock {outcome.stock}, ordered {ordered}"
    return Invariant("the stock is the sum of the orders", outcome.stock == ordered, found)


def _once(wanted: dict[str, Order], stage: Stage, outcome: Outcome) -> Invariant:
    duplicates = sum(row.duplicates for row in outcome.inbox)
    conflicts = sum(row.conflicts for row in outcome.inbox)
    times = len(outcome.deliveries)
    ids = Counter(stage.order_id(row.id) for row in outcome.inbox)
    holds = ids == Counter(wanted.keys()) and duplicates == times - len(wanted) and not conflicts
    found = f"{times} deliveries of {len(ids)} events: {duplicates} duplicates, {conflicts} conflicts"
    return Invariant("each event took effect once, however often it came", holds, found)


def _death(outcome: Outcome, sights: Sequence[Sight], exit_code: int | None) -> Invariant:
    name = "relay 1 died between ACK and mark; relay 2 sent the same id again"
    if not sights:
        return Invariant(name, False, "nobody has looked")
    fences = [fence for order, fence in outcome.deliveries if order == sights[0].order]
    rises = len(set(fences)) > 1 and fences == sorted(fences)
    holds = exit_code == DIES_WITH and sights[0].is_pending_here_and_done_there() and rises
    found = f"exit code {exit_code}; {sights[0].told()}; fences {fences}"
    return Invariant(name, holds, found)


def _cut(outcome: Outcome, sights: Sequence[Sight]) -> Invariant:
    name = "without an answer the event stayed pending, and was sent again"
    if len(sights) < 2:
        return Invariant(name, False, "the connection was not cut")
    times = sum(order == sights[1].order for order, _ in outcome.deliveries)
    found = f"{sights[1].told()}; delivered {times} times"
    return Invariant(name, sights[1].is_pending_here_and_done_there() and times > 1, found)
