"""The ORM cannot walk around the fence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, delete, func, insert, select, update
from sqlalchemy.orm import Session

from fencedjobs import Store, UnfencedWrite
from fencedjobs.models import Job, Lock
from tests.jobs.helpers import T, claimed
from tests.leases.host import Order

FLUSHED: dict[str, Callable[[Session], Any]] = {
    "owner of a host's row": lambda session: setattr(session.get_one(Order, 1), "owner", "thief"),
    "owner set to none": lambda session: setattr(session.get_one(Order, 2), "owner", None),
    "until of a host's row": lambda session: setattr(session.get_one(Order, 1), "until", 9e9),
    "fence of a host's row": lambda session: setattr(session.get_one(Order, 1), "fence", 0),
    "fence by an expression": lambda session: setattr(session.get_one(Order, 1), "fence", Order.fence - 1),
    "deleting a host's row": lambda session: session.delete(session.get_one(Order, 1)),
    "inserting with a fence": lambda session: session.add(Order(id=9, fence=5)),
    "inserting with an owner": lambda session: session.add(Order(id=9, owner="a")),
    "inserting with an end": lambda session: session.add(Order(id=9, until=5.0)),
    "merging a fence": lambda session: session.merge(Order(id=1, fence=7)),
    "state of a job": lambda session: setattr(session.get_one(Job, "j"), "state", "done"),
    "payload of a job": lambda session: setattr(session.get_one(Job, "j"), "payload", "1"),
    "attempts of a job": lambda session: setattr(session.get_one(Job, "j"), "attempts", 0),
    "deleting a job": lambda session: session.delete(session.get_one(Job, "j")),
    "deleting a lock": lambda session: session.delete(session.get_one(Lock, "l")),
}

EXECUTED: dict[str, Callable[[Session], Any]] = {
    "update of the owner": lambda s: s.execute(update(Order).values(owner="thief")),
    "update of the end": lambda s: s.execute(update(Order).where(Order.id == 1).values({Order.until: 9e9})),
    "update of the fence": lambda s: s.execute(update(Order).values({"fence": Order.fence + 1})),
    "update in order": lambda s: s.execute(update(Order).ordered_values((Order.note, "x"), (Order.fence, 0))),
    "update by parameters": lambda s: s.execute(update(Order).where(Order.id == 1), {"owner": "thief"}),
    "update by primary keys": lambda s: s.execute(update(Order), [{"id": 1, "note": "x", "fence": 0}]),
    "delete": lambda s: s.execute(delete(Order).where(Order.id == 1)),
    "update of jobs": lambda s: s.execute(update(Job).values(state="ready")),
    "delete of jobs": lambda s: s.execute(delete(Job)),
    "query.update": lambda s: s.query(Order).update({"owner": "thief"}),
    "query.update by columns": lambda s: s.query(Order).update({Order.fence: 0}),
    "query.delete": lambda s: s.query(Order).filter(Order.id == 1).delete(),
    "update of locks": lambda s: s.execute(update(Lock).values(owner=None)),
}


def prepare(store: Store) -> None:
    store.leases(Order).claim(1, "a", ttl=30, now=T)
    store.enqueue("j", now=T)
    claimed(store, "j")
    store.locks.claim("l", "a", ttl=30, now=T)


def rows(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        tables = (Order.__table__, Job.__table__, Lock.__table__)
        return [connection.execute(select(table).order_by(*table.primary_key)).all() for table in tables]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("write", FLUSHED)
def test_a_flush_of_fenced_columns_is_refused_in_any_session(orders: Engine, shop: Store, write: str) -> None:
    if write == "owner set to none":
        shop.leases(Order).claim(2, "a", ttl=30, now=T)
    prepare(shop)
    before = rows(orders)
    with Session(orders) as session:
        FLUSHED[write](session)
        with pytest.raises(UnfencedWrite):
            session.flush()
        session.rollback()
    assert rows(orders) == before


def test_bulk_statements_of_the_orm_are_refused_in_the_store_s_sessions(orders: Engine, shop: Store) -> None:
    prepare(shop)
    before = rows(orders)
    for name, write in EXECUTED.items():
        try:
            with shop.begin() as uow:
                write(uow.session)
        except UnfencedWrite:
            pass
        else:
            raise AssertionError(f"{name} was not refused")
        assert rows(orders) == before, name


def test_the_refusal_rolls_back_all_of_the_transaction(orders: Engine, shop: Store) -> None:
    prepare(shop)

    def unfenced() -> None:
        with shop.begin() as uow:
            uow.session.add(Order(id=5))
            uow.session.flush()
            uow.session.get_one(Order, 1).fence = 0

    with pytest.raises(UnfencedWrite, match=r"Order\.fence"):
        unfenced()
    with Session(orders) as session:
        assert session.scalar(select(func.count()).select_from(Order)) == 2


def test_what_is_not_fenced_is_the_host_s_own(orders: Engine, shop: Store) -> None:
    prepare(shop)
    with shop.begin() as uow:
        session = uow.session
        session.get_one(Order, 1).note = "mine"
        session.add(Order(id=3, note="new"))
        session.flush()
        session.execute(update(Order).where(Order.id == 2).values(note="bulk"))
        session.execute(update(Order), [{"id": 3, "done": 1}])
        session.execute(insert(Order), [{"id": 4}])
    with Session(orders) as session:
        seen = session.execute(select(Order.id, Order.note, Order.done, Order.fence).order_by(Order.id)).all()
    assert [tuple(one) for one in seen] == [
        (1, "mine", 0, 1),
        (2, "bulk", 0, 0),
        (3, "new", 1, 0),
        (4, None, 0, 0),
    ]


def test_the_refusal_is_for_the_store_s_sessions_alone(orders: Engine, shop: Store) -> None:
    """A good guest: statements in the host's own sessions are the host's affair, as the docs say."""
    with shop.begin():
        pass
    with Session(orders) as session:
        session.execute(update(Order).values(note="x", owner=None))
        session.commit()
