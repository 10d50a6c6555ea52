"""A database of its own for each process of the test run, migrated once and emptied before each test."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, MetaData, create_engine, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import NullPool

from fencedjobs import schema
from fencedjobs.models import Base
from tests.servers import MARIADB, POSTGRESQL

BACKENDS = ("sqlite", "postgresql", "mariadb")

#: drivers for asyncio: the backend, and the name in a URL
ASYNC_DRIVERS = {
    "aiosqlite": ("sqlite", "sqlite+aiosqlite"),
    "psycopg": ("postgresql", "postgresql+psycopg"),
    "asyncpg": ("postgresql", "postgresql+asyncpg"),
    "aiomysql": ("mariadb", "mysql+aiomysql"),
}
#: the one that a test uses which runs once on each database
ASYNC_DRIVER = {"sqlite": "aiosqlite", "postgresql": "asyncpg", "mariadb": "aiomysql"}
_VARIABLES = {"postgresql": POSTGRESQL, "mariadb": MARIADB}


class NoDatabase(Exception):
    """The backend is not there; the text is for the one who runs the tests."""


@dataclass(frozen=True)
class Database:
    """A database that a test may do anything with."""

    backend: str
    url: URL

    def engine(self, **options: object) -> Engine:
        return create_engine(self.url, **options)

    def async_url(self, driver: str) -> URL:
        name = ASYNC_DRIVERS[driver][1]
        return self.url.difference_update_query(["ssl_disabled"]).set(drivername=name)


@contextmanager
def empty_database(backend: str, directory: Path) -> Iterator[Database]:
    """One without any tables, dropped at the end."""
    name = f"{os.environ.get('FENCEDJOBS_TEST_PREFIX', 'fj_test_')}{secrets.token_hex(6)}"
    if backend == "sqlite":
        path = directory / f"{name}.db"
        yield Database(backend, make_url(f"sqlite:///{path}"))
        path.unlink(missing_ok=True)
        return
    server = make_url(_server(backend))
    _administer(server, f"CREATE DATABASE {name}")
    if backend == "postgresql":  # no test crashes the server, and waiting for its disk is noise
        _administer(server, f"ALTER DATABASE {name} SET synchronous_commit = off")
    try:
        yield Database(backend, server.set(database=name))
    finally:
        _administer(server, f"DROP DATABASE {name}" + (" WITH (FORCE)" if backend == "postgresql" else ""))


class Ready:
    """A database with our tables, made once; each test has it without rows and without other tables."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._engine = (
            database.engine(poolclass=NullPool) if database.backend == "sqlite" else database.engine()
        )
        schema.upgrade(self._engine)
        self._ours = {schema.VERSION_TABLE, *Base.metadata.tables}

    def for_test(self, directory: Path) -> Database:
        if self.database.backend == "sqlite":
            copied = directory / "fenced.db"
            shutil.copy(str(self.database.url.database), copied)
            return Database("sqlite", make_url(f"sqlite:///{copied}"))
        with self._engine.begin() as connection:
            self._patiently(connection)
            self._empty(connection)
        return self.database

    def close(self) -> None:
        self._engine.dispose()

    def _patiently(self, connection: Connection) -> None:
        """A test that left a transaction open is an error at the next one, not a test run that hangs."""
        limit = (
            "LOCAL lock_timeout = '10s'"
            if self.database.backend == "postgresql"
            else "lock_wait_timeout = 10"
        )
        connection.execute(text(f"SET {limit}"))

    def _empty(self, connection: Connection) -> None:
        found = {*inspect(connection).get_table_names()}
        whole = found >= self._ours and schema.current(connection) == schema.HEAD
        if leftovers := found - self._ours if whole else found:
            strange = MetaData()
            strange.reflect(connection, only=[*leftovers])
            strange.drop_all(connection)
        if not whole:
            schema.upgrade(connection)
        for table in Base.metadata.sorted_tables:
            connection.execute(table.delete())


def _server(backend: str) -> str:
    url = os.environ.get(_VARIABLES[backend])
    if not url:
        raise NoDatabase(
            f"there is no {backend} here: set {_VARIABLES[backend]} to the URL of a server, or install one"
        )
    return url


def _administer(server: URL, statement: str) -> None:
    engine = create_engine(server, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
