"""Which verb has met a lease in which condition: counted while a machine runs, and shown as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from fencedjobs.values import JobState, Lease

LIVE, AT_ITS_END, EXPIRED = "live", "at its end", "expired"
STALE, OTHER_OWNER, OTHER_ID, GIVEN_BACK = "stale fence", "other owner", "other id", "given back"
DONE, PURGED, QUARANTINED, CANCELLED, ABSENT = "done", "purged", "quarantined", "cancelled", "no row"
CLOSED = "not open"  # by the condition of a host's own table

_ENDED: Final = {
    JobState.DONE: DONE, JobState.PURGED: PURGED, JobState.QUARANTINED: QUARANTINED,
    JobState.CANCELLED: CANCELLED,
}  # fmt: skip


class Coverage:
    """How often each of ``verbs`` was called with a lease in each of ``conditions``."""

    def __init__(self, verbs: Iterable[str], conditions: Iterable[str]) -> None:
        self.verbs = tuple(verbs)
        self.conditions = tuple(conditions)
        self.counts: Counter[tuple[str, str]] = Counter()
        self._given: set[tuple[Any, str, int]] = set()

    def forget(self) -> None:
        """A new example begins: no lease has been given in it."""
        self._given.clear()

    def given(self, lease: Lease) -> None:
        """A claim gave this lease."""
        self._given.add((lease.id, lease.owner, lease.fence))

    def count(self, verb: str, lease: Lease, row: Any, now: float) -> None:
        """The verb is about to be called with the lease, and ``row`` is as the oracle has it (or none)."""
        if verb in self.verbs:
            met = self._condition(lease, row, now)
            if met in self.conditions:
                self.counts[verb, met] += 1

    def _condition(self, lease: Lease, row: Any, now: float) -> str:
        if row is None:
            return ABSENT
        if (ended := _ENDED.get(getattr(row, "state", None))) is not None:  # type: ignore[arg-type]
            return ended
        if not getattr(row, "open", True):
            return CLOSED
        if (row.owner, row.fence) == (lease.owner, lease.fence):
            return LIVE if now < row.until else AT_ITS_END if now == row.until else EXPIRED
        if self._of_another(lease):
            return OTHER_ID
        if row.fence != lease.fence:
            return STALE
        return GIVEN_BACK if row.owner is None else OTHER_OWNER

    def _of_another(self, lease: Lease) -> bool:
        """Whether it was given, but for another id."""
        here = {(owner, fence) for id, owner, fence in self._given if id == lease.id}
        elsewhere = {(owner, fence) for id, owner, fence in self._given if id != lease.id}
        return (lease.owner, lease.fence) in elsewhere - here

    def add(self, other: Coverage) -> None:
        """What another machine has counted as well."""
        self.counts.update(other.counts)

    @property
    def missing(self) -> list[tuple[str, str]]:
        """The pairs that have not been met yet."""
        pairs = ((verb, met) for verb in self.verbs for met in self.conditions)
        return [pair for pair in pairs if not self.counts[pair]]

    def facts(self) -> dict[str, dict[str, int]]:
        """As plain values: verb, condition, how often."""
        return {verb: {met: self.counts[verb, met] for met in self.conditions} for verb in self.verbs}

    def __str__(self) -> str:
        """The table."""
        return as_table(self.facts())


def as_table(facts: dict[str, dict[str, int]]) -> str:
    """The counts as lines of text, a verb each."""
    conditions: Sequence[str] = [*next(iter(facts.values()), {})]
    rows = [["", *conditions]]
    rows += [[verb, *(str(met[name] or "-") for name in conditions)] for verb, met in facts.items()]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )
    return "\n".join(lines)
