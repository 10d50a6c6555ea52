"""From a URL to an engine and a store, with words for what can be wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from sqlalchemy import URL, Connection, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from fencedjobs import schema
from fencedjobs.cli.settings import DEFAULT_URL, VARIABLE, Settings
from fencedjobs.cli.trouble import Trouble, reason, redacted
from fencedjobs.store import Store


def open_store(settings: Settings) -> Store:
    """The store on the chosen database, closed with the command."""
    return Store(open_engine(settings), schema=settings.schema)


@contextmanager
def looking(engine: Engine, settings: Settings) -> Iterator[Connection]:
    """A connection to read from, after the check that the tables are there."""
    with engine.connect() as connection:
        schema.require(connection, settings.schema)
        yield connection


def open_engine(settings: Settings, *, create: bool = False) -> Engine:
    """An engine on the chosen database, disposed of with the command.

    Unless ``create`` is true a missing database file is refused: looking must not leave an empty one.
    """
    engine = make_engine(parsed(settings.chosen_url()), create=create)
    click.get_current_context().call_on_close(engine.dispose)
    return engine


def open_beside(settings: Settings) -> Engine:
    """An engine on the chosen server, for a place of its own there; of a file only the kind matters."""
    url = parsed(settings.chosen_url())
    engine = make_engine(url.set(database="") if _is_file(url) else url)  # None would leave it as it is
    click.get_current_context().call_on_close(engine.dispose)
    return engine


def parsed(text: str) -> URL:
    """The URL; its text is not repeated, since it may hold a password."""
    try:
        return make_url(text)
    except (ArgumentError, ValueError):
        raise Trouble(
            f"the database URL (--url or {VARIABLE}) cannot be read; it looks like "
            "postgresql+psycopg://user:password@host/name, mysql+pymysql://… or sqlite:///file.db"
        ) from None


def make_engine(url: URL, *, create: bool = True) -> Engine:
    """An engine for a synchronous driver that is installed, on a database that answers."""
    try:
        engine = create_engine(url)
    except NoSuchModuleError:
        raise Trouble(f"SQLAlchemy knows no database or driver {url.drivername!r}") from None
    except ModuleNotFoundError as error:
        raise Trouble(
            f"the driver {error.name!r} of {url.drivername}:// is not installed\n"
            "Hint: pip install 'fencedjobs[postgresql]' or 'fencedjobs[mysql]', or name another driver, "
            "as in postgresql+psycopg://"
        ) from None
    except (ArgumentError, TypeError, ValueError) as error:
        raise Trouble(f"the database URL of {shown(url)} has an option that does not fit: {error}") from None
    if engine.dialect.is_async:
        raise Trouble(
            f"{url.drivername}:// is an async driver; the command line needs a synchronous one "
            "(postgresql+psycopg://, mysql+pymysql://, sqlite://) for the same database"
        )
    if not create:
        _require_file(url)
    _connect(engine)
    return engine


def shown(url: URL) -> str:
    """The URL as it may be printed: no password, and no query, which may hold one too."""
    return url.set(query={}).render_as_string(hide_password=True)


def _connect(engine: Engine) -> None:
    """Connect once. Drivers have errors of their own kind for what is wrong with a URL or the set-up."""
    try:
        engine.connect().close()
    except (SQLAlchemyError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        text = f"cannot connect to {shown(engine.url)}: {reason(error)}"
        raise Trouble(redacted(text, engine.url.render_as_string(hide_password=False))) from None


def _is_file(url: URL) -> bool:
    """Only databases like the default one are files."""
    return url.get_backend_name() == make_url(DEFAULT_URL).get_backend_name()


def _require_file(url: URL) -> None:
    if not _is_file(url):
        return
    name = url.database or ":memory:"
    if name != ":memory:" and not name.startswith("file:") and not Path(name).exists():
        raise Trouble(
            f"there is no database file {name}\n"
            f"Hint: `fencedjobs upgrade` makes it; --url or {VARIABLE} names another database."
        )
