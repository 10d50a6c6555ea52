"""Leases on the host's own tables against the oracle: random verbs, clocks, leases and lost connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import Engine, true
from sqlalchemy.orm import Session

from fencedjobs import Store, leases, row_leases
from fencedjobs.leases import Transition
from fencedjobs.testing import pairs
from fencedjobs.testing.lease_machines import LeaseMachine, every_pair, lease_machine
from fencedjobs.testing.lease_model import GuardModel
from fencedjobs.testing.machines import Step
from fencedjobs.testing.model import Disagreement
from tests.forms import Blocking
from tests.leases.host import Order, Parcel, host_tables

FEW = settings(
    max_examples=6, stateful_step_count=25, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
SEARCH = settings(FEW, max_examples=60, phases=[Phase.generate])
NIGHTLY = settings(FEW, max_examples=3_000, stateful_step_count=50, derandomize=False)
OPEN: dict[str, Any] = {"open": Order.done == 0, "values": {"done": [0, 0, 1], "note": [None, "x", "y"]}}


@pytest.fixture
def tables(engine: Engine) -> Iterator[Engine]:
    with host_tables(engine):
        yield engine


def machine_of(store: Any, model: type[Any], **options: Any) -> type[LeaseMachine]:
    if isinstance(store, Blocking):
        return lease_machine(lambda: store._target, model, runner=store._runner, **options)
    return lease_machine(store, model, **options)


def test_leases_on_a_host_s_table_agree_with_the_oracle(tables: Engine, store: Store) -> None:
    run_state_machine_as_test(machine_of(store, Order, **OPEN), settings=FEW)


def test_leases_with_a_text_as_key_and_a_clock_that_goes_back(tables: Engine, sync_store: Store) -> None:
    run_state_machine_as_test(machine_of(sync_store, Parcel, backwards=True), settings=FEW)


@pytest.mark.nightly
def test_they_agree_for_thousands_of_examples(tables: Engine, sync_store: Store) -> None:
    run_state_machine_as_test(machine_of(sync_store, Order, **OPEN), settings=NIGHTLY)


def test_one_example_calls_each_verb_with_a_lease_in_each_condition(tables: Engine, store: Store) -> None:
    machine = machine_of(store, Order, **OPEN)
    every_pair(machine)
    assert machine.coverage.missing == []
    assert machine.coverage.counts["settle", pairs.CLOSED] == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "spoilt", ["forgets the end", "forgets the fence", "forgets what is open", "settles apart"]
)
def test_a_guard_that_forgets_something_is_noticed(
    tables: Engine, sync_store: Store, spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = leases.guard

    def worse(leased: Any, held: Any, now: Any = None) -> Any:
        if spoilt == "forgets the end":
            return guard(leased, held)
        if spoilt == "forgets the fence":
            return (
                (leased.key == held.id)
                & (leased.owner == held.owner)
                & (leased.until > (0.0 if now is None else now))
            )
        if spoilt == "forgets what is open":
            return guard(type(leased)(leased.table, leased.key), held, now)
        return guard(leased, held, now)

    remembered = [row_leases._release, row_leases._write_held]
    monkeypatch.setattr(row_leases, "guard", worse)
    if spoilt == "settles apart":
        monkeypatch.setattr(
            row_leases.JoinedLeases, "settle",
            lambda self, lease, *, now=None, **values: self.write(lease, values, now=now) if values else None,
        )  # fmt: skip
    for builder in remembered:
        builder.cache_clear()  # type: ignore[attr-defined]
    try:
        with pytest.raises(Disagreement):
            run_state_machine_as_test(machine_of(sync_store, Order, **OPEN), settings=SEARCH)
    finally:
        monkeypatch.undo()
        for builder in remembered:
            builder.cache_clear()  # type: ignore[attr-defined]


CLAIMS: dict[str, Callable[[Transition], dict[str, Any]]] = {
    "takes what is not free": lambda made: {"where": made.where | (row_leases.NOW >= 0.0)},
    "takes what does not match": lambda made: {"where": true()},
    "gives the same fence": lambda made: {"values": made.values[:2]},  # type: ignore[index]
    "ends too early": lambda made: {"values": [*made.values[:1], *made.values[2:]]},  # type: ignore[index]
    "takes the last": lambda made: {"order": made.order[1:] or [made.leased.key.desc()]},
    "returns them in no order": lambda made: {"once": False},
}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("spoilt", CLAIMS)
def test_a_wrong_claim_of_many_is_noticed(
    tables: Engine, sync_store: Store, spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = row_leases._claim_where

    def worse(*given: Any) -> Transition:
        made = claim(*given)
        return replace(made, **CLAIMS[spoilt](made))

    monkeypatch.setattr(row_leases, "_claim_where", worse)
    with pytest.raises(Disagreement):
        run_state_machine_as_test(machine_of(sync_store, Order, **OPEN), settings=SEARCH)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_table_with_rows_of_somebody_else_is_refused(tables: Engine, sync_store: Store) -> None:
    with Session(tables) as session:
        session.add(Order(id=7))
        session.commit()
    with pytest.raises(ValueError, match="needs an empty table"):
        machine_of(sync_store, Order)()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_row_that_is_not_as_it_must_be_is_told(tables: Engine, sync_store: Store) -> None:
    machine = machine_of(sync_store, Order, **OPEN)()
    machine.start(now=0.0)
    with contextlib.suppress(KeyError):
        machine.model.rows[1].fence = 7
    with pytest.raises(Disagreement, match="row 1 is"):
        machine.step(Step("creep", {"by": 1.0}))
    machine.teardown()


def test_the_oracle_of_guards_admits_what_is_not_lower() -> None:
    model = GuardModel()
    answers = [model.admit("r", fence, now=float(now)) for now, fence in enumerate((5, 5, 4, 6))]
    assert answers == [True, True, False, True]
    assert (model.highest, model.seen_at) == ({"r": 6}, {"r": 3.0})
