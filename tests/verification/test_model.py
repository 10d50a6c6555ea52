"""The oracle by itself: each clause of the contract as a sentence, and the freedoms it grants."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fencedjobs.errors import LeaseLost
from fencedjobs.testing import model as oracle
from fencedjobs.testing.model import DEADLINE, DIED, USED_UP, Disagreement, JobModel, LockModel
from fencedjobs.values import JobLease, JobState, Lease, LeaseRecord, Outcome


@dataclass
class Seen:
    """As much of a record as the oracle looks at when it has to learn a choice."""

    state: JobState
    fence: int = 0
    until: float = 0.0
    owner: str | None = None


class Jobs(JobModel):
    """An oracle whose store always made the choice that the test says."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        super().__init__(lambda name: self.seen.get(name, self._as_it_is(name)))

    def _as_it_is(self, name: str) -> Any:
        row = self.rows.get(name)
        return Seen(row.state, row.fence, row.until, row.owner) if row else None


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def claimed(
    jobs: Jobs, name: str = "a", *, owner: str = "A", ttl: float = 10.0, now: float = 0.0
) -> JobLease:
    lease = jobs.claim(owner, ttl=ttl, id=name, now=now)
    assert lease is not None
    return lease


def lost(verb: Callable[[], object]) -> LeaseLost:
    with pytest.raises(LeaseLost) as caught:
        verb()
    return caught.value


def test_imports_nothing_of_the_package_but_errors_and_values() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {name for name in modules if name.startswith(("fencedjobs", "sqlalchemy"))}
    assert ours == {"fencedjobs.errors", "fencedjobs.values"}


# --- a claim and the end of its lease -------------------------------------------------------------


def test_a_claim_raises_fence_and_attempts_by_one(jobs: Jobs) -> None:
    jobs.enqueue("a", {"qty": 7}, now=0.0)
    assert claimed(jobs) == JobLease("a", "A", 1, 10.0, 1, {"qty": 7}, "", "default", None)


def test_a_live_lease_is_never_handed_out_and_an_ended_one_is(jobs: Jobs) -> None:
    jobs.enqueue("a", now=0.0)
    claimed(jobs)
    assert jobs.claim("B", ttl=10, id="a", now=9.999) is None
    assert claimed(jobs, owner="B", now=10.0).fence == 2


def test_the_late_courier_is_refused_by_every_verb(jobs: Jobs) -> None:
    jobs.enqueue("a", now=0.0)
    late = claimed(jobs, now=0.0)
    lease = claimed(jobs, owner="B", now=10.0)
    for verb in (
        lambda: jobs.complete(late, now=11.0),
        lambda: jobs.renew(late, ttl=5, now=11.0),
        lambda: jobs.fail(late, "late", retry=None, now=11.0),
        lambda: jobs.release(late, now=11.0),
    ):
        assert lost(verb).current.owner == "B"
    jobs.complete(lease, now=11.0)
    assert jobs.rows["a"].state is JobState.DONE


@pytest.mark.parametrize(("now", "holds"), [(9.999, True), (10.0, False), (10.001, False)])
def test_the_right_is_gone_at_the_very_end_of_the_lease(jobs: Jobs, now: float, holds: bool) -> None:
    jobs.enqueue("a", now=0.0)
    lease = claimed(jobs)
    if holds:
        assert jobs.renew(lease, ttl=10, now=now).until == now + 10
    else:
        assert lost(lambda: jobs.renew(lease, ttl=10, now=now)).current.owner == "A"


def test_a_name_alone_is_not_the_lease(jobs: Jobs) -> None:
    jobs.enqueue("a", now=0.0)
    first = claimed(jobs, now=0.0)
    claimed(jobs, now=10.0)
    assert not lost(lambda: jobs.complete(first, now=11.0)).completed


def test_a_repeated_completion_is_told_that_it_was_this_very_lease(jobs: Jobs) -> None:
    jobs.enqueue("a", now=0.0)
    lease = claimed(jobs)
    jobs.complete(lease, {"ok": 1}, now=1.0)
    assert lost(lambda: jobs.complete(lease, now=2.0)).completed
    assert jobs.outcome(lease) is Outcome.COMPLETED


def test_release_asks_no_time_but_the_owner_and_the_fence(jobs: Jobs) -> None:
    jobs.enqueue("a", now=0.0)
    lease = claimed(jobs)
    jobs.release(lease, refund=True, now=99.0)
    row = jobs.rows["a"]
    assert (row.state, row.fence, row.attempts, row.until) == (JobState.READY, 1, 0, 0.0)
    lost(lambda: jobs.release(lease, now=99.0))


def test_the_lease_ends_at_the_deadline_at_the_latest(jobs: Jobs) -> None:
    jobs.enqueue("a", deadline=100.0, now=0.0)
    lease = claimed(jobs, ttl=1000)
    assert lease.until == 100.0
    assert jobs.renew(lease, ttl=10, now=1.0).until == 11.0  # a renewal may also shorten it


# --- attempts, deadlines, poison ------------------------------------------------------------------


def test_a_worker_that_dies_is_counted(jobs: Jobs) -> None:
    jobs.enqueue("a", max_attempts=1, now=0.0)
    claimed(jobs)
    assert jobs.claim("B", ttl=10, id="a", now=10.0) is None
    row = jobs.rows["a"]
    assert (row.state, row.fence, row.reasons) == (JobState.QUARANTINED, 1, frozenset({DIED}))


def test_a_job_at_its_deadline_is_set_aside(jobs: Jobs) -> None:
    jobs.enqueue("a", deadline=5.0, now=0.0)
    assert jobs.claim("B", ttl=10, id="a", now=5.0) is None
    assert jobs.rows["a"].reasons == frozenset({DEADLINE})


def test_a_failure_waits_its_turn_until_the_attempts_are_used_up(jobs: Jobs) -> None:
    jobs.enqueue("a", max_attempts=2, now=0.0)
    steady = Retry(jitter=False)
    assert jobs.fail(claimed(jobs), "no", retry=steady, now=1.0) is JobState.SCHEDULED
    assert jobs.rows["a"].until == 3.0
    assert jobs.fail(claimed(jobs, now=3.0), "no", retry=steady, now=4.0) is JobState.QUARANTINED
    assert jobs.rows["a"].reasons == frozenset({USED_UP})
    assert jobs.rows["a"].errors == [(1, 1.0), (2, 4.0)]


@dataclass
class Retry:
    """The fields of a retry policy that the oracle reads."""

    base: float = 2.0
    factor: float = 2.0
    cap: float = 60.0
    jitter: bool = True


@pytest.mark.parametrize("until", [1.0, 2.5, 3.0])
def test_a_jittered_retry_may_come_back_any_time_up_to_its_bound(jobs: Jobs, until: float) -> None:
    jobs.enqueue("a", now=0.0)
    lease = claimed(jobs)
    jobs.seen["a"] = Seen(JobState.SCHEDULED, 1, until)
    assert jobs.fail(lease, "no", retry=Retry(), now=1.0) is JobState.SCHEDULED
    assert jobs.rows["a"].until == until


@pytest.mark.parametrize("until", [0.999, 3.001])
def test_a_jittered_retry_outside_of_its_bound_is_refused(jobs: Jobs, until: float) -> None:
    jobs.enqueue("a", now=0.0)
    lease = claimed(jobs)
    jobs.seen["a"] = Seen(JobState.SCHEDULED, 1, until)
    with pytest.raises(Disagreement):
        jobs.fail(lease, "no", retry=Retry(), now=1.0)


def test_only_the_last_ten_errors_are_kept(jobs: Jobs) -> None:
    jobs.enqueue("a", now=0.0)
    for n in range(12):
        jobs.fail(claimed(jobs, now=float(n)), "no", retry=Retry(base=0.0, jitter=False), now=float(n))
    assert [attempt for attempt, _ in jobs.rows["a"].errors] == list(range(3, 13))


# --- the fence never goes back --------------------------------------------------------------------


def test_no_way_out_of_a_lease_lowers_the_fence(jobs: Jobs) -> None:
    jobs.enqueue("a", now=0.0)
    jobs.release(claimed(jobs), now=0.0)
    jobs.fail(claimed(jobs), "no", retry=None, now=0.0)
    jobs.requeue("a", by="me", reason="mended", now=0.0)
    claimed(jobs)
    jobs.cancel("a", now=0.0)
    jobs.seen["a"] = Seen(JobState.PURGED, 3)
    assert jobs.purge(before=1.0) == 1
    assert jobs.enqueue("a", now=1.0) == "a"
    assert claimed(jobs, now=1.0).fence == 4


def test_a_forgotten_id_starts_again(jobs: Jobs) -> None:
    jobs.enqueue("a", now=0.0)
    jobs.complete(claimed(jobs), now=0.0)
    jobs.seen["a"] = None
    assert jobs.purge(before=1.0, forget=True) == 1
    assert "a" not in jobs.rows


def test_a_generated_id_leaves_no_tombstone(jobs: Jobs) -> None:
    assert jobs.enqueue(now=0.0, answer="0190") == "0190"
    jobs.cancel("0190", now=0.0)
    jobs.seen["0190"] = None
    assert jobs.purge(before=1.0) == 1
    assert jobs.rows == {}


def test_enqueue_of_an_existing_id_changes_nothing(jobs: Jobs) -> None:
    jobs.enqueue("a", 1, now=0.0)
    lease = claimed(jobs)
    assert jobs.enqueue("a", 2, now=0.0) is None
    assert jobs.rows["a"].lease() == lease


def test_many_are_enqueued_in_input_order_and_a_repeated_id_once(jobs: Jobs) -> None:
    items: list[dict[str, Any]] = [{"id": "b"}, {}, {"id": "b"}, {"id": "a"}]
    assert jobs.enqueue_many(items, now=0.0, answer=["b", "new", "a"]) == ["b", "new", "a"]
    assert [lease.id for lease in jobs.claim_many("A", ttl=1, limit=9, now=0.0)] == ["b", "new", "a"]


# --- order and bounded promotion ------------------------------------------------------------------


def test_ready_jobs_are_taken_by_priority_then_insertion(jobs: Jobs) -> None:
    for name, priority in (("z", 0), ("a", 0), ("m", 5)):
        jobs.enqueue(name, priority=priority, now=0.0)
    assert [lease.id for lease in jobs.claim_many("A", ttl=1, limit=3, now=0.0)] == ["m", "z", "a"]


def scheduled(jobs: Jobs, **runs: float) -> None:
    for name, run_at in runs.items():
        jobs.enqueue(name, run_at=run_at, now=0.0)


def test_the_earliest_due_job_may_be_the_only_one_promoted(jobs: Jobs) -> None:
    scheduled(jobs, late=3.0, early=1.0, later=9.0)
    jobs.seen["early"] = Seen(JobState.LEASED, 1)
    assert [lease.id for lease in jobs.claim_many("A", ttl=1, limit=1, now=5.0)] == ["early"]
    assert jobs.rows["late"].state is JobState.SCHEDULED


def test_all_due_jobs_may_be_promoted_and_then_priority_decides(jobs: Jobs) -> None:
    scheduled(jobs, late=3.0, early=1.0)
    jobs.seen |= {"late": Seen(JobState.LEASED, 1), "early": Seen(JobState.READY)}
    assert [lease.id for lease in jobs.claim_many("A", ttl=1, limit=1, now=5.0)] == ["late"]


def test_promoting_nothing_or_a_later_job_first_is_refused(jobs: Jobs) -> None:
    scheduled(jobs, late=3.0, early=1.0)
    with pytest.raises(Disagreement):
        jobs.claim_many("A", ttl=1, limit=1, now=5.0)
    jobs.seen["late"] = Seen(JobState.LEASED, 1)
    with pytest.raises(Disagreement, match="0 of 2 due rows were promoted, with limit 1"):
        jobs.claim_many("A", ttl=1, limit=1, now=5.0)


def test_a_due_job_is_not_left_behind_a_spent_one(jobs: Jobs) -> None:
    scheduled(jobs, fresh=3.0)
    jobs.enqueue("spent", run_at=1.0, deadline=2.0, now=0.0)
    jobs.seen["spent"] = Seen(JobState.QUARANTINED)
    with pytest.raises(Disagreement, match="left are \\['fresh'\\]"):
        jobs.claim_many("A", ttl=1, limit=1, now=5.0)


@pytest.mark.parametrize("filler", ["late", "later"])
def test_a_claim_that_promotes_more_to_fill_up_may_take_any_of_them(jobs: Jobs, filler: str) -> None:
    jobs.enqueue("spent", run_at=1.0, deadline=2.0, now=0.0)
    scheduled(jobs, late=3.0, later=4.0)
    jobs.seen |= {
        "spent": Seen(JobState.QUARANTINED),
        "late": Seen(JobState.READY),
        "later": Seen(JobState.READY),
    }
    jobs.seen[filler] = Seen(JobState.LEASED, 1)
    assert [lease.id for lease in jobs.claim_many("A", ttl=1, limit=1, now=5.0)] == [filler]


def test_a_spent_job_behind_the_one_that_was_taken_is_not_met(jobs: Jobs) -> None:
    scheduled(jobs, one=2.0, two=2.0)  # due at the same instant: either may be promoted alone
    jobs.enqueue("spent", deadline=2.0, now=0.0)
    jobs.seen["one"] = Seen(JobState.LEASED, 1)
    assert [lease.id for lease in jobs.claim_many("A", ttl=1, limit=1, now=3.0)] == ["one"]
    assert jobs.rows["spent"].state is JobState.READY


def test_a_spent_job_before_the_one_that_was_taken_is_set_aside(jobs: Jobs) -> None:
    jobs.enqueue("spent", deadline=2.0, now=0.0)
    jobs.enqueue("fresh", now=0.0)
    assert [lease.id for lease in jobs.claim_many("A", ttl=1, limit=1, now=3.0)] == ["fresh"]
    assert jobs.rows["spent"].reasons == frozenset({DEADLINE})


def test_kinds_are_filtered_and_others_stay(jobs: Jobs) -> None:
    jobs.enqueue("a", kind="mail", now=0.0)
    jobs.enqueue("b", kind="pack", now=0.0)
    assert [lease.id for lease in jobs.claim_many("A", ttl=1, limit=9, kinds=["pack"], now=0.0)] == ["b"]


# --- operators ------------------------------------------------------------------------------------


def test_sweep_takes_what_nobody_may_claim_and_no_live_lease(jobs: Jobs) -> None:
    jobs.enqueue("live", max_attempts=1, now=0.0)
    jobs.enqueue("dead", max_attempts=1, now=0.0)
    claimed(jobs, "live", ttl=20)
    claimed(jobs, "dead", ttl=5)
    jobs.enqueue("late", deadline=9.0, now=0.0)
    jobs.seen |= {"dead": Seen(JobState.QUARANTINED, 1), "late": Seen(JobState.QUARANTINED)}
    assert jobs.sweep(now=10.0) == 2
    assert jobs.rows["live"].state is JobState.LEASED


def test_sweep_must_take_as_many_as_its_limit_allows(jobs: Jobs) -> None:
    for name in "ab":
        jobs.enqueue(name, deadline=1.0, now=0.0)
    with pytest.raises(Disagreement):
        jobs.sweep(limit=1, now=2.0)
    jobs.seen["b"] = Seen(JobState.QUARANTINED)
    assert jobs.sweep(limit=1, now=2.0) == 1
    assert jobs.counts() == {"default": {JobState.READY: 1, JobState.QUARANTINED: 1}}


def test_operators_are_told_when_there_is_nothing_to_do(jobs: Jobs) -> None:
    jobs.enqueue("a", now=0.0)
    assert not jobs.requeue("a", by="me", reason="", now=0.0)
    jobs.complete(claimed(jobs), now=0.0)
    assert not jobs.cancel("a", now=0.0)
    assert not jobs.quarantine("a", "bad", now=0.0)
    assert not jobs.cancel("nobody", now=0.0)


def test_a_requeued_job_keeps_its_place_and_its_deadline(jobs: Jobs) -> None:
    jobs.enqueue("a", 1, deadline=50.0, now=0.0)
    jobs.enqueue("b", now=0.0)
    jobs.quarantine("a", "bad", now=1.0)
    assert jobs.requeue("a", payload=2, by="me", reason="mended", now=2.0)
    lease = jobs.claim("A", ttl=100, now=2.0)
    assert lease is not None
    assert (lease.id, lease.payload, lease.attempt, lease.until) == ("a", 2, 1, 50.0)


def test_a_row_that_is_not_as_it_must_be_is_told_field_by_field(jobs: Jobs) -> None:
    jobs.enqueue("a", now=0.0)
    with pytest.raises(Disagreement, match="job 'a': is missing, expected ready with fence 0"):
        jobs.agree({"a": None})


# --- locks ----------------------------------------------------------------------------------------


def test_a_lock_is_a_lease_without_a_job() -> None:
    locks = LockModel()
    first = locks.claim("cron", "A", ttl=10, now=0.0)
    assert first is not None
    assert first == Lease("cron", "A", 1, 10.0)
    assert locks.claim("cron", "B", ttl=10, now=9.0) is None
    second = locks.claim("cron", "B", ttl=10, now=10.0)
    assert second is not None
    assert second == Lease("cron", "B", 2, 20.0)
    assert lost(lambda: locks.renew(first, ttl=1, now=11.0)).current.owner == "B"
    assert locks.renew(second, ttl=1, now=11.0).until == 12.0
    assert not locks.check(second, now=20.0)


def test_a_released_lock_keeps_its_fence() -> None:
    locks = LockModel()
    lease = locks.claim("cron", "A", ttl=10, now=0.0)
    assert lease is not None
    locks.release(lease)
    assert locks.get("cron") == LeaseRecord("cron", None, 1, 0.0)
    lost(lambda: locks.release(lease))
    assert locks.claim("cron", "A", ttl=10, now=0.0) == Lease("cron", "A", 2, 10.0)
