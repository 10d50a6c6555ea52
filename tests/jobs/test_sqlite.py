"""SQLite: one writer, many processes, and a driver with habits."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text

from fencedjobs import JobState, Store
from tests.databases import Database
from tests.jobs.helpers import T, claimed, on
from tests.processes import together


def cycles(url: Any, owner: str, count: int, timeout: float) -> int:
    """Enqueue, claim, complete, over and over; what comes out uncaught fails the test."""
    engine = create_engine(url, connect_args={"timeout": timeout})

    @event.listens_for(engine, "connect")
    def faster(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    store = Store(engine)
    for n in range(count):
        store.enqueue(f"{owner}-{n}")
        lease = store.claim(owner, ttl=600)
        assert lease is not None, "each has added a job before it claims one"
        store.complete(lease, n)
    return count


@on("sqlite")
@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_eight_processes_on_one_file_meet_no_busy(database: Database, journal: str) -> None:
    """FAULTS 68, with drivers' time-outs as they are, and much too short."""
    engine = database.engine()
    with engine.connect() as connection:
        assert connection.execute(text(f"PRAGMA journal_mode = {journal}")).scalar() == journal
    calls = [(database.url, f"w{n}", 50, 5.0 if n % 2 else 0.01) for n in range(8)]
    assert together(cycles, calls) == [50] * 8
    assert Store(engine).counts() == {"default": {JobState.DONE: 400}}
    engine.dispose()


@on("sqlite")
def test_a_commit_that_is_busy_is_repeated_and_no_transaction_stays_open(database: Database) -> None:
    """FAULTS 72: a reader is in the way of the rollback journal."""
    engine = database.engine(connect_args={"timeout": 0})
    store = Store(engine)
    store.enqueue("j", now=T)
    with database.engine().connect() as reader, ThreadPoolExecutor(1) as threads:
        reader.exec_driver_sql("BEGIN")
        reader.execute(text("SELECT * FROM fenced_jobs")).all()
        claiming = threads.submit(store.claim, "w", ttl=9, now=T)
        time.sleep(0.15)
        assert not claiming.done(), "the reader is not in the way"
        reader.exec_driver_sql("ROLLBACK")
        lease = claiming.result(20)
    assert lease is not None
    assert (lease.id, lease.fence, lease.attempt) == ("j", 1, 1)
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        assert driver.in_transaction is False
    store.complete(lease, now=T)


@on("sqlite")
def test_a_busy_commit_of_a_handler_s_transaction_is_repeated_and_the_handler_is_not(
    database: Database,
) -> None:
    engine, runs = database.engine(connect_args={"timeout": 0}), []
    store = Store(engine)
    store.enqueue("j", now=T)
    lease = claimed(store, "j")

    def handle() -> None:
        with store.completing(lease, now=T) as uow:
            uow.jobs.enqueue("next", now=T)
            runs.append(1)

    with database.engine().connect() as reader, ThreadPoolExecutor(1) as threads:
        reader.exec_driver_sql("BEGIN")
        reader.execute(text("SELECT * FROM fenced_jobs")).all()
        handling = threads.submit(handle)
        time.sleep(0.15)
        assert not handling.done(), "the reader is not in the way"
        reader.exec_driver_sql("ROLLBACK")
        handling.result(20)
    assert runs == [1]
    assert store.counts() == {"default": {JobState.DONE: 1, JobState.READY: 1}}


@on("sqlite")
def test_the_journal_and_the_engine_stay_as_the_host_has_them(database: Database) -> None:
    engine = database.engine()
    store = Store(engine)
    store.enqueue("j", now=T)
    store.complete(claimed(store, "j"), now=T)
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "delete"
        driver: Any = connection.connection.driver_connection
        assert driver.isolation_level == ""
    engine.dispose()


@on("sqlite")
def test_an_id_of_a_deleted_row_is_not_given_again(database: Database) -> None:
    """FAULTS 29: INTEGER PRIMARY KEY alone gives the newest deleted number again."""
    engine = database.engine()
    store = Store(engine)
    seen = []
    for _ in range(3):
        id = store.enqueue(now=T)
        assert id is not None
        with engine.connect() as connection:
            seen.append(connection.execute(text("SELECT max(seq) FROM fenced_jobs")).scalar())
        store.cancel(id, now=T)
        store.purge(before=T + 1)
    assert seen == [1, 2, 3]
