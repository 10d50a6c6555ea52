"""The late courier, as it happens between two real processes and a database."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from sqlalchemy import Engine

from fencedjobs.cli.demo.orders import Order
from fencedjobs.cli.demo.process import CourierFailed, CourierProcess
from fencedjobs.cli.demo.stage import Stage
from fencedjobs.cli.output import exact
from fencedjobs.store import Store
from fencedjobs.values import JobRecord

SHORT: Final = 1.0  # seconds of A's lease, which has to run out
LONG: Final = 60.0  # seconds of B's leases, which must not, however busy the machine is


@dataclass(frozen=True)
class Moment:
    """One line of the timeline; ``at`` is seconds since the start."""

    at: float
    who: str
    event: str
    order: str | None
    fence: int | None
    text: str
    until: str | None = None  #: the end of the lease that was claimed


@dataclass
class Story:
    """One run: what happened so far, and whom to tell."""

    stage: Stage
    engine: Engine
    orders: list[Order]
    listener: Callable[[Moment], None]
    began: float = 0.0
    moments: list[Moment] = field(default_factory=list)
    seen_before: JobRecord | None = None  #: the first job when all was done and A still stood still

    def __post_init__(self) -> None:
        self.store = Store(self.engine, schema=self.stage.schema)

    @property
    def first(self) -> str:
        """The id of the order that both couriers want."""
        return self.orders[0].id

    def refused(self) -> bool:
        """Whether A's completion was."""
        return any(moment.who == "A" and moment.event == "refused" for moment in self.moments)

    def tell(
        self, who: str, event: str, text: str, *, order: str | None = None, fence: int | None = None,
        clock: float | None = None, until: float | None = None,
    ) -> None:  # fmt: skip
        """Add a line to the timeline."""
        at = (time.monotonic() if clock is None else clock) - self.began
        moment = Moment(round(at, 3), who, event, order, fence, text, exact(until))
        self.moments.append(moment)
        self.listener(moment)

    def play(self, a: CourierProcess, b: CourierProcess) -> None:
        """A claims and is stopped; B takes over, and the rest; A comes back."""
        self.brief(a, late=True, ttl=SHORT)
        self.brief(b, late=False, ttl=LONG)
        self.began = time.monotonic()
        self._enqueue()
        claimed = self._a_claims_and_stops(a)
        self._b_delivers(b, claimed)
        self.seen_before = self.store.get(self.stage.job_id(self.first))
        self._a_comes_back(a, claimed)

    def _enqueue(self) -> None:
        jobs = [{"id": self.stage.job_id(o.id), "payload": o.body, "queue": self.stage.queue, "kind": "ship"}
                for o in self.orders]  # fmt: skip
        new = len(self.store.enqueue_many(jobs))
        twice = f"; {len(jobs) - new} more had an id that was there already" if new < len(jobs) else ""
        self.tell("shop", "enqueued", f"enqueues {new} orders{twice}")

    def _a_claims_and_stops(self, a: CourierProcess) -> dict[str, Any]:
        a.tell("go")
        claimed = expected(a.hear(), "claimed")
        self._event("A", claimed, f"claims {self.first} for {SHORT:g} s")
        a.stop()
        about = {**claimed, "event": "stopped", "clock": time.monotonic()}
        self._event("A", about, f"is stopped with the order in hand (SIGSTOP, pid {a.pid})")
        return claimed

    def _b_delivers(self, b: CourierProcess, claimed: dict[str, Any]) -> None:
        b.tell("go")

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

    def _a_comes_back(self, a: CourierProcess, claimed: dict[str, Any]) -> None:
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
        self.tell(who, event["event"], text, order=event["order"], fence=event.get("fence"),
                  clock=event["clock"], until=event.get("until"))  # fmt: skip

    def brief(self, courier: CourierProcess, *, late: bool, ttl: float) -> None:
        """Tell a courier its part, and wait until it is ready to play it."""
        stage = asdict(self.stage)
        courier.tell({"name": courier.name, "stage": stage, "order": self.first, "late": late, "ttl": ttl})
        expected(courier.hear(), "ready")


def hire(cleanup: ExitStack) -> tuple[CourierProcess, CourierProcess]:
    """Two couriers, started side by side."""
    return CourierProcess("A", cleanup), CourierProcess("B", cleanup)


def expected(event: dict[str, Any], name: str) -> dict[str, Any]:
    """The event, which has to be this one."""
    if event["event"] != name:
        raise CourierFailed(f"expected {name!r} of a courier, got {event}")
    return event
