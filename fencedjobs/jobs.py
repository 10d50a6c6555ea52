"""The verbs of jobs: thin conditions and assignments over the lease core."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Double,
    Insert,
    Row,
    Select,
    Table,
    Update,
    and_,
    bindparam,
    case,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from fencedjobs import dialects
from fencedjobs import payload as edge
from fencedjobs.errors import InvalidValue, LeaseLost, TransactionLost
from fencedjobs.dialects import clock
from fencedjobs.leases import (
    NOW,
    ONE,
    TTL,
    Change,
    Leased,
    Transition,
    at,
    from_arrays,
    guard,
    holds,
    lost_among,
    make,
    make_many,
    named,
    remembered,
    renew,
)
from fencedjobs.models import Job
from fencedjobs.retry import Retry
from fencedjobs.transaction import Transaction
from fencedjobs.values import JobError, JobLease, JobRecord, JobState, Outcome, Requeue

KEEP: Final = 10  # errors and requeues kept with a job
MAX_ATTEMPTS: Final = 20
_MAX_COUNT: Final = 2**63 - 1
_BULK: Final = 1000  # rows in one statement of enqueue_many
_ENDED: Final = (JobState.DONE, JobState.CANCELLED)
_OPEN: Final = (JobState.READY, JobState.SCHEDULED, JobState.LEASED)
_WAITING: Final = (JobState.SCHEDULED, JobState.LEASED)
_KEPT: Final[Any] = object()
_FENCED: Final = tuple(sorted(Job.__fenced__))


@remembered
def leased_jobs(table: Table) -> Leased:
    """The table of jobs as the lease core sees it. ``open`` is empty: every way out clears the owner."""
    return Leased(table=table, key=table.c.id, ends=table.c.deadline, state=table.c.state, model=Job)


# --- conditions and assignments -------------------------------------------------------------------


def _is(column: Column[Any], *states: JobState) -> ColumnElement[bool]:
    """A condition with the states in the text: a parameter would not match a partial index."""
    words = [literal_column(f"'{state.value}'") for state in states]
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


def _due(jobs: Leased, now: ColumnElement[float]) -> ColumnElement[bool]:
    """Scheduled for now or earlier, or leased until now or earlier."""
    return and_(_is(jobs.table.c.state, *_WAITING), jobs.until <= now)


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


def _granted(jobs: Leased) -> list[Column[Any]]:
    c = jobs.table.c
    lease = [c.id, c.owner, c.fence, c.until, c.attempts, c.payload, c.kind, c.queue, c.deadline]
    return [*lease, c.state, c.priority, c.seq]


# --- claims (transactions of their own) -----------------------------------------------------------


@remembered
def _claim_named(jobs: Leased, given: bool) -> Transition:
    now = clock(NOW, given=given)
    free = or_(_is(jobs.table.c.state, JobState.READY), _due(jobs, now))
    where = and_(jobs.key == bindparam("job_id"), free)
    return Transition(jobs, where, _grant(jobs, now), _granted(jobs))


@remembered
def _take(jobs: Leased, given: bool, chosen: bool) -> Transition:
    c = jobs.table.c
    where = and_(c.queue == bindparam("in_queue"), _is(c.state, JobState.READY))
    if chosen:
        where = and_(where, c.kind.in_(bindparam("kinds", expanding=True)))
    order = (c.priority.desc(), c.seq)
    return Transition(jobs, where, _grant(jobs, clock(NOW, given=given)), _granted(jobs), order)


@remembered
def _promote(jobs: Leased, given: bool, states: tuple[JobState, ...]) -> Transition:
    """Due and expired rows become ready, the earliest first; what is used up goes to quarantine."""
    c, now = jobs.table.c, clock(NOW, given=given)
    alive = _alive(jobs, now)
    values: list[tuple[Column[Any], Any]] = [
        (c.reason, case((alive, c.reason), else_=_why_dead(jobs, now))),
        (c.finished_at, case((alive, null()), else_=now)),
        (c.owner, null()),
        (c.until, 0.0),
        (c.state, case((alive, JobState.READY.value), else_=JobState.QUARANTINED.value)),
    ]
    where = and_(c.queue == bindparam("in_queue"), _is(c.state, *states), c.until <= now)
    return Transition(jobs, where, values, (c.id,), (c.until,))


@remembered
def _bury_ready(jobs: Leased, given: bool) -> Transition:
    """Dead rows at the head of a queue, many at a time, so that no claim walks over them again."""
    c, now = jobs.table.c, clock(NOW, given=given)
    dead = or_(c.attempts >= c.max_attempts, c.deadline <= now)
    where = and_(c.queue == bindparam("in_queue"), _is(c.state, JobState.READY), dead)
    values = _bury(jobs, now, JobState.QUARANTINED, _why_dead(jobs, now))
    return Transition(jobs, where, values, (c.id,), (c.priority.desc(), c.seq))


@remembered
def _claimable(jobs: Leased, given: bool, chosen: bool) -> Select[Any]:
    c, now = jobs.table.c, clock(NOW, given=given)
    waits = or_(_is(c.state, JobState.READY), _due(jobs, now))
    where = and_(c.queue == bindparam("in_queue"), waits)
    if chosen:
        where = and_(where, c.kind.in_(bindparam("kinds", expanding=True)))
    return select(c.id).where(where).limit(1)


# --- named leases ---------------------------------------------------------------------------------


@remembered
def _complete(jobs: Leased, given: bool) -> Update:
    now = clock(NOW, given=given)
    result = bindparam("result", type_=jobs.table.c.result.type)
    return update(jobs.table).where(guard(jobs, ONE, now)).values(_completed(now, result))


@remembered
def _complete_all(jobs: Leased, given: bool) -> Change:
    now = clock(NOW, given=given)
    return Change(_completed(now, null()), (jobs.key, jobs.fence), now)


def _completed(now: ColumnElement[float], result: Any) -> dict[str, Any]:
    done = {"state": JobState.DONE.value, "owner": None, "until": 0.0}
    return {**done, "finished_at": now, "result": result}


@remembered
def _renew_all(jobs: Leased, given: bool) -> Change:
    now = clock(NOW, given=given)
    return Change({"until": jobs.end(now)}, (jobs.key, jobs.fence, jobs.until), now)


@remembered
def _give_back(jobs: Leased, timed: bool, given: bool, delayed: bool) -> Update:
    """Out of a lease and back to waiting: fail (timed) and release (not)."""
    c, now = jobs.table.c, clock(NOW, given=given)
    refund = bindparam("refund", type_=c.attempts.type)
    values: dict[Any, Any] = {
        "state": (JobState.SCHEDULED if delayed else JobState.READY).value,
        "owner": None,
        "until": now + bindparam("delay", type_=Double()) if delayed else 0.0,
        "attempts": case((c.attempts > refund, c.attempts - refund), else_=0),
    }
    if timed:
        values["errors"] = bindparam("errors", type_=c.errors.type)
    return update(jobs.table).where(guard(jobs, ONE, now if timed else None)).values(values)


@remembered
def _fail_for_good(jobs: Leased, given: bool) -> Update:
    c, now = jobs.table.c, clock(NOW, given=given)
    reason = bindparam("reason", type_=c.reason.type)
    values = dict(_bury(jobs, now, JobState.QUARANTINED, reason))
    values[c.errors] = bindparam("errors", type_=c.errors.type)
    return update(jobs.table).where(guard(jobs, ONE, now)).values(values)


@remembered
def _failing(jobs: Leased, given: bool, row_locks: bool) -> Select[Any]:
    c, now = jobs.table.c, clock(NOW, given=given)
    reading = select(c.attempts, c.max_attempts, c.errors, now.label("read_at")).where(guard(jobs, ONE, now))
    return reading.with_for_update() if row_locks else reading


# --- operators and maintenance --------------------------------------------------------------------


@remembered
def _set_aside(jobs: Leased, given: bool, state: JobState, sources: tuple[JobState, ...]) -> Transition:
    c = jobs.table.c
    reason = bindparam("reason", type_=c.reason.type)
    where = and_(jobs.key == bindparam("job_id"), _is(c.state, *sources))
    return Transition(jobs, where, _bury(jobs, clock(NOW, given=given), state, reason), (jobs.key,))


@remembered
def _requeue(jobs: Leased, mended: bool) -> Update:
    c = jobs.table.c
    as_read = and_(
        jobs.key == bindparam("job_id"), c.state == bindparam("was"), c.fence == bindparam("had_fence")
    )
    values: dict[Any, Any] = {
        "state": JobState.READY.value,
        "attempts": 0,
        "until": 0.0,
        "reason": None,
        "finished_at": None,
        "requeues": bindparam("history", type_=c.requeues.type),
    }
    if mended:
        values["payload"] = bindparam("mended", type_=c.payload.type)
    return update(jobs.table).where(as_read).values(values)


@remembered
def _requeueable(jobs: Leased, given: bool, row_locks: bool) -> Select[Any]:
    c, now = jobs.table.c, clock(NOW, given=given)
    reading = select(c.state, c.fence, c.requeues, now.label("read_at")).where(
        jobs.key == bindparam("job_id"), _is(c.state, JobState.QUARANTINED, JobState.CANCELLED)
    )
    return reading.with_for_update() if row_locks else reading


@remembered
def _sweep(jobs: Leased, given: bool) -> Transition:
    c, now = jobs.table.c, clock(NOW, given=given)
    idle = or_(
        _is(c.state, JobState.READY, JobState.SCHEDULED),
        and_(_is(c.state, JobState.LEASED), c.until <= now),
    )
    dead = or_(c.attempts >= c.max_attempts, c.deadline <= now)
    values = _bury(jobs, now, JobState.QUARANTINED, _why_dead(jobs, now))
    return Transition(jobs, and_(idle, dead), values, (jobs.key,), (c.seq,))


@remembered
def _purge(jobs: Leased, forget: bool) -> tuple[Transition, ...]:
    c = jobs.table.c
    old = c.finished_at < bindparam("before", type_=c.finished_at.type)
    if forget:
        any_ended = and_(_is(c.state, *_ENDED, JobState.PURGED), old)
        return (Transition(jobs, any_ended, None, (jobs.key,), (c.seq,)),)
    ended = and_(_is(c.state, *_ENDED), old)
    emptied = {
        "queue": "", "kind": "", "key": None, "priority": 0, "until": 0.0, "last_owner": None,
        "attempts": 0, "deadline": None, "payload": "null", "result": None, "reason": None,
        "errors": None, "requeues": None, "state": JobState.PURGED.value,
    }  # fmt: skip
    values = [(c[name], null() if value is None else value) for name, value in emptied.items()]
    return (
        Transition(jobs, and_(ended, c.named == 0), None, (jobs.key,), (c.seq,)),
        Transition(jobs, and_(ended, c.named == 1), values, (jobs.key,), (c.seq,)),
    )


@remembered
def _revive(jobs: Leased) -> Transition:
    """Take a tombstone out, to be put back in the same transaction at a new place in the order.

    Not an upsert: that would lock the row of a running job, whose renewal then waits for the
    enqueuing transaction, and MariaDB gives a row no new number in place.
    """
    c = jobs.table.c
    where = and_(jobs.key == bindparam("job_id"), _is(c.state, JobState.PURGED))
    return Transition(jobs, where, None, (c.fence,))


# --- enqueue --------------------------------------------------------------------------------------

_NEW: Final = (
    "id", "named", "queue", "kind", "key", "priority", "state", "fence", "max_attempts",
    "deadline", "payload", "until", "delay", "created_at",
)  # fmt: skip


def _inserted(source: Mapping[str, ColumnElement[Any]], now: ColumnElement[float]) -> dict[str, Any]:
    """What a new row is made of; a delay counts from the statement's own clock."""
    delay = source["delay"]
    plain = {name: source[name] for name in _NEW if name not in ("until", "delay", "created_at")}
    until = case((delay > 0, now + delay), else_=source["until"])
    return {**plain, "until": until, "created_at": now}


def _new_parameters(jobs: Leased) -> dict[str, ColumnElement[Any]]:
    types = {name: jobs.table.c[name].type for name in _NEW if name != "delay"} | {"delay": Double()}
    return {name: bindparam(f"new_{name}", type_=type_) for name, type_ in types.items()}


@remembered
def _insert(jobs: Leased, given: bool) -> Insert:
    return insert(jobs.table).values(_inserted(_new_parameters(jobs), clock(NOW, given=given)))


@remembered
def _insert_absent(jobs: Leased, given: bool, insert_absent: Callable[..., Any]) -> Any:
    values = _inserted(_new_parameters(jobs), clock(NOW, given=given))
    return insert_absent(jobs.table, jobs.key).values(values).returning(jobs.key)


@remembered
def _insert_arrays(jobs: Leased, given: bool, insert_absent: Callable[..., Any]) -> Any:
    c = jobs.table.c
    columns = {name: c.until if name == "delay" else c[name] for name in _NEW if name != "created_at"}
    rows = from_arrays(**columns, place=c.seq)
    values = _inserted(dict(rows.c.items()), clock(NOW, given=given))
    picked = select(*values.values()).order_by(rows.c.place)
    return insert_absent(jobs.table, jobs.key).from_select(list(values), picked).returning(jobs.key)


@remembered
def _states(jobs: Leased) -> Select[Any]:
    return select(jobs.key, jobs.table.c.state).where(jobs.key.in_(bindparam("ids", expanding=True)))


# --- reading --------------------------------------------------------------------------------------


@remembered
def _get(jobs: Leased, current: bool) -> Select[Any]:
    c = jobs.table.c
    reading = select(*(c[name] for name in _FENCED)).where(jobs.key == bindparam("job_id"))
    return reading.with_for_update(read=True, skip_locked=True) if current else reading


@remembered
def _outcome(jobs: Leased, row_locks: bool) -> Select[Any]:
    reading = _get(jobs, False)
    return reading.with_for_update() if row_locks else reading


@remembered
def _counts(jobs: Leased) -> Select[Any]:
    c = jobs.table.c
    counting = select(c.queue, c.state, func.count()).where(c.state != JobState.PURGED.value)
    return counting.group_by(c.queue, c.state).order_by(c.queue, c.state)


def _record(row: Row[Any]) -> JobRecord:
    held = dict(row._mapping)
    for name in ("seq", "named"):
        del held[name]
    for name in ("payload", "result"):
        held[name] = edge.decode(held[name])
    errors, requeues = edge.decode(held.pop("errors")), edge.decode(held.pop("requeues"))
    return JobRecord(
        **held | {"state": JobState(held["state"])},
        errors=tuple(JobError(**one) for one in errors or ()),
        requeues=tuple(Requeue(**one) for one in requeues or ()),
    )


def _lease(row: Row[Any]) -> JobLease:
    id, owner, fence, until, attempt, text, kind, queue, deadline = row[:9]
    return JobLease(id, owner, fence, until, attempt, json.loads(text), kind, queue, deadline)


def _history(text: str | None, entry: JobError | Requeue) -> str:
    return edge.encode("history", [*(edge.decode(text) or []), asdict(entry)][-KEEP:])


def new_id() -> str:
    """A UUIDv7 (RFC 9562): milliseconds first, so that new ids are neighbours in the index."""
    head = (time.time_ns() // 1_000_000) << 80 | 0x7 << 76
    chance = int.from_bytes(os.urandom(10), "big")
    tail = (chance >> 62 & 0xFFF) << 64 | 0b10 << 62 | chance & (1 << 62) - 1
    return str(uuid.UUID(int=head & (1 << 128) - 1 | tail))


def _known(item: Mapping[str, Any], number: int) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise InvalidValue(f"items[{number}]", f"must be a mapping, got {type(item).__name__}")
    for name in item:
        if name not in _ARGUMENTS:
            raise InvalidValue(f"items[{number}].{name}", "is not an argument of enqueue")
    return _ARGUMENTS | dict(item)


_ARGUMENTS: Final[dict[str, Any]] = dict(
    id=None, payload=None, kind="", queue="default", key=None, priority=0, run_at=None, delay=None,
    deadline=None, max_attempts=MAX_ATTEMPTS,
)  # fmt: skip


def _new_job(given: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """The checked parameters of a new row; ``at`` says which item of many it is."""
    id, key, run_at, delay = given["id"], given["key"], given["run_at"], given["delay"]
    if run_at is not None and delay is not None:
        raise InvalidValue(f"{at}delay", "goes without run_at: each says when the job may start")
    run_at = None if run_at is None else edge.instant(f"{at}run_at", run_at)
    delay = 0.0 if delay is None else edge.duration(f"{at}delay", delay)
    deadline = given["deadline"]
    waits = run_at is not None or delay > 0
    new = {
        "id": new_id() if id is None else edge.key(f"{at}id", id),
        "named": int(id is not None),
        "queue": edge.key(f"{at}queue", given["queue"]),
        "kind": edge.label(f"{at}kind", given["kind"]),
        "key": None if key is None else edge.key(f"{at}key", key),
        "priority": edge.whole(f"{at}priority", given["priority"], least=-(2**31)),
        "state": (JobState.SCHEDULED if waits else JobState.READY).value,
        "fence": 0,
        "max_attempts": edge.whole(f"{at}max_attempts", given["max_attempts"], least=1, most=_MAX_COUNT),
        "deadline": None if deadline is None else edge.instant(f"{at}deadline", deadline),
        "payload": edge.encode(f"{at}payload", given["payload"]),
        "until": run_at or 0.0,
        "delay": delay,
    }
    return {f"new_{name}": value for name, value in new.items()}


def _said(field: str, text: Any) -> str:
    """A reason in words: any text but none, made storable."""
    if not isinstance(text, str) or not text:
        raise InvalidValue(field, f"must be a text that says why, got {text!r}")
    return edge.sanitised(text)


def _waiting(delay: float, refund: int) -> dict[str, Any]:
    return {"refund": refund} | ({"delay": delay} if delay > 0 else {})


class JoinedJobs:
    """The verbs of jobs in the caller's transaction: everything but claim and renew.

    No verb commits or rolls back; what it wrote is there when the caller's transaction commits.
    Instants are seconds: of ``now`` where it is given, else of the store's clock, else of the
    database's. Bad arguments raise `InvalidValue` before anything is written.
    """

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._jobs = leased_jobs(tx.tables[Job.__tablename__])

    # enqueue

    def enqueue(
        self,
        id: str | None = None,
        payload: Any = None,
        *,
        kind: str = "",
        queue: str = "default",
        key: str | None = None,
        priority: int = 0,
        run_at: float | None = None,
        delay: float | None = None,
        deadline: float | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        now: float | None = None,
    ) -> str | None:
        """Add a job; its id, or ``None`` if a job with this id exists, which is left as it is.

        Without ``id`` a UUIDv7 is made. ``payload`` is a JSON value. ``kind`` picks the handler,
        ``key`` groups. Higher ``priority`` goes first. The job waits until ``run_at``, or ``delay``
        seconds; it is quarantined instead of claimed from ``deadline`` on, and once ``max_attempts``
        attempts were claimed. The id of a purged job is taken again, and its fence goes on.
        """
        new = _new_job(
            dict(
                id=id, payload=payload, kind=kind, queue=queue, key=key, priority=priority, run_at=run_at,
                delay=delay, deadline=deadline, max_attempts=max_attempts,
            )
        )  # fmt: skip
        self._tx.subject = new["new_id"]
        return self._add(new, self._tx.now(now))

    def enqueue_many(self, items: Iterable[Mapping[str, Any]], *, now: float | None = None) -> list[str]:
        """Add many jobs, each a mapping with the arguments of `enqueue`; the ids created, in input order.

        Everything is checked before anything is written. Of an id that comes twice the first counts.
        """
        rows: dict[str, dict[str, Any]] = {}
        for number, item in enumerate(items):
            new = _new_job(_known(item, number), f"items[{number}].")
            rows.setdefault(new["new_id"], new)
        instant = self._tx.now(now)
        created: set[str] = set()
        fresh = list(rows.values())
        for start in range(0, len(fresh), _BULK):
            created |= self._add_chunk(fresh[start : start + _BULK], instant)
        return [id for id in rows if id in created]

    def _add(self, new: dict[str, Any], now: float | None) -> str | None:
        id: str = new["new_id"]
        absent = self._tx.capabilities.insert_absent
        if absent is not None:
            if self._tx.execute(_insert_absent(self._jobs, now is not None, absent), new | at(now)).all():
                return id
        elif not self._exists(id) and self._insert_alone(new, now):
            return id
        return self._add_again(new, now)

    def _exists(self, id: str) -> bool:
        # Read first where there is no ON CONFLICT DO NOTHING: the failed INSERT would lock the row
        # of a running job for as long as the caller's transaction goes on.
        return self._tx.execute(_states(self._jobs), {"ids": [id]}).first() is not None

    def _insert_alone(self, new: dict[str, Any], now: float | None) -> bool:
        try:
            self._tx.execute(_insert(self._jobs, now is not None), new | at(now))
        except IntegrityError as error:
            if not dialects.is_duplicate(error):
                raise
            return False
        return True

    def _add_again(self, new: dict[str, Any], now: float | None) -> str | None:
        """Take up a purged id where its fence was; ``None`` if the id is not purged."""
        tombstones = make(self._tx, _revive(self._jobs), {"job_id": new["new_id"]})
        if not tombstones:
            return None
        statement = _insert(self._jobs, now is not None)
        self._tx.execute(statement, new | at(now) | {"new_fence": tombstones[0].fence})
        return str(new["new_id"])

    def _add_chunk(self, rows: list[dict[str, Any]], now: float | None) -> set[str]:
        if self._tx.capabilities.arrays:
            created = self._insert_arrays(rows, now)
            there = self._there([row["new_id"] for row in rows if row["new_id"] not in created])
        else:
            there = self._there([row["new_id"] for row in rows])
            created = self._insert_absent([row for row in rows if row["new_id"] not in there], now)
        again = [row for row in rows if there.get(row["new_id"]) == JobState.PURGED]
        return created | {id for row in again if (id := self._add_again(row, now)) is not None}

    def _there(self, ids: list[str]) -> dict[str, str]:
        if not ids:
            return {}
        return {row[0]: row[1] for row in self._tx.execute(_states(self._jobs), {"ids": ids})}

    def _insert_arrays(self, rows: list[dict[str, Any]], now: float | None) -> set[str]:
        arrays = {name: [row[f"new_{name}"] for row in rows] for name in _NEW if name != "created_at"}
        arrays["place"] = list(range(len(rows)))
        absent = self._tx.capabilities.insert_absent
        inserting = _insert_arrays(self._jobs, now is not None, absent)
        return {row[0] for row in self._tx.execute(inserting, arrays | at(now))}

    def _insert_absent(self, rows: list[dict[str, Any]], now: float | None) -> set[str]:
        if not rows:
            return set()
        try:
            with self._tx.connection.begin_nested():
                inserting = _insert(self._jobs, now is not None)
                self._tx.execute(inserting, [row | at(now) for row in rows])
        except IntegrityError as error:
            if not dialects.is_duplicate(error):
                raise
            # Somebody has added one of them since we looked: one by one, each by its own answer.
            return {id for row in rows if (id := self._add(row, now)) is not None}
        return {row["new_id"] for row in rows}

    # the ends of an attempt

    def complete(self, lease: JobLease, result: Any = None, *, now: float | None = None) -> None:
        """The job is done, with a JSON value as its result. `LeaseLost` unless the lease is held and runs."""
        text = None if result is None else edge.encode("result", result)
        instant = self._tx.now(now)
        parameters = named(lease) | at(instant) | {"result": text}
        self._end(lease, _complete(self._jobs, instant is not None), parameters)

    def complete_many(
        self, leases: Iterable[JobLease], results: Sequence[Any] | None = None, *, now: float | None = None
    ) -> list[JobLease]:
        """Complete many jobs, each under its own guard; the leases that were lost, in input order.

        ``results`` goes with ``leases``, one each. A lost lease keeps none of the others from being done.
        """
        leases = list(leases)
        instant = self._tx.now(now)
        if results is not None:
            return self._complete_each(leases, results, instant)
        change = _complete_all(self._jobs, instant is not None)
        done = make_many(self._tx, self._jobs, leases, change, at(instant))
        for lease in leases:
            self._changed(lease.id)
        return lost_among(leases, done)

    def _complete_each(
        self, leases: list[JobLease], results: Sequence[Any], now: float | None
    ) -> list[JobLease]:
        if len(results) != len(leases):
            raise InvalidValue("results", f"has {len(results)} values for {len(leases)} leases")
        texts = [edge.encode(f"results[{n}]", result) for n, result in enumerate(results)]
        statement, lost = _complete(self._jobs, now is not None), []
        for lease, text in zip(leases, texts, strict=True):
            parameters = named(lease) | at(now) | {"result": text}
            if self._tx.execute(statement, parameters).rowcount != 1:
                lost.append(lease)
            self._changed(lease.id)
        return lost

    def fail(
        self,
        lease: JobLease,
        error: BaseException | str,
        *,
        retry: Retry | None = Retry(),  # noqa: B008 - immutable, and the default shows in the signature
        now: float | None = None,
    ) -> JobState:
        """This attempt failed; the state the job went to.

        With attempts left it waits as ``retry`` says (``scheduled``, or ``ready`` without a wait);
        without, or with ``retry=None``, it is ``quarantined``. The error is kept with the job, the
        last 10 of them. `LeaseLost` unless the lease is held and runs.
        """
        instant, tx, jobs = self._tx.now(now), self._tx, self._jobs
        given, guarded = instant is not None, named(lease) | at(instant)
        row = tx.execute(_failing(jobs, given, tx.capabilities.row_locks), guarded).first()
        if row is None:
            raise self._lost(lease)
        kind, text = edge.described(error)
        guarded["errors"] = _history(row.errors, JobError(lease.attempt, row.read_at, kind, text))
        if retry is None or row.attempts >= row.max_attempts:
            guarded["reason"] = "failed for good" if retry is None else "attempts used up"
            self._end(lease, _fail_for_good(jobs, given), guarded)
            return JobState.QUARANTINED
        delay = retry.delay(lease.attempt)
        self._end(lease, _give_back(jobs, True, given, delay > 0), guarded | _waiting(delay, 0))
        return JobState.SCHEDULED if delay > 0 else JobState.READY

    def release(
        self, lease: JobLease, *, delay: float = 0, refund: bool = False, now: float | None = None
    ) -> None:
        """Give the job back unfinished, to be claimed again after ``delay`` seconds.

        Also after the end of the lease, as long as nobody else has got the job; else `LeaseLost`.
        ``refund`` takes the attempt back. The fence stays.
        """
        delay = edge.duration("delay", delay)
        instant = self._tx.now(now)
        delayed = delay > 0
        parameters = named(lease) | _waiting(delay, int(bool(refund)))
        if delayed:
            parameters |= at(instant)
        self._end(lease, _give_back(self._jobs, False, instant is not None, delayed), parameters)

    def _end(self, lease: JobLease, statement: Update, parameters: Mapping[str, Any]) -> None:
        if self._tx.execute(statement, parameters).rowcount != 1:
            raise self._lost(lease)
        self._changed(lease.id)

    def _lost(self, lease: JobLease) -> LeaseLost:
        return LeaseLost(lease, self.get(lease.id))

    def _changed(self, id: str) -> None:
        self._tx.expire(Job, id, _FENCED)

    # operators

    def cancel(self, id: str, *, now: float | None = None) -> bool:
        """Take a job out that is not done yet, also from under a running lease; whether it was."""
        return self._aside(id, JobState.CANCELLED, (*_OPEN, JobState.QUARANTINED), "cancelled", now)

    def quarantine(self, id: str, reason: str, *, now: float | None = None) -> bool:
        """Set a job aside, also from under a running lease; whether it was waiting or running."""
        return self._aside(id, JobState.QUARANTINED, _OPEN, _said("reason", reason), now)

    def _aside(
        self, id: str, state: JobState, sources: tuple[JobState, ...], reason: str, now: float | None
    ) -> bool:
        instant = self._tx.now(now)
        transition = _set_aside(self._jobs, instant is not None, state, sources)
        parameters = {"job_id": edge.key("id", id), "reason": reason} | at(instant)
        moved = bool(make(self._tx, transition, parameters))
        self._changed(id)
        return moved

    def requeue(
        self, id: str, *, payload: Any = _KEPT, by: str, reason: str, now: float | None = None
    ) -> bool:
        """Let a quarantined or cancelled job start anew; whether it was one.

        Attempts start again at 0, the fence goes on. A new ``payload`` replaces the old one. Who, when
        and why is kept with the job. A deadline is kept too: one that has passed sets it aside again.
        """
        parameters = {"job_id": edge.key("id", id)}
        if mended := payload is not _KEPT:
            parameters["mended"] = edge.encode("payload", payload)
        by, reason = edge.key("by", by), _said("reason", reason)
        instant, tx, jobs = self._tx.now(now), self._tx, self._jobs
        reading = _requeueable(jobs, instant is not None, tx.capabilities.row_locks)
        row = tx.execute(reading, {"job_id": id} | at(instant)).first()
        if row is None:
            return False
        entry = Requeue(row.read_at, by, reason, row.state, mended)
        as_read = {"was": row.state, "had_fence": row.fence, "history": _history(row.requeues, entry)}
        if tx.execute(_requeue(jobs, mended), parameters | as_read).rowcount != 1:
            raise TransactionLost(f"job {id!r} changed while it was locked: is this a transaction?")
        self._changed(id)
        return True

    # maintenance

    def sweep(self, *, limit: int = 1000, now: float | None = None) -> int:
        """Quarantine jobs that can never be claimed again; how many.

        Attempts used up, or deadline passed; never under a running lease. Claims do the same for
        what they meet, so nothing waits for a sweep.
        """
        limit = edge.whole("limit", limit, least=1)
        instant = self._tx.now(now)
        return len(make(self._tx, _sweep(self._jobs, instant is not None), at(instant) | {"limit": limit}))

    def purge(self, *, before: float, limit: int = 1000, forget: bool = False) -> int:
        """Empty done and cancelled jobs that ended before this instant; how many.

        Jobs with generated ids are deleted. An id that a caller named stays as a tombstone of its id
        and fence, so that it cannot come back with an old fence. ``forget`` deletes those too, and
        older tombstones: then an attempt that still holds an old lease could match a new job of the
        same id and owner.
        """
        parameters = {"before": edge.instant("before", before)}
        left = edge.whole("limit", limit, least=1)
        purged = 0
        for transition in _purge(self._jobs, bool(forget)):
            if left > purged:
                rows = make(self._tx, transition, parameters | {"limit": left - purged})
                purged += len(rows)
        return purged

    # reading

    def get(self, id: str) -> JobRecord | None:
        """The job as it is in this transaction; ``None`` if there is none. A purged one has no payload."""
        parameters, stale = {"job_id": edge.key("id", id)}, self._tx.capabilities.stale_reads
        row = self._tx.execute(_get(self._jobs, stale), parameters).first()
        if row is None and stale:  # locked by somebody, or not there
            row = self._tx.execute(_get(self._jobs, False), parameters).first()
        return None if row is None else _record(row)

    def counts(self) -> dict[str, dict[JobState, int]]:
        """How many jobs each queue has in each state that occurs in it; purged ones do not count."""
        counted: dict[str, dict[JobState, int]] = {}
        for queue, state, number in self._tx.execute(_counts(self._jobs)):
            counted.setdefault(queue, {})[JobState(state)] = number
        return counted


class Jobs(JoinedJobs):
    """All verbs of jobs, for a transaction that is theirs alone.

    Claim and renew are not offered inside the caller's: their row locks would last as long as it.
    """

    def claim_named(self, id: str, owner: str, *, ttl: float, now: float | None = None) -> JobLease | None:
        """Claim this very job; ``None`` if it cannot be claimed now."""
        instant = self._tx.now(now)
        wanted = {"job_id": edge.key("id", id)} | _wanted(owner, ttl, instant)
        rows = make(self._tx, _claim_named(self._jobs, instant is not None), wanted)
        return next(iter(_leases(rows)), None)

    def claim_next(
        self,
        owner: str,
        *,
        ttl: float,
        limit: int,
        queue: str = "default",
        kinds: Iterable[str] | None = None,
        now: float | None = None,
    ) -> list[JobLease] | None:
        """Claim up to ``limit`` jobs of a queue, promoting what is due first.

        ``None``: there is something to claim, but not for this transaction: others hold the rows at
        this moment, or so many were found dead that it is time to commit.
        """
        instant = self._tx.now(now)
        wanted = {"in_queue": edge.key("queue", queue)} | _wanted(owner, ttl, instant)
        limit = edge.whole("limit", limit, least=1)
        if kinds is not None:
            wanted["kinds"] = [edge.label("kinds", kind) for kind in kinds]
        found: list[Row[Any]] = []
        for turn in range(_TURNS):
            promoted = self._promote(wanted, min(limit << turn, max(limit, _BULK)))
            taken = self._take(wanted, limit - len(found))
            found += [row for row in taken if row.state == JobState.LEASED]
            buried = sum(row.state != JobState.LEASED for row in taken)
            if len(found) == limit or not (promoted or buried):
                break
            if buried:
                make(self._tx, _bury_ready(self._jobs, instant is not None), wanted | {"limit": _BULK})
        if not found and (promoted or buried or self._contended(wanted)):
            return None
        return _leases(found)

    def _promote(self, wanted: Mapping[str, Any], limit: int) -> int:
        # One index serves both states where there are partial ones; else each state has its own range.
        together = self._tx.capabilities.partial_indexes
        groups = (_WAITING,) if together else tuple((state,) for state in _WAITING)
        promotions = (_promote(self._jobs, "now" in wanted, states) for states in groups)
        return sum(len(make(self._tx, one, {**wanted, "limit": limit})) for one in promotions)

    def _take(self, wanted: Mapping[str, Any], limit: int) -> Sequence[Row[Any]]:
        taking = _take(self._jobs, "now" in wanted, "kinds" in wanted)
        return make(self._tx, taking, {**wanted, "limit": limit})

    def _contended(self, wanted: Mapping[str, Any]) -> bool:
        """Whether somebody else has locked what could be claimed: that is no empty queue."""
        if not self._tx.capabilities.row_locks:
            return False
        looking = _claimable(self._jobs, "now" in wanted, "kinds" in wanted)
        return self._tx.execute(looking, wanted).first() is not None

    def renew(self, lease: JobLease, *, ttl: float, now: float | None = None) -> JobLease:
        """The lease with a new end: ``ttl`` seconds from now, at most the deadline.

        `LeaseLost` unless it is held and still runs: what has run out is not revived.
        """
        instant = self._tx.now(now)
        until = renew(self._tx, self._jobs, lease, edge.ttl(ttl, instant), instant)
        if until is None:
            raise self._lost(lease)
        return replace(lease, until=until)

    def renew_many(
        self, leases: Iterable[JobLease], *, ttl: float, now: float | None = None
    ) -> list[JobLease | None]:
        """Renew many leases, each under its own guard; aligned with the input, ``None`` for a lost one."""
        leases = list(leases)
        instant = self._tx.now(now)
        parameters = {"ttl": edge.ttl(ttl, instant)} | at(instant)
        rows = make_many(
            self._tx, self._jobs, leases, _renew_all(self._jobs, instant is not None), parameters
        )
        ends = {(id, fence): until for id, fence, until in rows}
        return [
            replace(lease, until=ends[lease.id, lease.fence]) if (lease.id, lease.fence) in ends else None
            for lease in leases
        ]

    def outcome(self, lease: JobLease) -> Outcome:
        """What became of this lease, by a locking read: it waits for a COMMIT that is still under way."""
        row = self._tx.execute(
            _outcome(self._jobs, self._tx.capabilities.row_locks), {"job_id": lease.id}
        ).first()
        if row is None:
            return Outcome.ENDED
        record = _record(row)
        if record.completed_by(lease):
            return Outcome.COMPLETED
        held = (record.owner, record.fence) == (lease.owner, lease.fence)
        return Outcome.HELD if held else Outcome.ENDED


_TURNS: Final = 8  # promotions in one transaction


def _wanted(owner: str, ttl: float, now: float | None) -> dict[str, Any]:
    return {"new_owner": edge.key("owner", owner), "ttl": edge.ttl(ttl, now)} | at(now)


def _leases(rows: Iterable[Row[Any]]) -> list[JobLease]:
    """The leases among the rows, in the order of the queue (RETURNING has none)."""
    granted = [row for row in rows if row.state == JobState.LEASED]
    return [_lease(row) for row in sorted(granted, key=lambda row: (-row.priority, row.seq))]
