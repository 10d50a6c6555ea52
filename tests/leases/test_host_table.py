"""The lease core on a table of the host: ``store.leases(Model)`` and ``uow.leases(Model)``."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from fencedjobs import InvalidValue, Lease, LeaseLost, Store, UnitOfWork
from fencedjobs.values import LeaseRecord
from tests.jobs.helpers import T, just_before, lost, refused
from tests.leases.host import Order, Pair, Parcel

OPEN = Order.done == 0


def test_a_lease_on_the_host_s_row_has_one_holder_until_its_end(orders: Engine, store: Store) -> None:
    leases = store.leases(Order)
    assert leases.claim(1, "a", ttl=30, now=T) == Lease(1, "a", 1, T + 30)
    assert leases.get(1) == LeaseRecord(1, "a", 1, T + 30)
    for now in (T, just_before(T + 30)):
        assert leases.claim(1, "b", ttl=30, now=now) is None
        assert leases.claim(1, "a", ttl=30, now=now) is None
    assert leases.claim(1, "b", ttl=30, now=T + 30) == Lease(1, "b", 2, T + 60)
    assert leases.get(2) == LeaseRecord(2, None, 0, 0.0)
    assert leases.claim(3, "a", ttl=30, now=T) is None
    assert leases.get(3) is None


def test_an_old_fence_is_refused_by_every_verb(orders: Engine, store: Store) -> None:
    leases = store.leases(Order)
    a = leases.claim(1, "same", ttl=10, now=T)
    b = leases.claim(1, "same", ttl=60, now=T + 10)
    assert a is not None
    assert b is not None
    before = leases.get(1)
    now = T + 11
    verbs: list[Any] = [
        lambda: leases.renew(a, ttl=30, now=now), lambda: leases.release(a),
        lambda: leases.settle(a, now=now, note="late"), lambda: leases.settle(a, now=now),
    ]  # fmt: skip
    for verb in verbs:
        error = lost(verb)
        assert error is not None
        assert (error.held, error.current) == (a, before)
    assert leases.check(a, now=now) is False
    assert leases.get(1) == before
    leases.settle(b, now=now, note="in time")
    with Session(orders) as session:
        assert session.get_one(Order, 1).note == "in time"


def test_settling_writes_the_row_and_gives_the_lease_back(orders: Engine, store: Store) -> None:
    leases = store.leases(Order, open=OPEN)
    lease = leases.claim(1, "a", ttl=30, now=T)
    assert lease is not None
    leases.settle(lease, now=just_before(T + 30), note="packed", done=1)
    assert leases.get(1) == LeaseRecord(1, None, 1, 0.0)
    with Session(orders) as session:
        order = session.get_one(Order, 1)
        assert (order.note, order.done) == ("packed", 1)
    assert leases.claim(1, "b", ttl=30, now=T + 99) is None, "it is not open any more"
    with pytest.raises(LeaseLost):
        leases.settle(lease, now=T + 1, note="twice")


def test_settling_at_the_end_is_too_late(orders: Engine, store: Store) -> None:
    leases = store.leases(Order)
    lease = leases.claim(1, "a", ttl=30, now=T)
    assert lease is not None
    for verb in (
        lambda: leases.settle(lease, now=T + 30, note="late"),
        lambda: leases.renew(lease, ttl=30, now=T + 30),
    ):
        with pytest.raises(LeaseLost):
            verb()
    assert leases.check(lease, now=T + 30) is False
    leases.release(lease)
    with Session(orders) as session:
        assert session.get_one(Order, 1).note is None


def test_what_is_not_open_any_more_can_neither_be_renewed_nor_settled(
    orders: Engine, sync_store: Store
) -> None:
    leases = sync_store.leases(Order, open=OPEN)
    lease = leases.claim(1, "a", ttl=30, now=T)
    assert lease is not None
    with Session(orders) as session:
        session.get_one(Order, 1).done = 1
        session.commit()
    assert leases.check(lease, now=T) is False
    for verb in (
        lambda: leases.renew(lease, ttl=30, now=T),
        lambda: leases.settle(lease, now=T, note="x"),
        lambda: leases.release(lease),
    ):
        with pytest.raises(LeaseLost):
            verb()


def test_settle_writes_no_fenced_column_and_no_key(orders: Engine, sync_store: Store) -> None:
    leases = sync_store.leases(Order)
    lease = leases.claim(1, "a", ttl=30, now=T)
    assert lease is not None
    for name in ("owner", "until", "fence", "id", "missing"):
        refused(name, leases.settle, lease, now=T, **{name: 1})
    assert leases.get(1) == LeaseRecord(1, "a", 1, T + 30)


def test_what_cannot_be_leased_is_refused(sync_store: Store) -> None:
    class Plain:
        pass

    for model in (Plain, Pair, "orders", None):
        with pytest.raises(InvalidValue):
            sync_store.leases(model)  # type: ignore[arg-type]


def test_a_claim_on_the_host_s_row_refuses_what_is_no_ttl_and_no_owner(
    orders: Engine, sync_store: Store
) -> None:
    leases = sync_store.leases(Order)
    for ttl in (0, -1, math.nan, math.inf):
        refused("ttl", leases.claim, 1, "a", ttl=ttl, now=T)
    refused("owner", leases.claim, 1, "x" * 256, ttl=1, now=T)
    refused("now", leases.claim, 1, "a", ttl=1, now=math.nan)
    assert leases.get(1) == LeaseRecord(1, None, 0, 0.0)


def test_a_text_may_be_the_key(orders: Engine, store: Store) -> None:
    leases = store.leases(Parcel)
    lease = leases.claim("p", ttl=30, now=T)
    assert lease == Lease("p", store.owner, 1, T + 30)
    assert leases.renew(lease, ttl=40, now=T).until == T + 40
    leases.release(lease)


def test_of_eight_claims_one_wins(orders: Engine, sync_store: Store) -> None:
    leases = sync_store.leases(Order)
    barrier = Barrier(8)

    def claim(n: int) -> Lease | None:
        barrier.wait()
        return leases.claim(1, f"w{n}", ttl=1, now=T + turn)

    for turn in range(4):
        with ThreadPoolExecutor(8) as threads:
            won = [lease for lease in threads.map(claim, range(8)) if lease is not None]
        assert [lease.fence for lease in won] == [turn + 1], won
        assert leases.get(1) == LeaseRecord(1, won[0].owner, turn + 1, T + turn + 1)


# --- in the caller's transaction ------------------------------------------------------------------


def test_settling_goes_with_the_caller_s_transaction(orders: Engine, shop: Store) -> None:
    lease = shop.leases(Order).claim(1, "a", ttl=30, now=T)
    assert lease is not None
    with Session(orders) as session:
        uow = UnitOfWork(session)
        session.add(Order(id=7))
        uow.leases(Order).settle(lease, now=T, note="packed")
        session.rollback()
        assert shop.leases(Order).get(1) == LeaseRecord(1, "a", 1, T + 30)
        session.add(Order(id=7))
        uow.leases(Order).settle(lease, now=T, note="packed")
        session.commit()
    assert shop.leases(Order).get(1) == LeaseRecord(1, None, 1, 0.0)
    assert shop.leases(Order).get(7) == LeaseRecord(7, None, 0, 0.0)


def test_claim_and_renew_are_not_offered_in_the_caller_s_transaction(orders: Engine) -> None:
    with Session(orders) as session:
        leases = UnitOfWork(session).leases(Order)
    assert not hasattr(leases, "claim")
    assert not hasattr(leases, "renew")


def test_the_instance_in_the_session_shows_what_the_verbs_wrote(orders: Engine, shop: Store) -> None:
    first = shop.leases(Order).claim(1, "a", ttl=30, now=T)
    second = shop.leases(Order).claim(2, "a", ttl=30, now=T)
    assert first is not None
    assert second is not None
    with Session(orders) as session:
        one, two = session.get_one(Order, 1), session.get_one(Order, 2)
        leases = UnitOfWork(session).leases(Order)
        assert leases.check(first, now=T) is True
        leases.settle(first, now=T, note="packed")
        leases.release(second)
        assert (one.owner, one.until, one.fence, one.note) == (None, 0.0, 1, "packed")
        assert (two.owner, two.until, two.fence) == (None, 0.0, 1)


def test_an_order_changed_and_settled_in_one_transaction_keeps_both(orders: Engine, shop: Store) -> None:
    lease = shop.leases(Order).claim(1, "a", ttl=30, now=T)
    assert lease is not None
    with Session(orders) as session:
        order = session.get_one(Order, 1)
        order.note = "by the ORM"
        UnitOfWork(session).leases(Order).settle(lease, now=T, done=1)
        session.commit()
        assert (order.note, order.done, order.owner) == ("by the ORM", 1, None)


def test_the_arguments_are_named_as_the_contract_says(orders: Engine, store: Store) -> None:
    leases = store.leases(Order, open=OPEN)
    assert leases.claim(pk=1, owner="a", ttl=30, now=T) == Lease(1, "a", 1, T + 30)
    assert leases.get(pk=1) == LeaseRecord(1, "a", 1, T + 30)
