"""A claim in one statement: it gets what a claim in a transaction would have got, no more and no less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from fencedjobs import InvalidValue, JobState, Store
from tests.jobs.helpers import T
from tests.jobs.test_statements import watched


@pytest.fixture
def warm(engine: Engine) -> Store:
    """A store whose connection has answered a moment ago."""
    store = Store(engine)
    store.counts()
    return store


def claimed(store: Store, limit: int = 10, now: float = T) -> list[str]:
    return [lease.id for lease in store.claim_many("w", ttl=9, limit=limit, now=now)]


def test_what_is_due_comes_before_what_is_ready_and_less_urgent(warm: Store) -> None:
    warm.enqueue("ready", now=T)
    warm.enqueue("due", priority=5, run_at=T + 1, now=T)
    assert claimed(warm, 1, T + 1) == ["due"]
    assert claimed(warm, 1, T + 1) == ["ready"]


def test_an_expired_lease_is_found_while_others_are_ready(warm: Store) -> None:
    warm.enqueue("first", now=T)
    assert claimed(warm, 1) == ["first"]
    warm.enqueue("second", now=T)
    assert claimed(warm, 2, T + 9) == ["first", "second"]


def test_what_waits_in_another_queue_is_no_matter(warm: Store, engine: Engine) -> None:
    warm.enqueue("due", queue="another", run_at=T + 1, now=T)
    warm.enqueue("ready", now=T)
    with watched(engine) as sent:
        assert claimed(warm, 5, T + 1) == ["ready"]
    if engine.dialect.name != "mysql":
        assert sent.words() == ["UPDATE"]


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_rows_that_can_never_run_do_not_take_the_place_of_others(warm: Store, limit: int) -> None:
    for name in ("a", "b"):
        warm.enqueue(f"dead {name}", deadline=T + 1, now=T)
        warm.enqueue(f"alive {name}", now=T)
    warm.enqueue("alive c", now=T)
    assert claimed(warm, limit, T + 1) == ["alive a", "alive b", "alive c"][:limit]
    states = warm.counts()["default"]
    assert states[JobState.LEASED] == min(limit, 3)
    assert states[JobState.QUARANTINED] >= 1


def test_only_the_kinds_that_are_asked_for(warm: Store) -> None:
    for name in ("x", "y", "x"):
        warm.enqueue(kind=name, now=T)
    leases = warm.claim_many("w", ttl=9, limit=5, kinds=["x"], now=T)
    assert [lease.kind for lease in leases] == ["x", "x"]


def test_the_order_is_that_of_priority_and_insertion(warm: Store) -> None:
    for name, priority in (("c", 0), ("a", 2), ("d", 0), ("b", 1)):
        warm.enqueue(name, priority=priority, now=T)
    assert claimed(warm, 3) == ["a", "b", "c"]


@pytest.mark.parametrize("limit", [0, -1, "3", 1.5, True])
def test_a_limit_that_makes_no_sense_is_refused(warm: Store, limit: object) -> None:
    claim: Callable[..., object] = warm.claim_many
    with pytest.raises(InvalidValue, match="limit"):
        claim("w", ttl=9, limit=limit)
