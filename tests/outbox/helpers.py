"""Words that the tests of outbox, inbox and relay share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, insert, select
from sqlalchemy.orm import Session

from fencedjobs import Store
from fencedjobs.models import Base
from fencedjobs.values import Event, EventRecord

#: an instant like those that hosts have, with a fraction
T = 1_764_000_000.25

OUTBOX: Table = Base.metadata.tables["fenced_outbox"]
INBOX: Table = Base.metadata.tables["fenced_inbox"]

#: the host's own table
ORDERS = Table("orders", MetaData(), Column("id", String(40), primary_key=True), Column("qty", Integer))

SERVERS = ["postgresql", "mariadb"]


def add(store: Store, *names: str, lane: str = "default", now: float | None = None) -> None:
    """Events of these ids, the payload being the id."""
    for name in names:
        assert store.outbox.add(name, name, topic="t", lane=lane, now=now) == name


def ids(events: Iterable[Event]) -> list[str]:
    return [event.id for event in events]


def event(store: Store, id: str) -> EventRecord:
    """The event as it is now, which must be there."""
    record = store.outbox.get(id)
    assert record is not None, f"there is no event {id!r}"
    return record


def states(store: Store, *names: str) -> list[str]:
    return [event(store, name).state.value for name in names]


def rows(engine: Engine, table: Table) -> list[tuple[Any, ...]]:
    """The whole table as it is."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]


@contextmanager
def host_table(engine: Engine) -> Iterator[None]:
    ORDERS.create(engine)
    yield
    ORDERS.drop(engine)


def order(session: Session, id: str) -> None:
    """A business row."""
    session.execute(insert(ORDERS).values(id=id, qty=7))
