"""The tables, declaratively: for the host's metadata, its ORM reads and its autogenerate.

The verbs write them by Core statements that carry the guard. A flush that would write a fenced
column is refused with `UnfencedWrite`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, Final

from sqlalchemy import (
    Column,
    Dialect,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    UniqueConstraint,
    event,
    inspect,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Mapper, ORMExecuteState, mapped_column

from fencedjobs.dialects import capabilities
from fencedjobs.errors import UnfencedWrite
from fencedjobs.types import Counter, Instant, Key, LongText

VERSION_TABLE: Final = "fenced_version"  #: what `schema` keeps our revision in

_INNODB = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}  # the engine with transactions


class Fenced:
    """A mapped class with columns that only the verbs write."""

    __fenced__: ClassVar[frozenset[str]] = frozenset()


class LeaseMixin(Fenced):
    """The three columns that make rows of any mapped table leasable.

    ``owner`` holds the lease while ``now < until``; ``fence`` counts the leases ever given and only
    rises. Only the verbs of ``store.leases(Model)`` write them.
    """

    __fenced__: ClassVar[frozenset[str]] = frozenset({"owner", "until", "fence"})

    owner: Mapped[str | None] = mapped_column(Key(), default=None)
    until: Mapped[float] = mapped_column(Instant(), default=0.0, server_default=text("0"))
    fence: Mapped[int] = mapped_column(Counter, default=0, server_default=text("0"))


class Base(DeclarativeBase):
    """The declarative base of our own tables, with a metadata of its own."""

    metadata = MetaData()


class Job(LeaseMixin, Base):
    """One job. ``seq`` is its place in the order of insertion, ``id`` its identity.

    ``due_at`` is since when the job can be claimed, or could when it was; ``progress`` its last checkpoint.
    """

    __tablename__ = "fenced_jobs"
    __table_args__ = (
        PrimaryKeyConstraint("seq", name="pk_fenced_jobs"),
        UniqueConstraint("id", name="uq_fenced_jobs_id"),
        {"sqlite_autoincrement": True, **_INNODB},  # without it SQLite reuses the newest deleted number
    )
    __fenced__ = frozenset(
        """seq id named queue kind key priority state owner until fence last_owner attempts max_attempts
        deadline due_at created_at finished_at payload progress result reason errors requeues""".split()
    )

    seq: Mapped[int] = mapped_column(Counter, autoincrement=True)
    id: Mapped[str] = mapped_column(Key())
    named: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"))
    queue: Mapped[str] = mapped_column(Key())
    kind: Mapped[str] = mapped_column(Key(), server_default=text("''"))
    key: Mapped[str | None] = mapped_column(Key())
    priority: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    state: Mapped[str] = mapped_column(Key(16), server_default=text("'ready'"))
    last_owner: Mapped[str | None] = mapped_column(Key())
    attempts: Mapped[int] = mapped_column(Counter, server_default=text("0"))
    max_attempts: Mapped[int] = mapped_column(Counter, server_default=text("20"))
    deadline: Mapped[float | None] = mapped_column(Instant())
    due_at: Mapped[float] = mapped_column(Instant())
    created_at: Mapped[float] = mapped_column(Instant())
    finished_at: Mapped[float | None] = mapped_column(Instant())
    payload: Mapped[str] = mapped_column(LongText())
    progress: Mapped[str | None] = mapped_column(LongText())
    result: Mapped[str | None] = mapped_column(LongText())
    reason: Mapped[str | None] = mapped_column(LongText())
    errors: Mapped[str | None] = mapped_column(LongText())
    requeues: Mapped[str | None] = mapped_column(LongText())

    __mapper_args__ = {"primary_key": [id]}  # noqa: RUF012 - SQLAlchemy's own declaration


class Lock(LeaseMixin, Base):
    """A named lease without anything else: a singleton, a leader, a lane."""

    __tablename__ = "fenced_locks"
    __table_args__ = (PrimaryKeyConstraint("name", name="pk_fenced_locks"), _INNODB)

    name: Mapped[str] = mapped_column(Key(300))  # a lane of 255 characters, and what marks it as one


class OutboxEvent(Fenced, Base):
    """One event. It is read in the order of ``seq``, and sent under its ``id``."""

    __tablename__ = "fenced_outbox"
    __table_args__ = (
        PrimaryKeyConstraint("seq", name="pk_fenced_outbox"),
        UniqueConstraint("id", name="uq_fenced_outbox_id"),
        {"sqlite_autoincrement": True, **_INNODB},
    )
    __fenced__ = frozenset(
        """seq id lane topic payload headers digest state fence attempts created_at sent_at last_error
        reason requeues""".split()
    )

    seq: Mapped[int] = mapped_column(Counter, autoincrement=True)
    id: Mapped[str] = mapped_column(Key())
    lane: Mapped[str] = mapped_column(Key())
    topic: Mapped[str] = mapped_column(Key())
    payload: Mapped[str] = mapped_column(LongText())
    headers: Mapped[str | None] = mapped_column(LongText())
    digest: Mapped[str] = mapped_column(Key(64))
    state: Mapped[str] = mapped_column(Key(16), server_default=text("'pending'"))
    fence: Mapped[int] = mapped_column(Counter, server_default=text("0"))
    attempts: Mapped[int] = mapped_column(Counter, server_default=text("0"))
    created_at: Mapped[float] = mapped_column(Instant())
    sent_at: Mapped[float | None] = mapped_column(Instant())
    last_error: Mapped[str | None] = mapped_column(LongText())
    reason: Mapped[str | None] = mapped_column(LongText())
    requeues: Mapped[str | None] = mapped_column(LongText())


class InboxMessage(Fenced, Base):
    """One message that was accepted, and how often it came again."""

    __tablename__ = "fenced_inbox"
    __table_args__ = (PrimaryKeyConstraint("source", "id", name="pk_fenced_inbox"), _INNODB)
    __fenced__ = frozenset("source id digest fence received_at duplicates conflicts".split())

    source: Mapped[str] = mapped_column(Key())
    id: Mapped[str] = mapped_column(Key())
    digest: Mapped[str] = mapped_column(Key(64))
    fence: Mapped[int | None] = mapped_column(Counter)
    received_at: Mapped[float] = mapped_column(Instant())
    duplicates: Mapped[int] = mapped_column(Counter, server_default=text("0"))
    conflicts: Mapped[int] = mapped_column(Counter, server_default=text("0"))


class Guard(Fenced, Base):
    """The highest fence that a resource has seen."""

    __tablename__ = "fenced_guards"
    __table_args__ = (PrimaryKeyConstraint("resource", name="pk_fenced_guards"), _INNODB)
    __fenced__ = frozenset("resource fence updated_at".split())

    resource: Mapped[str] = mapped_column(Key())
    fence: Mapped[int] = mapped_column(Counter)
    updated_at: Mapped[float] = mapped_column(Instant())


# --- indexes --------------------------------------------------------------------------------------


def _index(table: Table, name: str, by: Column[Any], *columns: Any, states: str) -> None:
    """An index over the rows in these states: a partial one, or one with the state as a column."""
    where: Any = {"postgresql_where": text(states), "sqlite_where": text(states)}
    Index(f"ix_{table.name}_{name}", by, *columns, **where)
    Index(f"ix_{table.name}_state_{name}", by, table.c.state, *columns)


def _index_tables(jobs: Any, outbox: Any, inbox: Any) -> None:
    """Rows that wait are in an index, in the order in which they are taken; finished rows are in none.

    (A single index over everything open made each claim pay for every scheduled job.)
    """
    c = jobs.c
    _index(jobs, "ready", c.queue, c.priority.desc(), c.seq, states="state = 'ready'")
    _index(jobs, "waiting", c.queue, c.until, states="state IN ('scheduled', 'leased')")
    _index(outbox, "pending", outbox.c.lane, outbox.c.seq, states="state = 'pending'")
    Index("ix_fenced_inbox_received", inbox.c.received_at)
    for table in (jobs, outbox, inbox):
        choose_indexes(table)


def index_fits(index: Index, dialect: Dialect) -> bool:
    """Whether this dialect's database gets the index; of a pair it gets one."""
    if "state" not in index.table.c:  # type: ignore[union-attr]
        return True
    return ("_state_" not in str(index.name)) is capabilities(dialect).partial_indexes


def choose_indexes(table: Table) -> None:
    """Let each database make the indexes that fit it."""
    for index in table.indexes:
        index.ddl_if(callable_=_fits)


def _fits(ddl: Any, target: Any, *_: Any, dialect: Dialect, **__: Any) -> bool:
    return index_fits(target, dialect)


_index_tables(Job.__table__, OutboxEvent.__table__, InboxMessage.__table__)


@cache
def tables(schema: str | None) -> dict[str, Table]:
    """Our tables by name, placed in ``schema``."""
    if schema is None:
        return dict(Base.metadata.tables)
    placed = MetaData()
    copies = {t.name: t.to_metadata(placed, schema=schema) for t in Base.metadata.sorted_tables}
    for copy in copies.values():
        choose_indexes(copy)  # a copied index has forgotten its condition
    return copies


# --- the ORM cannot walk around the fence ---------------------------------------------------------


@event.listens_for(LeaseMixin, "before_insert", propagate=True)
def _refuse_leased_insert(mapper: Mapper[Any], connection: Any, target: LeaseMixin) -> None:
    for name in LeaseMixin.__fenced__:
        if getattr(target, name, None):
            raise UnfencedWrite(f"{_named(mapper)} cannot be inserted with {name}={getattr(target, name)!r}")


@event.listens_for(Fenced, "before_update", propagate=True)
def _refuse_fenced_update(mapper: Mapper[Any], connection: Any, target: Fenced) -> None:
    state = inspect(target)
    for name in sorted(target.__fenced__):
        if name in state.attrs and state.attrs[name].history.has_changes():
            raise UnfencedWrite(
                f"{_named(mapper)}.{name} was changed through the ORM; only the verbs may write it"
            )


@event.listens_for(Fenced, "before_delete", propagate=True)
def _refuse_delete(mapper: Mapper[Any], connection: Any, target: Fenced) -> None:
    raise UnfencedWrite(f"{_named(mapper)} was deleted through the ORM; its fence would start again at 0")


def refuse_bulk_write(state: ORMExecuteState) -> None:
    """Refuse an ORM-enabled ``update()`` or ``delete()`` that touches fenced columns: ``do_orm_execute``."""
    if not (state.is_update or state.is_delete) or state.bind_mapper is None:
        return
    model = state.bind_mapper.class_
    if not issubclass(model, Fenced):
        return
    if state.is_delete:
        raise UnfencedWrite(f"delete({model.__name__}) would let its fences start again at 0")
    written = {getattr(c, "key", c) for c in _assigned(state)}
    if written & model.__fenced__:
        names = ", ".join(sorted(map(str, written & model.__fenced__)))
        raise UnfencedWrite(f"update({model.__name__}) writes {names}; only the verbs may")


def _assigned(state: ORMExecuteState) -> list[Any]:
    statement: Any = state.statement
    ordered = [column for column, _ in getattr(statement, "_ordered_values", None) or ()]
    many = state.parameters if isinstance(state.parameters, list) else [state.parameters or {}]
    return [*(statement._values or {}), *ordered, *(name for row in many for name in row)]


def _named(mapper: Mapper[Any]) -> str:
    return mapper.class_.__name__
