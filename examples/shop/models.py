"""The shop's tables. fencedjobs has its own, beside them in the same database."""

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    qty: Mapped[int]


class Shipment(Base):
    """What the worker has packed."""

    __tablename__ = "shipments"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str] = mapped_column(String(64), ForeignKey("orders.id"))
    qty: Mapped[int]


class StockMove(Base):
    """What the inbox has applied. As a rule this is another service, with a database of its own."""

    __tablename__ = "stock_moves"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str] = mapped_column(String(64))
    qty: Mapped[int]
