"""The lease core: one guard, and the conditional UPDATEs that carry it.

It knows a table only as a key and the columns owner, until and fence. Jobs, locks, the lab service
and the host's own tables are four uses of it.

How a statement gets its rows: a *named* lease is written by its guard. Rows that are *picked* (the
next ready ones, the expired ones) are locked, changed under the lock and returned: in one statement
where the database has UPDATE … RETURNING, else by SELECT … FOR UPDATE, an UPDATE on what was read,
and a locking read. Verbs do not see the difference. (What is picked by a caller's own condition, in the
caller's own order, goes the second way everywhere.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, Final, ParamSpec, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Delete,
    Select,
    Table,
    Update,
    and_,
    any_,
    bindparam,
    case,
    delete,
    func,
    literal,
    select,
    true,
    tuple_,
    type_coerce,
    update,
)
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.visitors import iterate, replacement_traverse

from fencedjobs.dialects import clock, statement_now
from fencedjobs.errors import TransactionLost
from fencedjobs.rows import ManyRows, alike
from fencedjobs.transaction import SeveralStatements, Transaction
from fencedjobs.types import Counter, Instant, Key
from fencedjobs.values import Lease

L = TypeVar("L", bound=Lease)
P = ParamSpec("P")
T = TypeVar("T")

NOW: Final[BindParameter[float]] = bindparam("now", type_=Instant())
TTL: Final[BindParameter[float]] = bindparam("ttl", type_=Instant())
CHUNK: Final = 200  # leases in one statement where they are listed in it
TEXT: Final = 1 << 20  # characters that they bring along; a packet of MariaDB has 16 MiB

KEY: Final[BindParameter[Any]] = bindparam("held_id")
_OWNER: Final = bindparam("held_owner", type_=Key())
_FENCE: Final = bindparam("held_fence", type_=Counter)


def remembered(build: Callable[P, T]) -> Callable[P, T]:
    """Build each statement once; the bound keeps odd uses from piling up."""
    return lru_cache(maxsize=1024)(build)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Leased:
    """A table as the lease core sees it.

    ``key`` names a row; ``open`` is the table's own condition under which a row can still be worked
    on (none where every way out of a lease clears the owner); ``ends`` is a column that no lease may
    outlive; ``state`` one that changes with every transition, beside the fence.
    """

    table: Table
    key: Column[Any]
    open: ColumnElement[bool] | None = None
    ends: Column[Any] | None = None
    state: Column[Any] | None = None
    model: type[Any] | None = None

    @property
    def owner(self) -> Column[Any]:
        return self.table.c.owner

    @property
    def until(self) -> Column[Any]:
        return self.table.c.until

    @property
    def fence(self) -> Column[Any]:
        return self.table.c.fence

    @property
    def row(self) -> Column[Any]:
        """The primary key, by which rows that were read are named again."""
        return next(iter(self.table.primary_key.columns))

    def end(self, now: ColumnElement[float]) -> ColumnElement[float]:
        """The end of a lease given now: after ``ttl``, but never later than ``ends``."""
        after = now + TTL
        return after if self.ends is None else case((self.ends < after, self.ends), else_=after)


# --- the guard ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Held:
    """Which leases a statement names: one by parameters, many as rows of arrays, or many listed."""

    id: ColumnElement[Any]
    owner: ColumnElement[Any]
    fence: ColumnElement[Any]
    listed: bool = False


ONE: Final = Held(KEY, _OWNER, _FENCE)
LISTED: Final = Held(
    bindparam("held_ids", expanding=True), _OWNER, bindparam("held", expanding=True), listed=True
)


def guard(leased: Leased, held: Held, now: ColumnElement[float] | None = None) -> ColumnElement[bool]:
    """The condition under which a lease may still be written: owner, fence, open, and ``until > now``.

    Every write that ends or extends an attempt carries it, and nothing else spells it. Without
    ``now`` the end of the lease is not compared, which is for release alone.
    """
    if held.listed:  # the tuples alone would not use the key on MariaDB
        same = and_(leased.key.in_(held.id), tuple_(leased.key, leased.owner, leased.fence).in_(held.fence))
    else:
        same = and_(leased.key == held.id, leased.owner == held.owner, leased.fence == held.fence)
    conditions = [same]
    if leased.open is not None:
        conditions.append(leased.open)
    if now is not None:
        conditions.append(leased.until > now)
    return and_(*conditions)


def named(lease: Lease) -> dict[str, Any]:
    """The parameters of a guard over `ONE` lease."""
    return {"held_id": lease.id, "held_owner": lease.owner, "held_fence": lease.fence}


def listed(leases: Sequence[Lease]) -> dict[str, Any]:
    """The parameters of a guard over `LISTED` leases."""
    return {
        "held_ids": [lease.id for lease in leases],
        "held": [identity(lease) for lease in leases],
    }


def identity(lease: Lease) -> tuple[Any, str, int]:
    """Which attempt this is, renewed or not."""
    return lease.id, lease.owner, lease.fence


def at(now: float | None) -> dict[str, float]:
    """The parameter of ``now``, where the caller gives it."""
    return {} if now is None else {"now": now}


# --- named leases ---------------------------------------------------------------------------------


def renew(tx: Transaction, leased: Leased, lease: L, ttl: float, now: float | None) -> float | None:
    """Extend a lease; its new end, or ``None`` if it is lost."""
    parameters = named(lease) | at(now) | {"ttl": ttl}
    returning = tx.capabilities.update_returning
    statement = _renew(leased, now is not None, returning)
    answer = tx.execute(statement, parameters)
    if not returning:  # not its rowcount: without FOUND_ROWS an UPDATE to the same end counts as none
        answer = tx.execute(_until(leased, now is not None), parameters)
    end: float | None = answer.scalar()
    return end


@remembered
def _renew(leased: Leased, given: bool, returning: bool) -> Update:
    now = clock(NOW, given=given)
    renewing = update(leased.table).where(guard(leased, ONE, now)).values(until=leased.end(now))
    return renewing.returning(leased.until) if returning else renewing


def still_held(tx: Transaction, leased: Leased, lease: Lease, now: float | None) -> bool:
    """After an UPDATE under the guard that counted no row: whether it only changed nothing.

    Without FOUND_ROWS an UPDATE to the same values counts as none.
    """
    if tx.capabilities.update_returning:
        return False
    return tx.execute(_until(leased, now is not None), named(lease) | at(now)).scalar() is not None


@remembered
def _until(leased: Leased, given: bool) -> Select[Any]:
    return select(leased.until).where(guard(leased, ONE, clock(NOW, given=given))).with_for_update()


def holds(tx: Transaction, leased: Leased, lease: Lease, now: float | None) -> bool:
    """Whether the lease is held and still runs."""
    return tx.execute(_holds(leased, now is not None), named(lease) | at(now)).scalar() is not None


@remembered
def _holds(leased: Leased, given: bool) -> Select[Any]:
    return select(leased.fence).where(guard(leased, ONE, clock(NOW, given=given)))


# --- rows that are picked -------------------------------------------------------------------------


class Again(Enum):
    """Why a claim that got nothing is to be repeated."""

    AT_ONCE = "so many rows were found dead or unwanted that it was time to commit"
    SOON = "others hold the rows at this moment"


@dataclass(frozen=True, slots=True)
class Part:
    """What a claim has got so far; the rest is to be claimed by a transaction of several statements."""

    leases: Sequence[Any]


@dataclass(frozen=True, eq=False)
class Transition:
    """Rows to pick, and what becomes of them; without ``values`` they are deleted.

    ``values`` are written in their order: MariaDB evaluates each with those before it already
    changed. ``order`` and LIMIT (the parameter ``limit``) go with picking several; rows that
    somebody else has locked are skipped then, while a single named row is waited for.

    ``once``: it is made for one call, from a condition of the caller's. Its statements are not
    remembered, and its rows come back in the order in which they were picked.
    """

    leased: Leased
    where: ColumnElement[bool]
    values: Sequence[tuple[Column[Any], Any]] | None
    returning: Sequence[ColumnElement[Any]]
    order: Sequence[ColumnElement[Any]] = ()
    once: bool = False

    @property
    def several(self) -> bool:
        return bool(self.order)


def make(tx: Transaction, transition: Transition, parameters: Mapping[str, Any]) -> Sequence[Any]:
    """Carry out a transition; the rows as they are afterwards (as they were, if deleted).

    Each begins with what is returned. They come in no order, if the transition is not for `once`.
    """
    rows = _made(tx, transition, parameters)
    if transition.several and len(rows) > parameters["limit"]:
        raise TransactionLost(f"{len(rows)} rows changed for a limit of {parameters['limit']}: a bad plan")
    return rows


def _made(tx: Transaction, transition: Transition, parameters: Mapping[str, Any]) -> Sequence[Any]:
    capabilities = tx.capabilities
    if capabilities.update_returning and not transition.once:
        statement = _at_once(transition, capabilities.row_locks, capabilities.arrays)
        return tx.execute(statement, parameters).all()
    return _in_steps(tx, transition, parameters)


@remembered
def _at_once(transition: Transition, row_locks: bool, arrays: bool) -> Any:
    leased, where = transition.leased, transition.where
    if transition.several:
        picked = _picked([leased.row], transition, row_locks).scalar_subquery()
        # IN (SELECT … LIMIT … FOR UPDATE) can be run again per row by PostgreSQL's planner, and then
        # takes more rows than the limit; an array is computed once.
        where = leased.row == any_(func.array(picked)) if arrays else leased.row.in_(picked)
    return _write(transition, where).returning(*transition.returning)


def _in_steps(tx: Transaction, transition: Transition, parameters: Mapping[str, Any]) -> Sequence[Any]:
    """Lock and read, then write: with the clock of the read, so that it says how the rows are afterwards."""
    lock, write = _new_steps(transition) if transition.once else _steps(transition)
    rows = tx.execute(lock, parameters).all()
    if not rows:
        return []
    these: dict[str, Any] = {
        "now": getattr(rows[0], "read_at", None),
        "rows": [row.read_row for row in rows],
        "versions": [(row.read_row, row.read_fence) for row in rows],
    }
    if transition.leased.state is not None:
        these["states"] = sorted({row.read_state for row in rows})
    changed = tx.execute(write, these | dict(parameters)).rowcount
    if changed != len(rows):
        raise TransactionLost(f"{len(rows)} rows were locked, but {changed} changed: is this a transaction?")
    return rows


def _new_steps(transition: Transition) -> tuple[Select[Any], Update | Delete]:
    leased = transition.leased
    version = [column.label(f"read_{name}") for name, column in _version(leased).items()]
    # The state is compared by itself: with a text in the tuples MariaDB compares each row with each tuple.
    unchanged = and_(
        leased.row.in_(bindparam("rows", expanding=True)),
        tuple_(leased.row, leased.fence).in_(bindparam("versions", expanding=True)),
        *(() if leased.state is None else (leased.state.in_(bindparam("states", expanding=True)),)),
    )
    values = {column: _element(column, value) for column, value in transition.values or ()}
    asks = any(isinstance(part, statement_now) for value in values.values() for part in iterate(value))
    read_at = [statement_now().label("read_at")] if asks else []
    lock = _picked([*_afterwards(transition, values), *version, *read_at], transition, row_locks=True)
    if transition.values is not None:
        by_then = [(column, _with_clock(value)) for column, value in values.items()]
        transition = replace(transition, values=by_then)
    return lock, _write(transition, unchanged)


_steps = remembered(_new_steps)


def _element(column: Column[Any], value: Any) -> ColumnElement[Any]:
    return value if isinstance(value, ColumnElement) else literal(value, column.type)


def _with_clock(value: ColumnElement[Any]) -> ColumnElement[Any]:
    """The value by the clock that was read before."""

    def read(element: Any, **_: Any) -> Any:
        return NOW if isinstance(element, statement_now) else None

    by_then: ColumnElement[Any] = replacement_traverse(value, {}, read)
    return by_then


def _afterwards(
    transition: Transition, values: Mapping[Column[Any], ColumnElement[Any]]
) -> list[ColumnElement[Any]]:
    """What is returned, as it will be when the values are written."""
    table, new = transition.leased.table, {column.key: value for column, value in values.items()}

    def written(element: Any, **_: Any) -> Any:
        return new.get(element.key) if isinstance(element, Column) and element.table is table else None

    return [
        type_coerce(replacement_traverse(one, {}, written), one.type).label(one.key)
        for one in transition.returning
    ]


def _version(leased: Leased) -> dict[str, Column[Any]]:
    """What a later write must find unchanged: the state and the fence that were read."""
    version = {"row": leased.row, "fence": leased.fence}
    return version if leased.state is None else {**version, "state": leased.state}


def _picked(columns: Sequence[ColumnElement[Any]], transition: Transition, row_locks: bool) -> Select[Any]:
    picked = select(*columns).where(transition.where)
    if transition.several:
        picked = picked.order_by(*transition.order).limit(bindparam("limit"))
    if not row_locks:
        return picked
    # Rows that stay keep their key: who holds a foreign key to one must not make it be skipped.
    return picked.with_for_update(skip_locked=transition.several, key_share=transition.values is not None)


def _write(transition: Transition, where: ColumnElement[bool]) -> Any:
    table = transition.leased.table
    if transition.values is None:
        return delete(table).where(where)
    return update(table).where(where).ordered_values(*transition.values)


# --- many named leases ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Change:
    """What is written to leases that are held; ``now`` is the clock of the guard.

    ``own`` is a column to which each lease brings a text of its own, or none.
    """

    values: Mapping[str, Any]
    returning: Sequence[Column[Any]]
    now: ColumnElement[float]
    own: Column[Any] | None = None

    @property
    def ends(self) -> bool:
        """Whether it ends the leases, so that they cannot be asked for afterwards."""
        return "owner" in self.values


def make_many(
    tx: Transaction,
    leased: Leased,
    leases: Sequence[Lease],
    change: Change,
    parameters: Mapping[str, Any],
    texts: Sequence[str | None] = (),
) -> Sequence[Any]:
    """One change to many leases, each under its own guard; the rows that were held.

    ``texts`` goes with ``leases``, one each, where the change has a column of their own.
    """
    if not leases:
        return []
    if tx.capabilities.update_returning:
        many, given = tx.capabilities.rows, _given(leases, texts)
        same = {name: given[name][0] for name in alike(given) & {"owners", "fences"}}
        statement = _many_given(leased, change, many, tx.waits, frozenset(same))
        differing = {name: values for name, values in given.items() if name not in same}
        return tx.execute(statement, {**parameters, **many.parameters(differing), **same}).all()
    rows: list[Any] = []
    for some, theirs in _chunks(leases, texts):
        size, own = _own(some, theirs)
        chunk = {**parameters, **listed(some), **own}
        writing = _many_listed(leased, change, size)
        if not change.ends:
            tx.execute(writing, chunk)
            rows += tx.execute(_read_listed(leased, change), chunk).all()
        elif tx.may_start_over and tx.waits:
            rows += _all_or_over(tx, writing, some, chunk)
        else:
            rows += _locked_first(tx, _locked_listed(leased, change, tx.waits), writing, chunk)
    return rows


def _given(leases: Sequence[Lease], texts: Sequence[str | None]) -> dict[str, Any]:
    owns = {"owns": list(texts)} if texts else {}
    return {
        "ids": [lease.id for lease in leases],
        "owners": [lease.owner for lease in leases],
        "fences": [lease.fence for lease in leases],
        **owns,
    }


@remembered
def _many_given(leased: Leased, change: Change, many: ManyRows, waits: bool, same: frozenset[str]) -> Update:
    """``waits``: for rows that somebody else has locked, which are left alone else.

    ``same``: owners, fences, or both, which all the leases share, and which come once.
    """
    own: dict[str, Any] = {} if change.own is None else {"owns": change.own}
    columns = {"ids": leased.key, "owners": leased.owner, "fences": leased.fence, **own}
    shared = {name: bindparam(name, type_=columns.pop(name).type) for name in same}

    def held(rows: Any) -> ColumnElement[bool]:
        those = {name: shared.get(name, rows.c.get(name)) for name in ("ids", "owners", "fences")}
        return guard(leased, Held(*those.values()), change.now)

    given: Any = many.table(columns)
    if not waits:
        free = select(*given.c).select_from(leased.table).join(given, true()).where(held(given))
        given = free.with_for_update(of=leased.table, skip_locked=True, key_share=True).cte("free")
    values = {**change.values, **({} if change.own is None else {change.own.name: given.c.owns})}
    return update(leased.table).where(held(given)).values(values).returning(*change.returning)


def _chunks(
    leases: Sequence[Lease], texts: Sequence[str | None]
) -> Iterator[tuple[Sequence[Lease], Sequence[str | None]]]:
    """As many as one statement may list, with their texts, which may be long: a packet has a limit.

    Two leases of one row never go together: in a statement a text is found by its row alone.
    """
    start, room, ids = 0, TEXT, set[Any]()
    for place, lease in enumerate(leases):
        length = len((texts[place] if texts else None) or "")
        if place > start and (place - start == CHUNK or length > room or lease.id in ids):
            yield leases[start:place], texts[start:place]
            start, room, ids = place, TEXT, set()
        room -= length
        ids.add(lease.id)
    yield leases[start:], texts[start:]


def _own(leases: Sequence[Lease], texts: Sequence[str | None]) -> tuple[int, dict[str, Any]]:
    """The parameters of the leases that bring a text, and for how many the statement is made.

    There are a few sizes only, so that statements are remembered; what is over matches no key.
    """
    those = [(lease.id, text) for lease, text in zip(leases, texts, strict=False) if text is not None]
    size = 1 << (len(those) - 1).bit_length() if those else 0
    pairs = those + [(None, None)] * (size - len(those))
    keys = {f"own_key_{n}": key for n, (key, _) in enumerate(pairs)}
    return size, keys | {f"own_text_{n}": text for n, (_, text) in enumerate(pairs)}


@remembered
def _many_listed(leased: Leased, change: Change, size: int) -> Update:
    values = dict(change.values)
    if change.own is not None and size:
        keys = (bindparam(f"own_key_{n}", type_=leased.key.type) for n in range(size))
        texts = (bindparam(f"own_text_{n}", type_=change.own.type) for n in range(size))
        values[change.own.name] = case(
            *((leased.key == key, text) for key, text in zip(keys, texts, strict=True))
        )
    return update(leased.table).where(guard(leased, LISTED, change.now)).values(values)


@remembered
def _locked_listed(leased: Leased, change: Change, waits: bool) -> Select[Any]:
    held = select(leased.key, leased.owner, leased.fence)
    return held.where(guard(leased, LISTED, change.now)).with_for_update(skip_locked=not waits)


@remembered
def _read_listed(leased: Leased, change: Change) -> Select[Any]:
    # What was written is locked by this transaction; in a small table, which is scanned, the rest is not.
    read = select(*change.returning).where(guard(leased, LISTED, change.now))
    return read.with_for_update(skip_locked=True)


def _all_or_over(
    tx: Transaction, writing: Update, leases: Sequence[Lease], parameters: Mapping[str, Any]
) -> Sequence[Any]:
    """Without RETURNING: write, and if they were not all held, undo it and have those locked first."""
    if tx.execute(writing, parameters).rowcount != len(leases):
        raise SeveralStatements
    return [identity(lease) for lease in leases]


def _locked_first(
    tx: Transaction, locking: Select[Any], writing: Update, parameters: Mapping[str, Any]
) -> Sequence[Any]:
    """Without RETURNING: lock the leases that are held, and write those; what was locked."""
    held = tx.execute(locking, parameters).all()
    if held:
        these = {"held_ids": [row[0] for row in held], "held": [tuple(row) for row in held]}
        changed = tx.execute(writing, {**parameters, **these}).rowcount
        if changed != len(held):
            raise TransactionLost(
                f"{len(held)} leases were locked, but {changed} ended: is this a transaction?"
            )
    return held


def locked_among(tx: Transaction, leased: Leased, leases: Sequence[L]) -> list[L]:
    """Those of these leases, running or not, whose rows somebody else has locked; nobody is waited for.

    The others are locked by this transaction from now on.
    """
    if not tx.capabilities.row_locks:
        return []
    free = _named_rows(tx, leased, leases, True)
    rest = [lease for lease in leases if identity(lease) not in free]
    held = _named_rows(tx, leased, rest, False)
    return [lease for lease in rest if identity(lease) in held]


def _named_rows(
    tx: Transaction, leased: Leased, leases: Sequence[Lease], free: bool
) -> set[tuple[Any, str, int]]:
    rows = set[tuple[Any, str, int]]()
    for start in range(0, len(leases), CHUNK):
        found = tx.execute(_named_listed(leased, free), listed(leases[start : start + CHUNK]))
        rows |= {(row[0], row[1], row[2]) for row in found}
    return rows


@remembered
def _named_listed(leased: Leased, free: bool) -> Select[Any]:
    named = select(leased.key, leased.owner, leased.fence).where(guard(leased, LISTED))
    return named.with_for_update(skip_locked=True) if free else named


def lost_among(leases: Iterable[L], held: Iterable[Any]) -> list[L]:
    """The leases that no returned row (key, owner, fence) answers to, in their order."""
    kept = {(row[0], row[1], row[2]) for row in held}
    return [lease for lease in leases if identity(lease) not in kept]
