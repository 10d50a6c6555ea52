"""The catalogue of planted faults, part one: jobs, locks and transactions, as patches of the verbs.

`faults.planted` switches one on. Those of outbox, inbox and guards are in `event_mistakes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

from sqlalchemy import and_, delete, or_, select, tuple_, update

from fencedjobs import claims, enqueue, job_sql, jobs, leases, proof, row_leases
from fencedjobs import store as stores
from fencedjobs.dialects import Capabilities, clock
from fencedjobs.leases import NOW, Held, Leased, Transition
from fencedjobs.retry import Retry
from fencedjobs.store import Store
from fencedjobs.testing import stages
from fencedjobs.testing.planting import FAULTS, Patch, Patches, builder, changed, fault, patched
from fencedjobs.values import JobLease, JobState

__all__ = ["FAULTS"]

# --- tools ----------------------------------------------------------------------------------------


def _without(*dropped: str) -> Callable[..., Any]:
    """The guard without some of its conditions; they stay in the text, since they bind parameters."""

    def guard(leased: Leased, held: Held, now: Any = None) -> Any:
        same: Any = leased.key.in_(held.id) if held.listed else leased.key == held.id
        if held.listed:
            marks = tuple_(leased.key, leased.owner, leased.fence).in_(held.fence)
            conditions = [or_(marks, same) if dropped else marks]
        else:
            checks = {"owner": leased.owner == held.owner, "fence": leased.fence == held.fence}
            conditions = [or_(check, same) if name in dropped else check for name, check in checks.items()]
        if now is not None:
            conditions.append(or_(leased.until > now, same) if "time" in dropped else leased.until > now)
        return and_(same, *conditions)

    return guard


def _guarded(module: ModuleType, name: str, guard: Callable[..., Any]) -> Patch:
    """A builder of statements that takes this guard instead."""
    build = builder(getattr(module, name))

    def faulty(*args: Any) -> Any:
        with patched([(module, "guard", guard)]):
            return build(*args)

    return module, name, faulty


def _assigning(column: str, value: Any) -> Callable[..., Any]:
    """Changes a transition so that it writes this value as well."""
    return lambda made, jobs, *_: replace(made, values=[*made.values, (jobs.table.c[column], value)])


def _dropping(*columns: str) -> Callable[..., Any]:
    """Changes a list of assignments so that it leaves these columns as they are."""
    return lambda pairs, *_: [pair for pair in pairs if pair[0].name not in columns]


# --- the guard ------------------------------------------------------------------------------------


@fault(stages.machine, "completion asks for the id alone")
def _complete_by_id() -> Patches:
    yield _guarded(job_sql, "complete", _without("owner", "fence", "time"))


@fault(stages.machine, "completion asks for the owner, not for the fence")
def _complete_by_owner() -> Patches:
    yield _guarded(job_sql, "complete", _without("fence"))


@fault(stages.machine, "completion asks for the fence, not for the owner")
def _complete_by_fence() -> Patches:
    yield _guarded(job_sql, "complete", _without("owner"))


@fault(stages.machine, "completion of many asks for the ids alone")
def _complete_many_by_id() -> Patches:
    for name in ("_many_given", "_many_listed", "_locked_listed"):
        yield _guarded(leases, name, _without("owner", "fence"))


@fault(stages.machine, "completion of many takes all leases for held, whatever the database has changed")
def _complete_many_says_yes() -> Patches:
    yield jobs, "lost_among", lambda leases, held: []


@fault(stages.machine, "an attempt may complete after its lease has run out")
def _complete_late() -> Patches:
    yield _guarded(job_sql, "complete", _without("time"))


@fault(stages.machine, "release asks for the owner, not for the fence")
def _release_by_owner() -> Patches:
    yield _guarded(job_sql, "give_back", _without("fence"))


@fault(stages.machine, "a renewal revives a lease that has run out")
def _renew_revives() -> Patches:
    for name in ("_renew", "_until"):
        yield _guarded(leases, name, _without("time"))


@fault(stages.machine, "a checkpoint is written after its lease has run out")
def _checkpoint_late() -> Patches:
    yield _guarded(job_sql, "checkpoint", _without("time"))


@fault(stages.machine, "an attempt that sets its job aside asks for the id alone")
def _set_aside_by_id() -> Patches:
    yield _guarded(job_sql, "end_aside", _without("owner", "fence", "time"))


@fault(stages.machine, "a lease is still valid at its very end (>= for >)")
def _valid_at_the_end() -> Patches:
    def guard(leased: Leased, held: Held, now: Any = None) -> Any:
        sound = leases_guard(leased, held)
        return sound if now is None else and_(sound, leased.until >= now)

    leases_guard = leases.guard
    for module in (leases, job_sql, row_leases):
        yield module, "guard", guard


@fault(stages.machine, "a lease can be claimed only after its very end (< for <=)")
def _free_after_the_end() -> Patches:
    def later(made: Transition, leased: Leased, given: bool, *_: Any) -> Transition:
        resting = leased.owner.is_(None) & (leased.until == 0.0)
        return replace(made, where=and_(made.where, or_(resting, leased.until < clock(NOW, given=given))))

    yield changed(job_sql, "claim_named", later)
    yield changed(job_sql, "promote", later)
    yield changed(row_leases, "_claim", later)


# --- fence, attempts, deadline --------------------------------------------------------------------


@fault(stages.machine, "the fence starts again when a job is released or retried")
def _fence_reset_on_release() -> Patches:
    yield changed(job_sql, "give_back", lambda made, *_: made.values(fence=0))


@fault(stages.machine, "the fence starts again when a job is set aside")
def _fence_reset_on_quarantine() -> Patches:
    yield changed(job_sql, "set_aside", _assigning("fence", 0))


@fault(stages.machine, "the fence starts again when a job is requeued")
def _fence_reset_on_requeue() -> Patches:
    yield changed(job_sql, "requeue", lambda made, *_: made.values(fence=0))


@fault(stages.machine, "a purge deletes the row of a named id, fence and all")
def _fence_lost_by_purge() -> Patches:
    def deleting(made: tuple[Transition, ...], *_: Any) -> tuple[Transition, ...]:
        return tuple(replace(transition, values=None) for transition in made)

    yield changed(job_sql, "purge", deleting)


@fault(stages.machine, "a purged id is reborn with fence 0")
def _fence_reset_on_revival() -> Patches:
    yield enqueue, "make", lambda *args: [SimpleNamespace(fence=0) for _ in leases.make(*args)]


@fault(stages.machine, "attempts are counted when they fail, so a worker that dies is not counted")
def _attempts_counted_at_failure() -> Patches:
    def counting(made: Any, jobs: Leased, timed: bool, *_: Any) -> Any:
        return made.values(attempts=jobs.table.c.attempts + 1) if timed else made

    yield changed(job_sql, "_grant", _dropping("attempts"))
    yield changed(job_sql, "give_back", counting)


@fault(stages.machine, "a job whose attempts are used up gets another fence")
def _poison_is_not_capped() -> Patches:
    def alive(jobs: Leased, now: Any) -> Any:
        return or_(jobs.table.c.deadline.is_(None), jobs.table.c.deadline > now)

    yield job_sql, "_alive", alive


@fault(stages.machine, "a lease outlives the job's deadline")
def _lease_outlives_the_deadline() -> Patches:
    yield Leased, "end", lambda leased, now: now + leases.TTL


# --- states and order -----------------------------------------------------------------------------


@fault(stages.machine, "promotion leaves the owner, so that the late one can still give the job back")
def _promotion_keeps_the_owner() -> Patches:
    yield changed(job_sql, "promote", lambda made, *_: replace(made, values=_dropping("owner")(made.values)))


@fault(stages.machine, "promotion leaves the instant since when a job waits as it was an attempt ago")
def _waits_since_the_last_attempt() -> Patches:
    yield changed(job_sql, "promote", lambda made, *_: replace(made, values=_dropping("due_at")(made.values)))


@fault(stages.machine, "a job with a new payload keeps the checkpoint of the old one")
def _checkpoint_of_another_payload() -> Patches:
    yield changed(job_sql, "requeue", lambda made, jobs, *_: made.values(progress=jobs.table.c.progress))


@fault(stages.machine, "a cancelled or quarantined job keeps its lease and can be completed")
def _cancel_keeps_the_lease() -> Patches:
    yield changed(job_sql, "_bury", _dropping("owner", "until"))


@fault(stages.machine, "ready jobs are taken by age, whatever their priority")
def _priority_is_ignored() -> Patches:
    yield changed(job_sql, "take", lambda made, jobs, *_: replace(made, order=(jobs.table.c.seq,)))


@fault(stages.machine, "a claim changes one row more than it was asked for")
def _one_too_many() -> Patches:
    sound = claims.Jobs._take
    yield claims.Jobs, "_take", lambda jobs, taking, wanted, limit: sound(jobs, taking, wanted, limit + 1)


@fault(stages.machine, "enqueue puts a new row in the place of one that exists")
def _enqueue_overwrites() -> Patches:
    sound = enqueue.Enqueue.one

    def one(self: enqueue.Enqueue, new: dict[str, Any]) -> str | None:
        table = self._jobs.table
        self._tx.require_several()
        self._tx.execute(delete(table).where(table.c.id == new["new_id"]))
        return sound(self, new)

    yield enqueue.Enqueue, "one", one


@fault(stages.machine, "due jobs are promoted latest first, so that the earliest may wait for ever")
def _latest_due_first() -> Patches:
    yield changed(
        job_sql, "promote", lambda made, jobs, *_: replace(made, order=(jobs.until.desc(), jobs.row))
    )


@fault(stages.machine, "a sweep takes a job with its last attempt from under a live lease")
def _sweep_kills_the_living() -> Patches:
    def more(made: Transition, jobs: Leased, *_: Any) -> Transition:
        c = jobs.table.c
        return replace(made, where=or_(made.where, and_(c.owner.is_not(None), c.attempts >= c.max_attempts)))

    yield changed(job_sql, "sweep", more)


@fault(stages.machine, "a retry waits twice as long as its bound")
def _retry_beyond_its_bound() -> Patches:
    sound = Retry.delay
    yield Retry, "delay", lambda self, attempt, *chance: 2 * sound(self, attempt, *chance)


@fault(stages.machine, "a lock is given to the next one under the same fence")
def _lock_without_a_fence() -> Patches:
    yield changed(
        row_leases, "_claim", lambda made, *_: replace(made, values=_dropping("fence")(made.values))
    )


# --- races ----------------------------------------------------------------------------------------


@fault(stages.races, "a claim selects, and then updates by the primary key alone")
def _claim_by_select_then_update() -> Patches:
    def claim_many(
        self: Store, owner: str | None = None, *, ttl: float, limit: int, now: float, **where: Any
    ) -> list[JobLease]:
        def found(tx: Any) -> list[str]:
            jobs = tx.tables["fenced_jobs"].c
            free = or_(jobs.state == JobState.READY, and_(jobs.state == JobState.LEASED, jobs.until <= now))
            wanted = [jobs[name] == value for name, value in where.items()]
            return list(tx.execute(select(jobs.id).where(free, *wanted).limit(limit)).scalars())

        def take(tx: Any, name: str) -> JobLease:
            leased = job_sql.leased_jobs(tx.tables["fenced_jobs"])
            sound = job_sql.claim_named(leased, True)
            alone = replace(sound, where=leased.key == name)
            rows = leases.make(tx, alone, {"new_owner": self.who(owner), "ttl": ttl, "now": now})
            return job_sql.lease(rows[0])

        names = self.run(found)
        return [self.run(lambda tx, name=name: take(tx, name)) for name in names]  # type: ignore[misc]

    def claim(self: Store, owner: str | None = None, *, ttl: float, now: float, **where: Any) -> Any:
        return next(iter(claim_many(self, owner, ttl=ttl, limit=1, now=now, **where)), None)

    yield Store, "claim_many", claim_many
    yield Store, "claim", claim


@fault(stages.races, "the fence is raised in one transaction and read in another")
def _fence_read_later() -> Patches:
    sound = Store.claim

    def claim(self: Store, *args: Any, **kwargs: Any) -> Any:
        lease = sound(self, *args, **kwargs)
        record = self.get(lease.id) if lease else None
        return replace(lease, fence=record.fence) if lease and record else None

    yield Store, "claim", claim


@fault(stages.races, "a sweep reads its candidates, and then updates them by id alone")
def _sweep_by_id() -> Patches:
    def sweep(self: Store, *, limit: int = 1000, now: float) -> int:
        def found(tx: Any) -> list[str]:
            jobs = tx.tables["fenced_jobs"].c
            ready = and_(jobs.state == JobState.READY, jobs.deadline <= now)
            return list(tx.execute(select(jobs.id).where(ready).limit(limit)).scalars())

        def quarantine(tx: Any, names: list[str]) -> int:
            table = tx.tables["fenced_jobs"]
            buried = update(table).where(table.c.id.in_(names)).values(state=JobState.QUARANTINED.value)
            return int(tx.execute(buried).rowcount)

        names = self.run(found)
        return self.run(lambda tx: quarantine(tx, names))

    yield Store, "sweep", sweep


# --- transactions ---------------------------------------------------------------------------------


class _NoToken:
    """The guard comes last, and that is all."""

    def __init__(self, session: Any, connection: Any, watch: proof.Watch) -> None:
        self._session = session
        self._watch = watch

    def redeem(self) -> None:
        self._session.flush()
        self._watch.released = True

    def close(self) -> None:
        pass


@fault(stages.transactions, "no savepoint proves that the handler's transaction is the one it began with")
def _no_token() -> Patches:
    yield stores, "Token", _NoToken


def _goes_on_after_errors(can: Capabilities) -> bool:
    """A transaction that is aborted by an error lets no savepoint go: there the token alone suffices."""
    return not can.arrays


@fault(stages.transactions, "errors that the handler swallowed are not watched for", _goes_on_after_errors)
def _swallowed_errors() -> Patches:
    yield proof.Watch, "require_no_failure", lambda self: None


@fault(stages.transactions, "the business writes are committed, and then the job is completed")
def _completion_apart() -> Patches:
    sound = Store.in_session

    @contextmanager
    def in_session(self: Store, session: Any, *last: Any, subject: Any = None) -> Iterator[Any]:
        with sound(self, session) as uow:
            yield uow
        with self._new_session() as another, sound(self, another, *last):
            pass

    yield Store, "in_session", in_session
