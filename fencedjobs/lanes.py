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
    ARRAY,
    CTE,
    ColumnElement,
    Select,
    Table,
    Update,
    all_,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal,
    outerjoin,
    select,
    true,
    tuple_,
    update,
)

from fencedjobs import payload as edge
from fencedjobs.dialects import clock
from fencedjobs.errors import LeaseLost
from fencedjobs.leases import NOW, ONE, Leased, at, guard, named, remembered
from fencedjobs.locks import LANE, Locks, leased_locks
from fencedjobs.models import Lock, OutboxEvent
from fencedjobs.outbox import PENDING, event_of, next_events
from fencedjobs.rows import ManyRows
from fencedjobs.transaction import SeveralStatements, Transaction
from fencedjobs.values import Event, EventState, Lease


@dataclass(frozen=True, slots=True)
class Fetched(Event):
    """An event as a relay has read it."""

    digest: str

    def copy(self) -> Event:
        """For the sender: whatever is done to it changes nothing here."""
        return Event(
            self.id, self.seq, self.fence, self.topic, self.lane, _copied(self.payload),
            _copied(self.headers), self.created, self.attempt,
        )  # fmt: skip


def _copied(value: Any) -> Any:
    """A copy of a JSON value, down to its leaves."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Settled:
    """What has become of a lane: its lease, and what to send."""

    lease: Lease
    goes_on: bool  #: whether the event that was to come next may be sent
    more: list[Fetched]  #: or those that were read in its place, the first one's attempt counted


@dataclass(frozen=True, slots=True)
class Failure:
    """What is written down about an event that was not acknowledged."""

    event: Fetched
    error: str
    aside: str | None  #: why it is quarantined; ``None`` if its lane waits for it
    attempts: int  #: how often it was sent


class Lanes:
    """What a relay does, each step in a transaction of its own."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._table = tx.tables[OutboxEvent.__tablename__]
        self._locks = Locks(tx)

    def take(self, lane: str, owner: str, *, limit: int, ttl: float) -> tuple[Lease, list[Fetched]] | None:
        """The lease of a lane and its next events, the first one's attempt counted.

        ``None`` while another relay holds the lane, or nothing is pending. An event that kills its
        relay is counted like that, too.
        """
        if not self._next(lane, 1):
            return None
        lease = self._locks.claim(LANE + lane, owner, ttl=ttl)
        if lease is None:
            return None
        events = self._next(lane, limit, lease.fence)
        if not events:
            self._locks.release(lease)
            return None
        self._count(events[0])
        return lease, events

    def settle(
        self,
        lease: Lease,
        sent: Sequence[Fetched],
        failure: Failure | None,
        then: Fetched | None,
        *,
        ttl: float,
        more: int = 0,
    ) -> Settled:
        """Write down what became of events, renew the lane's lease, and count the attempt of the next.

        ``then`` may be sent if it still waits as it was read, so that no operator has set it aside or
        mended it, and no other relay has been on the lane meanwhile. Without it up to ``more`` events are
        read, if those sent were all marked: one that was mended meanwhile comes before them. A lease that
        has run out is claimed again; `LeaseLost`, and nothing is written, if another relay has the lane.
        """
        if self._tx.single:
            return self._settle_at_once(lease, sent, then, ttl, more)
        kept = self._keep(lease, ttl)
        marked = self._mark(kept, sent) if sent else 0
        if failure is not None:
            if sent:  # else it was the first since the last count
                self._count(failure.event)
            self._fail(failure)
        if then is not None:
            return Settled(kept, kept.fence <= lease.fence + 1 and self._count(then), [])
        events = self._next(sent[0].lane, more, kept.fence) if more and marked == len(sent) else []
        return Settled(kept, False, events if events and self._count(events[0]) else [])

    def _settle_at_once(
        self, lease: Lease, sent: Sequence[Fetched], then: Fetched | None, ttl: float, more: int
    ) -> Settled:
        """`settle` in one statement, for events that were all acknowledged, while the lane's lease runs."""
        instant = self._tx.now(None)
        parameters = named(lease) | self._marking(lease, sent, instant) | {"ttl": edge.ttl(ttl, instant)}
        if then is not None:
            parameters |= _this(then, then.attempt - 1)
        elif more:
            parameters |= {"in_lane": sent[0].lane, "limit": more, "number": len(sent)}
        locks = leased_locks(self._tx.tables[Lock.__tablename__])
        settling = _settle(self._table, locks, instant is not None, self._many, then is not None, bool(more))
        rows = self._tx.execute(settling, parameters, writing=True).all()
        if not rows:  # it has run out, or another relay has it: nothing was written
            raise SeveralStatements
        kept, counted = replace(lease, until=rows[0][0]), bool(rows[0][1])
        if then is not None:
            return Settled(kept, counted, [])
        read = (row[2:] for row in rows if counted)
        return Settled(kept, False, [Fetched(*event_of(row, lease.fence), digest=row[8]) for row in read])

    def _next(self, lane: str, limit: int, fence: int = 0) -> list[Fetched]:
        rows = self._tx.execute(next_events(self._table), {"in_lane": lane, "limit": limit})
        return [Fetched(*event_of(row, fence), digest=row[8]) for row in rows]

    def give_back(self, lease: Lease, sent: Sequence[Fetched], unsent: Fetched | None, *, ttl: float) -> None:
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

    def last_words(self, event: Fetched, attempt: int) -> str | None:
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

    def _count(self, event: Fetched) -> bool:
        """Count an attempt of this event; whether it waits as it was read."""
        return self._tx.execute(_count(self._table, 1), _this(event, event.attempt - 1)).rowcount == 1

    def _mark(self, lease: Lease, sent: Sequence[Fetched]) -> int:
        instant = self._tx.now(None)
        marking = _mark(self._table, instant is not None, self._many)
        return self._tx.execute(marking, self._marking(lease, sent, instant)).rowcount

    def _marking(self, lease: Lease, sent: Sequence[Fetched], instant: float | None) -> dict[str, Any]:
        """The parameters of `_mark`."""
        seqs, digests = [event.seq for event in sent], [event.digest for event in sent]
        if self._many is not None:
            these = self._many.parameters({"seqs": seqs, "digests": digests})
        else:
            these = {"seqs": seqs, "these": [*zip(seqs, digests, strict=True)]}
        return these | {"counted": sent[0].seq, "by_fence": lease.fence} | at(instant)

    @property
    def _many(self) -> ManyRows | None:
        capable = self._tx.capabilities
        return capable.rows if capable.update_returning else None

    def _fail(self, failure: Failure) -> None:
        of = _of_attempt(failure.attempts)
        error = edge.sanitised(failure.error, edge.MAX_TEXT - len(of)) + of
        parameters = _this(failure.event, failure.event.attempt) | {"new_error": error}
        if failure.aside is None:
            self._tx.execute(_failed(self._table), parameters)
        else:
            aside = {"new_reason": failure.aside, "new_attempts": failure.attempts}
            self._tx.execute(_set_aside(self._table), parameters | aside)


def _this(event: Fetched, so_far: int) -> dict[str, Any]:
    return {"this": event.seq, "this_payload": event.digest, "so_far": so_far}


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
def _mark(table: Table, given: bool, many: ManyRows | None) -> Update:
    c = table.c
    if many is not None:
        rows = many.table({"seqs": c.seq, "digests": c.digest})
        these = and_(c.seq == rows.c.seqs, c.digest == rows.c.digests, _waits(table))
    else:  # the numbers by themselves as well: MariaDB finds no key for the pairs
        pairs = tuple_(c.seq, c.digest).in_(bindparam("these", expanding=True))
        these = and_(c.seq.in_(bindparam("seqs", expanding=True)), pairs, c.state == PENDING)
    sent = {"state": EventState.SENT.value, "sent_at": clock(NOW, given=given), "last_error": None}
    attempts: ColumnElement[int] = case((c.seq == bindparam("counted"), c.attempts), else_=c.attempts + 1)
    return update(table).where(these).values(**sent, fence=bindparam("by_fence"), attempts=attempts)


@remembered
def _settle(
    table: Table, locks: Leased, given: bool, many: ManyRows | None, then: bool, more: bool
) -> Select[Any]:
    """Renew the lane's lease, and only under it mark what was sent and count the next attempt."""
    now = clock(NOW, given=given)
    renewing = update(locks.table).where(guard(locks, ONE, now)).values(until=locks.end(now))
    kept = renewing.returning(locks.until).cte("kept")
    under_it = exists(select(kept.c.until))
    marked = _mark(table, given, many).where(under_it).returning(table.c.seq).cte("marked")
    if then:
        counting = _count(table, 1).where(under_it)
    elif more:
        return _settle_and_read(table, kept, marked)
    else:
        return select(kept.c.until, literal(0)).add_cte(kept, marked)
    counted = counting.returning(table.c.seq).cte("counted")
    return select(kept.c.until, _number(counted)).add_cte(kept, marked, counted)


def _settle_and_read(table: Table, kept: CTE, marked: CTE) -> Select[Any]:
    """The rest of `_settle` where there is nothing else to send: a row for each event that was read.

    They are those of the statement's snapshot, in which what is being marked still waits.
    """
    c = table.c
    others = c.seq != all_(bindparam("seqs", type_=ARRAY(c.seq.type)))
    read = next_events(table).where(others).cte("read")
    first = select(read.c.seq, read.c.digest, read.c.attempts).order_by(read.c.seq).limit(1).cte("first")
    same = and_(c.seq == first.c.seq, c.digest == first.c.digest, c.attempts == first.c.attempts)
    counting = update(table).where(same, _waits(table), exists(select(kept.c.until)), _is_all(marked))
    counted = counting.values(attempts=c.attempts + 1).returning(c.seq).cte("counted")
    together = select(kept.c.until, _number(counted), *read.c).add_cte(kept, marked, counted)
    return together.select_from(outerjoin(kept, read, true())).order_by(read.c.seq)


def _is_all(marked: CTE) -> ColumnElement[bool]:
    """Whether every event that was sent is marked; what was mended meanwhile is not among those read."""
    is_all: ColumnElement[bool] = _number(marked) == bindparam("number", type_=marked.c.seq.type)
    return is_all


def _number(rows: CTE) -> Any:
    return select(func.count()).select_from(rows).scalar_subquery()


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
