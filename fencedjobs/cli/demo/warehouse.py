"""The warehouse: an HTTP server with a database of its own.

It takes an event in one transaction: the id into the inbox, the pieces into the stock. Told so, it cuts
the connection after the commit, without an answer.
"""

from __future__ import annotations

import json
from collections import Counter
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from sqlalchemy import create_engine, insert, select, update

from fencedjobs import schema
from fencedjobs.cli.demo.child import Commands, tell
from fencedjobs.cli.demo.stage import DELIVERIES, STOCK
from fencedjobs.store import Store


class Warehouse(TCPServer):
    """Listens on a free local port; ``cut`` is the order, and which delivery of it gets no answer."""

    def __init__(self, url: str, cut: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Delivery)
        engine = create_engine(url)
        schema.upgrade(engine)
        STOCK.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(insert(STOCK), {"pieces": 0})
        self.store = Store(engine)
        self._cut = cut
        self._seen: Counter[str] = Counter()

    def receive(self, event: dict[str, Any]) -> bool:
        """Apply the event once; whether to answer."""
        order, qty = event["payload"]["order"], event["payload"]["qty"]
        with self.store.begin() as uow:
            uow.session.execute(insert(DELIVERIES), {"order_id": order, "fence": event["fence"]})
            is_new = uow.inbox.accept(event["id"], event["payload"], source="shop", fence=event["fence"])
            if is_new:
                uow.session.execute(update(STOCK).values(pieces=STOCK.c.pieces + qty))
            stock = uow.session.scalar(select(STOCK.c.pieces))
        self._seen[order] += 1
        answers = (order, self._seen[order]) != self._cut
        tell("received", order=order, new=is_new, stock=stock, answers=answers)
        return answers


class _Delivery(BaseHTTPRequestHandler):
    server: Warehouse

    def do_POST(self) -> None:
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.server.receive(event):
            return  # the connection is closed as it is
        answer = json.dumps({"id": event["id"]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the parent is told what happens."""


def play(commands: Commands, *, url: str, cut: str, delivery: int) -> None:
    """Open, tell where, and serve until the parent ends this process."""
    warehouse = Warehouse(url, (cut, delivery))
    tell("ready", port=warehouse.server_address[1])
    warehouse.serve_forever()
