"""Every engine gets the same answers, or is refused at the first use with the reason. Contract 13."""

from __future__ import annotations

from typing import Any

import pytest

from fencedjobs import UnsupportedDatabase
from tests.databases import Database
from tests.forms import FORMS
from tests.host.day import EXPECTED, day
from tests.host.engines import MADE, SYNC_SQLITE, Made, habits
from tests.hosts import MORE_DRIVERS, hosted, told


def cases() -> list[Any]:
    found = []
    for backend, driver in [*FORMS, *((backend, name) for name, (backend, *_) in MORE_DRIVERS.items())]:
        plain = driver is None
        for made in [*MADE[backend], *(SYNC_SQLITE if backend == "sqlite" and plain else [])]:
            found.append(pytest.param(backend, driver, made, id=f"{driver or backend}-{made.name}"))
    return found


@pytest.mark.parametrize(("database", "driver", "made"), cases(), indirect=["database", "driver"])
def test_an_engine_gets_the_same_answers_or_a_clear_refusal(
    database: Database, driver: str | None, made: Made
) -> None:
    with hosted(database, driver, adapt=made.adapt, wrap=made.wrap, **made.options) as host:
        host.run(lambda: host.engine.connect().close())  # the host uses its engine, too
        before = habits(host)
        if made.refused:
            for verb in (host.store.counts, lambda: host.store.enqueue("a"), lambda: host.begin(print)):
                error = told(verb)
                assert isinstance(error, UnsupportedDatabase), repr(error)
                assert made.refused in str(error)
        else:
            assert day(host) == EXPECTED
        assert habits(host) == before, "the host's connections are not as they were"
