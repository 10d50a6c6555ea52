"""Guards: a receiver's memory of the highest fence, for resources outside the queue's database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, Table, bindparam, case, select

from fencedjobs import payload as edge
from fencedjobs.dialects import clock
from fencedjobs.leases import NOW, at, remembered
from fencedjobs.models import Guard
from fencedjobs.transaction import Transaction


class JoinedGuards:
    """The verb of guards in the caller's transaction."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._table = tx.tables[Guard.__tablename__]

    def admit(self, resource: str, fence: int, *, now: float | None = None) -> bool:
        """Whether no higher fence has been here: then this one is the highest, and the write may go on.

        An equal fence is admitted: it is the same attempt. Do it in the transaction of the write, or
        where the resource has none, right before it and with the row locked until the write is over.
        """
        number = edge.whole("fence", fence, least=0, most=2**63 - 1)
        parameters = {"new_resource": edge.key("resource", resource), "new_fence": number}
        tx, instant = self._tx, self._tx.now(now)
        returning = tx.upsert_returning
        upsert = _admit(self._table, instant is not None, tx.capabilities.upsert, returning)
        answer = tx.execute(upsert, parameters | at(instant))
        if not returning:
            answer = tx.execute(_highest(self._table), {"new_resource": resource})
        return bool(answer.scalar_one() == number)

    def highest(self, resource: str) -> int | None:
        """The highest fence this resource has seen; ``None`` for none."""
        found: int | None = self._tx.execute(
            _highest(self._table, locked=False), {"new_resource": edge.key("resource", resource)}
        ).scalar()
        return found


@remembered
def _admit(table: Table, given: bool, upsert: Any, returning: bool) -> Any:
    c = table.c
    values = {name: bindparam(f"new_{name}", type_=c[name].type) for name in ("resource", "fence")}

    def changes(proposed: Any) -> dict[str, Any]:
        # The instant first: MariaDB evaluates each with those before it already changed.
        return {
            "updated_at": case((c.fence <= proposed.fence, proposed.updated_at), else_=c.updated_at),
            "fence": case((c.fence < proposed.fence, proposed.fence), else_=c.fence),
        }

    admitting = upsert(table, [c.resource], changes).values(**values, updated_at=clock(NOW, given=given))
    return admitting.returning(c.fence) if returning else admitting


@remembered
def _highest(table: Table, locked: bool = True) -> Select[Any]:
    reading = select(table.c.fence).where(table.c.resource == bindparam("new_resource"))
    return reading.with_for_update() if locked else reading
