"""Leases in the hands of a worker: kept while handlers run, lost in time, and refused afterwards."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from fencedjobs import JobState, LeaseLost, Retry, Store, UnitOfWork
from fencedjobs.metrics import Observed
from tests.databases import Database
from tests.hosts import on
from tests.worker.helpers import Remote, Workers, settled, transaction, until

ROW = text("INSERT INTO fenced_guards VALUES ('row', 1, 0)")


def thief(workers: Workers) -> Store:
    """A store that believes that an hour has passed."""
    return Store(workers.engine, clock=lambda: workers.store.now() + 3600)


# --- kept -----------------------------------------------------------------------------------------


@pytest.mark.realtime
def test_handlers_of_several_leases_keep_theirs(workers: Workers) -> None:
    for kind in ("sleeps", "waits", "burns"):
        workers.store.enqueue(kind, kind=kind)

    def sleeps(ctx: Any) -> None:
        time.sleep(4.5)

    async def waits(ctx: Any) -> None:
        await asyncio.sleep(4.5)

    def burns(ctx: Any) -> None:
        end = time.monotonic() + 4.5
        while time.monotonic() < end:
            sum(range(1000))

    assert workers.run({"sleeps": sleeps, "waits": waits, "burns": burns}, ttl=1.5) == 3
    assert {record.attempts for record in workers.records().values()} == {1}  # what came too late is refunded
    assert "job.lost" not in workers.seen.names


@pytest.mark.realtime
def test_a_handler_that_blocks_its_loop_keeps_its_lease(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")

    async def blocks(ctx: Any) -> None:
        time.sleep(4.5)

    assert workers.run({"k": blocks}, ttl=1.5) == 1
    assert workers.records()["a"].attempts == 1
    assert "job.lost" not in workers.seen.names


@pytest.mark.realtime
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_an_open_transaction_on_one_job_does_not_keep_the_others_from_being_renewed(
    database: Database, engine: Engine
) -> None:
    workers = Workers(database, None, Store(engine))
    workers.store.enqueue_many([{"id": id, "kind": "k"} for id in ("a", "b")])
    begun, over = threading.Event(), threading.Event()

    def waits(ctx: Any) -> bool:
        if ctx.id == "a":
            begun.set()
        over.wait(10)
        return bool(ctx.lost.is_set())

    with workers.in_background({"k": waits}, ttl=1.2), Session(engine) as session:
        assert begun.wait(10)
        UnitOfWork(session).jobs.cancel("a")
        time.sleep(2.4)
        over.set()
        until(lambda: workers.states()["b"] == "done")
        session.rollback()
    assert workers.records()["b"].result is False
    assert [facts["id"] for facts in workers.seen.of(Observed.LOST)] == ["a"]


def test_the_lease_in_the_context_is_the_renewed_one(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    ends = []

    def looks(ctx: Any) -> None:
        first = ctx.lease.until
        until(lambda: ctx.lease.until > first, 5)
        ends.extend([first, ctx.lease.until])

    assert workers.run({"k": looks}, ttl=0.9) == 1
    assert ends[0] < ends[1]


# --- the local end --------------------------------------------------------------------------------


def delayed(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    """The answer of this verb takes so long to arrive."""
    verb = getattr(Store, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        answer = verb(*args, **kwargs)
        time.sleep(seconds)
        return answer

    monkeypatch.setattr(Store, name, slow)


def test_the_local_end_counts_from_when_the_claim_was_sent(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.store.enqueue("a", kind="k")
    delayed(monkeypatch, "claim_many", 0.3)
    left = []

    def looks(ctx: Any) -> None:
        left.append(ctx.remaining)

    workers.run({"k": looks}, ttl=30)
    assert left[0] <= 29.7


@pytest.mark.realtime
def test_what_a_claim_brings_too_late_is_given_back(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler would be told at once that the lease is lost, and the job stay leased to nobody."""
    workers.store.enqueue("a", kind="k")
    claim, slow = Store.claim_many, [2.75]

    def late(*args: Any, **kwargs: Any) -> Any:
        answer = claim(*args, **kwargs)
        time.sleep(slow.pop() if slow and answer else 0)
        return answer

    monkeypatch.setattr(Store, "claim_many", late)
    calls = []

    def notes(ctx: Any) -> None:
        calls.append((ctx.fence, ctx.attempt))

    assert workers.run({"k": notes}, ttl=3.0) == 1
    assert calls == [(2, 1)]
    assert workers.seen.of(Observed.GIVEN_BACK)[0]["fence"] == 1
    assert not workers.seen.of(Observed.LOST)


def test_the_local_end_counts_from_when_the_renewal_was_sent(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.store.enqueue("a", kind="k")
    delayed(monkeypatch, "renew_many", 0.3)
    left = []

    def looks(ctx: Any) -> None:
        first = ctx.lease.until
        until(lambda: ctx.lease.until > first, 5)
        left.append(ctx.remaining)

    workers.run({"k": looks}, ttl=1.5)
    assert left[0] <= 1.2


def test_the_local_end_is_never_after_the_deadline(workers: Workers) -> None:
    now = workers.store.now()
    workers.store.enqueue("soon", kind="soon", deadline=now + 1.2)
    workers.store.enqueue("later", kind="later", deadline=now + 40)
    late, gone = [], []

    def soon(ctx: Any) -> None:
        assert ctx.lost.wait(5)
        gone.append(ctx.deadline - workers.store.now())

    def later(ctx: Any) -> None:
        late.append(ctx._attempt._latest - time.monotonic() - (ctx.deadline - workers.store.now()))

    workers.run({"soon": soon, "later": later}, ttl=30)
    assert 0 < gone[0] < 1.2  # told before the end, not after it
    assert late[0] < 0.01


def test_where_the_deadline_is_near_and_the_clock_unknown_the_job_is_given_back(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.store.enqueue("a", kind="k", deadline=workers.store.now() + 20)
    asked = []
    now = Store.now

    def fails_once(store: Store) -> float:
        asked.append(1)
        if len(asked) == 1:
            raise ConnectionResetError("the line is cut")
        return now(store)

    monkeypatch.setattr(Store, "now", fails_once)
    assert workers.run({"k": lambda ctx: None}, ttl=30) == 1
    record = workers.records()["a"]
    assert (record.fence, record.attempts) == (2, 1)


# --- lost -----------------------------------------------------------------------------------------


def test_who_lost_his_lease_is_told_and_cannot_touch_the_new_owners_result(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    told: list[Any] = []

    def robbed(ctx: Any) -> str:
        lease = thief(workers).claim("thief", ttl=600, id="a")
        assert lease is not None
        assert ctx.lost.wait(5)
        with pytest.raises(LeaseLost):
            ctx.check()
        told.append(lease)
        thief(workers).complete(lease, "the thief's")
        return "mine"

    assert workers.run({"k": robbed}, ttl=0.6) == 0
    record = workers.records()["a"]
    assert (record.state, record.result, record.fence) == (JobState.DONE, "the thief's", 2)
    assert len(workers.seen.of(Observed.LOST)) == 1
    assert workers.seen.of(Observed.REFUSED)[0]["what"] == "Done"


def test_an_async_handler_is_cancelled_with_its_lease(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    cancelled = []

    async def waits(ctx: Any) -> None:
        workers.store.cancel("a")
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.append(ctx.lost.is_set())
            raise

    assert workers.run({"k": waits}, ttl=0.6) == 0
    assert cancelled == [True]
    assert workers.states() == {"a": "cancelled"}


@pytest.mark.parametrize("verb", ["cancel", "quarantine"])
def test_what_an_operator_ends_stays_ended(workers: Workers, verb: str) -> None:
    workers.store.enqueue("a", kind="k")

    def ignores(ctx: Any) -> str:
        getattr(workers.store, verb)("a", *(["enough"] if verb == "quarantine" else []))
        return "mine"

    assert workers.run({"k": ignores}, ttl=30) == 0
    assert workers.states() == {"a": "cancelled" if verb == "cancel" else "quarantined"}
    assert workers.seen.of(Observed.REFUSED)[0]["what"] == "Done"


@pytest.mark.parametrize("swallows", [False, True])
def test_a_transaction_under_a_lost_lease_writes_nothing_and_is_seen(
    workers: Workers, swallows: bool
) -> None:
    workers.store.enqueue("a", kind="k")

    async def late(ctx: Any) -> None:
        assert thief(workers).claim("thief", ttl=7200, id="a")
        try:
            async with transaction(ctx) as execute:
                await execute(ROW)
        except LeaseLost:
            if not swallows:
                raise

    assert workers.run({"k": late}, ttl=30) == 0
    assert workers.store.guards.highest("row") is None
    assert (workers.records()["a"].owner, workers.records()["a"].errors) == ("thief", ())
    assert len(workers.seen.of(Observed.REFUSED)) == 1


@pytest.mark.parametrize("swallows", [False, True])
def test_a_checkpoint_under_a_lost_lease_is_refused_and_seen(workers: Workers, swallows: bool) -> None:
    workers.store.enqueue("a", kind="k")

    async def late(ctx: Any) -> None:
        assert thief(workers).claim("thief", ttl=7200, id="a")
        try:
            await settled(ctx.checkpoint({"page": 3}))
        except LeaseLost:
            assert ctx.progress is None
            if not swallows:
                raise

    assert workers.run({"k": late}, ttl=30) == 0
    assert len(workers.seen.of(Observed.REFUSED)) == 1
    assert workers.records()["a"].owner == "thief"


@on("postgresql", "mariadb")
def test_who_cannot_renew_is_told_before_the_lease_is_over(remote: Remote) -> None:
    """The line is silent: nobody gets an answer, and nobody gets an error."""
    remote.store.enqueue("a", kind="k")
    left: list[float] = []

    def works(ctx: Any) -> int:
        if ctx.attempt == 1:
            remote.line.silence()
            assert ctx.lost.wait(5)
            left.append(ctx.remaining)
            remote.line.speak()
        return int(ctx.attempt)

    assert remote.run({"k": works}, ttl=1.2, retry=Retry(base=0)) == 1
    assert 0 <= left[0] <= 0.12
    assert len(remote.seen.of(Observed.LOST)) == 1


@on("postgresql", "mariadb")
def test_a_handler_that_runs_too_long_is_given_up_while_the_line_is_silent(remote: Remote) -> None:
    remote.store.enqueue("a", kind="k")
    freed = threading.Event()

    def hangs(ctx: Any) -> None:
        if ctx.attempt == 1:
            remote.line.silence()
            assert ctx.lost.wait(5)  # not by its lease, which would last longer
            freed.set()
            remote.line.speak()

    assert remote.run({"k": hangs}, ttl=30, limits={"k": {"max_runtime": 0.3}}) == 1
    assert freed.is_set()
    assert remote.records()["a"].errors[0].kind == "TimeoutError"
