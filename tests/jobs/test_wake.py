"""A job that is ready at once wakes who waits for it, at COMMIT and not otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from fencedjobs import AsyncStore, AsyncUnitOfWork, Retry, Store, UnitOfWork, dialects
from tests.databases import Database
from tests.forms import opened
from tests.jobs.helpers import T, claimed, on

SOON = 30.0  # seconds, of which none should pass


@pytest.fixture
def heard(engine: Engine) -> Iterator[Callable[[], list[str]]]:
    """What tells the queues of all words up to now, in the order of the commits."""
    with engine.connect() as own, engine.connect() as other:
        own.exec_driver_sql("LISTEN fencedjobs")
        own.commit()
        driver: Any = own.connection.driver_connection

        def heard() -> list[str]:
            other.execute(text("SELECT pg_notify('fencedjobs', 'the end')"))
            other.commit()
            queues: list[str] = []
            while "the end" not in queues:
                queues += [one.payload for one in driver.notifies(timeout=SOON, stop_after=1)]
            return queues[:-1]

        yield heard


@pytest.fixture
def teller(database: Database, driver: str | None) -> Iterator[Store]:
    with opened(database, driver) as store:
        yield store


@on("postgresql")
@pytest.mark.parametrize("driver", [None, "asyncpg"])
def test_a_job_that_is_ready_at_once_wakes_and_one_that_waits_does_not(
    teller: Store, heard: Callable[[], list[str]]
) -> None:
    teller.enqueue("a", queue="one", now=T)
    assert heard() == ["one"]
    teller.enqueue("a", queue="two", now=T)
    assert heard() == [], "it is there already"
    teller.enqueue("later", delay=5, now=T)
    teller.enqueue("past", run_at=T - 5, now=T)
    assert heard() == [], "scheduled"
    items = [{"queue": f"q{n % 2}"} for n in range(9)] + [{"queue": "later", "delay": 9}]
    teller.enqueue_many(items, now=T)
    assert heard() == ["q0", "q1"], "each queue once"
    teller.cancel("a", now=T)
    teller.purge(before=T + 1)
    assert heard() == []
    teller.enqueue("a", queue="reborn", now=T)
    assert heard() == ["reborn"]


@on("postgresql")
@pytest.mark.parametrize("driver", [None, "asyncpg"])
def test_a_job_that_is_given_back_wakes_unless_it_is_to_wait(
    teller: Store, heard: Callable[[], list[str]]
) -> None:
    teller.enqueue("a", queue="one", now=T)
    heard()
    teller.release(claimed(teller, "a"), now=T)
    assert heard() == ["one"]
    teller.fail(claimed(teller, "a"), "no", retry=Retry(base=0), now=T)
    assert heard() == ["one"]
    teller.fail(claimed(teller, "a"), "no", retry=Retry(jitter=False), now=T)
    teller.release(claimed(teller, "a", now=T + 9), delay=1, now=T + 9)
    teller.fail(claimed(teller, "a", now=T + 10), "no", retry=None, now=T + 10)
    assert heard() == []
    teller.requeue("a", by="ann", reason="again", now=T + 10)
    assert heard() == ["one"]
    teller.complete(claimed(teller, "a", now=T + 10), now=T + 10)
    assert heard() == []


@on("postgresql")
def test_only_a_commit_wakes(engine: Engine, heard: Callable[[], list[str]]) -> None:
    with Session(engine) as session:
        UnitOfWork(session).jobs.enqueue("a", queue="rolled back", now=T)
        assert heard() == []
        session.rollback()
        uow = UnitOfWork(session)
        with session.begin_nested() as savepoint:
            uow.jobs.enqueue("b", queue="undone", now=T)
            savepoint.rollback()
        uow.jobs.enqueue("c", queue="kept", now=T)
        assert heard() == []
        session.commit()
    assert heard() == ["kept"]


@on("postgresql")
def test_waking_can_be_left_off(engine: Engine, heard: Callable[[], list[str]]) -> None:
    quiet = Store(engine, notify=False)
    quiet.enqueue("a", now=T)
    quiet.enqueue_many([{}, {}], now=T)
    with quiet.begin() as uow:
        uow.jobs.enqueue("b", now=T)
    lease = claimed(quiet, "a")
    with quiet.completing(lease, now=T) as uow:
        uow.jobs.enqueue("c", now=T)
    quiet.release(claimed(quiet, "b"), now=T)
    quiet.quarantine("b", "odd", now=T)
    quiet.requeue("b", by="ann", reason="even", now=T)
    with Session(engine) as session, session.begin():
        UnitOfWork(session, notify=False).jobs.enqueue("d", now=T)
    assert heard() == []


@on("postgresql")
async def test_waking_can_be_left_off_in_the_async_form(
    database: Database, heard: Callable[[], list[str]]
) -> None:
    engine = create_async_engine(database.async_url("asyncpg"))
    quiet = AsyncStore(engine, notify=False)
    await quiet.enqueue("a", now=T)
    async with quiet.begin() as uow:
        await uow.jobs.enqueue("b", now=T)
        await AsyncUnitOfWork(uow.session, notify=False).jobs.enqueue("c", now=T)
        await AsyncUnitOfWork(uow.session).jobs.enqueue("d", queue="told", now=T)
    await engine.dispose()
    assert heard() == ["told"]


@on("postgresql")
def test_a_two_phase_transaction_takes_jobs_without_waking(engine: Engine) -> None:
    """PREPARE TRANSACTION refuses one that has notified. (Few servers prepare any, so this looks only.)"""
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *about: sent.append(about[2]))
    for twophase in (True, False):
        with Session(engine, twophase=twophase) as session:
            UnitOfWork(session).jobs.enqueue("a", now=T)
            session.rollback()
    assert ["pg_notify" in one for one in sent if one.startswith("INSERT")] == [False, True]


@on("postgresql")
def test_the_longest_name_of_a_queue_fits(engine: Engine, heard: Callable[[], list[str]]) -> None:
    name = "\U0001f600" * 255
    Store(engine).enqueue("a", queue=name, now=T)
    assert heard() == [name]


# --- listening ------------------------------------------------------------------------------------


@on("postgresql")
def test_a_listener_is_woken_once_by_all_that_came_before(engine: Engine) -> None:
    store = Store(engine)
    with engine.connect() as connection:
        wait = dialects.listening(connection)
        assert wait is not None
        assert not wait(0)
        store.enqueue_many([{"queue": f"q{n}"} for n in range(20)])
        store.enqueue()
        assert wait(SOON)
        assert not wait(0)
        store.enqueue()
        assert wait(SOON)


@on("postgresql")
def test_a_pool_gets_no_connection_back_that_listens(engine: Engine) -> None:
    with engine.connect() as connection:
        assert dialects.listening(connection)
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT pg_listening_channels()")).all() == []


@on("postgresql")
def test_a_listener_whose_connection_is_cut_says_so(engine: Engine) -> None:
    with engine.connect() as connection, engine.connect() as other:
        wait = dialects.listening(connection)
        assert wait is not None
        cut(connection, other)
        with pytest.raises(psycopg.OperationalError):
            wait(SOON)
        connection.invalidate()


def cut(connection: Connection, other: Connection) -> None:
    """End the other's backend, by its number: the connection itself is busy listening."""
    raw: Any = connection.dialect.get_driver_connection(connection.connection.dbapi_connection)  # type: ignore[arg-type]
    pid = raw.info.backend_pid if hasattr(raw, "info") else raw.get_server_pid()
    other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    other.commit()


@on("sqlite", "mariadb")
def test_others_do_not_listen(engine: Engine) -> None:
    with engine.connect() as connection:
        assert dialects.listening(connection) is None


@pytest.fixture(params=["psycopg", "asyncpg"])
def told_engine(database: Database, request: pytest.FixtureRequest) -> AsyncEngine:
    return create_async_engine(database.async_url(request.param))


@on("postgresql")
async def test_an_async_listener_is_woken_too(told_engine: AsyncEngine, engine: Engine) -> None:
    store = Store(engine)
    async with told_engine.connect() as connection:
        wait = await greenlet_spawn(dialects.listening, connection.sync_connection)
        assert wait is not None
        assert not await greenlet_spawn(wait, 0)
        waiting = asyncio.create_task(greenlet_spawn(wait, SOON))
        await asyncio.to_thread(store.enqueue_many, [{"queue": f"q{n}"} for n in range(20)])
        assert await waiting
        assert not await greenlet_spawn(wait, 0)
        store.enqueue()
        assert await greenlet_spawn(wait, SOON)
    await told_engine.dispose()


@on("postgresql")
async def test_an_async_listener_whose_connection_is_cut_says_so(
    told_engine: AsyncEngine, engine: Engine
) -> None:
    async with told_engine.connect() as connection:
        wait = await greenlet_spawn(dialects.listening, connection.sync_connection)
        assert wait is not None
        waiting = asyncio.create_task(greenlet_spawn(wait, SOON))
        await asyncio.sleep(0)
        with engine.connect() as other:
            cut(connection.sync_connection, other)  # type: ignore[arg-type]
        with pytest.raises((psycopg.OperationalError, ConnectionResetError)):
            await waiting
        await connection.invalidate()
    await told_engine.dispose()
