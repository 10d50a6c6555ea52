"""The lanes of the outbox as a relay works on them: take, settle, give back.

A lane's lease is a lock, which one relay holds while it sends; marking an event sent needs it, and
that the event is still the one that was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    Table,
    Update,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal,
    select,
    tuple_,
    update,
)

from fencedjobs import payload as edge
from fencedjobs.dialects import clock
from fencedjobs.errors import LeaseLost
from fencedjobs.leases import NOW, ONE, Leased, at, from_arrays, guard, named, remembered
from fencedjobs.locks import LANE, Locks, leased_locks
from fencedjobs.models import Lock, OutboxEvent
from fencedjobs.outbox import PENDING, next_events
from fencedjobs.transaction import SeveralStatements, Transaction
from fencedjobs.values import Event, EventState, Lease


@dataclass(frozen=True, slots=True)
class Failure:
    """What is written down about an event that was not acknowledged."""

    event: Event
    error: str
    aside: str | None  #: why it is quarantined; ``None`` if its lane waits for it
    attempts: int  #: how often it was sent


class Lanes:
    """What a relay does, each step in a transaction of its own."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._table = tx.tables[OutboxEvent.__tablename__]
        self._locks = Locks(tx)

    def take(self, lane: str, owner: str, *, limit: int, ttl: float) -> tuple[Lease, list[Event]] | None:
        """The lease of a lane and its next events, the first one's attempt counted.

        ``None`` while another relay holds the lane, or nothing is pending. An event that kills its
        relay is counted like that, too.
        """
        if not next_events(self._tx, self._table, lane, 1):
            return None
        lease = self._locks.claim(LANE + lane, owner, ttl=ttl)
        if lease is None:
            return None
        events = next_events(self._tx, self._table, lane, limit, lease.fence)
        if not events:
            self._locks.release(lease)
            return None
        self._count(events[0])
        return lease, events

    def settle(
        self, lease: Lease, sent: Sequence[Event], failure: Failure | None, then: Event | None, *, ttl: float
    ) -> tuple[Lease, bool]:
        """Write down what became of events, renew the lane's lease, and count the attempt of the next.

        The new lease, and whether ``then`` may be sent: it still waits as it was read, so that no
        operator has set it aside or mended it, and no other relay has been on the lane meanwhile. A
        lease that has run out is claimed again; `LeaseLost`, and nothing is written, if another relay
        has the lane.
        """
        if self._tx.single:
            return self._settle_at_once(lease, sent, then, ttl)
        kept = self._keep(lease, ttl)
        if sent:
            self._mark(kept, sent)
        if failure is not None:
            if sent:  # else it was the first since the last count
                self._count(failure.event)
            self._fail(failure)
        if then is None or kept.fence > lease.fence + 1:
            return kept, False
        return kept, self._count(then)

    def _settle_at_once(
        self, lease: Lease, sent: Sequence[Event], then: Event | None, ttl: float
    ) -> tuple[Lease, bool]:
        """`settle` in one statement, for events that were all acknowledged, while the lane's lease runs."""
        instant = self._tx.now(None)
        parameters = named(lease) | self._marking(lease, sent, instant) | {"ttl": edge.ttl(ttl, instant)}
        if then is not None:
            parameters |= _this(then, then.attempt - 1)
        locks = leased_locks(self._tx.tables[Lock.__tablename__])
        settling = _settle(self._table, locks, instant is not None, then is not None)
        row = self._tx.execute(settling, parameters, writing=True).first()
        if row is None:  # it has run out, or another relay has it: nothing was written
            raise SeveralStatements
        return replace(lease, until=row[0]), bool(row[1])

    def give_back(self, lease: Lease, sent: Sequence[Event], unsent: Event | None, *, ttl: float) -> None:
        """Mark what is left to mark, and give the lane back. If ``unsent`` was counted, it is not any more.

        That count stays if another relay has been on the lane meanwhile: it may be its own. `LeaseLost`,
        and nothing is marked, if another relay has the lane; no matter if nothing is left.
        """
        kept = self._keep(lease, ttl) if sent else lease
        if sent:
            self._mark(kept, sent)
        with suppress(LeaseLost):
            self._locks.release(kept)
            if unsent is not None and kept.fence <= lease.fence + 1:
                self._tx.execute(_count(self._table, -1), _this(unsent, unsent.attempt))

    def last_words(self, event: Event, attempt: int) -> str | None:
        """The error that this attempt of an event left; ``None`` if it left none, since its relay died.

        An older error may still stand there: the text itself says of which attempt it is.
        """
        error: str | None = self._tx.execute(_last_error(self._table), {"this": event.seq}).scalar()
        of = _of_attempt(attempt)
        return error.removesuffix(of) if error is not None and error.endswith(of) else None

    def _keep(self, lease: Lease, ttl: float) -> Lease:
        """The lane's lease renewed, or claimed again if it has run out; else `LeaseLost`."""
        try:
            return self._locks.renew(lease, ttl=ttl)
        except LeaseLost:
            again = self._locks.claim(lease.id, lease.owner, ttl=ttl)
            if again is None:
                raise
            return again

    def _count(self, event: Event) -> bool:
        """Count an attempt of this event; whether it waits as it was read."""
        return self._tx.execute(_count(self._table, 1), _this(event, event.attempt - 1)).rowcount == 1

    def _mark(self, lease: Lease, sent: Sequence[Event]) -> None:
        instant = self._tx.now(None)
        marking = _mark(self._table, instant is not None, self._tx.capabilities.arrays)
        self._tx.execute(marking, self._marking(lease, sent, instant))

    def _marking(self, lease: Lease, sent: Sequence[Event], instant: float | None) -> dict[str, Any]:
        """The parameters of `_mark`."""
        these: dict[str, Any] = {"seqs": [event.seq for event in sent]}
        if self._tx.capabilities.arrays:
            these["digests"] = [_fingerprint(event) for event in sent]
        else:
            these["these"] = [(event.seq, _fingerprint(event)) for event in sent]
        return these | {"counted": sent[0].seq, "by_fence": lease.fence} | at(instant)

    def _fail(self, failure: Failure) -> None:
        of = _of_attempt(failure.attempts)
        error = edge.sanitised(failure.error, edge.MAX_TEXT - len(of)) + of
        parameters = _this(failure.event, failure.event.attempt) | {"new_error": error}
        if failure.aside is None:
            self._tx.execute(_failed(self._table), parameters)
        else:
            aside = {"new_reason": failure.aside, "new_attempts": failure.attempts}
            self._tx.execute(_set_aside(self._table), parameters | aside)


def _this(event: Event, so_far: int) -> dict[str, Any]:
    return {"this": event.seq, "this_payload": _fingerprint(event), "so_far": so_far}


def _fingerprint(event: Event) -> str:
    return edge.digest(event.topic, event.lane, event.payload)


def _of_attempt(attempt: int) -> str:
    return f" (attempt {attempt})"


# --- statements -----------------------------------------------------------------------------------


def _as_read(table: Table) -> ColumnElement[bool]:
    """It waits, and was neither mended, requeued nor tried by another relay since it was read."""
    c = table.c
    same = and_(c.seq == bindparam("this"), c.digest == bindparam("this_payload"))
    return and_(same, c.attempts == bindparam("so_far"), _waits(table))


def _waits(table: Table) -> ColumnElement[bool]:
    """It is pending; not so that the index of what is pending is scanned, as under old statistics it was."""
    return func.coalesce(table.c.state, "") == PENDING


@remembered
def _count(table: Table, by: int) -> Update:
    return update(table).where(_as_read(table)).values(attempts=table.c.attempts + by)


@remembered
def _mark(table: Table, given: bool, arrays: bool) -> Update:
    c = table.c
    if arrays:
        rows = from_arrays(seqs=c.seq, digests=c.digest)
        these = and_(c.seq == rows.c.seqs, c.digest == rows.c.digests, _waits(table))
    else:  # the numbers by themselves as well: MariaDB finds no key for the pairs
        pairs = tuple_(c.seq, c.digest).in_(bindparam("these", expanding=True))
        these = and_(c.seq.in_(bindparam("seqs", expanding=True)), pairs, c.state == PENDING)
    sent = {"state": EventState.SENT.value, "sent_at": clock(NOW, given=given), "last_error": None}
    attempts: ColumnElement[int] = case((c.seq == bindparam("counted"), c.attempts), else_=c.attempts + 1)
    return update(table).where(these).values(**sent, fence=bindparam("by_fence"), attempts=attempts)


@remembered
def _settle(table: Table, locks: Leased, given: bool, then: bool) -> Select[Any]:
    """Renew the lane's lease, and only under it mark what was sent and count the next attempt."""
    now = clock(NOW, given=given)
    renewing = update(locks.table).where(guard(locks, ONE, now)).values(until=locks.end(now))
    kept = renewing.returning(locks.until).cte("kept")
    under_it = exists(select(kept.c.until))
    marked = _mark(table, given, True).where(under_it).returning(table.c.seq).cte("marked")
    parts = [kept, marked]
    counted: Any = literal(0)
    if then:
        parts.append(_count(table, 1).where(under_it).returning(table.c.seq).cte("counted"))
        counted = select(func.count()).select_from(parts[-1]).scalar_subquery()
    return select(kept.c.until, counted).add_cte(*parts)


@remembered
def _last_error(table: Table) -> Select[Any]:
    return select(table.c.last_error).where(table.c.seq == bindparam("this"))


@remembered
def _failed(table: Table) -> Update:
    error = bindparam("new_error", type_=table.c.last_error.type)
    return update(table).where(_as_read(table)).values(last_error=error)


@remembered
def _set_aside(table: Table) -> Update:
    reason = bindparam("new_reason", type_=table.c.reason.type)
    aside = {"state": EventState.QUARANTINED.value, "attempts": bindparam("new_attempts")}
    return _failed(table).values(**aside, reason=reason)
