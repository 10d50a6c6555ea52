"""The oracle of leases on any table, and of guards, in plain Python, written from the contract.

Whether a row is open is the host's own condition: the machine tells the oracle, as the database has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fencedjobs.errors import LeaseLost
from fencedjobs.testing.model import Disagreement
from fencedjobs.values import Lease, LeaseRecord


@dataclass(slots=True, eq=False)
class Row:
    """One row of the host's as it must be: the lease, and whatever else the host keeps in it."""

    id: Any
    values: dict[str, Any]
    open: bool
    owner: str | None = None
    fence: int = 0
    until: float = 0.0

    def record(self) -> LeaseRecord:
        """The lease columns."""
        return LeaseRecord(self.id, self.owner, self.fence, self.until)


@dataclass(slots=True)
class LeaseModel:
    """All rows. A lease names its row, owner and fence; it is valid while ``now < until``."""

    rows: dict[Any, Row] = field(default_factory=dict)

    def claim(self, id: Any, owner: str, *, ttl: float, now: float) -> Lease | None:
        """The lease of an open row that nobody has, or whose lease ended at or before now."""
        row = self.rows.get(id)
        if row is None or not _free(row, now):
            return None
        return _given(row, owner, now + ttl)

    def claim_where(
        self,
        matches: Callable[[Row], bool],
        owner: str,
        *,
        place: Callable[[Row], Any],
        limit: int,
        ttl: float,
        now: float,
    ) -> list[Lease]:
        """The leases of the first ``limit`` free rows that match, by ``place``, which no two rows share."""
        free = sorted((row for row in self.rows.values() if _free(row, now) and matches(row)), key=place)
        return [_given(row, owner, now + ttl) for row in free[:limit]]

    def renew(self, lease: Lease, *, ttl: float, now: float) -> Lease:
        """The same lease with a new end, also an earlier one."""
        row = self._held(lease, now)
        row.until = now + ttl
        return Lease(lease.id, lease.owner, lease.fence, row.until)

    def release(self, lease: Lease) -> None:
        """Given back, also late; the fence stays."""
        row = self._held(lease, None)
        row.owner, row.until = None, 0.0

    def check(self, lease: Lease, *, now: float) -> bool:
        """Whether a write with this lease would be let through."""
        try:
            self._held(lease, now)
        except LeaseLost:
            return False
        return True

    def settle(self, lease: Lease, *, now: float, **values: Any) -> None:
        """The values are written and the lease is given back, or neither."""
        row = self._held(lease, now)
        row.owner, row.until = None, 0.0
        row.values |= values

    def get(self, id: Any) -> LeaseRecord | None:
        """The row's lease."""
        row = self.rows.get(id)
        return None if row is None else row.record()

    def write(self, id: Any, name: str, value: Any) -> None:
        """The host writes a column of its own."""
        self.rows[id].values[name] = value

    def agree(self, seen: Mapping[Any, tuple[LeaseRecord, dict[str, Any], bool]]) -> None:
        """Raise `Disagreement` unless the rows are these; whether they are open is learnt from them."""
        if seen.keys() != self.rows.keys():
            raise Disagreement(f"rows {sorted(seen)}, expected {sorted(self.rows)}")
        for id, (record, values, open_) in seen.items():
            row = self.rows[id]
            if (record, values) != (row.record(), row.values):
                raise Disagreement(f"row {id!r} is {record} {values}, expected {row.record()} {row.values}")
            row.open = open_

    def _held(self, lease: Lease, now: float | None) -> Row:
        row = self.rows.get(lease.id)
        if row is None:
            raise LeaseLost(lease, None)
        held = (row.owner, row.fence) == (lease.owner, lease.fence) and row.open
        if not held or (now is not None and now >= row.until):
            raise LeaseLost(lease, row.record())
        return row


def _free(row: Row, now: float) -> bool:
    return row.open and (row.owner is None or now >= row.until)


def _given(row: Row, owner: str, until: float) -> Lease:
    row.owner, row.fence, row.until = owner, row.fence + 1, until
    return Lease(row.id, owner, row.fence, row.until)


@dataclass(slots=True)
class GuardModel:
    """The highest fence of each resource, and since when."""

    highest: dict[str, int] = field(default_factory=dict)
    seen_at: dict[str, float] = field(default_factory=dict)

    def admit(self, resource: str, fence: int, *, now: float) -> bool:
        """Unless a higher one has been here; an equal one is the same attempt."""
        if fence < self.highest.get(resource, fence):
            return False
        self.highest[resource], self.seen_at[resource] = fence, now
        return True
