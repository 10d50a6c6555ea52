"""``jobs``: look at jobs and decide about single ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import click

from fencedjobs.cli import bulk, decisions, reads
from fencedjobs.cli.database import looking, open_engine, open_store
from fencedjobs.cli.output import console, emit, iso, jsonable, print_record, table
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import Refusal
from fencedjobs.models import Job, tables
from fencedjobs.store import Store
from fencedjobs.values import JobState


@click.group()
def jobs() -> None:
    """List, show, cancel, quarantine or requeue jobs."""


@jobs.command("list")
@click.option("--queue", help="Only this queue.")
@click.option("--state", type=click.Choice([str(state) for state in JobState]), help="Only this state.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True)
@common
@pass_settings
def list_(settings: Settings, queue: str | None, state: str | None, limit: int) -> None:
    """List jobs, the newest first."""
    engine = open_engine(settings)
    table = tables(settings.schema)[Job.__tablename__]
    with looking(engine, settings) as connection:
        rows = reads.latest(connection, table, queue=queue, state=state, limit=limit + 1)
    shown = rows[:limit]
    emit(settings, [jsonable(row._asdict()) for row in shown], lambda: _print_list(shown))
    if len(rows) > limit:
        click.echo(f"There are more; these are the newest {limit} (--limit).", err=True)


@jobs.command()
@click.argument("job_id", metavar="ID")
@common
@pass_settings
def show(settings: Settings, job_id: str) -> None:
    """Show everything about job ID, its errors and requeues included."""
    job = open_store(settings).get(job_id)
    if job is None:
        raise Refusal(f"there is no job {job_id!r}")
    facts = jsonable(asdict(job))
    emit(settings, facts, lambda: print_record(facts, as_json=("payload", "progress", "result")))


@jobs.command()
@decisions.ids
@common
@pass_settings
def cancel(settings: Settings, ids: Sequence[str]) -> None:
    """Cancel jobs that are not done; the completion of one that is being worked on will be refused."""
    store = open_store(settings)
    _each(settings, store, ids, "cancelled", store.cancel)


@jobs.command()
@decisions.ids
@decisions.reason("job")
@common
@pass_settings
def quarantine(settings: Settings, ids: Sequence[str], reason: str) -> None:
    """Set jobs aside until a person requeues or cancels them."""
    store = open_store(settings)
    _each(settings, store, ids, "quarantined", lambda one: store.quarantine(one, reason))


@jobs.command()
@click.argument("ids", metavar="[ID...]", nargs=-1)
@click.option("--all", "all_", is_flag=True, help="All quarantined jobs, or those that the next options say.")
@click.option("--queue", help="With --all: only this queue.")
@click.option("--error-like", "text", metavar="TEXT",
              help="With --all: only those with this text in their reason or last error.")  # fmt: skip
@click.option("--state", type=click.Choice([str(state) for state in bulk.STATES]),
              help="With --all: jobs in this state.  [default: quarantined]")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="With --all: only list them.")
@decisions.reason("job")
@decisions.by("job")
@decisions.mended("job")
@common
@pass_settings
def requeue(
    settings: Settings, /, ids: Sequence[str], all_: bool, reason: str, by: str | None, payload: str | None,
    dry_run: bool, **only: str | None,
) -> None:  # fmt: skip
    """Make quarantined or cancelled jobs ready again, with fresh attempts and the fence they have."""
    if all_:
        if ids or payload is not None:
            raise click.UsageError("--all goes without IDs and without --payload")
        bulk.requeue(settings, bulk.wanted(**only), by=decisions.who(by), reason=reason, dry_run=dry_run)
        return
    if not ids or dry_run or any(only.values()):
        raise click.UsageError(
            "name the jobs, or say --all; --queue, --error-like, --state, --dry-run go with it"
        )
    mended = decisions.mending(payload, ids, "job")
    person, store = decisions.who(by), open_store(settings)
    _each(
        settings, store, ids, "requeued", lambda one: store.requeue(one, by=person, reason=reason, **mended)
    )


def _each(
    settings: Settings, store: Store, ids: Sequence[str], verb: str, act: Callable[[str], bool]
) -> None:
    decisions.each(settings, ids, "job", verb, lambda one: {"changed": act(one)}, store.get)


def _print_list(rows: Sequence[Any]) -> None:
    headings = ["id", "queue", "kind", "state", "priority", "attempts", "fence", "owner", "until", "enqueued"]
    cells = [
        [r.id, r.queue, r.kind or None, r.state, r.priority, f"{r.attempts}/{r.max_attempts}", r.fence,
         r.owner, iso(r.until or None), iso(r.created_at)]
        for r in rows
    ]  # fmt: skip
    if not cells:
        console().print("No jobs.")
        return
    console().print(table(headings, cells, right=["priority", "attempts", "fence"]))
