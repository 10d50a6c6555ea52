"""The tables' versions: bring a database up to this release, or find out what it has.

Our revisions have a version table of their own, so that they never mix with the host's. Several processes
may upgrade at once: one does the work, the others wait for it and find it done.

How to have the tables made (docs/migrations.md has more):

- ``schema.upgrade(engine)``, or ``fencedjobs upgrade`` in a shell;
- in a revision of the host's own history: ``schema.up("fj0001")``, and ``schema.down("fj0001")``;
- by the host's own autogenerate, after ``schema.attach(metadata)``;
- by hand from ``schema.sql("postgresql")``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    inspect,
    select,
)

from fencedjobs import dialects, models
from fencedjobs.autogenerate import attach, include_name, include_object, metadata, render_item
from fencedjobs.errors import InvalidValue, SchemaMismatch
from fencedjobs.models import VERSION_TABLE

# Alembic is imported by the functions that migrate. It takes longer to import than all the rest, and every
# Store imports this file for `require`.
if TYPE_CHECKING:
    from alembic.operations import Operations
    from alembic.script import Script
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = [
    "HEAD", "REVISIONS", "SUPPORTED", "VERSION_TABLE", "attach", "current", "down", "downgrade",
    "downgrade_async", "include_name", "include_object", "metadata", "migrating", "render_item", "require",
    "sql", "up", "upgrade", "upgrade_async",
]  # fmt: skip

REVISIONS: Final = ("fj0001",)  #: all that there are, in order
HEAD: Final = REVISIONS[-1]
SUPPORTED: Final = REVISIONS[-2:]  #: what this release works on: its own revision, and the one before it

_PATIENCE: Final = 60.0  # seconds to wait for SQLite's write lock, whatever the driver's time-out is


# --- up and down ----------------------------------------------------------------------------------


def upgrade(bind: Engine | Connection, revision: str = "head", *, schema: str | None = None) -> None:
    """Bring our tables up to ``revision``; nothing happens if they are there or past it already.

    With an engine it has a transaction of its own. With a connection it runs in the caller's transaction and
    leaves the commit to the caller. (MariaDB and MySQL have no transactional DDL: there, every DDL statement
    commits what the connection has open, and what an interrupted upgrade left is completed by the next.)
    In a running event loop: `upgrade_async`, or ``await connection.run_sync(schema.upgrade)``.

    Raises `SchemaMismatch` if the database is at a revision that this release does not know,
    `UnsupportedDatabase` for a server that is too old, `InvalidValue` for an unknown ``revision``.
    """
    with migrating(bind, schema) as connection:
        _move_up(connection, revision, schema)


def downgrade(bind: Engine | Connection, revision: str = "base", *, schema: str | None = None) -> None:
    """Take our tables back to ``revision``; ``"base"`` drops them, with all their jobs *and fences*.

    Transactions and errors are as for `upgrade`.
    """
    with migrating(bind, schema) as connection:
        _move_down(connection, revision, schema)


async def upgrade_async(engine: AsyncEngine, revision: str = "head", *, schema: str | None = None) -> None:
    """`upgrade` for an ``AsyncEngine``, in a transaction of its own, from inside a running event loop."""
    async with engine.connect() as connection:
        await connection.run_sync(_within_own, _move_up, revision, schema)


async def downgrade_async(engine: AsyncEngine, revision: str = "base", *, schema: str | None = None) -> None:
    """`downgrade` for an ``AsyncEngine``, in a transaction of its own, from inside a running event loop."""
    async with engine.connect() as connection:
        await connection.run_sync(_within_own, _move_down, revision, schema)


def current(bind: Engine | Connection, *, schema: str | None = None) -> str | None:
    """The revision our version table names; ``None`` without that table or a row in it.

    Reads only. Raises `SchemaMismatch` if there are several rows, which nothing of ours writes.
    """
    if isinstance(bind, Connection):
        return _recorded(bind, schema)
    with _synchronous(bind).connect() as connection:
        return _recorded(connection, schema)


def sql(dialect: str, revision: str = "head", *, schema: str | None = None) -> str:
    """The statements that make our tables in an empty database, version row included, as a script.

    ``dialect`` is ``"postgresql"``, ``"mariadb"``, ``"mysql"`` or ``"sqlite"``. (The exact collation has
    another name on MariaDB than on MySQL, so the script is for one of them.) Connects to nothing, and must
    not be called from inside a migration. Raises `InvalidValue` for an unknown ``revision``, and
    `UnsupportedDatabase` for a dialect that is none of these.
    """
    from alembic import command
    from alembic.config import Config

    _place(revision)
    script = StringIO()
    config = Config(output_buffer=script)
    config.set_main_option("script_location", _directory().replace("%", "%%"))
    config.attributes.update(dialect=dialect, schema=schema)
    command.upgrade(config, revision, sql=True)
    return script.getvalue()


# --- in the host's own history --------------------------------------------------------------------


def up(revision: str = "head", *, since: str = "base", schema: str | None = None) -> None:
    """Inside ``upgrade()`` of a host's revision: make our tables as of ``revision``, by the host's ``op``.

    ``since`` is what the history had before: a later revision of the host's goes on from there. The host's
    version table keeps the record then, and ours does not exist. Without arguments the newest that this
    release has are made, from nothing; a history that must stay what it was names them, as
    ``fencedjobs alembic new`` does. Works with ``--sql`` too. Raises `InvalidValue` before anything is done.
    """
    for script in _between(revision, since):
        script.module.upgrade(schema=schema)


def down(revision: str = "head", *, since: str = "base", schema: str | None = None) -> None:
    """Inside ``downgrade()`` of a host's revision: undo what `up` with the same arguments has done."""
    for script in reversed(_between(revision, since)):
        script.module.downgrade(schema=schema)


def _between(revision: str, since: str) -> list[Script]:
    before, after = _place(since), _place(revision)
    if not before < after:
        raise InvalidValue(
            "revision", f"must come after {since!r}, which is where it starts, got {revision!r}"
        )
    return _chain()[before:after]


# --- the check at first use -----------------------------------------------------------------------


def require(connection: Connection, schema: str | None = None) -> None:
    """Raise `SchemaMismatch`, saying what to do, unless this release works on the tables as they are.

    Tables without a version table are accepted: they were made by the host's own history or ``create_all``.
    Reads only, in the transaction of ``connection``.
    """
    seen = inspect(connection)
    missing = sorted(name for name in models.Base.metadata.tables if not seen.has_table(name, schema))
    versioned = seen.has_table(VERSION_TABLE, schema)
    have = _recorded(connection, schema) if versioned else None
    problem = None
    if have not in (None, *SUPPORTED):
        problem = f"they are at revision {have}, and this release works on {' and '.join(SUPPORTED)}"
    elif missing:
        problem = f"there is no table {' nor '.join(missing)}"
    elif versioned and have is None:
        problem = "an upgrade was not completed"
    if problem:
        raise SchemaMismatch(
            f"fencedjobs' tables{_placed(schema)} cannot be used: {problem}. {_remedy(have)}"
        )


def _remedy(have: str | None) -> str:
    if have in (None, *REVISIONS):
        return "Run `fencedjobs upgrade` or call fencedjobs.schema.upgrade(engine)."
    return "A newer release has upgraded them: update the package."


def _placed(schema: str | None) -> str:
    return f" in schema {schema!r}" if schema else ""


# --- one upgrade at a time ------------------------------------------------------------------------


@contextmanager
def migrating(bind: Engine | Connection, schema: str | None = None) -> Iterator[Connection]:
    """A connection in a transaction in which nobody else upgrades this database; what ``env.py`` runs in.

    With an engine it is committed at the end. With a connection that is the caller's own affair.
    """
    if isinstance(bind, Connection):
        dialects.join_upgrade(bind)
        with _alone(bind, schema):
            yield bind
    else:
        with _synchronous(bind).connect() as connection, _own(connection, schema):
            yield connection


@contextmanager
def _own(connection: Connection, schema: str | None) -> Iterator[None]:
    patience = _until(time.monotonic() + _PATIENCE)
    _begin(connection, patience)
    try:
        with _alone(connection, schema):
            yield
        dialects.commit(connection, patience=patience)
    except BaseException:
        dialects.rollback(connection)
        raise


@contextmanager
def _alone(connection: Connection, schema: str | None) -> Iterator[None]:
    dialects.require_version(connection)
    with dialects.one_upgrade(connection, schema):
        yield


def _within_own(connection: Connection, move: Callable[..., None], revision: str, schema: str | None) -> None:
    with _own(connection, schema):
        move(connection, revision, schema)


def _begin(connection: Connection, patience: Callable[[], bool]) -> None:
    while True:
        try:
            dialects.begin_upgrade(connection)
            return
        except Exception as error:
            dialects.rollback(connection)
            if not (dialects.is_transient(error) and patience()):
                raise


def _until(end: float) -> Callable[[], bool]:
    def patience() -> bool:
        time.sleep(0.02)
        return time.monotonic() < end

    return patience


def _synchronous(bind: Any) -> Engine:
    if not isinstance(bind, Engine):
        raise TypeError(
            f"an Engine or a Connection is needed, got {type(bind).__name__}; with asyncio use "
            "`await schema.upgrade_async(engine)` or `await connection.run_sync(schema.upgrade)`"
        )
    return bind


# --- the steps ------------------------------------------------------------------------------------
#
# Alembic's commands work through `alembic.context` and `alembic.op`, which exist once per process: they
# could not run in two threads, nor inside a host's migration. So the steps are taken here.


def _move_up(connection: Connection, revision: str, schema: str | None) -> None:
    steps = _chain()[_present(connection, schema) : _place(revision)]
    if steps:
        # Before the first table, so that an interrupted upgrade is told from tables made by the host.
        _versions(schema).create(connection, checkfirst=True)
    for script in steps:
        script.module.upgrade(_operations(connection, schema), schema)
        _record(connection, script.revision, schema)


def _move_down(connection: Connection, revision: str, schema: str | None) -> None:
    for script in reversed(_chain()[_place(revision) : _present(connection, schema)]):
        script.module.downgrade(_operations(connection, schema), schema)
        _record(connection, (None, *REVISIONS)[_place(script.revision) - 1], schema)


def _place(revision: str | None) -> int:
    """How many revisions lead to this one."""
    if revision in (None, "base"):
        return 0
    if revision in ("head", "heads"):
        return len(REVISIONS)
    if revision not in REVISIONS:
        raise InvalidValue(
            "revision", f"must be head, base or one of {', '.join(REVISIONS)}, got {revision!r}"
        )
    return REVISIONS.index(revision) + 1


def _present(connection: Connection, schema: str | None) -> int:
    have = _recorded(connection, schema)
    if have not in (None, *REVISIONS):
        raise SchemaMismatch(
            f"fencedjobs' tables{_placed(schema)} are at revision {have}, unknown here. {_remedy(have)}"
        )
    return _place(have)


def _recorded(connection: Connection, schema: str | None) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE, schema):
        return None
    rows = connection.scalars(select(_versions(schema).c.version_num)).all()
    if len(rows) > 1:
        raise SchemaMismatch(
            f"{VERSION_TABLE}{_placed(schema)} has {len(rows)} rows: {', '.join(sorted(rows))}"
        )
    return rows[0] if rows else None


def _record(connection: Connection, revision: str | None, schema: str | None) -> None:
    versions = _versions(schema)
    connection.execute(versions.delete())
    if revision is not None:
        connection.execute(versions.insert().values(version_num=revision))
    dialects.settle_upgrade(connection)


@cache
def _versions(schema: str | None) -> Table:
    """Alembic's table, in its shape, so that its commands work on it too."""
    return Table(
        VERSION_TABLE,
        MetaData(),
        Column("version_num", String(32), nullable=False),
        PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
        schema=schema,
    )


def _operations(connection: Connection, schema: str | None) -> Operations:
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    options = {"version_table": VERSION_TABLE, "version_table_schema": schema}
    return Operations(MigrationContext.configure(connection, opts=options))


@cache
def _chain() -> list[Script]:
    """All revisions, the first one first."""
    from alembic.script import ScriptDirectory

    return list(reversed(list(ScriptDirectory(_directory()).walk_revisions())))


def _directory() -> str:
    return str(files("fencedjobs.migrations"))
