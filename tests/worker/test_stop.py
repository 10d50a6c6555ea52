"""How a worker stops: when it is told to, in what time, and what becomes of the jobs in its hands."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from fencedjobs import AsyncStore, AsyncWorker, InvalidValue, JobState, Store, Worker
from fencedjobs.metrics import Observed
from fencedjobs.values import JobLease
from tests.hosts import on
from tests.worker.helpers import Remote, Seen, Workers, transaction, until


async def nothing(ctx: Any) -> None:
    pass


def given_back(workers: Workers, id: str) -> None:
    record = workers.records()[id]
    assert (record.state, record.attempts, record.owner) == (JobState.READY, 0, None)


def test_told_by_a_handler_it_lets_the_others_finish(workers: Workers) -> None:
    workers.store.enqueue("a", kind="stops")
    workers.store.enqueue("b", kind="k")
    running, stopped = threading.Event(), threading.Event()

    async def stops(ctx: Any) -> None:
        assert await asyncio.to_thread(running.wait, 5)
        workers.running.stop()
        stopped.set()

    def finishes(ctx: Any) -> None:
        running.set()
        assert stopped.wait(5)
        time.sleep(0.2)

    assert workers.run({"stops": stops, "k": finishes}, until_empty=False) == 2
    assert workers.states() == {"a": "done", "b": "done"}
    assert workers.seen.names[-1] == "worker.stopped"


def test_told_by_another_thread_it_claims_no_more(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    running, release = threading.Event(), threading.Event()
    ran: list[str] = []

    def waits(ctx: Any) -> None:
        ran.append(ctx.id)
        running.set()
        release.wait(5)

    with workers.in_background({"k": waits}, poll=30):
        assert running.wait(5)
        workers.running.stop()
        until(lambda: "worker.stopping" in workers.seen.names)
        workers.store.enqueue("b", kind="k")
        time.sleep(0.1)
        release.set()
        until(lambda: "job.completed" in workers.seen.names)
    assert workers.states() == {"a": "done", "b": "ready"}
    assert ran == ["a"]
    given_back(workers, "b")  # by a claim that was under way then, or never claimed


def test_what_does_not_finish_in_the_grace_is_given_back(workers: Workers) -> None:
    workers.store.enqueue("a", kind="sync")
    workers.store.enqueue("b", kind="async")
    running, told = threading.Barrier(3), []

    def hangs(ctx: Any) -> str:
        running.wait(5)
        told.append(("sync", ctx.lost.wait(10)))
        return "late"

    async def waits(ctx: Any) -> None:
        await asyncio.to_thread(running.wait, 5)
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            told.append(("async", ctx.lost.is_set()))
            raise

    with workers.in_background({"sync": hangs, "async": waits}, grace=0.3):
        running.wait(5)
        begun = time.monotonic()
    assert 0.3 <= time.monotonic() - begun < 3
    until(lambda: sorted(told) == [("async", True), ("sync", True)])
    given_back(workers, "a")
    given_back(workers, "b")
    assert {facts["why"] for facts in workers.seen.of(Observed.GIVEN_BACK)} == {"the worker stops"}


def test_the_second_time_it_does_not_wait(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    running, release = threading.Event(), threading.Event()

    def hangs(ctx: Any) -> None:
        running.set()
        release.wait(20)

    begun = 0.0
    with workers.in_background({"k": hangs}, grace=60):
        assert running.wait(5)
        workers.running.stop()
        begun = time.monotonic()
    assert time.monotonic() - begun < 3
    given_back(workers, "a")
    release.set()
    until(lambda: "job.refused" in workers.seen.names)  # its late return
    given_back(workers, "a")


def test_what_has_not_begun_is_given_back_at_once(workers: Workers) -> None:
    """One handler blocks the loop of an async worker; the others wait for the loop, with leases."""
    for n in range(4):
        workers.store.enqueue(f"{n}", kind="k")
    begun = []

    async def blocks(ctx: Any) -> None:
        begun.append(ctx.id)
        if len(begun) == 1:  # a second time would not wait for the handlers
            workers.running.stop()
        time.sleep(0.5)

    workers.run({"k": blocks}, until_empty=False, concurrency=4, grace=10)
    states = workers.states()
    assert {states[id] for id in begun} == {"done"}
    for id in {*states} - {*begun}:
        given_back(workers, id)
    if workers.driver is not None:
        assert len(begun) == 1


def stopped_during_a_claim(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Run a worker that is told to stop before it hears the answer to its first claim."""
    claim_many, claimed = Store.claim_many, threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        leases = claim_many(*args, **kwargs)
        if leases:
            workers.running.stop()
            meanwhile()
            claimed.set()
        return leases

    def never(ctx: Any) -> None:
        raise AssertionError("nothing is begun after the stop")

    monkeypatch.setattr(Store, "claim_many", slow)
    with workers.in_background({"k": never}):
        assert claimed.wait(20)


def test_a_claim_that_was_under_way_is_given_back(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    workers.store.enqueue("a", kind="k")
    stopped_during_a_claim(workers, monkeypatch)
    given_back(workers, "a")


def test_of_a_claim_that_cannot_be_given_back_it_is_said(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would know otherwise what became of jobs that were claimed."""
    for id in "abc":
        workers.store.enqueue(id, kind="k")
    release = Store.release

    def fails_once(self: Store, lease: JobLease, **kwargs: Any) -> None:
        if lease.id == "a":
            raise ConnectionError("away")
        release(self, lease, **kwargs)

    def a_rival_claims() -> None:
        assert workers.store.claim("rival", id="b", ttl=60, now=workers.store.now() + 3600) is not None

    monkeypatch.setattr(Store, "release", fails_once)
    stopped_during_a_claim(workers, monkeypatch, a_rival_claims)
    refused = [(facts["id"], facts["fence"], facts["what"]) for facts in workers.seen.of(Observed.REFUSED)]
    assert sorted(refused) == [("a", 1, "GivenBack"), ("b", 1, "GivenBack")]
    assert [facts["part"] for facts in workers.seen.of(Observed.WORKER_TROUBLE)] == ["claims"]
    given_back(workers, "c")


@pytest.mark.realtime
def test_while_it_stops_leases_are_renewed(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    running = threading.Event()

    def finishes(ctx: Any) -> None:
        running.set()
        time.sleep(2.4)

    with workers.in_background({"k": finishes}, ttl=1.2):
        assert running.wait(5)
    assert workers.states() == {"a": "done"}
    assert workers.records()["a"].fence == 1


def test_it_waits_for_a_handler_that_goes_on_after_its_transaction(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    committed, finished = threading.Event(), threading.Event()

    async def goes_on(ctx: Any) -> None:
        async with transaction(ctx):
            pass
        committed.set()
        await asyncio.sleep(0.4)
        finished.set()

    with workers.in_background({"k": goes_on}):
        assert committed.wait(5)
    assert finished.is_set()


def test_a_worker_can_run_again(workers: Workers) -> None:
    engine = workers.engine
    worker = Worker(Store(engine), **workers.options)
    worker.handler("k")(lambda ctx: None)
    for id in ("a", "b"):
        workers.store.enqueue(id, kind="k")
        assert worker.run(until_empty=True) == 1
    assert workers.states() == {"a": "done", "b": "done"}


def run_again(worker: Any) -> None:
    answer = worker.run()
    if asyncio.iscoroutine(answer):
        asyncio.run(answer)


def test_it_runs_once_at_a_time(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    refused = []

    def again(ctx: Any) -> None:
        with pytest.raises(InvalidValue, match="runs already"):
            run_again(workers.running)
        refused.append(True)

    assert workers.run({"k": again}) == 1
    assert refused == [True]


@on("postgresql", "mariadb")
def test_it_stops_although_the_database_does_not_answer(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencedjobs.room._LAST_WORDS", 0.4)
    remote.store.enqueue("a", kind="k")
    running = threading.Event()

    def waits(ctx: Any) -> None:
        running.set()
        ctx.lost.wait(20)

    with remote.in_background({"k": waits}, ttl=30, grace=0.1):
        assert running.wait(5)
        remote.line.silence()
        begun = time.monotonic()
        remote.running.stop()
        remote.running.stop()
    assert time.monotonic() - begun < 3
    remote.line.speak()


# --- cancelled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_async_worker_gives_its_jobs_back(workers: Workers, times: int) -> None:
    if workers.driver is None:
        pytest.skip("only tasks are cancelled")
    for id in ("a", "b"):
        workers.store.enqueue(id, kind=id)

    async def body() -> None:
        assert workers.driver is not None
        engine = create_async_engine(workers.database.async_url(workers.driver))
        worker = AsyncWorker(AsyncStore(engine), **{**workers.options, "grace": 60})
        waiting, hanging = asyncio.Event(), threading.Event()

        @worker.handler("a")
        async def waits(ctx: Any) -> None:
            waiting.set()
            await asyncio.sleep(60)

        @worker.handler("b")
        def hangs(ctx: Any) -> None:
            hanging.set()
            ctx.lost.wait(20)

        task = asyncio.create_task(worker.run())
        await waiting.wait()
        await asyncio.to_thread(hanging.wait, 5)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.005)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert worker._room is None
        await engine.dispose()

    asyncio.run(body())
    given_back(workers, "a")
    given_back(workers, "b")


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_and_the_former_handlers_come_back(
    workers: Workers, number: signal.Signals
) -> None:
    workers.store.enqueue("a", kind="k")
    former = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}

    def kills(ctx: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.2)

    assert workers.run({"k": kills}, until_empty=False, poll=30) == 1
    assert {one: signal.getsignal(one) for one in former} == former
    assert workers.states() == {"a": "done"}


def test_a_storm_of_signals_stops_it_too(workers: Workers) -> None:
    for n in range(3):
        workers.store.enqueue(f"{n}", kind="k")

    def storms(ctx: Any) -> None:
        for _ in range(200):
            os.kill(os.getpid(), signal.SIGTERM)

    workers.run({"k": storms}, until_empty=False, poll=30)
    assert {*workers.states().values()} <= {"done", "ready"}
    assert {record.owner for record in workers.records().values()} == {None}


class Alarm(Exception):
    pass


def test_a_signal_handler_of_the_programs_own_that_raises_ends_it_properly(workers: Workers) -> None:
    if workers.driver is not None:
        pytest.skip("there it comes out of the loop")
    workers.store.enqueue("a", kind="k")
    release = threading.Event()

    def raises(*_: Any) -> None:
        raise Alarm

    def hangs(ctx: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        release.wait(20)

    former = signal.signal(signal.SIGUSR1, raises)
    try:
        with pytest.raises(Alarm):
            workers.run({"k": hangs}, until_empty=False, grace=60)
    finally:
        signal.signal(signal.SIGUSR1, former)
        release.set()
    assert workers.running._room is None
    given_back(workers, "a")


# --- nothing is left behind -----------------------------------------------------------------------


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fencedjobs-")]


def connections(workers: Workers) -> int:
    if workers.database.backend == "sqlite":
        path = str(workers.database.url.database)
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(os.path.exists(link) and os.readlink(link).startswith(path) for link in links)
    counting = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()",
        "mariadb": "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()",
    }
    with workers.engine.connect() as connection:
        return int(connection.execute(text(counting[workers.database.backend])).scalar_one())


@pytest.mark.filterwarnings("error")
def test_no_thread_and_no_connection_is_left(workers: Workers) -> None:
    until(lambda: not ours(), 20)  # those of other tests
    before = connections(workers)
    seen = Seen()
    for n in range(6):
        workers.store.enqueue(f"{n}", kind="k", max_attempts=1)

    async def works(ctx: Any) -> None:
        if ctx.id == "5":
            raise ValueError("one fails")
        async with transaction(ctx):
            pass

    assert workers.run({"k": works}, observe=seen) == 5
    assert ours() in ([], ["fencedjobs-handler"] * len(ours()))  # the room's are gone, the others go
    until(lambda: not ours(), 3)
    until(lambda: connections(workers) <= max(before, 1), 3)


def test_the_engine_of_the_application_gets_no_more_listeners(workers: Workers) -> None:
    engine = create_engine(workers.database.url)
    worker = Worker(Store(engine), **workers.options)
    worker.handler("k")(lambda ctx: None)
    counts = []
    for _ in range(3):
        worker.run(until_empty=True)
        counts.append(len(engine.pool.dispatch.connect) + len(engine.dispatch.commit))
    engine.dispose()
    assert counts[0] == counts[-1]
