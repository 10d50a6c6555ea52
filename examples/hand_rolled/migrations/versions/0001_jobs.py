"""The shop's table, and its own queue."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None


def upgrade() -> None:
    op.create_table(
        "shipments",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("order_id", sa.String(64), nullable=False),
        sa.Column("qty", sa.Integer, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("payload", sa.JSON, nullable=False),
        sa.Column("run_at", sa.DateTime, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("locked_by", sa.String(64)),
        sa.Column("locked_at", sa.DateTime),
        sa.Column("result", sa.JSON),
        sa.Column("error", sa.Text),
    )


def downgrade() -> None:
    for table in ("jobs", "shipments"):
        op.drop_table(table)
