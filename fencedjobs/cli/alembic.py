"""``alembic new``: a revision in the host's own history that makes our tables, or brings them up to date."""

from __future__ import annotations

import ast
import inspect
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fencedjobs import schema
from fencedjobs.cli.output import emit
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import Misuse, Refusal

if TYPE_CHECKING:
    from alembic.script import Script, ScriptDirectory


@click.group(name="alembic")
def alembic() -> None:
    """Our tables in your app's own Alembic history."""


@alembic.command()
@click.option("-c", "--config", "path", default="alembic.ini", metavar="FILE", show_default=True,
              type=click.Path(dir_okay=False, path_type=Path),
              help="Your Alembic configuration.")  # fmt: skip
@click.option("-m", "--message", metavar="TEXT", help="What the revision is called.")
@click.option(
    "--head", default="head", metavar="REVISION", help="What it comes after, if there are several heads."
)
@click.option("--since", type=click.Choice(["base", *schema.REVISIONS]),
              help="What your history makes already, if that cannot be read from its files.")  # fmt: skip
@common
@pass_settings
def new(settings: Settings, path: Path, message: str | None, head: str, since: str | None) -> None:
    """Write a revision that makes the tables of this release.

    It comes after the head of your history, and goes on from what an earlier one has made. Nothing is
    connected to: run it by `alembic upgrade head`.
    """
    from alembic.util import CommandError

    try:
        scripts = _scripts(path)
        have = since or _made(scripts, settings.schema)
        if have == schema.HEAD:
            raise Refusal(f"your history makes revision {have} already, the newest of this release")
        script = _write(scripts, head, message, _call(have, settings.schema))
    except CommandError as error:
        raise Misuse(f"Alembic said: {error}") from None
    made = {"revision": script.revision, "path": script.path, "from": have, "to": schema.HEAD}
    emit(settings, made, lambda: click.echo(f"{script.path}: {have} -> {schema.HEAD}"))


def _scripts(path: Path) -> ScriptDirectory:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    if not path.exists():
        raise Misuse(
            f"there is no file {path}\nHint: run it in the folder of your alembic.ini, or give -c FILE"
        )
    project = path.parent / "pyproject.toml"  # where Alembic 1.16 and later keep a part of it
    also: dict[str, Any] = (
        {"toml_file": str(project)} if "toml_file" in inspect.signature(Config).parameters else {}
    )
    return ScriptDirectory.from_config(Config(str(path), cmd_opts=Namespace(quiet=True), **also))


def _made(scripts: ScriptDirectory, placed: str | None) -> str:
    """Up to which of our revisions the history goes."""
    found = ["base"]
    for script in scripts.walk_revisions():
        for revision in _named_in(script, placed):
            if revision is None:
                raise Refusal(
                    f"{script.path} calls schema.up() without a revision, so that nobody can know what it "
                    "made\nHint: write it there, or give --since"
                )
            found.append(revision)
    return max(found, key=["base", *schema.REVISIONS].index)


def _named_in(script: Script, placed: str | None) -> Iterator[str | None]:
    """The revisions of ours that this file of the host's makes in that schema."""
    for node in ast.walk(ast.parse(Path(script.path).read_text(encoding="utf-8"))):
        if not (
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("schema.up", "fencedjobs.schema.up")
        ):
            continue
        given = {word.arg: _literal(word.value) for word in node.keywords}
        if given.get("schema") == placed:
            named = _literal(node.args[0]) if node.args else given.get("revision")
            yield named if named in schema.REVISIONS else None


def _literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _call(have: str, placed: str | None) -> str:
    given = [repr(schema.HEAD)]
    if have != "base":
        given.append(f"since={have!r}")
    if placed is not None:
        given.append(f"schema={placed!r}")
    return ", ".join(given).replace("'", '"')


def _write(scripts: ScriptDirectory, head: str, message: str | None, given: str) -> Script:
    from alembic.util import rev_id

    script = scripts.generate_revision(
        rev_id(), message or f"fencedjobs {schema.HEAD}", head=head, refresh=True,
        imports="from fencedjobs import schema",
        upgrades=f"schema.up({given})", downgrades=f"schema.down({given})",
    )  # fmt: skip
    assert script is not None
    written = Path(script.path)
    if f"schema.down({given})" not in written.read_text(encoding="utf-8"):
        written.unlink()
        raise Refusal(
            "your script.py.mako has no ${upgrades} and ${downgrades}, as the one for several databases has\n"
            f"Hint: write one that imports fencedjobs.schema and calls schema.up({given}) and .down({given})"
        )
    return script
