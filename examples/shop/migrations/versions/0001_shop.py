"""The shop's own tables."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None


def upgrade() -> None:
    op.create_table(
        "orders",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("qty", sa.Integer, nullable=False),
    )
    op.create_table(
        "shipments",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("order_id", sa.String(64), sa.ForeignKey("orders.id"), nullable=False),
        sa.Column("qty", sa.Integer, nullable=False),
    )
    op.create_table(
        "stock_moves",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("order_id", sa.String(64), nullable=False),
        sa.Column("qty", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    for table in ("stock_moves", "shipments", "orders"):
        op.drop_table(table)
