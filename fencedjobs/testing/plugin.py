"""The pytest plugin: stores of their own for tests, a clock that stands still, jobs run inline.

Registered by the entry point ``pytest11``. Importing it imports pytest alone; what a fixture needs is
imported when a test asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

    from fencedjobs.aio import AsyncStore
    from fencedjobs.store import Store
    from fencedjobs.testing.home import Home

VARIABLE = "FENCEDJOBS_URL"
_DEFAULT = "sqlite://"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--fencedjobs-url``."""
    parser.getgroup("fencedjobs").addoption(
        "--fencedjobs-url",
        metavar="URL",
        help=f"The database of the fencedjobs fixtures, else ${VARIABLE}, else a file of SQLite. "
        "A schema of their own is made in it and dropped.",
    )


class ManualClock:
    """A clock that stands still until the test moves it; seconds, as of a store's clock."""

    def __init__(self, now: float = 1_764_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move it; the new instant."""
        self.now += seconds
        return self.now


@pytest.fixture
def fencedjobs_clock() -> ManualClock:
    """A clock for the stores of this test, instead of the database's."""
    return ManualClock()


@pytest.fixture(scope="session")
def fencedjobs_engine(pytestconfig: pytest.Config) -> Iterator[Engine]:
    """The engine of the fixtures' stores. Override it to have them use your app's own settings."""
    from sqlalchemy import create_engine

    engine = create_engine(_url(pytestconfig))
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def _fencedjobs_home(fencedjobs_engine: Engine) -> Iterator[Home]:
    from fencedjobs.testing.home import own_home

    with own_home(fencedjobs_engine) as home:
        yield home


@pytest.fixture
def fencedjobs_store(request: pytest.FixtureRequest, _fencedjobs_home: Home) -> Iterator[Store]:
    """A store on tables of its own, which are empty; on the manual clock if the test asks for that, too."""
    from fencedjobs.store import Store
    from fencedjobs.testing import asserts

    _empty(_fencedjobs_home)
    store = Store(_fencedjobs_home.engine, clock=_clock(request))
    asserts._current.append(store)
    yield store
    asserts._current.remove(store)


@pytest.fixture
def fencedjobs_async_store(
    request: pytest.FixtureRequest, _fencedjobs_home: Home, fencedjobs_store: Store
) -> AsyncStore:
    """The same tables by a driver for asyncio; nothing is left open on the test's event loop."""
    from fencedjobs.aio import AsyncStore

    return AsyncStore(_fencedjobs_home.async_engine(), clock=_clock(request))


@pytest.fixture
def fencedjobs_drain(request: pytest.FixtureRequest, fencedjobs_store: Store) -> Any:
    """``fencedjobs_drain(worker)`` runs what is due with the worker's handlers, inline, on the test's store.

    With an `AsyncWorker` it is awaited: ``await fencedjobs_drain(worker)``. See `inline.drain`.
    """
    from fencedjobs.testing.inline import drain, drain_async
    from fencedjobs.worker import Worker

    def run(worker: Any, **options: Any) -> Any:
        if isinstance(worker, Worker):
            return drain(worker, fencedjobs_store, **options)
        return drain_async(worker, request.getfixturevalue("fencedjobs_async_store"), **options)

    return run


def _url(config: pytest.Config) -> URL:
    from sqlalchemy.engine import make_url

    return make_url(config.getoption("--fencedjobs-url") or os.environ.get(VARIABLE) or _DEFAULT)


def _clock(request: pytest.FixtureRequest) -> Any:
    asked = "fencedjobs_clock" in request.fixturenames
    return request.getfixturevalue("fencedjobs_clock") if asked else None


def _empty(home: Home) -> None:
    from fencedjobs.models import Base

    with home.engine.begin() as connection:
        for table in Base.metadata.sorted_tables:
            connection.execute(table.delete())
