from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from fencedjobs import Store
from tests.forms import driver as driver
from tests.forms import parametrize_forms
from tests.forms import servers_stores as servers_stores
from tests.forms import store as store
from tests.forms import sync_store as sync_store
from tests.leases.host import Order, Parcel, host_tables


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_forms(metafunc)


@pytest.fixture
def orders(engine: Engine) -> Iterator[Engine]:
    """The host's tables, with orders 1 and 2 and the parcel 'p'."""
    with host_tables(engine):
        with Session(engine) as session:
            session.add_all([Order(id=1), Order(id=2), Parcel(code="p")])
            session.commit()
        yield engine
        engine.dispose()


@pytest.fixture
def shop(orders: Engine) -> Store:
    """A store on the host's own engine."""
    return Store(orders)
