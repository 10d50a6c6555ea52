"""The verbs of leases on any table: the host's own, the locks, the lab service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Select,
    Update,
    and_,
    bindparam,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy import inspect as inspect_model
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Mapper

from fencedjobs import payload as edge
from fencedjobs.dialects import clock
from fencedjobs.errors import InvalidValue, LeaseLost
from fencedjobs.leases import (
    KEY,
    NOW,
    ONE,
    Again,
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

MOST: Final = 1000  # rows that one `claim_where` takes
_ANY: Final[ColumnElement[int]] = literal_column("1")


# --- a mapped class of the host -------------------------------------------------------------------


@remembered
def of_model(model: type[Any], open: ColumnElement[bool] | None) -> Leased:
    """A host's mapped class as a leased table: the one that has the columns of `LeaseMixin`.

    Of a table that several classes share it is the rows of this class and its subclasses.
    """
    mapper = _mapper(model)
    table: Any = mapper.columns["owner"].table
    if not {*LeaseMixin.__fenced__} <= {*table.c.keys()}:
        raise InvalidValue(
            "Model", f"{model.__name__} names the columns of LeaseMixin otherwise in {table.name}"
        )
    keys = list(table.primary_key.columns)
    if len(keys) != 1:
        raise InvalidValue("Model", f"{model.__name__} has {len(keys)} primary key columns; leases need one")
    leased = Leased(table=table, key=keys[0], model=model)
    conditions = [] if open is None else [_about(leased, "open", open)]
    if mapper.local_table is not table or mapper.single:
        conditions.append(_about(leased, "Model", _is_of(mapper)))
    return replace(leased, open=and_(*conditions)) if conditions else leased


def _mapper(model: Any) -> Mapper[Any]:
    mapper: Mapper[Any] | None = None
    if isinstance(model, type) and issubclass(model, LeaseMixin):
        mapper = inspect_model(model, raiseerr=False)
    if mapper is None:
        raise InvalidValue("Model", f"{model!r} is no mapped class with LeaseMixin")
    return mapper


def _is_of(mapper: Mapper[Any]) -> ColumnElement[bool]:
    """Whether a row of a table that other classes share belongs to this class or one below it."""
    if mapper.polymorphic_on is None:
        raise InvalidValue(
            "Model", f"{mapper.class_.__name__} has no polymorphic_on that tells its rows from other classes'"
        )
    below = [one.polymorphic_identity for one in mapper.self_and_descendants if not one.polymorphic_abstract]
    return mapper.polymorphic_on.in_(below)


def _about(leased: Leased, field: str, condition: Any) -> ColumnElement[bool]:
    """A condition on the class as one on rows of the leased table: what its other tables say by EXISTS.

    (Written as it is, another table in it would be a product of both.)
    """
    if condition is None or isinstance(condition, bool):  # as `Model.column is None` gives it
        raise InvalidValue(field, f"must be an SQL expression, got {condition!r}")
    try:
        asked = select(_ANY).where(condition)
    except ArgumentError as error:
        raise InvalidValue(field, f"must be an SQL expression, got {condition!r}") from error
    mapper = _mapper(leased.model)
    others = [table for table in asked.get_final_froms() if table not in (leased.table,)]
    if strange := [table for table in others if table not in mapper.tables]:
        raise InvalidValue(
            field, f"must be about {mapper.class_.__name__} alone, got columns of {_named(*strange)}"
        )
    if others:
        joined = [one.inherit_condition for one in mapper.iterate_to_root()]
        joining = asked.where(*(join for join in joined if join is not None))
        return joining.correlate(leased.table).exists()
    return and_(condition)


def _ordered(leased: Leased, order_by: Any) -> tuple[ColumnElement[Any], ...]:
    """The order as given, and then by the key, so that it is one."""
    given = () if order_by is None else order_by if isinstance(order_by, (list, tuple)) else (order_by,)
    for one in given:
        if strange := [table for table in _tables_of(one) if table not in (leased.table,)]:
            raise InvalidValue(
                "order_by", f"must be about the table {leased.table.name}, got columns of {_named(*strange)}"
            )
    return (*given, leased.row)


def _tables_of(ordering: Any) -> list[Any]:
    with suppress(ArgumentError):
        if ordering is not None:
            return [*select(ordering).get_final_froms()]
    raise InvalidValue("order_by", f"must be columns or SQL expressions, got {ordering!r}")


def _named(*tables: Any) -> str:
    return ", ".join(str(getattr(table, "name", table)) for table in tables)


# --- the verbs ------------------------------------------------------------------------------------


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
        return Lease(*rows[0][:4]) if rows else None

    def claim_where(
        self,
        condition: Any,
        owner: str,
        *,
        order_by: Any = None,
        limit: int,
        ttl: float,
        now: float | None = None,
    ) -> list[Lease] | Again:
        """Take up to ``limit`` rows that are free, open and fulfil ``condition``, in order.

        An empty list says that there are none; `Again`, that others hold all of them at this moment.
        """
        instant = self._tx.now(now)
        ttl = edge.ttl(ttl, instant)
        limit = edge.whole("limit", limit, least=1, most=MOST)
        parameters = {"new_owner": edge.key("owner", owner), "ttl": ttl} | at(instant)
        picking = _claim_where(self._leased, condition, order_by, instant is not None)
        rows = make(self._tx, picking, parameters | {"limit": limit})
        if not rows and self._contended(picking, parameters):
            return Again.SOON
        return [Lease(*row[:4]) for row in rows]

    def _contended(self, picking: Transition, parameters: Mapping[str, Any]) -> bool:
        """Whether there is a row to take all the same, which somebody else has locked."""
        if not self._tx.capabilities.row_locks:
            return False
        looking = select(self._leased.key).where(picking.where).limit(1)
        return self._tx.execute(looking, parameters).first() is not None

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
    where = and_(leased.key == KEY, _free(leased, now))
    return Transition(leased, where, _grant(leased, now), _granted(leased))


def _claim_where(leased: Leased, condition: Any, order_by: Any, given: bool) -> Transition:
    now, order = clock(NOW, given=given), _ordered(leased, order_by)
    where = and_(_free(leased, now), _about(leased, "condition", condition))
    return Transition(leased, where, _grant(leased, now), _granted(leased), order, once=True)


def _free(leased: Leased, now: ColumnElement[float]) -> ColumnElement[bool]:
    """Open, and nobody's, or its lease has ended."""
    free = or_(leased.owner.is_(None), leased.until <= now)
    return free if leased.open is None else and_(free, leased.open)


def _grant(leased: Leased, now: ColumnElement[float]) -> list[tuple[Column[Any], Any]]:
    owner = bindparam("new_owner", type_=Key())
    return [(leased.owner, owner), (leased.until, leased.end(now)), (leased.fence, leased.fence + 1)]


def _granted(leased: Leased) -> list[ColumnElement[Any]]:
    return [leased.key, leased.owner, leased.fence, leased.until]


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
