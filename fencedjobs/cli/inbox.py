"""``inbox``: what came in, what came again, and forgetting what no sender repeats any more."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from fencedjobs.cli.database import open_store
from fencedjobs.cli.output import console, emit, table
from fencedjobs.cli.params import span
from fencedjobs.cli.settings import Settings, common, pass_settings

_BATCH: Final = 1000


@click.group()
def inbox() -> None:
    """Count or purge received messages."""


@inbox.command()
@common
@pass_settings
def stats(settings: Settings) -> None:
    """Count the messages, the duplicates of them, and the conflicts.

    A duplicate came again and was acknowledged without effect. A conflict came under a known id with
    another payload, and changed nothing: somebody has to look.
    """
    facts = asdict(open_store(settings).inbox.stats())
    emit(
        settings,
        facts,
        lambda: console().print(table(list(facts), [list(facts.values())], right=list(facts))),
    )


@inbox.command()
@click.option("--older-than", callback=span, metavar="SPAN", required=True,
              help="Such as 30d, 12h, 45min or 90s.")  # fmt: skip
@common
@pass_settings
def purge(settings: Settings, older_than: float) -> None:
    """Forget messages that were received more than SPAN ago.

    One that is forgotten and comes again is new, and takes effect again: keep them for longer than
    any sender retries.
    """
    verbs = open_store(settings).inbox
    purged = 0
    while forgotten := verbs.purge(older_than, _BATCH):
        purged += forgotten
    emit(settings, {"purged": purged}, lambda: click.echo(f"{purged} messages forgotten"))
