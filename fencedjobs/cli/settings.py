"""What every command takes: ``--url``, ``--schema`` and ``--json``, before or after the command's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import click

DEFAULT_URL: Final = "sqlite:///fencedjobs.db"
VARIABLE: Final = "FENCEDJOBS_URL"


@dataclass
class Settings:
    """The common options as given."""

    url: str | None = None
    schema: str | None = None
    json: bool = False

    def chosen_url(self) -> str:
        """The URL to use: the option, else the environment, else the default file."""
        return self.url or os.environ.get(VARIABLE) or DEFAULT_URL


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the common options; they end up in the `Settings` of the context."""
    command = click.option(
        "--json", is_flag=True, expose_value=False, callback=_remember, help="Print JSON instead of text."
    )(command)
    command = click.option(
        "--schema", metavar="NAME", expose_value=False, callback=_remember,
        help="The SQL schema with the tables, if not the default one.",
    )(command)  # fmt: skip
    return click.option(
        "--url", metavar="URL", expose_value=False, callback=_remember,
        help=f"The database as a SQLAlchemy URL, else ${VARIABLE}, else {DEFAULT_URL}.",
    )(command)  # fmt: skip


pass_settings = click.make_pass_decorator(Settings, ensure=True)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    settings = ctx.ensure_object(Settings)
    if value and param.name:
        setattr(settings, param.name, value)
