"""The command line as the tests call it: in this process, or as a real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy.engine import URL

from fencedjobs.cli.app import cli
from tests.databases import BACKENDS

COMMAND = [sys.executable, "-m", "fencedjobs.cli"]

ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")

#: for a test of what depends on the database; the others run on SQLite
EACH_DATABASE = pytest.mark.parametrize("database", BACKENDS, indirect=True)
EACH_EMPTY = pytest.mark.parametrize("empty", BACKENDS, indirect=True)


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: str | Path, url: URL | str | None = None, stdin: str | bytes | None = None) -> Answer:
    """Run a command in this process. An exception that is not meant for the user comes out as it is."""
    where = [] if url is None else ["--url", text_of(url)]
    result = CliRunner().invoke(cli, [*where, *map(str, arguments)], input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def text_of(url: URL | str) -> str:
    return url if isinstance(url, str) else url.render_as_string(hide_password=False)


#: what is for this process, and not for a host's
_OUR_OWN = {"FENCEDJOBS_URL", "PYTEST_ADDOPTS"}


def environment(**changes: str) -> dict[str, str]:
    """That of a child process which imports what this process imports."""
    path = os.pathsep.join(filter(None, sys.path))
    kept = {name: value for name, value in os.environ.items() if name not in _OUR_OWN}
    return {**kept, "PYTHONPATH": path, **changes}


def spawn(*arguments: str | Path, cwd: Path, **changes: str) -> Answer:
    """Run a command as a real process."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=cwd, env=environment(**changes), timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Answer(done.returncode, done.stdout, done.stderr)
