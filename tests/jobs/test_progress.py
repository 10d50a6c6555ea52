"""What an attempt leaves to the next one, how it can end the job for good, and how long a job has waited."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from fencedjobs import JobState, Retry, Store
from tests.jobs.helpers import T, claimed, just_before, lost, refused, row

AT_ONCE = Retry(base=0)


def progress(store: Store, id: str = "j") -> Any:
    return row(store, id, "progress")["progress"]


# --- checkpoint -----------------------------------------------------------------------------------


def test_a_checkpoint_is_there_for_the_next_attempt_however_this_one_ends(store: Store) -> None:
    ends: dict[str, Callable[[Any], Any]] = {
        "fail": lambda lease: store.fail(lease, "no", retry=AT_ONCE, now=T),
        "release": lambda lease: store.release(lease, now=T),
        "expire": lambda lease: None,
        "requeue": lambda lease: (
            store.fail(lease, "no", retry=None, now=T),
            store.requeue("requeue", by="ann", reason="again", now=T),
        ),
    }
    for id, end in ends.items():
        store.enqueue(id, now=T)
        lease = claimed(store, id)
        assert lease.progress is None
        store.checkpoint(lease, {"page": 3, "of": [None, "á"]}, now=T)
        end(lease)
        again = claimed(store, id, now=T + 30)
        assert (id, again.progress) == (id, {"page": 3, "of": [None, "á"]})


def test_a_checkpoint_takes_the_place_of_the_one_before_and_changes_nothing_else(store: Store) -> None:
    store.enqueue("j", now=T)
    lease = claimed(store, "j")
    before = store.get("j")
    for data in (1, {"n": 2}, {"n": 2}, "\U0001f600", None):
        store.checkpoint(lease, data, now=T + 1)
        assert progress(store) == data
    assert store.get("j") == before
    store.complete(lease, now=T + 1)


def test_a_done_job_keeps_its_last_checkpoint(store: Store) -> None:
    store.enqueue("j", now=T)
    lease = claimed(store, "j")
    store.checkpoint(lease, [1], now=T)
    store.complete(lease, {"ok": 1}, now=T)
    assert row(store, "j", "progress", "result") == {"progress": [1], "result": {"ok": 1}}


def test_a_new_payload_and_a_purge_empty_the_checkpoint(store: Store) -> None:
    for id in ("mended", "purged"):
        store.enqueue(id, now=T)
        lease = claimed(store, id)
        store.checkpoint(lease, [1], now=T)
        store.set_aside(lease, "odd", state=JobState.CANCELLED, now=T)
    store.requeue("mended", payload={"qty": 2}, by="ann", reason="mended", now=T)
    assert progress(store, "mended") is None
    assert claimed(store, "mended").progress is None
    store.purge(before=T + 1)
    assert row(store, "purged", "state", "progress") == {"state": JobState.PURGED, "progress": None}
    store.enqueue("purged", now=T + 1)
    assert claimed(store, "purged", now=T + 1).progress is None


def test_a_checkpoint_under_a_lost_lease_is_refused(store: Store) -> None:
    store.enqueue("j", now=T)
    late = claimed(store, "j", "a", ttl=10)
    store.checkpoint(late, 1, now=just_before(T + 10))
    assert lost(store.checkpoint, late, 2, now=T + 10), "the right is gone at the end of the lease"
    lease = claimed(store, "j", "b", now=T + 10)
    assert lost(store.checkpoint, late, 3, now=T + 11)
    assert progress(store) == 1
    store.complete(lease, now=T + 11)
    error = lost(store.checkpoint, lease, 4, now=T + 11)
    assert error is not None
    assert error.current is not None
    assert error.current.state is JobState.DONE


def test_a_checkpoint_that_is_no_json_is_refused_and_the_lease_still_held(store: Store) -> None:
    store.enqueue("j", now=T)
    lease = claimed(store, "j")
    store.checkpoint(lease, "good", now=T)
    for data in (math.nan, {1}, (1,), b"x", "\x00", {2: 1}, object(), "x" * 2**21):
        refused("data", store.checkpoint, lease, data, now=T)
    assert progress(store) == "good"
    store.complete(lease, now=T)


# --- set aside ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [JobState.QUARANTINED, JobState.CANCELLED])
def test_an_attempt_may_set_its_job_aside_with_a_reason(store: Store, state: JobState) -> None:
    store.enqueue("j", now=T)
    store.set_aside(claimed(store, "j", "a"), "no such customer", state=state, now=T + 1)
    expected = {
        "state": state, "reason": "no such customer", "owner": None, "until": 0.0, "fence": 1, "attempts": 1,
        "finished_at": T + 1, "last_owner": "a", "result": None, "errors": (),
    }  # fmt: skip
    assert row(store, "j", *expected) == expected
    assert store.claim("b", ttl=9, id="j", now=T + 99) is None
    assert store.requeue("j", by="ann", reason="there is one now", now=T + 99)
    assert claimed(store, "j", "b", now=T + 99).fence == 2


def test_a_job_is_quarantined_unless_it_is_said_otherwise(store: Store) -> None:
    store.enqueue("j", now=T)
    store.set_aside(claimed(store, "j"), "odd", now=T)
    assert row(store, "j", "state") == {"state": JobState.QUARANTINED}


def test_setting_aside_under_a_lost_lease_is_refused(store: Store) -> None:
    store.enqueue("j", now=T)
    late = claimed(store, "j", "a", ttl=10)
    assert lost(store.set_aside, late, "odd", now=T + 10)
    claimed(store, "j", "b", now=T + 10)
    assert lost(store.set_aside, late, "odd", now=T + 11)
    assert row(store, "j", "state", "owner") == {"state": JobState.LEASED, "owner": "b"}


def test_setting_aside_wants_a_reason_and_a_state_that_means_it(store: Store) -> None:
    store.enqueue("j", now=T)
    lease = claimed(store, "j")
    for state in (JobState.DONE, JobState.READY, JobState.PURGED, "nowhere", None):
        refused("state", store.set_aside, lease, "odd", state=state, now=T)
    for reason in ("", None, 7):
        refused("reason", store.set_aside, lease, reason, now=T)
    store.complete(lease, now=T)


# --- waited ---------------------------------------------------------------------------------------


def test_a_lease_says_how_long_its_job_could_have_been_claimed(store: Store) -> None:
    store.enqueue("at once", now=T)
    store.enqueue("delayed", delay=5, now=T)
    store.enqueue("scheduled", run_at=T + 5, now=T)
    assert claimed(store, "at once", now=T + 2.5).waited == 2.5
    assert claimed(store, "delayed", now=T + 7.5).waited == 2.5
    leases = store.claim_many("a", ttl=9, limit=9, now=T + 6)
    assert [(lease.id, lease.waited) for lease in leases] == [("scheduled", 1.0)]


@pytest.mark.parametrize("by_id", [True, False])
def test_a_job_waits_anew_after_each_attempt(store: Store, by_id: bool) -> None:
    which = {"id": "j"} if by_id else {}

    def waited(now: float) -> float:
        nonlocal lease
        found = store.claim("a", ttl=10, now=now, **which)
        assert found is not None
        lease = found
        return found.waited

    store.enqueue("j", now=T)
    lease = claimed(store, "j", ttl=10)
    assert waited(T + 10.5) == 0.5, "the lease ran out half a second before"
    store.fail(lease, "no", retry=AT_ONCE, now=T + 12)
    assert waited(T + 12.25) == 0.25
    store.fail(lease, "no", retry=Retry(base=4, jitter=False, factor=1), now=T + 13)
    assert waited(T + 18) == 1.0
    store.release(lease, now=T + 20)
    assert waited(T + 20.75) == 0.75
    store.release(lease, delay=2, now=T + 21)
    assert waited(T + 25) == 2.0
    store.quarantine("j", "odd", now=T + 26)
    store.requeue("j", by="ann", reason="even", now=T + 30)
    assert waited(T + 33) == 3.0


def test_a_job_that_is_claimed_as_it_becomes_due_has_not_waited(store: Store) -> None:
    store.enqueue("j", delay=5, now=T)
    assert claimed(store, "j", now=T + 5).waited == 0.0
    store.enqueue("k", now=T)
    assert claimed(store, "k", now=T - 1).waited == 0.0, "a clock that went back"


def test_a_renewed_lease_keeps_what_it_was_told(store: Store) -> None:
    store.enqueue("j", now=T)
    store.checkpoint(claimed(store, "j", ttl=1), [1], now=T)
    lease = claimed(store, "j", now=T + 3)
    (many,) = store.renew_many([store.renew(lease, ttl=9, now=T + 4)], ttl=9, now=T + 4)
    assert many is not None
    assert (many.waited, many.progress) == (2.0, [1])


# --- the store's clock ----------------------------------------------------------------------------


def test_now_is_the_instant_that_the_store_compares_with(store: Store) -> None:
    before = store.now()
    assert abs(before - time.time()) < 60
    store.enqueue("j")
    lease = store.claim("a", ttl=30)
    assert lease is not None
    assert before <= lease.until - 30 <= store.now()


def test_now_is_of_the_store_s_own_clock_where_it_has_one(sync_store: Store) -> None:
    own = Store(sync_store.transactions.engine, clock=lambda: T)
    assert own.now() == T


# --- the oldest that waits ------------------------------------------------------------------------


def test_the_oldest_of_each_queue_waits_since_it_could_be_claimed(store: Store) -> None:
    assert store.oldest_waiting(now=T) == {}
    items = [
        {"queue": "ready"}, {"queue": "ready"}, {"queue": "scheduled", "delay": 5},
        {"queue": "later", "delay": 60}, {"queue": "spent", "deadline": T + 9},
        *({"queue": name, "id": name} for name in ("expired", "held", "done", "failed")),
    ]  # fmt: skip
    store.enqueue_many(items, now=T)
    store.enqueue(queue="ready", now=T + 3)
    claimed(store, "expired", ttl=7)
    claimed(store, "held", ttl=70)
    store.complete(claimed(store, "done"), now=T)
    store.fail(claimed(store, "failed"), "no", retry=AT_ONCE, now=T + 6)
    assert store.oldest_waiting(now=T + 10) == {
        "ready": 10.0,
        "scheduled": 5.0,
        "expired": 3.0,
        "failed": 4.0,
    }
    for queue, wait in store.oldest_waiting(now=T + 10).items():
        lease = store.claim("a", ttl=9, queue=queue, now=T + 10)
        assert lease is not None
        assert (queue, lease.waited) == (queue, wait)


def test_nothing_has_waited_less_than_no_time(store: Store) -> None:
    store.enqueue(now=T)
    assert store.oldest_waiting(now=T - 1) == {"default": 0.0}
