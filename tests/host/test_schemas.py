"""Our tables in another schema than the host's, and several schemas side by side: tenants.

A schema is a database on MariaDB, and an attached file on SQLite.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Engine, event, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fencedjobs import (
    AsyncStore,
    AsyncUnitOfWork,
    JobState,
    SchemaMismatch,
    Store,
    UnitOfWork,
    Worker,
    schema,
)
from fencedjobs.models import tables
from fencedjobs.relay import Relay
from tests.databases import BACKENDS, Database
from tests.forms import Blocking
from tests.host import test_session_forms as forms
from tests.host.day import EXPECTED, day, rest
from tests.hosts import Host, Order, hosted, on, told

ALL = on(*BACKENDS, drivers=(None, "aiosqlite", "asyncpg", "aiomysql"))
SYNC = on(*BACKENDS, drivers=(None,))


@dataclass
class Place:
    """A database with two schemas beside its default one, which has our tables too."""

    database: Database
    directory: Path

    @property
    def names(self) -> tuple[str, str]:
        prefix = f"{self.database.url.database}_" if self.database.backend == "mariadb" else "tenant_"
        return f"{prefix}one", f"{prefix}two"

    def attach(self, engine: Engine) -> None:
        """What an application on SQLite does with its files."""
        if self.database.backend != "sqlite":
            return

        @event.listens_for(engine, "connect")
        def attach(connection: Any, _: Any) -> None:
            cursor = connection.cursor()
            for name in self.names:
                cursor.execute(f"ATTACH DATABASE '{self.directory / name}.db' AS {name}")
            cursor.close()

    def engine(self) -> Engine:
        engine = self.database.engine()
        self.attach(engine)
        return engine


@pytest.fixture
def place(database: Database, tmp_path: Path) -> Iterator[Place]:
    place = Place(database, tmp_path)
    engine = place.engine()
    administer(place, engine, "CREATE {} {}")
    for name in place.names:
        schema.upgrade(engine, schema=name)
    yield place
    administer(place, engine, "DROP {} {}" + " CASCADE" * (database.backend == "postgresql"))
    engine.dispose()


def administer(place: Place, engine: Engine, statement: str) -> None:
    kind = {"postgresql": "SCHEMA", "mariadb": "DATABASE"}.get(place.database.backend)
    if kind is not None:
        with engine.begin() as connection:
            for name in place.names:
                connection.execute(text(statement.format(kind, name)))


@contextmanager
def tenants(place: Place, driver: str | None) -> Iterator[tuple[Host, dict[str, Store]]]:
    """One application, and a store of it in each schema."""
    with hosted(place.database, driver, adapt=place.attach) as host:
        yield host, {name: store_in(host, name) for name in place.names}


def store_in(host: Host, name: str) -> Store:
    if host.async_engine is None:
        return Store(host.engine, schema=name)
    assert host.runner is not None
    return cast("Store", Blocking(AsyncStore(host.async_engine, schema=name), host.runner))


def rows(engine: Engine, name: str | None) -> dict[str, int]:
    """How many rows each of our tables has in this schema."""
    with engine.connect() as connection:
        counts = {
            table.name: connection.scalar(select(func.count()).select_from(table)) or 0
            for table in tables(name).values()
        }
    return {table: count for table, count in counts.items() if count}


@ALL
def test_a_day_in_each_schema_is_seen_in_no_other(place: Place, driver: str | None) -> None:
    """The same ids everywhere, and the host's own rows in its own tables."""
    observer = place.engine()
    with tenants(place, driver) as (host, stores):
        default = host.store
        for name, store in stores.items():
            host.store = store
            assert store.schema == name
            assert day(host) == EXPECTED
            host.clear()
            before = {other: rows(observer, other) for other in (*stores, None) if other != name}
            forms.day(host, within(name))
            rest(host)
            host.clear()
            assert {other: rows(observer, other) for other in before} == before
        assert rows(observer, None) == {}
        assert all(rows(observer, name)["fenced_outbox"] == 1 for name in stores)
        assert default.get("b") is None
    observer.dispose()


def within(name: str) -> forms.Form:
    """The host's own session and tables, and ours in this schema."""

    @contextmanager
    def joined(host: Host) -> Iterator[forms.Opened]:
        with Session(host.engine) as session:
            yield session, UnitOfWork(session, schema=name)

    @contextmanager
    def awaited(host: Host) -> Iterator[forms.Opened]:
        assert host.runner is not None
        session = AsyncSession(host.async_engine)
        with Blocking(session, host.runner) as blocking:
            yield blocking, Blocking(AsyncUnitOfWork(session, schema=name), host.runner)

    def form(host: Host) -> AbstractContextManager[forms.Opened]:
        return (joined if host.async_engine is None else awaited)(host)

    return form


@SYNC
def test_two_tenants_in_one_transaction_of_the_host(place: Place, driver: None) -> None:
    with tenants(place, None) as (host, stores):
        for end in ("rollback", "commit"):
            with Session(host.engine) as session:
                session.add(Order(id=1, note="both"))
                for name in stores:
                    UnitOfWork(session, schema=name).jobs.enqueue("j", {"for": name})
                getattr(session, end)()
            found = [job.payload if (job := store.get("j")) else None for store in stores.values()]
            assert found == [{"for": name} if end == "commit" else None for name in stores]
        assert host.notes() == ["both"]


@SYNC
def test_a_lease_of_one_tenant_is_none_of_the_other(place: Place, driver: None) -> None:
    with tenants(place, None) as (_, stores):
        one, two = stores.values()
        for store in (one, two):
            store.enqueue("j")
        lease = one.claim("w", ttl=600)
        assert lease is not None
        assert told(two.complete, lease) is not None
        assert two.claim("w", ttl=600, id="j") is not None, "it is ready there, under its own fence"
        assert (one.locks.claim("l", "w", ttl=60), two.locks.claim("l", "w", ttl=60)).count(None) == 0
        one.complete(lease)
        states = [record.state for store in (one, two) if (record := store.get("j"))]
        assert states == [JobState.DONE, JobState.LEASED]


@SYNC
def test_a_worker_and_a_relay_of_each_tenant(place: Place, driver: None) -> None:
    """At the same time, in one process, on one engine; with housekeeping and business rows."""
    with tenants(place, None) as (host, stores):
        seen: list[tuple[str, str, str]] = []
        runs: list[Callable[[], object]] = []
        for number, (name, store) in enumerate(stores.items()):
            store.enqueue_many([{"id": f"j{n}", "payload": name, "kind": "k"} for n in range(5)])
            runs.append(lambda store=store, number=number: work(store, number, seen))  # type: ignore[misc]
        together(runs)
        for name, store in stores.items():
            assert store.counts() == {"default": {JobState.DONE: 5}}
            relay = Relay(store, lambda event, name=name: not seen.append((name, event.payload, event.id)))  # type: ignore[misc, func-returns-value]
            assert relay.run(until_empty=True) == 5
        assert len(host.notes()) == 10
        assert [(here, there) for here, there, _ in seen] == [
            (name, name) for name in stores for _ in range(5)
        ]


def work(store: Store, number: int, seen: list[Any]) -> None:
    worker = Worker(store, concurrency=2, poll=0.05)

    @worker.handler("k")
    def handle(ctx: Any) -> None:
        with ctx.transaction() as uow:
            row = number * 100 + int(ctx.id[1:])
            uow.session.add(Order(id=row, note=f"{ctx.payload} {ctx.id}"))
            uow.outbox.add(ctx.id, ctx.payload, topic="t")

    worker.run(until_empty=True)


def together(runs: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


@SYNC
def test_a_schema_without_the_tables_is_told_by_its_name(place: Place, driver: None) -> None:
    engine = place.engine()
    schema.downgrade(engine, schema=place.names[1])
    error = told(Store(engine, schema=place.names[1]).enqueue, "j")
    assert isinstance(error, SchemaMismatch), repr(error)
    assert place.names[1] in str(error)
    assert Store(engine, schema=place.names[0]).enqueue("j") == "j"
    engine.dispose()


@on("sqlite", drivers=(None,))
def test_a_file_that_is_not_attached_is_told(database: Database, engine: Engine, driver: None) -> None:
    error = told(Store(engine, schema="queue").enqueue, "j")
    assert isinstance(error, SchemaMismatch), repr(error)
    assert "queue" in str(error)
