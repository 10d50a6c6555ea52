"""``demo``: run the story, print the timeline and the invariants."""

from __future__ import annotations

import os
import signal
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.text import Text

from fencedjobs.cli.database import parsed, shown
from fencedjobs.cli.demo.invariants import Invariant
from fencedjobs.cli.demo.orders import Order, read_orders
from fencedjobs.cli.demo.play import play
from fencedjobs.cli.demo.timeline import Moment, Timeline
from fencedjobs.cli.output import console, emit, safe
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import REFUSED, Trouble

_STYLES: Final = {
    "A": "yellow", "B": "green", "relay 1": "yellow", "relay 2": "green", "warehouse": "cyan", "seen": "bold",
    "refused": "bold red", "expired": "yellow", "died": "bold red", "failed": "bold red",
}  # fmt: skip
_REPEATED: Final = ("completed", "delivered")
_TOLD: Final = 10  # lines of each; a large file of orders is told in short
_INDENT: Final = " " * 29
_WIDEST: Final = 110
_FIRST: Final = """\
1. The late courier, on {where}, with {orders}.
Two worker processes want the same order. A claim lasts for a time and raises
the order's fence by one; to complete it one has to show the newest fence.
"""
_SECOND: Final = """
2. Death right after the ACK.
Each shipment was committed with an event for the warehouse. A relay process
sends it by HTTP, and marks it sent after the acknowledgement, the ACK. There,
in a database of its own, the warehouse has an inbox, and takes an event once.
"""


@click.command()
@click.option("--orders", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Your orders: JSON lines with id and qty.  [default: five invented ones]")  # fmt: skip
@common
@pass_settings
def demo(settings: Settings, orders: Path | None) -> None:
    """Play two stories of failure with real processes.

    The late courier: a worker stands still, its lease runs out, another takes over, its late
    completion is refused. Death right after the ACK: a relay dies before it has marked what it sent,
    and a connection is cut before the answer; both events are sent again, and take effect once.

    On a temporary SQLite database, or on the one of --url (not of FENCEDJOBS_URL), with a queue, a
    lane and a table of its own that are removed in the end; the warehouse is always on SQLite. Ends
    with 0 only if every invariant holds, each read from the databases.
    """
    if not hasattr(signal, "SIGSTOP"):
        raise Trouble(f"the demo stops a process with SIGSTOP, which {os.name!r} does not have")
    wanted = read_orders(orders)
    url = parsed(settings.url) if settings.url else None
    teller = _Teller(orders=wanted, quiet=settings.json)
    where = shown(url) if url else "a temporary SQLite database"
    teller.say(_FIRST.format(where=safe(where), orders=safe(orders or "five invented orders")))
    timeline = Timeline(teller)
    invariants = play(url, settings.schema, wanted, timeline, between=lambda: teller.say(_SECOND))
    _conclude(settings, wanted, timeline, invariants)


class _Teller:
    """Prints the timeline as it happens; of what goes on in the same way only the start."""

    def __init__(self, *, orders: Sequence[Order], quiet: bool) -> None:
        self._first = orders[0].id
        self._quiet = quiet
        self._out = console()
        self._told: Counter[str] = Counter()

    def say(self, text: str) -> None:
        if not self._quiet:
            click.echo(text)

    def __call__(self, moment: Moment) -> None:
        if self._quiet or (moment.event == "claimed" and moment.order != self._first):
            return  # its completion tells the same
        if moment.event in _REPEATED:
            self._told[moment.event] += 1
            if self._told[moment.event] > _TOLD:
                if self._told[moment.event] == _TOLD + 1:
                    self._out.print(_INDENT + "… and so on with the rest")
                return
        self._out.print(_line(moment, self._out))


def _line(moment: Moment, out: Console) -> Text:
    fence = f"fence {moment.fence}" if moment.fence else ""
    head = f"{moment.at:5.2f} s  {moment.who:<9}  {fence:<7}  "
    return _wrapped(head, moment.text, out, style=_STYLES.get(moment.event, _STYLES.get(moment.who, "")))


def _wrapped(head: str, text: str, out: Console, *, style: str) -> Text:
    """The text beside its head, in as many lines as it needs."""
    width = min(out.width, _WIDEST)
    indent = " " * len(head)
    return Text(
        textwrap.fill(
            safe(text), width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
        ),
        style=style,
    )


def _conclude(
    settings: Settings, orders: Sequence[Order], timeline: Timeline, invariants: Sequence[Invariant]
) -> None:
    holds = all(invariant.holds for invariant in invariants)
    facts = {
        "ok": holds,
        "orders": len(orders),
        "timeline": [asdict(moment) for moment in timeline.moments],
        "invariants": [asdict(invariant) for invariant in invariants],
    }
    emit(settings, facts, lambda: _print(invariants, holds))
    if not holds:
        raise click.exceptions.Exit(REFUSED)


def _print(invariants: Sequence[Invariant], holds: bool) -> None:
    out = console()
    out.print("\nRead from both databases afterwards:")
    for invariant in invariants:
        style, mark = ("green", "holds ") if invariant.holds else ("bold red", "BROKEN")
        out.print(Text.assemble(("  " + mark, style), f"  {invariant.name}"))
        out.print(_wrapped(" " * 10, invariant.found, out, style="dim"))
    out.print(Text("\nAll invariants hold." if holds else "\nNot all invariants hold.", style="bold"))
