"""``demo``: run the story, print the timeline and the invariants."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.text import Text
from sqlalchemy import URL

from fencedjobs.cli.database import parsed, shown
from fencedjobs.cli.demo import world
from fencedjobs.cli.demo.invariants import Invariant, check, read
from fencedjobs.cli.demo.orders import Order, read_orders
from fencedjobs.cli.demo.process import CourierFailed
from fencedjobs.cli.demo.story import Moment, Story, hire
from fencedjobs.cli.output import console, emit, safe
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import REFUSED, Refusal, Trouble, redacted

_STYLES: Final = {"A": "yellow", "B": "green", "refused": "bold red", "expired": "yellow"}
_TOLD: Final = 12  # lines about B; a large file of orders is told in short
_INDENT: Final = 24
_INTRODUCTION: Final = """\
The late courier, on {where}, with {orders}.
Two worker processes want the same order. A claim lasts for a time and raises
the order's fence by one; to complete it one has to show the newest fence.
"""


@click.command()
@click.option("--orders", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Your orders: JSON lines with id and qty.  [default: five invented ones]")  # fmt: skip
@common
@pass_settings
def demo(settings: Settings, orders: Path | None) -> None:
    """Play the story of the late courier, and check what it left.

    Its lease runs out while it stands still, another takes over, its late completion is refused: two
    worker processes, one of them really stopped and continued, on a temporary SQLite database,
    or on the one of --url (not of FENCEDJOBS_URL), with a queue and a table of its own that are
    removed in the end. Ends with 0 only if every invariant holds, each read from the database.
    """
    if not hasattr(signal, "SIGSTOP"):
        raise Trouble(f"the demo stops a process with SIGSTOP, which {os.name!r} does not have")
    wanted = read_orders(orders)
    url = parsed(settings.url) if settings.url else None
    if not settings.json:
        where = shown(url) if url else "a temporary SQLite database"
        click.echo(_INTRODUCTION.format(where=safe(where), orders=orders or "five invented orders"))
    with world.one_signal_ends_it(), ExitStack() as place, ExitStack() as staff:
        story = _play(settings, url, wanted, place, staff)
        invariants = check(wanted, read(story.engine, story.stage), story.seen_before, story.refused())
    _conclude(settings, story, invariants)


def _play(
    settings: Settings, url: URL | None, orders: list[Order], place: ExitStack, staff: ExitStack
) -> Story:
    couriers = hire(staff)  # they start while the tables are made; they go before the tables do
    staff.callback(world.ignore_signals)
    stage, engine = world.borrowed(url, settings.schema, place) if url else world.temporary(place)
    story = Story(stage, engine, orders, _teller(settings, orders[0].id))
    try:
        story.play(*couriers)
    except CourierFailed as error:
        raise Refusal(redacted(str(error), stage.url)) from None
    return story


def _teller(settings: Settings, first: str) -> Callable[[Moment], None]:
    """Prints the timeline as it happens; of a long list of orders only the start is told."""
    out, told = console(), 0

    def tell(moment: Moment) -> None:
        nonlocal told
        if moment.event == "claimed" and moment.order != first:
            return  # its completion tells the same
        told += moment.who == "B"
        if moment.who == "B" and told > _TOLD:
            if told == _TOLD + 1:
                out.print(" " * _INDENT + "… and so on with the rest")
            return
        out.print(_line(moment, out))

    return (lambda moment: None) if settings.json else tell


def _line(moment: Moment, out: Console) -> Text:
    fence = f"fence {moment.fence}" if moment.fence else ""
    head = f"{moment.at:5.2f} s  {moment.who:<4}  {fence:<7}  "
    text = textwrap.fill(
        safe(moment.text),
        width=min(out.width, 110),
        initial_indent=head,
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
    )
    return Text(text, style=_STYLES.get(moment.event, _STYLES.get(moment.who, "")))


def _conclude(settings: Settings, story: Story, invariants: Sequence[Invariant]) -> None:
    holds = all(invariant.holds for invariant in invariants)
    facts = {
        "ok": holds,
        "orders": len(story.orders),
        "timeline": [asdict(moment) for moment in story.moments],
        "invariants": [asdict(invariant) for invariant in invariants],
    }
    emit(settings, facts, lambda: _print(invariants, holds))
    if not holds:
        raise click.exceptions.Exit(REFUSED)


def _print(invariants: Sequence[Invariant], holds: bool) -> None:
    out = console()
    out.print("\nRead from the database afterwards:")
    for invariant in invariants:
        style, mark = ("green", "holds ") if invariant.holds else ("bold red", "BROKEN")
        out.print(Text.assemble(("  " + mark, style), f"  {invariant.name}"))
        out.print(Text(f"          {safe(invariant.found)}", style="dim"))
    out.print(Text("\nAll invariants hold." if holds else "\nNot all invariants hold.", style="bold"))
