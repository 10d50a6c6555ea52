"""What operators and maintenance do: cancel, quarantine, requeue, sweep, purge, and look."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fencedjobs import JobLease, JobState, Retry, Store
from tests.jobs.helpers import T, claimed, ids, just_after, just_before, refused, row

STATES = ("ready", "scheduled", "leased", "done", "quarantined", "cancelled")


def one_in_each_state(store: Store) -> dict[str, JobLease | None]:
    """Jobs named by their states; the lease where there is one, which ends at T + 30."""
    store.enqueue_many(
        [{"id": state, "run_at": T + 60 if state == "scheduled" else None} for state in STATES], now=T
    )
    store.complete(claimed(store, "done"), now=T)
    store.quarantine("quarantined", "first", now=T)
    store.cancel("cancelled", now=T)
    return {state: claimed(store, "leased") if state == "leased" else None for state in STATES}


def states(store: Store) -> dict[str, str]:
    return {id: str(row(store, id, "state")["state"]) for id in STATES}


def test_cancel_takes_out_what_is_not_done(store: Store) -> None:
    one_in_each_state(store)
    answers = {id: store.cancel(id, now=T + 1) for id in (*STATES, "missing")}
    assert answers == {
        "ready": True, "scheduled": True, "leased": True, "quarantined": True,
        "done": False, "cancelled": False, "missing": False,
    }  # fmt: skip
    assert states(store) == {id: "done" if id == "done" else "cancelled" for id in STATES}
    expected = {"owner": None, "until": 0.0, "finished_at": T + 1, "fence": 1, "attempts": 1}
    assert row(store, "leased", *expected) == expected
    assert row(store, "cancelled", "finished_at") == {"finished_at": T}


def test_quarantine_takes_out_what_waits_or_runs(store: Store) -> None:
    one_in_each_state(store)
    answers = {id: store.quarantine(id, "because", now=T + 1) for id in (*STATES, "missing")}
    assert answers == {
        "ready": True, "scheduled": True, "leased": True,
        "done": False, "quarantined": False, "cancelled": False, "missing": False,
    }  # fmt: skip
    for id in ("ready", "scheduled", "leased"):
        expected = {
            "state": JobState.QUARANTINED, "reason": "because", "finished_at": T + 1, "owner": None,
            "until": 0.0,
        }  # fmt: skip
        assert row(store, id, *expected) == expected
    assert row(store, "quarantined", "reason", "finished_at") == {"reason": "first", "finished_at": T}


def test_a_quarantine_says_why_in_any_words(store: Store) -> None:
    store.enqueue("j", now=T)
    for reason in ("", None, 7):
        refused("reason", store.quarantine, "j", reason, now=T)
    assert store.quarantine("j", "a\x00b \ud800 \U0001f600", now=T)
    reason = row(store, "j", "reason")["reason"]
    assert "\U0001f600" in reason
    assert "\x00" not in reason


def test_requeue_lets_what_was_set_aside_start_anew(store: Store) -> None:
    one_in_each_state(store)
    answers = {id: store.requeue(id, by="eve", reason="mended", now=T + 1) for id in (*STATES, "missing")}
    assert answers == {
        "quarantined": True, "cancelled": True,
        "ready": False, "scheduled": False, "leased": False, "done": False, "missing": False,
    }  # fmt: skip
    assert states(store) == {s: s for s in STATES} | {"quarantined": "ready", "cancelled": "ready"}


def test_a_requeued_job_keeps_its_fence_and_starts_its_attempts_again(store: Store) -> None:
    store.enqueue("j", {"v": 1}, max_attempts=1, deadline=T + 99, now=T)
    store.fail(claimed(store, "j"), "broken", now=T)
    assert row(store, "j", "state", "attempts") == {"state": JobState.QUARANTINED, "attempts": 1}
    assert store.requeue("j", by="eve", reason="mended", now=T + 1)
    expected = {
        "state": JobState.READY, "attempts": 0, "fence": 1, "until": 0.0, "owner": None, "payload": {"v": 1},
        "reason": None, "finished_at": None, "deadline": T + 99, "max_attempts": 1,
    }  # fmt: skip
    assert row(store, "j", *expected) == expected
    assert [e.text for e in row(store, "j", "errors")["errors"]] == ["broken"], "the errors stay"
    assert claimed(store, "j", now=T + 1).fence == 2


def test_requeue_may_mend_the_payload_and_records_who_when_and_why(store: Store) -> None:
    store.enqueue("j", {"qty": "seven"}, now=T)
    store.quarantine("j", "qty is no number", now=T)
    assert store.requeue("j", payload={"qty": 7}, by="eve", reason="typo", now=T + 5)
    assert row(store, "j", "payload") == {"payload": {"qty": 7}}
    store.cancel("j", now=T + 6)
    assert store.requeue("j", payload=None, by="bob", reason="no payload at all", now=T + 7)
    assert row(store, "j", "payload") == {"payload": None}
    store.cancel("j", now=T + 8)
    assert store.requeue("j", by="bob", reason="kept", now=T + 9)
    seen = [(r.time, r.by, r.reason, r.state, r.mended) for r in row(store, "j", "requeues")["requeues"]]
    assert seen == [
        (T + 5, "eve", "typo", "quarantined", True),
        (T + 7, "bob", "no payload at all", "cancelled", True),
        (T + 9, "bob", "kept", "cancelled", False),
    ]


def test_the_last_ten_requeues_are_kept(store: Store) -> None:
    store.enqueue("j", now=T)
    for n in range(12):
        store.cancel("j", now=T)
        assert store.requeue("j", by="eve", reason=f"no {n}", now=T)
    reasons = [r.reason for r in row(store, "j", "requeues")["requeues"]]
    assert reasons == [f"no {n}" for n in range(2, 12)]


def test_requeue_refuses_what_it_cannot_record(store: Store) -> None:
    store.enqueue("j", {"v": 1}, now=T)
    store.cancel("j", now=T)
    refused("payload", store.requeue, "j", payload=math.nan, by="eve", reason="x", now=T)
    refused("payload", store.requeue, "j", payload=object(), by="eve", reason="x", now=T)
    refused("by", store.requeue, "j", by="", reason="x", now=T)
    refused("reason", store.requeue, "j", by="eve", reason="", now=T)
    expected = {"state": JobState.CANCELLED, "payload": {"v": 1}, "requeues": ()}
    assert row(store, "j", *expected) == expected


def test_a_requeued_job_past_its_deadline_is_set_aside_again(store: Store) -> None:
    store.enqueue("j", deadline=T + 10, now=T)
    store.quarantine("j", "why", now=T)
    assert store.requeue("j", by="eve", reason="x", now=T + 20)
    assert store.claim("a", ttl=9, now=T + 20) is None
    assert row(store, "j", "state", "reason", "fence") == {
        "state": JobState.QUARANTINED,
        "reason": "deadline passed",
        "fence": 0,
    }


# --- sweep ----------------------------------------------------------------------------------------


def test_sweep_quarantines_what_can_never_be_claimed_again(store: Store) -> None:
    items: dict[str, dict[str, Any]] = {
        "live, last attempt": {"max_attempts": 1}, "expired, last attempt": {"max_attempts": 1},
        "expired, attempts left": {}, "ready past deadline": {"deadline": T + 20},
        "scheduled past deadline": {"deadline": T + 20, "run_at": T + 99},
        "ready used up": {"max_attempts": 1}, "scheduled used up": {"max_attempts": 1},
        "fine": {"deadline": just_after(T + 20)}, "expired past deadline": {"deadline": T + 15},
    }  # fmt: skip
    store.enqueue_many([{"id": id} | item for id, item in items.items()], now=T)
    claimed(store, "live, last attempt", ttl=30)
    for id in ("expired, last attempt", "expired, attempts left", "expired past deadline"):
        claimed(store, id, "dead", ttl=20)
    store.release(claimed(store, "ready used up"), now=T)
    store.release(claimed(store, "scheduled used up"), delay=99, now=T)
    assert store.sweep(now=T + 20) == 6
    assert {id: row(store, id, "state", "reason") for id in items} == {
        "live, last attempt": {"state": "leased", "reason": None},
        "expired, last attempt": {"state": "quarantined", "reason": "lease expired, attempts used up"},
        "expired, attempts left": {"state": "leased", "reason": None},
        "ready past deadline": {"state": "quarantined", "reason": "deadline passed"},
        "scheduled past deadline": {"state": "quarantined", "reason": "deadline passed"},
        "ready used up": {"state": "quarantined", "reason": "attempts used up"},
        "scheduled used up": {"state": "quarantined", "reason": "attempts used up"},
        "fine": {"state": "ready", "reason": None},
        "expired past deadline": {"state": "quarantined", "reason": "deadline passed"},
    }
    assert store.sweep(now=T + 20) == 0
    expected = {"owner": None, "until": 0.0, "finished_at": T + 20, "fence": 1, "attempts": 1}
    assert row(store, "expired, last attempt", *expected) == expected


def test_sweep_stands_exactly_at_the_lease_end_and_the_deadline(store: Store) -> None:
    store.enqueue("lease", max_attempts=1, now=T)
    store.enqueue("deadline", deadline=T + 10, now=T)
    claimed(store, "lease", ttl=10)
    assert store.sweep(now=just_before(T + 10)) == 0
    assert store.sweep(now=T + 10) == 2


def test_sweep_keeps_to_its_limit(store: Store) -> None:
    store.enqueue_many([{"id": f"j{n}", "deadline": T + 1} for n in range(5)], now=T)
    assert [store.sweep(limit=2, now=T + 1) for _ in range(4)] == [2, 2, 1, 0]
    refused("limit", store.sweep, limit=0, now=T)


# --- purge ----------------------------------------------------------------------------------------


def test_purge_empties_what_ended_before_and_keeps_id_and_fence(store: Store) -> None:
    one_in_each_state(store)
    assert store.purge(before=T) == 0, "they ended at T, which is not before T"
    assert store.purge(before=just_after(T)) == 2
    assert states(store) == {s: s for s in STATES} | {"done": "purged", "cancelled": "purged"}
    expected = {
        "state": JobState.PURGED, "fence": 1, "payload": None, "result": None, "queue": "", "kind": "",
        "key": None, "errors": (), "requeues": (), "owner": None, "until": 0.0, "last_owner": None,
        "reason": None, "attempts": 0, "deadline": None, "priority": 0, "finished_at": T,
    }  # fmt: skip
    assert row(store, "done", *expected) == expected
    assert store.purge(before=T + 99) == 0, "a tombstone is not purged again"


def test_purge_deletes_jobs_whose_ids_we_made(store: Store) -> None:
    id = store.enqueue(now=T)
    assert id is not None
    store.complete(claimed(store, id), now=T)
    assert store.purge(before=T + 1) == 1
    assert store.get(id) is None


def test_purge_keeps_to_its_limit(store: Store) -> None:
    made = store.enqueue_many([{"id": f"j{n}"} if n % 2 else {} for n in range(7)], now=T)
    for id in made:
        store.cancel(id, now=T)
    assert [store.purge(before=T + 1, limit=3) for _ in range(4)] == [3, 3, 1, 0]
    refused("limit", store.purge, before=T, limit=0)
    refused("before", store.purge, before=math.nan)


def test_forgetting_deletes_named_jobs_and_tombstones_too(store: Store) -> None:
    store.enqueue_many([{"id": "tombstone"}, {"id": "old"}, {"id": "young"}, {}], now=T)
    store.cancel("tombstone", now=T)
    store.purge(before=T + 1)
    store.complete(claimed(store, "old"), now=T)
    store.cancel("young", now=T + 5)
    assert store.purge(before=T + 5, forget=True) == 2
    assert (store.get("tombstone"), store.get("old")) == (None, None)
    assert row(store, "young", "state") == {"state": JobState.CANCELLED}
    assert store.enqueue("old", now=T + 6) == "old"
    assert row(store, "old", "fence") == {"fence": 0}


def test_a_tombstone_is_inert(store: Store) -> None:
    store.enqueue("j", now=T)
    store.complete(claimed(store, "j"), now=T)
    store.purge(before=T + 1)
    before = store.get("j")
    answers = (
        store.claim("a", ttl=9, id="j", now=T + 9), store.claim("a", ttl=9, now=T + 9),
        store.claim("a", ttl=9, queue="other", now=T + 9), store.cancel("j", now=T), store.sweep(now=T + 9),
        store.quarantine("j", "x", now=T), store.requeue("j", by="eve", reason="x", now=T),
    )  # fmt: skip
    assert answers == (None, None, None, False, 0, False, False)
    assert store.get("j") == before
    assert store.counts() == {}


# --- looking --------------------------------------------------------------------------------------


def test_counts_are_by_queue_and_state(store: Store) -> None:
    one_in_each_state(store)
    store.enqueue_many([{"queue": "shop"}, {"queue": "shop"}], now=T)
    assert store.counts() == {
        "default": {JobState(state): 1 for state in STATES},
        "shop": {JobState.READY: 2},
    }
    store.purge(before=T + 1)
    assert store.counts()["default"] == {
        JobState(s): 1 for s in ("ready", "scheduled", "leased", "quarantined")
    }


def test_there_is_no_record_of_what_is_not_there(store: Store) -> None:
    assert store.get("missing") is None
    refused("id", store.get, "")
    refused("id", store.get, "a\x00b")


def test_a_record_is_a_value_that_needs_no_connection(store: Store) -> None:
    store.enqueue("j", {"a": [1]}, now=T)
    store.fail(claimed(store, "j"), "no", retry=Retry(base=0), now=T)
    record = store.get("j")
    assert record in {record}
    assert record == store.get("j")


def test_an_operator_verb_refuses_an_id_that_cannot_be_one(store: Store) -> None:
    verbs: list[Callable[[str], object]] = [
        lambda id: store.cancel(id, now=T),
        lambda id: store.quarantine(id, "x", now=T),
        lambda id: store.requeue(id, by="eve", reason="x", now=T),
        lambda id: store.claim("a", ttl=9, id=id, now=T),
    ]
    for verb in verbs:
        for id in ("", "x" * 256, "\x00"):
            refused("id", verb, id)


def test_setting_aside_takes_no_place_in_the_order(store: Store) -> None:
    store.enqueue_many([{"id": "a"}, {"id": "b"}], now=T)
    store.cancel("a", now=T)
    store.requeue("a", by="eve", reason="x", now=T)
    assert ids(store.claim_many("w", ttl=9, limit=9, now=T)) == ["a", "b"]


def test_a_requeue_may_rest_on_what_was_seen(store: Store) -> None:
    store.enqueue("j", now=T)
    store.fail(claimed(store, "j"), "no", retry=None, now=T)
    again: dict[str, Any] = {"by": "ann", "reason": "again", "now": T}
    for seen in ((JobState.CANCELLED, 1), (JobState.QUARANTINED, 0), (JobState.QUARANTINED, 2)):
        assert not store.requeue("j", seen=seen, **again)
    assert row(store, "j", "state", "requeues") == {"state": JobState.QUARANTINED, "requeues": ()}
    assert store.requeue("j", seen=(JobState.QUARANTINED, 1), **again)
