"""How things are printed: tables for people, JSON for programs, nothing that moves the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fencedjobs.cli.settings import Settings

_WIDE = 4096  # in a pipe nothing is folded to the width of a screen that is not there


def console(*, stderr: bool = False) -> Console:
    """A console on the stream of this moment; it does not read markup into data."""
    made = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not made.is_terminal:
        made = Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=_WIDE)
    return made


def emit(settings: Settings, value: Any, text: Callable[[], None]) -> None:
    """Print ``value`` as JSON if it was asked for, else let ``text`` print."""
    if settings.json:
        click.echo(json.dumps(value, indent=2))
    else:
        text()


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> Table:
    """A plain table; on a narrow screen its texts are folded, and its numbers (``right``) are not."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        number = heading in right
        made.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        made.add_row(*(Text(safe(cell)) for cell in row))
    return made


def safe(value: Any) -> str:
    """Any value as text without control characters: a payload must not steer the terminal."""
    text = "-" if value is None else str(value)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def compact(value: Any) -> str:
    """A JSON value on one line, readable in any alphabet."""
    return json.dumps(value, ensure_ascii=False)


def iso(instant: float | None, *, digits: str = "seconds") -> str | None:
    """An instant as ISO 8601 in UTC; the bare number where a caller's own clock is no calendar's."""
    if instant is None:
        return None
    try:
        return datetime.fromtimestamp(instant, UTC).isoformat(timespec=digits).replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return repr(instant)


def exact(instant: float | None) -> str | None:
    """Like `iso`, to the microsecond."""
    return iso(instant, digits="microseconds")


def span(seconds: float) -> str:
    """A length of time in its two largest units."""
    whole = int(abs(seconds))
    parts: list[str] = []
    if whole < 1:
        return f"{abs(seconds):.1f} s"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, whole = divmod(whole, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
