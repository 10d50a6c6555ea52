"""The tests that pytest-alembic brings along, on our own history and on a host's that has ours in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from tests.cli.helpers import environment, run, text_of
from tests.databases import Database
from tests.schema.project import IGNORE, Project

ROOT = Path(__file__).parents[2]

TESTS = """
    from pytest_alembic.tests import (  # noqa: F401
        test_model_definitions_match_ddl, test_single_head_revision, test_up_down_consistency, test_upgrade
    )
"""

CONFTEST = """
    import pytest
    from sqlalchemy import create_engine

    @pytest.fixture
    def alembic_config():
        return {config!r}

    @pytest.fixture
    def alembic_engine():
        return create_engine({url!r})
"""


def require_its_tests_pass(directory: Path, database: Database, config: dict[str, object]) -> None:
    text = dedent(CONFTEST).format(config=config, url=text_of(database.url))
    (directory / "conftest.py").write_text(text)
    (directory / "pytest.ini").write_text("[pytest]\npytest_alembic_enabled = false\n")  # it collects in vain
    (directory / "test_history.py").write_text(dedent(TESTS))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=directory, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_our_own_history(empty: Database, tmp_path: Path) -> None:
    config = {"file": str(ROOT / "alembic.ini"), "script_location": str(ROOT / "migrations")}
    require_its_tests_pass(tmp_path, empty, config)


def test_a_hosts_history_with_ours_in_it(empty: Database, tmp_path: Path) -> None:
    project = Project(empty, tmp_path, "generic", IGNORE)
    assert run("alembic", "new", "-c", project.ini).code == 0
    env = project.directory / "history" / "env.py"
    given = 'config.attributes.get("connection") or engine_from_config('
    env.write_text(
        env.read_text()
        .replace('config.attributes["metadata"]', "MetaData()")
        .replace(
            "from alembic import context", "from alembic import context\nfrom sqlalchemy import MetaData"
        )
        .replace("engine_from_config(\n", f"{given}\n")
    )
    require_its_tests_pass(project.directory, empty, {"file": str(project.ini)})
