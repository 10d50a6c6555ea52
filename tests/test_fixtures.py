"""A database or broker that is missing must not go unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.brokers import NATS, RABBITMQ
from tests.servers import MARIADB, POSTGRESQL, start_postgresql

ROOT = Path(__file__).parents[1]
CHOSEN = "tests/schema/test_upgrade.py::test_upgrading_to_a_revision_that_is_behind_changes_nothing"

SENT = (
    "tests/senders/test_nats.py::test_the_subject_may_be_a_function",
    "tests/senders/test_rabbitmq.py::test_the_routing_key_may_be_a_function",
    "tests/senders/test_http_acks.py::test_cookies_are_not_kept",
)


def _run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(options or ("-n", "0", CHOSEN))],
        env=inherited | environment,
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )


def test_without_a_database_the_summary_says_so_loudly() -> None:
    done = _run("-n", "1", CHOSEN, **{MARIADB: ""})
    assert done.returncode == 0, done.stdout
    assert "MARIADB WAS NOT TESTED" in done.stdout
    assert "POSTGRESQL WAS NOT TESTED" not in done.stdout
    assert "2 passed, 1 skipped" in done.stdout


def test_in_ci_a_missing_database_is_a_failure() -> None:
    done = _run(CI="1", **{MARIADB: "", POSTGRESQL: ""})
    assert done.returncode == 1
    assert "1 passed, 2 errors" in done.stdout


def test_without_a_broker_the_summary_says_so_loudly() -> None:
    done = _run("-n", "1", *SENT, **{RABBITMQ: ""})
    assert done.returncode == 0, done.stdout
    assert "RABBITMQ WAS NOT TESTED" in done.stdout
    assert "NATS WAS NOT TESTED" not in done.stdout
    assert "2 passed, 1 skipped" in done.stdout


def test_in_ci_a_missing_broker_is_a_failure() -> None:
    done = _run("-n", "1", *SENT, CI="1", **{NATS: "", RABBITMQ: ""})
    assert done.returncode == 1
    assert "1 passed, 2 errors" in done.stdout, done.stdout


def test_a_server_of_our_own_serves_a_run_and_goes_with_it() -> None:
    server = start_postgresql()
    try:
        done = _run(**{MARIADB: "", POSTGRESQL: server.url.render_as_string(hide_password=False)})
    finally:
        server.stop()
    assert "2 passed, 1 skipped" in done.stdout, done.stdout
    assert server.process.returncode == 0
    assert not server.home.exists()
