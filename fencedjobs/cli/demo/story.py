"""The late courier, as it happens between two real processes and a database."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from sqlalchemy import Engine

from fencedjobs.cli.demo.orders import Order
from fencedjobs.cli.demo.process import ChildProcess
from fencedjobs.cli.demo.stage import Stage
from fencedjobs.cli.demo.timeline import Timeline
from fencedjobs.store import Store
from fencedjobs.values import JobRecord

T = TypeVar("T")

SHORT: Final = 1.0  # seconds of A's lease, which has to run out
LONG: Final = 60.0  # seconds of B's leases, which must not, however busy the machine is


@dataclass
class Story:
    """One run of the first chapter."""

    stage: Stage
    engine: Engine
    orders: list[Order]
    timeline: Timeline
    seen_before: JobRecord | None = None  #: the first job when all was done and A still stood still

    def __post_init__(self) -> None:
        self.store = Store(self.engine, schema=self.stage.schema)

    @property
    def first(self) -> str:
        """The id of the order that both couriers want."""
        return self.orders[0].id

    def refused(self) -> bool:
        """Whether A's completion was."""
        return self.timeline.has("A", "refused")

    def play(self, a: ChildProcess, b: ChildProcess, meanwhile: Callable[[], T]) -> T:
        """A claims and is stopped; B takes over, and the rest; A comes back.

        ``meanwhile`` is called while A's lease has to run out, and its answer returned.
        """
        part = {"stage": asdict(self.stage), "order": self.first}
        a.brief("courier A", "courier", **part, name="A", ttl=SHORT, is_late=True)
        b.brief("courier B", "courier", **part, name="B", ttl=LONG, is_late=False)
        a.expect("ready")
        b.expect("ready")
        self.timeline.begin()
        self._enqueue()
        claimed = self._a_claims_and_stops(a)
        b.tell("go")
        answer = meanwhile()
        self._b_delivers(b, claimed)
        self.seen_before = self.store.get(self.stage.job_id(self.first))
        self._a_comes_back(a, claimed)
        return answer

    def _enqueue(self) -> None:
        jobs = [{"id": self.stage.job_id(o.id), "payload": o.body, "queue": self.stage.queue, "kind": "ship"}
                for o in self.orders]  # fmt: skip
        new = len(self.store.enqueue_many(jobs))
        twice = f"; {len(jobs) - new} more had an id that was there already" if new < len(jobs) else ""
        self.timeline.tell("shop", "enqueued", f"enqueues {new} orders{twice}")

    def _a_claims_and_stops(self, a: ChildProcess) -> dict[str, Any]:
        a.tell("go")
        claimed = a.expect("claimed")
        self._event("A", claimed, f"claims {self.first} for {SHORT:g} s")
        a.stop()
        about = {**claimed, "event": "stopped", "clock": time.monotonic()}
        self._event("A", about, f"is stopped with the order in hand (SIGSTOP, pid {a.pid})")
        return claimed

    def _b_delivers(self, b: ChildProcess, claimed: dict[str, Any]) -> None:
        def each(event: dict[str, Any]) -> None:
            if event["event"] == "claimed" and event["order"] == self.first:
                end = min(claimed["clock"] + SHORT, event["clock"])
                about = {**claimed, "event": "expired", "clock": end}
                self._event("A", about, f"its lease of {self.first} runs out; A does not know")
            self._event("B", event, self._b_did(event))

        b.hear_until("finished", each)

    def _b_did(self, event: dict[str, Any]) -> str:
        order = event["order"]
        match event["event"]:
            case "nothing":
                return f"asks for {order}, gets nothing: A's lease still runs"
            case "claimed":
                return f"claims {order}"
            case "completed":
                return f"completes and ships {order} in one transaction"
            case _:
                return f"is refused: {event}"

    def _a_comes_back(self, a: ChildProcess, claimed: dict[str, Any]) -> None:
        about = {**claimed, "event": "continued", "clock": time.monotonic()}
        self._event("A", about, f"goes on (SIGCONT), completes and ships {self.first}")
        a.tell("the customer has signed")
        a.go_on()
        a.hear_until("finished", lambda event: self._event("A", event, self._a_did(event)))

    def _a_did(self, event: dict[str, Any]) -> str:
        if event["event"] == "refused":
            return f"REFUSED, and its shipment is rolled back: {event['error']}: {event['why']}"
        return f"{event['event']} {event['order']}"

    def _event(self, who: str, event: dict[str, Any], text: str) -> None:
        self.timeline.tell(who, event["event"], text, order=event["order"], fence=event.get("fence"),
                  clock=event["clock"], until=event.get("until"))  # fmt: skip


def hire(cleanup: ExitStack) -> tuple[ChildProcess, ChildProcess]:
    """Two couriers, started side by side."""
    return ChildProcess("courier A", cleanup), ChildProcess("courier B", cleanup)
