"""Named leases: singletons and leaders."""

from __future__ import annotations

import math

import pytest

from fencedjobs import InvalidValue, Lease, LeaseLost, Store
from fencedjobs.values import LeaseRecord
from tests.jobs.helpers import T, just_after, just_before, lost, refused


def locked(store: Store, name: str, owner: str = "a", *, ttl: float = 30, now: float = T) -> Lease:
    lease = store.locks.claim(name, owner, ttl=ttl, now=now)
    assert lease is not None, f"{name!r} is held: {store.locks.get(name)}"
    return lease


def test_a_name_need_not_be_made_first(store: Store) -> None:
    assert store.locks.get("cron") is None
    assert store.locks.claim("cron", "a", ttl=30, now=T) == Lease("cron", "a", 1, T + 30)
    assert store.locks.get("cron") == LeaseRecord("cron", "a", 1, T + 30)


def test_a_lock_has_one_holder_until_its_end(store: Store) -> None:
    a = locked(store, "cron", "a")
    for now in (T, just_before(T + 30)):
        assert store.locks.claim("cron", "b", ttl=30, now=now) is None
        assert store.locks.claim("cron", "a", ttl=30, now=now) is None
        assert store.locks.check(a, now=now) is True
    assert store.locks.check(a, now=T + 30) is False
    b = locked(store, "cron", "b", now=T + 30)
    assert (b.fence, b.until) == (2, T + 60)
    assert store.locks.check(a, now=T + 30) is False
    assert store.locks.check(b, now=T + 30) is True


def test_a_late_holder_cannot_renew_or_release(store: Store) -> None:
    a = locked(store, "cron", "same", ttl=10)
    b = locked(store, "cron", "same", ttl=60, now=T + 10)
    before = store.locks.get("cron")
    error = lost(store.locks.renew, a, ttl=30, now=T + 11)
    assert error is not None
    assert (error.held, error.current) == (a, before)
    with pytest.raises(LeaseLost):
        store.locks.release(a)
    assert store.locks.get("cron") == before
    store.locks.release(b)


def test_renewal_moves_the_end_and_does_not_revive(store: Store) -> None:
    a = locked(store, "cron", ttl=10)
    again = store.locks.renew(a, ttl=10, now=just_before(T + 10))
    assert (again.fence, again.until) == (1, just_before(T + 10) + 10)
    assert store.locks.get("cron") == LeaseRecord("cron", "a", 1, again.until)
    with pytest.raises(LeaseLost):
        store.locks.renew(a, ttl=10, now=again.until)
    assert store.locks.claim("cron", "b", ttl=1, now=just_after(again.until)) is not None


def test_a_released_lock_keeps_its_fence(store: Store) -> None:
    a = locked(store, "cron")
    store.locks.release(a)
    assert store.locks.get("cron") == LeaseRecord("cron", None, 1, 0.0)
    with pytest.raises(LeaseLost):
        store.locks.release(a)
    assert locked(store, "cron", "b").fence == 2


def test_a_lock_can_be_released_after_its_end(store: Store) -> None:
    a = locked(store, "cron", ttl=1)
    store.locks.release(a)
    assert store.locks.check(a, now=T) is False


def test_names_are_told_apart_byte_for_byte(store: Store) -> None:
    names = ["a", "A", "a ", "á", "a\u0301", "ß", "ss"]
    assert [locked(store, name).fence for name in names] == [1] * 7
    assert [locked(store, name, now=T + 30).fence for name in names] == [2] * 7


def test_what_cannot_be_a_lock_is_refused(store: Store) -> None:
    for name in ("", "x" * 256, "a\x00b", "\ud800"):
        refused("name", store.locks.claim, name, "a", ttl=30, now=T)
        refused("name", store.locks.get, name)
    for ttl in (0, -1, math.nan, math.inf):
        refused("ttl", store.locks.claim, "cron", "a", ttl=ttl, now=T)
    refused("owner", store.locks.claim, "cron", "", ttl=30, now=T)
    refused("now", store.locks.claim, "cron", "a", ttl=30, now=math.nan)
    assert store.locks.get("cron") is None
    a = locked(store, "cron")
    with pytest.raises(InvalidValue):
        store.locks.renew(a, ttl=0, now=T)


def test_the_default_owner_is_that_of_the_store(store: Store) -> None:
    lease = store.locks.claim("cron", ttl=30)
    assert lease is not None
    assert lease.owner == store.owner


def test_the_arguments_are_named_as_the_contract_says(store: Store) -> None:
    assert store.locks.claim(name="cron", owner="a", ttl=30, now=T) == Lease("cron", "a", 1, T + 30)
    assert store.locks.get(name="cron") == LeaseRecord("cron", "a", 1, T + 30)
