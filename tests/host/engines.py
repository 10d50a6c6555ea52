"""Engines as people make them, and how a connection of theirs is found in the pool."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy
from sqlalchemy import Engine, NullPool, SingletonThreadPool, StaticPool, event

from tests.hosts import Host, on_connect


@dataclass
class Made:
    """One way to make an engine; ``refused`` is a part of what the store says to it at its first use."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    adapt: Callable[[Engine], object] = lambda engine: None
    wrap: Callable[[Any], Any] = lambda engine: engine
    refused: str = ""


def level(value: str) -> Callable[[Any], Any]:
    return lambda engine: engine.execution_options(isolation_level=value)


def at_connect(*statements: str) -> Callable[[Engine], object]:
    return lambda engine: on_connect(engine, *statements)


def session_level(value: str) -> Callable[[Engine], object]:
    return at_connect(f"SET SESSION TRANSACTION ISOLATION LEVEL {value}")


def _autocommit_at_connect(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def run(dbapi_connection: Any, _: Any) -> None:
        if callable(dbapi_connection.autocommit):
            dbapi_connection.autocommit(True)
        else:
            dbapi_connection.autocommit = True


def _begins(statement: str) -> Callable[[Engine], object]:
    """The recipe of SQLAlchemy's documentation for savepoints with SQLite's driver."""

    def adapt(engine: Engine) -> None:
        @event.listens_for(engine, "connect")
        def no_mode(dbapi_connection: Any, _: Any) -> None:
            dbapi_connection.isolation_level = None

        @event.listens_for(engine, "begin")
        def begin(connection: Any) -> None:
            connection.exec_driver_sql(statement)

    return adapt


SQLALCHEMY = tuple(int(part) for part in sqlalchemy.__version__.split(".")[:3])
#: before it, nobody could listen to one connection of an engine with options
OPTIONS = "" if SQLALCHEMY >= (2, 0, 38) else "cannot watch one connection"

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT"]
BEHIND = "behind SQLAlchemy's back"

SERVERS = [
    Made("plain"),
    *(Made(f"create_engine {name}", {"isolation_level": name}) for name in LEVELS),
    *(Made(f"execution_options {name}", wrap=level(name), refused=OPTIONS) for name in LEVELS),
    Made("a connection for each use", {"poolclass": NullPool}),
    Made("a pool of one", {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1}),
    Made("a pool that does not reset", {"pool_reset_on_return": None}),
    Made("a pool that commits", {"pool_reset_on_return": "commit"}),
    Made("a pool that asks first", {"pool_pre_ping": True}),
    Made("one connection for all", {"poolclass": StaticPool}, refused="shares one connection"),
]
POSTGRESQL = [
    *SERVERS,
    Made(
        "at connect, READ COMMITTED",
        adapt=at_connect("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED"),
    ),
    Made(
        "at connect, SERIALIZABLE",
        adapt=at_connect("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE", "COMMIT"),
        refused=BEHIND,
    ),
    Made("at connect, autocommit", adapt=_autocommit_at_connect, refused=BEHIND),
]
MARIADB = [
    *SERVERS,
    Made("create_engine READ UNCOMMITTED", {"isolation_level": "READ UNCOMMITTED"}),
    Made(
        "at connect, READ COMMITTED",
        adapt=at_connect("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"),
    ),
    Made(
        "at connect, SERIALIZABLE", adapt=at_connect("SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    ),
    Made("at connect, autocommit", adapt=_autocommit_at_connect),
    Made("autocommit said by SQL", adapt=at_connect("SET autocommit = 1")),
]
SQLITE = [
    Made("plain"),
    Made("create_engine READ UNCOMMITTED", {"isolation_level": "READ UNCOMMITTED"}),
    Made("create_engine SERIALIZABLE", {"isolation_level": "SERIALIZABLE"}),
    Made("create_engine AUTOCOMMIT", {"isolation_level": "AUTOCOMMIT"}),
    Made("execution_options READ UNCOMMITTED", wrap=level("READ UNCOMMITTED"), refused=OPTIONS),
    Made("execution_options AUTOCOMMIT", wrap=level("AUTOCOMMIT"), refused=OPTIONS),
    Made("a connection for each use", {"poolclass": NullPool}),
    Made("a pool of one", {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1}),
    Made("a pool that does not reset", {"pool_reset_on_return": None}),
    Made("BEGIN by an event", adapt=_begins("BEGIN")),
    Made("BEGIN IMMEDIATE by an event", adapt=_begins("BEGIN IMMEDIATE")),
    Made("the driver begins IMMEDIATE", {"connect_args": {"isolation_level": "IMMEDIATE"}}),
    Made("the driver begins EXCLUSIVE", {"connect_args": {"isolation_level": "EXCLUSIVE"}}),
    Made("the driver does not begin", {"connect_args": {"isolation_level": None}}),
    Made("no time-out", {"connect_args": {"timeout": 0}}),
    Made("write-ahead log", adapt=at_connect("PRAGMA journal_mode = WAL", "PRAGMA foreign_keys = ON")),
    Made("one connection for all", {"poolclass": StaticPool}),
]  # fmt: skip
SYNC_SQLITE = [Made("one connection for a thread", {"poolclass": SingletonThreadPool})]
if sys.version_info >= (3, 12):
    SQLITE += [
        Made("the driver keeps a transaction open", {"connect_args": {"autocommit": False}}),
        Made(
            "the driver ignores commit()", {"connect_args": {"autocommit": True}}, refused="autocommit=True"
        ),
        Made(
            "the driver keeps one open on the one connection",
            {"connect_args": {"autocommit": False}, "poolclass": StaticPool},
            refused="shares one connection",
        ),
    ]

MADE = {"postgresql": POSTGRESQL, "mariadb": MARIADB, "sqlite": SQLITE}

_MODE = ("isolation_level", "autocommit", "in_transaction")
_LEVEL = {
    "postgresql": "SELECT current_setting('transaction_isolation')",
    "mysql": "SELECT concat(@@session.tx_isolation, ' ', @@session.autocommit)",
    "sqlite": "PRAGMA read_uncommitted",
}


def habits(host: Host) -> list[Any]:
    """How a connection from the pool stands: its level and mode, as the server and the driver have them."""

    def ask() -> list[Any]:
        connection = host.engine.raw_connection()
        cursor = connection.cursor()
        cursor.execute(_LEVEL[host.engine.dialect.name])
        found: list[Any] = list(cursor.fetchone() or ())
        cursor.close()
        connection.rollback()
        for one in (connection.dbapi_connection, connection.driver_connection):
            raw = getattr(one, "_conn", one)
            # What would be the level is of no account where each statement is committed at once.
            alone = getattr(raw, "autocommit", None) is True
            for name in ("autocommit", "in_transaction") if alone else _MODE:
                value = getattr(raw, name, None)
                found.append((name, None if callable(value) else str(value)))
        connection.close()
        return found

    return host.run(ask)
