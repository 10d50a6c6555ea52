"""The verbs of jobs: thin, over the statements of job_sql and the lease core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Update

from fencedjobs import job_sql as sql
from fencedjobs import payload as edge
from fencedjobs.direct import Answer
from fencedjobs.enqueue import MAX_ATTEMPTS, Enqueue, new_item, new_job, portions
from fencedjobs.errors import InvalidValue, LeaseLost, TransactionLost
from fencedjobs.job_sql import FENCED, OPEN
from fencedjobs.leases import at, lost_among, make, make_many, named, still_held
from fencedjobs.models import Job
from fencedjobs.retry import Retry
from fencedjobs.transaction import Transaction
from fencedjobs.values import JobError, JobLease, JobRecord, JobState, Requeue

_KEPT: Final[Any] = object()


def _waiting(delay: float, refund: int) -> dict[str, Any]:
    return {"refund": refund} | ({"delay": delay} if delay > 0 else {})


def _written(result: Answer) -> int:
    """How many rows an UPDATE has changed, of which it may have returned something."""
    return len(result.all()) if result.returns_rows else result.rowcount


def _results(results: Sequence[Any], count: int) -> list[str | None]:
    if len(results) != count:
        raise InvalidValue("results", f"has {len(results)} values for {count} leases")
    return [None if one is None else edge.encode(f"results[{n}]", one) for n, one in enumerate(results)]


class JoinedJobs:
    """The verbs of jobs in the caller's transaction: everything but claim and renew.

    No verb commits or rolls back; what it wrote is there when the caller's transaction commits.
    Instants are seconds: of ``now`` where it is given, else of the store's clock, else of the
    database's. Bad arguments raise `InvalidValue` before anything is written.
    """

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._jobs = sql.leased_jobs(tx.tables[Job.__tablename__])

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
        new = new_job(
            {
                "id": id,
                "payload": payload,
                "kind": kind,
                "queue": queue,
                "key": key,
                "priority": priority,
                "run_at": run_at,
                "delay": delay,
                "deadline": deadline,
                "max_attempts": max_attempts,
            }
        )
        self._tx.subject = new["new_id"]
        return Enqueue(self._tx, self._jobs, self._tx.now(now)).one(new)

    def enqueue_many(self, items: Iterable[Mapping[str, Any]], *, now: float | None = None) -> list[str]:
        """Add many jobs, each a mapping with the arguments of `enqueue`; the ids created, in input order.

        Everything is checked before anything is written. Of an id that comes twice the first counts.
        """
        rows: dict[str, dict[str, Any]] = {}
        for number, item in enumerate(items):
            new = new_item(number, item)
            rows.setdefault(new["new_id"], new)
        self._tx.subject = list(rows)
        adding = Enqueue(self._tx, self._jobs, self._tx.now(now))
        created = set[str]()
        for some in portions(list(rows.values())):
            created |= adding.many(some)
        return [id for id in rows if id in created]

    # the ends of an attempt

    def complete(self, lease: JobLease, result: Any = None, *, now: float | None = None) -> None:
        """The job is done, with a JSON value as its result. `LeaseLost` unless the lease is held and runs."""
        text = None if result is None else edge.encode("result", result)
        instant = self._tx.now(now)
        parameters = named(lease) | at(instant) | {"result": text}
        self._end(lease, sql.complete(self._jobs, instant is not None), parameters)

    def complete_many(
        self, leases: Iterable[JobLease], results: Sequence[Any] | None = None, *, now: float | None = None
    ) -> list[JobLease]:
        """Complete many jobs, each under its own guard; the leases that were lost, in input order.

        ``results`` goes with ``leases``, one each. A lost lease keeps none of the others from being done.
        """
        leases = list(leases)
        texts = [] if results is None else _results(results, len(leases))
        instant = self._tx.now(now)
        change = sql.complete_all(self._jobs, instant is not None, any(texts))
        done = make_many(self._tx, self._jobs, leases, change, at(instant), texts if any(texts) else ())
        self._changed(*(lease.id for lease in leases))
        return lost_among(leases, done)

    def set_aside(
        self,
        lease: JobLease,
        reason: str,
        *,
        state: JobState = JobState.QUARANTINED,
        now: float | None = None,
    ) -> None:
        """End the attempt and the job with it, without a result: `QUARANTINED` or `CANCELLED`.

        For what no further attempt would change. The reason is kept with the job; an operator can
        requeue it. `LeaseLost` unless the lease is held and runs.
        """
        if state not in (JobState.QUARANTINED, JobState.CANCELLED):
            raise InvalidValue("state", f"must be quarantined or cancelled, got {state!r}")
        text, instant = edge.reason("reason", reason), self._tx.now(now)
        statement = sql.end_aside(self._jobs, instant is not None, JobState(state))
        self._end(lease, statement, named(lease) | at(instant) | {"reason": text})

    def checkpoint(self, lease: JobLease, data: Any, *, now: float | None = None) -> None:
        """Keep a JSON value as the job's progress, which the next attempt finds in its lease.

        It takes the place of the one before, and is there until the job is purged or requeued with
        another payload. The lease goes on as it was. `LeaseLost` unless it is held and runs.
        """
        text, instant = edge.encode("data", data), self._tx.now(now)
        statement = sql.checkpoint(self._jobs, instant is not None)
        written = self._tx.execute(statement, named(lease) | at(instant) | {"reached": text}).rowcount
        if written != 1 and not still_held(self._tx, self._jobs, lease, instant):
            raise self._lost(lease)
        self._changed(lease.id)

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
        row = tx.execute(sql.failing(jobs, given, tx.capabilities.row_locks), guarded).first()
        if row is None:
            raise self._lost(lease)
        kind, text = edge.described(error)
        guarded["errors"] = sql.history(row.errors, JobError(row.attempts, row.read_at, kind, text))
        if retry is None or row.attempts >= row.max_attempts:
            guarded["reason"] = "failed for good" if retry is None else "attempts used up"
            self._end(lease, sql.fail_for_good(jobs, given), guarded)
            return JobState.QUARANTINED
        delay = retry.delay(row.attempts)
        giving_back = sql.give_back(jobs, True, given, delay > 0, tx.notify)
        self._end(lease, giving_back, guarded | _waiting(delay, 0))
        return JobState.SCHEDULED if delay > 0 else JobState.READY

    def release(
        self, lease: JobLease, *, delay: float = 0, refund: bool = False, now: float | None = None
    ) -> None:
        """Give the job back unfinished, to be claimed again after ``delay`` seconds.

        Also after the end of the lease, as long as nobody else has got the job; else `LeaseLost`.
        ``refund`` takes the attempt back. The fence stays.
        """
        delay = edge.duration("delay", delay)
        instant, tx = self._tx.now(now), self._tx
        parameters = named(lease) | at(instant) | _waiting(delay, int(bool(refund)))
        giving_back = sql.give_back(self._jobs, False, instant is not None, delay > 0, tx.notify)
        self._end(lease, giving_back, parameters)

    def _end(self, lease: JobLease, statement: Update, parameters: Mapping[str, Any]) -> None:
        if _written(self._tx.execute(statement, parameters)) != 1:
            raise self._lost(lease)
        self._changed(lease.id)

    def _lost(self, lease: JobLease) -> LeaseLost:
        return LeaseLost(lease, self._current(lease.id))

    def _current(self, id: str) -> JobRecord | None:
        """The job as the refused write met it, which an old snapshot may not show."""
        if self._tx.capabilities.stale_reads:
            row = self._tx.execute(sql.get(self._jobs, True), {"job_id": id}).first()
            if row is not None:  # else it is locked by somebody, or not there
                return sql.record(row)
        return self.get(id)

    def _changed(self, *ids: str) -> None:
        for id in ids:
            self._tx.expire(Job, id, FENCED)

    # operators

    def cancel(self, id: str, *, now: float | None = None) -> bool:
        """Take a job out that is not done yet, also from under a running lease; whether it was."""
        return self._aside(id, JobState.CANCELLED, (*OPEN, JobState.QUARANTINED), "cancelled", now)

    def quarantine(self, id: str, reason: str, *, now: float | None = None) -> bool:
        """Set a job aside, also from under a running lease; whether it was waiting or running."""
        return self._aside(id, JobState.QUARANTINED, OPEN, edge.reason("reason", reason), now)

    def _aside(
        self, id: str, state: JobState, sources: tuple[JobState, ...], reason: str, now: float | None
    ) -> bool:
        instant = self._tx.now(now)
        transition = sql.set_aside(self._jobs, instant is not None, state, sources)
        parameters = {"job_id": edge.key("id", id), "reason": reason} | at(instant)
        moved = bool(make(self._tx, transition, parameters))
        self._changed(id)
        return moved

    def requeue(
        self,
        id: str,
        *,
        payload: Any = _KEPT,
        by: str,
        reason: str,
        seen: tuple[JobState, int] | None = None,
        now: float | None = None,
    ) -> bool:
        """Let a quarantined or cancelled job start anew; whether it was one.

        Attempts start again at 0, the fence goes on. A new ``payload`` replaces the old one. Who, when
        and why is kept with the job. A deadline is kept too: one that has passed sets it aside again.
        ``seen`` is the state and fence that the decision rests on: a job that has moved on is left alone.
        """
        parameters = {"job_id": edge.key("id", id)}
        if mended := payload is not _KEPT:
            parameters["mended"] = edge.encode("payload", payload)
        by, reason = edge.key("by", by), edge.reason("reason", reason)
        instant, tx, jobs = self._tx.now(now), self._tx, self._jobs
        reading = sql.requeueable(jobs, instant is not None, tx.capabilities.row_locks)
        row = tx.execute(reading, {"job_id": id} | at(instant)).first()
        if row is None or seen not in (None, (row.state, row.fence)):
            return False
        entry = Requeue(row.read_at, by, reason, row.state, mended)
        as_read = {"was": row.state, "had_fence": row.fence, "history": sql.history(row.requeues, entry)}
        requeuing = sql.requeue(jobs, instant is not None, mended, tx.notify)
        if _written(tx.execute(requeuing, parameters | as_read | at(instant))) != 1:
            raise TransactionLost(f"job {id!r} changed while it was locked: is this a transaction?")
        self._changed(id)
        return True

    # maintenance

    def sweep(self, *, limit: int = 1000, now: float | None = None) -> int:
        """Quarantine jobs that can never be claimed again; how many.

        Attempts used up, or deadline passed; never under a running lease. Claims do the same for
        what they meet, so nothing waits for a sweep. Rows that somebody has locked are left for the next.
        """
        limit = edge.whole("limit", limit, least=1)
        instant = self._tx.now(now)
        rows = make(self._tx, sql.sweep(self._jobs, instant is not None), at(instant) | {"limit": limit})
        self._changed(*(row.id for row in rows))
        return len(rows)

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
        for transition in sql.purge(self._jobs, bool(forget)):
            if left > purged:
                rows = make(self._tx, transition, parameters | {"limit": left - purged})
                self._changed(*(row.id for row in rows))
                purged += len(rows)
        return purged

    # reading

    def get(self, id: str) -> JobRecord | None:
        """The job as it is in this transaction; ``None`` if there is none. A purged one has no payload."""
        row = self._tx.execute(sql.get(self._jobs, False), {"job_id": edge.key("id", id)}).first()
        return None if row is None else sql.record(row)

    def counts(self) -> dict[str, dict[JobState, int]]:
        """How many jobs each queue has in each state that occurs in it; purged ones do not count."""
        counted: dict[str, dict[JobState, int]] = {}
        for queue, state, number in self._tx.execute(sql.counts(self._jobs)):
            counted.setdefault(queue, {})[JobState(state)] = number
        return counted

    def oldest_waiting(self, *, now: float | None = None) -> dict[str, float]:
        """For each queue how many seconds the job has waited that waits longest of those a claim would get.

        A scheduled job waits since it was due, one whose worker died since the end of the lease. A queue
        with nothing to claim is not there. All jobs that can be claimed are looked at.
        """
        instant = self._tx.now(now)
        reading = sql.oldest_waiting(self._jobs, instant is not None, self._tx.capabilities.partial_indexes)
        return {queue: max(0.0, wait) for queue, wait in self._tx.execute(reading, at(instant))}
