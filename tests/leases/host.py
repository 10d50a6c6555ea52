"""Tables of a host that are leased."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from sqlalchemy import Engine, ForeignKey, String
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


class Invoice(LeaseMixin, HostBase):
    """One that many rows of are claimed, in an order of its own; its key is one that the app makes."""

    __tablename__ = "host_invoices"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    number: Mapped[int]
    due: Mapped[int] = mapped_column(index=True)
    paid: Mapped[int] = mapped_column(default=0)


class Line(HostBase):
    """A row that refers to an invoice."""

    __tablename__ = "host_lines"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    invoice: Mapped[UUID] = mapped_column(ForeignKey("host_invoices.id"))


# --- one table for several classes ----------------------------------------------------------------


class Message(LeaseMixin, HostBase):
    __tablename__ = "host_messages"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    size: Mapped[int] = mapped_column(default=0)

    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "message"}  # noqa: RUF012


class Email(Message):
    subject: Mapped[str | None] = mapped_column(String(50))

    __mapper_args__ = {"polymorphic_identity": "email"}  # noqa: RUF012


class Newsletter(Email):
    __mapper_args__ = {"polymorphic_identity": "newsletter"}  # noqa: RUF012


class Sms(Message):
    __mapper_args__ = {"polymorphic_identity": "sms"}  # noqa: RUF012


# --- a table for each class, the lease in the parent's --------------------------------------------


class Task(LeaseMixin, HostBase):
    __tablename__ = "host_tasks"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    size: Mapped[int] = mapped_column(default=0)

    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "task"}  # noqa: RUF012


class Print(Task):
    __tablename__ = "host_prints"

    id: Mapped[int] = mapped_column(ForeignKey("host_tasks.id"), primary_key=True)
    pages: Mapped[int]

    __mapper_args__ = {"polymorphic_identity": "print"}  # noqa: RUF012


class Poster(Print):
    __mapper_args__ = {"polymorphic_identity": "poster"}  # noqa: RUF012


class Scan(Task):
    __tablename__ = "host_scans"

    id: Mapped[int] = mapped_column(ForeignKey("host_tasks.id"), primary_key=True)
    pages: Mapped[int]

    __mapper_args__ = {"polymorphic_identity": "scan"}  # noqa: RUF012


# --- a table for each class, the lease in the child's ---------------------------------------------


class Paper(HostBase):
    __tablename__ = "host_papers"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String(50))


class Contract(LeaseMixin, Paper):
    __tablename__ = "host_contracts"

    id: Mapped[int] = mapped_column(ForeignKey("host_papers.id"), primary_key=True)
    signed: Mapped[int] = mapped_column(default=0)


class Draft(Contract):
    """One that cannot be leased: nothing tells its rows from a contract's."""


class Machine(LeaseMixin, HostBase):
    """No table of its own."""

    __abstract__ = True


class Renamed(LeaseMixin, HostBase):
    """One that cannot be leased: the columns have other names."""

    __tablename__ = "host_renamed"

    id: Mapped[int] = mapped_column(primary_key=True)
    owner: Mapped[str | None] = mapped_column("held_by", String(50))


@contextmanager
def host_tables(engine: Engine) -> Iterator[None]:
    HostBase.metadata.create_all(engine)
    yield
    HostBase.metadata.drop_all(engine)
