"""``status``: how many jobs and events wait, run, are done or need a person, and what is about to happen."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import click
from rich.console import Console

from fencedjobs.cli import reads
from fencedjobs.cli.database import looking, open_engine
from fencedjobs.cli.output import console, emit, exact, span, table
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.models import Job, tables
from fencedjobs.store import Store
from fencedjobs.values import JobState, LaneStats

STATES: Final = [str(state) for state in JobState if state is not JobState.PURGED]
_LEASE: Final = ("id", "queue", "owner", "fence", "attempt")
_LANE: Final = ("pending", "attempts", "sent", "quarantined")


@click.command()
@click.option("--leases", type=click.IntRange(0, 1000), default=5, show_default=True,
              help="How many of the leases that run out soonest.")  # fmt: skip
@common
@pass_settings
def status(settings: Settings, leases: int) -> None:
    """Count jobs, events and messages.

    Per queue the jobs by state and the one that waits longest; the leases that run out soonest. Per
    lane of the outbox what is pending, how long the oldest has waited, the most attempts that one of
    them has had, what is sent and what is quarantined. Of the inbox messages, duplicates, conflicts.
    """
    engine = open_engine(settings)
    jobs = tables(settings.schema)[Job.__tablename__]
    store = Store(engine, schema=settings.schema)
    counts, now = store.counts(), store.now()
    with looking(engine, settings) as connection:
        oldest = reads.oldest_waiting(connection, jobs, now)
        ending = reads.ending_leases(connection, jobs, leases)
    facts = {
        "now": exact(now),
        "queues": [_queue(name, counts[name], oldest.get(name), now) for name in sorted(counts)],
        "leases": [_lease(row, now) for row in ending],
        "lanes": [_lane(name, lane) for name, lane in sorted(store.outbox.stats().items())],
        "inbox": asdict(store.inbox.stats()),
    }
    emit(settings, facts, lambda: _print(facts))


def _queue(name: str, counts: Any, oldest: Any, now: float) -> dict[str, Any]:
    waiting = oldest and {
        "id": oldest.id, "state": oldest.state, "since": exact(oldest.since),
        "seconds": max(0.0, now - oldest.since),
    }  # fmt: skip
    return {
        "queue": name,
        "counts": {state: counts.get(JobState(state), 0) for state in STATES},
        "oldest_waiting": waiting or None,
    }


def _lease(row: Any, now: float) -> dict[str, Any]:
    return {
        "id": row.id, "queue": row.queue, "owner": row.owner, "fence": row.fence, "attempt": row.attempts,
        "until": exact(row.until), "seconds": row.until - now,
    }  # fmt: skip


def _lane(name: str, lane: LaneStats) -> dict[str, Any]:
    return {
        "lane": name, "pending": lane.pending, "oldest_seconds": lane.oldest, "attempts": lane.attempts,
        "sent": lane.sent, "quarantined": lane.quarantined,
    }  # fmt: skip


def _print(facts: dict[str, Any]) -> None:
    out = console()
    if not facts["queues"]:
        out.print("No jobs.")
    for part in (_print_queues, _print_leases, _print_lanes, _print_inbox):
        part(out, facts)


def _print_queues(out: Console, facts: dict[str, Any]) -> None:
    queues = facts["queues"]
    if queues:
        out.print(
            table(["queue", *STATES], [[q["queue"], *q["counts"].values()] for q in queues], right=STATES)
        )
    waiting = [[q["queue"], *_waiting(q["oldest_waiting"])] for q in queues if q["oldest_waiting"]]
    if waiting:
        out.print("\nOldest waiting:")
        out.print(table(["queue", "job", "state", "waits for"], waiting))


def _print_leases(out: Console, facts: dict[str, Any]) -> None:
    if facts["leases"]:
        out.print("\nLeases running out soonest:")
        ends = [[*(lease[name] for name in _LEASE), _end(lease)] for lease in facts["leases"]]
        out.print(table(["job", *_LEASE[1:], "runs out"], ends, right=["fence", "attempt"]))


def _print_lanes(out: Console, facts: dict[str, Any]) -> None:
    if facts["lanes"]:
        out.print("\nOutbox:")
        cells = [
            [lane["lane"], lane["pending"], _age(lane["oldest_seconds"]), *(lane[n] for n in _LANE[1:])]
            for lane in facts["lanes"]
        ]
        out.print(table(["lane", "pending", "oldest waits for", *_LANE[1:]], cells, right=_LANE))


def _print_inbox(out: Console, facts: dict[str, Any]) -> None:
    if any(facts["inbox"].values()):
        out.print("\nInbox:")
        out.print(table(list(facts["inbox"]), [list(facts["inbox"].values())], right=list(facts["inbox"])))


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else span(seconds)


def _waiting(oldest: dict[str, Any]) -> tuple[str, str, str]:
    return oldest["id"], oldest["state"], span(oldest["seconds"])


def _end(lease: dict[str, Any]) -> str:
    left = lease["seconds"]
    return f"in {span(left)}" if left > 0 else f"ran out {span(left)} ago, free to claim"
