from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import event

from fencedjobs import Store, direct
from tests.databases import Database
from tests.forms import driver as driver
from tests.hosts import hosted
from tests.outcome.line import Line
from tests.proxy import proxy


@pytest.fixture(params=["straight", "sqlalchemy"])
def line(database: Database, driver: str | None, request: pytest.FixtureRequest) -> Iterator[Line]:
    """With statements that go straight to the driver, and with those that SQLAlchemy sends."""
    server = database.url
    quick = driver is None and database.backend == "mariadb"  # TLS takes 0.1 s for each connection
    with (
        proxy(str(server.host), int(server.port or 0)) as between,
        hosted(
            database, driver, port=between.port, connect_args={"ssl_disabled": True} if quick else {}
        ) as host,
    ):
        line = Line(host, between, Store(host.observer))
        if request.param == "straight":
            direct.tell(host.engine)
        event.listen(host.engine, "commit", line.on_commit)
        event.listen(host.engine, "before_cursor_execute", line.on_statement)
        yield line
