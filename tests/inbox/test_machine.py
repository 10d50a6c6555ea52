"""Inbox and guards against their oracles: random messages, fences and lost connections, in every form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fencedjobs import Store
from fencedjobs.testing.inbox_machines import InboxMachine, inbox_machine
from fencedjobs.testing.lease_model import GuardModel
from fencedjobs.testing.model import Disagreement
from tests.forms import Blocking

FEW = settings(
    max_examples=6, stateful_step_count=25, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def machine_of(store: Any) -> type[InboxMachine]:
    if isinstance(store, Blocking):
        return inbox_machine(lambda: store._target, runner=store._runner)
    return inbox_machine(store)


def test_inbox_and_guards_agree_with_their_oracles(store: Store) -> None:
    run_state_machine_as_test(machine_of(store), settings=FEW)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_guard_that_admits_a_lower_fence_would_be_noticed(
    sync_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardModel, "admit", lambda self, resource, fence, *, now: True)
    with pytest.raises(Disagreement):
        run_state_machine_as_test(machine_of(sync_store), settings=settings(FEW, phases=[Phase.generate]))
