"""New jobs: checked at the edge, inserted where their id is not there, revived where it was purged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Double,
    Insert,
    Select,
    Table,
    bindparam,
    case,
    insert,
    select,
    true,
)
from sqlalchemy.exc import IntegrityError

from fencedjobs import dialects
from fencedjobs import payload as edge
from fencedjobs.dialects import Notify, clock
from fencedjobs.errors import InvalidValue
from fencedjobs.job_sql import FENCED, revive, wake
from fencedjobs.leases import NOW, TEXT, Leased, at, make, remembered
from fencedjobs.rows import ManyRows, alike
from fencedjobs.transaction import Transaction
from fencedjobs.values import JobState

MAX_ATTEMPTS: Final = 20
BULK: Final = 1000  # rows in one statement
_MAX_COUNT: Final = 2**63 - 1
_READY: Final = JobState.READY.value
_SCHEDULED: Final = JobState.SCHEDULED.value


def new_id() -> str:
    """A UUIDv7 (RFC 9562): milliseconds first, so that new ids are neighbours in the index."""
    millis, chance = f"{time.time_ns() // 1_000_000:012x}", os.urandom(10)
    digits, variant = chance.hex(), "89ab"[chance[9] & 3]
    return f"{millis[:8]}-{millis[8:]}-7{digits[:3]}-{variant}{digits[3:6]}-{digits[6:18]}"


ARGUMENTS: Final[dict[str, Any]] = {
    "id": None,
    "payload": None,
    "kind": "",
    "queue": "default",
    "key": None,
    "priority": 0,
    "run_at": None,
    "delay": None,
    "deadline": None,
    "max_attempts": MAX_ATTEMPTS,
}


def new_job(given: Mapping[str, Any]) -> dict[str, Any]:
    """The checked parameters of a new row."""
    id, key, run_at, delay = given["id"], given["key"], given["run_at"], given["delay"]
    if run_at is not None and delay is not None:
        raise InvalidValue("delay", "goes without run_at: each says when the job may start")
    run_at = None if run_at is None else edge.instant("run_at", run_at)
    delay = 0.0 if delay is None else edge.duration("delay", delay)
    deadline = given["deadline"]
    waits = run_at is not None or delay > 0
    return {
        "new_id": new_id() if id is None else edge.key("id", id),
        "new_named": int(id is not None),
        "new_queue": edge.key("queue", given["queue"]),
        "new_kind": edge.label("kind", given["kind"]),
        "new_key": None if key is None else edge.key("key", key),
        "new_priority": edge.whole("priority", given["priority"], least=-(2**31)),
        "new_state": _SCHEDULED if waits else _READY,
        "new_fence": 0,
        "new_max_attempts": edge.whole("max_attempts", given["max_attempts"], least=1, most=_MAX_COUNT),
        "new_deadline": None if deadline is None else edge.instant("deadline", deadline),
        "new_payload": edge.encode("payload", given["payload"]),
        "new_until": run_at or 0.0,
        "new_delay": delay,
    }


def new_item(number: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """`new_job` of one of many, who may leave out arguments; an error says which it was."""
    if not isinstance(item, Mapping):
        raise InvalidValue(f"items[{number}]", f"must be a mapping, got {type(item).__name__}")
    given = {**ARGUMENTS, **item}
    try:
        if len(given) > len(ARGUMENTS):
            unknown = next(name for name in given if name not in ARGUMENTS)
            raise InvalidValue(str(unknown), "is not an argument of enqueue")
        return new_job(given)
    except InvalidValue as error:
        raise InvalidValue(f"items[{number}].{error.field}", error.problem) from error.__cause__


def portions(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """As many as one statement takes: a packet of MariaDB has 16 MiB, an array of PostgreSQL 1 GiB."""
    portion, room = list[dict[str, Any]](), TEXT
    for row in rows:
        length = len(row["new_payload"])
        if portion and (len(portion) == BULK or length > room):
            yield portion
            portion, room = [], TEXT
        portion.append(row)
        room -= length
    if portion:
        yield portion


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
    due = case(
        (delay > 0, now + delay),
        (source["state"] == JobState.SCHEDULED.value, source["until"]),
        else_=now,
    )
    return {**plain, "until": until, "due_at": due, "created_at": now}


def _new_parameters(jobs: Leased) -> dict[str, ColumnElement[Any]]:
    types = {name: jobs.table.c[name].type for name in _NEW if name != "delay"} | {"delay": Double()}
    return {name: bindparam(f"new_{name}", type_=type_) for name, type_ in types.items()}


@remembered
def _insert(jobs: Leased, given: bool, notify: Notify | None = None) -> Insert:
    inserting = insert(jobs.table).values(_inserted(_new_parameters(jobs), clock(NOW, given=given)))
    return inserting if notify is None else inserting.returning(*wake(jobs, notify))


@remembered
def _insert_absent(jobs: Leased, given: bool, insert_absent: Any, notify: Notify | None) -> Any:
    values = _inserted(_new_parameters(jobs), clock(NOW, given=given))
    return insert_absent(jobs.table, jobs.key).values(values).returning(jobs.key, *wake(jobs, notify))


@remembered
def _insert_given(
    jobs: Leased,
    given: bool,
    many: ManyRows,
    insert_absent: Any,
    notify: Notify | None,
    differing: frozenset[str],
    number: Callable[[Table], ColumnElement[Any]] | None,
) -> Any:
    """Many rows, which bring along what is not the same in all of them.

    With ``number`` they get their numbers in the order in which they are given, but go in by their ids: each
    waits for those that others insert at the moment, and would wait in a circle if every one had an order of
    its own.
    """
    c = jobs.table.c
    columns: dict[str, Column[Any]] = {
        name: c.until if name == "delay" else c[name] for name in _NEW if name in differing
    }
    rows = many.table(columns)
    order, numbers = rows.c.place, dict[str, ColumnElement[Any]]()
    if number is not None:
        numbered = select(number(jobs.table).label("seq"), *(rows.c[name] for name in columns))
        rows = numbered.order_by(order).subquery("numbered")
        order, numbers = rows.c.id, {"seq": rows.c.seq}
    source = _new_parameters(jobs) | {name: rows.c[name] for name in columns}
    values = numbers | _inserted(source, clock(NOW, given=given))
    # SQLite needs a WHERE to tell ON CONFLICT from the ON of a join.
    picked = select(*values.values()).where(true()).order_by(order)
    if insert_absent is None:
        return insert(jobs.table).from_select(list(values), picked)
    inserting = insert_absent(jobs.table, jobs.key).from_select(list(values), picked)
    return inserting.returning(jobs.key, *wake(jobs, notify))


@remembered
def _states(jobs: Leased) -> Select[Any]:
    return select(jobs.key, jobs.table.c.state).where(jobs.key.in_(bindparam("ids", expanding=True)))


class Enqueue:
    """Puts checked rows into the table of jobs, in the transaction it is given."""

    def __init__(self, tx: Transaction, jobs: Leased, now: float | None) -> None:
        self._tx = tx
        self._jobs = jobs
        self._given = now is not None
        self._at = at(now)
        self._absent = tx.capabilities.insert_absent
        self._many = tx.capabilities.rows

    def one(self, new: dict[str, Any]) -> str | None:
        """Insert one row; its id, or ``None`` if the id is there and not purged."""
        id: str = new["new_id"]
        if self._absent is None:
            # Read first where there is no ON CONFLICT DO NOTHING: a failed INSERT would lock the row
            # of a running job for as long as the caller's transaction goes on.
            there = self._there([new]).get(id)
            if there not in (None, JobState.PURGED):
                return None
            created = there is None and self._inserted_alone(new)
        else:
            inserting = _insert_absent(self._jobs, self._given, self._absent, self._tx.notify)
            created = bool(self._tx.execute(inserting, new | self._at).all())
        return id if created else self._revived(new)

    def _revived(self, new: dict[str, Any]) -> str | None:
        self._tx.require_several()
        id: str = new["new_id"]
        tombstones = make(self._tx, revive(self._jobs), {"job_id": id})
        if not tombstones:
            return None
        inserting = _insert(self._jobs, self._given, self._tx.notify)
        self._tx.execute(inserting, new | self._at | {"new_fence": tombstones[0].fence}).close()
        self._tx.expire(self._jobs.model, id, FENCED)
        return id

    def many(self, rows: list[dict[str, Any]]) -> set[str]:
        """Insert rows of different ids; the ids of those that were not there."""
        if self._absent is None:
            there = self._there(rows)
            created = self._insert_absent([row for row in rows if row["new_id"] not in there])
        else:
            created = self._insert(rows)
            there = self._there([row for row in rows if row["new_id"] not in created])
        purged = [row for row in rows if there.get(row["new_id"]) == JobState.PURGED]
        return created | self._each(purged)

    def _each(self, rows: list[dict[str, Any]]) -> set[str]:
        return {id for row in rows if (id := self.one(row)) is not None}

    def _inserted_alone(self, new: dict[str, Any]) -> bool:
        try:
            self._tx.execute(_insert(self._jobs, self._given), new | self._at, may_fail=True)
        except IntegrityError as error:
            if not dialects.is_duplicate(error):
                raise
            return False
        return True

    def _there(self, rows: list[dict[str, Any]]) -> dict[str, str]:
        """The states of those that are there already, which no id can be that was made just now."""
        ids = [row["new_id"] for row in rows if row["new_named"]]
        if not ids:
            return {}
        return {row[0]: row[1] for row in self._tx.execute(_states(self._jobs), {"ids": ids})}

    def _insert_absent(self, rows: list[dict[str, Any]]) -> set[str]:
        """Insert rows that were not there a moment ago, where there is no ON CONFLICT DO NOTHING."""
        if not rows:
            return set()
        try:
            self._insert(rows, may_fail=True)  # one statement, which is undone as one
        except IntegrityError as error:
            if not dialects.is_duplicate(error):
                raise
            # Somebody has added one of them since we looked: one by one, each by its own answer.
            return self._each(rows)
        return {row["new_id"] for row in rows}

    def _insert(self, rows: list[dict[str, Any]], *, may_fail: bool = False) -> set[str]:
        """In one statement; the ids that it created, where it tells."""
        given = {name: [*map(itemgetter(f"new_{name}"), rows)] for name in _NEW if name != "created_at"}
        same = alike(given) - {"id"}
        differing = {name: values for name, values in given.items() if name not in same}
        number = self._tx.capabilities.next_number if any(given["named"]) else None
        inserting = _insert_given(
            self._jobs, self._given, self._many, self._absent, self._tx.notify, frozenset(differing), number
        )
        parameters = rows[0] | self._many.parameters(differing) | self._at
        answer = self._tx.execute(inserting, parameters, may_fail=may_fail)
        return {row[0] for row in answer} if answer.returns_rows else set()
