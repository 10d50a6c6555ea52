"""The store against the oracle: random verbs, clocks and leases, in every form on every database.

``pytest tests/verification -m nightly`` runs 10,000 examples in each form instead of the few that are
always the same.
"""

from __future__ import annotations

import asyncio
import unittest
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy.ext.asyncio import create_async_engine

from fencedjobs import AsyncStore, Store
from fencedjobs.testing.machines import job_machine
from tests.databases import Database

# Each example is a hundred transactions or more on a real server, so no time per example is too long.
FEW = settings(
    max_examples=5, stateful_step_count=25, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
NIGHTLY = settings(FEW, max_examples=10_000, stateful_step_count=50, derandomize=False)


def check(store: Any, how: settings) -> None:
    run_state_machine_as_test(job_machine(lambda: store), settings=how)


def test_the_store_agrees_with_the_oracle(store: Store) -> None:
    check(store, FEW)


@pytest.mark.nightly
def test_the_store_agrees_with_the_oracle_for_ten_thousand_examples(store: Store) -> None:
    check(store, NIGHTLY)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_store_is_turned_into_a_test_case(sync_store: Store) -> None:
    case = job_machine(sync_store).TestCase
    case.settings = settings(FEW, max_examples=1)
    result = unittest.TestResult()
    case("runTest").run(result)
    assert result.wasSuccessful(), result


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_async_store_too(database: Database) -> None:
    with asyncio.Runner() as runner:
        engine = create_async_engine(database.async_url("aiosqlite"))
        machine = job_machine(AsyncStore(engine), runner=runner)
        run_state_machine_as_test(machine, settings=settings(FEW, max_examples=1))
        runner.run(engine.dispose())


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_tables_with_jobs_of_somebody_else_are_refused(sync_store: Store) -> None:
    sync_store.enqueue("somebody's")
    with pytest.raises(ValueError, match="the machine needs empty tables"):
        check(sync_store, settings(FEW, max_examples=1))
    assert sync_store.get("somebody's") is not None
