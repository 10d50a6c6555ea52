"""Leases on classes that inherit from mapped ones: each claims its own rows, whichever table they are in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, or_, true
from sqlalchemy.orm import Session

from fencedjobs import InvalidValue, Store, UnfencedWrite, UnitOfWork
from fencedjobs.values import LeaseRecord
from tests.jobs.helpers import T, lost, refused
from tests.leases.host import (
    Contract,
    Draft,
    Email,
    Machine,
    Message,
    Newsletter,
    Paper,
    Poster,
    Print,
    Renamed,
    Scan,
    Sms,
    Task,
    host_tables,
)

ROWS: tuple[Any, ...] = (
    Message(id=1), Email(id=2, subject="x"), Newsletter(id=3), Sms(id=4), Email(id=5, subject="y"),
    Task(id=1), Print(id=2, pages=1), Scan(id=3, pages=1), Poster(id=4, pages=2), Print(id=5, pages=2),
    Paper(id=1, title="a"), Contract(id=2, title="b"), Contract(id=3, title="c"),
)  # fmt: skip


@pytest.fixture
def rows(engine: Engine) -> Iterator[Engine]:
    with host_tables(engine):
        with Session(engine) as session:
            for row in ROWS:
                session.merge(row)
            session.commit()
        yield engine
        engine.dispose()


def taken(store: Store, model: Any, condition: Any = None, **options: Any) -> list[int]:
    claims = store.leases(model, **options)
    found = claims.claim_where(true() if condition is None else condition, limit=9, ttl=30, now=T)
    return [lease.id for lease in found]


WHOSE = [
    (Email, [2, 3, 5]), (Newsletter, [3]), (Sms, [4]), (Message, [1, 2, 3, 4, 5]),
    (Print, [2, 4, 5]), (Poster, [4]), (Scan, [3]), (Task, [1, 2, 3, 4, 5]), (Contract, [2, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "ids"), WHOSE, ids=[model.__name__ for model, _ in WHOSE])
def test_a_class_claims_its_own_rows_and_those_of_its_subclasses(
    rows: Engine, sync_store: Store, model: Any, ids: list[int]
) -> None:
    claims = sync_store.leases(model)
    by_key = [id for id in range(1, 6) if claims.claim(id, "a", ttl=30, now=T)]
    assert by_key == ids
    for id in ids:
        claims.release(sync_store.leases(model).renew(_held(claims, id), ttl=60, now=T))
    assert taken(sync_store, model) == ids


def _held(claims: Any, id: int) -> Any:
    from fencedjobs import Lease

    record: LeaseRecord = claims.get(id)
    assert record.owner is not None
    return Lease(record.id, record.owner, record.fence, record.until)


def test_a_lease_of_another_class_s_row_is_lost_to_this_one(rows: Engine, store: Store) -> None:
    """By the guard, not only by the claim."""
    for parent, here, there, id in ((Message, Email, Sms, 4), (Task, Print, Scan, 3)):
        lease = store.leases(parent).claim(id, "a", ttl=30, now=T)
        assert lease is not None
        assert store.leases(there).check(lease, now=T) is True
        verbs = store.leases(here)
        assert verbs.check(lease, now=T) is False
        assert lost(verbs.renew, lease, ttl=30, now=T) is not None
        assert lost(verbs.settle, lease, size=9, now=T) is not None
        assert lost(verbs.release, lease) is not None
        store.leases(parent).settle(lease, now=T, size=7)


def test_conditions_on_each_of_the_tables(rows: Engine, store: Store) -> None:
    """Of joined classes the lease is in one table, and what is asked may be in another, or in both."""
    assert taken(store, Email, Email.subject == "y") == [5]
    assert taken(store, Print, Print.pages == 2) == [4, 5]
    assert taken(store, Poster, or_(Print.pages == 2, Task.size == 1)) == [], "taken by now"
    assert taken(store, Print, or_(Print.pages == 7, Task.size == 0), open=Print.pages == 1) == [2]
    assert taken(store, Scan, Scan.pages == 2) == []
    assert taken(store, Contract, Paper.title == "c") == [3]
    assert taken(store, Contract, Contract.title != "c", open=Contract.signed == 0) == [2]


def test_an_open_condition_on_the_child_s_table_is_in_the_guard(rows: Engine, store: Store) -> None:
    prints = store.leases(Print, open=Print.pages == 1)
    assert prints.claim(5, "a", ttl=30, now=T) is None
    lease = prints.claim(2, "a", ttl=30, now=T)
    assert lease is not None
    with Session(rows) as session:
        session.get_one(Print, 2).pages = 9
        session.commit()
    assert prints.check(lease, now=T) is False
    assert lost(prints.settle, lease, now=T, size=1) is not None
    store.leases(Print).settle(lease, now=T, size=1)


def test_settling_writes_the_table_that_has_the_lease(rows: Engine, sync_store: Store) -> None:
    lease = sync_store.leases(Print).claim(2, "a", ttl=30, now=T)
    assert lease is not None
    refused("pages", sync_store.leases(Print).settle, lease, now=T, pages=5)
    with Session(rows) as session:
        page = session.get_one(Print, 2)
        page.pages = 8  # the child's own columns are the session's to write, in the same transaction
        UnitOfWork(session).leases(Print).settle(lease, now=T, size=5)
        session.commit()
        assert (page.pages, page.size, page.owner, page.until, page.fence) == (8, 5, None, 0.0, 1)


def test_the_orm_cannot_write_a_subclass_s_lease(rows: Engine, sync_store: Store) -> None:
    for model, id in ((Newsletter, 3), (Poster, 4), (Contract, 2)):
        for name, value in (("owner", "thief"), ("until", 9e9), ("fence", 7)):
            with Session(rows) as session:
                setattr(session.get_one(model, id), name, value)
                with pytest.raises(UnfencedWrite, match=name):
                    session.flush()
        with Session(rows) as session:
            session.delete(session.get_one(model, id))
            with pytest.raises(UnfencedWrite):
                session.flush()


def test_what_cannot_be_told_is_refused_when_the_leases_are_asked_for(sync_store: Store) -> None:
    for model, why in (
        (Draft, "polymorphic_on"), (Machine, "no mapped class"), (Paper, "LeaseMixin"),
        (Renamed, "otherwise"),
    ):  # fmt: skip
        with pytest.raises(InvalidValue, match=why):
            sync_store.leases(model)
    for model, foreign in ((Print, Scan.pages == 1), (Task, Print.pages == 1), (Sms, Task.size == 1)):
        refused("open", sync_store.leases, model, open=foreign)
        refused("condition", sync_store.leases(model).claim_where, foreign, limit=1, ttl=1, now=T)
    refused("order_by", sync_store.leases(Print).claim_where, true(), order_by=Print.pages, limit=1, ttl=1)
