"""A courier: a worker that claims orders and ships them."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import create_engine, insert

from fencedjobs.cli.demo.child import Commands, tell
from fencedjobs.cli.demo.stage import Stage
from fencedjobs.errors import LeaseLost
from fencedjobs.store import Store
from fencedjobs.values import JobLease


class Courier:
    """One worker with a store, a name, and the shop's shipments to write."""

    def __init__(self, name: str, stage: Stage) -> None:
        self.name = name
        self.stage = stage
        self.store = Store(create_engine(stage.url), schema=stage.schema)
        self.shipments = stage.shipments()

    def claim(self, ttl: float, order_id: str | None = None) -> JobLease | None:
        """Claim this order, or the next of the queue, and tell."""
        job_id = None if order_id is None else self.stage.job_id(order_id)
        lease = self.store.claim(self.name, ttl=ttl, id=job_id, queue=self.stage.queue)
        if lease is not None:
            self._tell("claimed", lease, until=lease.until)
        return lease

    def complete(self, lease: JobLease) -> None:
        """Ship: the shipment, the event for the warehouse and the completion commit together, or none."""
        order = lease.payload
        event = {"order": order["id"], "qty": order["qty"]}
        try:
            with self.store.completing(lease, result={"courier": self.name}) as uow:
                uow.session.execute(insert(self.shipments), self._shipment(lease))
                uow.outbox.add(lease.id, event, topic="warehouse", lane=self.stage.lane)
        except LeaseLost as lost:
            self._tell("refused", lease, error=type(lost).__name__, why=str(lost))
        else:
            self._tell("completed", lease)

    def be_late(self, order_id: str, ttl: float, commands: Commands) -> None:
        """Claim, wait for an answer from outside however long it takes, complete."""
        lease = self.claim(ttl, order_id)
        if lease is not None:
            commands.get()
            self.complete(lease)

    def deliver_all(self, order_id: str, ttl: float) -> None:
        """Ask for this order until it is given, then take the rest of the queue."""
        lease = self.claim(ttl, order_id)
        if lease is None:
            tell("nothing", order=order_id)
        while lease is None:
            time.sleep(0.02)
            lease = self.claim(ttl, order_id)
        while lease is not None:
            self.complete(lease)
            lease = self.claim(ttl)

    def _shipment(self, lease: JobLease) -> dict[str, Any]:
        order = lease.payload
        return {"order_id": order["id"], "qty": order["qty"], "courier": self.name, "fence": lease.fence}

    def _tell(self, event: str, lease: JobLease, **facts: Any) -> None:
        tell(event, order=self.stage.order_id(lease.id), fence=lease.fence, **facts)


def play(
    commands: Commands, *, name: str, stage: dict[str, Any], order: str, ttl: float, is_late: bool
) -> None:
    """Get ready, work when told to, tell that it is over."""
    courier = Courier(name, Stage(**stage))
    courier.store.get(courier.stage.job_id(order))  # connects, before any lease is counted
    tell("ready")
    commands.get()
    if is_late:
        courier.be_late(order, ttl, commands)
    else:
        courier.deliver_all(order, ttl)
    tell("finished")
