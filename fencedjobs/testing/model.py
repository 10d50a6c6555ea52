"""The oracle: jobs and locks as the contract describes them, in plain Python.

It is written from the contract and shares nothing with the verbs that it judges but the values and
errors they exchange, because an oracle that shares the rules shares the bugs.

Each verb has the name and arguments of the store's, always with ``now``. It returns the answer that
the store must have given, or raises the `LeaseLost` that it must have raised, and brings the model's
rows to what the store's rows must be. A few answers are free: which due rows a bounded promotion
reached, which rows a bounded sweep or purge took, how long a jittered retry waits. There the model
looks at the rows as the store left them (``look``), takes over the choice if it is an allowed one,
and raises `Disagreement` if not.

A clock that goes back adds no choice. Each call is judged at its own ``now`` and by the row as it is,
which remembers instants but not how late it ever was: a lease that had run out, and that nobody has
claimed, promoted or swept since, runs again and may end its attempt; a job that was due waits again; a
deadline that had passed is ahead again, and what was set aside stays aside. What never goes back is the
fence, so an attempt that another one has followed is refused whatever the time, and nobody has waited
for less than 0 seconds. Instants on a row may be out of order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fencedjobs.errors import LeaseLost
from fencedjobs.values import JobLease, JobRecord, JobState, Lease, LeaseRecord, Outcome

KEPT: Final = object()  #: requeue: the payload stays as it is
HISTORY: Final = 10  #: how many errors and requeues are kept

DEADLINE: Final = "deadline passed"
USED_UP: Final = "attempts used up"
DIED: Final = "lease expired, attempts used up"

WAITING: Final = frozenset({JobState.SCHEDULED, JobState.LEASED})
OPEN: Final = WAITING | {JobState.READY}


class Disagreement(AssertionError):
    """The store gave an answer, or left a row, that the contract does not allow."""


@dataclass(slots=True, eq=False)
class Row:
    """One job as it must be."""

    id: str
    named: bool
    place: int  #: in the order of insertion
    payload: Any
    kind: str
    queue: str
    key: str | None
    priority: int
    deadline: float | None
    max_attempts: int
    created_at: float
    due_at: float  #: since when it can be claimed, or could
    fence: int = 0
    state: JobState = JobState.READY
    owner: str | None = None
    until: float = 0.0
    attempts: int = 0
    last_owner: str | None = None
    progress: Any = None
    result: Any = None
    finished_at: float | None = None
    reasons: frozenset[str] | None = None  #: any of them may be given; ``None``: not said which
    errors: list[tuple[int, float]] = field(default_factory=list)
    requeues: list[tuple[float, str, str, str, bool]] = field(default_factory=list)

    def completed_by(self, lease: Lease) -> bool:
        """Whether this very lease completed the job."""
        done = self.state is JobState.DONE
        return done and (self.last_owner, self.fence) == (lease.owner, lease.fence)

    def live(self, now: float) -> bool:
        """Whether somebody holds the right to end this attempt: until the lease's end, exclusive."""
        return self.state is JobState.LEASED and now < self.until

    def due(self, now: float) -> bool:
        """Whether it waited for an instant that has come: from that instant on, inclusive."""
        return self.state in WAITING and self.until <= now

    def free(self, now: float) -> bool:
        """Whether a claim gets it."""
        return (self.state is JobState.READY or self.due(now)) and not self.spent(now)

    def spent(self, now: float) -> frozenset[str]:
        """Why no further fence may be given; empty if one may."""
        reasons = set()
        if self.deadline is not None and self.deadline <= now:
            reasons.add(DEADLINE)
        if self.attempts >= self.max_attempts:
            reasons.add(DIED if self.state is JobState.LEASED else USED_UP)
        return frozenset(reasons)

    def leave(self, state: JobState, until: float = 0.0) -> None:
        """Every way out of a lease clears the owner; none touches the fence."""
        self.state, self.owner, self.until = state, None, until

    def set_aside(self, reasons: frozenset[str] | None) -> None:
        """Quarantine, for one of these reasons."""
        self.leave(JobState.QUARANTINED)
        self.reasons = reasons

    def wait(self, delay: float, now: float) -> None:
        """Back to the queue, at once or after a delay."""
        self.due_at = now + delay
        if delay:
            self.leave(JobState.SCHEDULED, now + delay)
        else:
            self.leave(JobState.READY)

    def since(self) -> float:
        """Since when it can be claimed: a lease that ended makes it due anew."""
        return self.until if self.state in WAITING else self.due_at

    def take(self, owner: str, ttl: float, now: float) -> JobLease:
        """One claim: one fence, one attempt, and no right beyond the deadline."""
        self.due_at = self.since()
        waited = max(0.0, now - self.due_at)
        self.state, self.owner, self.last_owner = JobState.LEASED, owner, owner
        self.fence += 1
        self.attempts += 1
        return replace(self.extend(ttl, now), waited=waited)

    def extend(self, ttl: float, now: float) -> JobLease:
        """Run until ``now + ttl``, or the deadline if that is earlier."""
        self.until = now + ttl if self.deadline is None else min(now + ttl, self.deadline)
        return self.lease()

    def lease(self) -> JobLease:
        """The lease that the row names."""
        return JobLease(
            self.id, str(self.owner), self.fence, self.until,
            self.attempts, self.payload, self.kind, self.queue, self.deadline, progress=self.progress,
        )  # fmt: skip

    def differs(self, record: JobRecord | None) -> list[str]:
        """What is wrong with the row that was read, one line for each field."""
        if record is None:
            return [f"is missing, expected {self.state} with fence {self.fence}"]
        found: list[tuple[str, Any, Any]]
        found = [(name, getattr(record, name), getattr(self, name)) for name in _compared(self.state)]
        found.append(("errors", [(e.attempt, e.time) for e in record.errors], self.errors))
        again = [(r.time, r.by, r.reason, r.state, r.mended) for r in record.requeues]
        found.append(("requeues", again, self.requeues))
        wrong = [f"{name} is {is_!r}, expected {want!r}" for name, is_, want in found if is_ != want]
        if self.reasons is not None and record.reason not in self.reasons:
            wrong.append(f"reason is {record.reason!r}, expected one of {sorted(self.reasons)}")
        return wrong


_ALWAYS: Final = ("id", "state", "owner", "until", "fence", "payload", "progress", "result", "queue")
_LIVING: Final = (
    "kind", "key", "priority", "attempts", "max_attempts", "deadline", "created_at", "last_owner",
)  # fmt: skip


def _compared(state: JobState) -> tuple[str, ...]:
    if state is JobState.PURGED:
        return _ALWAYS
    ended = (JobState.DONE, JobState.CANCELLED)
    return (*_ALWAYS, *_LIVING, "finished_at") if state in ended else (*_ALWAYS, *_LIVING)


class JobModel:
    """All jobs of one store. ``look(id)`` shows a row as the store left it after the verb in question."""

    def __init__(self, look: Callable[[str], JobRecord | None]) -> None:
        self.look = look
        self.rows: dict[str, Row] = {}
        self._places = 0

    # --- entry ------------------------------------------------------------------------------------

    def enqueue(
        self, id: str | None = None, payload: Any = None, *, now: float, answer: str | None = None,
        kind: str = "", queue: str = "default", key: str | None = None, priority: int = 0,
        run_at: float | None = None, delay: float | None = None, deadline: float | None = None,
        max_attempts: int = 20,
    ) -> str | None:  # fmt: skip
        """A new job, or nothing if the id exists. An id that the store made up is its ``answer``."""
        name = str(answer) if id is None else id
        there = self.rows.get(name)
        if id is None:
            _require(bool(answer) and there is None, f"{answer!r} is no new id")
        elif there is not None and there.state is not JobState.PURGED:
            return None
        self._places += 1
        row = Row(
            name, id is not None, self._places, payload, kind, queue, key, priority, deadline,
            max_attempts, created_at=now, due_at=now, fence=there.fence if there else 0,
        )  # fmt: skip
        at = now + delay if delay else run_at
        if at is not None:
            row.due_at = at
            row.leave(JobState.SCHEDULED, at)
        self.rows[name] = row
        return name

    def enqueue_many(
        self, items: Sequence[Mapping[str, Any]], *, now: float, answer: Sequence[str]
    ) -> list[str]:
        """One after the other; the ids that were created."""
        given = {item.get("id") for item in items}
        made_up = (name for name in answer if name not in given)
        created = [
            self.enqueue(**item, now=now, answer=None if item.get("id") else next(made_up, None))
            for item in items
        ]
        return [name for name in created if name is not None]

    # --- claims -----------------------------------------------------------------------------------

    def claim(
        self, owner: str | None = None, *, ttl: float, now: float, id: str | None = None,
        queue: str = "default", cut: bool = False,
    ) -> JobLease | None:  # fmt: skip
        """A lease on this id, or on the first job of the queue."""
        if id is None:
            claimed = self.claim_many(owner, ttl=ttl, limit=1, queue=queue, now=now, cut=cut)
            return next(iter(claimed), None)
        row = self.rows.get(id)
        if row is None or row.state not in OPEN or row.live(now):
            return None
        waits = row.state is JobState.SCHEDULED and not row.due(now)
        if row.spent(now):
            # Nobody can ever claim a job that waits past its deadline: now or later, it is set aside.
            if not waits or self._moved(row):
                row.set_aside(row.spent(now))
            return None
        return None if waits else row.take(self._owner(row, owner), ttl, now)

    def claim_many(
        self, owner: str | None = None, *, ttl: float, limit: int, now: float, queue: str = "default",
        kinds: Collection[str] | None = None, cut: bool = False,
    ) -> list[JobLease]:  # fmt: skip
        """The first ``limit`` ready jobs, after due ones have become ready; spent ones are set aside.

        A claim that met spent ones may go on in another transaction. If it was ``cut`` after a COMMIT,
        it may have come to the first: what it met is set aside, and of the first ``limit`` it has the rest.

        What is exact: the order among the jobs that were ready, or among the ``limit`` due first.
        If those do not suffice, more due jobs are promoted to fill up, and among them priority is
        best effort. A claim falls short only if nothing is left that it could take.
        """
        cut = cut and not self._due(queue, now)  # else it is one transaction
        late = self._promote(queue, limit, now)
        wanted = [row for row in self.rows.values() if kinds is None or row.kind in kinds]
        ready = [row for row in self._ready(queue) if row in wanted]
        if cut and self._stopped_after(ready[:limit], ready[limit:], now):
            ready = ready[:limit]
            limit = sum(not row.spent(now) for row in ready)
        fit = [row for row in ready if not row.spent(now)]
        sure = [row for row in fit if row not in late]
        if len(sure) >= limit:
            chosen = fit[:limit]
        else:
            chosen = [row for row in fit if row in sure or self._moved(row)][:limit]
        due = [row for row in self._due(queue, now) if row in wanted and not row.spent(now)]
        left = [row.id for row in (*fit, *due) if row not in chosen]
        told = f"{len(chosen)} were claimed, with limit {limit}, and left are {left}"
        _require(len(chosen) == limit or not left, told)
        met = ready[: ready.index(chosen[-1])] if chosen and len(chosen) == limit else ready
        for row in self._ready(queue):
            if row.spent(now) and (row in met or self._moved(row)):
                row.set_aside(row.spent(now))
        return [row.take(self._owner(row, owner), ttl, now) for row in chosen]

    def _stopped_after(self, first: list[Row], others: list[Row], now: float) -> bool:
        """Whether these rows, some of them spent, are all that a claim has come to."""
        dead = any(row.spent(now) for row in first)
        beyond = any(self._moved(row) for row in others if not row.spent(now))
        return dead and all(map(self._moved, first)) and not beyond

    def _promote(self, queue: str, limit: int, now: float) -> list[Row]:
        """Promote what the store promoted, the ``limit`` due first among it; those that were not first.

        Of several that are due at the same instant, any may be first.
        """
        due = self._due(queue, now)
        moved = [row for row in due if self._moved(row)]
        bound = due[:limit][-1].until if due else now
        first = [row for row in moved if row.until <= bound]
        missed = [row.id for row in due[:limit] if row.until < bound and row not in moved]
        told = f"{len(first)} of {len(due)} due rows were promoted, with limit {limit}; missed: {missed}"
        _require(len(first) >= min(limit, len(due)) and not missed, told)
        tied = sum(row.until <= bound for row in due) > limit
        late = [row for row in moved if row.until > bound or (tied and row.until == bound)]
        for row in moved:
            row.due_at = row.until
            if row.spent(now):
                row.set_aside(row.spent(now))
            else:
                row.leave(JobState.READY)
        return late

    def _due(self, queue: str, now: float) -> list[Row]:
        rows = (row for row in self.rows.values() if row.queue == queue and row.due(now))
        return sorted(rows, key=lambda row: row.until)

    def _ready(self, queue: str) -> list[Row]:
        rows = (row for row in self.rows.values() if row.queue == queue and row.state is JobState.READY)
        return sorted(rows, key=lambda row: (-row.priority, row.place))

    def _moved(self, row: Row) -> bool:
        seen = self.look(row.id)
        return seen is None or (seen.state, seen.fence) != (row.state, row.fence)

    def _owner(self, row: Row, owner: str | None) -> str:
        """The caller's name, or the one that the store made up."""
        seen = self.look(row.id) if owner is None else None
        return owner or (seen.owner if seen else None) or "a worker without a name"

    # --- the guarded verbs ------------------------------------------------------------------------

    def _held(self, lease: Lease, now: float | None) -> Row:
        """The one guard: this id, this owner, this fence, and (but for release) still in time."""
        row = self.rows.get(lease.id)
        if row is None or (row.owner, row.fence) != (lease.owner, lease.fence):
            raise LeaseLost(lease, row)
        if now is not None and not row.live(now):
            raise LeaseLost(lease, row)
        return row

    def renew(self, lease: JobLease, *, ttl: float, now: float) -> JobLease:
        """The same attempt, for longer (or shorter): the lease as it was presented, with a new end."""
        return replace(lease, until=self._held(lease, now).extend(ttl, now).until)

    def renew_many(self, leases: Iterable[JobLease], *, ttl: float, now: float) -> list[JobLease | None]:
        """In input order, ``None`` for each lost one."""
        renewed: list[JobLease | None] = []
        for lease in leases:
            try:
                renewed.append(self.renew(lease, ttl=ttl, now=now))
            except LeaseLost:
                renewed.append(None)
        return renewed

    def complete(self, lease: Lease, result: Any = None, *, now: float) -> None:
        """Done; the row remembers who did it."""
        row = self._held(lease, now)
        row.leave(JobState.DONE)
        row.result, row.finished_at = result, now

    def checkpoint(self, lease: Lease, data: Any, *, now: float) -> None:
        """How far the job has come, for the next attempt; the lease goes on."""
        self._held(lease, now).progress = data

    def set_aside(
        self, lease: Lease, reason: str, *, state: JobState = JobState.QUARANTINED, now: float
    ) -> None:
        """No further attempt, whoever is left."""
        row = self._held(lease, now)
        row.leave(state)
        row.reasons, row.finished_at = frozenset({reason}), now

    def complete_many(
        self, leases: Sequence[Lease], results: Sequence[Any] | None = None, *, now: float
    ) -> list[Lease]:
        """The lost ones; the others are done."""
        lost = []
        for lease, result in zip(leases, results or [None] * len(leases), strict=True):
            try:
                self.complete(lease, result, now=now)
            except LeaseLost:
                lost.append(lease)
        return lost

    def fail(self, lease: Lease, error: object, *, retry: Any, now: float) -> JobState:
        """Back to the queue after a wait, or set aside."""
        row = self._held(lease, now)
        row.errors = [*row.errors, (row.attempts, now)][-HISTORY:]
        if retry is None:
            row.set_aside(None)
        elif row.attempts >= row.max_attempts:
            row.set_aside(frozenset({USED_UP}))
        else:
            self._back_off(row, retry, now)
        return row.state

    def _back_off(self, row: Row, retry: Any, now: float) -> None:
        bound = min(retry.cap, retry.base * retry.factor ** (row.attempts - 1))
        seen = self.look(row.id) if retry.jitter else None
        if seen is None:
            row.wait(bound, now)
        elif seen.state is JobState.READY:  # chance may say 0
            row.wait(0.0, now)
        else:
            _require(now <= seen.until <= now + bound, f"retry at {seen.until!r}, not {now!r} + 0…{bound!r}")
            row.due_at = seen.until
            row.leave(JobState.SCHEDULED, seen.until)

    def release(self, lease: Lease, *, delay: float = 0, refund: bool = False, now: float) -> None:
        """Given back unfinished, also late: whoever is still named by the row may leave it."""
        row = self._held(lease, None)
        row.attempts -= refund
        row.wait(delay, now)

    # --- operators --------------------------------------------------------------------------------

    def cancel(self, id: str, *, now: float) -> bool:
        """Never to be run (again)."""
        row = self.rows.get(id)
        if row is None or row.state not in OPEN | {JobState.QUARANTINED}:
            return False
        row.leave(JobState.CANCELLED)
        row.reasons, row.finished_at = None, now
        return True

    def quarantine(self, id: str, reason: str, *, now: float) -> bool:
        """Set aside by hand."""
        row = self.rows.get(id)
        if row is None or row.state not in OPEN:
            return False
        row.set_aside(frozenset({reason}))
        return True

    def requeue(self, id: str, *, payload: Any = KEPT, by: str, reason: str, now: float) -> bool:
        """Ready again with all its attempts, in its old place, and with its fence."""
        row = self.rows.get(id)
        if row is None or row.state not in (JobState.QUARANTINED, JobState.CANCELLED):
            return False
        mended = payload is not KEPT
        row.requeues = [*row.requeues, (now, by, reason, str(row.state), mended)][-HISTORY:]
        row.wait(0.0, now)
        row.reasons, row.attempts = None, 0
        if mended:
            row.payload, row.progress = payload, None
        return True

    def sweep(self, *, limit: int = 1000, now: float) -> int:
        """Set aside what nobody may claim any more, at most ``limit`` rows; never a live lease."""
        open_ = (row for row in self.rows.values() if row.state in OPEN and not row.live(now))
        swept = self._choice([row for row in open_ if row.spent(now)], limit)
        for row in swept:
            row.set_aside(row.spent(now))
        return len(swept)

    def purge(self, *, before: float, limit: int = 1000, forget: bool = False) -> int:
        """Named ids leave a tombstone with their fence; generated ids, and forgotten ones, go."""
        ends = {JobState.DONE, JobState.CANCELLED} | ({JobState.PURGED} if forget else set())
        old = [r for r in self.rows.values() if r.state in ends and (r.finished_at or 0.0) < before]
        purged = self._choice(old, limit)
        for row in purged:
            if row.named and not forget:
                self.rows[row.id] = _tombstone(row)
            else:
                del self.rows[row.id]
        return len(purged)

    def _choice(self, allowed: list[Row], limit: int) -> list[Row]:
        """Which rows a bounded verb took is free, how many is not."""
        chosen = [row for row in allowed if self._moved(row)]
        told = f"{len(chosen)} of {len(allowed)} rows were taken, with limit {limit}"
        _require(len(chosen) == min(limit, len(allowed)), told)
        return chosen

    # --- reading ----------------------------------------------------------------------------------

    def counts(self) -> dict[str, dict[JobState, int]]:
        """How many jobs each queue has in each state, without tombstones."""
        table: dict[str, dict[JobState, int]] = {}
        for row in self.rows.values():
            if row.state is not JobState.PURGED:
                states = table.setdefault(row.queue, {})
                states[row.state] = states.get(row.state, 0) + 1
        return table

    def outcome(self, lease: Lease) -> Outcome:
        """What became of a lease."""
        row = self.rows.get(lease.id)
        if row is not None and row.completed_by(lease):
            return Outcome.COMPLETED
        held = row is not None and (row.owner, row.fence) == (lease.owner, lease.fence)
        return Outcome.HELD if held else Outcome.ENDED

    def agree(self, records: Mapping[str, JobRecord | None]) -> None:
        """Every row as it was read must be as it must be."""
        wrong = []
        for name, record in records.items():
            row = self.rows.get(name)
            if row is not None:
                wrong += [f"job {name!r}: {line}" for line in row.differs(record)]
            elif record is not None:
                wrong.append(f"job {name!r}: {record.state} with fence {record.fence}, expected no row")
        _require(not wrong, "\n".join(wrong))


def _tombstone(row: Row) -> Row:
    grave = Row(row.id, True, row.place, None, "", "", None, 0, None, 0, row.created_at, 0.0, row.fence)
    grave.state, grave.finished_at = JobState.PURGED, row.finished_at
    return grave


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Disagreement(otherwise)


class LockModel:
    """Named leases: the guard and the fence without anything else."""

    def __init__(self) -> None:
        self.rows: dict[str, LeaseRecord] = {}

    def claim(self, name: str, owner: str, *, ttl: float, now: float) -> Lease | None:
        """The lease, if nobody has a live one; the first claim creates the row."""
        row = self.rows.get(name, LeaseRecord(name, None, 0, 0.0))
        if row.owner is not None and now < row.until:
            return None
        return self._set(name, owner, row.fence + 1, now + ttl)

    def renew(self, lease: Lease, *, ttl: float, now: float) -> Lease:
        """The same lease, for longer (or shorter)."""
        if not self.check(lease, now=now):
            raise LeaseLost(lease, self.get(lease.id))
        return self._set(lease.id, lease.owner, lease.fence, now + ttl)

    def release(self, lease: Lease) -> None:
        """Given back, also late."""
        if not self._named(lease):
            raise LeaseLost(lease, self.get(lease.id))
        self.rows[lease.id] = LeaseRecord(lease.id, None, lease.fence, 0.0)

    def check(self, lease: Lease, *, now: float) -> bool:
        """Whether the lease still holds."""
        return self._named(lease) and now < self.rows[lease.id].until

    def get(self, name: str) -> LeaseRecord | None:
        """The row now."""
        return self.rows.get(name)

    def agree(self, records: Mapping[str, LeaseRecord | None]) -> None:
        """Every lock as it was read must be as it must be."""
        wrong = [
            f"lock {name!r}: is {record}, expected {self.get(name)}"
            for name, record in records.items()
            if record != self.get(name)
        ]
        _require(not wrong, "\n".join(wrong))

    def _named(self, lease: Lease) -> bool:
        row = self.rows.get(lease.id)
        return row is not None and (row.owner, row.fence) == (lease.owner, lease.fence)

    def _set(self, name: str, owner: str, fence: int, until: float) -> Lease:
        self.rows[name] = LeaseRecord(name, owner, fence, until)
        return Lease(name, owner, fence, until)
