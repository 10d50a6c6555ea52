"""Tables of a host that are leased."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencedjobs import LeaseMixin


class HostBase(DeclarativeBase):
    pass


class Order(LeaseMixin, HostBase):
    """A leased table with a whole number as its key, and columns of its own."""

    __tablename__ = "host_orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str | None] = mapped_column(String(50))
    done: Mapped[int] = mapped_column(default=0)


class Parcel(LeaseMixin, HostBase):
    """One with a text as its key."""

    __tablename__ = "host_parcels"

    code: Mapped[str] = mapped_column(String(40), primary_key=True)


class Pair(LeaseMixin, HostBase):
    """One that cannot be leased: a key of two columns."""

    __tablename__ = "host_pairs"

    left: Mapped[int] = mapped_column(primary_key=True)
    right: Mapped[int] = mapped_column(primary_key=True)


@contextmanager
def host_tables(engine: Engine) -> Iterator[None]:
    HostBase.metadata.create_all(engine)
    yield
    HostBase.metadata.drop_all(engine)
