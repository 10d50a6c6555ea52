"""The store against the oracle: random verbs, clocks and leases, in every form on every database.

``pytest tests/verification -m nightly`` runs 10,000 examples in each form instead of the few that are
always the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import unittest
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import create_engine, event
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from fencedjobs import AsyncStore, Store, dialects, own, schema
from fencedjobs.errors import LeaseLost
from fencedjobs.jobs import JoinedJobs
from fencedjobs.testing import pairs, stages
from fencedjobs.testing.cuts import AFTER, BEFORE
from fencedjobs.testing.machines import (
    CONDITIONS,
    VERBS,
    JobMachine,
    Past,
    Step,
    as_often,
    every_pair,
    job_machine,
)
from fencedjobs.testing.model import Disagreement, JobModel
from fencedjobs.testing.pairs import Coverage
from fencedjobs.testing.watching import Watcher
from fencedjobs.values import JobLease
from tests.databases import Database
from tests.forms import Blocking

# Each example is a hundred transactions or more on a real server, so no time per example is too long.
FEW = settings(
    max_examples=5, stateful_step_count=25, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
NIGHTLY = settings(FEW, max_examples=10_000, stateful_step_count=50, derandomize=False)


def machine_of(store: Any, **options: Any) -> type[JobMachine]:
    """As a user makes it: of a store or of an async one."""
    if isinstance(store, Blocking):
        return job_machine(lambda: store._target, runner=store._runner, **options)
    return job_machine(store, **options)


def check(store: Any, how: settings, **options: Any) -> None:
    run_state_machine_as_test(machine_of(store, **options), settings=how)


def test_the_store_agrees_with_the_oracle(store: Store) -> None:
    check(store, FEW)


def test_a_store_whose_statements_are_traced_agrees_too(database: Database) -> None:
    """They go SQLAlchemy's way, while those of others go straight to the driver."""
    engine = create_engine(database.url)
    event.listen(engine, "before_execute", lambda *told: None)
    check(Store(engine), FEW)
    engine.dispose()


@pytest.mark.nightly
def test_the_store_agrees_with_the_oracle_for_ten_thousand_examples(store: Store) -> None:
    check(store, NIGHTLY)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_store_is_turned_into_a_test_case(sync_store: Store) -> None:
    case = job_machine(sync_store).TestCase
    case.settings = settings(FEW, max_examples=1)
    result = unittest.TestResult()
    case("runTest").run(result)
    assert result.wasSuccessful(), result


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_async_store_too(database: Database) -> None:
    with asyncio.Runner() as runner:
        engine = create_async_engine(database.async_url("aiosqlite"))
        machine = job_machine(AsyncStore(engine), runner=runner)
        run_state_machine_as_test(machine, settings=settings(FEW, max_examples=1))
        runner.run(engine.dispose())


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_tables_with_jobs_of_somebody_else_are_refused(sync_store: Store) -> None:
    sync_store.enqueue("somebody's")
    with pytest.raises(ValueError, match="the machine needs empty tables"):
        check(sync_store, settings(FEW, max_examples=1))
    assert sync_store.get("somebody's") is not None


def test_what_is_listed_twice_is_tried_twice_as_often_and_what_is_nested_once() -> None:
    counts = Counter[str]()
    once, twice = st.one_of(*map(st.just, "abcdef")), st.just("twice")

    @settings(FEW, max_examples=200)
    @given(st.lists(as_often((once, twice, twice)), min_size=20, max_size=20))
    def draw(some: list[str]) -> None:
        counts.update(some)

    draw()
    assert 0.5 < counts["twice"] / counts.total() < 0.8


def test_the_rows_are_read_as_others_see_them(store: Store) -> None:
    watcher = Watcher(machine_of(store).open_store())

    def there(id: str) -> bool:
        return watcher.read(lambda tx: JoinedJobs(tx).get(id)) is not None

    try:
        with store.begin() as uow:
            uow.jobs.enqueue("a")
            assert not there("a")
        assert there("a")
        store.enqueue("b")
        assert there("b")
    finally:
        watcher.close()


def test_a_database_in_memory_has_one_connection_for_all() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    schema.upgrade(engine)
    check(Store(engine), settings(FEW, max_examples=1))
    engine.dispose()


# --- a clock that goes back -----------------------------------------------------------------------


def test_the_store_agrees_with_the_oracle_while_the_clock_goes_back(store: Store) -> None:
    check(store, FEW, backwards=True)


@pytest.mark.nightly
def test_it_does_so_for_thousands_of_examples(store: Store) -> None:
    check(store, settings(NIGHTLY, max_examples=2_000), backwards=True)


def test_a_lease_that_nobody_followed_runs_again_when_the_clock_goes_back_and_one_that_was_followed_does_not(
    store: Store,
) -> None:
    machine = machine_of(store, backwards=True)()
    claim = Step("claim_by_id", {"name": "a", "owner": "A", "ttl": 1.0})
    renew = {"end": "renew", "retry": None, "result": None}
    machine.start(now=1000.0, joined=False, jobs=[{"id": "a"}])
    try:
        for by in (2.0, -1.5):
            machine.step(claim)
            machine.step(Step("creep", {"by": by}))
        machine.step(Step("end", {"past": Past(0, None), **renew}))
        assert machine.leases[-1].until == 1000.5 + 2.5
        machine.step(Step("end", {"past": Past(2, None), **renew}))
        assert len(machine.leases) == 3, "the first attempt was followed by another"
    finally:
        machine.teardown()


# --- connections that are lost at COMMIT ----------------------------------------------------------


def lost(store: Any, when: str, do: Step, *, joined: bool = False, more: Any = ()) -> None:
    """Calls whose connection is lost, on both sides."""
    machine = machine_of(store)()
    try:
        machine.start(now=1000.0, joined=joined, jobs=[{"id": "a"}, {"id": "b"}, *more])
        machine.step(Step("claim_by_id", {"name": "a", "owner": "A", "ttl": 10.0}))
        machine.step(Step("lose", {"when": when, "do": do}))
    finally:
        machine.watcher.close()
        stages.emptied(store)


LOST = [
    Step("claim_next", {"owner": "B", "ttl": 10.0, "queue": "default"}),
    Step("claim_by_id", {"name": "b", "owner": "B", "ttl": 10.0}),
    *(
        Step("end", {"past": Past(0, None), "end": end, "retry": None, "result": 1})
        for end in ("complete", "fail", "renew", "release", "checkpoint", "set_aside")
    ),
    Step("complete_many", {"pasts": [Past(0, None)], "results": True}),
    Step("renew_many", {"pasts": [Past(0, None)], "ttl": 2.5}),
    Step("completing", {"past": Past(0, None), "result": 1, "job": {"id": "c"}, "breaks": False}),
    Step("enqueue", {"job": {"id": "c"}, "named": True}),
    Step("operate", {"verb": "cancel", "name": "a", "payload": None}),
]


def test_a_call_whose_connection_is_lost_at_commit_was_made_or_was_not(store: Store) -> None:
    for when in (BEFORE, AFTER):
        for do in LOST:
            for joined in (False, True):
                lost(store, when, do, joined=joined)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_claim_that_met_spent_jobs_may_have_come_to_those_alone(store: Store, limit: int) -> None:
    spent = {"id": "A", "deadline": -1.0, "priority": 5}
    claim = {"owner": "B", "ttl": 10.0, "limit": limit, "queue": "default", "kinds": None}
    for when in (BEFORE, AFTER):
        lost(store, when, Step("claim_many", claim), more=[spent, {"id": "c"}])


def test_a_claim_that_is_cut_has_what_it_came_to_or_all() -> None:
    def oracle(*moved: str) -> JobModel:
        model = JobModel(lambda _: None)
        for id, priority in (("spent", 5), ("a", 0), ("b", 0)):
            model.enqueue(id, now=0.0, priority=priority, deadline=1.0 if id == "spent" else None)
        others = {id: SimpleNamespace(state="moved", fence=1) for id in moved}
        model.look = lambda id: others.get(id, model.rows[id])  # type: ignore[assignment,return-value]
        return model

    def claimed(cut: bool, limit: int, *moved: str) -> list[str]:
        leases = oracle(*moved).claim_many("A", ttl=1.0, limit=limit, now=1.0, cut=cut)
        return [lease.id for lease in leases]

    assert claimed(True, 1, "spent") == []
    assert claimed(True, 2, "spent", "a") == ["a"]
    assert claimed(True, 2, "spent", "a", "b") == claimed(False, 2) == ["a", "b"]
    assert claimed(True, 1, "spent", "a") == claimed(False, 1) == ["a"]
    assert claimed(True, 2, "a") == ["a", "b"], "it cannot have come to this"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("do", LOST[:3], ids=repr)
def test_a_commit_that_is_repeated_or_said_to_have_failed_is_noticed(
    sync_store: Store, do: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(dialects, "says_no", lambda error: True)
        with pytest.raises(Disagreement):
            lost(sync_store, AFTER, do)
    with monkeypatch.context() as patched:
        patched.setattr(own, "answered", lambda *_: contextlib.nullcontext())
        with pytest.raises(Disagreement):
            lost(sync_store, AFTER, do)


# --- which verb met which lease -------------------------------------------------------------------


def test_one_example_calls_each_verb_with_a_lease_in_each_condition(store: Store) -> None:
    machine = machine_of(store)
    every_pair(machine)
    assert machine.coverage.missing == []
    assert set(machine.coverage.counts) == {(verb, met) for verb in VERBS for met in CONDITIONS}


def test_each_verb_in_a_block_of_the_caller_s_too(sync_store: Store) -> None:
    machine = machine_of(sync_store)
    every_pair(machine, joined=True)
    assert machine.coverage.missing == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_random_examples_count_them_too(sync_store: Store) -> None:
    machine = job_machine(sync_store)
    run_state_machine_as_test(machine, settings=FEW)
    assert sum(machine.coverage.counts.values()) > 20


def test_a_lease_is_counted_by_what_it_meets() -> None:
    model = JobModel(lambda _: None)
    coverage = Coverage(["renew"], [*CONDITIONS, pairs.ABSENT])
    model.enqueue("a", now=0.0)
    model.enqueue("b", now=0.0)
    lease, other = (model.claim(owner, id=id, ttl=1.0, now=0.0) for owner, id in ("Aa", "Bb"))
    assert isinstance(lease, JobLease)
    assert isinstance(other, JobLease)
    model.renew(other, ttl=2.0, now=0.0)
    coverage.given(lease)
    coverage.given(other)

    def met(lease: JobLease, now: float = 0.5) -> str:
        before = +coverage.counts
        coverage.count("renew", lease, model.rows.get(lease.id), now)
        ((_, condition),) = (coverage.counts - before).keys()
        return condition

    assert [met(lease, now) for now in (0.5, 1.0, 1.5)] == [pairs.LIVE, pairs.AT_ITS_END, pairs.EXPIRED]
    assert met(replace(lease, fence=0)) == met(replace(lease, fence=2)) == pairs.STALE
    assert met(replace(lease, owner="C")) == pairs.OTHER_OWNER
    assert met(replace(lease, id="z")) == pairs.ABSENT
    model.release(other, now=0.5)
    assert met(replace(lease, id="b")) == pairs.OTHER_ID
    assert met(other) == pairs.GIVEN_BACK
    with contextlib.suppress(LeaseLost):
        model.complete(lease, now=0.5)
    assert met(lease) == pairs.DONE
    assert str(coverage).splitlines()[1].split()[:3] == ["renew", "1", "1"]
