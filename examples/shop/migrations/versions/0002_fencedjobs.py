"""fencedjobs' tables, in the shop's history."""

from fencedjobs import schema

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    schema.up("fj0001")


def downgrade() -> None:
    schema.down("base")
