"""Death right after the ACK, as it happens between two relays, a warehouse and two databases."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from sqlalchemy import Engine

from fencedjobs.cli.demo.evidence import Sight, see
from fencedjobs.cli.demo.orders import Order
from fencedjobs.cli.demo.process import ChildFailed, ChildProcess
from fencedjobs.cli.demo.stage import DIES_WITH, Stage
from fencedjobs.cli.demo.timeline import Timeline

SHORT: Final = 1.0  # seconds of the first relay's lease, which has to run out
LONG: Final = 60.0  # seconds of the second one's


@dataclass
class Delivery:
    """One run of the second chapter."""

    stage: Stage
    shop: Engine
    warehouse: Engine
    orders: list[Order]
    timeline: Timeline
    sights: list[Sight] = field(default_factory=list)  #: after the death, and after the cut
    exit_code: int | None = None  #: of the relay that died

    def __post_init__(self) -> None:
        known = {order.id: order for order in reversed(self.orders)}  # the first of an id counts
        ids = list(dict.fromkeys(order.id for order in self.orders))
        self._pieces = {id: known[id].qty for id in ids}
        self.first = ids[0]  #: the order whose relay dies
        self.cut = ids[min(1, len(ids) - 1)]  #: the order whose first answer is cut off

    def open(self, warehouse: ChildProcess) -> None:
        """Let the warehouse open, while there is time."""
        url = self.warehouse.url.render_as_string(hide_password=False)
        # Of a single order the first delivery is that of the dying relay, which needs its answer.
        delivery = 1 if self.cut != self.first else 2
        warehouse.brief("warehouse", "warehouse", url=url, cut=self.cut, delivery=delivery)

    def play(self, warehouse: ChildProcess, dying: ChildProcess, second: ChildProcess) -> None:
        """The first relay dies after an acknowledgement; the second one sends again, and the rest."""
        port = warehouse.expect("ready")["port"]
        part = {"stage": asdict(self.stage), "to": f"http://127.0.0.1:{port}/events"}
        dying.brief("relay 1", "relay", **part, ttl=SHORT, dies=True)
        second.brief("relay 2", "relay", **part, ttl=LONG, dies=False)
        dying.expect("ready")
        second.expect("ready")
        self._dies(dying, warehouse)
        second.tell("go")
        second.hear_until("finished", lambda event: self._second_did(event, second, warehouse))

    def _dies(self, relay: ChildProcess, warehouse: ChildProcess) -> None:
        relay.tell("go")
        self._event(relay, sending := relay.expect("sending"), self._sends(sending))
        acknowledged = relay.expect("acknowledged")
        self._received(warehouse)
        self.exit_code = relay.exit_code()
        text = f"has the ACK, and DIES before its mark: exit code {self.exit_code}"
        self._event(relay, acknowledged | {"event": "died"}, text)
        if self.exit_code != DIES_WITH:
            raise ChildFailed(f"{relay.name} should have ended with {DIES_WITH}, not {self.exit_code}")
        self._look(self.first)

    def _second_did(self, event: dict[str, Any], relay: ChildProcess, warehouse: ChildProcess) -> None:
        is_told = event.get("order") in (None, self.first, self.cut)
        match event["event"]:
            case "nothing":
                self._event(relay, event, "gets nothing yet: relay 1's lease still runs")
            case "sending" if is_told:
                self._event(relay, event, self._sends(event))
            case "acknowledged" if is_told:
                self._received(warehouse)
                self._event(relay, event, "has the ACK, and marks the event sent")
            case "acknowledged":
                stock = warehouse.expect("received")["stock"]
                text = f"delivers {event['order']}: ACK, marked; stock {stock}"
                self._event(relay, event | {"event": "delivered"}, text)
            case "failed":
                self._received(warehouse)
                self._event(relay, event, f"NO ACK: {event['why']}")
                self._look(event["order"])
                relay.tell("go on")

    def _sends(self, event: dict[str, Any]) -> str:
        order = event["order"]
        again = "again, under the same id" if event["attempt"] > 1 else f"({self._pieces[order]} pieces)"
        return f"sends {order} {again}"

    def _received(self, warehouse: ChildProcess) -> None:
        event = warehouse.expect("received")
        stock, order = event["stock"], event["order"]
        effect = (
            f"new: stock {stock - self._pieces[order]} -> {stock}"
            if event["new"]
            else f"a duplicate: stock stays {stock}"
        )
        answer = "acknowledges" if event["answers"] else "CUTS the connection, no answer"
        self._event(warehouse, event, f"{effect}; {answer}")

    def _look(self, order: str) -> None:
        sight = see(self.shop, self.warehouse, self.stage, order)
        self.sights.append(sight)
        self.timeline.tell("evidence", "seen", sight.told(), order=order)

    def _event(self, who: ChildProcess, event: dict[str, Any], text: str) -> None:
        self.timeline.tell(
            who.name,
            event["event"],
            text,
            order=event.get("order"),
            fence=event.get("fence"),
            clock=event["clock"],
        )
