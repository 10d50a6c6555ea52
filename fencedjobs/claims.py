"""Claims and renewals: the verbs of jobs that need a transaction of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fencedjobs import job_sql as sql
from fencedjobs import payload as edge
from fencedjobs.enqueue import BULK
from fencedjobs.job_sql import WAITING
from fencedjobs.jobs import JoinedJobs
from fencedjobs.leases import Again, Part, Transition, at, identity, locked_among, make, make_many, renew
from fencedjobs.values import JobLease, JobState, Outcome


class Jobs(JoinedJobs):
    """All verbs of jobs, for a transaction that is theirs alone.

    Claim and renew are not offered inside the caller's: their row locks would last as long as it.
    """

    def claim_named(self, id: str, owner: str, *, ttl: float, now: float | None = None) -> JobLease | None:
        """Claim this very job; ``None`` if it cannot be claimed now."""
        instant = self._tx.now(now)
        wanted = {"job_id": edge.key("id", id)} | _wanted(owner, ttl, instant)
        rows = make(self._tx, sql.claim_named(self._jobs, instant is not None), wanted)
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
    ) -> list[JobLease] | Part | Again:
        """Claim up to ``limit`` jobs of a queue, promoting what is due first.

        An empty list is an empty queue; `Again` says that there may be something all the same.
        """
        wanted = {"in_queue": edge.key("queue", queue)} | _wanted(owner, ttl, self._tx.now(now))
        limit = edge.whole("limit", limit, least=1)
        if kinds is not None:
            wanted["kinds"] = [edge.label("kinds", kind) for kind in kinds]
        if self._tx.may_start_over:
            at_once = self._claim_at_once(wanted, limit)
            if at_once is not None:
                return at_once
        found: list[Any] = []
        taking = sql.take(self._jobs, "now" in wanted, "kinds" in wanted)
        for turn in range(_TURNS):
            promoted = self._promote(wanted, min(limit << 2 * turn, max(limit, BULK)))
            taken = self._take(taking, wanted, limit - len(found))
            found += [row for row in taken if row.state == JobState.LEASED]
            buried = sum(row.state != JobState.LEASED for row in taken)
            if len(found) == limit or not (promoted or buried):
                break
            if buried:
                make(self._tx, sql.bury_ready(self._jobs, "now" in wanted), wanted | {"limit": BULK})
        if found:
            return _leases(found)
        if promoted or buried:
            return Again.AT_ONCE
        return Again.SOON if self._contended(wanted) else []

    def _claim_at_once(self, wanted: Mapping[str, Any], limit: int) -> list[JobLease] | Part | None:
        """Claim what is ready, unless something is due that must be promoted first; ``None`` for nothing.

        `Part`, if it met rows that can never run: the rest needs the other way.
        """
        taking = sql.take_at_once(self._jobs, "now" in wanted, "kinds" in wanted, self._waiting)
        rows = self._take(taking, wanted, limit)
        if not rows:
            self._tx.require_several()
            return None
        leases = _leases(rows)
        return leases if len(leases) == len(rows) else Part(leases)

    def may_claim(self, queue: str, kinds: Iterable[str], now: float | None = None) -> bool:
        """Whether a claim could find something, told by reading alone."""
        instant = self._tx.now(now)
        wanted = {"in_queue": queue, "kinds": list(kinds)}
        ready, due = sql.claimable_apart(self._jobs, instant is not None, True)
        found = self._tx.execute(ready, wanted).first()
        return (found or self._tx.execute(due, wanted | at(instant)).first()) is not None

    def _promote(self, wanted: Mapping[str, Any], limit: int) -> int:
        promotions = (sql.promote(self._jobs, "now" in wanted, states) for states in self._waiting)
        return sum(len(make(self._tx, one, {**wanted, "limit": limit})) for one in promotions)

    def _take(self, taking: Transition, wanted: Mapping[str, Any], limit: int) -> Sequence[Any]:
        return make(self._tx, taking, {**wanted, "limit": limit})

    @property
    def _waiting(self) -> tuple[tuple[JobState, ...], ...]:
        """The states that are looked for together: in an index that is not partial each has its own range."""
        together = self._tx.capabilities.partial_indexes
        return (WAITING,) if together else tuple((state,) for state in WAITING)

    def _contended(self, wanted: Mapping[str, Any]) -> bool:
        """Whether somebody else has locked what could be claimed: that is no empty queue."""
        if not self._tx.capabilities.row_locks:
            return False
        looking = sql.claimable(self._jobs, "now" in wanted, "kinds" in wanted)
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
            self._tx, self._jobs, leases, sql.renew_all(self._jobs, instant is not None), parameters
        )
        ends = {(id, owner, fence): until for id, owner, fence, until in rows}
        until = [ends.get(identity(lease)) for lease in leases]
        return [
            None if end is None else replace(lease, until=end)
            for lease, end in zip(leases, until, strict=True)
        ]

    def locked(self, leases: Iterable[JobLease]) -> list[JobLease]:
        """Those whose rows somebody else has locked at this moment; the others are locked from now on.

        From now on this transaction waits for no lock: a scan may meet rows that it does not ask for.
        """
        self._tx.waits = False
        return locked_among(self._tx, self._jobs, list(leases))

    def renew_free(
        self, leases: Iterable[JobLease], *, ttl: float, now: float | None = None
    ) -> list[JobLease | None]:
        """`renew_many` that waits for nobody: a lease whose row somebody has locked comes back as it is."""
        leases = list(leases)
        locked = {identity(lease) for lease in self.locked(leases)}
        free = [lease for lease in leases if identity(lease) not in locked]
        renewed = iter(self.renew_many(free, ttl=ttl, now=now))
        return [lease if identity(lease) in locked else next(renewed) for lease in leases]

    def outcome(self, lease: JobLease) -> Outcome:
        """What became of this lease, by a locking read: it waits for a COMMIT that is still under way."""
        row = self._tx.execute(
            sql.outcome(self._jobs, self._tx.capabilities.row_locks), {"job_id": lease.id}
        ).first()
        if row is None:
            return Outcome.ENDED
        record = sql.record(row)
        if record.completed_by(lease):
            return Outcome.COMPLETED
        held = (record.owner, record.fence) == (lease.owner, lease.fence)
        return Outcome.HELD if held else Outcome.ENDED


_TURNS: Final = 8  # promotions in one transaction


def _wanted(owner: str, ttl: float, now: float | None) -> dict[str, Any]:
    return {"new_owner": edge.key("owner", owner), "ttl": edge.ttl(ttl, now)} | at(now)


def _leases(rows: Iterable[Any]) -> list[JobLease]:
    """The leases among the rows, in the order of the queue (RETURNING has none)."""
    granted = [row for row in rows if row.state == JobState.LEASED]
    return [sql.lease(row) for row in sorted(granted, key=lambda row: (-row.priority, row.seq))]
