"""The transactional outbox: events that commit with the business rows, and are sent in order afterwards.

A lane is one ordered stream; what a relay does with it is in `lanes`. Events are found by their state,
never by "seq > the last one": rows commit out of the order of their numbers, and a watermark would
skip some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Delete,
    Double,
    Insert,
    Select,
    Table,
    Text,
    Update,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from fencedjobs import dialects
from fencedjobs import payload as edge
from fencedjobs.dialects import clock
from fencedjobs.errors import OutboxConflict
from fencedjobs.job_sql import history
from fencedjobs.leases import NOW, at, remembered
from fencedjobs.models import OutboxEvent
from fencedjobs.transaction import Transaction
from fencedjobs.values import Event, EventRecord, EventState, LaneStats, Requeue

BATCH: Final = 16
_KEPT: Final[Any] = object()
PENDING: Final = literal_column("'pending'", Text())  # as a parameter it would not match the partial index


class JoinedOutbox:
    """The verbs of the outbox in the caller's transaction."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._table = tx.tables[OutboxEvent.__tablename__]

    def add(
        self,
        id: str,
        payload: Any,
        *,
        topic: str,
        lane: str = "default",
        headers: Mapping[str, str] | None = None,
        now: float | None = None,
    ) -> str | None:
        """Add an event to be sent once this transaction has committed.

        Its id; ``None`` if the very same event is there already, sent or not. `OutboxConflict` if an
        event of this id has another topic, lane or payload. ``payload`` is a JSON value, ``headers``
        go along with it.
        """
        new = {
            "id": edge.key("id", id),
            "lane": edge.key("lane", lane),
            "topic": edge.key("topic", topic),
            "payload": edge.encode("payload", payload),
            "headers": edge.headers("headers", dict(headers) if isinstance(headers, Mapping) else headers),
            "digest": edge.digest(topic, lane, payload),
        }
        self._tx.subject = id
        known = self._insert(new, self._tx.now(now))
        if known is None:
            return id
        if known != new["digest"]:
            raise OutboxConflict(id)
        return None

    def pending(self, limit: int = BATCH, lane: str = "default") -> list[Event]:
        """The next 1 to 16 events of a lane, in the order of ``seq``. Reads only."""
        limit = edge.whole("limit", limit, least=1, most=BATCH)
        rows = self._tx.execute(next_events(self._table), {"in_lane": edge.key("lane", lane), "limit": limit})
        return [Event(*event_of(row, 0)) for row in rows]

    def quarantine(self, id: str, reason: str) -> bool:
        """Set a pending event aside, so that its lane goes on without it; whether it was pending."""
        parameters = {"event_id": edge.key("id", id), "new_reason": edge.reason("reason", reason)}
        return self._tx.execute(_quarantine(self._table), parameters).rowcount == 1

    def requeue(
        self, id: str, *, payload: Any = _KEPT, by: str, reason: str, now: float | None = None
    ) -> int | None:
        """Let a quarantined event be sent after all, under its id and at its old place in the order.

        How many pending events of its lane are ahead of it now; ``None`` if it was not quarantined.
        Its attempts start again at 0. Who, when and why is kept with it, and whether the payload was
        mended.
        """
        by, reason = edge.key("by", by), edge.reason("reason", reason)
        mended = payload is not _KEPT
        text = edge.encode("payload", payload) if mended else None
        instant, tx, table = self._tx.now(now), self._tx, self._table
        reading = _quarantined(table, instant is not None, tx.capabilities.row_locks)
        row = tx.execute(reading, {"event_id": edge.key("id", id)} | at(instant)).first()
        if row is None:
            return None
        entry = Requeue(row.read_at, by, reason, EventState.QUARANTINED, mended)
        new = payload if mended else edge.decode(row.payload)
        parameters = {
            "event_id": id,
            "new_payload": text if mended else row.payload,
            "new_digest": edge.digest(row.topic, row.lane, new),
            "new_requeues": history(row.requeues, entry),
        }
        if tx.execute(_requeue(table), parameters).rowcount != 1:
            return None
        return int(tx.execute(_ahead(table), {"in_lane": row.lane, "of": row.seq}).scalar_one())

    def get(self, id: str) -> EventRecord | None:
        """The event as it is in this transaction; ``None`` if there is none."""
        row = self._tx.execute(_get(self._table), {"event_id": edge.key("id", id)}).first()
        return None if row is None else _record(row)

    def stats(self, *, now: float | None = None) -> dict[str, LaneStats]:
        """By lane: how many are pending, sent, quarantined, and how long the oldest has waited."""
        instant = self._tx.now(now)
        counting = _stats(self._table, instant is not None)
        return {
            lane: LaneStats(
                int(pending), None if oldest is None else max(0.0, oldest), int(most), int(sent), int(aside)
            )
            for lane, pending, oldest, most, sent, aside in self._tx.execute(counting, at(instant))
        }

    def purge(self, *, before: float, limit: int = 1000) -> int:
        """Delete events that were sent before this instant; how many.

        With the event its id is forgotten: adding that id again would send it again.
        """
        parameters = {"before": edge.instant("before", before), "limit": edge.whole("limit", limit, least=1)}
        old = [row[0] for row in self._tx.execute(_sent_before(self._table), parameters)]
        if not old:
            return 0
        return int(self._tx.execute(_delete_sent(self._table), {"seqs": old}).rowcount)

    def _insert(self, new: dict[str, Any], now: float | None) -> str | None:
        """Insert the event, unless its id is there: then the digest of what has it."""
        absent = self._tx.capabilities.insert_absent
        parameters = {f"new_{name}": value for name, value in new.items()} | at(now)
        if absent is None:
            return self._insert_or_fail(new["id"], _insert(self._table, now is not None), parameters)
        inserting, known = _insert_absent(self._table, now is not None, absent), None
        while known is None:  # again if it was purged before we could look
            if self._tx.execute(inserting, parameters).all():
                return None
            known = self._digest(new["id"])
        return known

    def _insert_or_fail(self, id: str, inserting: Insert, parameters: Mapping[str, Any]) -> str | None:
        # A plain look first: the failed INSERT would lock what it met. A locking look for what is not
        # there would lock the gap, and the caller's REPEATABLE READ would deadlock every other writer.
        known = self._digest(id)
        if known is None:
            try:
                self._tx.execute(inserting, parameters, may_fail=True)
            except IntegrityError as error:
                if not dialects.is_duplicate(error):
                    raise
                known = self._digest(id, current=True)
        return known

    def _digest(self, id: str, *, current: bool = False) -> str | None:
        found: str | None = self._tx.execute(_digest(self._table, current), {"event_id": id}).scalar()
        return found


# --- statements -----------------------------------------------------------------------------------


def _values(table: Table, given: bool) -> dict[str, ColumnElement[Any]]:
    names = ("id", "lane", "topic", "payload", "headers", "digest")
    new: dict[str, ColumnElement[Any]] = {n: bindparam(f"new_{n}", type_=table.c[n].type) for n in names}
    return new | {"created_at": clock(NOW, given=given)}


@remembered
def _insert(table: Table, given: bool) -> Insert:
    return insert(table).values(_values(table, given))


@remembered
def _insert_absent(table: Table, given: bool, insert_absent: Any) -> Any:
    return insert_absent(table, table.c.id).values(_values(table, given)).returning(table.c.id)


@remembered
def _digest(table: Table, current: bool) -> Select[Any]:
    reading = select(table.c.digest).where(table.c.id == bindparam("event_id"))
    return reading.with_for_update(read=True) if current else reading


@remembered
def next_events(table: Table) -> Select[Any]:
    """The first pending events of a lane, for `event_of`."""
    c = table.c
    columns = (c.id, c.seq, c.topic, c.lane, c.payload, c.headers, c.created_at, c.attempts, c.digest)
    waits = and_(c.lane == bindparam("in_lane"), c.state == PENDING)
    return select(*columns).where(waits).order_by(c.seq).limit(bindparam("limit"))


@remembered
def _quarantine(table: Table) -> Update:
    c = table.c
    this = and_(c.id == bindparam("event_id"), c.state == PENDING)
    reason = bindparam("new_reason", type_=c.reason.type)
    return update(table).where(this).values(state=EventState.QUARANTINED.value, reason=reason)


@remembered
def _quarantined(table: Table, given: bool, row_locks: bool) -> Select[Any]:
    c = table.c
    this = and_(c.id == bindparam("event_id"), c.state == EventState.QUARANTINED.value)
    now = clock(NOW, given=given).label("read_at")
    reading = select(c.seq, c.lane, c.topic, c.payload, c.requeues, now).where(this)
    return reading.with_for_update() if row_locks else reading


@remembered
def _requeue(table: Table) -> Update:
    c = table.c
    this = and_(c.id == bindparam("event_id"), c.state == EventState.QUARANTINED.value)
    new = {n: bindparam(f"new_{n}", type_=c[n].type) for n in ("payload", "digest", "requeues")}
    fresh = {"state": EventState.PENDING.value, "attempts": 0, "reason": None, "last_error": None}
    return update(table).where(this).values(**new, **fresh)


@remembered
def _ahead(table: Table) -> Select[Any]:
    c = table.c
    ahead = and_(c.lane == bindparam("in_lane"), c.state == PENDING, c.seq < bindparam("of"))
    return select(func.count()).select_from(table).where(ahead)


@remembered
def _get(table: Table) -> Select[Any]:
    columns = [column for column in table.c if column.name != "digest"]
    return select(*columns).where(table.c.id == bindparam("event_id"))


@remembered
def _stats(table: Table, given: bool) -> Select[Any]:
    c = table.c
    pending = c.state == EventState.PENDING.value

    def number(state: EventState) -> ColumnElement[Any]:
        return func.count(case((c.state == state.value, 1)))

    oldest = clock(NOW, given=given) - func.min(case((pending, c.created_at)), type_=Double())
    most = func.coalesce(func.max(case((pending, c.attempts))), 0)
    columns = (
        number(EventState.PENDING),
        oldest,
        most,
        number(EventState.SENT),
        number(EventState.QUARANTINED),
    )
    return select(c.lane, *columns).group_by(c.lane).order_by(c.lane)


@remembered
def _sent_before(table: Table) -> Select[Any]:
    c = table.c
    old = and_(c.state == EventState.SENT.value, c.sent_at < bindparam("before", type_=c.sent_at.type))
    return select(c.seq).where(old).order_by(c.seq).limit(bindparam("limit"))


@remembered
def _delete_sent(table: Table) -> Delete:
    c = table.c
    return delete(table).where(c.seq.in_(bindparam("seqs", expanding=True)), c.state == EventState.SENT.value)


def event_of(row: Any, fence: int) -> tuple[str, int, int, str, str, Any, Mapping[str, str], float, int]:
    """What an `Event` is made of, as a relay that holds its lane with this fence sends it."""
    id, seq, topic, lane, text, headers, created, attempts = row[:8]
    return id, seq, fence, topic, lane, edge.decode(text), edge.decode(headers) or {}, created, attempts + 1


def _record(row: Any) -> EventRecord:
    held = dict(row._mapping)
    requeues = tuple(Requeue(**one) for one in edge.decode(held.pop("requeues")) or ())
    read = {"payload": edge.decode(held["payload"]), "headers": edge.decode(held["headers"]) or {}}
    return EventRecord(**held | read | {"state": EventState(held["state"])}, requeues=requeues)
