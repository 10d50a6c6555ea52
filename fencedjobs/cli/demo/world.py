"""Where a run of the demo takes place, and how nothing of it stays behind."""

from __future__ import annotations

import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import click
from sqlalchemy import URL, Engine, MetaData, Table, delete, func, inspect, make_url, select
from sqlalchemy.exc import SQLAlchemyError

from fencedjobs import schema
from fencedjobs.cli.database import make_engine, shown
from fencedjobs.cli.demo.process import ENDS
from fencedjobs.cli.demo.stage import Stage
from fencedjobs.cli.settings import DEFAULT_URL
from fencedjobs.cli.trouble import reason
from fencedjobs.errors import FencedJobsError
from fencedjobs.locks import LANE
from fencedjobs.models import tables


class _Interrupted(SystemExit):
    """The end of the program by a signal."""


@contextmanager
def one_signal_ends_it() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM or a closed terminal end the run once, and not interrupt the cleaning up."""
    before = {number: signal.getsignal(number) for number in ENDS}

    def end(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        raise _Interrupted(128 + number)

    try:
        for number in ENDS:
            signal.signal(number, end)
        yield
    except _Interrupted:
        with suppress(OSError):  # the terminal may be gone
            click.echo("Interrupted.", err=True)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """From here on only cleaning up is left, and it is not interrupted."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)


def folder(cleanup: ExitStack) -> Path:
    """A folder of this run alone, removed in the end."""
    made = Path(tempfile.gettempdir(), f"fencedjobs-demo-{secrets.token_hex(8)}")
    cleanup.callback(shutil.rmtree, made, ignore_errors=True)  # before it is made: no gap for Ctrl-C
    made.mkdir(mode=0o700)
    return made


def in_file(path: Path) -> URL:
    """A database that is a file."""
    return URL.create(make_url(DEFAULT_URL).drivername, database=str(path))


def opened(url: URL, cleanup: ExitStack) -> Engine:
    """An engine, disposed of in the end."""
    engine = make_engine(url)
    cleanup.callback(engine.dispose)
    return engine


def temporary(path: Path, cleanup: ExitStack) -> tuple[Stage, Engine]:
    """A database in this file."""
    url = in_file(path)
    stage = Stage(url.render_as_string(hide_password=False), "orders", "shipments")
    engine = opened(url, cleanup)
    schema.upgrade(engine)
    stage.shipments().create(engine)
    return stage, engine


def borrowed(url: URL, sql_schema: str | None, cleanup: ExitStack) -> tuple[Stage, Engine]:
    """Somebody's database: a queue, ids and a table of this run alone, removed in the end."""
    token = secrets.token_hex(6)
    text = url.render_as_string(hide_password=False)
    stage = Stage(text, f"demo-{token}", f"fencedjobs_demo_{token}", f"demo-{token}-", sql_schema)
    engine = opened(url, cleanup)
    if not inspect(engine).has_table(stage.jobs().name, sql_schema):
        cleanup.callback(_remove_tables, engine, stage)
        schema.upgrade(engine, schema=sql_schema)
    cleanup.callback(_remove_run, engine, stage)
    stage.shipments().create(engine)
    return stage, engine


def _remove_run(engine: Engine, stage: Stage) -> None:
    """Remove the rows of this run. Nobody else can hold a lease of these random names."""
    jobs, events, locks = stage.jobs(), stage.events(), stage.locks()
    with _told(engine, f"the table {stage.table}, the jobs and the events of {stage.queue}"):
        stage.shipments().drop(engine, checkfirst=True)
        with engine.begin() as connection:
            connection.execute(delete(jobs).where(jobs.c.queue == stage.queue))
            connection.execute(delete(events).where(events.c.lane == stage.lane))
            connection.execute(delete(locks).where(locks.c.name == LANE + stage.lane))


def _remove_tables(engine: Engine, stage: Stage) -> None:
    """Remove the tables that this run has made, unless somebody has begun to use them."""
    with _told(engine, f"the tables fenced_* and {schema.VERSION_TABLE}"):
        with engine.connect() as connection:
            used = any(
                inspect(connection).has_table(table.name, stage.schema)
                and connection.scalar(select(func.count()).select_from(table))
                for table in tables(stage.schema).values()
            )
        if used:
            click.echo("The tables stay: somebody else uses them by now.", err=True)
            return
        schema.downgrade(engine, "base", schema=stage.schema)
        Table(schema.VERSION_TABLE, MetaData(), schema=stage.schema).drop(engine, checkfirst=True)


@contextmanager
def _told(engine: Engine, what: str) -> Iterator[None]:
    """Say what stays behind if it cannot be removed, and go on cleaning up."""
    try:
        yield
    except (SQLAlchemyError, FencedJobsError) as error:
        click.echo(f"Not removed from {shown(engine.url)}: {what}: {reason(error)}", err=True)
