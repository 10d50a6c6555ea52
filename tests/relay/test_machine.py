"""Outbox, relay and inbox against the oracle: random verbs, clocks, rivals and deaths, on every database.

``pytest tests/relay/test_machine.py -m nightly`` runs thousands of examples instead of a few that are always
the same.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import Engine

from fencedjobs import Store
from fencedjobs.testing.outbox_machines import outbox_machine

# Each example is a hundred transactions or more on a real server, so no time per example is too long.
FEW = settings(
    max_examples=5, stateful_step_count=15, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
NIGHTLY = settings(FEW, max_examples=3_000, stateful_step_count=40, derandomize=False)


@pytest.fixture(autouse=True)
def bounded() -> None:
    """Here the machine knows when a relay must end."""


def test_the_outbox_agrees_with_the_oracle(engine: Engine) -> None:
    run_state_machine_as_test(outbox_machine(engine), settings=FEW)


@pytest.mark.nightly
def test_the_outbox_agrees_with_the_oracle_for_thousands_of_examples(engine: Engine) -> None:
    run_state_machine_as_test(outbox_machine(engine), settings=NIGHTLY)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_tables_with_events_of_somebody_else_are_refused(engine: Engine, store: Store) -> None:
    store.outbox.add("somebody's", None, topic="t")
    with pytest.raises(ValueError, match="the machine needs empty tables"):
        run_state_machine_as_test(outbox_machine(engine), settings=settings(FEW, max_examples=1))
    assert store.outbox.get("somebody's") is not None
