"""Statements that go straight to the driver: only where nobody would miss them, and with the same answers."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, Integer, String, create_engine, event, literal, select, text, update
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencedjobs import LeaseMixin, Store, dialects, direct
from fencedjobs.direct import Direct
from fencedjobs.models import Job
from tests.databases import Database
from tests.forms import opened


@pytest.fixture
def went(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that went straight."""
    texts: list[str] = []
    run = Direct._run

    def noted(self: Direct, text: str, *rest: Any) -> Any:
        texts.append(text)
        return run(self, text, *rest)

    monkeypatch.setattr(Direct, "_run", noted)
    return texts


@contextmanager
def listening(target: Any, name: str, listener: Callable[..., None]) -> Iterator[None]:
    event.listen(target, name, listener)
    try:
        yield
    finally:
        event.remove(target, name, listener)


def test_where_nobody_listens_they_go_straight(engine: Engine, went: list[str]) -> None:
    store = Store(engine)
    store.enqueue()
    assert any(one.startswith("INSERT") for one in went)


@pytest.mark.parametrize("name", ["before_cursor_execute", "after_cursor_execute"])
def test_who_listens_sees_every_statement(engine: Engine, went: list[str], name: str) -> None:
    store, seen = Store(engine), list[str]()
    store.enqueue()
    went.clear()
    with listening(engine, name, lambda connection, *told: seen.append(str(told))):
        store.enqueue()
    assert went == []
    assert any("INSERT INTO fenced_jobs" in one for one in seen)


@pytest.mark.parametrize(
    "name", ["begin", "commit", "rollback", "engine_connect", "before_execute", "after_execute"]
)
def test_who_listens_to_anything_has_it_as_ever(engine: Engine, went: list[str], name: str) -> None:
    store = Store(engine)
    store.enqueue()
    went.clear()
    with listening(engine, name, lambda *told: None):
        store.enqueue()
    assert went == []
    store.enqueue()
    assert went


def test_a_listener_to_all_engines_counts_too(engine: Engine, went: list[str]) -> None:
    store, seen = Store(engine), list[str]()
    store.enqueue()
    went.clear()

    def executed(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    with listening(Engine, "before_cursor_execute", executed):
        store.enqueue()
    assert went == []
    assert seen


@pytest.mark.parametrize("name", ["handle_error", "do_execute"])
def test_listeners_to_the_dialect_count(database: Database, went: list[str], name: str) -> None:
    engine = create_engine(database.url)
    event.listen(engine, name, lambda *told: None)
    Store(engine).enqueue()
    engine.dispose()
    assert went == []


def test_echo_shows_every_statement(
    database: Database, went: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine(database.url, echo=True)
    with caplog.at_level(logging.INFO, "sqlalchemy.engine"):
        Store(engine).enqueue()
    engine.dispose()
    assert went == []
    assert "INSERT INTO fenced_jobs" in caplog.text


def test_logging_that_is_switched_on_later_shows_them(
    engine: Engine, went: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(engine)
    store.enqueue()
    went.clear()
    with caplog.at_level(logging.INFO, "sqlalchemy.engine"):
        store.enqueue()
    assert went == []
    assert "INSERT INTO fenced_jobs" in caplog.text


def test_an_engine_with_options_goes_sqlalchemys_way(engine: Engine, went: list[str]) -> None:
    Store(engine.execution_options(schema_translate_map={"theirs": None})).enqueue()
    assert went == []


def failing(engine: Engine, listened: bool) -> DBAPIError:
    """What an enqueue into a table that is gone raises."""
    store = Store(engine, clock=lambda: 1000.0)
    store.enqueue()

    def listened_to() -> None:
        with listening(engine, "before_execute", lambda *told: None):
            store.enqueue("a", {"x": 1})

    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE fenced_jobs RENAME TO gone_jobs"))
    try:
        with pytest.raises(DBAPIError) as raised:
            listened_to() if listened else store.enqueue("a", {"x": 1})
    finally:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE gone_jobs RENAME TO fenced_jobs"))
    store.enqueue()  # the connection is none the worse for it
    return raised.value


def test_errors_are_those_of_sqlalchemy(engine: Engine, went: list[str]) -> None:
    straight = failing(engine, listened=False)
    assert any("fenced_jobs" in one for one in went)
    other = failing(engine, listened=True)
    assert type(straight) is type(other)
    assert str(straight.orig) == str(other.orig)
    assert straight.statement == other.statement
    assert straight.params == other.params
    assert not straight.connection_invalidated
    assert not straight.hide_parameters


def test_parameters_are_hidden_where_the_engine_hides_them(database: Database) -> None:
    engine = create_engine(database.url, hide_parameters=True)
    error = failing(engine, listened=False)
    engine.dispose()
    assert "SQL parameters hidden" in str(error)


def test_an_interruption_in_the_middle_costs_the_connection(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lost = Store(engine), list[Any]()
    store.enqueue("a")

    def interrupted(cursor: Any, *_: Any) -> None:
        raise KeyboardInterrupt

    event.listen(engine.pool, "invalidate", lambda *told: lost.append(told))
    with monkeypatch.context() as patch:
        patch.setattr(engine.dialect, "do_execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.enqueue("b")
    assert len(lost) == 1
    assert store.enqueue("c") == "c"


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_connections_that_the_server_has_closed_are_replaced(database: Database, went: list[str]) -> None:
    engine, beside = create_engine(database.url), create_engine(database.url)
    store = Store(engine)
    store.enqueue()
    who, kill = {
        "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend({})"),
        "mysql": ("SELECT connection_id()", "KILL {}"),
    }[engine.dialect.name]
    held = [engine.connect() for _ in range(4)]
    numbers = [connection.scalar(text(who)) for connection in held]
    for connection in held:
        connection.close()
    with beside.connect() as connection:
        for number in numbers:
            connection.execute(text(kill.format(number)))
    store.transactions.trusted = 0.0  # a minute later
    went.clear()
    failed = list[Any]()
    event.listen(engine.pool, "invalidate", lambda *told: failed.append(told))
    assert store.enqueue("a") == "a"
    assert 1 <= len(failed) <= 2  # the second one has the whole pool renewed
    engine.dispose()
    beside.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_type_that_changes_under_a_prepared_statement_costs_one_error_at_most(
    database: Database, driver: str
) -> None:
    with opened(database, None if driver == "psycopg" else driver) as store:
        store.enqueue("a", kind="k")
        for _ in range(12):
            assert store.get("a") is not None
        beside = create_engine(database.url)
        try:
            with beside.begin() as connection:
                connection.execute(text("ALTER TABLE fenced_jobs ALTER COLUMN kind TYPE text"))
            failures = 0
            for _ in range(6):
                try:
                    assert store.get("a") is not None
                except DBAPIError:
                    failures += 1
            assert failures <= 1
        finally:
            with beside.begin() as connection:
                connection.execute(
                    text('ALTER TABLE fenced_jobs ALTER COLUMN kind TYPE varchar(255) COLLATE "C"')
                )
            beside.dispose()


class _Base(DeclarativeBase):
    pass


class Plot(LeaseMixin, _Base):
    """A host's table that counts its updates by a default of Python's."""

    __tablename__ = "plots_with_a_default"

    id: Mapped[str] = mapped_column(String(50), primary_key=True)
    touched: Mapped[int] = mapped_column(Integer, default=0, onupdate=lambda: 7)


class Shelf(LeaseMixin, _Base):
    """A host's table whose key refuses what is no UUID."""

    __tablename__ = "shelves"

    id: Mapped[UUID] = mapped_column(primary_key=True)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)  # MariaDB's own type takes it
def test_a_key_that_its_type_refuses_is_the_statement_s_error_either_way(engine: Engine) -> None:
    _Base.metadata.create_all(engine)
    leases = Store(engine).leases(Shelf)
    try:
        with pytest.raises(StatementError) as straight:
            leases.get("no UUID")
        with (
            listening(engine, "before_execute", lambda *told: None),
            pytest.raises(StatementError) as other,
        ):
            leases.get("no UUID")
    finally:
        _Base.metadata.drop_all(engine)
    assert type(straight.value.orig) is type(other.value.orig)


def test_defaults_that_python_makes_are_made(engine: Engine) -> None:
    _Base.metadata.create_all(engine)
    try:
        with engine.begin() as connection:
            connection.execute(Plot.__table__.insert(), {"id": "a"})
        assert Store(engine).leases(Plot).claim("a", "me", ttl=60) is not None
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT touched FROM plots_with_a_default")) == 7
    finally:
        _Base.metadata.drop_all(engine)


def test_a_duplicate_is_told_from_other_errors(engine: Engine) -> None:
    once = "INSERT INTO fenced_locks (name) VALUES ('twice')"
    with Direct(engine) as connection:
        connection.begin()
        connection.exec_driver_sql(once)
        with pytest.raises(IntegrityError):
            connection.exec_driver_sql(once)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM fenced_locks WHERE name = 'twice'")) == 0


def test_what_is_made_of_a_statement_afterwards_has_columns_of_its_own(engine: Engine) -> None:
    jobs = Job.__table__
    plain = update(jobs).where(jobs.c.id == "none").values(fence=1)
    with Direct(engine) as connection:
        connection.begin()
        connection.execute(plain, None)
        connection.rollback()
    assert [*plain.returning(jobs.c.id).exported_columns] == [jobs.c.id]


@pytest.mark.parametrize("database", ["sqlite", "mariadb"], indirect=True)  # psycopg's dialect is kept anyhow
def test_what_is_remembered_goes_with_its_engine(database: Database) -> None:
    engine = create_engine(database.url)
    Store(engine).enqueue()
    remembered: weakref.ref[Dialect] = weakref.ref(engine.dialect)
    assert vars(engine.dialect)["fencedjobs_prepared"]
    engine.dispose()
    del engine
    gc.collect()
    assert remembered() is None


def test_of_statements_made_for_one_call_a_thousand_are_remembered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_MOST", 20)
    store = Store(engine)
    for n in range(60):
        assert store.run(lambda tx, n=n: tx.execute(select(literal(n))).scalar(), reading=True) == n
    assert len(vars(engine.dialect)["fencedjobs_prepared"]) <= 20


def test_drivers_that_were_not_tried_go_sqlalchemys_way(
    engine: Engine, went: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dialects.may_be_direct(engine)
    monkeypatch.setattr(type(engine.dialect), "driver", "another")
    assert not dialects.may_be_direct(engine)
