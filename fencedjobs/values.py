"""The values that verbs take and return: plain, frozen, free of any session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class JobState(StrEnum):
    """Where a job is. Only ``leased`` has an owner."""

    READY = "ready"
    SCHEDULED = "scheduled"
    LEASED = "leased"
    DONE = "done"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"
    PURGED = "purged"


class Outcome(StrEnum):
    """What became of a lease whose last COMMIT had no answer; see ``Store.outcome``."""

    COMPLETED = "completed"  #: this very lease completed the job
    HELD = "held"  #: the row still names this lease, so the write did not happen
    ENDED = "ended"  #: the lease is over: failed, released, expired or taken over


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to end one attempt: who (``owner``), which attempt (``fence``), how long (``until``).

    Valid while ``now < until``. ``id`` is the primary key of the leased row.
    """

    id: Any
    owner: str
    fence: int
    until: float


@dataclass(frozen=True, slots=True)
class JobLease(Lease):
    """A leased job: the lease and what the handler needs.

    ``progress`` is the last checkpoint, of this attempt or one before it; ``None`` if there is none.
    ``waited`` is how many seconds the job could have been claimed before it was, never below 0.
    """

    attempt: int
    payload: Any = field(hash=False)
    kind: str
    queue: str
    deadline: float | None
    progress: Any = field(default=None, hash=False)
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The lease columns of a row as they are now; ``owner`` is ``None`` when nobody holds it."""

    id: Any
    owner: str | None
    fence: int
    until: float


@dataclass(frozen=True, slots=True)
class JobError:
    """One failed attempt, as kept with the job."""

    attempt: int
    time: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """One re-entry by an operator, as kept with the job."""

    time: float
    by: str
    reason: str
    state: str  #: the state it came back from
    mended: bool  #: whether the payload was replaced


class EventState(StrEnum):
    """Where an outbox event is."""

    PENDING = "pending"
    SENT = "sent"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Event:
    """An outbox event as it goes to a receiver.

    It is sent again under the same ``id`` when it is unknown whether it arrived. ``seq`` is its place
    in the order of the outbox, ``fence`` that of the lane's lease, by which a receiver tells an old
    relay; 0 outside of a relay. ``attempt`` counts the times it was sent, this one included.
    """

    id: str
    seq: int
    fence: int
    topic: str
    lane: str
    payload: Any = field(hash=False)
    headers: Mapping[str, str] = field(hash=False)
    created: float
    attempt: int


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An outbox event as it was when it was read. Instants are seconds of the store's clock."""

    id: str
    seq: int
    lane: str
    topic: str
    state: EventState
    payload: Any = field(hash=False)
    headers: Mapping[str, str] = field(hash=False)
    fence: int
    attempts: int
    created_at: float
    sent_at: float | None
    last_error: str | None
    reason: str | None
    requeues: tuple[Requeue, ...]


@dataclass(frozen=True, slots=True)
class LaneStats:
    """What an operator sees of one lane."""

    pending: int
    oldest: float | None  #: seconds that the oldest pending event has waited
    attempts: int  #: the most attempts that a pending event has had
    sent: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class InboxStats:
    """What an operator sees of the inbox."""

    messages: int
    duplicates: int
    conflicts: int


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it was when it was read. Instants are seconds of the store's clock."""

    id: str
    queue: str
    kind: str
    key: str | None
    priority: int
    state: JobState
    owner: str | None
    until: float
    fence: int
    attempts: int
    max_attempts: int
    deadline: float | None
    created_at: float
    finished_at: float | None
    payload: Any = field(hash=False)
    result: Any = field(hash=False)
    progress: Any = field(hash=False)  #: the last checkpoint
    reason: str | None
    last_owner: str | None
    errors: tuple[JobError, ...]
    requeues: tuple[Requeue, ...]

    def completed_by(self, lease: Lease) -> bool:
        """Whether it was this very lease that completed the job."""
        return self.state is JobState.DONE and self.fence == lease.fence and self.last_owner == lease.owner
