"""For Alembic's own commands: ``alembic -c alembic.ini upgrade head``.

The URL is the environment's ``FENCEDJOBS_URL`` or ``-x url=…``, a schema is ``-x schema=…``. With ``--sql``
it may be just ``-x dialect=postgresql`` (mariadb, mysql, sqlite). It leaves the process's logging alone.
"""

from __future__ import annotations

import os
from typing import Any

from alembic import context
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from fencedjobs import dialects, schema


def _given(name: str) -> Any:
    """From ``config.attributes`` of a caller in Python, or ``-x name=…`` of one in a shell."""
    return context.config.attributes.get(name) or context.get_x_argument(as_dictionary=True).get(name)


def _url() -> str:
    url = _given("url") or os.environ.get("FENCEDJOBS_URL")
    if not url:
        raise CommandError("which database? Set FENCEDJOBS_URL, or give -x url=… (with --sql: -x dialect=…)")
    return str(url)


def _settings() -> dict[str, Any]:
    return {
        "version_table": schema.VERSION_TABLE,
        "version_table_schema": _given("schema"),
        "include_name": _is_ours,
    }


def _is_ours(name: str | None, type_: str, parent_names: Any) -> bool:
    """In a database shared with a host, autogenerate looks at our tables only."""
    return type_ != "table" or not schema.include_name(name, type_, parent_names)


def _offline() -> None:
    named = _given("dialect")
    url = f"{named}://" if named else _url()
    dialect = make_url(url).get_dialect()()
    dialects.capabilities(dialect)  # refuses a database that we do not know
    context.configure(
        url=url, literal_binds=True, transactional_ddl=dialects.transactional_ddl(dialect), **_settings()
    )
    with context.begin_transaction():
        context.run_migrations(schema=_given("schema"))


def _online(connection: Connection) -> None:
    place = _given("schema")
    context.configure(
        connection=connection,
        target_metadata=schema.metadata(connection.dialect, place),
        on_version_apply=lambda ctx, **_: dialects.settle_upgrade(connection),
        **_settings(),
    )
    context.run_migrations(schema=place)


def _engine() -> Engine:
    engine = create_engine(_url(), poolclass=NullPool)
    if engine.dialect.is_async:
        raise CommandError(f"{engine.dialect.driver} is a driver for asyncio; name another one here")
    return engine


def _run() -> None:
    if context.is_offline_mode():
        return _offline()
    with schema.migrating(_given("connection") or _engine(), _given("schema")) as connection:
        return _online(connection)


_run()
