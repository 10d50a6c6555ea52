"""jobs, locks, outbox, inbox and guards

Frozen: nothing here follows today's models. Each statement may be run again, because a database without
transactional DDL keeps what an interrupted upgrade has done.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op as current_operations

from fencedjobs.types import Counter, Instant, Key, LongText

revision = "fj0001"
down_revision = None
branch_labels = ("fencedjobs",)
depends_on = None

_INNODB = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}  # the engine with transactions


def upgrade(op: Any = current_operations, schema: str | None = None) -> None:
    for create in (_create_jobs, _create_locks, _create_outbox, _create_inbox, _create_guards):
        create(op, schema)


def downgrade(op: Any = current_operations, schema: str | None = None) -> None:
    for table in ("fenced_guards", "fenced_inbox", "fenced_outbox", "fenced_locks", "fenced_jobs"):
        op.drop_table(table, schema=schema, if_exists=True)


def _create_jobs(op: Any, schema: str | None) -> None:
    op.create_table(
        "fenced_jobs",
        sa.Column("seq", Counter, autoincrement=True, nullable=False),
        sa.Column("id", Key(), nullable=False),
        sa.Column("named", sa.SmallInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("queue", Key(), nullable=False),
        sa.Column("kind", Key(), server_default=sa.text("''"), nullable=False),
        sa.Column("key", Key()),
        sa.Column("priority", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", Key(16), server_default=sa.text("'ready'"), nullable=False),
        sa.Column("last_owner", Key()),
        sa.Column("attempts", Counter, server_default=sa.text("0"), nullable=False),
        sa.Column("max_attempts", Counter, server_default=sa.text("20"), nullable=False),
        sa.Column("deadline", Instant()),
        sa.Column("due_at", Instant(), nullable=False),
        sa.Column("created_at", Instant(), nullable=False),
        sa.Column("finished_at", Instant()),
        sa.Column("payload", LongText(), nullable=False),
        sa.Column("progress", LongText()),
        sa.Column("result", LongText()),
        sa.Column("reason", LongText()),
        sa.Column("errors", LongText()),
        sa.Column("requeues", LongText()),
        *_lease(),
        sa.PrimaryKeyConstraint("seq", name="pk_fenced_jobs"),
        sa.UniqueConstraint("id", name="uq_fenced_jobs_id"),
        schema=schema,
        if_not_exists=True,
        sqlite_autoincrement=True,  # without it SQLite reuses the newest deleted number
        **_INNODB,
    )
    place = ["priority DESC", "seq"]
    _index_open_rows(op, schema, "fenced_jobs", "ready", ["queue"], place, "state = 'ready'")
    _index_open_rows(
        op, schema, "fenced_jobs", "waiting", ["queue"], ["until"], "state IN ('scheduled', 'leased')"
    )


def _create_locks(op: Any, schema: str | None) -> None:
    op.create_table(
        "fenced_locks",
        sa.Column("name", Key(300), nullable=False),
        *_lease(),
        sa.PrimaryKeyConstraint("name", name="pk_fenced_locks"),
        schema=schema,
        if_not_exists=True,
        **_INNODB,
    )


def _create_outbox(op: Any, schema: str | None) -> None:
    op.create_table(
        "fenced_outbox",
        sa.Column("seq", Counter, autoincrement=True, nullable=False),
        sa.Column("id", Key(), nullable=False),
        sa.Column("lane", Key(), nullable=False),
        sa.Column("topic", Key(), nullable=False),
        sa.Column("payload", LongText(), nullable=False),
        sa.Column("headers", LongText()),
        sa.Column("digest", Key(64), nullable=False),
        sa.Column("state", Key(16), server_default=sa.text("'pending'"), nullable=False),
        sa.Column("fence", Counter, server_default=sa.text("0"), nullable=False),
        sa.Column("attempts", Counter, server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", Instant(), nullable=False),
        sa.Column("sent_at", Instant()),
        sa.Column("last_error", LongText()),
        sa.Column("reason", LongText()),
        sa.Column("requeues", LongText()),
        sa.PrimaryKeyConstraint("seq", name="pk_fenced_outbox"),
        sa.UniqueConstraint("id", name="uq_fenced_outbox_id"),
        schema=schema,
        if_not_exists=True,
        sqlite_autoincrement=True,
        **_INNODB,
    )
    _index_open_rows(op, schema, "fenced_outbox", "pending", ["lane"], ["seq"], "state = 'pending'")


def _create_inbox(op: Any, schema: str | None) -> None:
    op.create_table(
        "fenced_inbox",
        sa.Column("source", Key(), nullable=False),
        sa.Column("id", Key(), nullable=False),
        sa.Column("digest", Key(64), nullable=False),
        sa.Column("fence", Counter),
        sa.Column("received_at", Instant(), nullable=False),
        sa.Column("duplicates", Counter, server_default=sa.text("0"), nullable=False),
        sa.Column("conflicts", Counter, server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("source", "id", name="pk_fenced_inbox"),
        schema=schema,
        if_not_exists=True,
        **_INNODB,
    )
    _create_index(op, schema, "fenced_inbox", "ix_fenced_inbox_received", ["received_at"])


def _create_guards(op: Any, schema: str | None) -> None:
    op.create_table(
        "fenced_guards",
        sa.Column("resource", Key(), nullable=False),
        sa.Column("fence", Counter, nullable=False),
        sa.Column("updated_at", Instant(), nullable=False),
        sa.PrimaryKeyConstraint("resource", name="pk_fenced_guards"),
        schema=schema,
        if_not_exists=True,
        **_INNODB,
    )


def _lease() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("owner", Key()),
        sa.Column("until", Instant(), server_default=sa.text("0"), nullable=False),
        sa.Column("fence", Counter, server_default=sa.text("0"), nullable=False),
    )


def _index_open_rows(
    op: Any, schema: str | None, table: str, name: str, first: list[str], last: list[str], where: str
) -> None:
    """A partial index, or where there are none an index with the state among its columns."""
    if _without_partial_indexes(op):
        _create_index(op, schema, table, f"ix_{table}_state_{name}", [*first, "state", *last])
    else:
        _create_index(op, schema, table, f"ix_{table}_{name}", [*first, *last], where)


def _create_index(
    op: Any, schema: str | None, table: str, name: str, columns: list[str], where: str | None = None
) -> None:
    if _has_index(op, schema, table, name):
        return
    condition = None if where is None else sa.text(where)
    op.create_index(
        name,
        table,
        [sa.text(column) if " " in column else column for column in columns],
        schema=schema,
        postgresql_where=condition,
        sqlite_where=condition,
        if_not_exists=_knows_if_not_exists(op),
    )


def _without_partial_indexes(op: Any) -> bool:
    return op.get_context().dialect.name in ("mysql", "mariadb")


def _knows_if_not_exists(op: Any) -> bool:
    dialect = op.get_context().dialect
    return not _without_partial_indexes(op) or dialect.is_mariadb


def _has_index(op: Any, schema: str | None, table: str, name: str) -> bool:
    """Asked where MySQL may be at the other end, which has no CREATE INDEX IF NOT EXISTS."""
    if op.get_context().as_sql or not _without_partial_indexes(op):
        return False
    return name in {index["name"] for index in sa.inspect(op.get_bind()).get_indexes(table, schema=schema)}
