"""The ends of an attempt: complete, fail, release; and that attempts count from the claim on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.orm import Session

from fencedjobs import JobState, LeaseLost, Retry, Store, UnitOfWork
from tests.jobs.helpers import T, claimed, ids, just_before, lost, on, refused, row

AT_ONCE = Retry(base=0)
ONE_SECOND = Retry(base=1, factor=1, jitter=False)


# --- complete -------------------------------------------------------------------------------------


def test_a_completed_job_is_done_and_keeps_its_result_and_fence(store: Store) -> None:
    store.enqueue("j", now=T)
    store.complete(claimed(store, "j", "a"), {"ok": [1, None]}, now=T + 1)
    expected = {
        "state": JobState.DONE, "result": {"ok": [1, None]}, "owner": None, "until": 0.0, "fence": 1,
        "attempts": 1, "finished_at": T + 1, "last_owner": "a",
    }  # fmt: skip
    assert row(store, "j", *expected) == expected


def test_the_result_may_be_any_json_value_or_none(store: Store) -> None:
    results: list[Any] = [None, False, 0, "", [], {}, "null", 2**70, -1.5e-300, {"á": ["\U0001f600"]}]
    for n, result in enumerate(results):
        store.enqueue(f"j{n}", now=T)
        store.complete(claimed(store, f"j{n}"), result, now=T)
        assert row(store, f"j{n}", "result") == {"result": result}


def test_a_result_that_is_no_json_is_refused_and_the_lease_still_held(store: Store) -> None:
    """FAULTS 58 and 64: the attempt can then be ended in a defined way, at once."""
    store.enqueue("j", now=T)
    lease = claimed(store, "j")
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    for result in ({"x": math.nan}, math.inf, object(), {1}, (1, 2), deep, b"x", "\x00", "\ud800", {2: 1}):
        refused("result", store.complete, lease, result, now=T)
        refused("results[0]", store.complete_many, [lease], [result], now=T)
    assert row(store, "j", "state", "fence", "owner") == {"state": JobState.LEASED, "fence": 1, "owner": "a"}
    assert store.fail(lease, "result was no JSON", retry=None, now=T) is JobState.QUARANTINED


# --- fail -----------------------------------------------------------------------------------------


def test_a_failed_job_waits_as_the_policy_says(store: Store) -> None:
    store.enqueue("j", now=T)
    assert store.fail(claimed(store, "j"), "no", retry=ONE_SECOND, now=T + 2) is JobState.SCHEDULED
    expected = {
        "state": JobState.SCHEDULED, "until": T + 3, "owner": None, "fence": 1, "attempts": 1,
        "last_owner": "a", "finished_at": None,
    }  # fmt: skip
    assert row(store, "j", *expected) == expected
    assert claimed(store, "j", "b", now=T + 3).attempt == 2


def test_the_default_policy_waits_up_to_a_second_after_the_first_attempt(store: Store) -> None:
    store.enqueue("j", now=T)
    state = store.fail(claimed(store, "j"), "no", now=T)
    assert state in (JobState.SCHEDULED, JobState.READY)
    until = row(store, "j", "until")["until"]
    assert T <= until <= T + 1 or (state is JobState.READY and until == 0)


def test_the_policy_is_asked_for_the_attempt_that_failed(store: Store) -> None:
    asked: list[int] = []
    retry = Retry(backoff=lambda attempt: asked.append(attempt) or 0.0)  # type: ignore[func-returns-value]
    store.enqueue("j", now=T)
    for _ in range(3):
        assert store.fail(claimed(store, "j"), "no", retry=retry, now=T) is JobState.READY
    assert asked == [1, 2, 3]


def test_a_job_without_a_wait_is_ready_at_once(store: Store) -> None:
    store.enqueue("j", now=T)
    assert store.fail(claimed(store, "j"), "no", retry=AT_ONCE, now=T) is JobState.READY
    assert row(store, "j", "state", "until") == {"state": JobState.READY, "until": 0.0}


def test_without_a_policy_a_failure_is_final(store: Store) -> None:
    store.enqueue("j", now=T)
    assert store.fail(claimed(store, "j"), "no", retry=None, now=T + 1) is JobState.QUARANTINED
    expected = {"state": JobState.QUARANTINED, "owner": None, "until": 0.0, "fence": 1, "finished_at": T + 1}
    assert row(store, "j", *expected) == expected


def test_a_failure_of_the_last_attempt_is_final(store: Store) -> None:
    store.enqueue("j", max_attempts=2, now=T)
    assert store.fail(claimed(store, "j"), "1st", retry=AT_ONCE, now=T) is JobState.READY
    assert store.fail(claimed(store, "j"), "2nd", retry=AT_ONCE, now=T) is JobState.QUARANTINED
    expected = {"state": JobState.QUARANTINED, "reason": "attempts used up", "attempts": 2, "fence": 2}
    assert row(store, "j", *expected) == expected
    assert store.claim("a", ttl=9, now=T + 99) is None


def test_each_error_is_kept_with_its_attempt_time_kind_and_text(store: Store) -> None:
    store.enqueue("j", now=T)
    store.fail(claimed(store, "j"), ValueError("no stock"), retry=AT_ONCE, now=T + 1)
    store.fail(claimed(store, "j"), "plain words", retry=AT_ONCE, now=T + 2)
    errors = row(store, "j", "errors")["errors"]
    assert [(e.attempt, e.time, e.kind, e.text) for e in errors] == [
        (1, T + 1, "ValueError", "no stock"),
        (2, T + 2, "", "plain words"),
    ]


def test_the_last_ten_errors_are_kept(store: Store) -> None:
    store.enqueue("j", now=T)
    for n in range(1, 13):
        store.fail(claimed(store, "j"), f"error {n}", retry=AT_ONCE, now=T)
    errors = row(store, "j", "errors")["errors"]
    assert [(e.attempt, e.text) for e in errors] == [(n, f"error {n}") for n in range(3, 13)]


def test_which_attempt_it_was_is_known_by_the_row_and_not_by_the_lease(store: Store) -> None:
    """A lease that somebody has put together again may say anything but its id, owner and fence."""
    store.enqueue("j", now=T)
    lease = replace(claimed(store, "j"), attempt=7)
    store.fail(lease, "no", retry=Retry(base=1, factor=2, jitter=False), now=T)
    job = store.get("j")
    assert job is not None
    assert ([error.attempt for error in job.errors], job.until) == ([1], T + 1)


def test_recording_a_failure_cannot_fail(store: Store) -> None:
    """FAULTS 56, 57: NUL, surrogates, texts without end, an error that cannot be printed."""

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    store.enqueue("j", max_attempts=99, now=T)
    for error in (
        "a\x00b",
        "a\ud800b",
        "x" * 10**6,
        "",
        "\U0001f600" * 5000,
        Unprintable(),
        KeyError("\x00"),
    ):
        lease = claimed(store, "j")
        assert store.fail(lease, error, retry=AT_ONCE, now=T) is JobState.READY
    texts = [e.text for e in row(store, "j", "errors")["errors"]]
    assert len(texts) == 7
    assert all(len(text) <= 2000 and "\x00" not in text and "\ud800" not in text for text in texts)
    assert texts[0].startswith("a")
    assert texts[0].endswith("b")


# --- release --------------------------------------------------------------------------------------


def test_a_released_job_is_free_at_once_and_the_attempt_counts(store: Store) -> None:
    store.enqueue("j", now=T)
    store.release(claimed(store, "j"), now=T)
    expected = {"state": JobState.READY, "owner": None, "until": 0.0, "fence": 1, "attempts": 1, "errors": ()}
    assert row(store, "j", *expected) == expected
    assert claimed(store, "j", "b").fence == 2


def test_a_release_may_take_the_attempt_back(store: Store) -> None:
    store.enqueue("j", max_attempts=1, now=T)
    for fence in range(1, 4):
        lease = claimed(store, "j")
        assert (lease.attempt, lease.fence) == (1, fence)
        store.release(lease, refund=True, now=T)
        assert row(store, "j", "attempts", "fence") == {"attempts": 0, "fence": fence}


def test_a_release_may_delay(store: Store) -> None:
    store.enqueue("j", now=T)
    store.release(claimed(store, "j"), delay=5, refund=True, now=T + 1)
    expected = {"state": JobState.SCHEDULED, "until": T + 6, "attempts": 0, "owner": None}
    assert row(store, "j", *expected) == expected


def test_a_released_job_keeps_its_place(store: Store) -> None:
    store.enqueue_many([{"id": "a"}, {"id": "b"}], now=T)
    store.release(claimed(store, "a"), now=T)
    assert ids(store.claim_many("w", ttl=9, limit=9, now=T)) == ["a", "b"]


def test_a_release_refuses_a_delay_that_is_none(store: Store) -> None:
    store.enqueue("j", now=T)
    lease = claimed(store, "j")
    for delay in (-1, math.nan, math.inf, "1", True):
        refused("delay", store.release, lease, delay=delay, now=T)
    store.complete(lease, now=T)


# --- attempts -------------------------------------------------------------------------------------


def test_attempts_are_counted_at_the_claim(store: Store) -> None:
    """FAULTS 22: so that a worker that dies is counted."""
    store.enqueue("j", now=T)
    for n in range(1, 4):
        lease = claimed(store, "j", ttl=1, now=T + n)
        assert lease.attempt == n
        assert row(store, "j", "attempts") == {"attempts": n}


@pytest.mark.parametrize("by_id", [False, True], ids=["next", "by id"])
def test_a_job_that_killed_all_its_workers_is_quarantined_before_another_fence(
    store: Store, by_id: bool
) -> None:
    store.enqueue("poison", max_attempts=3, now=T)
    store.enqueue("good", now=T)
    chosen = {"id": "poison"} if by_id else {}
    for n in range(3):
        claimed(store, "poison", f"dead{n}", ttl=1, now=T + n)
    assert row(store, "poison", "state", "fence") == {"state": JobState.LEASED, "fence": 3}
    taken = store.claim("w", ttl=9, now=T + 3, **chosen)
    assert taken is None if by_id else taken is not None
    expected = {
        "state": JobState.QUARANTINED, "reason": "lease expired, attempts used up", "fence": 3,
        "attempts": 3, "owner": None, "until": 0.0, "finished_at": T + 3, "last_owner": "dead2",
    }  # fmt: skip
    assert row(store, "poison", *expected) == expected
    assert by_id or (taken is not None and taken.id == "good")


def test_the_last_attempt_is_not_set_aside_while_it_runs(store: Store) -> None:
    store.enqueue("j", max_attempts=1, now=T)
    lease = claimed(store, "j", ttl=10)
    for now in (T, just_before(T + 10)):
        assert store.claim("b", ttl=9, now=now) is None
        assert store.claim("b", ttl=9, id="j", now=now) is None
        assert store.sweep(now=now) == 0
    store.complete(lease, now=just_before(T + 10))
    assert row(store, "j", "state") == {"state": JobState.DONE}


def test_ready_jobs_are_checked_for_attempts_too(store: Store) -> None:
    store.enqueue("used-up", max_attempts=1, now=T)
    store.release(claimed(store, "used-up"), now=T)
    store.enqueue("good", now=T)
    assert row(store, "used-up", "state", "attempts") == {"state": JobState.READY, "attempts": 1}
    assert ids(store.claim_many("b", ttl=9, limit=1, now=T)) == ["good"]
    expected = {"state": JobState.QUARANTINED, "reason": "attempts used up", "fence": 1}
    assert row(store, "used-up", *expected) == expected


def test_a_scheduled_retry_that_is_used_up_is_set_aside_when_due(store: Store) -> None:
    store.enqueue("j", max_attempts=1, now=T)
    store.release(claimed(store, "j"), delay=5, now=T)
    assert store.claim("b", ttl=9, now=T + 5) is None
    expected = {"state": JobState.QUARANTINED, "reason": "attempts used up", "fence": 1, "attempts": 1}
    assert row(store, "j", *expected) == expected


def test_an_expired_lease_past_the_deadline_is_quarantined_for_the_deadline(store: Store) -> None:
    store.enqueue("j", deadline=T + 10, now=T)
    lease = claimed(store, "j", ttl=99)
    assert store.claim("b", ttl=9, now=T + 10) is None
    expected = {"state": JobState.QUARANTINED, "reason": "deadline passed", "fence": 1}
    assert row(store, "j", *expected) == expected
    assert lost(store.complete, lease, now=just_before(T + 10)), "it is quarantined: its end is no matter"


# --- many -----------------------------------------------------------------------------------------


def test_completing_many_tells_the_lost_ones_and_does_the_others(store: Store) -> None:
    store.enqueue_many([{"id": f"j{n}"} for n in range(6)], now=T)
    leases = store.claim_many("a", ttl=30, limit=6, now=T)
    store.cancel("j1", now=T)
    store.complete(leases[3], "before", now=T)
    store.release(leases[4], now=T)
    taken_over = claimed(store, "j4", "b")
    lost = store.complete_many(reversed(leases), now=T + 1)
    assert ids(lost) == ["j4", "j3", "j1"], "the lost leases, in input order"
    states = [row(store, f"j{n}", "state")["state"] for n in range(6)]
    assert states == ["done", "cancelled", "done", "done", "leased", "done"]
    assert row(store, "j3", "result") == {"result": "before"}
    store.complete(taken_over, now=T + 1)


def test_completing_many_with_results_gives_each_its_own(store: Store) -> None:
    store.enqueue_many([{"id": f"j{n}"} for n in range(4)], now=T)
    leases = store.claim_many("a", ttl=30, limit=4, now=T)
    store.cancel("j2", now=T)
    assert ids(store.complete_many(leases, [{"n": n} for n in range(4)], now=T + 1)) == ["j2"]
    results = [row(store, f"j{n}", "result")["result"] for n in range(4)]
    assert results == [{"n": 0}, {"n": 1}, None, {"n": 3}]
    refused("results", store.complete_many, leases, [1], now=T)


def test_renewing_many_is_aligned_with_the_input(store: Store) -> None:
    store.enqueue_many([{"id": f"j{n}", "deadline": T + 50 if n == 2 else None} for n in range(5)], now=T)
    leases = store.claim_many("a", ttl=30, limit=5, now=T)
    store.cancel("j1", now=T)
    store.complete(leases[3], now=T)
    renewed = store.renew_many(reversed(leases), ttl=100, now=T + 1)
    ends = [(one and one.id, one and one.until) for one in renewed]
    assert ends == [("j4", T + 101), (None, None), ("j2", T + 50), (None, None), ("j0", T + 101)]
    assert row(store, "j0", "until", "fence", "owner") == {"until": T + 101, "fence": 1, "owner": "a"}
    assert row(store, "j3", "until", "state") == {"until": 0.0, "state": JobState.DONE}


def test_many_of_none_is_none(store: Store) -> None:
    assert store.complete_many([], now=T) == []
    assert store.complete_many([], [], now=T) == []
    assert store.renew_many([], ttl=9, now=T) == []


def test_many_may_be_any_iterable(store: Store) -> None:
    store.enqueue_many([{"id": "a"}, {"id": "b"}], now=T)
    leases = store.claim_many("w", ttl=9, limit=2, now=T)
    assert [one and one.until for one in store.renew_many(iter(leases), ttl=20, now=T)] == [T + 20] * 2
    assert store.complete_many(iter(leases), now=T) == []
    assert store.counts() == {"default": {JobState.DONE: 2}}


def test_more_than_one_statement_can_list_is_still_exact(sync_store: Store) -> None:
    sync_store.enqueue_many([{"id": f"j{n}"} for n in range(450)], now=T)
    leases = sync_store.claim_many("a", ttl=30, limit=450, now=T)
    for n in range(0, 450, 50):
        sync_store.cancel(f"j{n}", now=T)
    expected = [f"j{n}" for n in range(0, 450, 50)]
    renewed = sync_store.renew_many(leases, ttl=30, now=T)
    assert [lease.id for lease, new in zip(leases, renewed, strict=True) if new is None] == expected
    assert ids(sync_store.complete_many(leases, now=T)) == expected
    assert sync_store.counts()["default"] == {JobState.DONE: 441, JobState.CANCELLED: 9}


@on("mariadb")
def test_many_long_results_do_not_go_into_one_packet(sync_store: Store) -> None:
    """A packet has 16 MiB by default, in which a quotation mark takes two bytes."""
    sync_store.enqueue_many([{} for _ in range(20)], now=T)
    leases = sync_store.claim_many("a", ttl=30, limit=20, now=T)
    assert sync_store.complete_many(leases, ["x" * 1_000_000] * 20, now=T) == []


def test_many_results_are_each_under_the_guard_of_their_own_lease(sync_store: Store) -> None:
    """More than one statement lists, with long results among them, some without, and some lost."""
    sync_store.enqueue_many([{"id": f"j{n}"} for n in range(450)], now=T)
    leases = sync_store.claim_many("a", ttl=30, limit=450, now=T)
    for n in range(0, 450, 50):
        sync_store.release(leases[n], now=T)
        claimed(sync_store, f"j{n}", "b")
    results = [None if n % 3 == 0 else {"n": n} if n % 101 else "x" * 700_000 for n in range(450)]
    lost = sync_store.complete_many(leases, results, now=T + 1)
    assert ids(lost) == [f"j{n}" for n in range(0, 450, 50)]
    for n, result in enumerate(results):
        taken = n % 50 == 0
        expected = (
            {"state": JobState.LEASED, "result": None} if taken else {"state": "done", "result": result}
        )
        assert row(sync_store, f"j{n}", *expected) == expected


def test_renewal_does_not_revive(store: Store) -> None:
    store.enqueue("j", now=T)
    lease = claimed(store, "j", ttl=10)
    with pytest.raises(LeaseLost):
        store.renew(lease, ttl=100, now=T + 10)
    assert row(store, "j", "until", "fence") == {"until": T + 10, "fence": 1}
    for ttl in (0, -1, math.nan, math.inf):
        refused("ttl", store.renew, lease, ttl=ttl, now=T)
        refused("ttl", store.renew_many, [lease], ttl=ttl, now=T)


def test_renewing_twice_in_the_same_instant_is_still_held(store: Store) -> None:
    """FAULTS 79."""
    store.enqueue("j", now=T)
    lease = claimed(store, "j", ttl=10)
    for _ in range(3):
        assert store.renew(lease, ttl=10, now=T) == lease
        assert store.renew_many([lease], ttl=10, now=T) == [lease]


@pytest.mark.parametrize("forged_first", [True, False])
def test_a_forged_lease_of_the_same_row_does_not_bring_its_result(
    sync_store: Store, forged_first: bool
) -> None:
    sync_store.enqueue("j", now=T)
    lease = claimed(sync_store, "j", "a")
    forged = replace(lease, owner="b")
    leases = [forged, lease] if forged_first else [lease, forged]
    assert sync_store.complete_many(leases, [f"of {one.owner}" for one in leases], now=T) == [forged]
    assert row(sync_store, "j", "result") == {"result": "of a"}


@on("postgresql", "mariadb")
def test_renewals_that_do_not_wait_pass_over_a_row_that_somebody_has_locked(sync_store: Store) -> None:
    sync_store.enqueue_many([{"id": f"j{n}"} for n in range(4)], now=T)
    leases = sync_store.claim_many("a", ttl=30, limit=4, now=T)
    sync_store.cancel("j3", now=T)
    with Session(sync_store.transactions.engine) as session:
        UnitOfWork(session).jobs.cancel("j1", now=T)
        renewed = sync_store.renew_many(leases, ttl=60, wait=False, now=T + 1)
        session.rollback()
    assert renewed[1] is leases[1]
    assert [lease and lease.until for lease in renewed] == [T + 61, T + 30, T + 61, None]
    again = sync_store.renew_many(leases, ttl=90, wait=False, now=T + 2)
    assert [lease and lease.until for lease in again] == [T + 92, T + 92, T + 92, None]
    late = sync_store.renew_many(leases, ttl=90, wait=False, now=T + 92)
    assert late == [None] * 4
