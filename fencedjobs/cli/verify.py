"""``verify``: the contract, checked on your database, and whether the checks would notice."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fencedjobs.cli.database import open_beside
from fencedjobs.cli.output import console, emit, safe, table
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import REFUSED, Trouble, hush


@click.command()
@click.option("--profile", type=click.Choice(["quick", "ci", "nightly"]), default="quick", show_default=True,
              help="How much is tried: for a look, for each push, or for a night.")  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), metavar="N", help="Make the random parts the same again."
)
@click.option("--faults", is_flag=True, help="Look for each planted fault, too: every one must be caught.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.html",
              help="Write a page, and FILE.json beside it.")  # fmt: skip
@click.option("--verbose", is_flag=True, help="Print which verb has met a lease in which condition, too.")
@common
@pass_settings
def verify(
    settings: Settings, profile: str, seed: int | None, faults: bool, report: Path | None, verbose: bool
) -> None:
    """Check the contract on your database, server and driver.

    Everything happens in a schema of its own (a database on MariaDB, a file on SQLite), which is made
    and dropped; tables that exist are not touched. What was tried is printed with its seed and the
    versions. The exit code is 1 if a stage failed.
    """
    checked = _checker()
    hush()
    engine = open_beside(settings)
    with _progress(settings) as watch:
        verdict = checked.verify(engine, profile=profile, seed=seed, faults=faults, watch=watch)
    if report is not None:
        _write(report, verdict)
    emit(settings, verdict.facts(), lambda: _print(verdict, verbose))
    if not verdict.passed:
        raise click.exceptions.Exit(REFUSED)


def _checker() -> Any:
    try:
        from fencedjobs.testing import verify as checker
    except ModuleNotFoundError as error:
        raise Trouble(
            f"the package {error.name!r} is not installed\nHint: pip install 'fencedjobs[verify]'"
        ) from None
    return checker


@contextmanager
def _progress(settings: Settings) -> Iterator[Any]:
    """Bars on stderr, moved by a thread that looks at what a stage has counted."""
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    over, tasks = threading.Event(), dict[Any, Any]()
    with Progress(*columns, console=console(stderr=True), disable=settings.json) as bars:

        def watch(name: str, effort: Any, total: int) -> None:
            update()
            tasks[bars.add_task(name, total=total)] = (effort, total)

        def update() -> None:
            for task, (effort, total) in list(tasks.items()):
                bars.update(task, completed=min(effort.examples, total))

        def follow() -> None:
            while not over.wait(0.2):
                update()

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            over.set()
            thread.join()
            update()


def _write(report: Path, verdict: Any) -> None:
    from fencedjobs.testing.report import page

    try:
        report.write_text(page(verdict), encoding="utf-8")
        report.with_suffix(".json").write_text(json.dumps(verdict.facts(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise Trouble(f"the report cannot be written: {report}: {error.strerror}") from None


def _print(verdict: Any, verbose: bool) -> None:
    out = console()
    out.print(", ".join(f"{name} {safe(value)}" for name, value in verdict.database.items()), soft_wrap=True)
    rows = [
        [result.stage, result.tried, f"{result.seconds:.1f} s", "passed" if result.passed else "FAILED"]
        for result in verdict.results
    ]
    out.print(table(["stage", "tried", "time", "result"], rows))
    for result in verdict.results:
        if result.story:
            out.print(f"\n{result.stage}: how it failed", style="bold red")
            for line in result.story.splitlines():
                out.print(safe(line), soft_wrap=True)
    if verbose:
        _print_pairs(verdict)
    word = "passed" if verdict.passed else "FAILED"
    out.print(f"{word}: profile {verdict.profile}, seed {verdict.seed}", style="bold")


def _print_pairs(verdict: Any) -> None:
    """How often each verb was called with a lease in each condition."""
    from fencedjobs.testing.pairs import as_table

    out = console()
    for result in verdict.results:
        if result.pairs is not None:
            out.print(f"\n{result.stage}: how often each verb met which lease", style="bold")
            out.print(as_table(result.pairs), soft_wrap=True)
