"""``store`` is a sync store on the clock of the test; ``relays`` makes relays, sync and async."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from fencedjobs import Store
from fencedjobs.batch import Batch
from tests.databases import Database
from tests.forms import driver as driver
from tests.forms import opened, parametrize_forms
from tests.relay.helpers import MANY, Clock, Relays, Runaway


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_forms(metafunc, "relays")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(engine: Engine, clock: Clock) -> Store:
    return Store(engine, clock=clock)


@pytest.fixture
def relays(store: Store, database: Database, driver: str | None, clock: Clock) -> Iterator[Relays]:
    if driver is None:
        yield Relays(store, store)
        return
    with opened(database, driver, clock=clock) as form:
        yield Relays(store, form)


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that looks again and again fails its test, and does not hang it."""
    looks = 0

    def bound(look: Any) -> Any:
        @functools.wraps(look)
        def bounded(*args: Any) -> Any:
            nonlocal looks
            looks += 1
            if looks > MANY:
                raise Runaway("it looks for ever")
            return look(*args)

        return bounded

    monkeypatch.setattr(Batch, "open", bound(Batch.open))
