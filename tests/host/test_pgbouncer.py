"""Behind PgBouncer in transaction mode: the same answers, or a refusal at first use that says what to set."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from fencedjobs import JobState, Store, UnsupportedDatabase, Worker, dialects, schema
from fencedjobs.relay import Relay
from tests.conftest import absent
from tests.databases import Database, empty_database
from tests.host import test_session_forms as forms
from tests.host.day import EXPECTED, day, rest
from tests.hosts import Host, hosted, told
from tests.poolers import pgbouncer
from tests.servers import Missing

#: what docs/poolers.md tells each driver: to prepare nothing that outlives a transaction
SETTINGS: dict[str, dict[str, Any]] = {
    "psycopg": {"prepare_threshold": None},
    "asyncpg": {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: f"fenced_{uuid4().hex}",
    },
}
DRIVERS = [None, "psycopg", "asyncpg"]  # None: psycopg in its sync form

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@contextmanager
def pooling(database: Database, **options: Any) -> Iterator[int]:
    """The port of a pooler in front of this database."""
    try:
        with pgbouncer(database.url, **options) as port:
            yield port
    except Missing as error:
        absent(f"there is no pgbouncer here: {error}")


@pytest.fixture
def port(database: Database) -> Iterator[int]:
    with pooling(database) as port:
        yield port


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> str | None:
    found: str | None = request.param
    return found


def through(url: URL, port: int) -> URL:
    return url.set(host="127.0.0.1", port=port)


@pytest.fixture
def pooled(database: Database, port: int) -> Iterator[Engine]:
    engine = create_engine(through(database.url, port), connect_args=SETTINGS["psycopg"])
    spread(engine)
    yield engine
    engine.dispose()


def spread(engine: Engine) -> None:
    """Have the pooler open several connections, among which it then takes turns."""
    several = [engine.connect() for _ in range(4)]
    pids = {one.scalar(text("SELECT pg_backend_pid()")) for one in several}
    for one in several:
        one.close()
    assert len(pids) == 4


@pytest.mark.parametrize("driver", DRIVERS, indirect=True, ids=str)
def test_the_same_answers(database: Database, driver: str | None, port: int, pooled: Engine) -> None:
    with hosted(database, driver, port=port, connect_args=SETTINGS[driver or "psycopg"]) as host:
        for _ in range(2):  # a second time with all statements known
            assert day(host) == EXPECTED
            host.clear()
            empty(host)
        forms.day(host, forms.plain if driver is None else forms.asynchronous)
        rest(host)


def empty(host: Host) -> None:
    with host.observer.connect() as connection:
        connection.execute(text("DELETE FROM fenced_jobs"))
        connection.execute(text("DELETE FROM fenced_locks"))


@pytest.mark.parametrize("driver", DRIVERS, indirect=True, ids=str)
def test_a_driver_that_prepares_is_refused_at_first_use(
    database: Database, driver: str | None, port: int, pooled: Engine
) -> None:
    """Its statements would be looked for on connections that have never heard of them."""
    with hosted(database, driver, port=port) as host:
        error = told(host.store.enqueue, "j")
        assert isinstance(error, UnsupportedDatabase), repr(error)
        assert ("prepared_statement_name_func" if driver == "asyncpg" else "prepare_threshold") in str(error)


@pytest.mark.parametrize("driver", [None, "psycopg"], indirect=True, ids=str)
def test_it_is_refused_too_where_the_connection_just_used_comes_first(
    database: Database, driver: str | None
) -> None:
    """PgBouncer's default, where a client alone has one connection for long."""
    with pooling(database, turns=False) as port, hosted(database, driver, port=port) as host:
        assert isinstance(told(host.store.enqueue, "j"), UnsupportedDatabase)
    right = SETTINGS["psycopg"]
    with (
        pooling(database, turns=False) as port,
        hosted(database, driver, port=port, connect_args=right) as host,
    ):
        assert host.store.enqueue("j") == "j"


def test_a_statement_that_is_lost_later_is_explained(
    database: Database, pooled: Engine, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "may_lose_statements", lambda connection: False)
    with hosted(database, port=port) as host:
        error = told(lambda: [host.store.enqueue(f"j{n}") for n in range(99)])
    assert isinstance(error, UnsupportedDatabase), repr(error)
    assert "prepare_threshold" in str(error)


@pytest.mark.parametrize("driver", DRIVERS, indirect=True, ids=str)
def test_a_pooler_by_sessions_needs_no_settings(database: Database, driver: str | None) -> None:
    with pooling(database, mode="session") as port, hosted(database, driver, port=port) as host:
        assert day(host) == EXPECTED


def test_a_worker_hears_nothing_and_works_all_the_same(pooled: Engine) -> None:
    store = Store(pooled)
    worker = Worker(store, queues=["default"], poll=0.1)
    done = threading.Event()

    @worker.handler("k")
    def handle(ctx: Any) -> None:
        with ctx.transaction("ok") as uow:
            uow.outbox.add(ctx.id, {}, topic="t")
        done.set()

    running = threading.Thread(target=worker.run)
    running.start()
    try:
        time.sleep(0.3)  # it has found nothing, and waits
        store.enqueue("j", kind="k")
        assert done.wait(10)
    finally:
        worker.stop()
        running.join(10)
    assert not running.is_alive()
    record = store.get("j")
    assert record is not None
    assert (record.state, record.result) == (JobState.DONE, "ok")


def test_a_relay_sends_in_order(pooled: Engine) -> None:
    store, sent = Store(pooled), list[str]()
    with store.begin() as uow:
        for number in range(5):
            uow.outbox.add(f"e{number}", {}, topic="t")

    def send(event: Any) -> bool:
        sent.append(event.id)
        return True

    Relay(store, send).run(until_empty=True)
    assert sent == [f"e{number}" for number in range(5)]


def test_several_upgrade_at_once_and_leave_no_lock(port: int, tmp_path: Any, database: Database) -> None:
    with empty_database("postgresql", tmp_path) as new:
        engine = create_engine(through(new.url, port), connect_args=SETTINGS["psycopg"])
        barrier = Barrier(4)

        def upgrade(_: int) -> None:
            barrier.wait()
            schema.upgrade(engine)

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(upgrade, range(4))) == [None] * 4
        assert schema.current(engine) == schema.HEAD
        direct = new.engine()
        with direct.connect() as connection:
            locks = connection.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"))
        assert locks == 0
        direct.dispose()
        engine.dispose()
