"""The idempotent inbox: a message is accepted once, in the transaction of its effect."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ColumnElement,
    Delete,
    Select,
    Table,
    Update,
    and_,
    bindparam,
    case,
    delete,
    func,
    or_,
    select,
    tuple_,
    update,
)

from fencedjobs import payload as edge
from fencedjobs.dialects import clock
from fencedjobs.errors import InboxConflict
from fencedjobs.leases import NOW, at, remembered
from fencedjobs.models import InboxMessage
from fencedjobs.rows import ManyRows
from fencedjobs.transaction import Transaction
from fencedjobs.values import InboxStats


class JoinedInbox:
    """The verbs of the inbox in the caller's transaction."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._table = tx.tables[InboxMessage.__tablename__]

    def accept(
        self,
        id: str,
        payload: Any,
        *,
        source: str = "",
        fence: int | None = None,
        now: float | None = None,
    ) -> bool:
        """Whether this message is new: then apply its effect in this same transaction.

        False for a duplicate, which is counted: acknowledge it, and apply nothing. `InboxConflict`
        if the id came before with another payload, which changes nothing: roll back.

        The row is written before the effect, so that of deliveries at the same time one goes on and
        the others wait for its transaction. Ids are told apart by ``source``. ``fence``, the lane's
        as the event carries it, is kept with the message, the highest that brought it.
        """
        parameters = {
            "new_source": edge.label("source", source),
            "new_id": edge.key("id", id),
            "new_digest": _digest(payload),
            "new_fence": None if fence is None else edge.whole("fence", fence, least=0, most=2**63 - 1),
        }
        tx, instant = self._tx, self._tx.now(now)
        tx.subject = id
        returning = tx.upsert_returning
        upsert = _accept(self._table, instant is not None, tx.capabilities.upsert, returning)
        answer = tx.execute(upsert, parameters | at(instant))
        if not returning:
            answer = tx.execute(_accepted(self._table), parameters)
        row = answer.one()
        if row.digest != parameters["new_digest"]:
            raise InboxConflict(id, source)
        return int(row.duplicates) == 0

    def record_conflict(self, conflict: InboxConflict) -> None:
        """Count a conflict, after the transaction that met it was rolled back."""
        parameters = {"this_source": conflict.source, "this_id": conflict.id}
        self._tx.execute(_count_conflict(self._table), parameters)

    def stats(self) -> InboxStats:
        """How many messages were accepted, how many came again, and how many in conflict."""
        messages, duplicates, conflicts = self._tx.execute(_stats(self._table)).one()
        return InboxStats(int(messages), int(duplicates), int(conflicts))

    def purge(self, older_than: float, limit: int = 1000, *, now: float | None = None) -> int:
        """Forget messages that were received more than ``older_than`` seconds ago; how many.

        A message that is forgotten and comes again is new: keep them longer than any sender retries.
        """
        parameters = {
            "older_than": edge.duration("older_than", older_than),
            "limit": edge.whole("limit", limit, least=1),
        }
        tx, instant = self._tx, self._tx.now(now)
        given = instant is not None
        old = tx.execute(_old(self._table, given), parameters | at(instant)).all()
        if not old:
            return 0
        many = tx.capabilities.rows if tx.capabilities.arrays else None
        if many is not None:
            these = many.parameters({"sources": [row[0] for row in old], "ids": [row[1] for row in old]})
        else:
            these = {"these": [tuple(row) for row in old]}
        deleting = _delete(self._table, given, many)
        return int(tx.execute(deleting, parameters | these | at(instant)).rowcount)


def _digest(payload: Any) -> str:
    edge.encode("payload", payload)  # the same limits as where it came from
    return edge.digest(payload)


@remembered
def _accept(table: Table, given: bool, upsert: Any, returning: bool) -> Any:
    c = table.c
    names = ("source", "id", "digest", "fence")
    values = {name: bindparam(f"new_{name}", type_=c[name].type) for name in names}

    def changes(proposed: Any) -> dict[str, Any]:
        same = c.digest == proposed.digest
        newer = and_(same, or_(c.fence.is_(None), c.fence < proposed.fence))
        return {
            "duplicates": case((same, c.duplicates + 1), else_=c.duplicates),
            "fence": case((newer, proposed.fence), else_=c.fence),
        }

    accepting = upsert(table, [c.source, c.id], changes).values(**values, received_at=clock(NOW, given=given))
    return accepting.returning(c.digest, c.duplicates) if returning else accepting


@remembered
def _accepted(table: Table) -> Select[Any]:
    c = table.c
    this = and_(c.source == bindparam("new_source"), c.id == bindparam("new_id"))
    return select(c.digest, c.duplicates).where(this).with_for_update()


@remembered
def _count_conflict(table: Table) -> Update:
    c = table.c
    this = and_(c.source == bindparam("this_source"), c.id == bindparam("this_id"))
    return update(table).where(this).values(conflicts=c.conflicts + 1)


@remembered
def _stats(table: Table) -> Select[Any]:
    c = table.c
    return select(
        func.count(), func.coalesce(func.sum(c.duplicates), 0), func.coalesce(func.sum(c.conflicts), 0)
    )


def _is_old(table: Table, given: bool) -> ColumnElement[bool]:
    received_at = table.c.received_at
    return received_at < clock(NOW, given=given) - bindparam("older_than", type_=received_at.type)


@remembered
def _old(table: Table, given: bool) -> Select[Any]:
    c = table.c
    old = select(c.source, c.id).where(_is_old(table, given))
    return old.order_by(c.received_at).limit(bindparam("limit"))


@remembered
def _delete(table: Table, given: bool, many: ManyRows | None) -> Delete:
    """Those that were found, if they are still old: one may have been purged, and have come again."""
    c = table.c
    if many is not None:  # a list of pairs would be compared with each row, one by one
        found = many.table({"sources": c.source, "ids": c.id})
        these = and_(c.source == found.c.sources, c.id == found.c.ids)
    else:
        these = tuple_(c.source, c.id).in_(bindparam("these", expanding=True))
    return delete(table).where(these, _is_old(table, given))
