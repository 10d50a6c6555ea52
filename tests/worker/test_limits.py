"""How long and how many: max_runtime, concurrency, queues, kinds, retries, and what counts as empty."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from fencedjobs import InvalidValue, JobState, Retry, Store
from fencedjobs.metrics import Observed
from tests.worker.helpers import AT_ONCE, Workers, transaction, until


async def nothing(ctx: Any) -> None:
    pass


# --- max_runtime ----------------------------------------------------------------------------------


def test_a_hung_handler_frees_its_place_and_its_job_is_tried_again(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    release, returned = threading.Event(), threading.Event()

    def hangs(ctx: Any) -> str:
        if ctx.attempt == 1:
            assert release.wait(20)
            returned.set()
            return "late"
        release.set()
        until(returned.is_set)
        time.sleep(0.05)  # the late return is judged before this attempt has ended
        return "in time"

    limits = {"k": {"max_runtime": 0.5}}
    assert workers.run({"k": hangs}, limits=limits, concurrency=1, ttl=30) == 1
    record = workers.records()["a"]
    assert (record.state, record.result, record.attempts) == (JobState.DONE, "in time", 2)
    assert [error.kind for error in record.errors] == ["TimeoutError"]
    assert "0.5 s" in record.errors[0].text
    assert [facts["fence"] for facts in workers.seen.of(Observed.REFUSED)] == [1]


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_async_handler_that_runs_too_long_is_cancelled(workers: Workers, stubborn: bool) -> None:
    workers.store.enqueue("a", kind="k")
    seen = []

    async def hangs(ctx: Any) -> int:
        if ctx.attempt == 1:
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                seen.append("cancelled")
                if not stubborn:
                    raise
            await asyncio.sleep(0.01)
        return int(ctx.attempt)

    limits = {"k": {"max_runtime": 0.4}}
    assert workers.run({"k": hangs}, limits=limits, concurrency=1, ttl=30) == 1
    record = workers.records()["a"]
    assert (record.state, record.result, seen) == (JobState.DONE, 2, ["cancelled"])
    assert [error.kind for error in record.errors] == ["TimeoutError"]


def test_a_handler_that_hangs_after_its_transaction_frees_its_place(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    workers.store.enqueue("b", kind="other")
    release = threading.Event()

    async def hangs(ctx: Any) -> None:
        async with transaction(ctx, "done"):
            pass
        if workers.driver is None:
            release.wait(20)
        else:
            await asyncio.sleep(20)

    try:
        limits = {"k": {"max_runtime": 0.4}}
        assert workers.run({"k": hangs, "other": nothing}, limits=limits, concurrency=1, ttl=30) == 2
    finally:
        release.set()
    assert workers.records()["a"].errors == ()
    assert [facts["what"] for facts in workers.seen.of(Observed.IGNORED)] == [
        "it did not return after its transaction"
    ]


def test_the_time_of_a_handler_begins_when_it_is_called(workers: Workers) -> None:
    """Not when its job was claimed: this one waits for its loop, or for nothing."""
    workers.store.enqueue("a", kind="blocks")
    workers.store.enqueue("b", kind="k")

    async def blocks(ctx: Any) -> None:
        time.sleep(0.8)

    limits = {"k": {"max_runtime": 0.5}}
    assert workers.run({"blocks": blocks, "k": nothing}, limits=limits, ttl=30) == 2
    assert workers.seen.of(Observed.RETRIED) == []


# --- how many -------------------------------------------------------------------------------------


class Crowd:
    """Counts who is in at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def leave(self) -> None:
        with self._lock:
            self.now -= 1


def test_never_more_handlers_at_once_than_the_concurrency(workers: Workers) -> None:
    for n in range(30):
        workers.store.enqueue(f"{n}", kind=["sync", "async"][n % 2], queue=["a", "b", "c"][n % 3])
    crowd = Crowd()

    def plain(ctx: Any) -> None:
        crowd.enter()
        time.sleep(0.02)
        crowd.leave()

    async def cooperative(ctx: Any) -> None:
        crowd.enter()
        await asyncio.sleep(0.02)
        crowd.leave()

    handlers = {"sync": plain, "async": cooperative}
    assert workers.run(handlers, queues=("a", "b", "c"), concurrency=3) == 30
    assert crowd.most == 3


def test_given_up_handlers_leave_as_many_places_as_there_were(workers: Workers) -> None:
    for n in range(6):
        workers.store.enqueue(f"hangs {n}", kind="hangs", max_attempts=1, priority=1)
    for n in range(12):
        workers.store.enqueue(f"{n}", kind="k")
    release, crowd = threading.Event(), Crowd()

    def hangs(ctx: Any) -> None:
        release.wait(20)

    def plain(ctx: Any) -> None:
        crowd.enter()
        time.sleep(0.05)
        crowd.leave()

    try:
        limits = {"hangs": {"max_runtime": 0.2}}
        assert workers.run({"hangs": hangs, "k": plain}, limits=limits, concurrency=2) == 12
    finally:
        release.set()
    assert crowd.most == 2


def test_as_many_jobs_are_leased_as_there_are_places(workers: Workers) -> None:
    for n in range(10):
        workers.store.enqueue(f"{n}", kind="k")
    leased: list[int] = []
    both = threading.Barrier(2)

    def counts(ctx: Any) -> None:
        if not leased:
            both.wait(5)
            leased.append(workers.store.counts()["default"][JobState.LEASED])
            both.wait(5)

    workers.run({"k": counts}, concurrency=2)
    assert leased[:2] == [2, 2]


# --- empty ----------------------------------------------------------------------------------------


def test_it_is_empty_when_jobs_of_jobs_are_done_too(workers: Workers) -> None:
    workers.store.enqueue("0", kind="k", payload=0)

    async def enqueues(ctx: Any) -> None:
        if ctx.payload < 12:
            workers.store.enqueue(f"{ctx.payload + 1}", kind="k", payload=ctx.payload + 1)

    assert workers.run({"k": enqueues}, poll=30) == 13


def test_it_is_not_empty_while_a_handler_goes_on_after_its_transaction(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")

    async def goes_on(ctx: Any) -> None:
        async with transaction(ctx):
            pass
        await asyncio.sleep(0.3)
        workers.store.enqueue("b", kind="other")

    assert workers.run({"k": goes_on, "other": nothing}) == 2
    assert workers.states() == {"a": "done", "b": "done"}


def test_what_is_enqueued_after_a_look_is_found_by_the_next(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last handler enqueues and ends while the claim that found nothing is on its way back."""
    workers.store.enqueue("a", kind="k")
    found_nothing, ended = threading.Event(), threading.Event()
    claim_many = Store.claim_many

    def slow(*args: Any, **kwargs: Any) -> Any:
        leases = claim_many(*args, **kwargs)
        if not leases and not found_nothing.is_set():
            found_nothing.set()
            assert ended.wait(5)
            until(lambda: "job.completed" in workers.seen.names)
            time.sleep(0.05)
        return leases

    monkeypatch.setattr(Store, "claim_many", slow)

    def enqueues(ctx: Any) -> None:
        assert found_nothing.wait(5)
        workers.store.enqueue("b", kind="other")
        ended.set()

    assert workers.run({"k": enqueues, "other": nothing}, concurrency=2) == 2


def test_jobs_for_later_do_not_keep_it(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k", delay=3600)
    workers.store.enqueue("b", kind="k", queue="another")
    assert workers.run({"k": nothing}) == 0


# --- kinds ----------------------------------------------------------------------------------------


def test_a_kind_has_one_handler(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    refused = []

    def registers(ctx: Any) -> None:
        with pytest.raises(InvalidValue, match="'k' has a handler already") as error:
            workers.running.handler("k")(nothing)
        refused.append(error.value.field)

    assert workers.run({"k": registers}) == 1
    assert refused == ["kind"]


def test_a_kind_may_be_registered_while_the_worker_runs(workers: Workers) -> None:
    workers.store.enqueue("a", kind="later")
    workers.store.enqueue("b", kind="k")

    def registers(ctx: Any) -> None:
        workers.running.handler("later")(nothing)

    assert workers.run({"k": registers}) == 2


def test_without_a_handler_it_does_not_run(workers: Workers) -> None:
    with pytest.raises(InvalidValue, match="register at least one"):
        workers.run({})


def test_other_queues_and_another_concurrency_from_the_next_run_on(workers: Workers) -> None:
    for queue in ("default", "other"):
        for n in range(4):
            workers.store.enqueue(f"{queue} {n}", kind="k", queue=queue)
    crowd = Crowd()

    def plain(ctx: Any) -> None:
        crowd.enter()
        time.sleep(0.05)
        crowd.leave()

    made = workers._with

    def limited(worker: Any, *args: Any) -> Any:
        worker.limit(queues=["other"], concurrency=2)
        return made(worker, *args)

    workers._with = limited  # type: ignore[method-assign, assignment]
    assert workers.run({"k": plain}) == 4
    assert crowd.most == 2
    assert workers.states()["default 0"] == "ready"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"queues": "default"}, "queues"),
        ({"queues": ()}, "queues"),
        ({"queues": ["a" * 256]}, "queues"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": True}, "concurrency"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": float("inf")}, "ttl"),
        ({"poll": 0}, "poll"),
        ({"grace": -1}, "grace"),
        ({"max_runtime": 0}, "max_runtime"),
        ({"owner": ""}, "owner"),
    ],
)
@pytest.mark.parametrize(("database", "driver"), [("sqlite", None)], indirect=True)
def test_what_makes_no_sense_is_refused_by_its_name(
    engine: Any, driver: Any, options: dict[str, Any], field: str
) -> None:
    from fencedjobs import Worker

    with pytest.raises(InvalidValue) as refused:
        Worker(Store(engine), **options)
    assert refused.value.field == field


# --- retries --------------------------------------------------------------------------------------


def raises(attempt: int) -> float:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "backoff",
    [raises, lambda n: -1, lambda n: float("inf"), lambda n: float("nan"), lambda n: None, lambda n: "x"],
    ids=["raises", "negative", "infinite", "nan", "none", "text"],
)
def test_a_custom_backoff_that_is_wrong_keeps_the_job(
    workers: Workers, backoff: Callable[[int], Any]
) -> None:
    workers.store.enqueue("a", kind="k")

    async def fails(ctx: Any) -> None:
        raise ValueError("no")

    workers.run({"k": fails}, retry=Retry(base=1000, jitter=False, backoff=backoff))
    record = workers.records()["a"]
    assert record.state is JobState.SCHEDULED
    assert record.until - workers.store.now() == pytest.approx(1000, abs=30)


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")

    __repr__ = __str__


@pytest.mark.parametrize(
    "error", [Odd(), ValueError("a\x00b"), ValueError("\ud800"), ValueError("x" * 10**6)]
)
@pytest.mark.parametrize("after", [False, True], ids=["fails", "after its transaction"])
def test_whatever_a_handler_raises_is_recorded(workers: Workers, error: Exception, after: bool) -> None:
    workers.store.enqueue("a", kind="k", max_attempts=1)
    workers.store.enqueue("b", kind="other")

    async def fails(ctx: Any) -> None:
        if after:
            async with transaction(ctx):
                pass
        raise error

    assert workers.run({"k": fails, "other": nothing}, concurrency=1) == 1 + after
    assert workers.states() == {"a": "done" if after else "quarantined", "b": "done"}


def test_an_observer_that_raises_does_no_harm(workers: Workers) -> None:
    for n in range(3):
        workers.store.enqueue(f"{n}", kind="k", max_attempts=2)
    ran = []

    async def fails_first(ctx: Any) -> None:
        ran.append(ctx.id)
        if ctx.attempt == 1:
            raise ValueError("no")

    def observe(what: Observed, /, **facts: Any) -> None:
        raise RuntimeError("the metrics are broken")

    assert workers.run({"k": fails_first}, observe=observe, retry=AT_ONCE) == 3
    assert len(ran) == 6


# --- afterwards -----------------------------------------------------------------------------------


def test_what_a_context_says_can_be_read_when_all_is_closed(workers: Workers) -> None:
    workers.store.enqueue("a", {"n": 1}, kind="k", queue="default", deadline=workers.store.now() + 3600)
    kept: list[Any] = []

    async def keeps(ctx: Any) -> None:
        async with transaction(ctx) as execute:
            await execute(text("SELECT 1"))
        kept.append(ctx)

    workers.run({"k": keeps})
    told: list[Any] = []
    ctx = kept[0]

    def elsewhere() -> None:
        told.append((ctx.id, ctx.kind, ctx.queue, ctx.payload, ctx.attempt, ctx.fence, ctx.progress))
        told.append((ctx.deadline > 0, ctx.lease.owner != "", ctx.remaining > 0, ctx.lost.is_set()))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert told == [("a", "k", "default", {"n": 1}, 1, 1, None), (True, True, True, False)]
