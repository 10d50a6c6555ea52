"""``work``: run a worker of the app's, until it is told to stop."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import sys
from typing import Any, Final

import click
from sqlalchemy.util import greenlet_spawn

from fencedjobs.cli.output import exact, safe
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import Misuse
from fencedjobs.errors import InvalidValue
from fencedjobs.worker import Worker, WorkerBase

_OPTIONS: Final = {"queues": "--queues", "concurrency": "--concurrency"}
_LINE: Final = "%(asctime)s %(levelname)-7s %(message)s"


@click.command()
@click.argument("target", metavar="MODULE:WORKER")
@click.option("--queues", metavar="A,B", help="Instead of the worker's own; earlier ones go first.")
@click.option(
    "--concurrency", type=int, metavar="N", help="How many handlers at once, instead of the worker's."
)
@click.option("--until-empty", is_flag=True, help="End when nothing is left to claim and no handler runs.")
@click.option("-v", "--verbose", is_flag=True, help="Tell of claims, too.")
@common
@pass_settings
def work(
    settings: Settings,
    target: str,
    queues: str | None,
    concurrency: int | None,
    until_empty: bool,
    verbose: bool,
) -> None:
    """Run the worker that MODULE calls WORKER, as in: fencedjobs work shop.jobs:worker

    The module is imported as Python would from the current folder. The worker's own store says which
    database it is, so there is no --url. Ctrl-C or SIGTERM let it finish: it claims no more, waits as
    long as its grace says, and gives the rest back without charging the attempt; then the exit code
    is 0. A second Ctrl-C does not wait.

    What happens is logged to stderr, unless the module has set up logging; with --json it goes to
    stdout, an object per line.
    """
    if settings.url or settings.schema:
        raise Misuse(
            "--url and --schema are not for `work`: the worker's own store says which database it is"
        )
    _log(settings, verbose)
    worker = _loaded(target)
    try:
        worker.limit(
            queues=None if queues is None else [name.strip() for name in queues.split(",")],
            concurrency=concurrency,
        )
        completed = _run(worker, until_empty)
    except InvalidValue as error:
        raise Misuse(f"{_OPTIONS.get(error.field, error.field)}: {error.problem}") from None
    if not settings.json:
        click.echo(f"{completed} completed")


def _run(worker: WorkerBase, until_empty: bool) -> int:
    if isinstance(worker, Worker):
        return worker.run(until_empty=until_empty)
    return asyncio.run(_run_async(worker, until_empty))


async def _run_async(worker: Any, until_empty: bool) -> int:
    """An AsyncWorker (its module needs greenlet, which a sync app may not have)."""
    try:
        completed: int = await worker.run(until_empty=until_empty)
        return completed
    finally:  # the loop ends here, and connections that are still open could not be closed any more
        await greenlet_spawn(worker.engine.dispose)


def _loaded(target: str) -> WorkerBase:
    """The worker that a name stands for."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise Misuse(f"{target!r} must be MODULE:WORKER, as in shop.jobs:worker")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not: its traceback says where
        raise Misuse(f"there is no module {module!r} in the current folder or on the path") from None
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, WorkerBase):
        raise Misuse(f"{target} is no Worker or AsyncWorker, but {type(found).__name__}")
    return found


class _Lines(logging.Handler):
    """What is observed, as a JSON object per line on stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line, unless it is no observation."""
        if hasattr(record, "event"):
            facts: dict[str, Any] = {"at": exact(record.created), "event": record.event, **record.facts}  # type: ignore[attr-defined]
            click.echo(json.dumps(facts, default=str))


class _Plain(logging.Formatter):
    """Without anything that steers the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


def _log(settings: Settings, verbose: bool) -> None:
    log = logging.getLogger("fencedjobs")
    if verbose or log.level == logging.NOTSET:
        log.setLevel(logging.DEBUG if verbose else logging.INFO)
    if settings.json:
        log.addHandler(_Lines())
        log.propagate = False
    elif not logging.getLogger().handlers:
        shown = logging.StreamHandler()
        shown.setFormatter(_Plain(_LINE))
        logging.getLogger().addHandler(shown)
