from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine

from fencedjobs import service
from tests.databases import Database


@pytest.fixture
def where(database: Database) -> Iterator[Any]:
    """A database of the lab service: the path of a new file on SQLite, else an engine."""
    if database.backend == "sqlite":
        path = f"{database.url.database}.lab"
        service.init_db(path)
        yield path
        return
    engine = create_engine(database.url)
    service.init_db(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def url(where: Any, database: Database) -> str:
    """The same database as a URL, which other processes understand too."""
    if database.backend == "sqlite":
        return f"sqlite:///{where}"
    return database.url.render_as_string(hide_password=False)
