"""``outbox``: look at events, set them aside, let them be sent after all, forget what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import click

from fencedjobs.cli import decisions, reads
from fencedjobs.cli.database import looking, open_engine, open_store
from fencedjobs.cli.output import brief, console, emit, iso, jsonable, print_record, table
from fencedjobs.cli.params import instant
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import Refusal
from fencedjobs.models import OutboxEvent, tables
from fencedjobs.values import EventState

_EXCERPT: Final = 100  # characters in a list of why an event was not sent
_BATCH: Final = 1000


@click.group()
def outbox() -> None:
    """List, show, quarantine, requeue or purge events."""


@outbox.command("list")
@click.option("--lane", help="Only this lane.")
@click.option("--state", type=click.Choice([str(state) for state in EventState]), help="Only this state.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True)
@common
@pass_settings
def list_(settings: Settings, lane: str | None, state: str | None, limit: int) -> None:
    """List events, the newest first.

    With --state pending they stand in the order in which they are sent.
    """
    engine = open_engine(settings)
    events = tables(settings.schema)[OutboxEvent.__tablename__]
    with looking(engine, settings) as connection:
        rows = reads.events(connection, events, lane=lane, state=state, limit=limit + 1)
    shown = rows[:limit]
    emit(settings, [jsonable(row._asdict()) for row in shown], lambda: _print_list(shown))
    if len(rows) > limit:
        these = "first" if state == EventState.PENDING else "newest"
        click.echo(f"There are more; these are the {these} {limit} (--limit).", err=True)


@outbox.command()
@click.argument("event_id", metavar="ID")
@common
@pass_settings
def show(settings: Settings, event_id: str) -> None:
    """Show everything about event ID."""
    event = open_store(settings).outbox.get(event_id)
    if event is None:
        raise Refusal(f"there is no event {event_id!r}")
    facts = jsonable(asdict(event))
    emit(settings, facts, lambda: print_record(facts, as_json=("payload", "headers")))


@outbox.command()
@decisions.ids
@decisions.reason("event")
@common
@pass_settings
def quarantine(settings: Settings, ids: Sequence[str], reason: str) -> None:
    """Set pending events aside.

    Their lanes go on without them, until a person requeues them. One that is being sent at this
    moment may arrive all the same.
    """
    verbs = open_store(settings).outbox

    def act(event_id: str) -> dict[str, Any]:
        return {"changed": verbs.quarantine(event_id, reason)}

    decisions.each(settings, ids, "event", "quarantined", act, verbs.get)


@outbox.command()
@decisions.ids
@decisions.reason("event")
@decisions.by("event")
@decisions.mended("event")
@common
@pass_settings
def requeue(settings: Settings, ids: Sequence[str], reason: str, by: str | None, payload: str | None) -> None:
    """Let quarantined events be sent after all.

    Under their ids, with fresh attempts, and at their old places in the order of their lanes: says how
    many pending ones are ahead. What was added after them may have been sent before.
    """
    mended = decisions.mending(payload, ids, "event")
    person, verbs = decisions.who(by), open_store(settings).outbox

    def act(event_id: str) -> dict[str, Any]:
        ahead = verbs.requeue(event_id, by=person, reason=reason, **mended)
        return {"changed": ahead is not None, "ahead": ahead, "told": f", {_place(ahead)} in its lane"}

    decisions.each(settings, ids, "event", "requeued", act, verbs.get)


@outbox.command()
@click.option("--before", callback=instant, metavar="INSTANT", required=True,
              help="Unix seconds, or ISO 8601 with a time zone.")  # fmt: skip
@common
@pass_settings
def purge(settings: Settings, before: float) -> None:
    """Delete events that were sent before INSTANT.

    Their ids are forgotten: to add one again would send it again.
    """
    verbs = open_store(settings).outbox
    purged = 0
    while deleted := verbs.purge(before=before, limit=_BATCH):
        purged += deleted
    emit(settings, {"purged": purged}, lambda: click.echo(f"{purged} events deleted"))


def _place(ahead: int | None) -> str:
    return f"behind {ahead} pending ones" if ahead else "first"


def _print_list(rows: Sequence[Any]) -> None:
    headings = ["id", "lane", "state", "attempts", "added", "sent, or why not"]
    cells = [[r.id, r.lane, r.state, r.attempts, iso(r.created_at), _outcome(r)] for r in rows]
    if not cells:
        console().print("No events.")
        return
    console().print(table(headings, cells, right=["attempts"], whole=["state", "added"]))


def _outcome(row: Any) -> str | None:
    if row.sent_at is not None:
        return iso(row.sent_at)
    words = ": ".join(filter(None, (row.reason, brief(row.last_error or ""))))
    return words[: _EXCERPT - 1] + "…" if len(words) > _EXCERPT else words or None
