"""Real processes: started together, killed, and taken over."""

from __future__ import annotations

import os
import signal
from collections import Counter
from itertools import chain
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, event
from sqlalchemy.pool import NullPool

from fencedjobs import JobState, Store
from tests.databases import Database
from tests.jobs.helpers import T, claimed, row
from tests.processes import together

KILLED = -signal.SIGKILL


def opened(url: URL, **options: Any) -> Store:
    return Store(create_engine(url, poolclass=NullPool, **options))


def claim_all(url: URL, owner: str, limit: int) -> list[tuple[str, int]]:
    store = opened(url)
    taken: list[tuple[str, int]] = []
    while leases := store.claim_many(owner, ttl=9, limit=limit, now=T + 10):
        taken += [(lease.id, lease.fence) for lease in leases]
    return taken


def test_processes_started_together_claim_each_job_once(sync_store: Store, database: Database) -> None:
    for turn in range(2):
        names = [f"{turn}-{n}" for n in range(20)]
        sync_store.enqueue_many([{"id": id} for id in names[:6]], now=T)
        sync_store.claim_many("dead", ttl=10, limit=6, now=T)
        sync_store.enqueue_many([{"id": id, "delay": 10 * (n % 2)} for n, id in enumerate(names[6:])], now=T)
        answers = together(claim_all, [(database.url, f"w{n}", 1 + turn) for n in range(3)])
        expected = Counter((id, 2 if n < 6 else 1) for n, id in enumerate(names))
        assert Counter(chain.from_iterable(answers)) == expected


def enqueue_in_child(url: URL, id: str) -> str | None:
    return opened(url).enqueue(id, now=T)


def test_processes_started_together_create_an_id_once(sync_store: Store, database: Database) -> None:
    for id in ("a", "b"):
        answers = together(enqueue_in_child, [(database.url, id)] * 3)
        assert sorted(answers, key=str) == [None, None, id]


def claim_and_die(url: URL, id: str) -> None:
    opened(url).claim("w", ttl=10, id=id, now=T)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_killed_between_claim_and_complete_is_taken_over(
    sync_store: Store, database: Database
) -> None:
    sync_store.enqueue("j", {"qty": 7}, now=T)
    assert together(claim_and_die, [(database.url, "j")]) == [KILLED]
    assert row(sync_store, "j", "state", "owner", "fence", "attempts") == {
        "state": JobState.LEASED, "owner": "w", "fence": 1, "attempts": 1,
    }  # fmt: skip
    assert sync_store.claim("b", ttl=10, now=T + 9.999) is None
    lease = claimed(sync_store, "j", "b", now=T + 10)
    assert (lease.fence, lease.attempt, lease.payload) == (2, 2, {"qty": 7})
    sync_store.complete(lease, now=T + 11)


def take_and_die(url: URL, now: float) -> str | None:
    lease = opened(url).claim("w", ttl=10, now=now)
    if lease is not None and lease.payload == "poison":
        os.kill(os.getpid(), signal.SIGKILL)
    return None if lease is None else lease.id


def test_a_job_that_kills_its_workers_starts_three_times_and_no_more(
    sync_store: Store, database: Database
) -> None:
    """FAULTS 22: the crash counts as an attempt, and the other jobs proceed."""
    sync_store.enqueue("poison", "poison", max_attempts=3, priority=1, now=T)
    sync_store.enqueue("good", now=T)
    for attempt in range(3):
        assert together(take_and_die, [(database.url, T + 10 * attempt)]) == [KILLED]
    assert together(take_and_die, [(database.url, T + 30)]) == ["good"]
    expected = {
        "state": JobState.QUARANTINED, "reason": "lease expired, attempts used up", "attempts": 3, "fence": 3,
    }  # fmt: skip
    assert row(sync_store, "poison", *expected) == expected


def die_before_the_commit(url: URL, verb: str) -> None:
    store = opened(url)
    store.counts()

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_at_sqlite_s(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement == "COMMIT":
            kill()

    event.listen(store.transactions.engine, "commit", kill)
    event.listen(store.transactions.engine, "before_cursor_execute", kill_at_sqlite_s)
    if verb == "claim":
        store.claim("w", ttl=10, id="j", now=T)
    else:
        store.enqueue("new", now=T)


@pytest.mark.parametrize("verb", ["claim", "enqueue"])
def test_a_process_killed_before_its_commit_has_done_nothing(
    sync_store: Store, database: Database, verb: str
) -> None:
    sync_store.enqueue("j", now=T)
    assert together(die_before_the_commit, [(database.url, verb)]) == [KILLED]
    assert row(sync_store, "j", "state", "fence", "attempts") == {
        "state": JobState.READY, "fence": 0, "attempts": 0,
    }  # fmt: skip
    assert sync_store.get("new") is None
    assert claimed(sync_store, "j").fence == 1
    assert sync_store.enqueue("new", now=T) == "new"
