"""The late courier: a worker that lost its lease comes back, and its completion is refused.

    python examples/late_courier.py

The clock is passed in, so nothing waits. The orders are invented.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencedjobs import LeaseLost, Store, schema


class Base(DeclarativeBase):
    pass


class Shipment(Base):
    __tablename__ = "shipments"

    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str]
    qty: Mapped[int]
    packed_by: Mapped[str]


def main(url: str) -> None:
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    schema.upgrade(engine)
    store = Store(engine)

    store.enqueue("order-7", {"qty": 7}, kind="pack", now=0)
    first = store.claim("A", ttl=1000, now=0)
    assert first is not None
    print(f"   0  A claims order-7, fence {first.fence}, until {first.until:g}")

    assert store.claim("B", ttl=1000, now=999.999) is None
    second = store.claim("B", ttl=1000, now=1000)
    assert second is not None
    print(f"1000  B claims order-7, fence {second.fence}: A's lease ended at this very instant")

    try:
        with store.completing(first, now=1001) as uow:
            uow.session.add(Shipment(order=first.id, qty=first.payload["qty"], packed_by="A"))
    except LeaseLost as lost:
        print(f"1001  A is refused: {lost}")

    with store.completing(second, result={"shipped": True}, now=1002) as uow:
        uow.session.add(Shipment(order=second.id, qty=second.payload["qty"], packed_by="B"))
    print("1002  B completes order-7, together with its shipment")

    with Session(engine) as session:
        shipped = session.execute(select(func.count(), func.min(Shipment.packed_by))).one()
    assert tuple(shipped) == (1, "B"), shipped
    print("one shipment, packed by B")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(f"sqlite:///{Path(folder) / 'shop.db'}")
