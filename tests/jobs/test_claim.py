"""What a claim takes, and what it leaves."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import Engine

from fencedjobs import JobState, Store
from tests.jobs.helpers import T, claimed, ids, just_before, refused, row


def test_a_claim_hands_over_everything_that_a_handler_needs(store: Store) -> None:
    store.enqueue("order-7", {"qty": 7}, kind="pack", queue="shop", deadline=T + 1000, now=T)
    lease = store.claim("a", ttl=30, queue="shop", now=T)
    assert lease is not None
    seen = {name: getattr(lease, name) for name in lease.__dataclass_fields__}
    assert seen == {
        "id": "order-7", "owner": "a", "fence": 1, "until": T + 30, "attempt": 1,
        "payload": {"qty": 7}, "kind": "pack", "queue": "shop", "deadline": T + 1000,
        "progress": None, "waited": 0.0,
    }  # fmt: skip


def test_a_claim_writes_what_it_says(store: Store) -> None:
    store.enqueue("j", now=T)
    claimed(store, "j", "a", ttl=30)
    expected = {"state": JobState.LEASED, "owner": "a", "until": T + 30, "fence": 1, "attempts": 1}
    assert row(store, "j", *expected) == expected
    assert row(store, "j", "last_owner") == {"last_owner": "a"}


def test_nothing_to_claim_is_none(store: Store) -> None:
    assert store.claim("a", ttl=30, now=T) is None
    assert store.claim("a", ttl=30, id="j", now=T) is None
    assert store.claim_many("a", ttl=30, limit=10, now=T) == []


def test_a_live_lease_is_never_handed_over(store: Store) -> None:
    store.enqueue("j", now=T)
    claimed(store, "j", "a", ttl=30)
    for now in (T, T + 1, just_before(T + 30)):
        assert store.claim("b", ttl=30, now=now) is None
        assert store.claim("b", ttl=30, id="j", now=now) is None
        assert store.claim("a", ttl=30, id="j", now=now) is None, "the owner's name is no right"
    assert row(store, "j", "owner", "fence", "until") == {"owner": "a", "fence": 1, "until": T + 30}


def test_a_job_that_is_over_is_not_claimed(store: Store) -> None:
    for id in ("done", "quarantined", "cancelled"):
        store.enqueue(id, now=T)
    store.complete(claimed(store, "done"), now=T)
    store.quarantine("quarantined", "strange", now=T)
    store.cancel("cancelled", now=T)
    for state in ("done", "quarantined", "cancelled"):
        assert row(store, state, "state") == {"state": state}
        assert store.claim("b", ttl=30, id=state, now=T + 1000) is None
    assert store.claim("b", ttl=30, now=T + 1000) is None


def test_a_claim_takes_from_its_queue_only(store: Store) -> None:
    store.enqueue("here", queue="here", now=T)
    store.enqueue("there", queue="there", now=T)
    assert store.claim("a", ttl=30, now=T) is None, "the default queue is empty"
    assert ids(store.claim_many("a", ttl=30, limit=10, queue="there", now=T)) == ["there"]


def test_a_claim_by_id_does_not_ask_for_the_queue(store: Store) -> None:
    store.enqueue("j", queue="elsewhere", now=T)
    assert claimed(store, "j").queue == "elsewhere"


def test_higher_priority_goes_first_then_insertion(store: Store) -> None:
    for id, priority in [("z", 0), ("low", -5), ("a", 0), ("high", 7), ("m", 0), ("higher", 2**31 - 1)]:
        store.enqueue(id, priority=priority, now=T)
    order = ids(store.claim_many("a", ttl=30, limit=10, now=T))
    assert order == ["higher", "high", "z", "a", "m", "low"]


def test_one_by_one_is_the_same_order(store: Store) -> None:
    for id, priority in [("z", 0), ("low", -5), ("a", 0), ("high", 7)]:
        store.enqueue(id, priority=priority, now=T)
    taken = [store.claim("a", ttl=30, now=T) for _ in range(4)]
    assert [lease and lease.id for lease in taken] == ["high", "z", "a", "low"]


def test_a_claim_of_many_is_never_longer_than_its_limit(store: Store) -> None:
    store.enqueue_many([{"id": f"j{n}"} for n in range(12)], now=T)
    assert ids(store.claim_many("a", ttl=30, limit=5, now=T)) == [f"j{n}" for n in range(5)]
    assert len(store.claim_many("a", ttl=30, limit=100, now=T)) == 7
    assert store.counts() == {"default": {JobState.LEASED: 12}}


def test_a_claim_of_many_takes_ready_due_and_expired_jobs(store: Store) -> None:
    for n in range(3):
        store.enqueue(f"expired{n}", now=T)
    store.claim_many("dead", ttl=5, limit=3, now=T)
    for n in range(3):
        store.enqueue(f"due{n}", run_at=T + 10, now=T)
        store.enqueue(f"ready{n}", now=T)
        store.enqueue(f"later{n}", run_at=T + 11, now=T)
    taken = ids(store.claim_many("a", ttl=30, limit=20, now=T + 10))
    assert sorted(taken) == sorted(f"{word}{n}" for word in ("expired", "due", "ready") for n in range(3))


def test_due_jobs_take_their_priority_among_the_ready_ones(store: Store) -> None:
    store.enqueue("ready", priority=1, now=T)
    store.enqueue("due", priority=2, run_at=T + 10, now=T)
    taken = store.claim_many("a", ttl=30, limit=2, now=T + 10)
    assert ids(taken) == ["due", "ready"]


def test_only_the_chosen_kinds_are_claimed(store: Store) -> None:
    for id, kind in [("p1", "pack"), ("s1", "ship"), ("p2", "pack"), ("n", ""), ("x", "x")]:
        store.enqueue(id, kind=kind, now=T)
    assert ids(store.claim_many("a", ttl=30, limit=10, kinds=["ship", "x"], now=T)) == ["s1", "x"]
    assert ids(store.claim_many("a", ttl=30, limit=10, kinds=iter(["pack"]), now=T)) == ["p1", "p2"]
    assert store.claim_many("a", ttl=30, limit=10, kinds=["never"], now=T) == []
    assert store.claim_many("a", ttl=30, limit=10, kinds=[], now=T) == []
    assert row(store, "n", "state", "attempts") == {"state": JobState.READY, "attempts": 0}
    assert ids(store.claim_many("a", ttl=30, limit=10, kinds=[""], now=T)) == ["n"]


def test_an_unknown_kind_costs_no_attempt(store: Store) -> None:
    """FAULTS 26: an old worker in a rolling deploy leaves alone what it does not know."""
    store.enqueue("new", kind="brand-new", max_attempts=1, now=T)
    for _ in range(5):
        assert store.claim_many("old", ttl=30, limit=1, kinds=["known"], now=T) == []
    expected = {"state": JobState.READY, "attempts": 0, "fence": 0}
    assert row(store, "new", *expected) == expected
    assert ids(store.claim_many("young", ttl=30, limit=1, kinds=["brand-new"], now=T)) == ["new"]


def test_a_due_job_of_a_chosen_kind_is_found_behind_due_jobs_of_another(sync_store: Store) -> None:
    sync_store.enqueue_many([{"id": f"o{n}", "kind": "other", "run_at": T} for n in range(600)], now=T)
    sync_store.enqueue("mine", kind="mine", run_at=T + 1, now=T)
    assert ids(sync_store.claim_many("a", ttl=30, limit=1, kinds=["mine"], now=T + 1)) == ["mine"]


def test_a_live_job_is_found_behind_thousands_of_dead_ones(sync_store: Store) -> None:
    dead = [{"id": f"d{n}", "run_at": T, "deadline": T + 1} for n in range(2000)]
    sync_store.enqueue_many(dead, now=T)
    sync_store.enqueue("alive", run_at=T + 5, now=T)
    assert ids(sync_store.claim_many("a", ttl=30, limit=1, now=T + 5)) == ["alive"]
    assert sync_store.counts()["default"] == {JobState.LEASED: 1, JobState.QUARANTINED: 2000}


def test_the_lease_ends_at_the_deadline_at_the_latest(store: Store) -> None:
    store.enqueue("short", deadline=T + 10, now=T)
    store.enqueue("long", deadline=T + 1000, now=T)
    assert claimed(store, "short", ttl=30).until == T + 10
    assert claimed(store, "long", ttl=30).until == T + 30


def test_the_default_owner_tells_incarnations_apart(store: Store) -> None:
    store.enqueue("j", now=T)
    lease = store.claim(ttl=30, now=T)
    assert lease is not None
    assert lease.owner == store.owner
    assert len(lease.owner.split(":")) == 3, f"host:pid:random is expected, not {lease.owner!r}"


def test_two_stores_of_one_process_have_different_default_owners(store: Store) -> None:
    owners = {Store(lambda: None).owner for _ in range(20)}  # type: ignore[arg-type,return-value]
    assert len(owners | {store.owner}) == 21


def test_a_claim_refuses_what_is_no_ttl_no_instant_no_limit_and_no_owner(store: Store) -> None:
    store.enqueue("j", now=T)
    for ttl in (0, -1, -0.0, math.nan, math.inf, -math.inf, "30", None, True):
        refused("ttl", store.claim, "a", ttl=ttl, now=T)
        refused("ttl", store.claim, "a", ttl=ttl)
        refused("ttl", store.claim, "a", ttl=ttl, id="j", now=T)
        refused("ttl", store.claim_many, "a", ttl=ttl, limit=1, now=T)
    for now in (math.nan, math.inf, -math.inf, "now", True):
        refused("now", store.claim, "a", ttl=30, now=now)
    for limit in (0, -1, 1.5, None, True):
        refused("limit", store.claim_many, "a", ttl=30, limit=limit, now=T)
    for owner in ("", "x" * 256, "a\x00b", "\ud800", 7):
        refused("owner", store.claim, owner, ttl=30, now=T)
    refused("queue", store.claim, "a", ttl=30, queue="", now=T)
    refused("id", store.claim, "a", ttl=30, id="x" * 256, now=T)
    refused("kinds", store.claim_many, "a", ttl=30, limit=1, kinds=["x" * 256], now=T)
    expected = {"state": JobState.READY, "owner": None, "fence": 0, "attempts": 0, "until": 0.0}
    assert row(store, "j", *expected) == expected


def test_a_clock_that_starts_at_zero_works(store: Store) -> None:
    store.enqueue("j", now=0)
    lease = store.claim("a", ttl=5, now=0)
    assert lease is not None
    assert (lease.until, lease.fence) == (5.0, 1)
    assert store.claim("b", ttl=5, now=4) is None
    again = store.claim("b", ttl=5, now=5)
    assert again is not None
    assert (again.until, again.fence) == (10.0, 2)


def test_a_lease_is_a_value_that_needs_no_connection(store: Store) -> None:
    store.enqueue("j", {"a": [1]}, now=T)
    lease = claimed(store, "j")
    assert lease in {lease}
    assert lease == claimed_copy(lease)
    with pytest.raises(AttributeError):
        lease.fence = 9  # type: ignore[misc]


def claimed_copy(lease: Any) -> Any:
    return type(lease)(**{name: getattr(lease, name) for name in lease.__dataclass_fields__})


def test_a_live_job_behind_more_dead_ones_than_a_transaction_handles_is_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencedjobs.store._CLAIM_PATIENCE", 0)  # it is no matter of time
    store = Store(engine)
    store.enqueue_many([{"run_at": 1, "deadline": 2, "priority": 9}] * 4_000, now=0)
    store.enqueue("live", run_at=1, now=0)
    lease = store.claim("w", ttl=10, now=3)
    assert lease is not None, f"nothing was claimed of {store.counts()}"
    assert lease.id == "live"
