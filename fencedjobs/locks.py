"""Named leases: singletons, leaders, lanes. A lock is a row with a lease and nothing else."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Table, bindparam, insert
from sqlalchemy.exc import IntegrityError

from fencedjobs import dialects
from fencedjobs import payload as edge
from fencedjobs.leases import Leased, remembered
from fencedjobs.models import Lock
from fencedjobs.row_leases import Leases
from fencedjobs.transaction import Transaction
from fencedjobs.values import Lease, LeaseRecord

LANE: Final = "outbox:"  # before the name of a lane, in the name of its lock


@remembered
def leased_locks(table: Table) -> Leased:
    """The table of locks as the lease core sees it."""
    return Leased(table=table, key=table.c.name, model=Lock)


class Locks(Leases):
    """The verbs of locks, each in a transaction of its own. The names need not be made first."""

    def __init__(self, tx: Transaction) -> None:
        super().__init__(tx, leased_locks(tx.tables[Lock.__tablename__]))

    def claim(self, id: str, owner: str, *, ttl: float, now: float | None = None) -> Lease | None:
        """Take the lock of this name for ``ttl`` seconds; ``None`` while somebody holds it.

        The fence rises by 1 with every claim of the name. The row is made at the first one.
        """
        lease = super().claim(_checked(id), owner, ttl=ttl, now=now)
        if lease is None and self.get(id) is None:
            self._create(id)
            lease = super().claim(id, owner, ttl=ttl, now=now)
        return lease

    def get(self, id: str) -> LeaseRecord | None:
        """Who holds the lock of this name; ``None`` if it was never claimed."""
        return super().get(_checked(id))

    def _create(self, name: str) -> None:
        inserting = _insert(self._leased.table, self._tx.capabilities.insert_absent)
        try:
            self._tx.execute(inserting, {"new_name": name})
        except IntegrityError as error:
            if not dialects.is_duplicate(error):
                raise


def _checked(name: Any) -> str:
    """A name of up to 255 characters, or what marks a lane and its name of as many."""
    lane = name.removeprefix(LANE) if isinstance(name, str) else name
    edge.key("name", lane or name)
    return str(name)


@remembered
def _insert(table: Table, absent: Any) -> Any:
    inserting = insert(table) if absent is None else absent(table, table.c.name)
    return inserting.values(name=bindparam("new_name"), until=0.0, fence=0)
