"""${message}

Frozen: nothing here follows today's models. Each statement may be run again, because a database without
transactional DDL keeps what an interrupted upgrade has done.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op as current_operations
${imports if imports else ""}
from fencedjobs.dialects import Counter, Instant, Key, LongText

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade(op: Any = current_operations, schema: str | None = None) -> None:
    ${upgrades if upgrades else "pass"}


def downgrade(op: Any = current_operations, schema: str | None = None) -> None:
    ${downgrades if downgrades else "pass"}
