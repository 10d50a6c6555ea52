"""A worker in trouble: answers to COMMIT are lost, the database is away, a completion is poison."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from fencedjobs import (
    AsyncStore,
    AsyncWorker,
    JobState,
    LeaseLost,
    OutcomeUnknown,
    SchemaMismatch,
    Store,
    dialects,
)
from fencedjobs.jobs import JoinedJobs
from fencedjobs.metrics import Observed
from fencedjobs.own import Patience, Transactions
from fencedjobs.worker import Worker
from tests.hosts import on
from tests.proxy import Cut
from tests.worker.helpers import Remote, Workers, transaction, until

ROW = text("INSERT INTO fenced_guards VALUES ('row', 1, 0)")
CALM = {"ttl": 30, "poll": 30, "listen": False}  # nobody but those concerned uses the line


async def nothing(ctx: Any) -> None:
    pass


class Scissors:
    """Cuts the line at the next COMMIT of one part of the worker."""

    def __init__(self, remote: Remote, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
        self._remote = remote
        self._part = part
        self.cut: Cut | None = None
        self._commit = dialects.commit
        self._send = dialects.send_commit
        self._announce = dialects.announce_commit
        monkeypatch.setattr(dialects, "commit", self._committing)
        monkeypatch.setattr(dialects, "announce_commit", self._announcing)
        monkeypatch.setattr(dialects, "send_commit", self._sending)

    def _committing(self, *args: Any, **kwargs: Any) -> Any:
        self._snip()
        return self._commit(*args, **kwargs)

    def _announcing(self, connection: Any) -> None:
        self._snip()
        self._announce(connection)

    def _sending(self, *args: Any, **kwargs: Any) -> Any:
        self._snip()
        return self._send(*args, **kwargs)

    def _snip(self) -> None:
        here = threading.current_thread().name
        if self.cut is not None and (here == self._part or (self._part == "handler" and "handler" in here)):
            cut, self.cut = self.cut, None
            self._remote.line.arm(cut)


def scissors(remote: Remote, monkeypatch: pytest.MonkeyPatch, part: str) -> Scissors:
    if part == "handler" and remote.driver is not None:
        part = threading.current_thread().name  # where the loop is
    return Scissors(remote, monkeypatch, part)


# --- lost answers ---------------------------------------------------------------------------------


@on("postgresql", "mariadb")
@pytest.mark.parametrize("cut", [Cut.REQUEST, Cut.ANSWER])
def test_completions_whose_answer_is_lost_are_neither_lost_nor_done_again(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, cut: Cut
) -> None:
    for n in range(5):
        remote.store.enqueue(f"{n}", kind="k")
    cutter = scissors(remote, monkeypatch, "fencedjobs-settling")
    ran, together = [], threading.Barrier(5)

    def works(ctx: Any) -> int:
        ran.append(ctx.id)
        together.wait(5)
        cutter.cut = cut
        return int(ctx.attempt)

    assert remote.run({"k": works}, **CALM) == 5
    assert sorted(ran) == ["0", "1", "2", "3", "4"]
    assert {*remote.states().values()} == {"done"}
    assert remote.line.cuts == 1
    assert remote.seen.names.count("job.completed") == 5


@on("postgresql", "mariadb")
@pytest.mark.parametrize("ending", ["fails", "snoozes", "sets aside"])
def test_other_endings_whose_answer_is_lost_happen_once(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    from fencedjobs import Quarantine, Retry, Snooze

    remote.store.enqueue("a", kind="k")
    cutter = scissors(remote, monkeypatch, "fencedjobs-settling")

    def ends(ctx: Any) -> None:
        cutter.cut = Cut.ANSWER
        raise {"fails": ValueError("no"), "snoozes": Snooze(3600), "sets aside": Quarantine("bad")}[ending]

    remote.run({"k": ends}, retry=Retry(base=3600, jitter=False), **CALM)
    record = remote.records()["a"]
    assert remote.line.cuts == 1
    assert record.state is (JobState.QUARANTINED if ending == "sets aside" else JobState.SCHEDULED)
    assert len(record.errors) == (1 if ending == "fails" else 0)
    assert remote.seen.of(Observed.REFUSED) == []


@on("postgresql", "mariadb")
@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("cut", [Cut.REQUEST, Cut.ANSWER])
def test_a_transaction_whose_answer_is_lost_is_done_once(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, cut: Cut, swallows: bool
) -> None:
    remote.store.enqueue("a", kind="k")
    cutter = scissors(remote, monkeypatch, "handler")
    unknown = []

    async def writes(ctx: Any) -> None:
        try:
            async with transaction(ctx, ctx.attempt) as execute:
                await execute(ROW)
                cutter.cut = cut if ctx.attempt == 1 else None
        except OutcomeUnknown:
            unknown.append(ctx.attempt)
            if not swallows:
                raise

    assert remote.run({"k": writes}, **CALM) == 1
    record = remote.records()["a"]
    assert (unknown, remote.line.cuts) == ([1], 1)
    assert (record.state, record.result) == (JobState.DONE, 1 if cut is Cut.ANSWER else 2)
    assert remote.store.guards.highest("row") == 1
    assert remote.seen.names.count("job.completed") == 1


@on("postgresql", "mariadb")
def test_it_is_resolved_although_the_lease_was_renewed_meanwhile(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.store.enqueue("a", kind="k")
    cutter = scissors(remote, monkeypatch, "handler")

    def late(ctx: Any) -> None:
        raise AssertionError("the transaction took effect")

    async def writes(ctx: Any) -> None:
        assert ctx.attempt == 1
        first = ctx.lease.until
        try:
            async with transaction(ctx, "first") as execute:
                await execute(ROW)
                cutter.cut = Cut.REQUEST
        except OutcomeUnknown:
            until(lambda: ctx.lease.until > first, 5)
            async with transaction(ctx, "second") as execute:
                await execute(ROW)

    assert remote.run({"k": writes}, ttl=1.5, poll=30, listen=False) == 1
    assert remote.records()["a"].result == "second"


@on("postgresql", "mariadb")
def test_a_handler_that_repeats_a_transaction_that_took_effect_completes_once(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.store.enqueue("a", kind="k")
    cutter = scissors(remote, monkeypatch, "handler")

    async def repeats(ctx: Any) -> None:
        try:
            async with transaction(ctx, "first") as execute:
                await execute(ROW)
                cutter.cut = Cut.ANSWER
        except OutcomeUnknown:
            with pytest.raises(LeaseLost) as lost:
                async with transaction(ctx, "second"):
                    pass
            assert lost.value.completed

    assert remote.run({"k": repeats}, **CALM) == 1
    assert (remote.records()["a"].result, remote.records()["a"].attempts) == ("first", 1)
    assert remote.seen.names.count("job.completed") == 1
    assert remote.seen.of(Observed.REFUSED) == []


@on("postgresql", "mariadb")
def test_a_refused_renewal_after_a_lost_answer_is_no_lost_lease(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused because the job is done; and the lease was renewed within the transaction."""
    remote.store.enqueue("a", kind="k")
    cutter = scissors(remote, monkeypatch, "handler")
    unknown = []

    async def goes_on(ctx: Any) -> None:
        first = ctx.lease.until
        try:
            async with transaction(ctx, "first"):
                until(lambda: ctx.lease.until > first, 5)
                cutter.cut = Cut.ANSWER
        except OutcomeUnknown as error:
            unknown.append(error.subject.until == first)
            await asyncio.sleep(1)

    assert remote.run({"k": goes_on}, ttl=1.2, poll=30, listen=False) == 1
    assert unknown == [True]
    assert "job.lost" not in remote.seen.names


# --- poison ---------------------------------------------------------------------------------------


def poisoned(monkeypatch: pytest.MonkeyPatch, workers: Workers, is_poison: Callable[[Any], bool]) -> None:
    """The database refuses these results, alone and among others, with an error of its own."""
    complete, complete_many = JoinedJobs.complete, JoinedJobs.complete_many

    def refused(jobs: JoinedJobs, result: Any) -> None:
        if is_poison(result):
            jobs._tx.execute(text("SELECT * FROM no_such_table"))

    def alone(jobs: JoinedJobs, lease: Any, result: Any = None, **kwargs: Any) -> Any:
        refused(jobs, result)
        return complete(jobs, lease, result, **kwargs)

    def many(jobs: JoinedJobs, leases: Any, results: Any = None, **kwargs: Any) -> Any:
        for result in results or ():
            refused(jobs, result)
        return complete_many(jobs, leases, results, **kwargs)

    monkeypatch.setattr(JoinedJobs, "complete", alone)
    monkeypatch.setattr(JoinedJobs, "complete_many", many)


def test_a_completion_that_the_database_refuses_does_not_hold_up_the_others(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(6):
        workers.store.enqueue(f"{n}", kind="k", max_attempts=1)
    poisoned(monkeypatch, workers, lambda result: result == "poison")
    together = threading.Barrier(6)

    def works(ctx: Any) -> str:
        together.wait(5)
        return "poison" if ctx.id == "2" else "fine"

    assert workers.run({"k": works}, ttl=30) == 5
    states = workers.states()
    assert states.pop("2") == "quarantined"
    assert {*states.values()} == {"done"}
    assert "no_such_table" in workers.records()["2"].errors[0].text


def test_an_ending_that_cannot_be_written_at_all_is_left_to_the_end_of_its_lease(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.store.enqueue("a", kind="k")
    tried = []

    def never(jobs: JoinedJobs, *args: Any, **kwargs: Any) -> Any:
        tried.append(1)
        jobs._tx.execute(text("SELECT * FROM no_such_table"))

    monkeypatch.setattr(JoinedJobs, "complete", never)

    def works(ctx: Any) -> None:
        if ctx.attempt > 1 and len(tried) > 2:  # on a machine that stands still an attempt may not get there
            monkeypatch.undo()

    with workers.in_background({"k": works}, ttl=0.6):
        until(lambda: workers.states()["a"] == "done")
    attempts = workers.records()["a"].attempts
    assert attempts > 1
    assert 2 < len(tried) < 40 * (attempts - 1)
    assert workers.seen.of(Observed.REFUSED)[0]["what"] == "Done"


# --- the database is away -------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction whose connection is gone is repeated for 10 seconds; here for a moment."""
    monkeypatch.setattr(Transactions, "patience", lambda self, seconds=0.1: Patience(self.sleep, 0.1))


@on("postgresql", "mariadb")
def test_it_lives_through_a_while_without_the_database(remote: Remote, impatient: None) -> None:
    for n in range(20):
        remote.store.enqueue(f"{n}", kind="k")
    gone = threading.Event()

    async def works(ctx: Any) -> None:
        if ctx.id == "3" and not gone.is_set():
            gone.set()
            remote.line.down()
        await asyncio.sleep(0.01)

    with remote.in_background({"k": works}, ttl=1.5, concurrency=4):
        assert gone.wait(5)
        time.sleep(0.8)
        threads, before = threading.active_count(), time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.2
        assert threading.active_count() <= threads + 1
        told = remote.seen.of(Observed.WORKER_TROUBLE)
        assert 2 <= len(told) < 30
        assert {"part", "error", "owner"} <= {*told[0]}
        remote.line.up()
        until(lambda: {*remote.states().values()} == {"done"}, 15)


@on("postgresql", "mariadb")
def test_it_waits_for_the_database_at_its_start(remote: Remote, impatient: None) -> None:
    remote.store.enqueue("a", kind="k")
    remote.line.down()
    coming = threading.Timer(0.7, remote.line.up)
    coming.start()
    before = time.process_time()
    assert remote.run({"k": nothing}) == 1
    assert time.process_time() - before < 1
    claims = [facts for facts in remote.seen.of(Observed.WORKER_TROUBLE) if facts["part"] == "claims"]
    assert 1 <= len(claims) <= 6


@on("postgresql", "mariadb")
def test_told_to_stop_it_does_although_the_database_is_away(
    remote: Remote, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencedjobs.room._LAST_WORDS", 0.4)
    remote.store.enqueue("a", kind="k")
    running = threading.Event()

    async def works(ctx: Any) -> None:
        running.set()

    with remote.in_background({"k": works}):
        assert running.wait(5)
        until(lambda: "job.completed" in remote.seen.names)
        remote.line.down()
        time.sleep(0.2)
        begun = time.monotonic()
    assert time.monotonic() - begun < 4


def test_without_the_tables_run_says_so(workers: Workers) -> None:
    with workers.engine.begin() as connection:
        connection.execute(text("DROP TABLE fenced_jobs"))
    guard = threading.Timer(5, lambda: workers.running.stop())  # noqa: PLW0108 - it is not there yet
    guard.start()
    with pytest.raises(SchemaMismatch):
        workers.run({"k": nothing}, until_empty=False)
    guard.cancel()
    assert workers.running._room is None


def test_a_part_that_breaks_ends_the_worker_and_is_told(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in the worker itself: it must not go on with half its parts."""
    workers.store.enqueue("a", kind="k")

    def broken(*args: Any) -> float:
        raise ZeroDivisionError("a mistake")

    def waits(ctx: Any) -> None:
        monkeypatch.setattr("fencedjobs.heartbeat.Heartbeat._beat", broken)
        ctx.lost.wait(5)

    with pytest.raises(ZeroDivisionError):
        workers.run({"k": waits}, ttl=3)
    record = workers.records()["a"]
    assert (record.state, record.owner, record.attempts) == (JobState.READY, None, 0)


def test_jobs_whose_handlers_cannot_be_started_are_given_back(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        workers.store.enqueue(f"{n}", kind="k")
    begin, failed = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if thread.name == "fencedjobs-handler" and not failed:
            failed.append(1)
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert workers.run({"k": lambda ctx: None}) == 3
    assert failed == [1]
    assert {record.attempts for record in workers.records().values()} == {1}


# --- databases that cannot do it ------------------------------------------------------------------


@pytest.mark.parametrize(("database", "driver"), [("sqlite", None)], indirect=True)
def test_a_database_in_memory_is_refused_and_it_says_why(database: Any, driver: Any) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    from fencedjobs import UnsupportedDatabase

    worker = Worker(Store(create_engine("sqlite://")))
    worker.handler("k")(lambda ctx: None)
    with pytest.raises(UnsupportedDatabase, match="use a file or a server"):
        worker.run()
    aio = AsyncWorker(AsyncStore(create_async_engine("sqlite+aiosqlite://")))
    aio.handler("k")(nothing)
    with pytest.raises(UnsupportedDatabase, match="use a file or a server"):
        asyncio.run(aio.run())
    with pytest.raises(UnsupportedDatabase):
        worker.run()  # and not that it runs already
