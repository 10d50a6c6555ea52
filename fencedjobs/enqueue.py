"""New jobs: checked at the edge, inserted where their id is not there, revived where it was purged."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Final

from sqlalchemy import ColumnElement, Double, Insert, Select, bindparam, case, insert, select
from sqlalchemy.exc import IntegrityError

from fencedjobs import dialects
from fencedjobs import payload as edge
from fencedjobs.dialects import Notify, clock
from fencedjobs.errors import InvalidValue
from fencedjobs.job_sql import FENCED, revive, wake
from fencedjobs.leases import NOW, Leased, at, from_arrays, make, remembered
from fencedjobs.transaction import Transaction
from fencedjobs.values import JobState

MAX_ATTEMPTS: Final = 20
BULK: Final = 1000  # rows in one statement
_MAX_COUNT: Final = 2**63 - 1


def new_id() -> str:
    """A UUIDv7 (RFC 9562): milliseconds first, so that new ids are neighbours in the index."""
    head = (time.time_ns() // 1_000_000) << 80 | 0x7 << 76
    chance = int.from_bytes(os.urandom(10), "big")
    tail = (chance >> 62 & 0xFFF) << 64 | 0b10 << 62 | chance & (1 << 62) - 1
    return str(uuid.UUID(int=head & (1 << 128) - 1 | tail))


def known(item: Mapping[str, Any], number: int) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise InvalidValue(f"items[{number}]", f"must be a mapping, got {type(item).__name__}")
    for name in item:
        if name not in _ARGUMENTS:
            raise InvalidValue(f"items[{number}].{name}", "is not an argument of enqueue")
    return _ARGUMENTS | dict(item)


_ARGUMENTS: Final[dict[str, Any]] = {
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


def new_job(given: Mapping[str, Any], at: str = "") -> dict[str, Any]:
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
def _insert_arrays(
    jobs: Leased, given: bool, insert_absent: Any, notify: Notify | None, differing: frozenset[str]
) -> Any:
    """Many rows, with arrays of what is not the same in all of them."""
    c = jobs.table.c
    columns = {name: c.until if name == "delay" else c[name] for name in _NEW if name in differing}
    rows = from_arrays(place="place", **columns)
    source = _new_parameters(jobs) | {name: rows.c[name] for name in columns}
    values = _inserted(source, clock(NOW, given=given))
    picked = select(*values.values()).order_by(rows.c.place)
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
        if self._tx.capabilities.arrays:
            created = self._insert_arrays(rows)
            there = self._there([row for row in rows if row["new_id"] not in created])
        else:
            there = self._there(rows)
            created = self._insert_rows([row for row in rows if row["new_id"] not in there])
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

    def _insert_arrays(self, rows: list[dict[str, Any]]) -> set[str]:
        given = {name: [row[f"new_{name}"] for row in rows] for name in _NEW if name != "created_at"}
        arrays = {name: values for name, values in given.items() if values.count(values[0]) < len(rows)}
        arrays["id"] = given["id"]
        inserting = _insert_arrays(self._jobs, self._given, self._absent, self._tx.notify, frozenset(arrays))
        answer = self._tx.execute(inserting, rows[0] | arrays | self._at)
        return {row[0] for row in answer}

    def _insert_rows(self, rows: list[dict[str, Any]]) -> set[str]:
        if not rows:
            return set()
        inserting = _insert(self._jobs, self._given)
        # With RETURNING SQLAlchemy puts all rows in one statement, which is undone as one if it fails;
        # without, this driver sends each, and those before the one that fails stay.
        in_one = self._absent is None and self._tx.connection.dialect.insert_executemany_returning
        if in_one:
            inserting = inserting.returning(self._jobs.key)
        try:
            with nullcontext() if in_one else self._tx.connection.begin_nested():
                self._tx.execute(inserting, [row | self._at for row in rows], may_fail=in_one).close()
        except IntegrityError as error:
            if not dialects.is_duplicate(error):
                raise
            # Somebody has added one of them since we looked: one by one, each by its own answer.
            return self._each(rows)
        return {row["new_id"] for row in rows}
