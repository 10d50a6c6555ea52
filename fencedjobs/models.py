"""The tables, declaratively: for the host's metadata, its ORM reads and its autogenerate.

The verbs write them by Core statements that carry the guard. A flush that would write a fenced
column is refused with `UnfencedWrite`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from sqlalchemy import (
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
from sqlalchemy.orm import DeclarativeBase, Mapped, Mapper, ORMExecuteState, Session, mapped_column

from fencedjobs.dialects import Counter, Instant, Key, LongText, capabilities
from fencedjobs.errors import UnfencedWrite

_INNODB = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}  # the engine with transactions


class LeaseMixin:
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
    """One job. ``seq`` is its place in the order of insertion, ``id`` its identity."""

    __tablename__ = "fenced_jobs"
    __table_args__ = (
        PrimaryKeyConstraint("seq", name="pk_fenced_jobs"),
        UniqueConstraint("id", name="uq_fenced_jobs_id"),
        {"sqlite_autoincrement": True, **_INNODB},  # without it SQLite reuses the newest deleted number
    )
    __fenced__ = frozenset(
        """seq id named queue kind key priority state owner until fence last_owner attempts max_attempts
        deadline created_at finished_at payload result reason errors requeues""".split()
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
    created_at: Mapped[float] = mapped_column(Instant())
    finished_at: Mapped[float | None] = mapped_column(Instant())
    payload: Mapped[str] = mapped_column(LongText())
    result: Mapped[str | None] = mapped_column(LongText())
    reason: Mapped[str | None] = mapped_column(LongText())
    errors: Mapped[str | None] = mapped_column(LongText())
    requeues: Mapped[str | None] = mapped_column(LongText())

    __mapper_args__ = {"primary_key": [id]}  # noqa: RUF012 - SQLAlchemy's own declaration


def _index_jobs(jobs: Table) -> None:
    """Ready rows wait in the order in which they are taken, scheduled and leased rows for an instant.

    Finished rows are in neither index, where there are partial indexes; where there are none, the
    state is a column of the index. (A single index over everything open made each claim pay for
    every scheduled job.)
    """
    c = jobs.c
    for name, columns, states in (
        ("ready", (c.priority.desc(), c.seq), "state = 'ready'"),
        ("waiting", (c.until,), "state IN ('scheduled', 'leased')"),
    ):
        where: Any = {"postgresql_where": text(states), "sqlite_where": text(states)}
        Index(f"ix_fenced_jobs_{name}", c.queue, *columns, **where)
        Index(f"ix_fenced_jobs_state_{name}", c.queue, c.state, *columns)
    _choose_indexes(jobs)


def index_fits(index: Index, dialect: Dialect) -> bool:
    """Whether this dialect's database gets the index; it gets one of each pair."""
    return ("_state_" not in str(index.name)) is capabilities(dialect).partial_indexes


def _choose_indexes(jobs: Table) -> None:
    for index in jobs.indexes:
        index.ddl_if(callable_=_fits)


def _fits(ddl: Any, target: Any, *_: Any, dialect: Dialect, **__: Any) -> bool:
    return index_fits(target, dialect)


_index_jobs(Job.__table__)  # type: ignore[arg-type]


class Lock(LeaseMixin, Base):
    """A named lease without anything else: a singleton, a leader, a lane."""

    __tablename__ = "fenced_locks"
    __table_args__ = (PrimaryKeyConstraint("name", name="pk_fenced_locks"), _INNODB)

    name: Mapped[str] = mapped_column(Key())


@cache
def tables(schema: str | None) -> dict[str, Table]:
    """Our tables by name, placed in ``schema``."""
    if schema is None:
        return dict(Base.metadata.tables)
    placed = MetaData()
    copies = {t.name: t.to_metadata(placed, schema=schema) for t in Base.metadata.sorted_tables}
    _choose_indexes(copies[Job.__tablename__])  # a copied index has forgotten its condition
    return copies


# --- the ORM cannot walk around the fence ---------------------------------------------------------


@event.listens_for(LeaseMixin, "before_insert", propagate=True)
def _refuse_leased_insert(mapper: Mapper[Any], connection: Any, target: LeaseMixin) -> None:
    for name in LeaseMixin.__fenced__:
        if getattr(target, name, None):
            raise UnfencedWrite(f"{_named(mapper)} cannot be inserted with {name}={getattr(target, name)!r}")


@event.listens_for(LeaseMixin, "before_update", propagate=True)
def _refuse_fenced_update(mapper: Mapper[Any], connection: Any, target: LeaseMixin) -> None:
    state = inspect(target)
    for name in sorted(target.__fenced__):
        if name in state.attrs and state.attrs[name].history.has_changes():
            raise UnfencedWrite(
                f"{_named(mapper)}.{name} was changed through the ORM; only the verbs may write it"
            )


@event.listens_for(LeaseMixin, "before_delete", propagate=True)
def _refuse_delete(mapper: Mapper[Any], connection: Any, target: LeaseMixin) -> None:
    raise UnfencedWrite(f"{_named(mapper)} was deleted through the ORM; its fence would start again at 0")


def refuse_bulk_writes(session: Session) -> None:
    """Refuse ORM-enabled ``update()`` and ``delete()`` that touch fenced columns in this session."""
    event.listen(session, "do_orm_execute", _refuse_bulk)


def _refuse_bulk(state: ORMExecuteState) -> None:
    if not (state.is_update or state.is_delete) or state.bind_mapper is None:
        return
    model = state.bind_mapper.class_
    if not issubclass(model, LeaseMixin):
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
