"""Many at once, by threads: exactly one is right, on every database."""

# ruff: noqa: B023 - the calls of a turn are over before the next turn begins

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Barrier
from typing import Any, NoReturn

import pytest

from fencedjobs import JobLease, JobState, LeaseLost, Retry, Store
from fencedjobs.own import Patience
from tests.databases import Database
from tests.jobs.helpers import T, claimed, ids, on, row

ROUNDS = 4
AT_ONCE = Retry(base=0)


@pytest.fixture
def crowd(database: Database) -> Iterator[Store]:
    """A store with a connection for each of eight threads."""
    engine = database.engine(pool_size=8)
    store = Store(engine)
    store.counts()
    yield store
    engine.dispose()


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The answers of these calls, made by one thread each at the same moment."""
    barrier = Barrier(len(calls))

    def call(one: Callable[[], Any]) -> Any:
        barrier.wait()
        return one()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(call, calls))


def by_eight(call: Callable[[int], Any]) -> list[Any]:
    return at_once([lambda n=n: call(n) for n in range(8)])  # type: ignore[misc]


def winners(answers: Sequence[JobLease | None]) -> list[JobLease]:
    return [lease for lease in answers if lease is not None]


def test_of_eight_claims_of_one_ready_job_exactly_one_wins(crowd: Store) -> None:
    for turn in range(ROUNDS):
        crowd.enqueue(f"next{turn}", now=T)
        won = winners(by_eight(lambda n: crowd.claim(f"w{n}", ttl=9, now=T)))
        assert [(lease.id, lease.fence) for lease in won] == [(f"next{turn}", 1)]
        crowd.enqueue(f"id{turn}", now=T)
        won = winners(by_eight(lambda n: crowd.claim(f"w{n}", ttl=9, id=f"id{turn}", now=T)))
        assert [(lease.id, lease.fence) for lease in won] == [(f"id{turn}", 1)]
        assert row(crowd, f"id{turn}", "owner", "fence", "attempts") == {
            "owner": won[0].owner, "fence": 1, "attempts": 1
        }  # fmt: skip


def test_of_eight_claims_of_one_due_or_expired_job_exactly_one_wins(crowd: Store) -> None:
    crowd.enqueue("due", run_at=T + 10, now=T)
    crowd.enqueue("expired", now=T)
    claimed(crowd, "expired", "dead", ttl=10)
    won = winners(by_eight(lambda n: crowd.claim(f"w{n}", ttl=9, now=T + 10)))
    assert sorted((lease.id, lease.fence) for lease in won) == [("due", 1), ("expired", 2)]
    for turn in range(1, ROUNDS):
        won = winners(by_eight(lambda n: crowd.claim(f"w{n}", ttl=9, id="expired", now=T + 10 * (turn + 1))))
        assert [lease.fence for lease in won] == [2 + turn], won


def test_eight_claimers_of_forty_jobs_get_each_job_once(crowd: Store) -> None:
    """Ready, due and expired ones; one by one and several at a time."""
    for turn in range(ROUNDS):
        names = [f"{turn}-{n}" for n in range(40)]
        crowd.enqueue_many([{"id": id} for id in names[:10]], now=T)
        crowd.claim_many("dead", ttl=5, limit=10, now=T)
        crowd.enqueue_many([{"id": id, "delay": 5} for id in names[10:20]], now=T)
        crowd.enqueue_many([{"id": id} for id in names[20:]], now=T)
        limit = 1 + 3 * (turn % 2)

        def until_empty(n: int) -> list[JobLease]:
            taken: list[JobLease] = []
            while leases := crowd.claim_many(f"w{n}", ttl=9, limit=limit, now=T + 5):
                taken += leases
            return taken

        taken = list(chain.from_iterable(by_eight(until_empty)))
        assert Counter(ids(taken)) == Counter(names), "each exactly once, and none left"
        assert {lease.id: lease.fence for lease in taken} == {
            id: 2 if n < 10 else 1 for n, id in enumerate(names)
        }
        assert crowd.complete_many(taken, now=T + 6) == []


def test_an_empty_answer_is_not_somebody_in_the_way(crowd: Store) -> None:
    """As many jobs as claimers: each gets one, whoever has locked what at that moment."""
    for turn in range(ROUNDS):
        crowd.enqueue_many([{"id": f"{turn}-{n}"} for n in range(8)], now=T)
        answers = by_eight(lambda n: crowd.claim(f"w{n}", ttl=9, now=T))
        assert sorted(ids(winners(answers))) == sorted(f"{turn}-{n}" for n in range(8)), answers


def test_of_eight_enqueues_of_one_id_exactly_one_creates(crowd: Store) -> None:
    for turn in range(ROUNDS):
        id = f"j{turn}"
        answers = by_eight(lambda n: crowd.enqueue(id, {"by": n}, now=T))
        assert sorted(answers, key=str) == [None] * 7 + [id], answers
        assert row(crowd, id, "payload") == {"payload": {"by": answers.index(id)}}


def enqueue_in_all_orders(crowd: Store) -> None:
    """Eight enqueues of the same ids, each in an order of its own: each is created once."""
    for turn in range(ROUNDS):
        names = [f"{turn}-{n}" for n in range(12)]
        rotated = [names[n:] + names[:n] for n in range(8)]
        answers = by_eight(lambda n: crowd.enqueue_many([{"id": id} for id in rotated[n]], now=T))
        assert sorted(chain.from_iterable(answers)) == sorted(names), answers


def test_of_eight_enqueues_of_many_overlapping_ids_each_is_created_once(crowd: Store) -> None:
    enqueue_in_all_orders(crowd)


@on("postgresql")
def test_enqueues_of_the_same_ids_in_any_order_do_not_wait_in_a_circle(
    crowd: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a deadlock shows after a second, and each that is broken may leave another."""
    tries = list[float]()
    monkeypatch.setattr(Patience, "__call__", lambda self: tries.append(time.monotonic()) or True)
    enqueue_in_all_orders(crowd)
    assert tries == []


def test_many_are_in_the_order_in_which_they_were_given(crowd: Store) -> None:
    names = ["m", "z", "a", "Z", "é", "0"]
    crowd.enqueue_many([{"id": id} for id in names], now=T)
    assert ids(crowd.claim_many("w", ttl=9, limit=9, now=T)) == names


def test_a_purged_id_is_revived_once_and_keeps_its_fence(crowd: Store) -> None:
    crowd.enqueue("j", now=T)
    for turn in range(1, ROUNDS + 1):
        crowd.complete(claimed(crowd, "j"), now=T)
        crowd.purge(before=T + 1)
        answers = by_eight(lambda n: crowd.enqueue("j", now=T))
        assert sorted(answers, key=str) == [None] * 7 + ["j"], answers
        assert row(crowd, "j", "fence", "attempts") == {"fence": turn, "attempts": 0}


def test_purge_racing_with_enqueue_never_lets_the_fence_back(crowd: Store) -> None:
    crowd.enqueue("j", now=T)
    highest = 0
    for _ in range(ROUNDS * 3):
        lease = claimed(crowd, "j")
        assert lease.fence == highest + 1, f"fence {lease.fence} after {highest}"
        highest = lease.fence
        crowd.complete(lease, now=T)
        purged, *created = at_once(
            [lambda: crowd.purge(before=T + 1)] + [lambda: crowd.enqueue("j", now=T)] * 3
        )
        assert created.count("j") <= 1, created
        if not purged:  # an enqueue had the row locked at that moment, and purge passed it by
            assert created == [None] * 3
            assert crowd.purge(before=T + 1) == 1
        if "j" not in created:
            assert crowd.enqueue("j", now=T) == "j"


def test_of_eight_ends_of_one_lease_exactly_one_holds(crowd: Store) -> None:
    ends: list[Callable[[JobLease], Any]] = [
        lambda lease: crowd.complete(lease, now=T), lambda lease: crowd.release(lease, now=T),
        lambda lease: crowd.fail(lease, "x", retry=AT_ONCE, now=T),
        lambda lease: [refuse(lost) for lost in crowd.complete_many([lease], now=T)],
    ]  # fmt: skip
    for turn in range(ROUNDS):
        crowd.enqueue(f"j{turn}", now=T)
        lease = claimed(crowd, f"j{turn}")

        def end(n: int) -> bool:
            try:
                ends[n % len(ends)](lease)
            except LeaseLost:
                return False
            return True

        answers = by_eight(end)
        assert answers.count(True) == 1, answers
        assert row(crowd, f"j{turn}", "fence", "owner") == {"fence": 1, "owner": None}


def refuse(lease: JobLease) -> NoReturn:
    raise LeaseLost(lease)


def test_renewal_and_takeover_at_the_lease_end_never_both_happen(crowd: Store) -> None:
    """One renews just before the end, the others claim at it: the row is of one, and he knows."""
    crowd.enqueue("j", max_attempts=99, now=T)
    holder = claimed(crowd, "j", ttl=1)
    for turn in range(1, ROUNDS * 2):
        end = holder.until
        calls: list[Callable[[], JobLease | None]] = [lambda: renewed(crowd, holder, end - 0.001)]
        calls += [lambda n=n: crowd.claim(f"w{turn}-{n}", ttl=1, id="j", now=end) for n in range(3)]  # type: ignore[misc]
        answers = winners(at_once(calls))
        record = crowd.get("j")
        assert record is not None
        present = [lease for lease in answers if (lease.owner, lease.fence) == (record.owner, record.fence)]
        assert len(present) == 1, f"the row is {record}, the answers {answers}"
        taken_over = [lease for lease in answers if lease.fence != holder.fence]
        assert len(taken_over) <= 1, answers
        holder = present[0]


def renewed(store: Store, lease: JobLease, now: float) -> JobLease | None:
    try:
        return store.renew(lease, ttl=1, now=now)
    except LeaseLost:
        return None


def test_of_eight_claims_of_a_new_lock_exactly_one_wins(crowd: Store) -> None:
    for turn in range(ROUNDS):
        won = [
            lease
            for lease in by_eight(lambda n: crowd.locks.claim(f"l{turn}", f"w{n}", ttl=9, now=T))
            if lease is not None
        ]
        assert [lease.fence for lease in won] == [1], won
        won = [
            lease
            for lease in by_eight(lambda n: crowd.locks.claim(f"l{turn}", f"w{n}", ttl=9, now=T + 9))
            if lease is not None
        ]
        assert [lease.fence for lease in won] == [2], won


def test_whatever_races_the_attempts_are_exact(crowd: Store) -> None:
    """FAULTS 69: a counter by read-then-write would lose some, on the host's plain engine."""
    crowd.enqueue("j", max_attempts=1000, now=T)

    def attempts(n: int) -> int:
        made = 0
        while made < 5:
            lease = crowd.claim(f"w{n}", ttl=9, id="j", now=T)
            if lease is not None:
                made += 1
                assert crowd.fail(lease, "x", retry=AT_ONCE, now=T) is JobState.READY
        return made

    made = sum(at_once([lambda n=n: attempts(n) for n in range(4)]))  # type: ignore[misc]
    assert row(crowd, "j", "attempts", "fence") == {"attempts": made, "fence": made}
    assert len(row(crowd, "j", "errors")["errors"]) == 10
