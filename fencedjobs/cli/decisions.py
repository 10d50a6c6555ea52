"""What a person decides about single jobs or events: one after the other, saying what became of each."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click

from fencedjobs.cli.output import emit, safe
from fencedjobs.cli.settings import Settings
from fencedjobs.cli.trouble import REFUSED

_BY_HAND: Final = "by hand"

ids = click.argument("ids", metavar="ID...", nargs=-1, required=True)


def reason(noun: str) -> Callable[..., Any]:
    """The option ``--reason``."""
    return click.option("--reason", default=_BY_HAND, show_default=True, help=f"Why; kept with the {noun}.")


def by(noun: str) -> Callable[..., Any]:
    """The option ``--by``; see `who`."""
    return click.option("--by", help=f"Who; kept with the {noun}.  [default: user@host]")


def mended(noun: str) -> Callable[..., Any]:
    """The option ``--payload``; see `mending`."""
    return click.option("--payload", metavar="JSON", help=f"A mended payload, for a single {noun}.")


def who(given: str | None) -> str:
    """The person as given, or as the system knows them."""
    if given:
        return given
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a container without a user database
        return f"unknown@{socket.gethostname()}"


def mending(payload: str | None, ids: Sequence[str], noun: str) -> dict[str, Any]:
    """The argument of ``requeue`` for a mended payload; none if it is kept."""
    if payload is None:
        return {}
    if len(ids) > 1:
        raise click.UsageError(f"--payload is for a single {noun}")
    try:
        return {"payload": json.loads(payload)}
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--payload is not JSON: {error}") from None


def each(
    settings: Settings,
    ids: Sequence[str],
    noun: str,
    verb: str,
    act: Callable[[str], Mapping[str, Any]],
    get: Callable[[str], Any],
) -> None:
    """Do it to each, say what became of each, and end with 1 if one was refused.

    ``act`` answers whether it ``changed`` anything, and may add a sentence, ``told``.
    """
    answers = []
    for one in dict.fromkeys(ids):
        done = act(one)
        found = get(one)
        answers.append({"id": one, **done, "state": str(found.state) if found else None})
    emit(settings, [_without_text(answer) for answer in answers], lambda: _print(answers, noun, verb))
    if not all(answer["changed"] for answer in answers):
        raise click.exceptions.Exit(REFUSED)


def _without_text(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "told"}


def _print(answers: Sequence[dict[str, Any]], noun: str, verb: str) -> None:
    for answer in answers:
        name = safe(answer["id"])
        if answer["changed"]:
            click.echo(f"{name}: {verb}{safe(answer.get('told', ''))}")
        elif answer["state"]:
            click.echo(f"{name}: not {verb}, it is {answer['state']}", err=True)
        else:
            click.echo(f"{name}: there is no such {noun}", err=True)
