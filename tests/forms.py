"""One interface over the sync and the async form, so that a test is written once and runs in both.

``store`` runs a test on every database by its sync driver and by one for asyncio. The async store
stands behind `Blocking`, which waits for each answer.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from fencedjobs import AsyncStore, Store
from tests.databases import ASYNC_DRIVERS, BACKENDS, Database

#: (backend, driver for asyncio or none); psycopg is the same driver in both forms, see test_async
FORMS: list[tuple[str, str | None]] = [
    *((backend, None) for backend in BACKENDS),
    *((backend, driver) for driver, (backend, _) in ASYNC_DRIVERS.items() if driver != "psycopg"),
]


def parametrize_forms(metafunc: pytest.Metafunc, fixture: str = "store") -> None:
    """In a conftest's ``pytest_generate_tests``: each test with this fixture runs in every form."""
    if fixture in metafunc.fixturenames:
        ids = [driver or backend for backend, driver in FORMS]
        mark = pytest.mark.parametrize(("database", "driver"), FORMS, indirect=True, ids=ids)
        metafunc.definition.add_marker(mark)  # a mark takes the place of the parameters of `database`


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> str | None:
    """The driver for asyncio; none in the sync form."""
    return cast("str | None", request.param)


@pytest.fixture(scope="session")
def servers_stores(_ready: object) -> Iterator[Callable[[Database, str | None], Store]]:
    """Stores on the servers' databases, made once: connecting and checking would be most of each test."""
    made: dict[str | None, Store] = {}
    with ExitStack() as stack:

        def store(database: Database, driver: str | None) -> Store:
            name = driver or database.backend
            if name not in made:
                made[name] = stack.enter_context(opened(database, driver))
            return made[name]

        yield store


@pytest.fixture
def store(
    database: Database, driver: str | None, servers_stores: Callable[[Database, str | None], Store]
) -> Iterator[Store]:
    """A store as a host makes it, sync or (behind `Blocking`) async; used as if it were sync."""
    if database.backend != "sqlite":
        yield servers_stores(database, driver)
        return
    with opened(database, driver) as store:
        yield store


@pytest.fixture
def sync_store(
    database: Database, servers_stores: Callable[[Database, str | None], Store]
) -> Iterator[Store]:
    """In the sync form alone, where a test is about the database and not about the form."""
    if database.backend != "sqlite":
        yield servers_stores(database, None)
        return
    with opened(database, None) as store:
        yield store


@contextmanager
def opened(database: Database, driver: str | None, **options: Any) -> Iterator[Store]:
    """A store with these options on this database."""
    if driver is None:
        engine = create_engine(database.url)
        yield Store(engine, **options)
        engine.dispose()
        return
    with asyncio.Runner() as runner:
        async_engine = create_async_engine(database.async_url(driver))
        yield cast("Store", Blocking(AsyncStore(async_engine, **options), runner))
        runner.run(async_engine.dispose())


class Blocking:
    """An async object seen as its sync twin: what it answers is awaited, what it opens is entered."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return self._seen(getattr(self._target, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._target(*args, **kwargs)
        if inspect.isawaitable(answer):
            return self._wait(answer)
        return self._seen(answer)

    def __enter__(self) -> Any:
        return self._seen(self._wait(self._target.__aenter__()))

    def __exit__(self, *error: Any) -> Any:
        return self._wait(self._target.__aexit__(*error))

    def _seen(self, found: Any) -> Any:
        ours = type(found).__module__.startswith(("fencedjobs.aio", "sqlalchemy.ext.asyncio"))
        return Blocking(found, self._runner) if ours or callable(found) or _enters(found) else found

    def _wait(self, answer: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await answer

        return self._runner.run(awaited())


def _enters(found: Any) -> bool:
    return hasattr(found, "__aenter__")
