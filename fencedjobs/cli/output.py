"""How things are printed: tables for people, JSON for programs, nothing that moves the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fencedjobs.cli.settings import Settings

_INSTANTS: Final = ("until", "deadline", "created_at", "finished_at", "sent_at", "time")
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


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> Table:
    """A plain table; on a narrow screen texts are folded, but not the numbers (``right``) and ``whole``."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        made.add_column(heading, justify=justify, no_wrap=heading in (*right, *whole), overflow="fold")
    for row in rows:
        made.add_row(*(Text(safe(cell)) for cell in row))
    return made


def jsonable(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with instants as text; `until` 0 is no instant, but the mark of a job without one."""
    made = {}
    for name, value in facts.items():
        if name in _INSTANTS:
            value = exact(value or None if name == "until" else value)
        elif isinstance(value, tuple):
            value = [jsonable(entry) for entry in value]
        made[name] = value
    return made


def print_record(facts: dict[str, Any], *, as_json: Sequence[str]) -> None:
    """Everything about one thing: a line for each fact, then a table for each list of entries."""
    told = {name: compact(value) if name in as_json else value for name, value in facts.items()}
    lists = {name: value for name, value in told.items() if isinstance(value, list)}
    width = max(map(len, told.keys() - lists.keys()))
    out = console()
    for name, value in told.items():
        if name not in lists:
            out.print(Text(f"{name:<{width}}  {safe(value)}"))
    for name, entries in lists.items():
        out.print(Text(f"{name:<{width}}  {'' if entries else 'none'}".rstrip()))
        if entries:
            out.print(table(list(entries[0]), [list(entry.values()) for entry in entries]))


def safe(value: Any) -> str:
    """Any value as text without control characters: a payload must not steer the terminal."""
    text = "-" if value is None else str(value)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def brief(error: str) -> str:
    """The error of an event, without the words that name the event: its id stands beside it."""
    _, found, answer = error.partition(" was not acknowledged: ")
    return answer if found else error


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
