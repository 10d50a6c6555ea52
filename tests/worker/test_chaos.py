"""Workers under chaos: killed, stopped past their leases, and restarted while they work.

Every job is done, every business row is there once, and every late completion was refused. ``-m realtime`` is
a few seconds a database. ``pytest -m soak tests/worker/test_chaos.py -s`` is 20,000 jobs and two minutes of
chaos on each, and prints the figures; ``FENCEDJOBS_CHAOS_SECONDS``, ``_JOBS`` and ``_SEED`` change that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from fencedjobs import Store
from tests.databases import ASYNC_DRIVER, BACKENDS, Database
from tests.worker.chaos import Audit, Chaos, Plan, from_environment
from tests.worker.children import EFFECTS, Staff, staff

databases = pytest.mark.parametrize("database", BACKENDS, indirect=True)


@pytest.fixture
def crew(database: Database, engine: Engine, tmp_path: Path) -> Iterator[Staff]:
    EFFECTS.create(engine)
    if database.backend == "sqlite":
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    urls = [database.url, database.async_url(ASYNC_DRIVER[database.backend])]
    with staff(*(url.render_as_string(hide_password=False) for url in urls), tmp_path) as crew:
        yield crew


def weathered(plan: Plan, crew: Staff, engine: Engine) -> dict[str, Any]:
    print("seed", plan.seed)
    chaos = Chaos(plan, crew, Store(engine))
    chaos.run()
    audit = Audit(chaos, engine)
    audit.require()
    return audit.figures()


@pytest.mark.realtime
@databases
def test_every_job_is_done_and_every_row_there_once(crew: Staff, engine: Engine) -> None:
    seed = random.randrange(2**32)
    plan = Plan(jobs=100, seconds=2, ttl=0.5, workers=(False, True), pause=0.25, seed=seed, patience=30)
    figures = weathered(plan, crew, engine)
    assert figures["executions"] >= figures["effects"]
    assert min(figures["kills"], figures["stops"], figures["terms"]) > 0, figures


@pytest.mark.soak
@databases
def test_two_minutes_of_chaos(
    crew: Staff, engine: Engine, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(
        jobs=int(from_environment("JOBS", 20_000)),
        seconds=from_environment("SECONDS", 120),
        ttl=1.5,
        workers=(False, True) if database.backend == "sqlite" else (False, True, False, True),
        pause=0.8,
        seed=int(from_environment("SEED", random.randrange(2**32))),
        patience=600,
    )
    figures = weathered(plan, crew, engine)
    with capsys.disabled():
        print(f"\n{database.backend}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
