"""Fixtures: a database ready for a store, on each of the three backends, and brokers for the senders.

``database`` runs a test on SQLite, PostgreSQL and MariaDB; ``engine`` and ``url`` go with it. One backend
alone: ``@pytest.mark.parametrize("database", ["postgresql"], indirect=True)``. ``async_engine`` runs a test
on each asyncio driver. ``empty`` is a database without our tables. ``nats_url`` and ``rabbitmq_url`` are real
servers.

What is missing skips its tests, and the summary says so loudly; with ``CI`` set they fail.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests import brokers
from tests.brokers import BROKERS, NoBroker
from tests.databases import ASYNC_DRIVERS, BACKENDS, Database, NoDatabase, Ready, empty_database
from tests.servers import Servers

_SERVERS = pytest.StashKey[Servers]()
_ABSENT = "NO SERVER: "


def pytest_configure() -> None:
    """A run in the background has SIGINT ignored, and so would the children that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the workers of pytest-xdist are made: they inherit the servers' URLs."""
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        session.config.stash[_SERVERS] = servers = Servers()
        servers.provide()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _SERVERS in config.stash:
        config.stash[_SERVERS].stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for name in (*BACKENDS, *BROKERS, "pgbouncer"):
        lost = sum(f"{_ABSENT}there is no {name} " in reason for reason in skipped)
        if lost:
            terminalreporter.section(f"{name.upper()} WAS NOT TESTED", sep="!", red=True, bold=True)
            terminalreporter.line(f"{lost} tests were skipped, because there is no {name} on this machine.")


def absent(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(_ABSENT + reason, pytrace=False)
    pytest.skip(_ABSENT + reason)


@pytest.fixture(scope="session")
def _ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ready]]:
    made: dict[str, Ready] = {}
    with ExitStack() as stack:

        def ready(backend: str) -> Ready:
            if backend not in made:
                directory = tmp_path_factory.mktemp("databases")
                made[backend] = Ready(stack.enter_context(empty_database(backend, directory)))
                stack.callback(made[backend].close)
            return made[backend]

        yield ready


def _database(backend: str, ready: Callable[[str], Ready], directory: Path) -> Database:
    try:
        return ready(backend).for_test(directory)
    except NoDatabase as error:
        absent(str(error))
        raise


@pytest.fixture(params=BACKENDS)
def database(request: pytest.FixtureRequest, _ready: Callable[[str], Ready], tmp_path: Path) -> Database:
    """A database with our tables, and nothing in them."""
    return _database(request.param, _ready, tmp_path)


@pytest.fixture
def url(database: Database) -> URL:
    return database.url


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    """As a host makes it: default pool, default isolation, the driver's default transaction mode."""
    engine = database.engine()
    yield engine
    engine.dispose()


@pytest.fixture(params=BACKENDS)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database without any tables, of this test alone."""
    try:
        with empty_database(request.param, tmp_path) as database:
            yield database
    except NoDatabase as error:
        absent(str(error))


@pytest.fixture(params=ASYNC_DRIVERS)
def async_url(request: pytest.FixtureRequest, _ready: Callable[[str], Ready], tmp_path: Path) -> URL:
    """A database with our tables, by each driver for asyncio."""
    backend, _ = ASYNC_DRIVERS[request.param]
    return _database(backend, _ready, tmp_path).async_url(request.param)


@pytest_asyncio.fixture
async def async_engine(async_url: URL) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(async_url)
    yield engine
    await engine.dispose()


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server with JetStream."""
    try:
        with brokers.nats(tmp_path_factory.mktemp("nats")) as url:
            yield url
    except NoBroker as error:
        absent(str(error))


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """A RabbitMQ server."""
    try:
        return brokers.rabbitmq()
    except NoBroker as error:
        absent(str(error))
        raise
