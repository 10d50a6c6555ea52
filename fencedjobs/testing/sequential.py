"""One job as the contract describes it, one call after the other: what each answer allows.

This is the oracle once more, for one job and in a form that a search can step through millions of
times: `step` takes the job as it is and an `Op`, and gives the jobs that it can be afterwards, none if
the answer cannot have been given. A test walks it side by side with the oracle. It says nothing of
what concerns several jobs: which of them a claim of the next one must take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from fencedjobs.values import JobState, Outcome


class Answer(Enum):
    """What a call answered, where it is not a value."""

    OK = "done"
    LOST = "lease lost"
    SILENT = "nothing"  #: the verb does not say whether it changed something
    UNKNOWN = "no answer"  #: it may have happened or not


class Granted(NamedTuple):
    """A claim's answer: the job, the key by which later calls name this attempt, and what else was told."""

    id: str
    key: Hashable
    fence: int | None = None
    until: float | None = None
    attempt: int | None = None
    payload: Any = None
    progress: Any = None


class Seen(NamedTuple):
    """What a read showed of a job."""

    state: JobState
    owner: str | None
    until: float
    fence: int
    attempts: int
    payload: Any
    progress: Any
    result: Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call as its client saw it; the instants are nanoseconds of one monotonic clock.

    Without ``returned`` it may still happen at any time, as when the client died in it.
    """

    client: str
    verb: str
    given: Mapping[str, Any]
    invoked: int
    returned: int | None = None
    answer: Any = Answer.UNKNOWN


class Row(NamedTuple):
    """The job; ``holder`` is the key of the attempt that it names, ``by`` of the one that completed it."""

    state: JobState
    fence: int = 0
    attempts: int = 0
    cap: float = math.inf
    deadline: float | None = None
    owner: str | None = None
    holder: Hashable = None
    until: float = 0.0
    payload: Any = None
    progress: Any = None
    result: Any = None
    by: Hashable = None
    ended: float = 0.0


Job = Row | None  #: a job, or none under this id
Next = tuple[Job, ...]

_WAITING: Final = (JobState.SCHEDULED, JobState.LEASED)
_OPEN: Final = (JobState.READY, *_WAITING)
_ENDED: Final = (JobState.DONE, JobState.CANCELLED)


@dataclass(slots=True, eq=False)
class Op:
    """What one call did to one job, and when: after ``first``, and up to ``last``.

    ``required``: it has happened. ``pure``: with this answer it has changed nothing.
    """

    kind: str
    call: Call
    answer: Any
    first: int
    last: float
    required: bool
    pure: bool
    key: Hashable = None
    extra: Any = None  #: of many things that were given, the one for this job

    def step(self, job: Job) -> Next:
        """The jobs that this one can be afterwards."""
        return _STEPS[self.kind](job, self)

    @property
    def now(self) -> float:
        """The instant that the call was told."""
        return float(self.call.given["now"])


def _live(job: Row, now: float) -> bool:
    return job.state is JobState.LEASED and now < job.until


def _due(job: Row, now: float) -> bool:
    return job.state in _WAITING and job.until <= now


def _spent(job: Row, now: float) -> bool:
    return job.attempts >= job.cap or (job.deadline is not None and job.deadline <= now)


def _leave(job: Row, state: JobState, until: float = 0.0) -> Row:
    return job._replace(state=state, owner=None, holder=None, until=until)


def _wait(job: Row, delay: float, now: float) -> Row:
    return _leave(job, JobState.SCHEDULED, now + delay) if delay else _leave(job, JobState.READY)


def _end(job: Row, ttl: float, now: float) -> float:
    return now + ttl if job.deadline is None else min(now + ttl, job.deadline)


# --- entry and claims -----------------------------------------------------------------------------


def _enqueue(job: Job, op: Op) -> Next:
    if job is not None and job.state is not JobState.PURGED:
        return () if op.answer is True else (job,)
    if op.answer is False:
        return ()
    given = op.call.given
    new = Row(
        JobState.READY, job.fence if job else 0, 0, given.get("max_attempts", math.inf),
        given.get("deadline"), payload=given.get("payload"),
    )  # fmt: skip
    delay = given.get("delay", 0)
    return (_wait(new, delay, op.now) if delay else new,)


def _take(job: Job, op: Op) -> Next:
    """A claim got it."""
    given, now, told = op.call.given, op.now, op.answer
    if job is None or not (job.state is JobState.READY or _due(job, now)) or _spent(job, now):
        return ()
    until, fence = _end(job, given["ttl"], now), job.fence + 1
    if isinstance(told, Granted) and told.fence is not None:
        said = (told.fence, told.until, told.attempt, told.payload, told.progress)
        if said != (fence, until, job.attempts + 1, job.payload, job.progress):
            return ()
    taken = job._replace(state=JobState.LEASED, owner=given["owner"], holder=op.key, until=until)
    return (taken._replace(fence=fence, attempts=job.attempts + 1),)


def _refused(job: Job, op: Op) -> Next:
    """A claim by id got nothing."""
    now = op.now
    if job is None or job.state not in _OPEN or _live(job, now):
        return (job,)
    waits = job.state is JobState.SCHEDULED and not _due(job, now)
    if not _spent(job, now):
        return (job,) if waits else ()
    aside = _leave(job, JobState.QUARANTINED)
    return (job, aside) if waits else (aside,)


def _passed(job: Job, op: Op) -> Next:
    """A claim of the next one may have promoted it, or set it aside, and taken another."""
    now = op.now
    if job is None or not (job.state is JobState.READY or _due(job, now)):
        return ()
    if _spent(job, now):
        return (_leave(job, JobState.QUARANTINED),)
    return () if job.state is JobState.READY else (_leave(job, JobState.READY),)


def _empty(job: Job, op: Op) -> Next:
    """A claim of the next one got nothing, so there was a moment when it could not have this one."""
    if job is None or not (job.state is JobState.READY or _due(job, op.now)):
        return (job,)
    return (job, _leave(job, JobState.QUARANTINED)) if _spent(job, op.now) else ()


# --- the guarded verbs ----------------------------------------------------------------------------


def _guarded(change: Callable[[Row, Op], Row | None]) -> Callable[[Job, Op], Next]:
    """Under the guard: the attempt that the job names, and in time."""

    def step(job: Job, op: Op) -> Next:
        held = job is not None and job.holder == op.key and job.holder is not None and _live(job, op.now)
        if op.answer is Answer.LOST:
            return () if held else (job,)
        changed = change(job, op) if held and job is not None else None
        return () if changed is None else (changed,)

    return step


def _renew(job: Row, op: Op) -> Row | None:
    until = _end(job, op.call.given["ttl"], op.now)
    agrees = not isinstance(op.answer, float) or op.answer == until
    return job._replace(until=until) if agrees else None


def _complete(job: Row, op: Op) -> Row:
    return _leave(job, JobState.DONE)._replace(result=op.extra, by=job.holder, ended=op.now)


def _checkpoint(job: Row, op: Op) -> Row:
    return job._replace(progress=op.extra)


def _set_aside(job: Row, op: Op) -> Row:
    return _leave(job, op.call.given["state"])._replace(ended=op.now)


def _fail(job: Row, op: Op) -> Row | None:
    wait = op.call.given["wait"]
    dead = wait is None or job.attempts >= job.cap
    failed = _leave(job, JobState.QUARANTINED) if dead else _wait(job, wait, op.now)
    return failed if op.answer in (failed.state, Answer.UNKNOWN, Answer.OK) else None


def _release(job: Job, op: Op) -> Next:
    """Also late, as long as the job names this attempt."""
    given = op.call.given
    held = job is not None and job.holder == op.key and job.holder is not None
    if op.answer is Answer.LOST:
        lenient = given.get("lenient") and job is not None and not _live(job, op.now)
        return (job,) if lenient or not held else ()
    if job is None or not held:
        return ()
    return (
        _wait(job, given.get("delay", 0), op.now)._replace(attempts=job.attempts - given.get("refund", 0)),
    )


# --- operators and reading ------------------------------------------------------------------------


def _operated(change: Callable[[Row, Op], Row], *sources: JobState) -> Callable[[Job, Op], Next]:
    def step(job: Job, op: Op) -> Next:
        fits = job is not None and job.state in sources
        if op.answer is False:
            return () if fits else (job,)
        return (change(job, op),) if fits and job is not None else ()

    return step


def _cancel(job: Row, op: Op) -> Row:
    return _leave(job, JobState.CANCELLED)._replace(ended=op.now)


def _quarantine(job: Row, op: Op) -> Row:
    return _leave(job, JobState.QUARANTINED)


def _requeue(job: Row, op: Op) -> Row:
    again = _leave(job, JobState.READY)._replace(attempts=0)
    mended = "payload" in op.call.given
    return again._replace(payload=op.call.given["payload"], progress=None) if mended else again


def _sweep(job: Job, op: Op) -> Next:
    """It may have been among those that a sweep took."""
    stuck = job is not None and job.state in _OPEN and not _live(job, op.now) and _spent(job, op.now)
    return (_leave(job, JobState.QUARANTINED),) if stuck and job is not None else ()


def _purge(job: Job, op: Op) -> Next:
    """It may have been among those that a purge emptied."""
    if job is None or job.state not in _ENDED or job.ended >= op.call.given["before"]:
        return ()
    return (Row(JobState.PURGED, job.fence),)


def _get(job: Job, op: Op) -> Next:
    if job is None or op.answer is None:
        return (job,) if job is op.answer else ()
    row = (job.state, job.owner, job.until, job.fence, job.attempts, job.payload, job.progress, job.result)
    return (job,) if row == op.answer else ()


def _outcome(job: Job, op: Op) -> Next:
    if job is not None and job.state is JobState.DONE and job.by == op.key:
        found = Outcome.COMPLETED
    else:
        held = job is not None and job.holder == op.key
        found = Outcome.HELD if held else Outcome.ENDED
    return (job,) if op.answer is found else ()


_STEPS: Final[Mapping[str, Callable[[Job, Op], Next]]] = {
    "enqueue": _enqueue, "take": _take, "refused": _refused, "passed": _passed, "empty": _empty,
    "renew": _guarded(_renew), "complete": _guarded(_complete), "checkpoint": _guarded(_checkpoint),
    "set_aside": _guarded(_set_aside), "fail": _guarded(_fail), "release": _release,
    "cancel": _operated(_cancel, *_OPEN, JobState.QUARANTINED),
    "quarantine": _operated(_quarantine, *_OPEN),
    "requeue": _operated(_requeue, JobState.QUARANTINED, JobState.CANCELLED),
    "sweep": _sweep, "purge": _purge, "get": _get, "outcome": _outcome,
}  # fmt: skip
