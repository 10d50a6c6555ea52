"""The lines of a shell block: our own commands are run, of others it is checked that they can be called."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path
from tomllib import loads

import click
from alembic.config import CommandLine

from fencedjobs.cli.app import cli
from tests.cli.helpers import Answer, run
from tests.docs.blocks import ROOT

#: of these it is only checked that they can be called: they run for long, or call on others
LONG = {"work", "relay", "verify", "demo"}

PROJECT = loads((ROOT / "pyproject.toml").read_text())


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a block."""
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                words.append(word)
            elif words:
                yield words
                words = []


def run_command(words: list[str]) -> Answer | None:
    """Run it if it is ours and short; else check that it can be called, which is no answer."""
    program, *arguments = words
    check = _PROGRAMS.get(Path(program).name)
    assert check is not None, f"nobody knows whether {program!r} can be called so"
    check(arguments)
    if Path(program).name != "fencedjobs" or LONG & {*arguments} or "…" in " ".join(arguments):
        return None
    return run(*arguments)


def names_of(group: click.Group, before: str = "") -> Iterator[str]:
    """Every command, as it is called."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from names_of(command, f"{before}{name} ")
        else:
            yield before + name


def check_fencedjobs(arguments: list[str]) -> None:
    """The command is there, and takes what it is given."""
    command: click.Command = cli
    context: click.Context | None = None
    rest, name = arguments, "fencedjobs"
    while True:
        context = command.make_context(name, list(rest), parent=context)
        if not isinstance(command, click.Group):
            return
        found, chosen, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert chosen is not None
        assert found is not None
        name, command = found, chosen


def _check_python(arguments: list[str]) -> None:
    flag, module, *rest = arguments
    assert flag == "-m", f"python {arguments}"
    if module == "pytest":
        _check_pytest(rest)
    elif module != "venv":
        found, asked = import_module(module), StringIO()
        if hasattr(found, "__path__"):  # a package is run by this module of it
            found = import_module(f"{module}.__main__")
        with suppress(SystemExit), redirect_stdout(asked):
            found.main(["--help"])
        told = asked.getvalue()
        assert told, f"{module} has no --help"
        assert {word for word in rest if word.startswith("--") and word not in told} == set()


def _check_pytest(arguments: list[str]) -> None:
    markers = " ".join(PROJECT["tool"]["pytest"]["ini_options"]["markers"])
    for before, word in zip(["", *arguments], arguments, strict=False):
        if before == "-m":
            assert f"{word}:" in markers, f"there is no marker {word!r}"
        elif word.startswith("tests"):
            assert (ROOT / word).exists(), f"there is no {word}"


def _check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    extras = PROJECT["project"]["optional-dependencies"]
    for wanted in arguments[1:]:
        _, _, names = wanted.removesuffix("]").partition("[")
        assert {*filter(None, names.split(","))} <= {*extras}, f"{wanted}: not among our extras"


def _check_alembic(arguments: list[str]) -> None:
    CommandLine(prog="alembic").parser.parse_args(arguments)


_PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "fencedjobs": check_fencedjobs,
    "python": _check_python,
    "python3": _check_python,
    "pip": _check_pip,
    "alembic": _check_alembic,
}
