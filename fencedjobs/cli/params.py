"""Instants and lengths of time, as people write them on a command line: callbacks of options."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

import click

from fencedjobs.cli.lines import seconds

_UNITS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_SPAN: Final = re.compile(r"(\d{1,9}(?:\.\d+)?) ?(s|min|h|d)")


def instant(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Seconds, from Unix seconds or ISO 8601 with a time zone."""
    with suppress(ValueError):
        return float(value)
    try:
        return seconds(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def span(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Seconds, from a number and its unit: 90s, 45min, 12h, 30d."""
    found = _SPAN.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is no length of time such as 90s, 45min, 12h or 30d", ctx, param)
    return float(found[1]) * _UNITS[found[2]]
