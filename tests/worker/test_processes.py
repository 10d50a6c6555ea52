"""Workers as processes of their own, that are killed, stopped, held up, asked to end, and forked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from fencedjobs import Store
from fencedjobs.worker import Worker
from tests.databases import BACKENDS, Database
from tests.host.test_fork import in_child
from tests.hosts import open_transactions
from tests.worker.children import EFFECTS, Book, Child, Staff, effects, observer, read, run, staff, working
from tests.worker.helpers import until

TTL = 0.5
#: each database by its sync driver, and one for asyncio
FORMS = [*((backend, None) for backend in BACKENDS), ("postgresql", "asyncpg")]
forms = pytest.mark.parametrize(
    ("database", "driver"), FORMS, indirect=True, ids=[driver or backend for backend, driver in FORMS]
)


@pytest.fixture
def store(engine: Engine) -> Store:
    EFFECTS.create(engine)
    return Store(engine)


@pytest.fixture
def crew(database: Database, driver: str | None, store: Store, tmp_path: Path) -> Iterator[Staff]:
    other = driver and rendered(database.async_url(driver))
    with staff(rendered(database.url), other, tmp_path) as crew:
        yield crew


def rendered(url: Any) -> str:
    return str(url.render_as_string(hide_password=False))


def state(store: Store, id: str) -> tuple[str, int, int]:
    """The job's state, how often it was claimed, and how many attempts it was charged."""
    record = store.get(id)
    assert record is not None
    return str(record.state), record.fence, record.attempts


def done_later(store: Store, id: str) -> int:
    """The fence that ended the job, not the first: 2, if the machine is not too busy for leases so short."""
    name, fence, attempts = state(store, id)
    assert name == "done"
    assert fence >= attempts >= 2
    return fence


def starts(crew: Staff, id: str) -> list[int]:
    return [line["fence"] for line in crew.lines if (line["event"], line.get("id")) == ("start", id)]


# --- killed ---------------------------------------------------------------------------------------


@forms
def test_the_job_of_a_killed_worker_is_done_by_the_next_when_its_lease_is_over(
    crew: Staff, store: Store, engine: Engine
) -> None:
    store.enqueue("a", {"sleeps": 60}, kind="effect")
    first = crew.start(ttl=TTL)
    first.awaits("start")
    first.signal(signal.SIGKILL)
    assert first.ended() == -signal.SIGKILL
    assert state(store, "a") == ("leased", 1, 1)
    second = crew.start(ttl=TTL)
    second.awaits("job.completed")
    fence = done_later(store, "a")
    assert effects(engine) == [("a", fence)]
    left = second.of("job.claimed")[0]["at"] - first.of("start")[0]["at"]
    assert left > 0.9 * TTL, "it was taken before its lease was over"


@forms
def test_a_job_that_kills_its_workers_is_set_aside_and_others_proceed(crew: Staff, store: Store) -> None:
    store.enqueue("poison", {"dies": True}, kind="effect", max_attempts=3, priority=1)
    codes = []
    for n in range(3):
        store.enqueue(f"fine {n}", kind="effect")
        codes.append(crew.start(ttl=0.7, concurrency=1).ended())
    last = crew.start(ttl=0.7, concurrency=1)
    until(lambda: store.counts() == {"default": {"done": 3, "quarantined": 1}})
    last.signal(signal.SIGTERM)
    assert last.ended() == 0
    assert codes == [-signal.SIGKILL] * 3
    assert len(starts(crew, "poison")) == 3
    record = store.get("poison")
    assert record is not None
    assert (record.attempts, "lease expired" in str(record.reason)) == (3, True), record


# --- stopped and held up --------------------------------------------------------------------------


def stop_at_rest(worker: Child, engine: Engine) -> None:
    """Stop a process that is in no transaction: in the middle of one it would hold locks all the time."""
    while True:
        time.sleep(0.02)
        worker.signal(signal.SIGSTOP)
        if not open_transactions(engine):
            return
        worker.signal(signal.SIGCONT)


@forms
def test_a_worker_that_slept_past_its_lease_is_refused_and_says_so(
    crew: Staff, store: Store, engine: Engine
) -> None:
    for id, kind in (("a", "effect"), ("b", "report")):
        store.enqueue(id, {"sleeps": 1.5, "always": True}, kind=kind)  # so long that it is stopped before
    first = crew.start(ttl=TTL)
    first.awaits("start", 2)
    stop_at_rest(first, engine)
    second = crew.start(ttl=20 * TTL)  # which this one keeps, however slow the machine is
    second.awaits("start", 2)
    first.signal(signal.SIGCONT)  # now both are in the middle of the same jobs
    second.awaits("job.completed", 2)
    until(lambda: {line["id"] for line in first.of("job.lost") + first.of("job.refused")} == {"a", "b"})
    time.sleep(0.3)  # whatever the handlers would still do
    assert effects(engine) == [("a", done_later(store, "a"))]
    for id in ("a", "b"):
        record = store.get(id)
        assert record is not None
        assert record.result == {"fence": done_later(store, id)}
    assert not first.of("job.completed")


@pytest.mark.parametrize(
    ("database", "driver"),
    [("sqlite", None), ("mariadb", None), ("postgresql", "asyncpg")],
    indirect=True,
    ids=["sqlite", "mariadb", "asyncpg"],
)
@pytest.mark.parametrize("how", ["holds", "burns", "blocks"])
def test_a_handler_that_holds_everything_up_keeps_its_lease_or_is_told(
    crew: Staff, store: Store, engine: Engine, how: str
) -> None:
    ttl = 0.4
    store.enqueue("a", {how: 3 * ttl}, kind="effect")
    first = crew.start(ttl=ttl, concurrency=1)
    first.awaits("start")
    second = crew.start(ttl=ttl, concurrency=1)
    until(lambda: state(store, "a")[0] == "done")
    for worker in (first, second):
        worker.signal(signal.SIGTERM)
        assert worker.ended() == 0
    fences = starts(crew, "a")
    assert effects(engine) == [("a", fences[-1])]
    told = {line["fence"] for line in crew.lines if line["event"] in ("job.lost", "job.refused")}
    assert told.issuperset(fences[:-1]), "it kept its lease, or was told that it lost it"
    if how == "holds":
        assert first.of("held")[0]["seconds"] >= 3 * ttl
        assert len(fences) > 1, "nobody can renew while C code holds the interpreter"


@pytest.mark.parametrize(
    ("database", "driver"), FORMS[1:], indirect=True, ids=[driver or backend for backend, driver in FORMS[1:]]
)
def test_clocks_of_workers_that_are_wrong_do_not_matter(crew: Staff, store: Store, engine: Engine) -> None:
    """FAULTS 36: where the database has a clock, leases and waits go by that one."""
    store.enqueue("long", {"sleeps": 0.5}, kind="effect")
    store.enqueue("later", kind="effect", delay=1.5)
    asked = time.monotonic()
    for skew in (3600, -3600):
        crew.start(ttl=30, skew=skew)
    until(lambda: store.counts()["default"].get("done") == 2)
    assert sorted(effects(engine)) == [("later", 1), ("long", 1)]
    assert min(line["at"] for line in crew.lines if line.get("id") == "later") > asked + 1.4
    assert len({line["pid"] for line in crew.lines if line["event"] == "worker.started"}) == 2


# --- asked to end ---------------------------------------------------------------------------------


@forms
def test_asked_to_end_a_worker_finishes_what_it_can_and_gives_back_the_rest(
    crew: Staff, store: Store, engine: Engine
) -> None:
    store.enqueue("long", {"sleeps": 60}, kind="effect")
    store.enqueue("short", {"sleeps": 0.3}, kind="effect")
    for n in range(20):
        store.enqueue(f"waits {n}", {"sleeps": 60}, kind="effect")
    worker = crew.start(ttl=30, grace=0.6, concurrency=4)
    worker.awaits("start", 4)
    worker.signal(signal.SIGTERM)
    assert worker.ended(5) == 0
    assert state(store, "short") == ("done", 1, 1)
    assert effects(engine) == [("short", 1)]
    assert store.counts() == {"default": {"done": 1, "ready": 21}}, "nothing is leased any more"
    assert state(store, "long") == ("ready", 1, 0)
    assert state(store, "waits 0") == ("ready", 1, 0)
    assert len(worker.of("job.given_back")) == 3


@forms
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_asked_twice_it_does_not_wait(crew: Staff, store: Store, second: signal.Signals) -> None:
    store.enqueue("a", {"sleeps": 60}, kind="effect")
    worker = crew.start(ttl=30, grace=30)
    worker.awaits("start")
    worker.signal(signal.SIGTERM)
    worker.awaits("worker.stopping")
    asked = time.monotonic()
    worker.signal(second)
    assert worker.ended(10) == 0
    assert time.monotonic() - asked < 5
    assert state(store, "a") == ("ready", 1, 0)


@forms
def test_a_signal_is_noticed_although_it_interrupts_nothing(crew: Staff, store: Store) -> None:
    """As one that comes just before the main thread begins to wait."""
    store.enqueue("a", kind="signal")
    worker = crew.start(ttl=30, grace=0.1)
    assert worker.ended(10) == 0
    assert state(store, "a") == ("ready", 1, 0)


# --- forked and spawned ---------------------------------------------------------------------------


@pytest.mark.parametrize("database", BACKENDS, indirect=True)
def test_a_worker_made_before_a_fork_runs_in_every_child(
    store: Store, engine: Engine, tmp_path: Path
) -> None:
    """FAULTS 86: connections of the parent, open and in use, are nobody else's."""
    path = tmp_path / "book.jsonl"
    book = Book(str(path))
    worker = Worker(store, ttl=30, poll=0.05, maintenance=None, observe=observer(book))
    many(store, 40)
    with engine.connect() as open, engine.connect():
        open.exec_driver_sql("SELECT 1")
        open.rollback()  # SQLite would let nobody write otherwise
        pids = [in_child(lambda: run(worker, book, True)) for _ in range(4)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        open.exec_driver_sql("SELECT 1")
    assert codes == [0] * 4
    assert sorted(effects(engine)) == [(f"{n:02}", 1) for n in range(40)]
    assert not [line for line in read(path) if line["event"] == "worker.trouble"]
    owners = {line["owner"] for line in read(path) if line["event"] == "worker.started"}
    assert len(owners) == 4
    many(store, 41)
    run_here = [line for line in read(path) if line["pid"] == os.getpid()]
    assert not run_here
    assert store.counts()["default"] == {"done": 40, "ready": 1}, "the parent's connections still work"


@pytest.mark.parametrize(
    ("database", "how"),
    [*((backend, "forkserver") for backend in BACKENDS), ("postgresql", "spawn")],
    indirect=["database"],
)
def test_each_job_is_done_once_by_started_processes(
    store: Store, engine: Engine, database: Database, how: str, tmp_path: Path
) -> None:
    many(store, 40)
    context: Any = multiprocessing.get_context(how)
    paths = [tmp_path / f"book-{n}.jsonl" for n in range(2)]
    started = [
        context.Process(
            target=working, args=(rendered(database.url), False, str(path), {}, True), daemon=True
        )
        for path in paths
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(30)
    assert [process.exitcode for process in started] == [0, 0]
    assert sorted(effects(engine)) == [(f"{n:02}", 1) for n in range(40)]
    assert not [line for line in read(*paths) if line["event"] == "worker.trouble"]


def many(store: Store, count: int) -> None:
    store.enqueue_many([{"id": f"{n:02}", "kind": "effect"} for n in range(count)])
