"""Housekeeping: by one worker at a time, in batches, beside the jobs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fencedjobs import InvalidValue, JobState, Store
from fencedjobs.claims import Jobs
from fencedjobs.maintenance import Maintenance
from fencedjobs.metrics import Observed
from tests.worker.helpers import Seen, Workers, until


async def nothing(ctx: Any) -> None:
    pass


def kept_house(workers: Workers, plan: Maintenance, seconds: float = 5) -> None:
    """A worker that does what is due once."""
    with workers.in_background({"another kind": nothing}, maintenance=plan):
        until(
            lambda: "worker.oldest" in workers.seen.names or "worker.trouble" in workers.seen.names, seconds
        )


def rows(workers: Workers, what: str) -> int:
    return sum(facts["rows"] for facts in workers.seen.of(Observed.MAINTAINED) if facts["what"] == what)


def done_jobs(workers: Workers, number: int) -> None:
    """Jobs that were done an hour ago, a minute apart, and one that waits."""
    hour_ago = workers.store.now() - 3600
    for n in range(number):
        then = hour_ago + 60 * n
        workers.store.enqueue(f"{n}", now=then)
        lease = workers.store.claim(ttl=60, id=f"{n}", now=then)
        assert lease is not None
        workers.store.complete(lease, now=then)
    workers.store.enqueue("waits")


def test_what_can_never_run_is_swept(workers: Workers) -> None:
    now = workers.store.now()
    for n in range(5):
        workers.store.enqueue(f"{n}", deadline=now + 1e-6)
    workers.store.enqueue("waits")
    kept_house(workers, Maintenance(batch=2))
    assert rows(workers, "swept") == 5
    assert workers.states()["0"] == "quarantined"
    assert workers.states()["waits"] == "ready"


def test_what_was_locked_for_a_moment_is_swept_all_the_same(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    if workers.engine.dialect.name == "sqlite":
        pytest.skip("it has no row locks")
    for n in range(5):
        workers.store.enqueue(f"{n}", deadline=workers.store.now() + 1e-6)
    workers.store.enqueue("waits")
    sweep, swept = Store.sweep, []

    def locked_at_first(store: Any, **options: Any) -> int:
        with workers.engine.connect() as other:
            if not swept:
                other.exec_driver_sql("SELECT id FROM fenced_jobs FOR UPDATE").all()
            swept.append(sweep(store, **options))
        return swept[-1]

    monkeypatch.setattr(Store, "sweep", locked_at_first)
    kept_house(workers, Maintenance(batch=2))
    assert swept[0] == 0
    assert rows(workers, "swept") == 5


def test_a_worker_without_jobs_locks_none_of_the_others(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    if workers.engine.dialect.name == "postgresql":
        pytest.skip("there a claim locks only what it takes")
    workers.store.enqueue("a", kind="x")
    looked, claimed = [], []
    may_claim, claim_many = Jobs.may_claim, Store.claim_many
    monkeypatch.setattr(Jobs, "may_claim", lambda *args: looked.append(1) or may_claim(*args))
    monkeypatch.setattr(Store, "claim_many", lambda *args, **to: claimed.append(1) or claim_many(*args, **to))
    with workers.in_background({"y": nothing}):
        until(lambda: len(looked) >= 3)
    assert claimed == []


def test_done_jobs_go_by_age(workers: Workers) -> None:
    done_jobs(workers, 7)
    kept_house(workers, Maintenance(done=3600 - 3.5 * 60, batch=2))
    assert rows(workers, "purged jobs") == 4
    assert workers.states()["waits"] == "ready"


def test_done_jobs_go_by_number(workers: Workers) -> None:
    done_jobs(workers, 7)
    kept_house(workers, Maintenance(most_done=3, batch=2))
    assert rows(workers, "purged jobs") == 4
    assert [id for id, state in workers.states().items() if state == "done"] == ["4", "5", "6"]


def test_sent_events_and_messages_go_too(workers: Workers) -> None:
    from fencedjobs.relay import Relay

    then = workers.store.now() - 3600
    for n in range(5):
        workers.store.outbox.add(f"{n}", {}, topic="t")
        workers.store.inbox.accept(f"{n}", {}, now=then)
    Relay(workers.store, lambda event: True).run(until_empty=True)
    workers.store.enqueue("waits")
    kept_house(workers, Maintenance(most_sent=2, received=60, batch=2))
    assert rows(workers, "purged events") == 3
    assert rows(workers, "purged messages") == 5


def test_by_default_nothing_is_purged(workers: Workers) -> None:
    done_jobs(workers, 3)
    kept_house(workers, Maintenance())
    assert workers.seen.of(Observed.MAINTAINED) == []


def test_one_of_several_does_it(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    workers.store.enqueue("waits")
    asked, turns = [], threading.Event()
    oldest = Store.oldest_waiting

    def counted(store: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        turns.set()
        return oldest(store, *args, **kwargs)

    monkeypatch.setattr(Store, "oldest_waiting", counted)
    other = Workers(workers.database, workers.driver, workers.store)
    plan = Maintenance(every=60)
    with workers.in_background({"x": nothing}, maintenance=plan):
        assert turns.wait(5)
        with other.in_background({"x": nothing}, maintenance=plan, poll=0.02):
            until(lambda: "worker.started" in other.seen.names)
            threading.Event().wait(0.3)
    assert asked == [1]


def test_again_when_the_time_is_over(workers: Workers) -> None:
    workers.store.enqueue("waits")
    with workers.in_background({"x": nothing}, maintenance=Maintenance(every=0.2)):
        until(lambda: workers.seen.names.count("worker.oldest") >= 3)


def test_it_goes_by_the_stores_clock(workers: Workers) -> None:
    if workers.driver is not None:
        pytest.skip("the same room")
    from fencedjobs import Worker

    store, seen = Store(workers.engine, clock=lambda: 5000.0), Seen()
    for n in range(4):
        store.enqueue(f"{n}", now=n)
        lease = store.claim(ttl=60, id=f"{n}", now=n)
        assert lease is not None
        store.complete(lease, now=n)
    store.enqueue("waits", queue="another")
    worker = Worker(store, **{**workers.options, "observe": seen, "maintenance": Maintenance(done=4998.5)})
    worker.handler("x")(nothing)
    thread = threading.Thread(target=worker.run)
    thread.start()
    until(lambda: "worker.oldest" in seen.names)
    worker.stop()
    thread.join(5)
    assert workers.store.counts()["default"][JobState.DONE] == 2


def test_jobs_go_on_meanwhile(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    workers.store.enqueue("a", kind="k")
    sweeping, release = threading.Event(), threading.Event()
    sweep = Store.sweep

    def slow(*args: Any, **kwargs: Any) -> Any:
        sweeping.set()
        assert release.wait(5)
        return sweep(*args, **kwargs)

    monkeypatch.setattr(Store, "sweep", slow)

    def works(ctx: Any) -> None:
        assert sweeping.wait(5)

    with workers.in_background({"k": works}, maintenance=Maintenance()):
        until(lambda: "job.completed" in workers.seen.names)
        release.set()


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"batch": 0}, {"done": -1}, {"most_done": 0}, {"most_sent": True}, {"sent": "1"}],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as refused:
        Maintenance(**options)
    assert refused.value.field in (*options, "ttl")
