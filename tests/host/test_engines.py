"""Every engine gets the same answers, or is refused at the first use with the reason. Contract 13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import AsyncAdaptedQueuePool

from fencedjobs import UnsupportedDatabase
from tests.databases import Database
from tests.forms import FORMS
from tests.host.day import EXPECTED, day
from tests.host.engines import MADE, OPTIONS, SQLALCHEMY, SYNC_SQLITE, Made, habits
from tests.hosts import MORE_DRIVERS, hosted, told


def cases() -> list[Any]:
    found = []
    for backend, driver in [*FORMS, *((backend, name) for name, (backend, *_) in MORE_DRIVERS.items())]:
        plain = driver is None
        old = SQLALCHEMY < (2, 0, 40) and driver in ("aiomysql", "asyncmy")  # it cannot ping by these
        for made in [*MADE[backend], *(SYNC_SQLITE if backend == "sqlite" and plain else [])]:
            if not (old and "pool_pre_ping" in made.options):
                found.append(pytest.param(backend, driver, made, id=f"{driver or backend}-{made.name}"))
    return found


@pytest.mark.parametrize(("database", "driver", "made"), cases(), indirect=["database", "driver"])
def test_an_engine_gets_the_same_answers_or_a_clear_refusal(
    database: Database, driver: str | None, made: Made
) -> None:
    options = dict(made.options)
    if driver == "aiosqlite" and "pool_size" in options:  # has no pool in older versions
        options["poolclass"] = AsyncAdaptedQueuePool
    with hosted(database, driver, adapt=made.adapt, wrap=made.wrap, **options) as host:
        host.run(lambda: host.engine.connect().close())  # the host uses its engine, too
        before = habits(host)
        # Older versions give this driver a level for each transaction, whatever the connect event said.
        overruled = driver == "asyncpg" and SQLALCHEMY < (2, 1) and made.name == "at connect, SERIALIZABLE"
        if made.refused and not overruled:
            blocks: list[Callable[[], object]] = [lambda: host.begin(print)]
            verbs: list[Callable[[], object]] = [host.store.counts, lambda: host.store.enqueue("a")]
            for verb in blocks if made.refused == OPTIONS else [*verbs, *blocks]:
                error = told(verb)
                assert isinstance(error, UnsupportedDatabase), repr(error)
                assert made.refused in str(error)
        else:
            assert day(host) == EXPECTED
        assert habits(host) == before, "the host's connections are not as they were"
