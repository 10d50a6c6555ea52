"""Engines with every isolation level, and what an old snapshot must not show."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fencedjobs import JobLease, JobState, LeaseLost, Store, TransactionLost, UnitOfWork
from fencedjobs.claims import Jobs
from fencedjobs.transaction import Transaction
from tests.databases import Database
from tests.jobs.helpers import T, claimed, ids, on, row

LEVELS = [
    *(("postgresql", level) for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")),
    *(("mariadb", level) for level in ("READ UNCOMMITTED", "REPEATABLE READ", "SERIALIZABLE")),
    ("sqlite", "SERIALIZABLE"), ("sqlite", "READ UNCOMMITTED"),
    *((backend, "AUTOCOMMIT") for backend in ("postgresql", "mariadb", "sqlite")),
]  # fmt: skip


def work_off(store: Store, owner: str) -> list[JobLease]:
    """Claim, renew and complete until there is nothing left."""
    done: list[JobLease] = []
    while lease := store.claim(owner, ttl=60, now=T):
        store.complete(store.renew(lease, ttl=60, now=T), owner, now=T)
        done.append(lease)
    return done


def by_eight(store: Store) -> list[JobLease]:
    barrier = threading.Barrier(8)

    def work(n: int) -> list[JobLease]:
        barrier.wait()
        return work_off(store, f"w{n}")

    with ThreadPoolExecutor(8) as threads:
        return list(chain.from_iterable(threads.map(work, range(8))))


@pytest.mark.parametrize(("database", "level"), LEVELS, indirect=["database"])
def test_eight_workers_do_each_job_once_whatever_the_engine_s_isolation(
    database: Database, level: str
) -> None:
    """FAULTS 5: no serialisation failure comes out, and none passes for an empty queue."""
    engine = database.engine(isolation_level=level, pool_size=8)
    store = Store(engine)
    names = [f"j{n}" for n in range(100 if database.backend == "postgresql" else 50)]
    assert store.enqueue_many([{"id": id} for id in names], now=T) == names
    done = by_eight(store)
    assert Counter(ids(done)) == Counter(names)
    assert {lease.fence for lease in done} == {1}
    assert store.counts() == {"default": {JobState.DONE: len(names)}}
    engine.dispose()


@on("mariadb")
def test_workers_under_mariadb_s_snapshot_isolation_meet_no_1020(database: Database) -> None:
    """FAULTS 76: the default since 11.6.2."""
    engine = database.engine(isolation_level="REPEATABLE READ", pool_size=8)

    @event.listens_for(engine, "connect")
    def strict(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_snapshot_isolation = ON")

    store = Store(engine)
    names = [f"j{n}" for n in range(50)]
    store.enqueue_many([{"id": id} for id in names], now=T)
    assert Counter(ids(by_eight(store))) == Counter(names)
    assert store.counts() == {"default": {JobState.DONE: 50}}
    engine.dispose()


@on("mariadb")
def test_1020_comes_out_of_the_caller_s_own_transaction_and_nothing_is_done(database: Database) -> None:
    """FAULTS 76: the caller repeats it as a whole."""
    engine = database.engine(isolation_level="REPEATABLE READ")
    store = Store(engine)
    store.enqueue("j", now=T)
    lease = claimed(store, "j")
    with Session(engine) as session:
        session.execute(text("SET SESSION innodb_snapshot_isolation = ON"))
        session.commit()
        uow = UnitOfWork(session)
        session.execute(text("SELECT * FROM fenced_jobs")).all()
        store.renew(lease, ttl=60, now=T)
        with pytest.raises(DBAPIError, match="1020"):
            uow.jobs.complete(lease, now=T)
        session.rollback()
        uow.jobs.complete(lease, now=T)
        session.commit()
        session.execute(text("SET SESSION innodb_snapshot_isolation = OFF"))
    assert row(store, "j", "state") == {"state": JobState.DONE}
    engine.dispose()


@on("postgresql", "mariadb")
def test_a_claim_on_an_empty_queue_that_is_kept_open_blocks_no_enqueue(database: Database) -> None:
    """FAULTS 6: under REPEATABLE READ it did on MariaDB, until error 1205."""
    engine = database.engine(isolation_level="REPEATABLE READ")
    store = Store(engine)
    store.enqueue("done", now=T)
    store.complete(claimed(store, "done"), now=T)
    claimed_nothing, enqueued = threading.Event(), threading.Event()

    def keep_open(tx: Any) -> bool:
        assert Jobs(tx).claim_next("w", ttl=9, limit=1, now=T) == []
        claimed_nothing.set()
        return enqueued.wait(10)

    with ThreadPoolExecutor(1) as threads:
        claiming = threads.submit(store.run, keep_open)
        assert claimed_nothing.wait(10)
        store.enqueue("new", now=T)
        store.enqueue_many([{"id": "newer"}, {"id": "later", "delay": 5}], now=T)
        enqueued.set()
        assert claiming.result() is True, "the enqueue waited for the claim"
    engine.dispose()


@on("postgresql", "mariadb")
def test_a_row_that_somebody_has_locked_for_a_moment_is_no_empty_queue(database: Database) -> None:
    """The lock is let go when the claim has seen nothing and looks whether there is something."""
    engine, other = database.engine(), database.engine()
    store = Store(engine)
    store.enqueue("j", now=T)
    with Session(other) as session:
        UnitOfWork(session).jobs.cancel("j", now=T)

        @event.listens_for(engine, "before_cursor_execute")
        def let_go(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("SELECT fenced_jobs.id \n"):
                session.rollback()

        lease = store.claim("w", ttl=9, now=T)
    assert lease is not None, "the queue was never empty"
    assert (lease.id, lease.fence) == ("j", 1)
    engine.dispose()
    other.dispose()


@on("mariadb")
def test_rows_that_were_read_and_have_changed_are_not_written(database: Database) -> None:
    """Where reading and writing are two statements, what was read goes into the second's condition.

    By the key alone, on a connection in AUTOCOMMIT mode, 200 jobs were claimed 271 times.
    """
    engine, other = database.engine(isolation_level="AUTOCOMMIT"), Store(database.engine())
    other.enqueue("j", now=T)

    @event.listens_for(engine, "before_cursor_execute")
    def be_faster(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE"):
            assert other.claim("faster", ttl=9, id="j", now=T) is not None

    with engine.connect() as connection:
        jobs = Jobs(Transaction(lambda: connection))
        with pytest.raises(TransactionLost):
            jobs.claim_named("j", "slower", ttl=9, now=T)
    assert row(other, "j", "owner", "fence", "attempts") == {"owner": "faster", "fence": 1, "attempts": 1}
    engine.dispose()


@contextmanager
def writing(engine: Engine, write: Callable[[UnitOfWork], object]) -> Iterator[Callable[[], None]]:
    """Something written in a transaction of somebody else, which is still open; call to commit it."""
    with Session(engine) as session:
        write(UnitOfWork(session))
        yield session.commit


def test_a_rescuer_that_read_before_the_worker_s_commit_changes_nothing(engine: Engine) -> None:
    """FAULTS 10: the lease has run out by the rescuer's clock, while its holder's end is on the way."""
    store = Store(engine)
    ends: dict[str, Callable[[UnitOfWork, JobLease], object]] = {
        "done": lambda uow, lease: uow.jobs.complete(lease, now=T),
        "scheduled": lambda uow, lease: uow.jobs.release(lease, delay=999, now=T),
        "quarantined": lambda uow, lease: uow.jobs.fail(lease, "x", retry=None, now=T),
        "cancelled": lambda uow, lease: uow.jobs.cancel(lease.id, now=T),
    }
    rescues: dict[str, Callable[[str], object]] = {
        "sweep": lambda id: store.sweep(now=T + 100),
        "claim": lambda id: store.claim("thief", ttl=9, id=id, now=T + 100),
        "claim next": lambda id: store.claim("thief", ttl=9, now=T + 100),
        "quarantine": lambda id: store.quarantine(id, "late", now=T + 100),
        "purge": lambda id: store.purge(before=T),
    }
    for state, end in ends.items():
        for name, rescue in rescues.items():
            if state == "scheduled" and name in ("quarantine", "sweep"):
                continue  # which may be set aside
            id = f"{state} before {name}"
            store.enqueue(id, max_attempts=1 if name == "sweep" else 20, now=T)
            lease = claimed(store, id, ttl=10)
            with (
                ThreadPoolExecutor(1) as threads,
                writing(engine, lambda uow: end(uow, lease)) as commit,  # noqa: B023
            ):
                rescuing = threads.submit(rescue, id)
                time.sleep(0.01)
                commit()
                answer = rescuing.result(20)
            assert row(store, id, "state", "fence") == {"state": state, "fence": 1}, f"{name}: {answer}"
            assert not answer, f"{name} after {state} answered {answer}"
            store.cancel(id, now=T)


def test_values_are_read_under_the_lock_and_not_from_an_old_snapshot(engine: Engine) -> None:
    """FAULTS 80: the payload of a claim is that of the row which was claimed."""
    store = Store(engine)
    store.enqueue("j", {"v": 1}, now=T)
    for n in range(2, 6):
        store.cancel("j", now=T)

        def mend(uow: UnitOfWork) -> bool:
            return uow.jobs.requeue("j", payload={"v": n}, by="eve", reason="x", now=T)  # noqa: B023

        with ThreadPoolExecutor(1) as threads, writing(engine, mend) as commit:
            claiming = threads.submit(patiently, lambda: store.claim("w", ttl=9, id="j", now=T))
            time.sleep(0.01)
            commit()
            lease = claiming.result(20)
        assert lease.payload == {"v": n}
        assert row(store, "j", "fence", "payload") == {"fence": lease.fence, "payload": {"v": n}}


def patiently(claim: Callable[[], JobLease | None]) -> JobLease:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if lease := claim():
            return lease
    raise AssertionError("nothing to claim in 10 s")


@on("mariadb", "postgresql")
def test_looking_at_a_job_in_a_long_transaction_holds_up_nobody(database: Database) -> None:
    """A read that locked the row kept the worker's renewal waiting until the lease had run out."""
    engine = database.engine()
    store = Store(engine)
    store.enqueue("j", now=T)
    lease = claimed(store, "j")
    with Session(engine) as session, ThreadPoolExecutor(1) as threads:
        uow = UnitOfWork(session)
        assert uow.jobs.get("j") is not None
        uow.jobs.counts()
        assert uow.jobs.enqueue("j", now=T) is None
        assert uow.jobs.enqueue_many([{"id": "j"}], now=T) == []
        renewing = threads.submit(store.renew, lease, ttl=60, now=T)
        wait([renewing], timeout=10)
        held_up = not renewing.done()
        session.rollback()
        renewing.result(20)
    assert not held_up, "the renewal waited for the end of the other transaction"
    engine.dispose()


@on("mariadb", "postgresql")
def test_what_a_verb_says_in_an_old_snapshot_is_what_is_there(database: Database) -> None:
    """FAULTS 80, in the caller's REPEATABLE READ: a plain read after the refused write shows the past."""
    engine = database.engine(isolation_level="REPEATABLE READ")
    store = Store(engine)
    store.enqueue("j", now=T)
    lease = claimed(store, "j")
    with Session(engine) as session:
        uow = UnitOfWork(session)
        session.execute(text("SELECT * FROM fenced_jobs")).all()
        store.complete(lease, now=T)
        if database.backend == "postgresql":
            with pytest.raises(DBAPIError, match="could not serialize"):
                uow.jobs.complete(lease, now=T)
        else:
            with pytest.raises(LeaseLost) as lost:
                uow.jobs.complete(lease, now=T)
            assert lost.value.completed is True, lost.value.current
    engine.dispose()
