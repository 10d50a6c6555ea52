"""A Hypothesis state machine over what a receiver remembers: the inbox and the guards.

    TestInbox = inbox_machine(store).TestCase

Messages come once, again, with another payload, on the store and in blocks that commit or break, and
with connections that are lost at COMMIT; fences come higher, equal and lower. Answers, counters and
rows are compared with the oracles. Both tables must be empty, and nobody else may work on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from sqlalchemy import delete, select

from fencedjobs.errors import InboxConflict
from fencedjobs.models import Guard, InboxMessage, tables
from fencedjobs.testing.cuts import AFTER, BEFORE, severed
from fencedjobs.testing.lease_model import GuardModel
from fencedjobs.testing.machines import NAMES, Broken, Effort, Step, one_of, opened, same, step_of
from fencedjobs.testing.outbox_model import InboxModel
from fencedjobs.testing.watching import Watcher

_ways = one_of("store", "store", "block", "breaks")
_cuts = one_of(*[None] * 6, BEFORE, AFTER)
_STEPS: Final = st.one_of(
    step_of(
        "accept", name=one_of(*NAMES), payload=one_of({"qty": 7}, {"qty": 7}, {"qty": 7.0}, None, 1, True),
        source=one_of("", "shop"), fence=one_of(None, 1, 5), way=_ways, cut=_cuts,
    ),
    step_of("admit", resource=one_of(*NAMES), fence=st.integers(0, 4), way=_ways, cut=_cuts),
    step_of("purge", older_than=one_of(0.0, 1.0), limit=one_of(1, 2, 9)),
    step_of("creep", by=one_of(0.25, 1.0)),
)  # fmt: skip


class InboxMachine(RuleBasedStateMachine):
    """What each step does; `inbox_machine` gives it a store."""

    open_store: Callable[[], Any]
    schema: str | None
    effort: Effort

    def __init__(self) -> None:
        super().__init__()
        self.effort.examples += not self.effort.failed
        self.now = 1000.0
        self.inbox, self.guards = InboxModel(), GuardModel()
        placed = tables(self.schema)
        self._messages, self._fences = (placed[one.__tablename__] for one in (InboxMessage, Guard))
        self.store = type(self).open_store()
        self.watcher = Watcher(self.store)
        if any(self._rows()):
            raise ValueError("the machine needs empty tables of inbox and guards")

    @rule(do=_STEPS)
    def step(self, do: Step) -> None:
        """One call on both sides, and then all rows."""
        self.effort.steps += not self.effort.failed
        try:
            getattr(self, do.verb)(**do.arguments)
            self._compare()
        except Exception:
            self.effort.failed = True
            raise

    def teardown(self) -> None:
        """Empty both tables."""
        self.watcher.close()
        with self.store.begin() as uow:
            for table in (self._messages, self._fences):
                uow.session.execute(delete(table))

    def _rows(self) -> tuple[dict[Any, Any], dict[str, Any]]:
        m, g = self._messages.c, self._fences.c
        messages = select(m.source, m.id, m.received_at, m.fence, m.duplicates, m.conflicts)
        guards = select(g.resource, g.fence, g.updated_at)
        both = (messages, guards)
        one, other = self.watcher.read(lambda tx: [tx.execute(reading).all() for reading in both])
        return {tuple(row[:2]): tuple(row[2:]) for row in one}, {row[0]: tuple(row[1:]) for row in other}

    def _compare(self) -> None:
        messages, guards = self._rows()
        same("the inbox", messages, {
            key: (m.received_at, m.fence, m.duplicates, m.conflicts)
            for key, m in self.inbox.messages.items()
        })  # fmt: skip
        highest, seen_at = self.guards.highest, self.guards.seen_at
        same("the guards", guards, {name: (highest[name], seen_at[name]) for name in highest})

    def creep(self, by: float) -> None:
        """Time goes on."""
        self.now += by

    def accept(
        self, name: str, payload: Any, source: str, fence: int | None, way: str, cut: str | None
    ) -> None:  # fmt: skip
        """A message; a conflict is counted by the store, in a transaction of its own."""
        how: dict[str, Any] = {"source": source, "fence": fence, "now": self.now}
        known = self.inbox.messages.get((source, name))
        if known is not None and repr(known.payload) != repr(payload):
            cut = None  # the conflict's own count may be lost, and then nobody is told
        got, lost = self._called("inbox", "accept", (name, payload), how, way, cut)
        conflict = got is InboxConflict
        model = deepcopy(self.inbox) if lost == BEFORE or (way == "breaks" and not conflict) else self.inbox
        try:
            want: Any = model.accept(name, payload, **how)
        except InboxConflict:
            want = InboxConflict
        if not lost:
            same("accept", got, want)

    def admit(self, resource: str, fence: int, way: str, cut: str | None) -> None:
        """A write with a fence."""
        got, lost = self._called("guards", "admit", (resource, fence), {"now": self.now}, way, cut)
        model = deepcopy(self.guards) if lost == BEFORE or way == "breaks" else self.guards
        want = model.admit(resource, fence, now=self.now)
        if not lost:
            same("admit", got, want)
        same("highest", self.store.guards.highest(resource), self.guards.highest.get(resource))

    def purge(self, older_than: float, limit: int) -> None:
        """Old messages are forgotten; then they are new again."""
        got = self.store.inbox.purge(older_than, limit, now=self.now)
        gone = self.inbox.messages.keys() - self._rows()[0].keys()
        same("purge", got, self.inbox.purge(older_than, limit, now=self.now, gone=gone))

    def _called(
        self, part: str, verb: str, given: tuple[Any, ...], how: dict[str, Any], way: str, cut: str | None
    ) -> tuple[Any, str | None]:
        def call() -> Any:
            if way == "store":
                with suppress(InboxConflict):
                    return getattr(getattr(self.store, part), verb)(*given, **how)
                return InboxConflict
            got: Any = InboxConflict
            with suppress(Broken, InboxConflict), self.store.begin() as uow:
                got = getattr(getattr(uow, part), verb)(*given, **how)
                if way == "breaks":
                    raise Broken
            return got

        return severed(self.store, cut, call)


def inbox_machine(
    store: Any, *, runner: asyncio.Runner | None = None, schema: str | None = None
) -> type[InboxMachine]:
    """A state machine for this store's inbox and guards; its ``.TestCase`` is a test for pytest.

    ``store``, ``runner`` and ``schema`` are those of `job_machine`. The class counts in ``effort``.
    """
    parts = {"open_store": staticmethod(opened(store, runner)), "schema": schema, "effort": Effort()}
    return type("InboxMachine", (InboxMachine,), parts)
