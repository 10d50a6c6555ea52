"""What becomes of a job: returned, raised, put off, set aside, completed in the handler's transaction."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from fencedjobs import Cancel, JobState, Quarantine, Snooze
from fencedjobs.metrics import Observed
from tests.worker.helpers import Workers, settled, transaction


async def nothing(ctx: Any) -> None:
    pass


def test_what_a_handler_returns_is_the_result(workers: Workers) -> None:
    workers.store.enqueue("a", {"n": 1}, kind="double")
    workers.store.enqueue("b", {"n": 2}, kind="plain")

    async def double(ctx: Any) -> Any:
        return {"twice": 2 * ctx.payload["n"], "attempt": ctx.attempt, "fence": ctx.fence, "id": ctx.id}

    def plain(ctx: Any) -> Any:
        return [ctx.payload["n"], ctx.kind, ctx.queue]

    assert workers.run({"double": double, "plain": plain}) == 2
    records = workers.records()
    assert records["a"].result == {"twice": 2, "attempt": 1, "fence": 1, "id": "a"}
    assert records["b"].result == [2, "plain", "default"]
    assert workers.states() == {"a": "done", "b": "done"}


def test_an_error_is_tried_again_until_the_attempts_are_used_up(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k", max_attempts=3)
    attempts = []

    async def fails(ctx: Any) -> None:
        attempts.append(ctx.attempt)
        raise ValueError("no such street")

    assert workers.run({"k": fails}) == 0
    record = workers.records()["a"]
    assert attempts == [1, 2, 3]
    assert record.state is JobState.QUARANTINED
    assert [(error.kind, error.text) for error in record.errors] == [("ValueError", "no such street")] * 3
    assert workers.seen.names.count("job.retried") == 2
    assert workers.seen.names.count("job.quarantined") == 1


def test_without_a_retry_the_first_error_is_for_good(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")

    async def fails(ctx: Any) -> None:
        raise ValueError("never")

    workers.run({"k": fails}, limits={"k": {"retry": None}})
    assert workers.states() == {"a": "quarantined"}


def test_a_handler_that_exits_has_failed_and_not_the_worker(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k", max_attempts=1)
    workers.store.enqueue("b", kind="fine")

    def exits(ctx: Any) -> None:
        raise SystemExit(3)

    assert workers.run({"k": exits, "fine": nothing}) == 1
    assert workers.states() == {"a": "quarantined", "b": "done"}


@pytest.mark.parametrize("result", [{"x": float("nan")}, object(), {1, 2}, "a\x00b", "\ud800"])
def test_a_result_that_cannot_be_kept_ends_the_job_at_once(workers: Workers, result: Any) -> None:
    workers.store.enqueue("a", kind="k")
    calls = []

    async def odd(ctx: Any) -> Any:
        calls.append(ctx.attempt)
        return result

    workers.run({"k": odd})
    record = workers.records()["a"]
    assert (record.state, calls) == (JobState.QUARANTINED, [1])
    assert "result" in record.errors[0].text


def test_snoozed_it_waits_and_is_not_charged(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")

    async def later(ctx: Any) -> None:
        raise Snooze(3600)

    workers.run({"k": later})
    record = workers.records()["a"]
    assert (record.state, record.attempts, record.fence) == (JobState.SCHEDULED, 0, 1)
    assert record.until - workers.store.now() == pytest.approx(3600, abs=30)
    assert workers.seen.of(Observed.SNOOZED)[0]["delay"] == 3600


def test_set_aside_or_cancelled_it_keeps_the_reason(workers: Workers) -> None:
    workers.store.enqueue("a", kind="bad")
    workers.store.enqueue("b", kind="gone")

    async def bad(ctx: Any) -> None:
        raise Quarantine("no such address")

    async def gone(ctx: Any) -> None:
        raise Cancel("the order was withdrawn")

    workers.run({"bad": bad, "gone": gone})
    records = workers.records()
    assert (records["a"].state, records["a"].reason) == (JobState.QUARANTINED, "no such address")
    assert (records["b"].state, records["b"].reason) == (JobState.CANCELLED, "the order was withdrawn")


def test_business_rows_and_completion_are_committed_together(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")

    async def packs(ctx: Any) -> None:
        async with transaction(ctx, {"packed": True}) as execute:
            await execute(text("INSERT INTO fenced_guards VALUES ('row', 1, 0)"))

    assert workers.run({"k": packs}) == 1
    record = workers.records()["a"]
    assert (record.state, record.result) == (JobState.DONE, {"packed": True})
    assert workers.store.guards.highest("row") == 1


def test_a_failed_transaction_that_the_handler_swallows_is_no_completion(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k", max_attempts=1)

    async def swallows(ctx: Any) -> None:
        try:
            async with transaction(ctx) as execute:
                await execute(text("INSERT INTO fenced_guards VALUES ('row', 1, 0)"))
                raise ValueError("the printer is on fire")
        except ValueError:
            pass

    assert workers.run({"k": swallows}) == 0
    assert workers.states() == {"a": "quarantined"}
    assert workers.store.guards.highest("row") is None


def test_a_transaction_that_failed_may_be_tried_again(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")

    async def twice(ctx: Any) -> None:
        for round in range(2):
            try:
                async with transaction(ctx) as execute:
                    await execute(text("INSERT INTO fenced_guards VALUES ('row', 1, 0)"))
                    if not round:
                        raise ValueError("once more")
            except ValueError:
                continue

    assert workers.run({"k": twice}) == 1
    assert workers.states() == {"a": "done"}


def test_after_its_transaction_nothing_that_a_handler_does_matters(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")

    async def fails_late(ctx: Any) -> None:
        async with transaction(ctx, 1):
            pass
        raise ValueError("too late")

    assert workers.run({"k": fails_late}) == 1
    record = workers.records()["a"]
    assert (record.state, record.result, record.errors) == (JobState.DONE, 1, ())
    assert "too late" in workers.seen.of(Observed.IGNORED)[0]["what"]


def test_a_checkpoint_is_there_for_the_next_attempt(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    found = []

    async def in_steps(ctx: Any) -> Any:
        found.append(ctx.progress)
        if ctx.progress is None:
            await settled(ctx.checkpoint({"page": 7}))
            assert ctx.progress == {"page": 7}
            raise ValueError("power cut")
        return ctx.progress["page"]

    assert workers.run({"k": in_steps}) == 1
    assert found == [None, {"page": 7}]
    assert workers.records()["a"].result == 7


def test_a_kind_without_a_handler_is_left_alone(workers: Workers) -> None:
    workers.store.enqueue("new", kind="of the next release")
    workers.store.enqueue("a", kind="k")
    assert workers.run({"k": nothing}) == 1
    record = workers.records()["new"]
    assert (record.state, record.attempts, record.fence) == (JobState.READY, 0, 0)


def test_queues_are_worked_on_in_their_order(workers: Workers) -> None:
    for n in range(4):
        workers.store.enqueue(f"low {n}", kind="k", queue="low")
        workers.store.enqueue(f"high {n}", kind="k", queue="high")
        workers.store.enqueue(f"other {n}", kind="k", queue="other")
    order: list[str] = []

    async def notes(ctx: Any) -> None:
        order.append(ctx.id)

    assert workers.run({"k": notes}, queues=("high", "low"), concurrency=1) == 8
    assert order == [f"{queue} {n}" for queue in ("high", "low") for n in range(4)]


def test_all_that_is_observed_names_the_job_the_owner_and_the_fence(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    workers.run({"k": nothing}, owner="packer 1")
    for what in (Observed.CLAIMED, Observed.COMPLETED):
        facts = workers.seen.of(what)[0]
        assert (facts["id"], facts["owner"], facts["fence"], facts["kind"]) == ("a", "packer 1", 1, "k")
    assert workers.seen.of(Observed.COMPLETED)[0]["remaining"] > 0
    assert workers.seen.of(Observed.CLAIMED)[0]["waited"] >= 0
