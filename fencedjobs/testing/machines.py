"""A Hypothesis state machine over every verb of jobs and locks, on a real database.

    TestJobs = job_machine(store).TestCase

Each step calls a verb on the store and the same verb on the oracle (`model`), then reads every row
that the example has touched in a transaction of its own, and compares answers and rows. The clock is
the machine's, passed as ``now=``: it stands still, creeps, and jumps onto the very instants at which
a lease, a wait or a deadline ends, and next to them; with ``backwards=True`` it also goes back, over
them and onto them. Leases of former claims, and forged ones, stay in the game to the end.

Connections are lost at COMMIT, before it is sent or after it was done: the answer must be
`OutcomeUnknown` (or, before, any error of the database), and the rows as if the verb had not been
called, or as if it had been. ``machine.coverage`` counts which verb has met a lease in which condition.

Counts, sweeps and purges are of whole tables, so the tables must be empty, and nobody else may work
on them meanwhile: use a database of your own. After each example the machine deletes the rows that
it made, and only those.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from sqlalchemy import Select, Table, delete, select

from fencedjobs.errors import InvalidValue, LeaseLost
from fencedjobs.jobs import JoinedJobs
from fencedjobs.locks import Locks
from fencedjobs.models import Job, Lock, tables
from fencedjobs.retry import Retry
from fencedjobs.testing import pairs
from fencedjobs.testing.blocking import Blocking
from fencedjobs.testing.cuts import AFTER, BEFORE, severed
from fencedjobs.testing.model import Disagreement, JobModel, LockModel
from fencedjobs.testing.pairs import Coverage
from fencedjobs.testing.watching import Watcher, read
from fencedjobs.transaction import Transaction
from fencedjobs.values import JobLease, JobRecord, JobState, Lease, LeaseRecord

NAMES: Final = ("a", "A", "a ", "\u00e1", "a\u0301")  # five different ids, whatever the collation
LOCKS: Final = ("cron", "Cron")
OWNERS: Final = ("A", "B", "a")
KINDS: Final = ("", "mail")
VALUES: Final = (None, 0, {"qty": 7}, [1.5, "\u00e4"], 2**53 + 1, {"a": {"b": [True, ""]}})
RETRIES: Final = (
    None, Retry(), Retry(base=2.0, jitter=False), Retry(base=0.0), Retry(base=3.0, factor=4.0, cap=5.0),
)  # fmt: skip
UNNAMED: Final = 3  # at most so many ids made up by the store in one example
_LATEST: Final = 1e12  # after all instants of an example, also of those that a clock has left again
ALONE: Final = ("claim", "renew")  # verbs that no transaction of the caller's offers
VERBS: Final = (
    "renew", "renew_many", "complete", "complete_many", "completing", "fail", "release", "checkpoint",
    "set_aside", "outcome",
)  # fmt: skip
CONDITIONS: Final = (
    pairs.LIVE, pairs.AT_ITS_END, pairs.EXPIRED, pairs.STALE, pairs.OTHER_OWNER, pairs.OTHER_ID,
    pairs.DONE, pairs.PURGED, pairs.QUARANTINED, pairs.CANCELLED, pairs.GIVEN_BACK,
)  # fmt: skip


# --- what an example is made of -------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One call, printed as it is made."""

    verb: str
    arguments: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"{self.verb}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


@dataclass
class Effort:
    """How much was tried up to the first failure (or in all): examples, and the steps in them."""

    examples: int = 0
    steps: int = 0
    failed: bool = False
    coverage: Coverage | None = None  #: which verb has met which lease, of machines that count it

    def __str__(self) -> str:
        return f"{self.examples} examples, {self.steps} steps" if self.steps else f"{self.examples} rounds"


@dataclass(frozen=True)
class Past:
    """One of the leases that were given: the ``nth`` before the latest, perhaps forged."""

    nth: int
    forged: str | None

    def among(self, leases: list[Any]) -> Any:
        """The lease, or ``None`` if there are none yet."""
        return _forge(leases[-1 - self.nth % len(leases)], self.forged) if leases else None


def _forge(lease: Any, how: str | None) -> Any:
    """A lease that was never given, or is not given yet."""
    if how == "owner":
        return replace(lease, owner=next(owner for owner in OWNERS if owner != lease.owner))
    if how == "id":
        return replace(lease, id=next(name for name in (*NAMES, *LOCKS) if name != lease.id))
    return replace(lease, fence=lease.fence + {"younger": 1, "older": -1}.get(how or "", 0))


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    """Any of these values."""
    return st.sampled_from(values)


def as_often(strategies: Sequence[st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Any of these, each as often as it is here: ``st.one_of`` drops repeats, and flattens what is nested."""
    return st.integers(0, len(strategies) - 1).flatmap(strategies.__getitem__)


_names, _values = one_of(*NAMES), one_of(*VALUES)
_owners, _retries = one_of(*OWNERS), one_of(*RETRIES)
_queues, _limits = one_of("default", "default", "shop"), one_of(1, 2, 3)
_ttls = one_of(1.0, 2.5, 10.0, 1e-6)
_forged = one_of(None, None, None, None, None, "owner", "younger", "older", "id")
past_leases = st.builds(Past, one_of(0, 0, 0, 1, 1, 2, 3, 5), _forged)
_ends = one_of("complete", "complete", "fail", "release", "renew", "checkpoint", "set_aside")
_few_leases = st.lists(past_leases, max_size=4)
_cuts = one_of(*[None] * 8, BEFORE, AFTER)


@st.composite
def _new_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of enqueue; ``run_at`` and ``deadline`` count from now until the machine adds it."""
    job = {"id": draw(_names), "payload": draw(_values)}
    job |= {"queue": draw(_queues), "kind": draw(one_of(*KINDS))}
    job |= {"priority": draw(one_of(0, 5, -1)), "max_attempts": draw(one_of(1, 1, 2, 3))}
    job |= {"deadline": draw(one_of(None, None, None, None, 10.0, 2.5, 1.0, 0.0))}
    start = draw(one_of(None, None, None, None, 0.0, 1.0, 2.5, -1.0))
    by = "run_at" if start == -1.0 else draw(one_of("run_at", "delay"))
    return {**job, by: start}


def step_of(verb: str, /, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    """A step with drawn arguments."""
    return st.builds(Step, st.just(verb), st.fixed_dictionaries(arguments))


_ATTEMPT: Final = step_of(
        "attempt", nth=_limits, owner=_owners, ttl=_ttls, wait=one_of(None, -1, 0, 1),
        forged=one_of(None, None, None, "owner", "younger", "older"), end=_ends, retry=_retries,
        result=_values, cut=_cuts,
)  # fmt: skip
_CLAIMS: Final = [
    step_of("claim_by_id", name=_names, owner=_owners, ttl=_ttls),
    step_of("claim_next", owner=one_of(None, *OWNERS), ttl=_ttls, queue=_queues),
    step_of(
        "claim_many", owner=_owners, ttl=_ttls, limit=_limits, queue=_queues,
        kinds=one_of(None, None, KINDS[:1], KINDS[1:], KINDS),
    ),
]  # fmt: skip
_ENDS: Final = [
    step_of("end", past=past_leases, end=_ends, retry=_retries, result=_values, cut=_cuts),
    step_of("renew_many", pasts=_few_leases, ttl=_ttls),
    step_of("complete_many", pasts=_few_leases, results=st.booleans()),
    step_of(
        "completing", past=past_leases, result=_values, job=_new_jobs(), breaks=one_of(False, False, True)
    ),
]
_CLOCK: Final = [
    step_of("creep", by=one_of(1e-6, 0.25, 1.0)),
    step_of("jump", which=st.integers(0, 3), side=one_of(0, 0, -1, 1)),
]
_BACKWARDS: Final = [
    step_of("creep", by=one_of(-1e-6, -0.25, -1.0, -10.0)),
    step_of("jump_back", which=st.integers(0, 3), side=one_of(0, 0, -1, 1)),
]
_LOST: Final = [
    step_of("lose", when=one_of(BEFORE, AFTER), do=one)
    for one in (
        *_CLAIMS, *_ENDS[1:],
        step_of("enqueue", job=_new_jobs(), named=st.just(True)),
        step_of("operate", verb=one_of("cancel", "quarantine", "requeue"), name=_names, payload=_values),
        step_of("sweep", limit=_limits),
        step_of("purge", ago=one_of(0.0, -1.0), limit=_limits, forget=st.booleans()),
    )
]  # fmt: skip
_OTHERS: Final = [
    step_of("replay", verb=one_of(*VERBS), met=one_of(*CONDITIONS)),
    as_often(_LOST),
    as_often(_LOST),
    step_of("enqueue", job=_new_jobs(), named=st.booleans()),
    step_of("enqueue_many", jobs=st.lists(_new_jobs(), max_size=4)),
    step_of("operate", verb=one_of("cancel", "quarantine", "requeue"), name=_names, payload=_values),
    step_of("sweep", limit=_limits),
    step_of("purge", ago=one_of(0.0, 1.0, -1.0), limit=_limits, forget=st.booleans()),
    step_of("cancel_and_purge", name=_names, ago=one_of(-1.0, 0.0)),
    step_of("set_aside_and_requeue", name=_names, verb=one_of("cancel", "quarantine"), payload=_values),
    step_of("leave_no_trace", job=_new_jobs(), name=_names, bad=one_of(None, 0.0, -1.0, math.nan, math.inf)),
    step_of("lock", name=one_of(*LOCKS), owner=_owners, ttl=_ttls),
    step_of("locked", past=past_leases, verb=one_of("renew", "release", "check")),
]
_FORWARDS: Final = (
    _ATTEMPT, _ATTEMPT, _ATTEMPT, *_CLAIMS, *_CLAIMS, *_CLAIMS, *_ENDS, *_ENDS, *_CLOCK, *_CLOCK, *_OTHERS
)  # fmt: skip


class JobMachine(RuleBasedStateMachine):
    """What each step does; `job_machine` gives it a store.

    There is one rule, and a step is its argument: Hypothesis switches rules off for whole examples,
    and most examples without claims, or without a clock, would show nothing.
    """

    open_store: Callable[[], Any]
    jobs: Table
    all_jobs: Select[Any]  #: of the table of jobs
    named: Table  #: the table of locks
    effort: Effort
    coverage: Coverage  #: of all examples of this class

    def __init__(self) -> None:
        super().__init__()
        self.effort.examples += not self.effort.failed
        self.coverage.forget()
        self.now = 0.0
        self.joined = False
        self.cut: str | None = None  #: whether connections are lost now, and when
        self.leases: list[JobLease] = []  #: all that were ever given, the latest last
        self.locks: list[Lease] = []
        self.seen: dict[str, JobRecord | None] = {}  #: every row of the example, as it was last read
        self.rows: dict[str, tuple[Any, ...]] = {}  #: the same as tuples
        self.counts: Any = {}
        self.model = JobModel(lambda name: self.seen.get(name))  # noqa: PLW0108 - `seen` is replaced
        self.lock_model = LockModel()
        self.store = type(self).open_store()
        self.watcher = Watcher(self.store)
        read(self.store, self._look)
        if self.rows or any(self.store.locks.get(name) for name in LOCKS):
            raise ValueError(
                "the machine needs empty tables: its sweeps and purges would touch what is there"
            )

    @initialize(
        now=one_of(0.0, 1000.0, 1764000000.25), joined=st.booleans(),
        jobs=st.lists(_new_jobs(), min_size=3, max_size=6),
    )  # fmt: skip
    def start(self, now: float, joined: bool, jobs: list[dict[str, Any]]) -> None:
        """Some jobs; ``joined``: verbs are called in a transaction of the example, where they can be."""
        self.now, self.joined = now, joined
        self._counted(Step("enqueue_many", {"jobs": jobs}))

    def step(self, do: Step) -> None:
        """One call on both sides."""
        self._counted(do)

    def _counted(self, do: Step) -> None:
        self.effort.steps += not self.effort.failed
        try:
            getattr(self, do.verb)(**do.arguments)
        except Exception:
            self.effort.failed = True
            raise

    def teardown(self) -> None:
        """Delete the rows that this example made, and no others."""
        self.watcher.close()
        with self.store.begin() as uow:
            uow.session.execute(delete(self.jobs).where(self.jobs.c.id.in_(list(self.seen))))
            uow.session.execute(delete(self.named).where(self.named.c.name.in_(LOCKS)))

    # --- calling and comparing --------------------------------------------------------------------

    def both(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call the verb on the store and on the oracle; the answer on which they agree.

        A call whose connection is lost has the answer that was lost, or none if nothing was done.
        """
        self._meets(verb, args[0] if args else None)
        got, lost = severed(self.store, self.cut, lambda: self._call(verb, args, kwargs))
        self._read()
        if lost == BEFORE:
            self._compare(verb, None, None)
            return None
        if verb.startswith("enqueue"):
            kwargs["answer"] = [] if lost else got
        if verb.startswith("claim"):
            kwargs["cut"] = bool(lost)
        want = answer_of(getattr(self.model, verb), *args, **kwargs)
        self._compare(verb, None if lost else got, None if lost else want)
        got = want if lost else got
        answers = got if isinstance(got, list) else [got]
        for lease in answers:
            if isinstance(lease, JobLease) and verb.startswith(ALONE):
                self.leases.append(lease)
                self.coverage.given(lease)
        return got

    def _call(self, verb: str, args: Any, kwargs: Any) -> Any:
        with self._doing(verb) as jobs:
            return answer_of(getattr(jobs, verb), *args, **kwargs)

    def _meets(self, verb: str, given: Any) -> None:
        """Count in which condition the leases are that the verb gets."""
        for lease in given if isinstance(given, list) else [given]:
            if isinstance(lease, Lease):
                self.coverage.count(verb, lease, self.model.rows.get(lease.id), self.now)

    @contextmanager
    def _doing(self, verb: str) -> Iterator[Any]:
        if self.joined and not verb.startswith(ALONE):
            with self.store.begin() as uow:
                yield uow.jobs
        else:
            yield self.store

    def _read(self) -> None:
        """Read the jobs, on a connection that has not written them."""
        self.watcher.read(self._look)

    def _look(self, tx: Transaction) -> None:
        """By ``get`` all that have changed; a row without a change was read before."""
        jobs = JoinedJobs(tx)
        rows = {row.id: tuple(row) for row in tx.execute(self.all_jobs)}
        for name in sorted({*self.rows, *rows}):
            if self.rows.get(name) != rows.get(name):
                self.seen[name] = jobs.get(name)
        if rows != self.rows or not self.counts:  # the same rows have the same counts
            self.rows, self.counts = rows, jobs.counts()

    def _compare(self, verb: str, got: Any, want: Any) -> None:
        """All rows, then the answers."""
        self.model.agree(self.seen)
        same("counts", self.counts, self.model.counts())
        if isinstance(got, LeaseLost) and isinstance(want, LeaseLost):
            same(f"the row told with LeaseLost by {verb}", got.current, self.seen.get(got.held.id))
            got, want = (got.held, got.completed), (want.held, want.completed)
        same(verb, got, want)

    def _at(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The job with its instants counted from now."""
        fixed = {name: job[name] for name in ("run_at", "deadline") if job.get(name) is not None}
        return {**job, **{name: self.now + wait for name, wait in fixed.items()}}

    # --- the clock --------------------------------------------------------------------------------

    def creep(self, by: float) -> None:
        """Time goes on a little."""
        self.now += by

    def jump(self, which: int, side: int) -> None:
        """Time comes to the very end of a lease, a wait or a deadline, or to the number next to it."""
        jobs, locks = self.model.rows.values(), self.lock_model.rows.values()
        ends = {row.until for row in jobs} | {row.deadline or 0.0 for row in jobs}
        ends |= {row.until for row in locks}
        ahead = sorted(stop for end in ends - {0.0} if (stop := beside(end, side)) > self.now)
        if ahead:
            self.now = ahead[min(which, len(ahead) - 1)]

    def jump_back(self, which: int, side: int) -> None:
        """Time comes again to the very end of a lease, a wait or a deadline, or next to it."""
        ends = {end for row in self.model.rows.values() for end in (row.until, row.deadline) if end}
        ends |= {lease.until for lease in self.leases}
        behind = sorted((stop for end in ends if (stop := beside(end, side)) < self.now), reverse=True)
        if behind:
            self.now = behind[min(which, len(behind) - 1)]

    # --- entry and claims -------------------------------------------------------------------------

    def enqueue(self, job: dict[str, Any], named: bool) -> None:
        """A job under a name, which may exist already, or under an id that the store makes up."""
        job = self._at(job)
        if not named and sum(not row.named for row in self.model.rows.values()) < UNNAMED:
            del job["id"]
        self.both("enqueue", **job, now=self.now)

    def enqueue_many(self, jobs: list[dict[str, Any]]) -> None:
        """Several at once; ids may exist already or repeat."""
        self.both("enqueue_many", [self._at(job) for job in jobs], now=self.now)

    def claim_by_id(self, name: str, owner: str, ttl: float) -> Any:
        """This job or none."""
        return self.both("claim", owner, ttl=ttl, id=name, now=self.now)

    def claim_next(self, owner: str | None, ttl: float, queue: str) -> None:
        """The first of the queue."""
        self.both("claim", owner, ttl=ttl, queue=queue, now=self.now)

    def claim_many(self, owner: str, ttl: float, limit: int, queue: str, kinds: Any) -> None:
        """The first few of the queue."""
        self.both("claim_many", owner, ttl=ttl, limit=limit, queue=queue, kinds=kinds, now=self.now)

    def attempt(
        self, nth: int, owner: str, ttl: float, wait: int | None, forged: str | None,
        end: str, retry: Any, result: Any, cut: str | None = None,
    ) -> None:  # fmt: skip
        """Claim, work until just before, at or after the end of the lease (or not at all), then end it."""
        free = [row.id for row in self.model.rows.values() if row.free(self.now)]
        if not free:
            self.both("purge", before=self.now + 1.0)
            self.both("enqueue", NAMES[nth], now=self.now)
            free = [NAMES[nth]]
        lease = self.claim_by_id(free[nth % len(free)], owner, ttl)
        if lease is not None:
            if wait is not None:
                self.now = max(self.now, beside(lease.until, wait))
            self.end(Past(0, forged), end, retry, result, cut)

    # --- the end of an attempt --------------------------------------------------------------------

    def end(self, past: Past, end: str, retry: Retry | None, result: Any, cut: str | None = None) -> None:
        """An end of an attempt, or what goes on with it, in time or late, by a lease maybe long gone."""
        lease = past.among(self.leases)
        if lease is not None:
            with self._losing(cut):
                self._end(lease, end, retry, result)
            self._became(lease)

    def _became(self, lease: JobLease) -> None:
        self._meets("outcome", lease)
        same("outcome", self.store.outcome(lease), self.model.outcome(lease))

    def _end(self, lease: JobLease, end: str, retry: Retry | None, result: Any) -> None:
        if end == "complete":
            self.both("complete", lease, result, now=self.now)
        elif end == "fail":
            error = ValueError("out of stock") if result else "out of stock"
            self.both("fail", lease, error, retry=retry, now=self.now)
        elif end == "renew":
            self.both("renew", lease, ttl=2.5, now=self.now)
        elif end == "checkpoint":
            self.both("checkpoint", lease, result, now=self.now)
        elif end == "set_aside":
            state = JobState.QUARANTINED if retry is None else JobState.CANCELLED
            self.both("set_aside", lease, "hopeless", state=state, now=self.now)
        else:
            delay, refund = (1.0, True) if result else (0.0, retry is None)
            self.both("release", lease, delay=delay, refund=refund, now=self.now)

    def renew_many(self, pasts: list[Past], ttl: float) -> None:
        """Heartbeats of several jobs."""
        self.both("renew_many", self._several(pasts), ttl=ttl, now=self.now)

    def complete_many(self, pasts: list[Past], results: bool) -> None:
        """Several done, some of them lost."""
        leases = self._several(pasts)
        given = [VALUES[n] for n, _ in enumerate(leases)] if results else None
        self.both("complete_many", leases, given, now=self.now)

    def _several(self, pasts: list[Past]) -> list[JobLease]:
        """Each once: the contract does not say what the same lease twice in one call is."""
        leases = (past.among(self.leases) for past in pasts)
        return list({(lease.id, lease.owner, lease.fence): lease for lease in leases if lease}.values())

    def completing(self, past: Past, result: Any, job: dict[str, Any], breaks: bool) -> None:
        """Business writes and the completion: together, or neither. The write is a follow-up job."""
        lease = past.among(self.leases)
        if lease is not None:
            self._completing(lease, result, {**self._at(job), "now": self.now}, breaks)

    def _completing(self, lease: JobLease, result: Any, job: dict[str, Any], breaks: bool) -> None:
        self._meets("completing", lease)
        got, lost = severed(
            self.store, self.cut, lambda: answer_of(self._complete_with, lease, result, job, breaks)
        )
        self._read()
        want = None if lost == BEFORE else answer_of(self._expect_with, lease, result, job, breaks)
        if isinstance(got, LeaseLost) and job.get("id") == lease.id:  # it tells the row as the block made it
            got.current = self.seen.get(lease.id)
        self._compare("completing", None if lost else got, None if lost else want)

    def _complete_with(self, lease: JobLease, result: Any, job: dict[str, Any], breaks: bool) -> Any:
        with self.store.completing(lease, result=result, now=self.now) as uow:
            added = uow.jobs.enqueue(**job)
            if breaks:
                raise Broken
        return added

    def _expect_with(self, lease: JobLease, result: Any, job: dict[str, Any], breaks: bool) -> Any:
        if breaks:
            raise Broken
        self.model.complete(lease, result, now=self.now)
        return self.model.enqueue(**job)

    # --- connections that are lost ----------------------------------------------------------------

    def lose(self, when: str, do: Step) -> None:
        """A call whose connection is lost at its COMMIT; then every lease that there was is asked about."""
        known = len(self.leases)
        with self._losing(when):
            getattr(self, do.verb)(**do.arguments)
        for lease in [*self.leases[:known][-2:], *self.leases[known:]]:
            self._became(lease)

    @contextmanager
    def _losing(self, when: str | None) -> Iterator[None]:
        self.cut, outer = when or self.cut, self.cut
        try:
            yield
        finally:
            self.cut = outer

    # --- each verb with each lease ----------------------------------------------------------------

    def replay(self, verb: str, met: str) -> None:
        """A job of its own is brought so far that its lease is ``met``; then the verb is called with it."""
        lease = self._afresh(NAMES[0])
        if met in (pairs.AT_ITS_END, pairs.STALE):
            self.now = lease.until
        elif met == pairs.EXPIRED:
            self.now = beside(lease.until, 1)
        if met == pairs.STALE:
            self.claim_by_id(lease.id, lease.owner, 10.0)
        elif met == pairs.OTHER_OWNER:
            lease = _forge(lease, "owner")
        elif met == pairs.OTHER_ID:
            self._afresh(NAMES[1], "B")
            lease = replace(lease, id=NAMES[1])
        elif met in (pairs.DONE, pairs.PURGED):
            self._end(lease, "complete", None, None)
        elif met in (pairs.QUARANTINED, pairs.CANCELLED):
            self.operate("quarantine" if met == pairs.QUARANTINED else "cancel", lease.id, None)
        elif met == pairs.GIVEN_BACK:
            self._end(lease, "release", Retry(), None)
        if met == pairs.PURGED:
            self.both("purge", before=beside(self.now, 1))
        self._use(verb, lease)

    def _afresh(self, name: str, owner: str = "A") -> JobLease:
        """A lease on a job of this name that has just been added."""
        self.both("cancel", name, now=self.now)
        self.both("purge", before=_LATEST)
        self.both("enqueue", name, now=self.now)
        lease: JobLease | None = self.claim_by_id(name, owner, 10.0)
        if lease is None:
            raise Disagreement(f"{name!r} has just been added, and cannot be claimed")
        return lease

    def _use(self, verb: str, lease: JobLease) -> None:
        if verb == "renew_many":
            self.both(verb, [lease], ttl=2.5, now=self.now)
        elif verb == "complete_many":
            self.both(verb, [lease], None, now=self.now)
        elif verb == "completing":
            self._completing(lease, None, {"id": NAMES[2], "now": self.now}, False)
        elif verb != "outcome":
            self._end(lease, verb, Retry(), None)
        self._became(lease)

    # --- operators and maintenance ----------------------------------------------------------------

    def operate(self, verb: str, name: str, payload: Any) -> None:
        """By hand, whatever the job is doing."""
        said: dict[str, Any] = {"reason": "looks odd"} if verb == "quarantine" else {}
        if verb == "requeue":
            mended = {} if payload is None else {"payload": payload}
            said = {"by": "operator", "reason": "mended", **mended}
        self.both(verb, name, **said, now=self.now)

    def sweep(self, limit: int) -> None:
        """A bounded sweep."""
        self.both("sweep", limit=limit, now=self.now)

    def purge(self, ago: float, limit: int, forget: bool) -> None:
        """A bounded purge."""
        self.both("purge", before=self.now - ago, limit=limit, forget=forget)

    def cancel_and_purge(self, name: str, ago: float) -> None:
        """The whole way to a tombstone, and back by the same name."""
        self.both("cancel", name, now=self.now)
        self.both("purge", before=self.now - ago)
        self.both("enqueue", name, now=self.now)

    def set_aside_and_requeue(self, name: str, verb: str, payload: Any = None) -> None:
        """Out of the queue, and back, perhaps mended."""
        self.operate(verb, name, None)
        self.operate("requeue", name, payload)

    # --- what leaves no trace ---------------------------------------------------------------------

    def leave_no_trace(self, job: dict[str, Any], name: str, bad: float | None) -> None:
        """A transaction that fails, or an argument that is refused, changes nothing."""
        if bad is None:
            with suppress(Broken), self.store.begin() as uow:
                uow.jobs.enqueue(**self._at(job), now=self.now)
                uow.jobs.cancel(name, now=self.now)
                raise Broken
        else:
            claims = (partial(self.store.claim, "A", id=name), partial(self.store.locks.claim, "cron", "A"))
            for claim in claims:
                same(f"ttl={bad!r}", type(answer_of(claim, ttl=bad, now=self.now)), InvalidValue)
        read(self.store, self._look)
        self._compare("nothing", None, None)

    # --- locks ------------------------------------------------------------------------------------

    def lock(self, name: str, owner: str, ttl: float) -> None:
        """A named lease."""
        self._both_locks("claim", name, owner, ttl=ttl, now=self.now)

    def locked(self, past: Past, verb: str) -> None:
        """A named lease is used, in time or late."""
        lease = past.among(self.locks)
        arguments = {"renew": {"ttl": 2.5, "now": self.now}, "release": {}, "check": {"now": self.now}}
        if lease is not None:
            self._both_locks(verb, lease, **arguments[verb])

    def _both_locks(self, verb: str, *args: Any, **kwargs: Any) -> None:
        got = answer_of(getattr(self.store.locks, verb), *args, **kwargs)
        want = answer_of(getattr(self.lock_model, verb), *args, **kwargs)
        self.lock_model.agree(self.watcher.read(_locks_of))
        if isinstance(got, LeaseLost) and isinstance(want, LeaseLost):
            got, want = (got.held, got.current), (want.held, want.current)
        same(verb, got, want)
        self.locks += [got] if isinstance(got, Lease) else []


class Broken(Exception):
    """What the handler of an example raises."""


def answer_of(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the verb returned, or raised as its answer."""
    try:
        return verb(*args, **kwargs)
    except (LeaseLost, InvalidValue) as refused:
        return refused
    except Broken:
        return Broken


def _locks_of(tx: Transaction) -> dict[str, LeaseRecord | None]:
    """By ``get`` all locks that an example may have made."""
    locks = Locks(tx)
    return {name: locks.get(name) for name in LOCKS}


def same(what: str, got: Any, want: Any) -> None:
    """Raise `Disagreement` unless the store's answer is the oracle's."""
    if got != want:
        raise Disagreement(f"{what}: got {got!r}, expected {want!r}")


def beside(instant: float, side: int) -> float:
    """The instant itself, or the number before or after it."""
    return math.nextafter(instant, math.copysign(math.inf, side)) if side else instant


# --- which store ----------------------------------------------------------------------------------


def job_machine(
    store: Any, *, runner: asyncio.Runner | None = None, schema: str | None = None, backwards: bool = False
) -> type[JobMachine]:
    """A state machine for this store; ``job_machine(store).TestCase`` is a test for unittest and pytest.

    ``store`` is a `Store` or an `AsyncStore` on empty tables, or a function without arguments that
    gives one for each example. The verbs of an `AsyncStore` run on ``runner``, which stays the
    caller's to close; without it the machine has one of its own for as long as the process lives.
    ``schema`` is where the store has its tables. ``backwards`` lets the clock also go back. The class
    counts what it does in ``effort``, and which verb met which lease in ``coverage``.
    """
    placed = tables(schema)
    steps = as_often((*_FORWARDS, *_BACKWARDS) if backwards else _FORWARDS)

    def step(self: JobMachine, do: Step) -> None:
        """One call on both sides."""
        JobMachine.step(self, do)

    parts = {
        "open_store": staticmethod(opened(store, runner)), "step": rule(do=steps)(step),
        "jobs": placed[Job.__tablename__], "named": placed[Lock.__tablename__],
        "all_jobs": select(placed[Job.__tablename__]),
        "effort": Effort(), "coverage": Coverage(VERBS, CONDITIONS),
    }  # fmt: skip
    return type("JobMachine", (JobMachine,), parts)


def opened(store: Any, runner: asyncio.Runner | None = None) -> Callable[[], Any]:
    """What gives the store for each example, an `AsyncStore` with blocking verbs; see `job_machine`."""
    runners = [] if runner is None else [runner]

    def open_one() -> Any:
        one = store() if callable(store) else store
        if not inspect.iscoroutinefunction(getattr(type(one), "counts", None)):
            return one
        if not runners:
            runners.append(asyncio.Runner())
        return Blocking(one, runners[0])

    return open_one


def every_pair(machine: type[JobMachine], *, joined: bool = False) -> None:
    """One example that calls each verb with a lease in each condition; see ``machine.coverage``."""
    walking = machine()
    try:
        walking.start(now=1000.0, joined=joined, jobs=[])
        for verb in VERBS:
            for met in CONDITIONS:
                walk(walking, Step("replay", {"verb": verb, "met": met}))
    finally:
        walking.teardown()


def walk(machine: Any, step: Step) -> None:
    """Take a step that no example of Hypothesis tells of, so that an error tells it."""
    try:
        machine.step(step)
    except Exception as error:
        error.add_note(f"state.step(do={step!r})")
        raise
