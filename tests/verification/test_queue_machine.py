"""Any queue of five verbs: the store's passes, hand-rolled ones are found out by a short story."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import StaticPool

from fencedjobs import Store
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.queue import StoreQueue
from fencedjobs.testing.queue_machines import queue_machine
from fencedjobs.testing.queue_model import QueueModel
from tests.verification.hand_rolled import Base, ByWorker, HandRolled

FEW = settings(
    max_examples=20, stateful_step_count=30, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
SEARCH = settings(FEW, max_examples=300, phases=[Phase.generate, Phase.shrink])


@pytest.fixture
def tasks() -> Iterator[Engine]:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def story(queue: HandRolled) -> tuple[str, list[str]]:
    """What was wrong, and the steps that show it."""
    with pytest.raises(Disagreement) as told:
        run_state_machine_as_test(queue_machine(queue), settings=SEARCH)
    lines = "\n".join(told.value.__notes__).splitlines()
    return str(told.value), [line for line in lines if "state." in line and "teardown" not in line]


def test_the_store_passes(store: Store) -> None:
    run_state_machine_as_test(queue_machine(StoreQueue(store)), settings=FEW)


def test_a_completion_by_id_alone_is_told_in_a_few_steps(tasks: Engine) -> None:
    wrong, steps = story(HandRolled(tasks))
    assert 1 <= len(steps) <= 8, steps
    assert "complete by attempt 1 of 'a' by 'A' was accepted" in wrong
    assert any("claim(" in step and "worker='A'" in step for step in steps)


@pytest.mark.kit
def test_a_completion_by_worker_is_told_as_well(tasks: Engine) -> None:
    """The worker's first attempt ends what its second one has."""
    wrong, steps = story(ByWorker(tasks))
    assert 1 <= len(steps) <= 8, steps
    assert "has come after it" in wrong


# --- the oracle -----------------------------------------------------------------------------------


def test_the_oracle_allows_any_free_job_and_no_other() -> None:
    model = QueueModel()
    model.enqueue("a")
    model.enqueue("b")
    assert model.claim("A", 0.0, 1.0, ("b", None)) is not None
    assert model.claim("A", 0.0, 1.0, ("a", None)) is not None
    assert model.claim("B", 0.5, 1.0, None) is None
    for now, got in ((0.5, ("a", None)), (1.0, None), (1.0, ("c", None))):
        with pytest.raises(Disagreement):
            model.claim("B", now, 1.0, got)
    assert model.claim("B", 1.0, 1.0, ("a", None)) is not None


def test_the_oracle_knows_whose_attempt_has_the_job() -> None:
    model = QueueModel()
    model.enqueue("a")
    first = model.claim("A", 0.0, 1.0, ("a", None))
    assert first is not None
    model.renew(first, 0.5, 1.0, True)
    with pytest.raises(Disagreement):
        model.renew(first, 1.0, 1.0, False)
    model.renew(first, 1.5, 1.0, False)
    model.release(first, 1.5, False)
    second = model.claim("A", 1.5, 1.0, ("a", None))
    assert second is not None
    for verb in (model.complete, model.release):
        with pytest.raises(Disagreement):
            verb(first, 1.6, True)
        verb(first, 1.6, False)
    model.complete(second, 1.6, True)
    with pytest.raises(Disagreement):
        model.claim("B", 9.0, 1.0, ("a", None))
