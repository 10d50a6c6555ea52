from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.databases import Database
from tests.forms import FORMS
from tests.forms import driver as driver
from tests.hosts import Host, hosted


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test with ``host`` runs on every database and by every driver for asyncio, unless it says `on`."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "host" in metafunc.fixturenames and not any("database" in mark.args[0] for mark in marks):
        ids = [driver or backend for backend, driver in FORMS]
        mark = pytest.mark.parametrize(("database", "driver"), FORMS, indirect=True, ids=ids)
        metafunc.definition.add_marker(mark)


@pytest.fixture
def host(database: Database, driver: str | None) -> Iterator[Host]:
    with hosted(database, driver) as host:
        yield host
