"""A user's mistakes end in a sentence and an exit code, without a traceback and without a password."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from sqlalchemy import URL

from fencedjobs.cli.app import cli
from tests.cli.helpers import environment, run, spawn, text_of

SECRET = "geh/eim"
QUOTED = "geh%2Feim"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "cannot be read"),
        (f"postgresql+psycopg://u:{QUOTED}@h:port/x", "cannot be read"),
        (f"nonsense://u:{QUOTED}@h/x", "knows no database or driver 'nonsense'"),
        (f"oracle+cx_oracle://u:{QUOTED}@h/x", "is not installed"),
        (f"postgresql+asyncpg://u:{QUOTED}@h/x", "async driver"),
        ("sqlite+aiosqlite:///x.db", "async driver"),
        (f"postgresql+psycopg://u:{QUOTED}@127.0.0.1:1/x", "127.0.0.1"),
        (f"mysql+pymysql://u:{QUOTED}@127.0.0.1:1/x", "127.0.0.1"),
        (f"mysql+pymysql://u:{QUOTED}@127.0.0.1:1/x?nonsense={QUOTED}", "nonsense"),
        ("sqlite:////no/such/folder/x.db", "/no/such/folder/x.db"),
    ],
)
@pytest.mark.parametrize("command", [["status"], ["demo"]])
def test_a_database_that_cannot_be_used_is_3(
    url: str, words: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = run(*command, url=url)
    assert answer.code == 3
    assert words in answer.err
    assert SECRET not in answer.err + answer.out
    assert QUOTED not in answer.err + answer.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_the_wrong_password_is_not_printed(url: URL) -> None:
    answer = run("status", url=url.set(username="nobody-here", password=SECRET))
    assert answer.code == 3
    assert SECRET not in answer.err


def test_the_url_comes_from_the_option_the_environment_or_the_folder(
    url: URL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FENCEDJOBS_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    assert "no database file fencedjobs.db" in run("status").err
    monkeypatch.setenv("FENCEDJOBS_URL", str(url))
    assert run("status").code == 0
    assert run("status", url="sqlite:///missing.db").code == 3
    monkeypatch.delenv("FENCEDJOBS_URL")
    assert run("upgrade").code == 0
    assert (tmp_path / "fencedjobs.db").exists()


def test_common_options_stand_before_or_after_the_command(url: URL) -> None:
    for arguments in (
        ["--json", "--url", str(url), "jobs", "list"],
        ["jobs", "list", "--json", "--url", str(url)],
        ["--json", "jobs", "list", "--url", str(url)],
    ):
        assert run(*arguments).json() == []


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["status", "--nonsense"], ["jobs", "list", "--limit", "0"]]
)
def test_a_wrong_command_line_is_2(arguments: list[str]) -> None:
    assert run(*arguments).code == 2


def test_help_documents_the_exit_codes() -> None:
    answer = run("--help")
    assert answer.code == 0
    for code in ("0", "1", "2", "3", "130"):
        assert f"\n    {code} " in answer.out


def every(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands below this one, by the words that call them."""
    for word, each in getattr(command, "commands", {}).items():
        yield from every(each, f"{name} {word}".strip())
    if not hasattr(command, "commands"):
        yield name, command


@pytest.mark.parametrize(("name", "command"), [*every(cli)], ids=[name for name, _ in every(cli)])
def test_the_reference_names_every_command_and_option(name: str, command: click.Command) -> None:
    reference = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert f"`{name}" in reference or f"fencedjobs {name}" in reference
    options = [option for one in command.params if isinstance(one, click.Option) for option in one.opts]
    assert [option for option in options if f"{option}" not in reference] == []


WITHOUT = """
import sys
from fencedjobs.cli import main
for missing in ("click", "rich"):
    sys.modules[missing] = None
    try:
        main()
    except SystemExit as end:
        print(missing, end.code)
    del sys.modules[missing]
"""


def test_without_the_extra_there_is_one_line_of_advice(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=environment(), cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "click 3\nrich 3\n")
    advice = "fencedjobs: the command line needs click and rich: pip install 'fencedjobs[cli]'\n"
    assert done.stderr == 2 * advice


def test_a_poor_terminal_is_no_error(url: URL, tmp_path: Path) -> None:
    assert run("enqueue", "-", url=url, stdin='{"id": "größer", "queue": "🙂"}'.encode()).code == 0
    answer = spawn("jobs", "list", "--url", text_of(url), cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert answer.code == 0, answer.err
    assert "gr\\xf6\\xdfer" in answer.out
