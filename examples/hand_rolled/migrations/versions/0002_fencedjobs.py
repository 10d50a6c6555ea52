"""What is not done goes to fencedjobs; what is done stays in the old table."""

import time
from datetime import UTC
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.orm import Session

from fencedjobs import UnitOfWork, schema

revision, down_revision = "0002", "0001"

MAX_ATTEMPTS = 5  # as the old queue had it
old = sa.table(
    "old_jobs",
    *(sa.column(name) for name in ("id", "status", "attempts", "error")),
    sa.column("payload", sa.JSON),
    sa.column("run_at", sa.DateTime),
)
not_done = old.c.status.in_(["pending", "running", "failed"])


def upgrade() -> None:
    schema.up("fj0001")
    if sa.inspect(op.get_bind()).has_table("jobs"):  # an interrupted upgrade may have renamed it
        op.rename_table("jobs", "old_jobs")  # whatever an old worker still writes is refused from here on
    session = Session(op.get_bind())  # in Alembic's transaction
    jobs = UnitOfWork(session).jobs
    rows = session.execute(sa.select(old).where(not_done).order_by(old.c.run_at, old.c.id)).all()
    jobs.enqueue_many(taken_over(row) for row in rows)
    for row in rows:
        if row.status == "failed":
            jobs.quarantine(new_id(row), row.error or "failed")
    session.execute(sa.update(old).where(not_done).values(status="moved"))


def new_id(row: Any) -> str:
    return f"jobs-{row.id}"


def taken_over(row: Any) -> dict[str, Any]:
    """The arguments of `enqueue`. A running job is ready again, with the attempts that it has left."""
    left = MAX_ATTEMPTS if row.status == "failed" else max(1, MAX_ATTEMPTS - row.attempts)
    job = {"id": new_id(row), "payload": row.payload, "kind": "pack", "max_attempts": left}
    due = row.run_at.replace(tzinfo=UTC).timestamp()
    return {**job, "run_at": due} if row.status == "pending" and due > time.time() else job


def downgrade() -> None:
    raise NotImplementedError("jobs were done meanwhile that the old table has as moved")
