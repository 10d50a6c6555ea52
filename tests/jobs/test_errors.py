"""Errors in the middle of a verb, drivers that count differently, and servers that are too old."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pymysql
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fencedjobs import JobState, LeaseLost, Retry, Store, UnitOfWork, UnsupportedDatabase
from tests.databases import Database
from tests.jobs.helpers import T, claimed, lost, on, row

AT_ONCE = Retry(base=0)


def found_rows_off(database: Database) -> list[Engine]:
    """Engines whose connections count rows that were changed, not rows that were found."""
    url = database.url

    def connect() -> Any:
        return pymysql.connect(host=url.host, port=url.port or 3306, user=url.username, database=url.database)

    return [
        create_engine(url, connect_args={"client_flag": 0}),
        create_engine("mysql+pymysql://", creator=connect),
    ]


@on("mariadb")
def test_every_verb_answers_the_same_where_only_changed_rows_are_counted(database: Database) -> None:
    """FAULTS 79."""
    for turn, engine in enumerate(found_rows_off(database)):
        with engine.connect() as connection:
            connection.execute(text("SET @x = 1"))
            same = connection.execute(text("UPDATE fenced_version SET version_num = version_num"))
            assert same.rowcount == 0, "this engine counts what was found"
        store, queue = Store(engine), f"q{turn}"
        store.enqueue_many([{"id": f"{turn}-{n}", "queue": queue} for n in range(6)], now=T)
        leases = store.claim_many("w", ttl=9, limit=6, queue=queue, now=T)
        for _ in range(2):
            assert [store.renew(lease, ttl=9, now=T) for lease in leases] == leases
            assert store.renew_many(leases, ttl=9, now=T) == leases
            store.checkpoint(leases[0], [1], now=T)
        store.complete(leases[0], now=T)
        assert lost(store.checkpoint, leases[0], [1], now=T)
        assert store.complete_many(leases[1:2], now=T) == []
        assert store.complete_many(leases[1:3], ["x", None], now=T) == leases[1:2]
        assert store.complete_many(leases[:3], now=T) == leases[:3]
        store.release(leases[3], now=T)
        assert store.fail(leases[4], "x", retry=AT_ONCE, now=T) is JobState.READY
        assert store.fail(leases[5], "x", retry=None, now=T) is JobState.QUARANTINED
        assert store.requeue(leases[5].id, by="eve", reason="x", now=T)
        assert store.cancel(leases[5].id, now=T)
        for lease in leases:
            with pytest.raises(LeaseLost):
                store.renew(lease, ttl=9, now=T)
        lock = store.locks.claim(f"l{turn}", "w", ttl=9, now=T)
        assert lock is not None
        assert store.locks.renew(lock, ttl=9, now=T) == lock
        assert store.locks.renew(lock, ttl=9, now=T) == lock
        store.locks.release(lock)
        engine.dispose()


@contextmanager
def locked(engine: Engine, id: str) -> Iterator[None]:
    """The row of this job locked by somebody else."""
    with engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM fenced_jobs WHERE id = :id FOR UPDATE"), {"id": id}).all()
        yield
        connection.rollback()


def impatient(database: Database) -> Engine:
    """Connections that get error 1205 at once instead of waiting for a lock."""
    engine = database.engine()

    @event.listens_for(engine, "connect")
    def no_wait(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 0")

    return engine


@on("mariadb")
def test_a_lock_wait_timeout_on_the_second_statement_takes_back_the_first(
    database: Database, engine: Engine
) -> None:
    """FAULTS 77: MariaDB keeps the earlier statements of the transaction."""
    hasty = impatient(database)
    store = Store(hasty)
    store.enqueue_many([{"id": "free"}, {"id": "locked"}], now=T)
    leases = store.claim_many("w", ttl=9, limit=2, now=T)
    with Session(hasty) as session, locked(engine, "locked"):
        uow = UnitOfWork(session)
        uow.jobs.enqueue("first", now=T)
        with pytest.raises(DBAPIError, match="1205"):
            uow.jobs.complete_many(leases, [1, 2], now=T)
        session.rollback()
    assert store.get("first") is None
    assert row(store, "free", "state") == {"state": JobState.LEASED}
    hasty.dispose()


@on("mariadb")
def test_a_verb_of_the_store_is_repeated_as_a_whole_until_the_lock_is_gone(
    database: Database, engine: Engine
) -> None:
    """FAULTS 77: free is written, locked fails, all is repeated; in the end both are done once."""
    hasty = impatient(database)
    store = Store(hasty)
    store.enqueue_many([{"id": "free"}, {"id": "locked"}], now=T)
    leases = store.claim_many("w", ttl=9, limit=2, now=T)
    with ThreadPoolExecutor(1) as threads:
        with locked(engine, "locked"):
            completing = threads.submit(store.complete_many, leases, [1, 2], now=T)
            time.sleep(0.1)
            assert row(Store(engine), "free", "state") == {"state": JobState.LEASED}
        assert completing.result(20) == []
    assert store.counts() == {"default": {JobState.DONE: 2}}
    hasty.dispose()


@on("mariadb")
def test_an_iterator_is_not_used_up_by_a_repeated_transaction(database: Database, engine: Engine) -> None:
    """A deadlock or a lock wait in the middle: the second try must see the same items."""
    hasty = impatient(database)
    store = Store(hasty)
    store.enqueue("locked", now=T)
    lease = claimed(store, "locked")
    with ThreadPoolExecutor(1) as threads:
        with locked(engine, "locked"):
            completing = threads.submit(store.complete_many, iter([lease]), now=T)
            time.sleep(0.1)
        assert completing.result(20) == []
    hasty.dispose()
    assert row(Store(engine), "locked", "state") == {"state": JobState.DONE}, "nothing was lost, it said"


OLD = {
    "postgresql": ((9, 4), "PostgreSQL 9.4 is too old: 12"),
    "mariadb": ((10, 5, 9), "MariaDB 10.5.9 is too old: 10.6"),
    "sqlite": ((3, 34, 1), "SQLite 3.34.1 is too old: 3.35"),
}


def test_a_server_without_what_claims_need_is_refused_with_the_version_it_needs(database: Database) -> None:
    """FAULTS 7: never an empty queue."""
    version, words = OLD[database.backend]
    engine = database.engine()

    @event.listens_for(engine, "first_connect")
    def old(*_: Any) -> None:
        engine.dialect.server_version_info = version

    engine.connect().close()
    engine.dialect.server_version_info = version
    store = Store(engine)
    for _ in range(2):
        with pytest.raises(UnsupportedDatabase, match=words):
            store.claim("w", ttl=9, now=T)
    engine.dispose()


@on("mariadb")
def test_an_error_of_the_claim_statement_is_an_error_and_no_empty_queue(engine: Engine) -> None:
    """FAULTS 7."""
    store = Store(engine)
    store.enqueue("j", now=T)

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def unknown_clause(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> Any:
        return statement.replace("SKIP LOCKED", "SKIP LUCKED"), parameters

    with pytest.raises(DBAPIError, match="1064"):
        store.claim("w", ttl=9, now=T)
