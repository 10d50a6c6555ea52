"""A Hypothesis state machine over the five verbs of any queue.

    TestMine = queue_machine(Mine).TestCase

Workers claim, and renew, complete and release what they have, in time and late, also after somebody
else has claimed the job; or they say nothing more, as after a crash. Each answer is compared with the
oracle (`queue_model`). For calls at the same time see `history.trial`.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, multiple, rule

from fencedjobs.testing.machines import Effort
from fencedjobs.testing.queue import Queue
from fencedjobs.testing.queue_model import Attempt, QueueModel

WORKERS: Final = ("A", "B")
JOBS: Final = ("a", "b")
_HOUR: Final = 3600.0  # between examples, and more than all of one: what a lease of the last one outlives
_MOST: Final = 100  # claims in which a queue must be empty again

_workers, _jobs = st.sampled_from(WORKERS), st.sampled_from(JOBS)
_ttls = st.sampled_from((1.0, 2.0, 10.0))


class QueueMachine(RuleBasedStateMachine):
    """What each step does; `queue_machine` gives it a queue. Instants are seconds since the example began."""

    open_queue: Callable[[], Queue]
    effort: Effort
    examples: Any  #: numbers
    prefix: str

    attempts: Any = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.effort.examples += not self.effort.failed
        self.queue = type(self).open_queue()
        self.model = QueueModel()
        number = next(self.examples)
        self.now = 0.0
        self._began: float = _HOUR * (number + 1)
        self._names = {name: f"{self.prefix}-{number}-{name}" for name in JOBS}

    @rule(job=_jobs)
    def enqueue(self, job: str) -> None:
        """A job, or one that there is already."""
        self._step(lambda: self._enqueue(job))

    @rule(target=attempts, worker=_workers, ttl=_ttls)
    def claim(self, worker: str, ttl: float) -> Attempt | MultipleResults[Attempt]:
        """Any job."""
        attempt: Attempt | None = self._step(lambda: self._claim(worker, ttl))
        return multiple() if attempt is None else attempt

    @rule(seconds=st.sampled_from((0.5, 1.0, 2.0)))
    def wait(self, seconds: float) -> None:
        """Time goes on; it comes to the very end of leases."""
        self.now += seconds

    @rule(attempt=attempts, ttl=_ttls)
    def renew(self, attempt: Attempt, ttl: float) -> None:
        """A heartbeat, perhaps late."""
        self._step(lambda: self._renew(attempt, ttl))

    @rule(attempt=attempts)
    def complete(self, attempt: Attempt) -> None:
        """The job is done, perhaps late."""
        self._step(lambda: self._complete(attempt))

    @rule(attempt=attempts)
    def release(self, attempt: Attempt) -> None:
        """The job is given back, perhaps late."""
        self._step(lambda: self._release(attempt))

    def teardown(self) -> None:
        """Complete what is left, for the next example."""
        self.now = _HOUR - 1.0
        for _ in range(_MOST):
            got = self.queue.claim(WORKERS[0], self._instant, 1.0)
            if got is None:
                break
            self.queue.complete(got[0], WORKERS[0], got[1], self._instant, None)

    # --- both sides -------------------------------------------------------------------------------

    @property
    def _instant(self) -> float:
        return self._began + self.now

    def _step(self, do: Callable[[], Any]) -> Any:
        self.effort.steps += not self.effort.failed
        try:
            return do()
        except Exception:
            self.effort.failed = True
            raise

    def _enqueue(self, job: str) -> None:
        self.queue.enqueue(self._names[job], self._instant)
        self.model.enqueue(job)

    def _claim(self, worker: str, ttl: float) -> Attempt | None:
        got = self.queue.claim(worker, self._instant, ttl)
        if got is not None:
            shown = {name: short for short, name in self._names.items()}
            got = (shown.get(got[0], got[0]), got[1])
        return self.model.claim(worker, self.now, ttl, got)

    def _renew(self, attempt: Attempt, ttl: float) -> None:
        got = self.queue.renew(*self._named(attempt), self._instant, ttl)
        self.model.renew(attempt, self.now, ttl, got)

    def _complete(self, attempt: Attempt) -> None:
        got = self.queue.complete(*self._named(attempt), self._instant, f"result {attempt.number}")
        self.model.complete(attempt, self.now, got)

    def _release(self, attempt: Attempt) -> None:
        self.model.release(attempt, self.now, self.queue.release(*self._named(attempt), self._instant))

    def _named(self, attempt: Attempt) -> tuple[str, str, Any]:
        return self._names[attempt.job], attempt.worker, attempt.token


def queue_machine(queue: Queue | Callable[[], Queue]) -> type[QueueMachine]:
    """A state machine for this queue; ``queue_machine(queue).TestCase`` is a test for pytest.

    ``queue`` is any object with the verbs of `Queue`, without jobs of anybody else, or a function
    without arguments that gives an empty one for each example. Jobs have new names in each example,
    and its time begins where that of the last one was over. The class counts in ``effort``.
    """
    parts = {
        "open_queue": staticmethod(queue if callable(queue) else lambda: queue), "effort": Effort(),
        "examples": itertools.count(), "prefix": secrets.token_hex(4),
    }  # fmt: skip
    return type("QueueMachine", (QueueMachine,), parts)
