"""``workers`` runs a test with `Worker` on every database, with `AsyncWorker` by each driver for asyncio."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from fencedjobs import Store
from tests.databases import Database
from tests.forms import FORMS
from tests.forms import driver as driver
from tests.worker.helpers import Workers


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "workers" in metafunc.fixturenames:
        ids = [driver or backend for backend, driver in FORMS]
        mark = pytest.mark.parametrize(("database", "driver"), FORMS, indirect=True, ids=ids)
        metafunc.definition.add_marker(mark)  # a mark takes the place of the parameters of `database`


@pytest.fixture
def workers(database: Database, driver: str | None, engine: Engine) -> Workers:
    return Workers(database, driver, Store(engine))
