"""The oracle of a queue of five verbs: what `queue.Queue` promises, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fencedjobs.testing.model import Disagreement


@dataclass(slots=True, eq=False)
class Held:
    """One job: who has it, in which of its attempts, until when."""

    worker: str | None = None
    attempt: int = 0
    until: float = 0.0
    done: bool = False

    def free(self, now: float) -> bool:
        """Whether a claim may have it."""
        return not self.done and (self.worker is None or self.until <= now)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One claim of a job, and the token that came with it."""

    job: str
    worker: str
    number: int  #: of the attempts of this job
    token: Any

    def __repr__(self) -> str:
        return f"attempt {self.number} of {self.job!r} by {self.worker!r}"


class QueueModel:
    """All jobs. Each verb is told the queue's answer, and raises `Disagreement` if that is not allowed."""

    def __init__(self) -> None:
        self.jobs: dict[str, Held] = {}

    def enqueue(self, job: str) -> None:
        """New, or nothing."""
        self.jobs.setdefault(job, Held())

    def claim(self, worker: str, now: float, ttl: float, got: tuple[str, Any] | None) -> Attempt | None:
        """Any free one."""
        free = [name for name, held in self.jobs.items() if held.free(now)]
        if got is None:
            _require(not free, f"a claim got nothing, and {free} can be claimed")
            return None
        job, token = got
        held = self.jobs.get(job)
        if held is None:
            raise Disagreement(f"a claim got {job!r}, which was never added")
        _require(not held.done, f"a claim got {job!r}, which is done")
        _require(
            held.free(now),
            f"a claim got {job!r}, which {held.worker!r} has until {held.until!r}: it is {now!r}",
        )
        held.worker, held.until, held.attempt = worker, now + ttl, held.attempt + 1
        return Attempt(job, worker, held.attempt, token)

    def renew(self, attempt: Attempt, now: float, ttl: float, got: bool) -> None:
        """Longer, if it still has the job."""
        held = self._judge("renew", attempt, now, got)
        if held is not None:
            held.until = now + ttl

    def complete(self, attempt: Attempt, now: float, got: bool) -> None:
        """Done, if it still has the job."""
        held = self._judge("complete", attempt, now, got)
        if held is not None:
            held.worker, held.done = None, True

    def release(self, attempt: Attempt, now: float, got: bool) -> None:
        """Given back, if it still has the job; after the end of its lease either answer will do."""
        held = self.jobs[attempt.job]
        late = held.worker is not None and held.attempt == attempt.number and held.until <= now
        gives_back = got if late else self._judge("release", attempt, now, got)
        if gives_back:
            held.worker = None

    def _judge(self, verb: str, attempt: Attempt, now: float, got: bool) -> Held | None:
        """The job, if the attempt has it and the queue says so as well."""
        held = self.jobs[attempt.job]
        has = held.worker is not None and held.attempt == attempt.number and now < held.until
        _require(bool(got) == has, f"{verb} by {attempt} was {_word(got)} at {now!r}: {_why(held, attempt)}")
        return held if has else None


def _word(got: bool) -> str:
    return "accepted" if got else "refused"


def _why(held: Held, attempt: Attempt) -> str:
    if held.done:
        return "the job is done"
    if held.attempt != attempt.number:
        return f"attempt {held.attempt}, by {held.worker!r}, has come after it"
    if held.worker is None:
        return "it has given the job back"
    return f"its lease runs until {held.until!r}"


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Disagreement(otherwise)
