"""The only file that asks which database this is.

Everything else asks for a capability: the statement clock, how a transaction begins
and ends, what an error means for the transaction it broke.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Connection,
    Dialect,
    Engine,
    String,
    Table,
    event,
    func,
    select,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool, Pool, PoolProxiedConnection
from sqlalchemy.sql.expression import ColumnElement, FunctionElement
from sqlalchemy.util import await_only

from fencedjobs import direct
from fencedjobs.direct import Direct
from fencedjobs.errors import UnsupportedDatabase
from fencedjobs.rows import Arrays, JsonEach, JsonTable, ManyRows
from fencedjobs.types import Instant

# --- the clock ------------------------------------------------------------------------------------


class statement_now(FunctionElement[float]):
    """The database's clock when this statement began: Unix seconds, UTC, in microseconds.

    Not the start of the transaction, which may be old; and not a volatile function, which no index
    can be searched with.
    """

    type = Instant()
    inherit_cache = True
    name = "statement_now"


@compiles(statement_now, "postgresql")
def _postgresql_now(element: statement_now, compiler: Any, **_: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS DOUBLE PRECISION)"


@compiles(statement_now, "mysql", "mariadb")
def _mysql_now(element: statement_now, compiler: Any, **_: Any) -> str:
    # UNIX_TIMESTAMP(NOW(6)) would depend on the session's time zone; / 1000000 would cut to 0.1 ms.
    return "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6)"


class next_number(FunctionElement[int]):
    """The next number of the sequence that a table's ``seq`` has as its default."""

    type = BigInteger()
    inherit_cache = False
    name = "next_number"

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table


@compiles(next_number, "postgresql")
def _postgresql_next_number(element: next_number, compiler: Any, **_: Any) -> str:
    table = compiler.render_literal_value(compiler.preparer.format_table(element.table), String())
    return f"nextval((SELECT pg_get_serial_sequence({table}, 'seq')::regclass))"  # looked up once


# --- capabilities ---------------------------------------------------------------------------------


Changes = Callable[[Any], dict[str, Any]]
Notify = Callable[[ColumnElement[str]], ColumnElement[Any]]


@dataclass(frozen=True)
class Capabilities:
    """What a database can do, as far as the verbs care."""

    update_returning: bool  #: UPDATE … FROM … RETURNING
    row_locks: bool  #: SELECT … FOR UPDATE SKIP LOCKED
    insert_absent: Callable[[Table, ColumnElement[Any]], Any] | None
    """Makes an INSERT … ON CONFLICT (key) DO NOTHING, whose RETURNING tells what was new."""
    upsert: Callable[[Table, Sequence[Column[Any]], Changes], Any]
    """Makes an INSERT that, where the key is there, changes that row as told of the proposed one."""
    next_number: Callable[[Table], ColumnElement[Any]] | None
    """Makes the next number of a table's own, where it can be had before the row is inserted."""
    partial_indexes: bool  #: CREATE INDEX … WHERE
    arrays: bool  #: array parameters
    rows: ManyRows  #: many rows as parameters of one statement
    sql_clock: bool  #: a statement clock in SQL; else the process has it
    stale_reads: bool  #: a plain read may show an old snapshot after a failed conditional UPDATE
    read_committed: bool  #: has isolation levels to choose READ COMMITTED from
    next_level: bool  #: SET TRANSACTION, sent before it, is for the next transaction alone
    autocommit: bool  #: the driver leaves and enters AUTOCOMMIT mode without asking the server
    notify: Notify | None
    """Makes an expression that tells at COMMIT who listens that this queue has work; see `listening`."""


def _postgresql_insert(table: Table, key: ColumnElement[Any]) -> Any:
    return postgresql.insert(table).on_conflict_do_nothing(index_elements=[key])


def _sqlite_insert(table: Table, key: ColumnElement[Any]) -> Any:
    return sqlite.insert(table).on_conflict_do_nothing(index_elements=[key])


def _postgresql_notify(queue: ColumnElement[str]) -> ColumnElement[Any]:
    return func.pg_notify(_CHANNEL, queue)


def _postgresql_upsert(table: Table, key: Sequence[Column[Any]], changes: Changes) -> Any:
    inserting = postgresql.insert(table)
    return inserting.on_conflict_do_update(index_elements=key, set_=changes(inserting.excluded))


def _sqlite_upsert(table: Table, key: Sequence[Column[Any]], changes: Changes) -> Any:
    inserting = sqlite.insert(table)
    return inserting.on_conflict_do_update(index_elements=key, set_=changes(inserting.excluded))


def _mysql_upsert(table: Table, key: Sequence[Column[Any]], changes: Changes) -> Any:
    inserting = mysql.insert(table)
    return inserting.on_duplicate_key_update(**changes(inserting.inserted))


_CHANNEL: Final = "fencedjobs"
_KNOWN: Final = {
    "postgresql": Capabilities(
        update_returning=True,
        row_locks=True,
        insert_absent=_postgresql_insert,
        upsert=_postgresql_upsert,
        next_number=next_number,
        partial_indexes=True,
        arrays=True,
        rows=Arrays(),
        sql_clock=True,
        stale_reads=False,
        read_committed=True,
        next_level=False,
        autocommit=True,
        notify=_postgresql_notify,
    ),
    "mysql": Capabilities(
        update_returning=False,
        row_locks=True,
        insert_absent=None,
        upsert=_mysql_upsert,
        next_number=None,
        partial_indexes=False,
        arrays=False,
        rows=JsonTable(),
        sql_clock=True,
        stale_reads=True,
        read_committed=True,
        next_level=True,
        autocommit=False,
        notify=None,
    ),
    "sqlite": Capabilities(
        update_returning=True,
        row_locks=False,
        insert_absent=_sqlite_insert,
        upsert=_sqlite_upsert,
        next_number=None,
        partial_indexes=True,
        arrays=False,
        rows=JsonEach(),
        sql_clock=False,
        stale_reads=False,
        read_committed=False,
        next_level=False,
        autocommit=False,
        notify=None,
    ),
}
_FAMILY: Final = {"mariadb": "mysql"}
_LEAST: Final[dict[str, tuple[str, tuple[int, ...], str]]] = {
    "postgresql": ("PostgreSQL", (12,), "SKIP LOCKED in the plans that the claims rely on"),
    "mariadb": ("MariaDB", (10, 6), "SELECT … FOR UPDATE SKIP LOCKED"),
    "mysql": ("MySQL", (8, 0, 17), "SKIP LOCKED and the collation utf8mb4_0900_bin"),
    "sqlite": ("SQLite", (3, 35), "UPDATE … RETURNING"),
}


#: the driver for asyncio that goes with one that is not; psycopg is both
_ASYNC_DRIVERS: Final = {"psycopg2": "asyncpg", "pysqlite": "aiosqlite"}
_MYSQL_ASYNC: Final = "aiomysql"


def async_url(url: URL) -> URL:
    """The same database by a driver for asyncio."""
    dialect = url.get_dialect()
    if dialect.is_async or dialect.driver == "psycopg":
        return url
    driver = _ASYNC_DRIVERS.get(dialect.driver, _MYSQL_ASYNC)
    return url.set(drivername=f"{url.get_backend_name()}+{driver}")


_PORTS: Final = {"postgresql": 5432, "mysql": 3306}


def address(url: URL) -> tuple[str, int] | None:
    """Host and port of the server that the URL names; ``None`` for a file, or a socket of another kind."""
    family = _FAMILY.get(url.get_backend_name(), url.get_backend_name())
    if family not in _PORTS or not url.host or url.host.startswith("/"):
        return None
    return url.host, url.port or _PORTS[family]


_MOVE: Final = {"postgresql": "SET search_path TO {}", "mysql": "USE {}"}


def move_into(engine: Engine, schema: str) -> None:
    """Have the connections that this engine opens find their tables in ``schema``, and only there."""
    statement = _MOVE[_family(engine.dialect)].format(engine.dialect.identifier_preparer.quote(schema))
    _at_connect(engine, statement)


def _at_connect(engine: Engine, statement: str) -> None:
    def execute(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(statement)
        cursor.close()
        connection.commit()  # a rollback would undo it

    event.listen(engine, "connect", execute, insert=True)  # before the dialect asks where it is


_HURRY: Final = {"sqlite": "PRAGMA synchronous = OFF", "postgresql": "SET synchronous_commit = off"}


def hurry(engine: Engine) -> None:
    """Have COMMIT on the connections that this engine opens not wait for the disk, where they can say so.

    For data that nobody will miss after a power cut. Nothing else about a transaction changes.
    """
    statement = _HURRY.get(_family(engine.dialect))
    if statement is not None:
        _at_connect(engine, statement)


def _family(dialect: Dialect) -> str:
    return _FAMILY.get(dialect.name, dialect.name)


def capabilities(dialect: Dialect) -> Capabilities:
    """What this dialect's database can do; `UnsupportedDatabase` for one that we do not know."""
    try:
        return _KNOWN[_family(dialect)]
    except KeyError:
        raise UnsupportedDatabase(
            f"fencedjobs works on PostgreSQL, MariaDB, MySQL and SQLite, not on {_family(dialect)!r}"
        ) from None


def require_version(connection: Connection) -> None:
    """Refuse a server that lacks what the claims need, before it turns up as an empty queue."""
    capabilities(connection.dialect)
    (product, least, reason), have = _needs(connection.dialect)
    if have < least:
        raise UnsupportedDatabase(
            f"{product} {_dotted(have)} is too old: {_dotted(least)} is needed for {reason}"
        )


def server(dialect: Dialect) -> str:
    """Which database this is that it has connected to, in words: its name and version."""
    (product, _, _), have = _needs(dialect)
    return f"{product} {_dotted(have)}"


def _needs(dialect: Dialect) -> tuple[tuple[str, tuple[int, ...], str], tuple[int, ...]]:
    name = "mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name
    return _LEAST[name], tuple(part for part in dialect.server_version_info or () if isinstance(part, int))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "of unknown version"


def clock(bound: ColumnElement[float], *, given: bool) -> ColumnElement[float]:
    """``now`` in a statement: the caller's, as a parameter, or the database's own."""
    return bound if given else statement_now()


def process_clock() -> float:
    """The clock where SQL has none of microseconds (SQLite's has milliseconds)."""
    return time.time()


# --- transactions ---------------------------------------------------------------------------------


Channel = Connection | Direct
_READ_COMMITTED: Final = "READ COMMITTED"
_habits: Final[WeakKeyDictionary[Pool, bool]] = WeakKeyDictionary()


def isolation(engine: Engine) -> dict[str, Any]:
    """Execution options for transactions of our own on this engine: READ COMMITTED, whatever its default.

    Under a snapshot a renewal between the handler's first read and its completion would make every
    long job fail. None are needed where the engine's connections are that way already, or where the
    level is set for each transaction; see `begun`.
    """
    capable = capabilities(engine.dialect)
    if capable.next_level or not capable.read_committed:
        return {}
    if engine.pool not in _habits:
        _habits[engine.pool] = _is_read_committed(engine)
    asked = engine.get_execution_options().get("isolation_level", _READ_COMMITTED)
    as_it_is = _habits[engine.pool] and asked == _READ_COMMITTED
    return {} if as_it_is else {"isolation_level": _READ_COMMITTED}


def _is_read_committed(engine: Engine) -> bool:
    """Whether its connections are READ COMMITTED and no AUTOCOMMIT; if not, whether they stay as they are.

    SQLAlchemy resets a connection that comes back to what it believes to be its level. What a
    connect event has set is lost then, without the host's noticing.
    """
    connection, dialect = engine.raw_connection(), engine.dialect
    try:
        before = _stands(connection, dialect)
        if before == (_READ_COMMITTED, False):
            return True
        dialect.set_isolation_level(connection.dbapi_connection, _READ_COMMITTED)  # type: ignore[arg-type]
        dialect.reset_isolation_level(connection.dbapi_connection)  # type: ignore[arg-type]
        after = _stands(connection, dialect)
        if before != after and not isinstance(engine.pool, NullPool):
            connection.invalidate()
            raise UnsupportedDatabase(
                f"the isolation level of this engine's connections is set behind SQLAlchemy's back (as by a "
                f"connect event): {_told(before)}, and {_told(after)} once the store has used one. Say it "
                "as create_engine(…, isolation_level=…), or give the store an engine of its own"
            )
        return False
    finally:
        connection.close()


def _stands(connection: PoolProxiedConnection, dialect: Dialect) -> tuple[str, bool]:
    level = dialect.get_isolation_level(connection.dbapi_connection)  # type: ignore[arg-type]
    connection.rollback()
    return level, _autocommits(connection)


def _told(habit: tuple[str, bool]) -> str:
    return habit[0] + " with AUTOCOMMIT" * habit[1]


#: drivers of which we have seen that nothing else is to be known of them; see `Direct`
_DIRECT: Final = {"psycopg", "asyncpg", "pymysql", "aiomysql", "pysqlite", "aiosqlite"}


def may_be_direct(engine: Engine) -> bool:
    """Whether the statements of our own transactions may go straight to the driver; see `Direct`."""
    return engine.dialect.driver in _DIRECT and direct.is_possible(engine)


def begun(connection: Channel, *, reading: bool = False) -> None:
    """Make the transaction that SQLAlchemy has just begun one of our own.

    MariaDB and MySQL: READ COMMITTED for this transaction alone, and BEGIN where the connection is
    in AUTOCOMMIT mode. SQLite: BEGIN IMMEDIATE, since a deferred transaction that reads and then
    writes gets BUSY at once, whatever the timeout. ``reading``: it will write nothing, so that it
    need not wait for writers. The connection must be nobody else's; see `is_open`.
    """
    capable = capabilities(connection.dialect)
    if capable.next_level:
        _begin_read_committed(connection)
    elif not capable.read_committed:
        _begin_immediate(connection, reading)


def single(connection: Channel) -> bool:
    """Have the next statement be a transaction of its own, where that spares a BEGIN; whether it does.

    PostgreSQL: AUTOCOMMIT mode of the driver, until `rollback`. SQLite: the driver's legacy mode begins a
    deferred transaction, and a change that is the first statement in one waits for its turn. (Not of an
    async driver, which would spare nothing.)
    """
    capable, pooled = capabilities(connection.dialect), connection.connection
    if capable.autocommit:
        may = _MAY_BE_SINGLE.get(connection.dialect.driver)
        if may is None or not may(pooled):
            return False
        try:
            pooled.dbapi_connection.autocommit = True  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001 - an event of the host has begun something, as the driver says
            return False
        return True
    if capable.read_committed or connection.dialect.is_async:
        return False
    driver: Any = pooled.driver_connection
    return _sqlite_autocommit(driver) is None and driver.isolation_level == "" and not _in_transaction(driver)


def is_single(connection: Channel) -> bool:
    """Whether the next statement on this connection is its own COMMIT; see `single`."""
    return capabilities(connection.dialect).autocommit and _autocommits(connection.connection)


def announce_commit(connection: Channel) -> None:
    """Tell those who listen for COMMIT that the next statement is one, as `is_single` says of it."""
    connection.dispatch.commit(connection)


def _begin_read_committed(connection: Channel) -> None:
    try:
        connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {_READ_COMMITTED}")
    except DBAPIError as error:
        if _errno(error.orig) != _IN_TRANSACTION_ERRNO:
            raise
        if connection.get_isolation_level() != _READ_COMMITTED:
            raise UnsupportedDatabase(
                "an event of this engine or session (begin, after_begin) has begun a transaction before the "
                "store could make it READ COMMITTED; let the event read nothing, or create the engine with "
                "that isolation level"
            ) from error
    if _autocommits(connection.connection):
        connection.exec_driver_sql("START TRANSACTION")


def _begin_immediate(connection: Channel, reading: bool) -> None:
    driver = connection.connection.driver_connection
    if _sqlite_autocommit(driver) is True:
        raise UnsupportedDatabase(
            "sqlite3's autocommit=True makes commit() and rollback() of the driver do nothing; use "
            "create_engine(…, isolation_level='AUTOCOMMIT') for that, or leave the driver's default"
        )
    if _in_transaction(driver):
        # A begin event of the host, or the driver's autocommit=False mode, has begun a deferred
        # one; nothing has happened in it.
        connection.exec_driver_sql("ROLLBACK")
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def is_open(driver: Any) -> bool:
    """Whether a SQLite connection, which we have not begun anything on, is in a transaction."""
    return driver is not None and _in_transaction(driver) and not hides_transactions(driver)


def hides_transactions(driver: Any) -> bool:
    """Whether it cannot be told if a SQLite connection is in use: one is always open in this mode."""
    return _sqlite_autocommit(driver) is False


def join(connection: Connection, *, seen: bool = False) -> bool:
    """Make sure that the caller's transaction is one, or refuse it; true if it had to be begun.

    The legacy mode of SQLite's driver begins a transaction only before a change, so that a SAVEPOINT
    may be the outermost one, and its RELEASE a commit that the caller's rollback cannot undo.
    ``seen``: it was begun by us.
    """
    if not seen and _autocommits(connection.connection):
        raise UnsupportedDatabase(
            "the session's connection is in AUTOCOMMIT mode, where business rows and the completion "
            "cannot commit together; use a transactional isolation level"
        )
    if capabilities(connection.dialect).read_committed:
        return False
    driver = connection.connection.driver_connection
    if not _in_transaction(driver):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        return True
    if not (seen or _begins_first(connection, driver)) and connection.in_nested_transaction():
        raise UnsupportedDatabase(
            "this SQLite session is inside begin_nested(), and its driver may never have sent BEGIN: "
            "releasing the savepoint would commit. Use the unit of work before begin_nested(), or "
            "let the engine emit BEGIN (see the SQLAlchemy docs on pysqlite and savepoints)"
        )
    return False


def commit(connection: Channel, *, patience: Callable[[], bool], single: bool = False) -> None:
    """COMMIT a transaction of our own; see `send_commit`. The driver does it for a ``single`` statement."""
    if not single:
        send_commit(connection, patience)
    connection.commit()


def send_commit(connection: Channel, patience: Callable[[], bool]) -> None:
    """On SQLite, COMMIT now, and again while a reader is in the way and ``patience()`` says so.

    There a COMMIT that was BUSY leaves the transaction open, and a second one works; SQLAlchemy and
    the driver try once, and find nothing to commit afterwards. Elsewhere theirs is enough.
    """
    if capabilities(connection.dialect).read_committed:
        return
    while True:
        try:
            connection.exec_driver_sql("COMMIT")
            break
        except OperationalError as error:
            if not (is_transient(error) and patience()):
                raise
    _leave_one_open(connection)


def rollback(connection: Channel, *, single: bool = False) -> None:
    """End our own transaction without effects, and never hand an open one back to the pool.

    Raises nothing, so that the error that led here comes out. ``single``: it was for one statement.
    """
    abandon(connection)
    with _last_use(connection):
        connection.rollback()
    if single:
        end_single(connection)


def end_single(connection: Channel) -> None:
    """Leave the connection as it was before `single`, when its statement has ended; raises nothing."""
    if capabilities(connection.dialect).autocommit and not connection.invalidated:
        with _last_use(connection):
            connection.connection.dbapi_connection.autocommit = False  # type: ignore[union-attr]


def abandon(connection: Channel) -> None:
    """End a transaction that SQLAlchemy may leave open; raises nothing.

    On SQLite it believes a transaction to be over whose COMMIT was BUSY; in AUTOCOMMIT mode it can be
    told to skip ROLLBACK.
    """
    capable = capabilities(connection.dialect)
    with _last_use(connection):
        if connection.closed or connection.invalidated:
            return
        if capable.next_level and _autocommits(connection.connection):
            connection.connection.rollback()
        if not capable.read_committed:
            if _in_transaction(connection.connection.driver_connection):
                connection.connection.rollback()
            _leave_one_open(connection)


@contextmanager
def _last_use(connection: Channel) -> Iterator[None]:
    try:
        yield
    except Exception:  # noqa: BLE001 - whatever it was, this connection is not to be used again
        if not connection.closed:
            connection.invalidate()


def _leave_one_open(connection: Channel) -> None:
    """The driver's ``autocommit=False`` mode wants to end a transaction itself, and fails without one."""
    driver = connection.connection.driver_connection
    if hides_transactions(driver) and not _in_transaction(driver):
        cursor = connection.connection.cursor()
        cursor.execute("BEGIN")
        cursor.close()


def _in_transaction(driver: Any) -> bool:
    return bool(driver.in_transaction)


def _begins_first(connection: Connection, driver: Any) -> bool:
    """Whether the driver, or a begin event of the host, sends BEGIN before anything else.

    The driver's legacy mode sends it before the first change only, its autocommit mode never.
    """
    if _sqlite_autocommit(driver) is None and driver.isolation_level is not None:
        return False
    return hides_transactions(driver) or bool(connection.dispatch.begin)


def _sqlite_autocommit(driver: Any) -> bool | None:
    """The ``autocommit`` attribute of sqlite3 since Python 3.12; ``None`` in the legacy mode."""
    raw = getattr(driver, "_conn", driver)  # aiosqlite wraps the sqlite3 connection
    try:
        value = getattr(raw, "autocommit", None)
    except Exception:  # noqa: BLE001 - sqlite3's: a connection in memory is for aiosqlite's thread alone
        return None
    return value if isinstance(value, bool) else None


def _autocommits(connection: PoolProxiedConnection) -> bool:
    dbapi: Any = connection.dbapi_connection
    driver: Any = connection.driver_connection
    if hasattr(driver, "in_transaction"):
        off = driver.isolation_level is None and not _in_transaction(driver)
        return _sqlite_autocommit(driver) is True or off
    for owner in (dbapi, driver):
        asked = getattr(owner, "get_autocommit", None)
        if callable(asked):
            return bool(asked())
        value = getattr(owner, "autocommit", None)
        if isinstance(value, bool):
            return value
    return False


# --- poolers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Preparing:
    """What is to be known of a driver that prepares statements on the server by itself."""

    process: Callable[[Any], int]  #: the server's process, as the driver was told when it connected
    prepares: Callable[[PoolProxiedConnection], bool]
    remedy: str


def _asyncpg_prepares(connection: PoolProxiedConnection) -> bool:
    adapted: Any = connection.dbapi_connection
    name = getattr(adapted, "_prepared_statement_name_func", lambda: None)
    return getattr(adapted, "_prepared_statement_cache", None) is not None or name() is None


def _asyncpg_may_be_single(connection: PoolProxiedConnection) -> bool:
    """Nothing is begun on it, which this driver would not say; and it prepares statements.

    Where it is told not to, because of a pooler, it still sends each in two steps, which may come to two
    servers outside of a transaction.
    """
    driver: Any = connection.driver_connection
    return _asyncpg_prepares(connection) and not driver.is_in_transaction()


_MAY_BE_SINGLE: Final[dict[str, Callable[[PoolProxiedConnection], bool]]] = {
    "psycopg": lambda connection: True,
    "psycopg2": lambda connection: True,
    "asyncpg": _asyncpg_may_be_single,
}

_PREPARING: Final = {
    "psycopg": _Preparing(
        lambda driver: int(driver.info.backend_pid),
        lambda connection: connection.driver_connection.prepare_threshold is not None,  # type: ignore[union-attr]
        "{'prepare_threshold': None}",
    ),
    "asyncpg": _Preparing(
        lambda driver: int(driver.get_server_pid()),
        _asyncpg_prepares,
        "{'statement_cache_size': 0, 'prepared_statement_cache_size': 0, "
        "'prepared_statement_name_func': lambda: f'fenced_{uuid4().hex}'}",
    ),
}


def may_lose_statements(connection: Connection) -> bool:
    """Whether the driver prepares statements, and a pooler is between it and the server."""
    known = _PREPARING.get(connection.dialect.driver)
    if known is None or not known.prepares(connection.connection):
        return False
    here = connection.scalar(select(func.pg_backend_pid()))
    return here != known.process(connection.connection.driver_connection)


def refuse_shared_connections(engine: Engine) -> None:
    """Refuse a pooler that gives each transaction another connection, for a driver that prepares statements.

    In that mode a second client is served by the connection that the first one had just before, or the
    first one by several. Needs a connection from the pool, and one beside it.
    """
    seen = list[int]()
    with engine.connect() as connection:
        for _ in range(2):
            seen.append(connection.scalar(select(func.pg_backend_pid())) or 0)
            connection.rollback()
        beside = engine.pool.recreate()
        try:
            second = beside.connect()
            cursor = second.cursor()
            cursor.execute("SELECT pg_backend_pid()")
            other = (cursor.fetchone() or (0,))[0]
            cursor.close()
            second.close()
        finally:
            beside.dispose()
    if seen[0] != seen[1] or other in seen:
        raise UnsupportedDatabase(_pooled_away(engine.dialect))


def _pooled_away(dialect: Dialect) -> str:
    known = _PREPARING.get(dialect.driver)
    remedy = f"connect_args={known.remedy}" if known else "the driver's option that prepares no statements"
    return (
        "a pooler gives each transaction another connection, where statements that the driver has prepared "
        f"are unknown, or somebody else's: create the engine with {remedy}; see docs/poolers.md"
    )


_STATEMENT_LOST: Final = {"26000", "42P05"}  # a prepared statement is not there; is there already


def explain(error: Exception, dialect: Dialect) -> None:
    """Raise `UnsupportedDatabase` for an error that comes of a pooler and the driver's settings.

    It may be the driver's own, from SQLAlchemy's first questions on a new connection.
    """
    if _sqlstate(getattr(error, "orig", error)) in _STATEMENT_LOST:
        raise UnsupportedDatabase(_pooled_away(dialect)) from error


# --- wake-ups -------------------------------------------------------------------------------------


Wait = Callable[[float], bool]


def listening(connection: Connection) -> Wait | None:
    """Listen for queues that get work; what waits for a word of it, or ``None`` where this cannot be.

    ``wait(seconds)`` blocks for at most so long and says whether there was one, or several; errors
    of the connection come out of it as the driver's. LISTEN is committed, so the connection is in no
    transaction, and taken out of its pool: it is closed at the end, and must not be used for anything
    else. Of an async engine it must be called, and waited with, inside of ``greenlet_spawn``.

    A word may be lost, as behind a pooler that shares connections, so that polling must go on.
    """
    dialect = connection.dialect
    heard = _LISTENERS.get((dialect.driver, dialect.is_async))
    if capabilities(dialect).notify is None or heard is None:
        return None
    driver = connection.connection.driver_connection  # which a detached connection does not tell
    connection.detach()
    connection.exec_driver_sql(f"LISTEN {_CHANNEL}")
    connection.commit()
    return heard(driver)


def _psycopg_listener(driver: Any) -> Wait:
    def wait(seconds: float) -> bool:
        heard = [*driver.notifies(timeout=seconds, stop_after=1)]
        return bool(heard and [*heard, *driver.notifies(timeout=0)])  # one word for all that is there

    return wait


def _async_psycopg_listener(driver: Any) -> Wait:
    async def heard(seconds: float) -> bool:
        first = [one async for one in driver.notifies(timeout=seconds, stop_after=1)]
        return bool(first and [*first, *[one async for one in driver.notifies(timeout=0)]])

    return lambda seconds: await_only(heard(seconds))


def _asyncpg_listener(driver: Any) -> Wait:
    heard = asyncio.Event()
    await_only(driver.add_listener(_CHANNEL, lambda *_: heard.set()))
    driver.add_termination_listener(lambda *_: heard.set())

    def wait(seconds: float) -> bool:
        try:
            await_only(asyncio.wait_for(heard.wait(), seconds))
        except TimeoutError:
            return False
        if driver.is_closed():
            raise ConnectionResetError("the connection that listened for work is closed")
        heard.clear()
        return True

    return wait


_LISTENERS: Final[dict[tuple[str, bool], Callable[[Any], Wait]]] = {
    ("psycopg", False): _psycopg_listener,
    ("psycopg", True): _async_psycopg_listener,
    ("asyncpg", True): _asyncpg_listener,
}


# --- errors ---------------------------------------------------------------------------------------

_RETRY_SQLSTATES: Final = {"40001", "40P01"}
_RETRY_ERRNOS: Final = {1213, 1205, 1020, 1305}
"""Deadlock; lock wait timeout; record has changed since read; a savepoint that a deadlock has taken away."""
_CUT_ERRNOS: Final = {1053, 1180, 1317, 1927}
"""Shutdown; an error in the middle of COMMIT; interrupted; killed. (2000 to 2999 are the client's own.)"""
_DUPLICATE_ERRNO: Final = 1062
_IN_TRANSACTION_ERRNO: Final = 1568  # too late to set its isolation level
_BUSY: Final = {5, 6}  # SQLITE_BUSY, SQLITE_LOCKED
_IOERR: Final = 10  # SQLITE_IOERR


def is_transient(error: BaseException) -> bool:
    """Whether the whole transaction may be tried again: a deadlock, a serialisation failure, BUSY."""
    if not isinstance(error, DBAPIError):
        return False
    return (
        _sqlstate(error.orig) in _RETRY_SQLSTATES
        or _errno(error.orig) in _RETRY_ERRNOS
        or _sqlite_code(error.orig) in _BUSY
    )


def is_duplicate(error: DBAPIError) -> bool:
    """Whether a row with this key exists (where there is no ON CONFLICT to ask with)."""
    return _errno(error.orig) == _DUPLICATE_ERRNO


def says_no(error: BaseException) -> bool:
    """Whether an error of COMMIT is the database's own answer, so that nothing was committed.

    Anything else (a cut connection, a time-out, a shutdown) leaves the outcome unknown.
    """
    if not isinstance(error, DBAPIError) or error.connection_invalidated:
        return False
    errno, state, code = _errno(error.orig), _sqlstate(error.orig), _sqlite_code(error.orig)
    if errno is not None:
        return not 2000 <= errno < 3000 and errno not in _CUT_ERRNOS
    if state is not None:
        return state[:2] not in ("08", "57", "58", "XX") and state != "40003"
    return code is not None and code != _IOERR


def _sqlstate(orig: Any) -> str | None:
    state = getattr(orig, "sqlstate", None) or getattr(orig, "pgcode", None)
    return state if isinstance(state, str) else None


def _errno(orig: Any) -> int | None:
    args = getattr(orig, "args", ())
    return args[0] if args and isinstance(args[0], int) else None


def _sqlite_code(orig: Any) -> int | None:
    code = getattr(orig, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


# --- schema ---------------------------------------------------------------------------------------

_UPGRADE_KEY: Final = 0x66656E6365646A62  # any number that nobody else is likely to use
_UPGRADE_PATIENCE: Final = 24 * 3600  # seconds; PostgreSQL waits without a limit


def begin_upgrade(connection: Connection) -> None:
    """Begin a transaction of our own for an upgrade, on a connection fresh from the pool."""
    capable, driver = capabilities(connection.dialect), connection.connection.driver_connection
    if capable.read_committed and not capable.next_level:
        connection.execution_options(isolation_level=_READ_COMMITTED)
        connection.detach()  # it is closed at the end, and nobody finds it with this level
    elif not capable.read_committed and is_open(driver):
        raise UnsupportedDatabase("this SQLite connection is in the middle of another transaction")
    connection.begin()
    begun(connection)


def join_upgrade(connection: Connection) -> None:
    """Make sure that the caller's connection is in a transaction that can hold an upgrade, or refuse it."""
    if not connection.in_transaction():
        connection.begin()
        begun(connection)
    elif not capabilities(connection.dialect).read_committed:
        join(connection, seen=True)
    if capabilities(connection.dialect).read_committed and _autocommits(connection.connection):
        raise UnsupportedDatabase(
            "the connection is in AUTOCOMMIT mode, where several processes cannot upgrade one after "
            "the other; pass the engine, or a connection with a transactional isolation level"
        )


@contextmanager
def one_upgrade(connection: Connection, schema: str | None) -> Iterator[None]:
    """Wait until no other process upgrades this database; needs a begun transaction.

    A process that is killed lets go: the lock is the transaction's on PostgreSQL, the session's on
    MariaDB and MySQL, and the write lock of the begun transaction itself on SQLite.
    """
    family = _family(connection.dialect)
    if family == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_UPGRADE_KEY)))
    if family != "mysql":
        yield
        return
    # These locks are the server's, not the database's.
    place = func.coalesce(schema, func.database(), "")
    name = func.concat("fencedjobs.", func.sha1(place))
    if connection.scalar(select(func.get_lock(name, _UPGRADE_PATIENCE))) != 1:
        raise UnsupportedDatabase("the server gave no GET_LOCK to upgrade under")
    try:
        yield
    finally:
        if not connection.invalidated:
            connection.execute(select(func.release_lock(name))).close()


def settle_upgrade(connection: Connection) -> None:
    """Where DDL has committed the transaction anyhow, commit the version row before others may look."""
    if not transactional_ddl(connection.dialect):
        connection.exec_driver_sql("COMMIT")


def transactional_ddl(dialect: Dialect) -> bool:
    """Whether CREATE TABLE is undone by a rollback."""
    return _family(dialect) != "mysql"
