"""A place of its own for a check: made, migrated and dropped, beside whatever else the database has."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Engine, MetaData, create_engine
from sqlalchemy.schema import CreateSchema, DropSchema

from fencedjobs import dialects, schema
from fencedjobs.line import apart

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


@dataclass(frozen=True)
class Home:
    """The engine whose connections find our tables, and nothing of anybody else's."""

    engine: Engine
    name: str | None  #: of the schema; ``None`` for a file

    def async_engine(self) -> AsyncEngine:
        """The same place by a driver for asyncio; it leaves nothing open on an event loop."""
        from sqlalchemy.ext.asyncio import create_async_engine
        from sqlalchemy.pool import NullPool

        made = create_async_engine(dialects.async_url(self.engine.url), poolclass=NullPool)
        if self.name is not None:
            dialects.move_into(made.sync_engine, self.name)
        dialects.hurry(made.sync_engine)
        return made


@contextmanager
def own_home(engine: Engine) -> Iterator[Home]:
    """A schema (a database on MariaDB, a file on SQLite) with our tables, of a name that nothing has.

    Its engine is made like the given one, with connections of its own, which do not wait for the disk
    where they can say so: what is checked is not what a power cut leaves. The place is dropped at the end
    with all that is in it, and nothing else is touched.
    """
    name = f"fj_verify_{secrets.token_hex(6)}"
    if not dialects.capabilities(engine.dialect).row_locks:  # a file with one writer, and no schemas
        with tempfile.TemporaryDirectory(prefix=name) as directory:
            own = create_engine(engine.url.set(database=str(Path(directory) / "verify.db"), query={}))
            dialects.hurry(own)
            with _migrated(own):
                yield Home(own, None)
        return
    with engine.begin() as connection:
        connection.execute(CreateSchema(name))
    own = apart(engine)
    dialects.move_into(own, name)
    dialects.hurry(own)
    try:
        with _migrated(own):
            yield Home(own, name)
    finally:
        with engine.begin() as connection:
            found = MetaData(schema=name)
            found.reflect(connection)
            found.drop_all(connection)
            connection.execute(DropSchema(name))


@contextmanager
def _migrated(engine: Engine) -> Iterator[None]:
    try:
        schema.upgrade(engine)
        yield
    finally:
        engine.dispose()
