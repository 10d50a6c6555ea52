"""``jobs requeue --all``: many jobs at once, in short transactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import click

from fencedjobs.cli import reads
from fencedjobs.cli.database import looking, open_engine
from fencedjobs.cli.output import console, emit, table
from fencedjobs.cli.settings import Settings
from fencedjobs.jobs import JoinedJobs
from fencedjobs.models import Job, tables
from fencedjobs.store import Store
from fencedjobs.values import JobState

STATES: Final = (JobState.QUARANTINED, JobState.CANCELLED)


def wanted(queue: str | None, text: str | None, state: str | None) -> reads.SetAside:
    """Which jobs, as the options say."""
    return reads.SetAside(JobState(state or JobState.QUARANTINED), queue, text)


def requeue(settings: Settings, which: reads.SetAside, *, by: str, reason: str, dry_run: bool) -> None:
    """Requeue them, a transaction for each batch, and say how many; or list them."""
    engine, jobs = open_engine(settings), tables(settings.schema)[Job.__tablename__]
    store, found, requeued = Store(engine, schema=settings.schema), list[Any](), 0
    with looking(engine, settings) as connection:
        for batch in reads.set_aside(connection, jobs, which):
            if dry_run:
                found += batch
            elif batch:
                requeued += _requeued(store, batch, by, reason)
    if dry_run:
        emit(settings, [_facts(row) for row in found], lambda: _print(found))
    else:
        emit(settings, {"requeued": requeued}, lambda: click.echo(f"{_jobs(requeued)} requeued"))


def _requeued(store: Store, batch: Sequence[Any], by: str, reason: str) -> int:
    """How many there were: a job that has moved on since it was read is left alone."""
    return store.run(
        lambda tx: sum(
            JoinedJobs(tx).requeue(row.id, by=by, reason=reason, seen=(row.state, row.fence)) for row in batch
        ),
        subject=[row.id for row in batch],
    )


def _facts(row: Any) -> dict[str, Any]:
    names = ("id", "queue", "kind", "state", "attempts", "fence", "reason")
    return {**{name: getattr(row, name) for name in names}, "error": reads.last_error(row.errors)}


def _print(found: Sequence[Any]) -> None:
    facts = [_facts(row) for row in found]
    if facts:
        right = ["attempts", "fence"]
        console().print(table(list(facts[0]), [list(one.values()) for one in facts], right=right))
    click.echo(f"{_jobs(len(facts))} would be requeued", err=True)


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"
