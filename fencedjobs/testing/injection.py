"""Every verb with its line cut, or a statement refused, at every operation: what may be true afterwards.

`inject` fails the n-th statement or commit of a verb, for all n and in three ways (`failing.Way`), and looks
at what is there: a verb in one transaction has left the rows as they were, or as they must become, and has
said which, or that it is unknown. Then its caller does what the contract says, and the end must be the same
as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, Protocol

from sqlalchemy import Engine, select
from sqlalchemy.exc import DBAPIError

from fencedjobs.errors import OutcomeUnknown, TransactionLost
from fencedjobs.testing.failing import ALONE, COMMIT, Failing, Way
from fencedjobs.testing.machines import Effort
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.scene import RELAYS, TABLES, VERBS, Scene, Verb, host_tables, lost, relayed
from fencedjobs.transaction import Transaction

Row = Mapping[str, Any]
Rows = list[tuple[str, Row]]
Wanted = Callable[[int, str, Way], bool]  # whether to try this point: its number, its operation, its way

COMMITTING: Final = [verb for verb in VERBS if not verb.reads]

_NUMBERS: Final = {"seq", "number"}  # places in an order, which a rollback may leave out
_PATIENCE: Final = 5.0  # seconds in which a server sees that a client is gone


def every(stride: int, start: int = 0) -> Wanted:
    """Each ``stride``-th point, and of each verb the first and the cuts of a COMMIT."""
    count = iter(range(start, 2**62))

    def wanted(number: int, operation: str, way: Way) -> bool:
        chosen = next(count) % stride == 0
        return chosen or (number == 0 and way is Way.REFUSED) or is_cut_commit(number, operation, way)

    return wanted


def is_cut_commit(_: int, operation: str, way: Way) -> bool:
    """Only the cuts of a COMMIT."""
    return operation == COMMIT and way is not Way.REFUSED


def inject(
    engine: Engine, effort: Effort, wanted: Wanted | None = None, verbs: Iterable[Verb] = VERBS
) -> dict[str, int]:
    """Try each verb at each point that is wanted, on empty tables; how many points there were, by verb."""
    tried: Counter[str] = Counter()
    wanted = wanted or every(1)
    with trials(engine) as trial:
        for verb in verbs:
            for number, operation, way in trial.points(verb):
                if wanted(number, operation, way):
                    tried[verb.name] += 1
                    effort.examples += 1
                    trial.fails_at(verb, number, way)
            if not tried[verb.name]:
                raise Disagreement(f"{verb.name}: there was nothing that could fail")
    return dict(tried)


@contextmanager
def trials(engine: Engine) -> Iterator[Trials]:
    """A line that fails beside this engine, with the host's tables made, and dropped at the end."""
    failing = Failing(engine)
    try:
        with host_tables(engine):
            yield from cleared(Trials(failing, engine))
    finally:
        failing.close()


def cleared(trial: Trials) -> Iterator[Trials]:
    """These trials, and no rows of theirs at the end."""
    try:
        yield trial
    finally:
        with suppress(Exception):  # what came before must come out
            trial.scene.clear()


class Line(Protocol):
    """What fails one operation of an engine: a `Failing`, or a line through a proxy."""

    engine: Engine
    operations: list[str]
    hit: str | None

    def at(self, number: int | None, way: Way = ...) -> AbstractContextManager[None]: ...


class Trials:
    """One verb after the other, called in its scene with a line that fails at some point."""

    def __init__(self, failing: Line, direct: Engine) -> None:
        self.failing = failing
        self.scene = Scene.on(failing.engine, direct)
        self.scene.store.transactions.trusted = math.inf  # so that the operations are the same each time
        self.scene.store.now()  # the first use of a line looks at server and tables
        self._before: Rows = []
        self._after: Rows = []
        self._operations: list[str] = []

    def points(self, verb: Verb) -> list[tuple[int, str, Way]]:
        """Where this verb can fail, and how. It is called once, with nothing failing."""
        self._set(verb)
        self._before = self.rows()
        with self.failing.at(None):
            verb.call(self.scene)
        self._after = self.rows()
        self.require_safe(verb, self._after)
        self._operations = [*map(operation, self.failing.operations)]
        for number, text in enumerate(self.failing.operations):
            if text.startswith(ALONE) and COMMIT in self._operations[number + 1 :]:
                self._operations[number] = ALONE  # it changed nothing, so that a transaction had to follow
        return [(n, what, way) for n, what in enumerate(self._operations) for way in Way]

    def fails_at(self, verb: Verb, number: int, way: Way) -> None:
        """Call it with this operation failing, and judge; `points` must have been asked before."""
        self._set(verb)
        with self.failing.at(number, way):
            error = lost(verb.call, self.scene)
        hit = self.failing.hit
        if hit is None:
            raise Disagreement(f"{verb.name}: there was no operation {number} this time")
        with _told(f"{verb.name}: {way.value}, at operation {number}: {_short(hit)}, and it said {error!r}"):
            rows = self.rows()
            self.require_safe(verb, rows)
            if verb.whole:
                self._judge(verb, self._operations[number], way, error, rows)
            self.recover(verb, error)

    def recover(self, verb: Verb, error: BaseException | None) -> None:
        """Do what the contract tells the caller to do; then all must be as if nothing had happened."""
        if verb.name in RELAYS:
            relayed(self.scene)
        elif error is not None and (not isinstance(error, OutcomeUnknown) or verb.again(self.scene)):
            verb.call(self.scene)
        rows = self.rows()
        self.require_safe(verb, rows)
        _agree("in the end", rows, self._after, verb.apart)

    def rows(self) -> Rows:
        """All rows in their order. None of them may be locked: nobody has left a transaction open."""
        out = getattr(self.failing.engine.pool, "checkedout", lambda: 0)()
        _require(out == 0, f"{out} connections are checked out")
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                return self.scene.direct.run(_read)
            except DBAPIError as error:
                if time.monotonic() > end:
                    raise Disagreement(f"somebody has a transaction open: {error.orig}") from error
                time.sleep(0.01)

    def _set(self, verb: Verb) -> None:
        self.scene.clear()
        verb.scene(self.scene)

    def _judge(self, verb: Verb, operation: str, way: Way, error: BaseException | None, rows: Rows) -> None:
        """What a verb in one transaction may say, and what must be true then."""
        if way is Way.REFUSED:
            _require(isinstance(error, (DBAPIError, TransactionLost)), "a refusal must come out as it is")
            _agree("after a refusal", rows, self._before)
        elif operation == COMMIT and not verb.reads:
            _require(isinstance(error, OutcomeUnknown), "it must say that the outcome is unknown")
            _agree("after a COMMIT was cut", rows, self._before if way is Way.BEFORE else self._after)
        elif operation == ALONE:
            _require(isinstance(error, OutcomeUnknown), "it cannot know that the statement changed nothing")
            _agree("after a statement that changed nothing was cut", rows, self._before)
        elif verb.block:
            _require(isinstance(error, (DBAPIError, TransactionLost)), "a cut block must say so")
            _agree("after a block was cut", rows, self._before)
        else:
            _require(error is None, "a cut before COMMIT is no more than a delay")
            _agree("after a second try", rows, self._after)

    # --- what must hold at any time ---------------------------------------------------------------

    def require_safe(self, verb: Verb, rows: Rows) -> None:
        """One fence at a time; effects with their jobs and messages; events sent, and under their ids."""
        self._one_fence_at_a_time(rows)
        self._effects_with_the_job(verb, rows)
        self._events_sent_were_received(rows)
        if verb.name in RELAYS or verb.name == "accept with its effect":
            _messages_with_their_effects(rows)

    def _one_fence_at_a_time(self, rows: Rows) -> None:
        """Every lease that was given out has a fence of its own, and the row is at the highest."""
        leases = [*self.scene.leases.values(), *self.scene.given]
        fences = {(lease.id, lease.fence) for lease in leases}
        _require(len(fences) == len(leases), f"two leases have one fence: {leases}")
        for _, row in rows:
            name = row.get("name", row.get("id"))
            given = [fence for id, fence in fences if id == name]
            if "until" in row and given:
                _require(row["fence"] >= max(given), f"{name} went back from fence {max(given)}")

    def _effects_with_the_job(self, verb: Verb, rows: Rows) -> None:
        if verb.effect is None:
            return
        done = any(table == "fenced_jobs" and r["id"] == "a" and r["state"] == "done" for table, r in rows)
        count = _effects(rows)[verb.effect]
        _require(count == int(done), f"the job is done: {done}, and its effect is there {count} times")

    def _events_sent_were_received(self, rows: Rows) -> None:
        received = {event.id for event in self.scene.received}
        events = {row["id"]: row for table, row in rows if table == "fenced_outbox"}
        known = {f"e{number}" for number in range(3)}
        _require(received <= known, f"sent under other ids: {received - known}")
        sent = {id for id, row in events.items() if row["state"] == "sent"}
        _require(sent <= received, f"marked, but never sent: {sent - received}")


def _messages_with_their_effects(rows: Rows) -> None:
    effects = _effects(rows)
    messages = {f"effect of {row['id']}" for table, row in rows if table == "fenced_inbox"}
    _require(effects == Counter(dict.fromkeys(messages, 1)), f"messages {messages}, effects {dict(effects)}")


def _effects(rows: Rows) -> Counter[str]:
    return Counter(row["name"] for table, row in rows if table == "fj_verify_effects")


def operation(statement: str) -> str:
    """`COMMIT`, also of a statement that is its own, or the statement itself."""
    return COMMIT if statement.strip().upper() == COMMIT or statement.startswith(ALONE) else statement


def _short(statement: str) -> str:
    return " ".join(statement.split())[:80]


def _read(tx: Transaction) -> Rows:
    locks = tx.capabilities.row_locks
    rows: Rows = []
    for table in TABLES:
        order = [column for column in table.c if column.name in _NUMBERS] or [*table.primary_key.columns]
        reading = select(table).order_by(*order)
        found = tx.execute(reading.with_for_update(nowait=True) if locks else reading)
        rows += [(table.name, _plain(row._mapping)) for row in found]
    return rows


def _plain(row: Mapping[Any, Any], apart: frozenset[str] = frozenset()) -> Row:
    return {name: value for name, value in row.items() if name not in _NUMBERS | apart}


def _agree(what: str, got: Rows, want: Rows, apart: frozenset[str] = frozenset()) -> None:
    got, want = ([(table, _plain(row, apart)) for table, row in rows] for rows in (got, want))
    if got != want:
        raise Disagreement(f"{what}: there is {_but(got, want)}, expected {_but(want, got)}")


def _but(rows: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [row for row in rows if row not in others]


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Disagreement(otherwise)


@contextmanager
def _told(story: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Disagreement(f"{story}: {error}") from error
