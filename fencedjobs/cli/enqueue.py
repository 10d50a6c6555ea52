"""``enqueue``: jobs from a file of JSON lines, in batches, as often as one likes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, Final

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from sqlalchemy.exc import SQLAlchemyError

from fencedjobs.cli.database import looking, open_engine
from fencedjobs.cli.lines import as_job, numbered, parsed
from fencedjobs.cli.output import console, emit, safe
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import REFUSED, Refusal
from fencedjobs.enqueue import ARGUMENTS, new_job
from fencedjobs.errors import FencedJobsError, InvalidValue
from fencedjobs.store import Store

_BATCH_LINES: Final = 500
_BATCH_BYTES: Final = 1024 * 1024  # MariaDB takes 16 MB in one packet, and text grows when it is quoted
_SPOOLED: Final = 8 * 1024 * 1024
_ARGUMENTS: Final = frozenset(ARGUMENTS)


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("--strict", is_flag=True, help="Check the file first; with one bad line nothing is written.")
@common
@pass_settings
def enqueue(settings: Settings, file: BinaryIO, strict: bool) -> None:
    """Enqueue the jobs of FILE, one JSON object per line.

    FILE '-' is stdin. Each object has arguments of enqueue: id, payload, kind, queue, key, priority,
    run_at or delay, deadline, max_attempts. Instants are Unix seconds or ISO 8601 with a time zone, a
    delay is in seconds. A job whose id exists is left as it is, so a file may be enqueued again after
    an error; lines without an id make new jobs each time. Bad lines are reported by number and
    skipped, and the exit code is 1.
    """
    engine = open_engine(settings)
    with looking(engine, settings):
        pass  # no half an hour of reading before it turns out that the tables are missing
    work = _Work(Store(engine, schema=settings.schema), strict, quiet=settings.json)
    if strict:
        file = _rewindable(file)
        for _ in _jobs(file, work):
            pass
        file.seek(0)
    with _progress(file, work) as shown:
        _write(shown, work)
    emit(settings, work.facts(), lambda: click.echo(work.summary()))
    if work.bad:
        raise click.exceptions.Exit(REFUSED)


@dataclass
class _Work:
    """What has been done so far."""

    store: Store
    strict: bool
    quiet: bool
    new: int = 0
    existed: int = 0
    bad: list[_Bad] = field(default_factory=list)
    written: int = 0  # the last line of which everything up to it is dealt with
    tried: int = 0  # the last line of the batch that is, or was, being written
    out: Any = field(default_factory=lambda: console(stderr=True))

    def refuse(self, line: int, reason: str) -> None:
        """Report a bad line; with ``strict`` it is the end."""
        if self.strict:
            done = (
                f"lines up to {self.written} are enqueued"
                if self.written
                else "nothing of the file is written"
            )
            raise Refusal(f"line {line}: {safe(reason)}; {done}")
        self.bad.append(_Bad(line, reason))
        if not self.quiet:
            self.out.print(f"line {line}: {safe(reason)}", soft_wrap=True)

    def write(self, batch: list[dict[str, Any]], line: int) -> None:
        """Enqueue a batch that ends with this line."""
        self.tried = line
        created = len(self.store.enqueue_many(batch)) if batch else 0
        self.new += created
        self.existed += len(batch) - created
        self.written = line

    def summary(self) -> str:
        return f"{self.new} new, {self.existed} existed, {len(self.bad)} bad"

    def facts(self) -> dict[str, Any]:
        return {"new": self.new, "existed": self.existed, "bad": [asdict(bad) for bad in self.bad]}


@dataclass
class _Bad:
    line: int
    reason: str


def _write(lines: Iterator[tuple[int, int, dict[str, Any]]], work: _Work) -> None:
    """Batch by batch, each a transaction. Whatever ends it early, it says how far it came."""
    batch: list[dict[str, Any]] = []
    size = number = 0
    try:
        for number, length, job in lines:
            batch.append(job)
            size += length
            if len(batch) == _BATCH_LINES or size >= _BATCH_BYTES:
                work.write(batch, number)
                batch, size = [], 0
        work.write(batch, number)
    except (FencedJobsError, SQLAlchemyError, KeyboardInterrupt):
        maybe = f", perhaps up to {work.tried}" if work.tried > work.written else ""
        work.out.print(
            f"Stopped: lines up to {work.written}{maybe} are enqueued ({work.summary()}).", soft_wrap=True
        )
        raise


def _jobs(stream: BinaryIO, work: _Work) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The good lines: number, length, arguments of enqueue."""
    for number, line in numbered(stream):
        if not line.strip():
            continue
        try:
            job = as_job(parsed(line, first=number == 1), _ARGUMENTS)
            new_job(ARGUMENTS | job)  # the check of the verb, which names items by their place in a batch
            yield number, len(line), job
        except (InvalidValue, ValueError) as error:
            work.refuse(number, str(error))


# --- the file -------------------------------------------------------------------------------------


def _rewindable(stream: BinaryIO) -> BinaryIO:
    """The stream itself if it can be read twice, else a copy of it."""
    if stream.seekable():
        return stream
    copy = tempfile.SpooledTemporaryFile(_SPOOLED)  # noqa: SIM115 - closed with the command
    click.get_current_context().call_on_close(copy.close)
    while block := stream.read(1024 * 1024):
        copy.write(block)
    copy.seek(0)
    return copy  # type: ignore[return-value]


@contextmanager
def _progress(file: BinaryIO, work: _Work) -> Iterator[Iterator[tuple[int, int, dict[str, Any]]]]:
    """The good lines, with a bar on a terminal for what is read of the file."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    quiet = not work.out.is_terminal
    with Progress(*columns, console=work.out, transient=True, disable=quiet) as bar:
        task = bar.add_task("enqueue", total=_size(file))

        def lines() -> Iterator[tuple[int, int, dict[str, Any]]]:
            for number, length, job in _jobs(file, work):
                bar.update(task, advance=length, description=f"line {number}")
                yield number, length, job

        yield lines()


def _size(file: BinaryIO) -> int | None:
    """How long the file is, if it is one that has a length."""
    try:
        return os.fstat(file.fileno()).st_size or None
    except (OSError, AttributeError):
        return None
