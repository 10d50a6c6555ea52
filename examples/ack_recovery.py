"""Death right after the ACK: the relay dies, the event is sent again, and the stock counts it once.

    python examples/ack_recovery.py

Two databases: the shop's with the outbox, the warehouse's with the inbox and the stock. The relay runs
as a child process and is ended by the system's exit between the acknowledgement and the mark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencedjobs import Event, Store, schema
from fencedjobs.relay import dispatch

DIED = 73


class Base(DeclarativeBase):
    pass


class Stock(Base):
    __tablename__ = "stock_moves"

    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str]
    qty: Mapped[int]


class Request(Base):
    __tablename__ = "requests"

    id: Mapped[int] = mapped_column(primary_key=True)
    message: Mapped[str]


def receive(warehouse: Store, event: Event) -> bool:
    """The warehouse: the message and its effect in one transaction, the effect once."""
    with warehouse.begin() as uow:
        uow.session.add(Request(message=event.id))
        if uow.inbox.accept(event.id, event.payload, source="shop", fence=event.fence):
            uow.session.add(Stock(order=event.id, qty=event.payload["qty"]))
    return True


def relay(shop_url: str, warehouse_url: str, *, die: bool) -> None:
    shop, warehouse = Store(create_engine(shop_url)), Store(create_engine(warehouse_url))
    death: Any = (lambda event: os._exit(DIED)) if die else None
    dispatch(shop, lambda event: receive(warehouse, event), ttl=0.2, after_delivery=death)


def run_relay(shop_url: str, warehouse_url: str, *arguments: str) -> int:
    command = [sys.executable, __file__, "relay", shop_url, warehouse_url, *arguments]
    return subprocess.run(command, check=False).returncode


def observe(shop: Store, warehouse: Engine, when: str) -> tuple[int, int, int]:
    with Session(warehouse) as session:
        requests = session.scalar(select(func.count()).select_from(Request)) or 0
        stock = session.scalar(select(func.coalesce(func.sum(Stock.qty), 0))) or 0
    pending = len(shop.outbox.pending())
    print(f"{when:22} pending in the outbox: {pending}, requests seen: {requests}, stock: {stock}")
    return pending, requests, stock


def main(folder: str) -> None:
    urls = [f"sqlite:///{Path(folder) / name}.db" for name in ("shop", "warehouse")]
    engines = [create_engine(url) for url in urls]
    for engine in engines:
        schema.upgrade(engine)
    Base.metadata.create_all(engines[1])
    shop = Store(engines[0])
    with shop.begin() as uow:
        uow.outbox.add("order-7", {"qty": 7}, topic="warehouse")

    assert run_relay(*urls, "die") == DIED
    assert observe(shop, engines[1], "after the death") == (1, 1, 7)
    while observe(shop, engines[1], "sent again")[0]:  # the dead relay's lease of the lane runs out first
        assert run_relay(*urls) == 0
    assert observe(shop, engines[1], "in the end") == (0, 2, 7)


if __name__ == "__main__":
    if sys.argv[1:2] == ["relay"]:
        relay(sys.argv[2], sys.argv[3], die=sys.argv[4:] == ["die"])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
