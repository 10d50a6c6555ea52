"""upgrade, downgrade, current and require: transactions, errors, and every kind of bind."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, event, inspect, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from fencedjobs import schema
from fencedjobs.errors import FencedJobsError, InvalidValue, SchemaMismatch, UnsupportedDatabase
from fencedjobs.models import Base
from tests.databases import ASYNC_DRIVERS, Database, empty_database
from tests.schema.catalog import TABLES

ROOT = Path(__file__).parents[2]
TRANSACTIONAL = ("sqlite", "postgresql")  #: where a rollback undoes CREATE TABLE


@pytest.fixture
def bare(empty: Database) -> Iterator[Engine]:
    """An engine on a database without any tables."""
    engine = empty.engine()
    yield engine
    engine.dispose()


def _tables(engine: Engine) -> set[str]:
    return {*inspect(engine).get_table_names()}


# --- up, down, current ----------------------------------------------------------------------------


def test_up_again_down_and_up(bare: Engine) -> None:
    assert schema.current(bare) is None
    schema.upgrade(bare)
    schema.upgrade(bare)
    assert schema.current(bare) == schema.HEAD
    assert _tables(bare) == {*TABLES, schema.VERSION_TABLE}
    schema.downgrade(bare)
    schema.downgrade(bare)
    assert schema.current(bare) is None
    assert not _tables(bare) & {*TABLES}
    schema.upgrade(bare)
    assert schema.current(bare) == schema.HEAD


def test_an_upgrade_that_finds_all_done_writes_nothing(engine: Engine) -> None:
    with _statements(engine) as seen:
        schema.upgrade(engine)
    assert not [s for s in seen if s.split()[0].upper() in ("CREATE", "INSERT", "DELETE", "ALTER", "DROP")]


def test_an_upgrade_adopts_tables_that_create_all_made(bare: Engine) -> None:
    Base.metadata.create_all(bare)
    with bare.connect() as connection:
        schema.require(connection)
    schema.upgrade(bare)
    assert schema.current(bare) == schema.HEAD


@pytest.mark.parametrize("revision", ["fj9999", "", "+1", "fj"])
def test_an_unknown_revision_is_refused(engine: Engine, revision: str) -> None:
    for move in (schema.upgrade, schema.downgrade):
        with pytest.raises(InvalidValue, match="revision"):
            move(engine, revision)
    assert schema.current(engine) == schema.HEAD


def test_upgrading_to_a_revision_that_is_behind_changes_nothing(engine: Engine) -> None:
    schema.upgrade(engine, schema.REVISIONS[0])
    assert schema.current(engine) == schema.HEAD


def test_each_revision_goes_down_and_up_alone(bare: Engine) -> None:
    for revision in schema.REVISIONS:
        schema.upgrade(bare, revision)
        assert schema.current(bare) == revision
    for revision in reversed(("base", *schema.REVISIONS[:-1])):
        schema.downgrade(bare, revision)
        assert (schema.current(bare) or "base") == revision


# --- the caller's connection ----------------------------------------------------------------------


def test_on_a_connection_the_caller_commits(bare: Engine) -> None:
    with bare.begin() as connection:
        schema.upgrade(connection)
        assert schema.current(connection) == schema.HEAD
    assert schema.current(bare) == schema.HEAD


@pytest.mark.parametrize("empty", TRANSACTIONAL, indirect=True)
def test_on_a_connection_the_callers_rollback_undoes_it_with_the_rest(bare: Engine) -> None:
    with bare.begin() as connection:
        connection.execute(text("CREATE TABLE host (x INTEGER)"))
    with bare.connect() as connection:
        connection.execute(text("INSERT INTO host VALUES (1)"))
        schema.upgrade(connection)
        connection.rollback()
        assert connection.scalar(text("SELECT count(*) FROM host")) == 0
    assert _tables(bare) == {"host"}


def test_when_there_is_nothing_to_do_the_callers_transaction_stays_open(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE host (x INTEGER)"))
    with engine.connect() as connection:
        connection.execute(text("INSERT INTO host VALUES (1)"))
        schema.upgrade(connection)
        schema.require(connection)
        connection.rollback()
        assert connection.scalar(text("SELECT count(*) FROM host")) == 0


@pytest.mark.parametrize("empty", ["mariadb"], indirect=True)
def test_on_a_connection_without_transactional_ddl_the_version_is_not_left_open(bare: Engine) -> None:
    with bare.connect() as connection:
        schema.upgrade(connection)
        connection.rollback()
    assert schema.current(bare) == schema.HEAD


@pytest.mark.parametrize("empty", ["postgresql", "mariadb"], indirect=True)
def test_an_autocommit_connection_is_refused(empty: Database) -> None:
    engine = empty.engine(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(UnsupportedDatabase, match="AUTOCOMMIT"):
        schema.upgrade(connection)
    assert _tables(engine) == set()
    engine.dispose()


def test_an_autocommit_engine_is_not(empty: Database) -> None:
    engine = empty.engine(isolation_level="AUTOCOMMIT")
    schema.upgrade(engine)
    assert schema.current(engine) == schema.HEAD
    engine.dispose()


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_the_engines_isolation_does_not_matter(empty: Database, level: str) -> None:
    if empty.backend == "sqlite":
        level = "SERIALIZABLE"
    engine = empty.engine(isolation_level=level)
    schema.upgrade(engine)
    with engine.begin() as connection:
        schema.downgrade(connection)
        schema.upgrade(connection)
    assert schema.current(engine) == schema.HEAD
    engine.dispose()


# --- a step that fails ----------------------------------------------------------------------------


def test_a_failure_leaves_nothing_or_what_the_next_upgrade_completes(bare: Engine) -> None:
    for failing in ("CREATE INDEX", "CREATE TABLE IF NOT EXISTS fenced_locks", "INSERT INTO fenced_version"):
        with _failing(bare, failing), pytest.raises(ZeroDivisionError):
            schema.upgrade(bare)
        if bare.dialect.name in TRANSACTIONAL:
            assert _tables(bare) == set()
        with bare.connect() as connection, pytest.raises(SchemaMismatch, match="fencedjobs upgrade"):
            schema.require(connection)
    schema.upgrade(bare)
    with bare.connect() as connection:
        schema.require(connection)


def test_a_failure_hands_no_lock_and_no_open_transaction_back_to_the_pool(empty: Database) -> None:
    engine = empty.engine(pool_size=1, max_overflow=0)
    with _failing(engine, "CREATE INDEX"), pytest.raises(ZeroDivisionError):
        schema.upgrade(engine)
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    with engine.connect() as kept:  # the connection of the failure stays open meanwhile
        other = empty.engine()
        schema.upgrade(other)
        other.dispose()
        assert schema.current(kept) == schema.HEAD
    engine.dispose()


@contextmanager
def _failing(engine: Engine, beginning: str) -> Iterator[None]:
    def fail(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if " ".join(statement.split()).startswith(beginning):
            raise ZeroDivisionError

    event.listen(engine, "before_cursor_execute", fail)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", fail)


@contextmanager
def _statements(engine: Engine) -> Iterator[list[str]]:
    seen: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield seen
    event.remove(engine, "before_cursor_execute", note)


# --- require --------------------------------------------------------------------------------------


def test_missing_tables_say_what_to_do(bare: Engine) -> None:
    with bare.connect() as connection, pytest.raises(SchemaMismatch) as caught:
        schema.require(connection)
    assert all(
        said in str(caught.value) for said in ("fenced_jobs", "fencedjobs upgrade", "schema.upgrade(engine)")
    )


def test_a_newer_revision_says_to_update_the_package(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE fenced_version SET version_num = 'fj9999'"))
        with pytest.raises(SchemaMismatch, match=r"fj9999.*update the package"):
            schema.require(connection)
        for move in (schema.upgrade, schema.downgrade):
            with pytest.raises(SchemaMismatch, match="fj9999"):
                move(connection)


def test_two_rows_in_the_version_table_are_refused(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("INSERT INTO fenced_version VALUES ('fj9999')"))
        for ask in (schema.require, schema.current, schema.upgrade):
            with pytest.raises(SchemaMismatch, match="2 rows"):
                ask(connection)
        connection.rollback()


def test_an_upgrade_that_was_not_completed_is_told_from_tables_that_the_host_made(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM fenced_version"))
        with pytest.raises(SchemaMismatch, match="not completed"):
            schema.require(connection)
        schema.upgrade(connection)
        schema.require(connection)


def test_a_missing_table_is_found_whatever_the_version_table_says(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE fenced_locks"))
        with pytest.raises(SchemaMismatch, match="fenced_locks"):
            schema.require(connection)


def test_the_errors_are_ours() -> None:
    assert issubclass(SchemaMismatch, FencedJobsError)


# --- asyncio and threads --------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ASYNC_DRIVERS)
async def test_inside_a_running_loop(driver: str, tmp_path: Path) -> None:
    backend, _ = ASYNC_DRIVERS[driver]
    with empty_database(backend, tmp_path) as database:
        engine = create_async_engine(database.async_url(driver))
        await schema.upgrade_async(engine)
        async with engine.connect() as connection:
            assert await connection.run_sync(schema.current) == schema.HEAD
        await schema.downgrade_async(engine)
        async with engine.begin() as connection:
            await connection.run_sync(schema.upgrade)
            await connection.run_sync(schema.require)
        async with engine.connect() as connection:
            assert await connection.run_sync(schema.current) == schema.HEAD
        await engine.dispose()


async def test_an_async_engine_given_to_the_synchronous_function_says_what_to_do(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}")
    async with engine.connect() as connection:
        for bind in (engine, connection, None, "sqlite://"):
            for ask in (schema.upgrade, schema.downgrade, schema.current):
                with pytest.raises(TypeError, match=r"upgrade_async.*run_sync"):
                    ask(bind)  # type: ignore[arg-type]
    await engine.dispose()


async def test_from_a_thread_while_a_loop_runs(empty: Database) -> None:
    engine = empty.engine()
    await asyncio.to_thread(schema.upgrade, engine)
    assert await asyncio.to_thread(schema.current, engine) == schema.HEAD
    engine.dispose()


def test_several_threads_upgrade_several_databases_at_once(empty: Database, tmp_path: Path) -> None:
    with ExitStack() as stack:
        made = [stack.enter_context(empty_database(empty.backend, tmp_path)) for _ in range(3)]
        engines = [database.engine() for database in made]
        with ThreadPoolExecutor(9) as pool:
            for done in [pool.submit(schema.upgrade, engine) for engine in engines * 3]:
                done.result()
        for engine in engines:
            assert schema.current(engine) == schema.HEAD
            engine.dispose()


# --- SQLite, as hosts have it ---------------------------------------------------------------------


def _begin_deferred(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN")


def _no_driver_transactions(connection: Any, _record: Any) -> None:
    connection.isolation_level = None


def _sqlite_engines(path: Path) -> Iterator[Engine]:
    yield create_engine(f"sqlite:///{path / 'a.db'}")
    yield create_engine("sqlite://")
    yield create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    recipe = create_engine(f"sqlite:///{path / 'b.db'}")
    event.listen(recipe, "connect", _no_driver_transactions)
    event.listen(recipe, "begin", _begin_deferred)
    yield recipe
    yield create_engine(f"sqlite:///{path / 'c.db'}", isolation_level="AUTOCOMMIT")
    if sys.version_info >= (3, 12):
        yield create_engine(f"sqlite:///{path / 'd.db'}", connect_args={"autocommit": False})


def test_sqlite_whatever_the_drivers_mode(tmp_path: Path) -> None:
    for engine in _sqlite_engines(tmp_path):
        with _failing(engine, "INSERT INTO fenced_version"), pytest.raises(ZeroDivisionError):
            schema.upgrade(engine)
        assert _tables(engine) == set()
        schema.upgrade(engine)
        assert schema.current(engine) == schema.HEAD
        schema.downgrade(engine)
        with engine.connect() as connection:
            schema.upgrade(connection)
            connection.rollback()
        assert schema.current(engine) in (None, schema.HEAD)
        schema.upgrade(engine)
        engine.dispose()


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_sqlite_waits_for_a_writer_and_a_reader_whatever_the_drivers_timeout(
    tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "x.db"
    busy = sqlite3.connect(path, check_same_thread=False)
    busy.execute(f"PRAGMA journal_mode={mode}")
    busy.execute("CREATE TABLE host (x)")
    busy.execute("BEGIN IMMEDIATE")
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 0})
    with ThreadPoolExecutor(1) as pool:
        upgraded = pool.submit(schema.upgrade, engine)
        with pytest.raises(TimeoutError):
            upgraded.result(timeout=0.2)
        busy.execute("COMMIT")
        upgraded.result(timeout=30)
        busy.execute("BEGIN")
        busy.execute("SELECT * FROM host").fetchall()
        downgraded = pool.submit(schema.downgrade, engine)
        if mode == "delete":
            with pytest.raises(TimeoutError):
                downgraded.result(timeout=0.2)
        busy.execute("COMMIT")
        downgraded.result(timeout=30)
    busy.close()
    engine.dispose()


# --- a good guest ---------------------------------------------------------------------------------


def test_the_hosts_logging_is_left_alone(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    host = logging.getLogger("host.of.fencedjobs")
    before = (logging.root.level, [*logging.root.handlers], host.level, host.propagate)
    config = Config(str(ROOT / "alembic.ini"))
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        command.upgrade(config, "head")
        connection.commit()
    schema.upgrade(engine)
    assert not host.disabled
    assert (logging.root.level, [*logging.root.handlers], host.level, host.propagate) == before
    assert schema.current(engine) == schema.HEAD
    host.warning("still heard")
    assert "still heard" in caplog.text
