"""Expected errors become one sentence, a hint and an exit code, without a traceback or a password."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote, quote_plus

import click
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from fencedjobs.cli.settings import Settings
from fencedjobs.errors import (
    FencedJobsError,
    InvalidValue,
    OutcomeUnknown,
    SchemaMismatch,
    UnsupportedDatabase,
)

REFUSED: Final = 1
INTERRUPTED: Final = 130


class Trouble(click.ClickException):
    """A sentence for the user: the database, or what it takes, cannot be used."""

    exit_code = 3


class Misuse(Trouble):
    """The command line, a value or a file cannot be used."""

    exit_code = 2


class Refusal(Trouble):
    """Something was refused or not found."""

    exit_code = REFUSED


@contextmanager
def explained(settings: Settings) -> Iterator[None]:
    """Turn the errors that a user can cause into `Trouble`; bugs keep their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("Interrupted.", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except (FencedJobsError, SQLAlchemyError) as error:
        kind, text = _told(error)
        raise kind(redacted(text, settings.chosen_url())) from None


def hush() -> None:
    """What fails is told once, by us. Without a handler Python prints what libraries log on the way."""
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())


def redacted(text: str, url: str) -> str:
    """``text`` without the password of ``url``, however it is spelled."""
    try:
        password = make_url(url).password
    except ArgumentError:
        return text
    secret = str(password or "")
    for spelling in {secret, quote(secret, safe=""), quote_plus(secret)} - {""}:
        text = text.replace(spelling, "***")
    return text


def reason(error: BaseException) -> str:
    """Why, in short: the driver's own words for a database error."""
    if not isinstance(error, DBAPIError):
        return str(error)
    words = getattr(error.orig, "args", ())[-1:] or (error.orig,)  # PyMySQL: (number, text)
    return str(words[0]).strip()


def _told(error: Exception) -> tuple[type[Trouble], str]:
    match error:
        case SchemaMismatch() | UnsupportedDatabase():
            return Trouble, str(error)
        case InvalidValue():
            return Misuse, str(error)
        case OutcomeUnknown():
            return Trouble, f"{error}\nHint: look with `fencedjobs jobs show`, then run the command again."
        case FencedJobsError():
            return Refusal, str(error)
        case _:
            return Trouble, f"the database said: {reason(error)}"
