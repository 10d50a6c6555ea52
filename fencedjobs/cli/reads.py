"""What an operator looks at and no verb gives: plain reads, no locks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, Table, and_, case, func, or_, select

from fencedjobs import payload
from fencedjobs.values import EventState, JobState

_LISTED = "id queue kind state priority attempts max_attempts fence owner until created_at".split()
_SET_ASIDE = "id queue kind state attempts fence reason errors".split()
_BATCH: Final = 100
_EVENT = "id seq lane topic state attempts created_at sent_at last_error reason".split()


@dataclass(frozen=True)
class SetAside:
    """Which jobs that were set aside are meant."""

    state: JobState = JobState.QUARANTINED
    queue: str | None = None
    text: str | None = None

    def matches(self, row: Row[Any]) -> bool:
        """Whether the reason or the last error has the text. Not asked in SQL: each LIKE is another."""
        told = (row.reason, last_error(row.errors))
        return self.text is None or any(self.text in one for one in told if one)


def latest(
    connection: Connection, jobs: Table, *, queue: str | None, state: str | None, limit: int
) -> Sequence[Any]:
    """Jobs, the newest first."""
    c = jobs.c
    query = select(*(c[name] for name in _LISTED)).order_by(c.seq.desc()).limit(limit)
    query = query.where(c.state == state if state else c.state != JobState.PURGED)
    return connection.execute(query.where(c.queue == queue) if queue else query).all()


def set_aside(connection: Connection, jobs: Table, wanted: SetAside) -> Iterator[list[Row[Any]]]:
    """Jobs that were set aside, in batches, each in the order of insertion."""
    c = jobs.c
    query = select(c.seq, *(c[name] for name in _SET_ASIDE)).where(c.state == wanted.state)
    query = query.where(c.queue == wanted.queue) if wanted.queue else query
    after = 0
    while rows := connection.execute(query.where(c.seq > after).order_by(c.seq).limit(_BATCH)).all():
        connection.rollback()  # nothing is held while the batch is worked on
        yield [row for row in rows if wanted.matches(row)]
        after = rows[-1].seq


def last_error(errors: str | None) -> str | None:
    """The last of the errors that are kept with a job, as one text."""
    kept = payload.decode(errors)
    return ": ".join(filter(None, (kept[-1]["kind"], kept[-1]["text"]))) if kept else None


def events(
    connection: Connection, outbox: Table, *, lane: str | None, state: str | None, limit: int
) -> Sequence[Any]:
    """Events, the newest first; pending ones alone in the order in which they are sent."""
    c = outbox.c
    order = c.seq if state == EventState.PENDING else c.seq.desc()
    query = select(*(c[name] for name in _EVENT)).order_by(order).limit(limit)
    query = query.where(c.state == state) if state else query
    return connection.execute(query.where(c.lane == lane) if lane else query).all()


def oldest_waiting(connection: Connection, jobs: Table, instant: float) -> dict[str, Any]:
    """For each queue the job that has waited longest of those that could be claimed at ``instant``.

    A job waits since it could be claimed: one that is leased since its lease ran out.
    """
    c = jobs.c
    since = case((c.state == JobState.LEASED, c.until), else_=c.due_at).label("since")
    due = and_(c.state.in_([JobState.SCHEDULED, JobState.LEASED]), c.until <= instant)
    place = func.row_number().over(partition_by=c.queue, order_by=(since, c.seq)).label("place")
    waiting = (
        select(c.queue, c.id, c.state, since, place).where(or_(c.state == JobState.READY, due)).subquery()
    )
    return {row.queue: row for row in connection.execute(select(waiting).where(waiting.c.place == 1))}


def ending_leases(connection: Connection, jobs: Table, limit: int) -> Sequence[Any]:
    """The leases that run out soonest, those that already have first."""
    c = jobs.c
    query = select(c.id, c.queue, c.owner, c.fence, c.attempts, c.until)
    return connection.execute(
        query.where(c.state == JobState.LEASED).order_by(c.until, c.seq).limit(limit)
    ).all()
