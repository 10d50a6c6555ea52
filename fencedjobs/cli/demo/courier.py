"""A courier: a worker process of its own. Told what to do, and telling what it did, by JSON lines.

It needs neither click nor rich, only what any worker of an application needs.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

from sqlalchemy import create_engine, insert

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
        """Ship: the shipment and the completion commit together, or neither does."""
        try:
            with self.store.completing(lease, result={"courier": self.name}) as uow:
                uow.session.execute(insert(self.shipments), self._shipment(lease))
        except LeaseLost as lost:
            self._tell("refused", lease, error=type(lost).__name__, why=str(lost))
        else:
            self._tell("completed", lease)

    def be_late(self, order_id: str, ttl: float, commands: queue.Queue[Any]) -> None:
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


def tell(event: str, **facts: Any) -> None:
    """One line to the parent. The clock is monotonic and the same in every process of this machine."""
    print(json.dumps({"event": event, "clock": time.monotonic(), **facts}), flush=True)


def commands_from_parent() -> queue.Queue[Any]:
    """The parent's lines. When the pipe closes, the parent is gone, and so is this process."""
    heard: queue.Queue[Any] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            heard.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return heard


def main() -> None:
    """Get ready for the brief, play the part when told to, tell that it is over."""
    # The parent started this process with its signals held. SIGINT stays so: Ctrl-C is the parent's affair.
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])
    commands = commands_from_parent()
    brief = commands.get()
    courier = Courier(brief["name"], Stage(**brief["stage"]))
    courier.store.get(courier.stage.job_id(brief["order"]))  # connects, before any lease is counted
    tell("ready")
    commands.get()
    if brief["late"]:
        courier.be_late(brief["order"], brief["ttl"], commands)
    else:
        courier.deliver_all(brief["order"], brief["ttl"])
    tell("finished")


if __name__ == "__main__":
    main()
