"""A place of its own for a check: made, migrated and dropped, beside whatever else the database has."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine, MetaData, create_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateSchema, DropSchema

from fencedjobs import dialects, schema


@dataclass(frozen=True)
class Home:
    """Where a store is to be opened: on this engine, with its tables in this schema."""

    engine: Engine
    schema: str | None


@contextmanager
def own_home(engine: Engine) -> Iterator[Home]:
    """A schema (a database on MariaDB, a file on SQLite) with our tables, of a name that nothing has.

    It is dropped at the end with all that is in it; nothing else is touched.
    """
    name = f"fj_verify_{secrets.token_hex(6)}"
    if not dialects.capabilities(engine.dialect).row_locks:  # a file with one writer, and no schemas
        with tempfile.TemporaryDirectory(prefix=name) as directory:
            own = create_engine(engine.url.set(database=str(Path(directory) / "verify.db"), query={}))
            schema.upgrade(own)
            try:
                yield Home(own, None)
            finally:
                own.dispose()
        return
    admin = create_engine(engine.url, poolclass=NullPool)
    with admin.begin() as connection:
        connection.execute(CreateSchema(name))
    try:
        schema.upgrade(admin, schema=name)
        yield Home(engine, name)
    finally:
        with admin.begin() as connection:
            found = MetaData(schema=name)
            found.reflect(connection)
            found.drop_all(connection)
            connection.execute(DropSchema(name))
