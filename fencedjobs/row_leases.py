"""The verbs of leases on any table: the host's own, the locks, the lab service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, Update, and_, bindparam, or_, select, update
from sqlalchemy import inspect as inspect_model

from fencedjobs import payload as edge
from fencedjobs.dialects import clock
from fencedjobs.errors import InvalidValue, LeaseLost
from fencedjobs.leases import (
    KEY,
    NOW,
    ONE,
    Leased,
    Transition,
    at,
    guard,
    holds,
    make,
    named,
    remembered,
    renew,
)
from fencedjobs.models import LeaseMixin
from fencedjobs.transaction import Transaction
from fencedjobs.types import Key
from fencedjobs.values import Lease, LeaseRecord

L = TypeVar("L", bound=Lease)


@remembered
def of_model(model: type[Any], open: ColumnElement[bool] | None) -> Leased:
    """A host's mapped class as a leased table."""
    if not (isinstance(model, type) and issubclass(model, LeaseMixin)):
        raise InvalidValue("Model", f"{model!r} has no LeaseMixin")
    table: Any = inspect_model(model).columns["owner"].table
    keys = list(table.primary_key.columns)
    if len(keys) != 1:
        raise InvalidValue("Model", f"{model.__name__} has {len(keys)} primary key columns; leases need one")
    return Leased(table=table, key=keys[0], open=open, model=model)


class JoinedLeases:
    """Leases on one table, in the caller's transaction: what ends or checks a lease."""

    def __init__(self, tx: Transaction, leased: Leased) -> None:
        self._tx = tx
        self._leased = leased

    def check(self, lease: Lease, *, now: float | None = None) -> bool:
        """Whether the lease is held and still runs at ``now`` (seconds; the store's clock if not given)."""
        return holds(self._tx, self._leased, lease, self._tx.now(now))

    def release(self, lease: Lease) -> None:
        """Give the lease back, also after its end; the fence stays. `LeaseLost` if it is not held."""
        leased = self._leased
        if self._tx.execute(_release(leased), named(lease)).rowcount != 1:
            raise self._lost(lease)
        self._changed(lease, ("owner", "until"))

    def settle(self, lease: Lease, /, *, now: float | None = None, **values: Any) -> None:
        """Write ``values`` to the leased row and give the lease back, if it is held and still runs.

        One conditional UPDATE in the caller's transaction. `LeaseLost` if it is not held.
        """
        self.write(lease, {"owner": None, "until": 0.0} | self._checked(values), now=now)

    def get(self, id: Any) -> LeaseRecord | None:
        """The lease columns of a row as they are in this transaction; ``None`` if there is no such row."""
        row = self._tx.execute(_read(self._leased, False), {"held_id": id}).first()
        return None if row is None else LeaseRecord(*row)

    def write(self, lease: Lease, values: Mapping[str, Any], *, now: float | None = None) -> None:
        """Write any columns of the leased row; `LeaseLost` unless the lease is held and runs."""
        instant = self._tx.now(now)
        statement = _write_held(self._leased, tuple(sorted(values)), instant is not None)
        written = {f"new_{name}": value for name, value in values.items()}
        if self._tx.execute(statement, named(lease) | at(instant) | written).rowcount != 1:
            raise self._lost(lease)
        self._changed(lease, tuple(values))

    def _checked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        for name in values:
            if name not in self._leased.table.c or name in LeaseMixin.__fenced__ | {self._leased.key.name}:
                raise InvalidValue(name, f"is not a column of {self._leased.table.name} that settle writes")
        return dict(values)

    def _changed(self, lease: Lease, names: Sequence[str]) -> None:
        self._tx.expire(self._leased.model, lease.id, names)

    def _lost(self, lease: Lease) -> LeaseLost:
        return LeaseLost(lease, self._current(lease.id))

    def _current(self, id: Any) -> LeaseRecord | None:
        """The row as the refused write met it, which an old snapshot may not show."""
        if self._tx.capabilities.stale_reads:
            row = self._tx.execute(_read(self._leased, True), {"held_id": id}).first()
            if row is not None:  # else it is locked by somebody, or not there
                return LeaseRecord(*row)
        return self.get(id)


class Leases(JoinedLeases):
    """Leases on one table, each verb in a transaction of its own."""

    def claim(self, id: Any, owner: str, *, ttl: float, now: float | None = None) -> Lease | None:
        """Take the lease of one row for ``ttl`` seconds; ``None`` if there is none to take.

        Free is a row without owner, or whose lease ended at or before ``now``. The fence rises by 1.
        """
        instant = self._tx.now(now)
        ttl = edge.ttl(ttl, instant)
        owner = edge.key("owner", owner)
        parameters = {"held_id": id, "new_owner": owner, "ttl": ttl} | at(instant)
        rows = make(self._tx, _claim(self._leased, instant is not None), parameters)
        return Lease(*rows[0]) if rows else None

    def renew(self, lease: L, *, ttl: float, now: float | None = None) -> Lease:
        """The lease with a new end, ``ttl`` seconds from now; `LeaseLost` if it ran out or is not held."""
        instant = self._tx.now(now)
        until = renew(self._tx, self._leased, lease, edge.ttl(ttl, instant), instant)
        if until is None:
            raise self._lost(lease)
        return Lease(lease.id, lease.owner, lease.fence, until)


@remembered
def _claim(leased: Leased, given: bool) -> Transition:
    now = clock(NOW, given=given)
    free = and_(leased.key == KEY, or_(leased.owner.is_(None), leased.until <= now))
    return Transition(
        leased,
        where=free if leased.open is None else and_(free, leased.open),
        values=(
            (leased.owner, bindparam("new_owner", type_=Key())),
            (leased.until, leased.end(now)),
            (leased.fence, leased.fence + 1),
        ),
        returning=(leased.key, leased.owner, leased.fence, leased.until),
    )


@remembered
def _release(leased: Leased) -> Update:
    return update(leased.table).where(guard(leased, ONE)).values(owner=None, until=0.0)


@remembered
def _write_held(leased: Leased, names: tuple[str, ...], given: bool) -> Update:
    held = guard(leased, ONE, clock(NOW, given=given))
    columns = leased.table.c
    values = {name: bindparam(f"new_{name}", type_=columns[name].type) for name in names}
    return update(leased.table).where(held).values(values)


@remembered
def _read(leased: Leased, current: bool) -> Select[Any]:
    reading = select(leased.key, leased.owner, leased.fence, leased.until).where(leased.key == KEY)
    return reading.with_for_update(read=True, skip_locked=True) if current else reading
