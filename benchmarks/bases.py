"""The databases that are measured on, each run in one of its own, made before and dropped afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import URL, Engine, create_engine, event, make_url

#: one database of each family, as a local installation has it
URLS: Final = {
    "postgresql": "postgresql+psycopg://postgres@127.0.0.1/postgres",
    "mariadb": "mysql+pymysql://root@127.0.0.1/mysql?ssl_disabled=true",
    "sqlite": "sqlite://",
}
SETTINGS: Final = {
    "postgresql": "SELECT current_setting('fsync') || ', synchronous_commit ' || "
    "current_setting('synchronous_commit')",
    "mysql": "SELECT concat(@@innodb_flush_log_at_trx_commit, ', sync_binlog ', @@sync_binlog, ', log_bin ', "
    "@@log_bin)",
}
_SAID: Final = {"postgresql": "fsync {}", "mysql": "innodb_flush_log_at_trx_commit {}"}


@contextmanager
def scratch(url: str, name: str) -> Iterator[URL]:
    """The URL of an empty database beside the one that is named; for SQLite of a new file."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield make_url(f"sqlite:///{Path(folder) / name}.db")
        return
    administer(url, f"DROP DATABASE IF EXISTS {name}", f"CREATE DATABASE {name}")
    try:
        yield parsed.set(database=name)
    finally:
        administer(url, f"DROP DATABASE {name}")


def administer(url: str, *statements: str) -> None:
    """Execute statements that cannot be in a transaction."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def engine_of(url: URL, **options: int) -> Engine:
    """An engine as an application has it. SQLite: WAL and synchronous=NORMAL, as the raw limit has them."""
    engine = create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda driver, _: prepare_sqlite(driver))
    return engine


def prepare_sqlite(driver: object) -> None:
    """The settings that both the limit and we run with."""
    execute = driver.execute  # type: ignore[attr-defined]
    execute("PRAGMA journal_mode = WAL")
    execute("PRAGMA synchronous = NORMAL")


def described(url: URL) -> str:
    """Server, driver and how durable a commit is."""
    engine = engine_of(url)
    with engine.connect() as connection:
        family = engine.dialect.name
        version = ".".join(map(str, connection.dialect.server_version_info or ()))
        durable = "journal WAL, synchronous NORMAL"
        if family in SETTINGS:
            durable = _SAID[family].format(connection.exec_driver_sql(SETTINGS[family]).scalar())
    engine.dispose()
    return f"{family} {version} by {engine.dialect.driver}; {durable}"
