"""Histories of threads and processes on real databases: what fits, what does not, and other queues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Connection,
    Double,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from fencedjobs import Store
from fencedjobs.testing import history
from fencedjobs.testing.clients import MIX
from fencedjobs.testing.faults import planted
from fencedjobs.testing.history import Recorder, histories, trial
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.queue import StoreQueue
from fencedjobs.testing.sequential import Answer
from fencedjobs.testing.stages import emptied
from tests.databases import Database


@pytest.fixture
def here(database: Database) -> Iterator[Store]:
    engine = create_engine(database.url)
    yield Store(engine)
    engine.dispose()


# --- the store ------------------------------------------------------------------------------------


def test_what_threads_call_at_once_fits_the_contract(here: Store) -> None:
    assert histories(here, number=3, clients=4, calls=40) == 3 * (4 * 40 + history.JOBS)
    assert here.counts() == {}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_every_kind_of_call_and_of_answer_occurs(here: Store) -> None:
    with Recorder(here, clients=4, calls=120, cuts=0.05) as recorder:
        calls = recorder.record().calls
    assert {call.verb for call in calls} == {
        "claim", "renew", "complete", "fail", "release", "checkpoint", "set_aside", "outcome", "enqueue",
        "cancel", "quarantine", "requeue", "sweep", "purge", "get",
    }  # fmt: skip
    answers = [call.answer for call in calls]
    assert Answer.UNKNOWN in answers
    assert (Answer.LOST,) in answers
    clients = {call.client for call in calls} - {"end"}
    spans = {name: [call for call in calls if call.client == name] for name in clients}
    ends = [max(call.returned or 0 for call in mine) for mine in spans.values()]
    assert max(call.invoked for mine in spans.values() for call in mine[:1]) < min(ends), "they took turns"


def test_a_lost_answer_is_unknown_whether_it_happened_or_not(here: Store) -> None:
    with Recorder(here, clients=3, calls=60, cuts=0.3) as recorder:
        recorded = recorder.record()
    assert sum(call.answer is Answer.UNKNOWN for call in recorded.calls) > 5
    assert recorded.contradictions() == []


def test_what_processes_call_at_once_fits_and_one_of_them_is_killed(here: Store, database: Database) -> None:
    with Recorder(here, clients=2, calls=40, url=database.url, kill_every=1, cuts=0.0) as recorder:
        recorded = recorder.record()
    assert recorded.contradictions() == []
    died = [call for call in recorded.calls if call.returned is None]
    assert len(died) <= 1
    assert len(recorded.calls) < 2 * 40 + history.JOBS


#: the calls among which a fault shows soonest, and how many histories may pass before it does
RACES = {
    "claim_by_select_then_update": (MIX, 20),
    "fence_read_later": (MIX, 40),
    "sweep_by_id": ({"enqueue": 30, "sweep": 30, "cancel": 25, "purge": 15}, 150),
}
ALWAYS = (
    "complete_by_id",
    "renew_revives",
    "valid_at_the_end",
    "fence_reset_on_release",
    "poison_is_not_capped",
)


def caught(name: str, here: Store, mix: Any, number: int) -> str:
    with planted(name), pytest.raises(Disagreement) as seen:
        histories(here, number=number, clients=6, calls=60, mix=mix)
    emptied(here)
    told = str(seen.value)
    assert max(map(len, told.splitlines())) <= 100
    return told


@pytest.mark.parametrize("name", ["claim_by_select_then_update"])
def test_a_fault_that_only_a_race_shows_is_caught(name: str, here: Store) -> None:
    assert "no order of these calls on history-" in caught(name, here, *RACES[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", RACES)
def test_each_fault_that_only_a_race_shows_is_caught(name: str, here: Store) -> None:
    caught(name, here, *RACES[name])


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", ALWAYS[:2])
def test_a_fault_that_shows_without_a_race_is_caught_too(name: str, here: Store) -> None:
    caught(name, here, MIX, 30)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALWAYS)
def test_faults_that_show_without_a_race_are_caught_too(name: str, here: Store) -> None:
    caught(name, here, MIX, 60)


# --- other queues ---------------------------------------------------------------------------------


class HandRolled:
    """A queue as many are: the claim is sound, and the job is completed by its id.

    ``guarded``: completion, renewal and release ask for the attempt, as they should.
    """

    table = Table(
        "my_jobs", MetaData(),
        Column("id", String(100), primary_key=True), Column("worker", String(100)),
        Column("attempt", Integer, nullable=False), Column("until", Double, nullable=False),
        Column("done", Integer, nullable=False),
    )  # fmt: skip

    def __init__(self, engine: Engine, *, guarded: bool = False) -> None:
        self._engine = engine
        self._guarded = guarded
        self.table.create(engine)

    @contextmanager
    def _begun(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            if self._engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
            connection.commit()

    def enqueue(self, id: str, now: float) -> None:
        try:
            with self._begun() as connection:
                connection.execute(insert(self.table).values(id=id, attempt=0, until=0.0, done=0))
        except IntegrityError:
            pass

    def claim(self, worker: str, now: float, ttl: float) -> tuple[str, int] | None:
        jobs = self.table.c
        free = (jobs.done == 0) & (jobs.until <= now)
        with self._begun() as connection:
            first = select(jobs.id, jobs.attempt).where(free).order_by(jobs.id).limit(1)
            found = connection.execute(first.with_for_update(skip_locked=True)).first()
            if found is None:
                return None
            attempt = found.attempt + 1
            taken = update(self.table).where(jobs.id == found.id)
            connection.execute(taken.values(worker=worker, attempt=attempt, until=now + ttl))
            return found.id, attempt

    def _write(self, id: str, owner: str, attempt: int, now: float | None, **values: Any) -> bool:
        jobs = self.table.c
        mine = (jobs.id == id) & (jobs.done == 0)
        if self._guarded:
            mine &= (jobs.worker == owner) & (jobs.attempt == attempt)
            mine &= (jobs.until > now) if now is not None else (jobs.until != 0.0)
        with self._begun() as connection:
            return bool(connection.execute(update(self.table).where(mine).values(**values)).rowcount)

    def renew(self, id: str, worker: str, token: int, now: float, ttl: float) -> bool:
        return self._write(id, worker, token, now, until=now + ttl)

    def complete(self, id: str, worker: str, token: int, now: float, result: Any) -> bool:
        return self._write(id, worker, token, now, done=1)

    def release(self, id: str, worker: str, token: int, now: float) -> bool:
        return self._write(id, worker, token, None, worker=None, until=0.0)


@pytest.fixture
def server(database: Database) -> Iterator[Engine]:
    engine = create_engine(database.url)
    yield engine
    HandRolled.table.drop(engine, checkfirst=True)
    engine.dispose()


on_two = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)


@on_two
def test_a_queue_that_completes_by_id_is_given_a_counterexample(server: Engine) -> None:
    told = trial(HandRolled(server), number=20, clients=4, calls=40)
    assert told is not None
    assert "no order of these calls on job-" in told
    assert max(map(len, told.splitlines())) <= 100


@on_two
def test_the_same_queue_with_a_guard_is_not_blamed(server: Engine) -> None:
    assert trial(HandRolled(server, guarded=True), number=2, clients=4, calls=40) is None


def test_a_store_is_such_a_queue_too(here: Store) -> None:
    assert trial(StoreQueue(here), number=1, clients=4, calls=40) is None


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_command_says_what_was_tried_and_the_verdict(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    url = database.url.render_as_string(hide_password=False)
    few = ["--url", url, "--histories", "2", "--clients", "3", "--calls", "20", "--seed", "7"]
    assert history.main(few) == 0
    printed = capsys.readouterr().out
    assert "histories 2 of 3 threads with 20 calls each, seed 7" in printed
    assert "SQLite 3." in printed
    assert printed.endswith("every history fits the contract\n")
    with planted("complete_by_id"):
        assert history.main([*few[:2], "--histories", "50", "--calls", "60"]) == 1
    assert capsys.readouterr().out.endswith("the contract was broken\n")
    somebodys = Store(database.engine())
    somebodys.enqueue("somebody's", now=0.0)
    somebodys.cancel("somebody's", now=0.0)
    somebodys.purge(before=1.0)
    with pytest.raises(SystemExit):  # a tombstone is somebody's too
        history.main(few)


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_a_hundred_large_histories_fit_the_contract(here: Store, database: Database, processes: bool) -> None:
    with Recorder(here, clients=8, calls=200, url=database.url if processes else None) as recorder:
        for number in range(100):
            assert recorder.record(number).contradictions() == []
