"""``workers`` runs a test with `Worker` on every database, with `AsyncWorker` by each driver for asyncio.

``remote`` are workers on a server whose line to it can be cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from fencedjobs import Store
from tests.databases import Database
from tests.forms import driver as driver
from tests.forms import parametrize_forms
from tests.proxy import proxy
from tests.worker.helpers import Remote, Workers


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_forms(metafunc, "workers")


@pytest.fixture
def workers(database: Database, driver: str | None, engine: Engine) -> Workers:
    return Workers(database, driver, Store(engine))


@pytest.fixture
def remote(database: Database, driver: str | None, engine: Engine) -> Iterator[Remote]:
    """Workers whose line to the server can be cut; to be used with `tests.hosts.on`."""
    with proxy(str(database.url.host), int(database.url.port or 0)) as line:
        yield Remote(database, driver, Store(engine), line)
