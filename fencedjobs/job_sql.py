"""What the verbs of jobs say in SQL: conditions, assignments, and the statements built from them.

Statements are built once per table and kept; verbs give them parameters.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Double,
    Select,
    Table,
    Text,
    Update,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    null,
    or_,
    select,
    union_all,
    update,
)

from fencedjobs import payload as edge
from fencedjobs.dialects import Notify, clock
from fencedjobs.leases import NOW, ONE, Change, Leased, Transition, guard, remembered
from fencedjobs.models import Job
from fencedjobs.values import JobError, JobLease, JobRecord, JobState, Requeue

KEEP: Final = 10  # errors and requeues kept with a job
ENDED: Final = (JobState.DONE, JobState.CANCELLED)
OPEN: Final = (JobState.READY, JobState.SCHEDULED, JobState.LEASED)
WAITING: Final = (JobState.SCHEDULED, JobState.LEASED)
FENCED: Final = tuple(sorted(Job.__fenced__))


@remembered
def leased_jobs(table: Table) -> Leased:
    """The table of jobs as the lease core sees it. ``open`` is empty: every way out clears the owner."""
    return Leased(table=table, key=table.c.id, ends=table.c.deadline, state=table.c.state, model=Job)


# --- conditions and assignments -------------------------------------------------------------------


def _is(column: Column[Any], *states: JobState) -> ColumnElement[bool]:
    """A condition with the states in the text: a parameter would not match a partial index."""
    words: list[ColumnElement[str]] = [literal_column(f"'{state.value}'", Text()) for state in states]
    return column == words[0] if len(words) == 1 else column.in_(words)


def _alive(jobs: Leased, now: ColumnElement[float]) -> ColumnElement[bool]:
    """Whether a job may be given another fence: attempts left, and its deadline ahead."""
    c = jobs.table.c
    return and_(c.attempts < c.max_attempts, or_(c.deadline.is_(None), c.deadline > now))


def _why_dead(jobs: Leased, now: ColumnElement[float]) -> ColumnElement[str]:
    c = jobs.table.c
    return case(
        (c.deadline <= now, "deadline passed"),
        (_is(c.state, JobState.LEASED), "lease expired, attempts used up"),
        else_="attempts used up",
    )


def _due(
    jobs: Leased, now: ColumnElement[float], states: tuple[JobState, ...] = WAITING
) -> ColumnElement[bool]:
    """Scheduled for now or earlier, or leased until now or earlier."""
    return and_(_is(jobs.table.c.state, *states), jobs.until <= now)


def _grant(jobs: Leased, now: ColumnElement[float]) -> list[tuple[Column[Any], Any]]:
    """A new lease for what is alive, quarantine for what is not.

    The order matters on MariaDB: what a value depends on is assigned after it.
    """
    c, alive, owner = jobs.table.c, _alive(jobs, now), bindparam("new_owner", type_=jobs.owner.type)
    return [
        (c.reason, case((alive, c.reason), else_=_why_dead(jobs, now))),
        (c.finished_at, case((alive, null()), else_=now)),
        (c.owner, case((alive, owner), else_=null())),
        (c.last_owner, case((alive, owner), else_=c.last_owner)),
        (c.until, case((alive, jobs.end(now)), else_=0.0)),
        (c.fence, case((alive, c.fence + 1), else_=c.fence)),
        (c.state, case((alive, JobState.LEASED.value), else_=JobState.QUARANTINED.value)),
        (c.attempts, case((alive, c.attempts + 1), else_=c.attempts)),
    ]


def _bury(
    jobs: Leased, now: ColumnElement[float], state: JobState, reason: Any
) -> list[tuple[Column[Any], Any]]:
    c = jobs.table.c
    return [
        (c.reason, reason),
        (c.finished_at, now),
        (c.owner, null()),
        (c.until, 0.0),
        (c.state, state.value),
    ]


def _due_since(jobs: Leased) -> tuple[Column[Any], Any]:
    """Of a job that is due: since when. It must be assigned before state and until are changed."""
    c = jobs.table.c
    return c.due_at, case((_is(c.state, *WAITING), c.until), else_=c.due_at)


def _granted(jobs: Leased, now: ColumnElement[float]) -> list[ColumnElement[Any]]:
    c = jobs.table.c
    lease = [c.id, c.owner, c.fence, c.until, c.attempts, c.payload, c.kind, c.queue, c.deadline, c.progress]
    return [*lease, (now - c.due_at).label("waited"), c.state, c.priority, c.seq]


def wake(jobs: Leased, notify: Notify | None) -> list[ColumnElement[Any]]:
    """What a RETURNING asks for, so that a row that has become ready wakes who waits for its queue."""
    c = jobs.table.c
    return [] if notify is None else [case((_is(c.state, JobState.READY), notify(c.queue)))]


# --- claims (transactions of their own) -----------------------------------------------------------


@remembered
def claim_named(jobs: Leased, given: bool) -> Transition:
    now = clock(NOW, given=given)
    free = or_(_is(jobs.table.c.state, JobState.READY), _due(jobs, now))
    where = and_(jobs.key == bindparam("job_id"), free)
    return Transition(jobs, where, [_due_since(jobs), *_grant(jobs, now)], _granted(jobs, now))


@remembered
def take(jobs: Leased, given: bool, chosen: bool) -> Transition:
    c, now = jobs.table.c, clock(NOW, given=given)
    where = and_(c.queue == bindparam("in_queue"), _is(c.state, JobState.READY))
    if chosen:
        where = and_(where, c.kind.in_(bindparam("kinds", expanding=True)))
    order = (c.priority.desc(), c.seq)
    return Transition(jobs, where, _grant(jobs, now), _granted(jobs, now), order)


@remembered
def take_at_once(
    jobs: Leased, given: bool, chosen: bool, waiting: tuple[tuple[JobState, ...], ...]
) -> Transition:
    """`take`, if nothing is due or expired that would have to be promoted before."""
    # In order, so that whatever the statistics say it is a look at the start of the index.
    due = (
        _claimable(jobs, _due(jobs, clock(NOW, given=given), states), False).order_by(jobs.until)
        for states in waiting
    )
    taking = take(jobs, given, chosen)
    return replace(taking, where=and_(taking.where, *(one.scalar_subquery().is_(None) for one in due)))


@remembered
def promote(jobs: Leased, given: bool, states: tuple[JobState, ...]) -> Transition:
    """Due and expired rows become ready, the earliest first; what is used up goes to quarantine."""
    c, now = jobs.table.c, clock(NOW, given=given)
    alive = _alive(jobs, now)
    values: list[tuple[Column[Any], Any]] = [
        (c.due_at, c.until),
        (c.reason, case((alive, c.reason), else_=_why_dead(jobs, now))),
        (c.finished_at, case((alive, null()), else_=now)),
        (c.owner, null()),
        (c.until, 0.0),
        (c.state, case((alive, JobState.READY.value), else_=JobState.QUARANTINED.value)),
    ]
    where = and_(c.queue == bindparam("in_queue"), _is(c.state, *states), c.until <= now)
    return Transition(jobs, where, values, (c.id,), (c.until,))


@remembered
def bury_ready(jobs: Leased, given: bool) -> Transition:
    """Dead rows at the head of a queue, many at a time, so that no claim walks over them again."""
    c, now = jobs.table.c, clock(NOW, given=given)
    dead = or_(c.attempts >= c.max_attempts, c.deadline <= now)
    where = and_(c.queue == bindparam("in_queue"), _is(c.state, JobState.READY), dead)
    values = _bury(jobs, now, JobState.QUARANTINED, _why_dead(jobs, now))
    return Transition(jobs, where, values, (c.id,), (c.priority.desc(), c.seq))


@remembered
def claimable(jobs: Leased, given: bool, chosen: bool) -> Select[Any]:
    c = jobs.table.c
    return _claimable(jobs, or_(_is(c.state, JobState.READY), _due(jobs, clock(NOW, given=given))), chosen)


@remembered
def claimable_apart(jobs: Leased, given: bool, chosen: bool) -> tuple[Select[Any], Select[Any]]:
    """What is ready, and what is due or expired: each along its own index."""
    ready = _is(jobs.table.c.state, JobState.READY)
    return _claimable(jobs, ready, chosen), _claimable(jobs, _due(jobs, clock(NOW, given=given)), chosen)


def _claimable(jobs: Leased, state: ColumnElement[bool], chosen: bool) -> Select[Any]:
    c = jobs.table.c
    where = and_(c.queue == bindparam("in_queue"), state)
    if chosen:
        where = and_(where, c.kind.in_(bindparam("kinds", expanding=True)))
    return select(c.id).where(where).limit(1)


# --- named leases ---------------------------------------------------------------------------------


@remembered
def complete(jobs: Leased, given: bool) -> Update:
    now = clock(NOW, given=given)
    result = bindparam("result", type_=jobs.table.c.result.type)
    return update(jobs.table).where(guard(jobs, ONE, now)).values(_completed(now, result))


@remembered
def complete_all(jobs: Leased, given: bool, with_results: bool) -> Change:
    now = clock(NOW, given=given)
    result = jobs.table.c.result if with_results else None
    return Change(_completed(now, null()), (jobs.key, jobs.table.c.last_owner, jobs.fence), now, result)


def _completed(now: ColumnElement[float], result: Any) -> dict[str, Any]:
    done = {"state": JobState.DONE.value, "owner": None, "until": 0.0}
    return {**done, "finished_at": now, "result": result}


@remembered
def give_back(jobs: Leased, timed: bool, given: bool, delayed: bool, notify: Notify | None) -> Update:
    """Out of a lease and back to waiting: fail (timed) and release (not)."""
    c, now = jobs.table.c, clock(NOW, given=given)
    refund = bindparam("refund", type_=c.attempts.type)
    later = now + bindparam("delay", type_=Double())
    values: dict[Any, Any] = {
        "state": (JobState.SCHEDULED if delayed else JobState.READY).value,
        "owner": None,
        "until": later if delayed else 0.0,
        "due_at": later if delayed else now,
        "attempts": case((c.attempts > refund, c.attempts - refund), else_=0),
    }
    if timed:
        values["errors"] = bindparam("errors", type_=c.errors.type)
    back = update(jobs.table).where(guard(jobs, ONE, now if timed else None)).values(values)
    return back if delayed or notify is None else back.returning(*wake(jobs, notify))


@remembered
def fail_for_good(jobs: Leased, given: bool) -> Update:
    c, now = jobs.table.c, clock(NOW, given=given)
    reason = bindparam("reason", type_=c.reason.type)
    values = dict(_bury(jobs, now, JobState.QUARANTINED, reason))
    values[c.errors] = bindparam("errors", type_=c.errors.type)
    return update(jobs.table).where(guard(jobs, ONE, now)).values(values)


@remembered
def end_aside(jobs: Leased, given: bool, state: JobState) -> Update:
    """The attempt and the job end, without a result."""
    now = clock(NOW, given=given)
    reason = bindparam("reason", type_=jobs.table.c.reason.type)
    return update(jobs.table).where(guard(jobs, ONE, now)).values(dict(_bury(jobs, now, state, reason)))


@remembered
def checkpoint(jobs: Leased, given: bool) -> Update:
    reached = bindparam("reached", type_=jobs.table.c.progress.type)
    return update(jobs.table).where(guard(jobs, ONE, clock(NOW, given=given))).values(progress=reached)


@remembered
def failing(jobs: Leased, given: bool, row_locks: bool) -> Select[Any]:
    c, now = jobs.table.c, clock(NOW, given=given)
    reading = select(c.attempts, c.max_attempts, c.errors, now.label("read_at")).where(guard(jobs, ONE, now))
    return reading.with_for_update() if row_locks else reading


@remembered
def renew_all(jobs: Leased, given: bool) -> Change:
    now = clock(NOW, given=given)
    return Change({"until": jobs.end(now)}, (jobs.key, jobs.owner, jobs.fence, jobs.until), now)


# --- operators and maintenance --------------------------------------------------------------------


@remembered
def set_aside(jobs: Leased, given: bool, state: JobState, sources: tuple[JobState, ...]) -> Transition:
    c = jobs.table.c
    reason = bindparam("reason", type_=c.reason.type)
    where = and_(jobs.key == bindparam("job_id"), _is(c.state, *sources))
    return Transition(jobs, where, _bury(jobs, clock(NOW, given=given), state, reason), (jobs.key,))


@remembered
def requeue(jobs: Leased, given: bool, mended: bool, notify: Notify | None) -> Update:
    c = jobs.table.c
    as_read = and_(
        jobs.key == bindparam("job_id"), c.state == bindparam("was"), c.fence == bindparam("had_fence")
    )
    values: dict[Any, Any] = {
        "state": JobState.READY.value,
        "attempts": 0,
        "until": 0.0,
        "due_at": clock(NOW, given=given),
        "reason": None,
        "finished_at": None,
        "requeues": bindparam("history", type_=c.requeues.type),
    }
    if mended:
        values |= {"payload": bindparam("mended", type_=c.payload.type), "progress": None}
    again = update(jobs.table).where(as_read).values(values)
    return again if notify is None else again.returning(*wake(jobs, notify))


@remembered
def requeueable(jobs: Leased, given: bool, row_locks: bool) -> Select[Any]:
    c, now = jobs.table.c, clock(NOW, given=given)
    reading = select(c.state, c.fence, c.requeues, now.label("read_at")).where(
        jobs.key == bindparam("job_id"), _is(c.state, JobState.QUARANTINED, JobState.CANCELLED)
    )
    return reading.with_for_update() if row_locks else reading


@remembered
def sweep(jobs: Leased, given: bool) -> Transition:
    c, now = jobs.table.c, clock(NOW, given=given)
    idle = or_(
        _is(c.state, JobState.READY, JobState.SCHEDULED),
        and_(_is(c.state, JobState.LEASED), c.until <= now),
    )
    dead = or_(c.attempts >= c.max_attempts, c.deadline <= now)
    values = _bury(jobs, now, JobState.QUARANTINED, _why_dead(jobs, now))
    return Transition(jobs, and_(idle, dead), values, (jobs.key,), (c.seq,))


@remembered
def purge(jobs: Leased, forget: bool) -> tuple[Transition, ...]:
    c = jobs.table.c
    old = c.finished_at < bindparam("before", type_=c.finished_at.type)
    if forget:
        any_ended = and_(_is(c.state, *ENDED, JobState.PURGED), old)
        return (Transition(jobs, any_ended, None, (jobs.key,), (c.seq,)),)
    ended = and_(_is(c.state, *ENDED), old)
    emptied = {
        "queue": "", "kind": "", "key": None, "priority": 0, "until": 0.0, "last_owner": None,
        "attempts": 0, "deadline": None, "due_at": 0.0, "payload": "null", "progress": None, "result": None,
        "reason": None, "errors": None, "requeues": None, "state": JobState.PURGED.value,
    }  # fmt: skip
    values = [(c[name], null() if value is None else value) for name, value in emptied.items()]
    return (
        Transition(jobs, and_(ended, c.named == 0), None, (jobs.key,), (c.seq,)),
        Transition(jobs, and_(ended, c.named == 1), values, (jobs.key,), (c.seq,)),
    )


@remembered
def revive(jobs: Leased) -> Transition:
    """Take a tombstone out, to be put back in the same transaction at a new place in the order.

    Not an upsert: that would lock the row of a running job, whose renewal then waits for the
    enqueuing transaction, and MariaDB gives a row no new number in place.
    """
    c = jobs.table.c
    where = and_(jobs.key == bindparam("job_id"), _is(c.state, JobState.PURGED))
    return Transition(jobs, where, None, (c.fence,))


# --- reading --------------------------------------------------------------------------------------


@remembered
def get(jobs: Leased, current: bool) -> Select[Any]:
    c = jobs.table.c
    reading = select(*(c[name] for name in FENCED)).where(jobs.key == bindparam("job_id"))
    return reading.with_for_update(read=True, skip_locked=True) if current else reading


@remembered
def counts(jobs: Leased) -> Select[Any]:
    c = jobs.table.c
    counting = select(c.queue, c.state, func.count()).where(c.state != JobState.PURGED.value)
    return counting.group_by(c.queue, c.state).order_by(c.queue, c.state)


@remembered
def oldest_waiting(jobs: Leased, given: bool, partial_indexes: bool) -> Select[Any]:
    """For each queue the longest wait of a job that a claim would get now."""
    c, now = jobs.table.c, clock(NOW, given=given)
    due = [(_is(c.state, JobState.READY), c.due_at)]
    groups = (WAITING,) if partial_indexes else tuple((state,) for state in WAITING)  # as they are indexed
    due += [(and_(_is(c.state, *states), c.until <= now), c.until) for states in groups]
    places = [select(c.queue, since.label("since")).where(here, _alive(jobs, now)) for here, since in due]
    if not partial_indexes:  # the queue comes first in the index, and there are few
        queues = select(c.queue).distinct().subquery()
        places = [place.join_from(queues, jobs.table, c.queue == queues.c.queue) for place in places]
    waiting = union_all(*places).subquery()
    return select(waiting.c.queue, now - func.min(waiting.c.since)).group_by(waiting.c.queue)


@remembered
def outcome(jobs: Leased, row_locks: bool) -> Select[Any]:
    reading = get(jobs, False)
    return reading.with_for_update() if row_locks else reading


def record(row: Any) -> JobRecord:
    held = dict(row._mapping)
    for name in ("seq", "named", "due_at"):
        del held[name]
    for name in ("payload", "progress", "result"):
        held[name] = edge.decode(held[name])
    errors, requeues = edge.decode(held.pop("errors")), edge.decode(held.pop("requeues"))
    return JobRecord(
        **held | {"state": JobState(held["state"])},
        errors=tuple(JobError(**one) for one in errors or ()),
        requeues=tuple(Requeue(**one) for one in requeues or ()),
    )


def lease(row: Any) -> JobLease:
    id, owner, fence, until, attempt, text, kind, queue, deadline, reached, waited = row[:11]
    return JobLease(
        id, owner, fence, until, attempt, edge.decode(text), kind, queue, deadline,
        progress=edge.decode(reached), waited=max(0.0, float(waited)),
    )  # fmt: skip


def history(text: str | None, entry: JobError | Requeue) -> str:
    return edge.encode("history", [*(edge.decode(text) or []), asdict(entry)][-KEEP:])
