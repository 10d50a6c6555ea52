"""A Hypothesis state machine over outbox, relay and inbox, with relays that die, on a real database.

    TestOutbox = outbox_machine(engine).TestCase

Each step does the same to the store and to the oracle (`outbox_model`) and compares answers, every event
that is sent, and all rows. While an event is being sent a relay may be killed, be overtaken by its lease's
end or by a rival, be stopped, and meet an operator who sets aside, mends and requeues what it has read. The
clock is the machine's.

A relay is killed by taking its power away: from one statement, or COMMIT, to the next none of its reaches
the database. The tables of outbox, inbox and locks must be empty, and nobody else may work on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from sqlalchemy import Engine, delete, event, func, select
from sqlalchemy.orm import Session

from fencedjobs import dialects, direct
from fencedjobs.errors import InboxConflict, LeaseLost, NotAcknowledged, OutboxConflict
from fencedjobs.locks import LANE, Locks
from fencedjobs.metrics import Observed
from fencedjobs.models import Base, InboxMessage, Job, Lock, OutboxEvent
from fencedjobs.outbox import JoinedOutbox
from fencedjobs.relay import Relay, dispatch
from fencedjobs.retry import Retry
from fencedjobs.store import Store
from fencedjobs.testing import outbox_model as oracle
from fencedjobs.testing.machines import Effort
from fencedjobs.testing.outbox_model import Became, Disagreement, same
from fencedjobs.testing.watching import Watcher
from fencedjobs.transaction import Transaction
from fencedjobs.uow import UnitOfWork
from fencedjobs.values import Event, EventRecord

NAMES: Final = ("a", "A", "a ", "\u00e1", "a\u0301", "b")
LANES: Final = ("default", "Default")
VALUES: Final = (
    None,
    1,
    1.0,
    True,
    {"qty": 7, "of": ["a"]},
    {"of": ["a"], "qty": 7},
    {"qty": 7.0, "of": ["a"]},
)
SOURCES: Final = ("", "shop")
RIVAL: Final = "rival"
TTL: Final = 60.0
_TABLES: Final = tuple(Base.metadata.tables[m.__tablename__] for m in (OutboxEvent, InboxMessage, Lock, Job))
_EVENTS: Final = select(_TABLES[0])
_MESSAGES: Final = select(*(
    _TABLES[1].c[name] for name in ("source", "id", "received_at", "fence", "duplicates", "conflicts")
))  # fmt: skip
_EFFECTS: Final = select(_TABLES[3].c.kind, _TABLES[3].c.key, func.count()).group_by(
    _TABLES[3].c.kind, _TABLES[3].c.key
)


# --- what an example is made of -------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One thing that is done, printed as it is made."""

    do: str
    arguments: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"{self.do}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


@dataclass(frozen=True)
class Act:
    """What happens to one event while it is being sent."""

    answer: str = "ack"  #: ack, refuse, raise
    meanwhile: tuple[Step, ...] = ()
    delivered: bool = True
    spoil: bool = False
    stop: bool = False
    crash: str | None = None


def _one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def _often(*steps: st.SearchStrategy[Step]) -> st.SearchStrategy[Step]:
    """One of them, each as often as it is there; `one_of` drops what is there twice."""
    return st.integers(0, len(steps) - 1).flatmap(steps.__getitem__)


def _step(do: str, /, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.builds(Step, st.just(do), st.fixed_dictionaries(arguments))


_names, _lanes, _values = _one_of(*NAMES), _one_of(*LANES), _one_of(*VALUES)
_CLOCK: Final = [_step("creep", by=_one_of(0.25, TTL - 1)), _step("jump", side=_one_of(0, 0, -1, 1))]
_OPERATE: Final = _step(
    "operate",
    what=_one_of("quarantine", "requeue", "mend", "redo"),
    place=_one_of(0, 0, 0, 1, 2, 5),  # mostly what is being sent
    payload=_values,
)
_RIVALS: Final = [
    _step("rival_holds", lane=_lanes, ttl=_one_of(1.0, TTL)),
    _step("rival_dispatches", lane=_lanes, fails=st.booleans()),
]
_OVERTAKEN: Final = _step("overtaken", by=_one_of("one that dies", "one that sends", "one that fails"))
_MEANWHILE: Final = st.lists(
    _often(_OVERTAKEN, _OPERATE, _OPERATE, st.one_of(*_CLOCK, *_RIVALS)), min_size=1, max_size=3
).map(tuple)
_CRASHES: Final = (*[None] * 9, "before send", "after send", "after ack", "before commit", "after commit")
_acts = st.builds(
    Act, answer=_one_of("ack", "ack", "ack", "refuse", "raise"), meanwhile=st.one_of(st.just(()), _MEANWHILE),
    delivered=_one_of(True, True, False), spoil=st.booleans(), stop=_one_of(False, False, False, True),
    crash=_one_of(*_CRASHES),
)  # fmt: skip
_scripts, _wait = st.lists(_acts, min_size=1, max_size=6), _one_of(True, True, True, False)
_mostly = _one_of(*LANES[:1] * 3, LANES[1])
_ADDS: Final = [
    _step("feed", count=st.integers(1, 4), lane=_lanes),
    _step("feed", count=st.integers(1, 4), lane=_one_of(LANES[0])),
    _step(
        "add", name=_names, payload=_values, topic=_one_of("t", "t", "T"), lane=_lanes,
        way=_one_of("store", "commit", "commit", "rollback", "savepoint"),
    ),
]  # fmt: skip
_RUNS: Final = [
    _step("dispatch", lane=_mostly, limit=_one_of(1, 2, 16), wait=_wait, script=_scripts),
    _step(
        "relay", lanes=_one_of(LANES[:1], LANES[:1], LANES, LANES[::-1]), mark_every=_one_of(1, 2, 3),
        max_attempts=_one_of(None, 2, 3), limit=_one_of(1, 1, 16), wait=_wait, script=_scripts,
    ),
]  # fmt: skip
_DELIVER: Final = _step(
    "deliver", name=_one_of(*NAMES[:3]), payload=_one_of(*VALUES[-3:], 1), source=_one_of(*SOURCES),
    fence=_one_of(None, 1, 5), way=_one_of("block", "block", "breaks", "swallows", "session"),
)  # fmt: skip
_OTHERS: Final = [
    _step("look", lane=_lanes, limit=_one_of(1, 2, 16)),
    _step("purge", ago=_one_of(0.0, -1.0, TTL), limit=_one_of(1, 9)),
    _step("forget", older_than=_one_of(0.0, TTL), limit=_one_of(1, 9)),
    _OPERATE,
    st.one_of(*_CLOCK, *_RIVALS),
]  # fmt: skip
_STEPS: Final = _often(
    *_ADDS, _DELIVER, *_RUNS, *_RUNS, *_RUNS, *_RUNS[1:], *_RUNS[1:], st.one_of(*_OTHERS), st.one_of(*_OTHERS)
)


# --- power ----------------------------------------------------------------------------------------


class Killed(BaseException):
    """The relay is dead: nothing that it tries from now on reaches the database."""


class Power:
    """The power of one relay, on an engine of its own that shares the pool of the given one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine.execution_options()
        self._on = True
        self._last = False
        self._armed: str | None = None
        direct.tell(self.engine)
        event.listen(self.engine, "before_cursor_execute", self._before)
        event.listen(self.engine, "after_cursor_execute", self._ended)
        event.listen(self.engine, "commit", self._commits)

    def back(self) -> None:
        """For the next relay."""
        self._on, self._armed = True, None

    def cut(self) -> None:
        """Now."""
        self._on = False

    def cut_at_commit(self, when: str) -> None:
        """``before commit``, or ``after commit``: the next one."""
        self._armed = when

    def check(self) -> None:
        """The dead do nothing."""
        if not self._on:
            raise Killed

    def _before(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement == "ROLLBACK":  # what the server does for a client that is gone
            return
        self.check()
        if statement == "COMMIT":
            self._commits(connection)

    def _commits(self, connection: Any) -> None:
        if self._armed == "after commit" and dialects.is_single(connection):
            self._last = True
            return
        if self._armed is not None:
            self._on = False
        if self._armed == "before commit":
            raise Killed

    def _ended(self, connection: Any, cursor: Any, *_: Any) -> None:
        last, self._last = self._last, False  # whether that statement was its own COMMIT
        if last and cursor.rowcount != 0:  # else a transaction may follow that does change something
            self._on = False
            raise Killed


# --- a relay and its oracle -----------------------------------------------------------------------


class Cut(Exception):
    """What a sender raises."""


class Run:
    """The sender of a relay that is being watched: it knows from the oracle what must be sent next."""

    def __init__(self, machine: _OutboxMachine, how: oracle.Options, script: list[Act]) -> None:
        self._machine = machine
        self._script = list(script)
        self.relay = oracle.Relay(machine.outbox, how, lambda: machine.now)
        self.relaying: oracle.Relaying
        self._last: Became | None = None
        self._act = Act()
        self._sent: Event | None = None
        self.stop: Callable[[], None] | None = None  #: where it can be told to stop
        self.expected: Any = None  #: what the run must return or raise, once it is over
        self.raised: BaseException | None = None
        self.broken: AssertionError | None = None
        self.dead = False

    def send(self, sent: Event) -> Any:
        """Compare, and do what the script says."""
        self._machine.power.check()
        try:
            return self._send(sent)
        except AssertionError as broken:  # to the relay that would be a failure like any other
            self.broken = broken
            self._machine.power.cut()
            raise Killed from broken

    def _send(self, sent: Event) -> Any:
        wanted = self._advance()
        if wanted is None:
            raise Disagreement(f"{sent} was sent, expected {self.expected!r}")
        self._machine.compare_event(sent, wanted)
        self._turn.begin()
        self._sent = deepcopy(sent)
        act = self._act = self._script.pop(0) if self._script else Act()
        self._dies_at(act, "before send")
        if act.delivered or act.answer == "ack":
            self._machine.deliver(sent.id, deepcopy(sent.payload), "", sent.fence, "block")
        self._machine.lane = sent.lane
        for step in act.meanwhile:
            self._machine.perform(step)
        self._dies_at(act, "after send")
        stop = self.stop if act.stop else None
        if stop is not None:
            stop()
        self._last = Became(act.answer == "ack", stop=stop is not None)
        if act.spoil:
            _spoil(sent)
        if act.answer == "raise":
            self.raised = Cut("no answer")
            raise self.raised
        if act.answer == "ack":
            self._arm(act)
        return act.answer == "ack" or 1

    def after(self, delivered: Event) -> None:
        """The hook after an acknowledgement, which gets the event as it was sent, whatever the sender did."""
        if delivered != self._sent:
            self.broken = Disagreement(f"{delivered} was said to be delivered, and sent was {self._sent}")
            self._machine.power.cut()
            raise Killed from self.broken
        _spoil(delivered)
        self._dies_at(self._act, "after ack")

    def observe(self, what: Observed, /, **facts: Any) -> None:
        """Nobody looks."""

    def over(self, got: Any) -> None:
        """What the run returned or raised must be what the oracle says, and the oracle must be at its end."""
        if self.broken is not None:
            raise self.broken
        if self.dead:
            self._die()
            _agree("the run", type(got), Killed)
            return
        wanted = self._advance()
        if wanted is not None:
            raise Disagreement(f"it ended with {got!r}, but {wanted} was still to be sent")
        if isinstance(self.expected, LeaseLost):
            _agree("the lane", type(got), LeaseLost)
        elif isinstance(self.expected, oracle.Unsent):
            if self.raised is not None:
                _agree("the sender's error", got, self.raised)
            else:
                _agree("a wrong acknowledgement", type(got), NotAcknowledged)
        else:
            _agree("the number sent", got, self.expected)

    @property
    def _turn(self) -> oracle.Turn:
        turn = self.relay.turn
        assert turn is not None
        return turn

    def _advance(self) -> Event | None:
        """Tell the oracle what became of the last event; what must be sent now."""
        try:
            return next(self.relaying) if self._last is None else self.relaying.send(self._last)
        except StopIteration as end:
            self.expected = end.value
        except (LeaseLost, oracle.Unsent) as end:
            self.expected = end
        return None

    def _dies_at(self, act: Act, point: str) -> None:
        if act.crash == point:
            self._machine.power.cut()
            self.dead = True
            raise Killed

    def _arm(self, act: Act) -> None:
        """Die at the COMMIT of the mark, if there will be one."""
        turn, now = self._turn, self._machine.now
        if act.crash in ("before commit", "after commit") and turn.marks_next() and turn.keeps_lane(now):
            self._machine.power.cut_at_commit(act.crash)
            self.dead = True

    def _die(self) -> None:
        if self._act.crash == "after commit":
            self._turn.acknowledged(self._machine.now)
            self._turn.die(counted=True)


def _spoil(copy: Event) -> None:
    if isinstance(copy.payload, dict):
        copy.payload.clear()
    for name in ("id", "lane", "topic"):
        object.__setattr__(copy, name, "b")
    object.__setattr__(copy, "seq", copy.seq + 1)


# --- the machine ----------------------------------------------------------------------------------


class _OutboxMachine(RuleBasedStateMachine):
    """What each step does; `outbox_machine` gives it an engine."""

    engine: Engine
    effort: Effort

    def __init__(self) -> None:
        super().__init__()
        self.effort.examples += not self.effort.failed
        self.now = 1_764_000_000.25
        self.store = Store(self.engine, clock=lambda: self.now)
        self.watcher = Watcher(self.store)
        self.looked = _Looked()
        self.power = Power(self.engine)
        self.relay_store = Store(self.power.engine, clock=lambda: self.now)
        self.names = list(NAMES)
        self.lane = LANES[0]  #: of what is being sent
        self.outbox = oracle.OutboxModel()
        self.inbox = oracle.InboxModel()
        if self._count_rows():
            raise ValueError("the machine needs empty tables of outbox, inbox, locks and jobs")

    @initialize(names=st.lists(_names, min_size=2, max_size=5, unique=True))
    def start(self, names: list[str]) -> None:
        """Some events on one lane, in whatever order of their ids."""
        for name in names:
            self.add(name, {"qty": 7, "of": ["a"]}, "t", LANES[0], "store")

    @rule(do=_STEPS)
    def step(self, do: Step) -> None:
        """One thing on both sides, and then all rows."""
        self.effort.steps += not self.effort.failed
        try:
            self.perform(do)
            self.compare()
        except Exception:
            self.effort.failed = True
            raise

    def teardown(self) -> None:
        """Delete the rows of the example."""
        self.watcher.close()
        with self.engine.begin() as connection:
            for table in _TABLES:
                connection.execute(delete(table))

    def perform(self, do: Step) -> None:
        """Do it on both sides."""
        getattr(self, do.do)(**do.arguments)

    # --- comparing --------------------------------------------------------------------------------

    def compare(self) -> None:
        """Every row of every table."""
        before, self.looked = self.looked, self.watcher.read(self._look)
        lanes, messages, effects = self.looked.others
        self.outbox.agree(self.looked.events, lanes)
        if (before.rows, before.now) != (self.looked.rows, self.now):  # else they are as they were
            _agree("the lanes", self.store.outbox.stats(), self.outbox.stats(self.now))
        _agree("the inbox", messages, {
            key: (m.received_at, m.fence, m.duplicates, m.conflicts) for key, m in self.inbox.messages.items()
        })  # fmt: skip
        if before.others[1] != messages:
            _agree("its stats", self.store.inbox.stats(), self.inbox.stats())
        _agree("the effects", effects, self.inbox.effects)

    def _look(self, tx: Transaction) -> _Looked:
        """By ``get`` all events that have changed; a row without a change was read before."""
        outbox, locks, before = JoinedOutbox(tx), Locks(tx), self.looked
        rows = {row.id: tuple(row) for row in tx.execute(_EVENTS)}
        events = {
            id: before.events[id] if before.rows.get(id) == row else outbox.get(id)
            for id, row in rows.items()
        }
        lanes = {lane: locks.get(LANE + lane) for lane in LANES}
        return _Looked(self.now, rows, events, (lanes, _messages(tx), _effects(tx)))

    def compare_event(self, sent: Event, wanted: Event) -> None:
        """What is sent must be this event, as it was added or mended."""
        record = self.store.outbox.get(wanted.id)
        seq = None if record is None else record.seq
        if replace(sent, payload=None, seq=0) != replace(wanted, payload=None, seq=0):
            raise Disagreement(f"{sent} was sent, expected {wanted}")
        if sent.seq != seq or not same(sent.payload, wanted.payload):
            raise Disagreement(f"{sent} was sent, expected {wanted} with seq {seq}")

    def _count_rows(self) -> int:
        with self.engine.connect() as connection:
            return sum(connection.scalar(select(func.count()).select_from(t)) or 0 for t in _TABLES)

    # --- the clock --------------------------------------------------------------------------------

    def creep(self, by: float) -> None:
        """Time goes on."""
        self.now += by

    def jump(self, side: int) -> None:
        """To the end of a lane's lease, or to the number next to it."""
        ends = [_beside(lane.until, side) for lane in self.outbox.lanes.values() if lane.owner is not None]
        self.now = min((end for end in ends if end > self.now), default=self.now)

    # --- adding, looking, operating ---------------------------------------------------------------

    def feed(self, count: int, lane: str) -> None:
        """New events."""
        for _ in range(count):
            self.names.append(f"e{len(self.names)}")
            self.add(self.names[-1], {"qty": len(self.names)}, "t", lane, "store")

    def add(self, name: str, payload: Any, topic: str, lane: str, way: str) -> None:
        """By the store, or in a transaction that is committed, rolled back, or has a savepoint undone."""
        new: dict[str, Any] = {"topic": topic, "lane": lane, "headers": {"h": name}}
        undone = way in ("rollback", "savepoint")
        model = deepcopy(self.outbox) if undone else self.outbox
        want = _answer(model.add, name, payload, now=self.now, **new)
        if way == "store":
            got = _answer(self.store.outbox.add, name, payload, **new)
        else:
            got = self._add_in_block(name, payload, new, way)
        _agree("add", got, want)

    def _add_in_block(self, name: str, payload: Any, new: dict[str, Any], way: str) -> Any:
        got: Any = None
        with suppress(_Broken, OutboxConflict), self.store.begin() as uow:
            savepoint = uow.session.begin_nested() if way == "savepoint" else None
            got = _answer(uow.outbox.add, name, payload, **new)
            if savepoint is not None:
                savepoint.rollback()
            if way == "rollback":
                raise _Broken
        return got

    def look(self, lane: str, limit: int) -> None:
        """What is next, in its order."""
        found = [one.id for one in self.store.outbox.pending(limit, lane)]
        _agree("pending", found, self.outbox.pending(limit, lane))

    def operate(self, what: str, place: int, payload: Any) -> None:
        """Set aside, let in again, mended or not: one of those that are not sent, if there are any."""
        name = self._one_unsent(place)
        if what in ("quarantine", "mend", "redo"):
            why = {"reason": "it chokes"}
            _agree(what, self.store.outbox.quarantine(name, **why), self.outbox.quarantine(name, **why))
        if what != "quarantine":
            mended = {"payload": payload} if what == "mend" else {}
            said: dict[str, Any] = {"by": "ann", "reason": "mended", "now": self.now, **mended}
            _agree(what, self.store.outbox.requeue(name, **said), self.outbox.requeue(name, **said))

    def _one_unsent(self, place: int) -> str:
        unsent = [row for row in self.outbox.rows.values() if row.sent_at is None]
        names = [row.id for row in sorted(unsent, key=lambda row: row.place)] or self.names
        return names[place % len(names)]

    def purge(self, ago: float, limit: int) -> None:
        """Sent events are forgotten."""
        before = {"before": self.now - ago, "limit": limit}
        got = self.store.outbox.purge(**before)  # type: ignore[arg-type]
        gone = [name for name in self.outbox.rows if self.store.outbox.get(name) is None]
        _agree("purge", got, self.outbox.purge(**before, gone=gone))  # type: ignore[arg-type]

    # --- relays -----------------------------------------------------------------------------------

    def dispatch(self, lane: str, limit: int, wait: bool, script: list[Act]) -> None:
        """One batch."""
        self._wait_for(lane, wait)
        run = Run(self, oracle.Options("relay", limit, TTL), script)
        run.relaying = run.relay.dispatching(lane)
        with self._powered():
            got = _outcome(
                dispatch, self.relay_store, run.send, lane=lane, owner="relay", limit=limit, ttl=TTL,
                after_delivery=run.after,
            )  # fmt: skip
            run.over(got)

    def relay(
        self, lanes: tuple[str, ...], mark_every: int, max_attempts: int | None, limit: int, wait: bool,
        script: list[Act],
    ) -> None:  # fmt: skip
        """A relay until its lanes are empty, it is stopped, or it is killed."""
        self._wait_for(lanes[0], wait)
        how = oracle.Options("relay", limit, TTL, mark_every, max_attempts)
        run = Run(self, how, script)
        run.relaying = run.relay.relaying([*lanes])
        relay = Relay(
            self.relay_store, run.send, lanes=lanes, owner="relay", limit=limit, ttl=TTL,
            mark_every=mark_every, max_attempts=max_attempts, poll=0.0, retry=Retry(base=0.0),
            observe=run.observe,
        )  # fmt: skip
        run.stop = relay.stop
        with self._powered():
            run.over(_outcome(relay.run, until_empty=True))

    def rival_holds(self, lane: str, ttl: float) -> None:
        """Another relay takes the lane, if it can, and dies."""
        got = self.store.locks.claim(f"outbox:{lane}", RIVAL, ttl=ttl)
        want = self.outbox.lanes.setdefault(lane, oracle.Lane()).claim(RIVAL, ttl, self.now)
        _agree("the rival's claim", got is not None, want)

    def overtaken(self, by: str) -> None:
        """The lease of the lane that is being sent runs out, and a rival takes it."""
        self._wait_for(self.lane, True)
        if by == "one that dies":
            self.rival_holds(self.lane, TTL)
        else:
            self.rival_dispatches(self.lane, by == "one that fails")

    def rival_dispatches(self, lane: str, fails: bool) -> None:
        """Another relay has its turn on the lane, if it can."""
        run = Run(
            self, oracle.Options(RIVAL, 16, TTL), [Act(answer="raise", delivered=False)] if fails else []
        )
        run.relaying = run.relay.dispatching(lane)
        run.over(_outcome(dispatch, self.store, run.send, lane=lane, owner=RIVAL, ttl=TTL))

    def _wait_for(self, lane: str, wait: bool) -> None:
        held = self.outbox.lanes.get(lane)
        if wait and held is not None and held.owner is not None:
            self.now = max(self.now, held.until)

    @contextmanager
    def _powered(self) -> Iterator[None]:
        self.power.back()
        try:
            yield
        finally:
            self.power.back()

    # --- the inbox --------------------------------------------------------------------------------

    def deliver(self, name: str, payload: Any, source: str, fence: int | None, way: str) -> None:
        """A message and its effect, together or not at all.

        In a block that is good, breaks, or swallows the conflict; or on a session of the host's, which
        counts the conflict itself.
        """
        receive = self._receive_by_session if way == "session" else self._receive_in_block
        got = receive(name, payload, {"source": source, "fence": fence}, way)
        undone = way == ("swallows" if got is InboxConflict else "breaks")
        model = deepcopy(self.inbox) if undone else self.inbox
        try:
            want: Any = model.accept(name, payload, source=source, fence=fence, now=self.now)
        except InboxConflict:
            want = InboxConflict
        _agree("accept", got, want)

    def _receive_in_block(self, name: str, payload: Any, how: dict[str, Any], way: str) -> Any:
        got: Any = InboxConflict
        with suppress(_Broken, InboxConflict), self.store.begin() as uow:
            with suppress(*([InboxConflict] if way == "swallows" else [])):
                got = uow.inbox.accept(name, payload, **how)
            if got is True:
                uow.jobs.enqueue(kind=how["source"], key=name)
            if way == "breaks":
                raise _Broken
        return got

    def _receive_by_session(self, name: str, payload: Any, how: dict[str, Any], way: str) -> Any:
        with Session(self.engine) as session:
            uow = UnitOfWork(session, clock=lambda: self.now)
            got: Any
            try:
                got = uow.inbox.accept(name, payload, **how)
            except InboxConflict as conflict:
                session.rollback()
                uow.inbox.record_conflict(conflict)
                got = InboxConflict
            if got is True:
                uow.jobs.enqueue(kind=how["source"], key=name)
            session.commit()
        return got

    def forget(self, older_than: float, limit: int) -> None:
        """Old messages are forgotten; then they are new again."""
        got = self.store.inbox.purge(older_than, limit)
        gone = self.inbox.messages.keys() - self.watcher.read(_messages).keys()
        _agree("purge", got, self.inbox.purge(older_than, limit, now=self.now, gone=gone))


@dataclass(frozen=True)
class _Looked:
    """What there was when it was last looked at."""

    now: float | None = None
    rows: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    events: Mapping[str, EventRecord | None] = field(default_factory=dict)
    others: tuple[Any, Any, Any] = ({}, {}, {})  #: lanes, messages, effects


def _messages(tx: Transaction) -> dict[tuple[str, str], tuple[Any, ...]]:
    return {(row[0], row[1]): tuple(row[2:]) for row in tx.execute(_MESSAGES)}


def _effects(tx: Transaction) -> dict[tuple[str, str], int]:
    return {(row[0], row[1]): row[2] for row in tx.execute(_EFFECTS)}


class _Broken(Exception):
    """What the block of an example raises."""


def _answer(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return verb(*args, **kwargs)
    except OutboxConflict as conflict:
        return ("conflict", conflict.id)


def _outcome(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What it returned, or raised as its answer."""
    try:
        return run(*args, **kwargs)
    except (Killed, Cut, LeaseLost, NotAcknowledged) as end:
        return end


def _agree(what: str, got: Any, want: Any) -> None:
    if got != want:
        raise Disagreement(f"{what}: got {got!r}, expected {want!r}")


def _beside(instant: float, side: int) -> float:
    return math.nextafter(instant, math.copysign(math.inf, side)) if side else instant


def outbox_machine(engine: Engine) -> type[RuleBasedStateMachine]:
    """A state machine for this database; ``outbox_machine(engine).TestCase`` is a test for pytest.

    The class counts what it does in ``effort``.
    """
    return type("OutboxMachine", (_OutboxMachine,), {"engine": engine, "effort": Effort()})
