"""Before, exactly at, and after an instant: valid while now < until, claimable from until <= now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fencedjobs import JobLease, JobState, LeaseLost, Store
from tests.jobs.helpers import T, claimed, ids, just_after, just_before, lost, row

END = T + 30

WRITES: dict[str, Callable[[Store, JobLease, float], Any]] = {
    "complete": lambda store, lease, now: store.complete(lease, {"ok": 1}, now=now),
    "renew": lambda store, lease, now: store.renew(lease, ttl=30, now=now),
    "fail": lambda store, lease, now: store.fail(lease, "no", now=now),
    "complete_many": lambda store, lease, now: must_hold(lease, store.complete_many([lease], now=now)),
    "complete_many with results": lambda store, lease, now: must_hold(
        lease, store.complete_many([lease], [1], now=now)
    ),
    "renew_many": lambda store, lease, now: must_hold(
        lease, [lease] if store.renew_many([lease], ttl=30, now=now) == [None] else []
    ),
}


def must_hold(lease: JobLease, lost: list[JobLease]) -> None:
    if lost:
        raise LeaseLost(lease)


def test_a_lease_may_be_written_just_before_its_end_and_not_at_it(store: Store) -> None:
    for name, write in WRITES.items():
        leases = {}
        for when in ("before", "at", "after"):
            store.enqueue(f"{name} {when}", now=T)
            leases[when] = claimed(store, f"{name} {when}")
        write(store, leases["before"], just_before(END))
        for when, now in (("at", END), ("after", just_after(END)), ("after", END + 1000)):
            untouched = store.get(leases[when].id)
            assert lost(write, store, leases[when], now), f"{name} at END{now - END:+g} should be refused"
            assert store.get(leases[when].id) == untouched, f"{name} was refused and yet wrote"


def test_a_lease_is_taken_over_at_its_end_and_not_before(store: Store) -> None:
    for id in ("by-id", "next"):
        store.enqueue(id, now=T)
        claimed(store, id)
    for now in (T, just_before(END)):
        assert store.claim("b", ttl=30, id="by-id", now=now) is None
        assert store.claim("b", ttl=30, now=now) is None
    assert claimed(store, "by-id", "b", now=END).fence == 2
    assert ids(store.claim_many("b", ttl=30, limit=5, now=END)) == ["next"]


def test_there_is_no_instant_at_which_nobody_or_two_may_write(store: Store) -> None:
    """No gap, no overlap: whoever asks, exactly one of the two is right."""
    for n, now in enumerate((just_before(END), END, just_after(END))):
        store.enqueue(f"j{n}", now=T)
        a = claimed(store, f"j{n}", "a")
        b = store.claim("b", ttl=30, id=f"j{n}", now=now)
        refused = store.complete_many([a], now=now) == [a]
        assert (b is not None) == refused, f"at END{now - END:+g}: B has {b}, A is refused: {refused}"


def test_a_scheduled_job_is_claimed_from_run_at_on(store: Store) -> None:
    run_at = T + 60
    store.enqueue("j", run_at=run_at, now=T)
    assert row(store, "j", "state", "until") == {"state": JobState.SCHEDULED, "until": run_at}
    assert store.claim("a", ttl=30, now=just_before(run_at)) is None
    assert store.claim("a", ttl=30, id="j", now=just_before(run_at)) is None
    assert ids(store.claim_many("a", ttl=30, limit=1, now=run_at)) == ["j"]
    store.enqueue("by-id", run_at=run_at, now=T)
    assert claimed(store, "by-id", now=run_at).fence == 1


def test_a_delay_counts_from_now(store: Store) -> None:
    store.enqueue("j", delay=0.5, now=T)
    assert row(store, "j", "state", "until") == {"state": JobState.SCHEDULED, "until": T + 0.5}
    store.enqueue("none", delay=0, now=T)
    assert row(store, "none", "state", "until") == {"state": JobState.READY, "until": 0.0}


def test_a_job_is_claimed_before_its_deadline_and_quarantined_at_it(store: Store) -> None:
    deadline = T + 100
    for id in ("before", "at", "at-by-id"):
        store.enqueue(id, deadline=deadline, now=T)
    lease = claimed(store, "before", now=just_before(deadline))
    assert lease.until == deadline
    assert store.claim("a", ttl=30, id="at-by-id", now=deadline) is None
    assert store.claim_many("a", ttl=30, limit=9, now=deadline) == []
    for id in ("before", "at", "at-by-id"):
        expected = {
            "state": JobState.QUARANTINED, "reason": "deadline passed", "owner": None,
            "fence": int(id == "before"), "until": 0.0, "finished_at": deadline,
        }  # fmt: skip
        assert row(store, id, *expected) == expected


def test_no_lease_outlives_the_deadline(store: Store) -> None:
    """The story's numbers: deadline 100, now 0, lease 1000: until 100."""
    store.enqueue("j", deadline=100, now=0)
    lease = claimed(store, "j", ttl=1000, now=0)
    assert lease.until == 100
    assert store.renew(lease, ttl=1000, now=just_before(100.0)).until == 100
    with pytest.raises(LeaseLost):
        store.complete(lease, now=100)


def test_renewal_may_shorten_a_lease(store: Store) -> None:
    store.enqueue("j", deadline=T + 50, now=T)
    lease = claimed(store, "j", ttl=30)
    assert store.renew(lease, ttl=1, now=T).until == T + 1
    assert row(store, "j", "until") == {"until": T + 1}
    assert store.renew(lease, ttl=100, now=T).until == T + 50
    renewed = store.renew_many([lease], ttl=2, now=T)
    assert [one and one.until for one in renewed] == [T + 2]
    assert row(store, "j", "until") == {"until": T + 2}


def test_release_and_retry_wait_until_exactly_their_instant(store: Store) -> None:
    store.enqueue("j", now=T)
    store.release(claimed(store, "j"), delay=7, now=T)
    assert row(store, "j", "state", "until") == {"state": JobState.SCHEDULED, "until": T + 7}
    assert store.claim("b", ttl=30, now=just_before(T + 7)) is None
    assert claimed(store, "j", "b", now=T + 7).fence == 2


def test_instants_keep_every_bit(store: Store) -> None:
    """FAULTS 37: whole seconds, or microseconds, or a 4-byte real would all move these."""
    for n, now in enumerate((0.1, 1 / 3, T + 0.1, 1764000000.123456, just_after(T), 2.0**40 + 2**-12)):
        store.enqueue(f"j{n}", deadline=just_before(now + 0.5), run_at=now, now=now)
        lease = claimed(store, f"j{n}", ttl=1, now=now)
        seen = lease.until, lease.deadline, store.get(f"j{n}").created_at  # type: ignore[union-attr]
        assert seen == (just_before(now + 0.5), just_before(now + 0.5), now)


def test_two_jobs_a_millisecond_apart_come_due_one_after_the_other(store: Store) -> None:
    store.enqueue("second", run_at=T + 0.002, now=T)
    store.enqueue("first", run_at=T + 0.001, now=T)
    assert ids(store.claim_many("a", ttl=30, limit=5, now=T + 0.0015)) == ["first"]
    assert ids(store.claim_many("a", ttl=30, limit=5, now=T + 0.0025)) == ["second"]
