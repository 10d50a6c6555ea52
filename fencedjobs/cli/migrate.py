"""``upgrade``, ``downgrade``, ``current``: the tables and their revision."""

from __future__ import annotations

import click
from sqlalchemy import Engine, func, inspect, select

from fencedjobs import schema
from fencedjobs.cli.database import open_engine
from fencedjobs.cli.output import emit
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import Refusal
from fencedjobs.models import tables


@click.command()
@click.argument("revision", default="head")
@click.option("--sql", type=click.Choice(["postgresql", "mariadb", "mysql", "sqlite"]),
              help="Only print the statements, for an empty database of this kind.")  # fmt: skip
@common
@pass_settings
def upgrade(settings: Settings, revision: str, sql: str | None) -> None:
    """Make the tables, or bring them up to date.

    Several processes may do so at once; nothing happens if it is done already.
    """
    if sql is not None:
        click.echo(schema.sql(sql, revision, schema=settings.schema))
        return
    engine = open_engine(settings, create=True)
    before = _current(engine, settings)
    schema.upgrade(engine, revision, schema=settings.schema)
    _moved(settings, before, _current(engine, settings))


@click.command()
@click.argument("revision")
@click.option("--yes", is_flag=True, help="Also when the tables are not empty.")
@common
@pass_settings
def downgrade(settings: Settings, revision: str, yes: bool) -> None:
    """Go back to REVISION; 'base' removes the tables.

    All their jobs, events, messages and fences go with them.
    """
    engine = open_engine(settings)
    before = _current(engine, settings)
    if not yes and (full := _full(engine, settings)):
        raise Refusal(f"a downgrade can lose what is in {', '.join(full)}; add --yes")
    schema.downgrade(engine, revision, schema=settings.schema)
    _moved(settings, before, _current(engine, settings))


@click.command()
@common
@pass_settings
def current(settings: Settings) -> None:
    """Print the revision of the tables, or 'none'."""
    revision = _current(open_engine(settings), settings)
    emit(settings, {"revision": revision}, lambda: click.echo(revision or "none"))


def _current(engine: Engine, settings: Settings) -> str | None:
    return schema.current(engine, schema=settings.schema)


def _full(engine: Engine, settings: Settings) -> list[str]:
    """The tables that have rows, and how many."""
    ours, found = tables(settings.schema).values(), inspect(engine).get_table_names(settings.schema)
    with engine.connect() as connection:
        rows = {
            table.name: connection.scalar(select(func.count()).select_from(table))
            for table in ours
            if table.name in found
        }
    return [f"{name} ({count} rows)" for name, count in rows.items() if count]


def _moved(settings: Settings, before: str | None, after: str | None) -> None:
    said = f"already at {after or 'none'}" if before == after else f"{before or 'none'} -> {after or 'none'}"
    emit(settings, {"before": before, "after": after}, lambda: click.echo(said))
