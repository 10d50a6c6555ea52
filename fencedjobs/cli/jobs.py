"""``jobs``: look at jobs and decide about single ones."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

import click
from rich.console import Group
from rich.text import Text

from fencedjobs.cli import reads
from fencedjobs.cli.database import looking, open_engine, open_store
from fencedjobs.cli.output import compact, console, emit, exact, iso, safe, table
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import REFUSED, Refusal
from fencedjobs.models import Job, tables
from fencedjobs.store import Store
from fencedjobs.values import JobRecord, JobState

_INSTANTS: Final = ("until", "deadline", "created_at", "finished_at", "time")
_BY_HAND: Final = "by hand"


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
    emit(settings, [_jsonable(row._asdict()) for row in shown], lambda: _print_list(shown))
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
    emit(settings, _jsonable(asdict(job)), lambda: _print_job(job))


@jobs.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@common
@pass_settings
def cancel(settings: Settings, ids: Sequence[str]) -> None:
    """Cancel jobs that are not done; the completion of one that is being worked on will be refused."""
    store = open_store(settings)
    _each(settings, store, ids, "cancelled", store.cancel)


@jobs.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--reason", default=_BY_HAND, show_default=True, help="Why; kept with the job.")
@common
@pass_settings
def quarantine(settings: Settings, ids: Sequence[str], reason: str) -> None:
    """Set jobs aside until a person requeues or cancels them."""
    store = open_store(settings)
    _each(settings, store, ids, "quarantined", lambda each: store.quarantine(each, reason))


@jobs.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--reason", default=_BY_HAND, show_default=True, help="Why; kept with the job.")
@click.option("--by", help="Who; kept with the job.  [default: user@host]")
@click.option("--payload", metavar="JSON", help="A mended payload, for a single job.")
@common
@pass_settings
def requeue(settings: Settings, ids: Sequence[str], reason: str, by: str | None, payload: str | None) -> None:
    """Make quarantined or cancelled jobs ready again, with fresh attempts and the fence they have."""
    if payload is not None and len(ids) > 1:
        raise click.UsageError("--payload is for a single job")
    mended = {} if payload is None else {"payload": _json(payload)}
    who = by or _whoami()
    store = open_store(settings)
    _each(settings, store, ids, "requeued", lambda each: store.requeue(each, by=who, reason=reason, **mended))


def _each(
    settings: Settings, store: Store, ids: Sequence[str], verb: str, act: Callable[[str], bool]
) -> None:
    """Do it to each, say what became of each, and end with 1 if one was refused."""
    answers = [_answer(store, each, act) for each in dict.fromkeys(ids)]
    emit(settings, answers, lambda: _print_answers(answers, verb))
    if not all(answer["changed"] for answer in answers):
        raise click.exceptions.Exit(REFUSED)


def _answer(store: Store, job_id: str, act: Callable[[str], bool]) -> dict[str, Any]:
    changed = act(job_id)
    job = store.get(job_id)
    return {"id": job_id, "changed": changed, "state": str(job.state) if job else None}


def _print_answers(answers: Sequence[dict[str, Any]], verb: str) -> None:
    for answer in answers:
        if answer["changed"]:
            click.echo(f"{safe(answer['id'])}: {verb}")
        elif answer["state"]:
            click.echo(f"{safe(answer['id'])}: not {verb}, it is {answer['state']}", err=True)
        else:
            click.echo(f"{safe(answer['id'])}: there is no such job", err=True)


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


def _print_job(job: JobRecord) -> None:
    facts = _jsonable(asdict(job))
    lists = {name: facts.pop(name) for name in ("errors", "requeues")}
    width = max(map(len, facts))
    for name in ("payload", "result"):
        facts[name] = compact(facts[name])
    out = console()
    for name, value in facts.items():
        out.print(Text(f"{name:<{width}}  {safe(value)}"))
    for name, entries in lists.items():
        out.print(Text(f"{name:<{width}}  {'' if entries else 'none'}".rstrip()))
        if entries:
            out.print(Group(table(list(entries[0]), [list(entry.values()) for entry in entries])))


def _jsonable(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with instants as text; `until` 0 is no instant, but the mark of a job without one."""
    made = {}
    for name, value in facts.items():
        if name in _INSTANTS:
            value = exact(value or None if name == "until" else value)
        elif isinstance(value, tuple):
            value = [_jsonable(entry) for entry in value]
        made[name] = value
    return made


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--payload is not JSON: {error}") from None


def _whoami() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a container without a user database
        return f"unknown@{socket.gethostname()}"
