"""The fence names the attempt: whoever shows an old one is refused, and it never goes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fencedjobs import JobLease, JobState, LeaseLost, Retry, Store
from tests.jobs.helpers import T, claimed, lost, row

NO_WAIT = Retry(base=0)
ENDS: dict[str, Callable[[Store, JobLease, float], Any]] = {
    "complete": lambda store, lease, now: store.complete(lease, now=now),
    "renew": lambda store, lease, now: store.renew(lease, ttl=99, now=now),
    "fail": lambda store, lease, now: store.fail(lease, "late", now=now),
    "fail for good": lambda store, lease, now: store.fail(lease, "late", retry=None, now=now),
    "release": lambda store, lease, now: store.release(lease, now=now),
    "release with refund and delay": lambda store, lease, now: store.release(
        lease, delay=5, refund=True, now=now
    ),
}


def test_the_late_courier_is_refused(store: Store) -> None:
    """The story: A has token 1 until 1000, B claims at 1000, A comes at 1001."""
    store.enqueue("order-7", {"qty": 7}, now=0)
    a = claimed(store, "order-7", "A", ttl=1000, now=0)
    b = claimed(store, "order-7", "B", ttl=1000, now=1000)
    assert (a.fence, b.fence) == (1, 2)
    before = store.get("order-7")
    with pytest.raises(LeaseLost):
        store.complete(a, {"by": "A"}, now=1001)
    assert store.get("order-7") == before
    store.complete(b, {"by": "B"}, now=1002)
    assert row(store, "order-7", "state", "result") == {"state": JobState.DONE, "result": {"by": "B"}}


def test_an_expired_holder_changes_nothing_after_a_takeover(store: Store) -> None:
    """FAULTS 12 and 14: also if the late heartbeat comes well within the next lease."""
    for end, verb in ENDS.items():
        store.enqueue(end, now=T)
        a = claimed(store, end, "a", ttl=10)
        b = claimed(store, end, "b", ttl=60, now=T + 10)
        must_be_lost(end, verb, store, a, T + 20)
        assert store.complete_many([a], now=T + 20) == [a]
        assert store.renew_many([a], ttl=5, now=T + 20) == [None]
        assert row(store, end, "owner", "fence", "until") == {"owner": "b", "fence": 2, "until": b.until}
        store.complete(b, now=T + 20)


def test_the_same_name_is_not_the_same_run(store: Store) -> None:
    for end, verb in ENDS.items():
        store.enqueue(end, now=T)
        former = claimed(store, end, "worker-1", ttl=10)
        again = claimed(store, end, "worker-1", ttl=60, now=T + 10)
        must_be_lost(end, verb, store, former, T + 20)
        store.complete(again, now=T + 20)


def test_the_same_fence_is_not_the_same_owner(store: Store) -> None:
    """FAULTS 28: after a failover that lost commits the same fence may be granted twice."""
    for end, verb in ENDS.items():
        store.enqueue(end, now=T)
        lease = claimed(store, end, "a", ttl=60)
        stranger = replace(lease, owner="b")
        must_be_lost(end, verb, store, stranger, T + 1)
        store.complete(lease, now=T + 1)


def test_two_holders_of_the_same_fence_are_told_apart_in_one_call(store: Store) -> None:
    store.enqueue("j", now=T)
    held = claimed(store, "j", "a", ttl=60)
    stranger = replace(held, owner="b")
    renewed = store.renew_many([stranger, held], ttl=70, now=T)
    assert renewed == [None, replace(held, until=T + 70)]
    assert store.complete_many([stranger, held], now=T + 1) == [stranger]


def test_each_lease_ends_once(store: Store) -> None:
    for end, verb in ENDS.items():
        store.enqueue(end, now=T)
        lease = claimed(store, end, "a", ttl=60)
        store.complete(lease, now=T)
        must_be_lost(end, verb, store, lease, T + 1)


def test_taking_a_job_from_under_a_running_lease_makes_it_lost(store: Store) -> None:
    outs: dict[str, Callable[[str], bool]] = {
        "cancel": lambda id: store.cancel(id, now=T),
        "quarantine": lambda id: store.quarantine(id, "stop", now=T),
    }
    for out, take in outs.items():
        for end, verb in ENDS.items():
            id = f"{end} after {out}"
            store.enqueue(id, now=T)
            lease = claimed(store, id, "a", ttl=60)
            assert take(id) is True
            must_be_lost(id, verb, store, lease, T + 1)


def test_a_release_after_a_promotion_is_lost(store: Store) -> None:
    """Promotion clears the owner."""
    store.enqueue("j", now=T)
    a = claimed(store, "j", "a", ttl=10)
    store.enqueue("first", priority=1, now=T)
    taken = store.claim("b", ttl=30, now=T + 10)
    assert taken is not None
    assert taken.id == "first"
    assert row(store, "j", "state", "owner") == {"state": JobState.READY, "owner": None}
    with pytest.raises(LeaseLost):
        store.release(a, now=T + 10)


def test_a_release_after_the_end_works_while_nobody_has_the_job(store: Store) -> None:
    store.enqueue("j", now=T)
    a = claimed(store, "j", "a", ttl=10)
    store.release(a, now=T + 100)
    expected = {"state": JobState.READY, "owner": None, "until": 0.0, "fence": 1, "attempts": 1}
    assert row(store, "j", *expected) == expected


def test_the_fence_only_rises_through_every_way_back(store: Store) -> None:
    """One by one, by every verb that brings a job back; an old lease is refused after each."""
    store.enqueue("j", max_attempts=100, now=T)
    old: list[JobLease] = []

    def claim_again(now: float) -> JobLease:
        lease = claimed(store, "j", "same", ttl=10, now=now)
        expected = len(old) + 1
        assert lease.fence == expected, f"fence {lease.fence}, but it is claim number {expected}"
        for former in old:
            assert lost(store.complete, former, now=now), f"{former} was not refused"
        old.append(lease)
        return lease

    store.release(claim_again(T), now=T)
    store.release(claim_again(T), refund=True, now=T)
    store.fail(claim_again(T), "x", retry=NO_WAIT, now=T)
    claim_again(T)  # expires
    store.fail(claim_again(T + 10), "x", retry=None, now=T + 10)
    assert store.requeue("j", by="me", reason="again", now=T + 10)
    claim_again(T + 10)
    assert store.cancel("j", now=T + 10)
    assert store.requeue("j", by="me", reason="again", now=T + 10)
    claim_again(T + 10)
    assert store.quarantine("j", "why", now=T + 10)
    assert store.requeue("j", payload={"mended": 1}, by="me", reason="again", now=T + 10)
    store.complete(claim_again(T + 10), now=T + 10)
    assert store.purge(before=T + 11) == 1
    assert store.enqueue("j", max_attempts=100, now=T + 20) == "j"
    store.complete(claim_again(T + 20), now=T + 20)
    assert store.purge(before=T + 21) == 1
    assert store.enqueue_many([{"id": "j"}], now=T + 30) == ["j"]
    claim_again(T + 30)


def test_each_claim_raises_the_fence_by_one_and_the_row_agrees(store: Store) -> None:
    """FAULTS 24: the fence that is returned is the one that was written."""
    store.enqueue("j", max_attempts=100, now=T)
    for n in range(1, 6):
        lease = claimed(store, "j", f"w{n}", ttl=1, now=T + n)
        assert (lease.fence, lease.attempt) == (n, n)
        assert row(store, "j", "fence", "owner") == {"fence": n, "owner": f"w{n}"}


def test_a_lost_lease_tells_what_there_is_now(store: Store) -> None:
    store.enqueue("j", now=T)
    a = claimed(store, "j", "a", ttl=10)
    claimed(store, "j", "b", ttl=10, now=T + 10)
    error = lost(store.complete, a, now=T + 11)
    assert error is not None
    assert (error.held, error.current) == (a, store.get("j"))
    assert error.completed is False
    assert "fence 2" in str(error)
    assert "'b'" in str(error)


def test_a_lost_lease_says_when_it_was_this_very_lease_that_completed(store: Store) -> None:
    store.enqueue("j", now=T)
    a = claimed(store, "j", "a", ttl=10)
    store.complete(a, now=T + 1)
    error = lost(store.complete, a, now=T + 2)
    assert error is not None
    assert error.completed is True
    assert error.current == store.get("j")


def test_a_lost_lease_does_not_say_so_when_another_completed(store: Store) -> None:
    store.enqueue("j", now=T)
    a = claimed(store, "j", "a", ttl=10)
    store.complete(claimed(store, "j", "a", ttl=10, now=T + 10), now=T + 11)
    error = lost(store.complete, a, now=T + 12)
    assert error is not None
    assert error.completed is False


def test_a_lease_of_a_row_that_is_gone_is_lost(store: Store) -> None:
    id = store.enqueue(now=T)
    assert id is not None
    a = claimed(store, id)
    store.complete(a, now=T)
    assert store.purge(before=T + 1) == 1
    error = lost(store.renew, a, ttl=9, now=T)
    assert error is not None
    assert (error.current, error.completed) == (None, False)


def test_an_id_that_comes_back_does_not_fit_an_old_lease(store: Store) -> None:
    """FAULTS 29: purge, enqueue again, claim again: the old holder is refused."""
    store.enqueue("j", now=T)
    old = claimed(store, "j", "same", ttl=1000)
    store.cancel("j", now=T)
    assert store.purge(before=T + 1) == 1
    assert store.enqueue("j", now=T) == "j"
    new = claimed(store, "j", "same", ttl=1000)
    assert new.fence == 2
    with pytest.raises(LeaseLost):
        store.complete(old, now=T + 1)
    store.complete(new, now=T + 1)


def must_be_lost(
    what: str, verb: Callable[[Store, JobLease, float], Any], store: Store, lease: JobLease, now: float
) -> None:
    """`LeaseLost` with what there is now, and nothing changed."""
    before = store.get(lease.id)
    error = lost(verb, store, lease, now)
    assert error is not None, f"{what}: {lease} should be refused, the row is {store.get(lease.id)}"
    assert (error.held, error.current) == (lease, before), what
    assert store.get(lease.id) == before, f"{what} was refused and yet wrote"
