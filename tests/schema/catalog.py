"""What a database says it has: our tables as its own catalogue describes them."""

from __future__ import annotations

import re

from sqlalchemy import Connection, Engine, text

from fencedjobs.models import Base

TABLES = sorted(Base.metadata.tables)

_POSTGRESQL = (
    """SELECT table_name, ordinal_position, column_name, data_type, character_maximum_length, is_nullable,
       column_default, collation_name FROM information_schema.columns
       WHERE table_name = ANY(:names) AND table_schema = :schema ORDER BY 1, 2""",
    """SELECT conrelid::regclass::text, conname, contype, pg_get_constraintdef(oid) FROM pg_constraint
       WHERE connamespace = CAST(:schema AS regnamespace) AND conrelid::regclass::text LIKE '%fenced%'
       AND conrelid::regclass::text NOT LIKE '%fenced_version' AND contype != 'n' ORDER BY 1, 2""",
    """SELECT tablename, indexname, indexdef FROM pg_indexes
       WHERE tablename = ANY(:names) AND schemaname = :schema ORDER BY 1, 2""",
)


def load(engine: Engine, script: str) -> None:
    """Run a script of statements, as a person would who got it from ``--sql``."""
    with engine.connect() as connection:
        for statement in re.split(r";\s*$", script, flags=re.MULTILINE):
            if statement.strip() not in ("", "BEGIN", "COMMIT"):
                connection.exec_driver_sql(statement)
        connection.commit()


def described(engine: Engine, schema: str | None = None) -> list[str]:
    """Columns with types, collations and defaults, constraints, and indexes with their predicates."""
    with engine.connect() as connection:
        found = {"postgresql": _postgresql, "sqlite": _sqlite}.get(engine.dialect.name, _mariadb)(
            connection, schema
        )
    assert found, "the catalogue was not read"
    return found


def _postgresql(connection: Connection, schema: str | None) -> list[str]:
    bound = {"names": TABLES, "schema": schema or "public"}
    rows = [str(tuple(row)) for query in _POSTGRESQL for row in connection.execute(text(query), bound)]
    return [row.replace(f"{schema or 'public'}.", "") for row in rows]


def _mariadb(connection: Connection, schema: str | None) -> list[str]:
    shown = [connection.execute(text(f"SHOW CREATE TABLE {name}")).one()[1] for name in TABLES]
    return [line for statement in shown for line in _in_order(statement)]


def _in_order(statement: str) -> list[str]:
    """Columns in the order they have, and then the rest; indexes are shown as old as they are."""
    lines = [line.rstrip(",") for line in re.sub(r" AUTO_INCREMENT=\d+", "", statement).split("\n")]
    return [line for line in lines if line.startswith("  `")] + sorted(
        line for line in lines if not line.startswith("  `")
    )


def _sqlite(connection: Connection, schema: str | None) -> list[str]:
    query = "SELECT sql FROM sqlite_master WHERE tbl_name LIKE 'fenced%' AND tbl_name != 'fenced_version'"
    rows = connection.scalars(text(f"{query} AND sql IS NOT NULL ORDER BY type, name"))
    # Alembic writes DEFAULT (20) for DEFAULT 20 in a revision that its autogenerate made.
    return [re.sub(r"DEFAULT \(('?\w*'?)\)", r"DEFAULT \1", re.sub(r"\s+", " ", row)) for row in rows]
