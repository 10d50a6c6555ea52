"""An application as it is found: its engine, a store on it, and what must still be true of it afterwards."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar, cast

import pytest
from sqlalchemy import URL, Engine, NullPool, String, create_engine, delete, event, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.util import greenlet_spawn

from fencedjobs import AsyncStore, JobLease, JobState, Store
from tests.databases import Database
from tests.forms import FORMS, Blocking

T = TypeVar("T")
Handler = Callable[[Session], object]


_numbers = count(1)


class Base(DeclarativeBase):
    """The tables of the application."""


class Order(Base):
    """A business row; ``note`` is unique, for those who want to break something."""

    __tablename__ = "host_orders"
    __table_args__ = ({"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"},)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    note: Mapped[str] = mapped_column(String(50), unique=True)


@dataclass
class Host:
    """One application: a sync engine, or the sync side of an async one."""

    database: Database
    engine: Engine
    store: Store
    runner: asyncio.Runner | None
    observer: Engine
    async_engine: AsyncEngine | None = None

    def run(self, work: Callable[[], T]) -> T:
        """Do sync work on the engine: inside a greenlet where the driver is for asyncio."""
        if self.runner is None:
            return work()

        async def in_greenlet() -> T:
            return cast("T", await greenlet_spawn(work))

        return self.runner.run(in_greenlet())

    def sessions(self, **options: Any) -> sessionmaker[Session]:
        """Sessions of the application itself; to be used within `run`."""
        return sessionmaker(self.engine, **options)

    def leased(self) -> JobLease:
        """The lease of a new job."""
        id = f"job-{next(_numbers)}"
        self.store.enqueue(id)
        lease = self.store.claim("worker", ttl=600, id=id)
        assert lease is not None
        return lease

    def completing(self, lease: JobLease, handler: Handler, **options: Any) -> None:
        """Complete with what ``handler`` does to the session."""
        with self.store.completing(lease, **options) as uow:
            within(uow, handler)

    def begin(self, handler: Handler) -> None:
        with self.store.begin() as uow:
            within(uow, handler)

    def state(self, lease: JobLease) -> JobState:
        record = self.store.get(lease.id)
        assert record is not None
        return record.state

    def notes(self) -> list[str]:
        """The business rows that are committed."""
        with self.observer.connect() as connection:
            return sorted(connection.scalars(select(Order.__table__.c.note)))

    def verdict(self, handler: Handler, lease: JobLease | None = None) -> tuple[object, ...]:
        """What came of completing with this handler: the error, the job's state, and the business rows."""
        lease = lease or self.leased()
        error = told(self.completing, lease, handler)
        seen = (type(error).__name__ if error else "", str(self.state(lease)), *self.notes())
        self.clear()
        return seen

    def clear(self) -> None:
        with self.observer.begin() as connection:
            connection.execute(delete(Order))

    def left_behind(self) -> list[str]:
        """What somebody who leaves should have tidied up. Servers need a moment to see a client go."""
        end = time.monotonic() + 3
        while (found := self._found()) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def _found(self) -> list[str]:
        out = getattr(self.engine.pool, "checkedout", lambda: 0)()
        found = [f"{out} connections are checked out"] if out else []
        return found + open_transactions(self.observer)


def within(uow: Any, handler: Handler) -> Any:
    """Give the handler the unit of work's session, in its sync form."""
    run_sync = getattr(uow.session, "run_sync", None)
    return handler(uow.session) if run_sync is None else run_sync(handler)


def told(attempt: Callable[..., object], *args: Any, **kwargs: Any) -> BaseException | None:
    """The error of this call."""
    try:
        attempt(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the test says what it may be
        return error
    return None


def open_transactions(observer: Engine) -> list[str]:
    """The transactions that other connections to this database have open."""
    backend = observer.dialect.name
    with observer.connect() as connection:
        if backend == "sqlite":
            try:
                connection.exec_driver_sql("BEGIN EXCLUSIVE")
            except OperationalError as error:
                return [f"somebody has a lock: {error.orig}"]
            connection.exec_driver_sql("ROLLBACK")
            return []
        rows = connection.execute(text(_CONNECTIONS[backend])).all()
        if backend == "mysql":
            # The table of transactions is a cache that is not refreshed while somebody reads it often.
            status = connection.execute(text("SHOW ENGINE INNODB STATUS")).one()[2]
            present = status.partition("LIST OF TRANSACTIONS FOR EACH SESSION")[2].split("---TRANSACTION")
            found = (re.search(r", ACTIVE .*?thread id (\d+)", one, re.DOTALL) for one in present)
            active = {int(one[1]) for one in found if one}
            rows = [row for row in rows if row[0] in active]
        return [f"a connection is in a transaction: {tuple(row)}" for row in rows]


_CONNECTIONS = {
    "postgresql": "SELECT pid, state, query FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'",
    "mysql": "SELECT id, command, info FROM information_schema.processlist "
    "WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}
#: drivers that people have, beside those that every test runs with
MORE_DRIVERS = {
    "psycopg2": ("postgresql", "postgresql+psycopg2", False),
    "MySQLdb": ("mariadb", "mysql+mysqldb", False),
    "asyncmy": ("mariadb", "mysql+asyncmy", True),
}


def _url(database: Database, driver: str | None) -> tuple[URL, bool]:
    """The URL by this driver, and whether the driver is for asyncio."""
    if driver in MORE_DRIVERS:
        pytest.importorskip(driver)
        _, name, asynchronous = MORE_DRIVERS[driver]
        return database.url.set(drivername=name), asynchronous
    return (database.url, False) if driver is None else (database.async_url(driver), True)


_OBSERVING: dict[str, dict[str, Any]] = {
    "sqlite": {"poolclass": NullPool, "connect_args": {"timeout": 0}},
    "postgresql": {"isolation_level": "AUTOCOMMIT"},
    "mariadb": {"isolation_level": "AUTOCOMMIT", "connect_args": {"ssl_disabled": True}},  # TLS takes 0.1 s
}


@contextmanager
def hosted(
    database: Database,
    driver: str | None = None,
    *,
    sessions: dict[str, Any] | None = None,
    adapt: Callable[[Engine], object] = lambda engine: None,
    wrap: Callable[[Any], Any] = lambda engine: engine,
    port: int | None = None,
    **options: Any,
) -> Iterator[Host]:
    """An application on this database, by this driver; nothing may be left behind at its end.

    ``options`` are those of its engine, ``sessions`` those of its sessionmaker if it has one of its own;
    ``adapt`` does to the engine what the application does at start, and ``wrap`` what it makes of it then.
    ``port`` is that of a proxy.
    """
    with ExitStack() as stack:
        url, asynchronous = _url(database, driver)
        url = url if port is None else url.set(port=port)
        observer = create_engine(database.url, **_OBSERVING[database.backend])
        stack.callback(observer.dispose)
        Base.metadata.create_all(observer)
        if not asynchronous:
            runner, aio = None, None
            engine = create_engine(url, **options)
            stack.callback(engine.dispose)
            adapt(engine)
            engine = wrap(engine)
            store = Store(engine if sessions is None else sessionmaker(engine, **sessions))
        else:
            runner = stack.enter_context(asyncio.Runner())
            aio = create_async_engine(url, **options)
            stack.callback(lambda made: runner.run(made.dispose()), aio)
            adapt(aio.sync_engine)
            aio = wrap(aio)
            engine = aio.sync_engine
            made = AsyncStore(aio if sessions is None else async_sessionmaker(aio, **sessions))
            store = cast("Store", Blocking(made, runner))
        host = Host(database, engine, store, runner, observer, aio)
        yield host
        found = host.left_behind()
        assert not found, found


def on(*backends: str, drivers: tuple[str | None, ...] | None = None) -> pytest.MarkDecorator:
    """Run a test with ``host`` on these databases only, by these drivers for asyncio (``None``: sync)."""
    more = [(backend, driver) for driver, (backend, *_) in MORE_DRIVERS.items()]
    known = FORMS if drivers is None else [*FORMS, *more]
    forms = [form for form in known if form[0] in backends and (drivers is None or form[1] in drivers)]
    ids = [driver or backend for backend, driver in forms]
    return pytest.mark.parametrize(("database", "driver"), forms, indirect=True, ids=ids)


def on_connect(engine: Engine, *statements: str) -> None:
    """What many applications do: statements for each new connection."""

    @event.listens_for(engine, "connect")
    def run(dbapi_connection: Any, _: Any) -> None:
        cursor = dbapi_connection.cursor()
        for statement in statements:
            cursor.execute(statement)
        cursor.close()
