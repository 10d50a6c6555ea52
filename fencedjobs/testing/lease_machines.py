"""A Hypothesis state machine over leases on a host's own table.

    TestOrders = lease_machine(store, Order, open=Order.done == 0, values={"done": [0, 1]}).TestCase

Each step calls a verb of ``store.leases(Model)``, or of ``uow.leases(Model)`` in a block, on the store and on
the oracle (`lease_model`), or writes a column as the host does, and then compares all rows. The clock,
the leases of the past and the lost connections are those of `job_machine`.

The table must be empty. It is emptied after each example.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from sqlalchemy import ColumnElement, delete, inspect, literal, select, true, update

from fencedjobs.errors import LeaseLost
from fencedjobs.testing import pairs
from fencedjobs.testing.cuts import AFTER, BEFORE, severed
from fencedjobs.testing.lease_model import LeaseModel, Row
from fencedjobs.testing.machines import (
    Broken,
    Effort,
    Past,
    Step,
    answer_of,
    beside,
    one_of,
    opened,
    past_leases,
    same,
    step_of,
    walk,
)
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.pairs import Coverage
from fencedjobs.testing.watching import Watcher
from fencedjobs.values import Lease, LeaseRecord

ROWS: Final = 3
OWNERS: Final = ("A", "B", "a")
VERBS: Final = ("renew", "release", "check", "settle")
CONDITIONS: Final = (
    pairs.LIVE, pairs.AT_ITS_END, pairs.EXPIRED, pairs.STALE, pairs.OTHER_OWNER, pairs.OTHER_ID,
    pairs.GIVEN_BACK,
)  # fmt: skip

_ways = one_of("store", "store", "block", "breaks")
_ttls = one_of(1.0, 2.5, 10.0, 1e-6)


@dataclass(frozen=True)
class Wanted:
    """Which rows `claim_where` asks for, and in which order: as SQL, and as the oracle sees a row.

    ``column`` has ``value`` (if there is a column), in the order of ``by`` (of the key, if it is none),
    perhaps backwards.
    """

    column: str | None = None
    value: Any = None
    by: str | None = None
    backwards: bool = False

    def condition(self, table: Any) -> ColumnElement[bool]:
        return true() if self.column is None else table.c[self.column] == self.value

    def matches(self, row: Row) -> bool:
        return self.column is None or row.values[self.column] == self.value

    def order(self, table: Any, key: Any) -> Any:
        column = key if self.by is None else table.c[self.by]
        return column.desc() if self.backwards else column

    def placed(self, rows: Sequence[Row]) -> dict[Any, int]:
        """The place of each row, by its key; the key decides between equals, and always forwards."""
        forwards = sorted(rows, key=lambda row: row.id)
        ordered = sorted(forwards, key=self._value, reverse=self.backwards)
        return {row.id: place for place, row in enumerate(ordered)}

    def _value(self, row: Row) -> Any:
        return row.id if self.by is None else row.values[self.by]


def _wanted(values: Mapping[str, Sequence[Any]]) -> st.SearchStrategy[Wanted]:
    """Orders are by whole numbers only: of texts and of NULL each database has its own."""
    pairs = [(None, None), *((name, value) for name, these in values.items() for value in these)]
    numbers = [name for name, these in values.items() if all(type(one) is int for one in these)]
    picked = st.tuples(one_of(*pairs), one_of(None, *numbers), st.booleans())
    return picked.map(lambda drawn: Wanted(drawn[0][0], drawn[0][1], drawn[1], drawn[2]))


def _steps(
    values: Mapping[str, Sequence[Any]], conditions: Sequence[str], backwards: bool
) -> st.SearchStrategy[Step]:
    rows, owners = st.integers(0, ROWS), one_of(*OWNERS)
    some = st.fixed_dictionaries({}, optional={name: one_of(*these) for name, these in values.items()})
    cuts = one_of(*[None] * 6, BEFORE, AFTER)
    writes = [step_of("write", row=st.integers(0, ROWS - 1), values=some)] if values else []
    use = step_of("use", past=past_leases, verb=one_of(*VERBS), way=_ways, values=some, cut=cuts)
    backs = [step_of("creep", by=one_of(-1.0, -0.25, -1e-6))] if backwards else []
    return st.one_of(
        step_of("claim", row=rows, owner=owners, ttl=_ttls, cut=cuts),
        step_of("claim", row=rows, owner=owners, ttl=_ttls, cut=st.none()),
        step_of(
            "claim_where", wanted=_wanted(values), owner=owners, limit=one_of(1, 2, 9), ttl=_ttls, cut=cuts
        ),
        use,
        step_of("use", past=past_leases, verb=one_of("settle", "renew"), way=_ways, values=some, cut=cuts),
        step_of("creep", by=one_of(1e-6, 0.25, 1.0)),
        step_of("jump", which=st.integers(0, 2), side=one_of(0, 0, -1, 1)),
        step_of("replay", verb=one_of(*VERBS), met=one_of(*conditions)), *writes, *backs,
    )  # fmt: skip


class LeaseMachine(RuleBasedStateMachine):
    """What each step does; `lease_machine` gives it a store and a mapped class."""

    open_store: Callable[[], Any]
    mapped: type[Any]
    make: Callable[[int], Any]
    open: ColumnElement[bool] | None
    values: Mapping[str, Sequence[Any]]
    effort: Effort
    coverage: Coverage

    def __init__(self) -> None:
        super().__init__()
        self.effort.examples += not self.effort.failed
        self.coverage.forget()
        self.now = 0.0
        self.leases: list[Lease] = []
        self.model = LeaseModel()
        self.table: Any = inspect(self.mapped).columns["owner"].table
        self.key = next(iter(self.table.primary_key.columns))
        self.store = type(self).open_store()
        self.watcher = Watcher(self.store)
        self.verbs = self.store.leases(self.mapped, open=self.open)
        if self._rows():
            raise ValueError(f"the machine needs an empty table, and {self.table.name} has rows")

    @initialize(now=one_of(0.0, 1000.0, 1764000000.25))
    def start(self, now: float) -> None:
        """A few rows."""
        self.now = now
        with self.store.begin() as uow:
            for number in range(1, ROWS + 1):
                uow.session.add(type(self).make(number))
        for id, (_, values, open_) in self._rows().items():
            self.model.rows[id] = Row(id, values, open_)
        self.names = sorted(self.model.rows)
        missing = max(self.names) + 1 if isinstance(self.names[0], int) else "no such row"
        self.keys = [*self.names, missing]

    def step(self, do: Step) -> None:
        """One call on both sides, and then all rows."""
        self.effort.steps += not self.effort.failed
        try:
            getattr(self, do.verb)(**do.arguments)
            self.model.agree(self._rows())
        except Exception:
            self.effort.failed = True
            raise

    def teardown(self) -> None:
        """Empty the table."""
        self.watcher.close()
        with self.store.begin() as uow:
            uow.session.execute(delete(self.table))

    def _rows(self) -> dict[Any, tuple[LeaseRecord, dict[str, Any], bool]]:
        """All rows: the lease, the host's own columns, and whether the database says that they are open."""
        c, names = self.table.c, list(self.values)
        condition = literal(True) if self.open is None else self.open
        reading = select(self.key, c.owner, c.fence, c.until, condition, *(c[name] for name in names))
        rows = self.watcher.read(lambda tx: tx.execute(reading).all())
        found = (
            (LeaseRecord(*row[:4]), dict(zip(names, row[5:], strict=True)), bool(row[4])) for row in rows
        )
        return {record.id: (record, values, open_) for record, values, open_ in found}

    # --- steps ------------------------------------------------------------------------------------

    def creep(self, by: float) -> None:
        """Time goes on a little."""
        self.now += by

    def jump(self, which: int, side: int) -> None:
        """Time comes to the very end of a lease, or next to it."""
        ends = {beside(row.until, side) for row in self.model.rows.values() if row.owner is not None}
        ahead = sorted(end for end in ends if end > self.now)
        if ahead:
            self.now = ahead[min(which, len(ahead) - 1)]

    def write(self, row: int, values: dict[str, Any]) -> None:
        """The host writes columns of its own, whoever has the lease."""
        for name, value in values.items():
            with self.store.begin() as uow:
                changing = update(self.table).where(self.key == self.names[row])
                uow.session.execute(changing.values({name: value}))
            self.model.write(self.names[row], name, value)

    def claim(self, row: int, owner: str, ttl: float, cut: str | None = None) -> Lease | None:
        """A row, or one that is not there."""
        id = self.keys[row]
        got, lost = severed(self.store, cut, lambda: self.verbs.claim(id, owner, ttl=ttl, now=self.now))
        if lost == BEFORE:
            return None
        want = self.model.claim(id, owner, ttl=ttl, now=self.now)
        same("claim", want if lost else got, want)
        self._keep(want)
        return want

    def claim_where(self, wanted: Wanted, owner: str, limit: int, ttl: float, cut: str | None = None) -> None:
        """Several rows at once, in order."""
        options: dict[str, Any] = {"limit": limit, "ttl": ttl, "now": self.now}
        condition, order = wanted.condition(self.table), wanted.order(self.table, self.key)
        call = partial(self.verbs.claim_where, condition, owner=owner, order_by=order, **options)
        got, lost = severed(self.store, cut, call)
        if lost == BEFORE:
            return
        places = wanted.placed([*self.model.rows.values()])
        want = self.model.claim_where(wanted.matches, owner, place=lambda row: places[row.id], **options)
        same("claim_where", want if lost else got, want)
        for lease in want:
            self._keep(lease)

    def use(
        self, past: Past, verb: str, way: str, values: dict[str, Any], cut: str | None = None
    ) -> None:  # fmt: skip
        """A lease is used, in time or late, maybe one that was never given."""
        lease = past.among(self.leases)
        if lease is not None:
            if past.forged == "id":  # of another row of this table
                true = replace(past, forged=None).among(self.leases).id
                lease = replace(lease, id=next(name for name in self.keys if name != true))
            self._use(lease, verb, way, values, cut)

    def replay(self, verb: str, met: str) -> None:
        """A fresh lease is brought so far that it is ``met``; then the verb is called with it."""
        lease = self._fresh(0)
        if lease is None:
            return
        if met in (pairs.AT_ITS_END, pairs.STALE):
            self.now = lease.until
        elif met == pairs.EXPIRED:
            self.now = beside(lease.until, 1)
        if met == pairs.STALE:
            self.claim(0, lease.owner, 10.0)
        elif met == pairs.OTHER_OWNER:
            lease = replace(lease, owner="B")
        elif met == pairs.OTHER_ID:
            self._fresh(1)
            lease = replace(lease, id=self.names[1])
        elif met == pairs.GIVEN_BACK:
            self._use(lease, "release", "store", {}, None)
        elif met == pairs.CLOSED:
            self._be(0, open_=False)
        self._use(lease, verb, "store", {}, None)

    def _be(self, row: int, *, open_: bool) -> None:
        """Have the host write what makes the row open, or not open, if the values can do that."""
        tries = ({name: value} for name, values in self.values.items() for value in values)
        while self.model.rows[self.names[row]].open is not open_:
            written = next(tries, None)
            if written is None:
                break
            self.write(row, written)
            self.model.agree(self._rows())

    def _fresh(self, row: int) -> Lease | None:
        self._be(row, open_=True)
        self.now = max([self.now, *(one.until for one in self.model.rows.values())])
        return self.claim(row, "A" if row == 0 else "C", 10.0)

    # --- both sides -------------------------------------------------------------------------------

    def _use(self, lease: Lease, verb: str, way: str, values: dict[str, Any], cut: str | None) -> None:
        way = "store" if verb == "renew" else way
        self.coverage.count(verb, lease, self.model.rows.get(lease.id), self.now)
        got, lost = severed(self.store, cut, lambda: self._call(lease, verb, way, values))
        if lost == BEFORE:
            return
        want: Any = Broken
        if way != "breaks":
            want = answer_of(getattr(self.model, verb), lease, **self._arguments(verb, values))
        if isinstance(got, LeaseLost) and isinstance(want, LeaseLost):
            got, want = (got.held, got.current), (want.held, want.current)
        if not lost:
            same(verb, got, want)
        self._keep(want)

    def _call(self, lease: Lease, verb: str, way: str, values: dict[str, Any]) -> Any:
        arguments = self._arguments(verb, values)
        if way == "store":
            return answer_of(getattr(self.verbs, verb), lease, **arguments)
        got: Any = None
        with suppress(Broken, LeaseLost), self.store.begin() as uow:
            verbs = uow.leases(self.mapped, open=self.open)
            got = answer_of(getattr(verbs, verb), lease, **arguments)
            if way == "breaks":
                raise Broken
        return Broken if way == "breaks" else got

    def _arguments(self, verb: str, values: dict[str, Any]) -> dict[str, Any]:
        if verb == "renew":
            return {"ttl": 2.5, "now": self.now}
        return {} if verb == "release" else {"now": self.now} | (values if verb == "settle" else {})

    def _keep(self, lease: Any) -> None:
        if isinstance(lease, Lease):
            self.leases.append(lease)
            self.coverage.given(lease)


def lease_machine(
    store: Any, model: type[Any], *, open: ColumnElement[bool] | None = None,
    values: Mapping[str, Sequence[Any]] | None = None, make: Callable[[int], Any] | None = None,
    runner: asyncio.Runner | None = None, backwards: bool = False,
) -> type[LeaseMachine]:  # fmt: skip
    """A state machine for ``store.leases(model, open=open)``; its ``.TestCase`` is a test for pytest.

    ``store``, ``runner`` and ``backwards`` are those of `job_machine`. ``values`` are columns of the host
    and what is written to them, by settle and by the host itself; those that ``open`` looks at should
    be among them. ``make`` gives a new instance of the model for a number from 1 on; without it that
    is one with this number, or a text made of it, as its key.
    """
    table: Any = inspect(model).columns["owner"].table
    key = next(iter(table.primary_key.columns))
    attribute = inspect(model).get_property_by_column(key).key

    conditions = CONDITIONS if open is None else (*CONDITIONS, pairs.CLOSED)

    def made(number: int) -> Any:
        return model(**{attribute: number if key.type.python_type is int else f"row {number}"})

    def step(self: LeaseMachine, do: Step) -> None:
        """One call on both sides."""
        LeaseMachine.step(self, do)

    parts = {
        "open_store": staticmethod(opened(store, runner)), "mapped": model, "open": open,
        "make": staticmethod(make or made), "values": dict(values or {}),
        "step": rule(do=_steps(values or {}, conditions, backwards))(step),
        "effort": Effort(), "coverage": Coverage(VERBS, conditions),
    }  # fmt: skip
    return type("LeaseMachine", (LeaseMachine,), parts)


def every_pair(machine: type[LeaseMachine]) -> None:
    """One example that calls each verb with a lease in each condition; see ``machine.coverage``."""
    walking = machine()
    try:
        walking.start(now=1000.0)
        for verb in VERBS:
            for met in machine.coverage.conditions:
                walk(walking, Step("replay", {"verb": verb, "met": met}))
    finally:
        walking.teardown()
    if machine.coverage.missing:
        raise Disagreement(f"not met: {machine.coverage.missing}")
