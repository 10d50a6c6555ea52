"""The oracle: outbox, relay, inbox and their crashes as the contract describes them, in plain Python.

Like the oracle of jobs it shares nothing with what it judges but the values and errors they exchange.
Verbs have the store's names and arguments, always with ``now``; they return or raise what the store must,
and bring the rows to what the store's must be.

A relay is a generator: it yields each event that must be sent now, and is sent what became of it. One that
dies is asked for nothing more, and told so by `Turn.die`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fencedjobs.errors import InboxConflict, LeaseLost, OutboxConflict
from fencedjobs.values import Event, EventRecord, EventState, InboxStats, LaneStats, Lease, LeaseRecord

KEPT: Final = object()  #: requeue: the payload stays as it is
HISTORY: Final = 10  #: how many requeues are kept


class Disagreement(AssertionError):
    """The store gave an answer, left a row or sent an event that the contract does not allow."""


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are one: 1, 1.0 and True are three, the order of keys is none of it."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


# --- the outbox -----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Row:
    """One event as it must be."""

    id: str
    place: int  #: in the order of insertion
    lane: str
    topic: str
    payload: Any
    headers: dict[str, str]
    created_at: float
    state: EventState = EventState.PENDING
    fence: int = 0
    attempts: int = 0
    sent_at: float | None = None
    failed: int = 0  #: of which attempt an error is kept with it; 0 for none
    died: bool = False  #: whether that error says that the relay died
    reason: str | None = None
    requeues: list[tuple[float, str, str, str, bool]] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """Whether it is still to be sent."""
        return self.state is EventState.PENDING

    def agrees(self, seen: EventRecord) -> bool:
        """Whether the store's row says the same."""
        requeues = [(r.time, r.by, r.reason, r.state, r.mended) for r in seen.requeues]
        mine = (self.lane, self.topic, self.state, self.headers, self.fence, self.attempts, self.created_at)
        its = (seen.lane, seen.topic, seen.state, seen.headers, seen.fence, seen.attempts, seen.created_at)
        rest = (self.sent_at, self.reason, self.requeues) == (seen.sent_at, seen.reason, requeues)
        return mine == its and rest and self._kept(seen.last_error) and same(self.payload, seen.payload)

    def _kept(self, error: str | None) -> bool:
        if error is None or not self.failed:
            return error is None and not self.failed
        of_this = error.endswith(f" (attempt {self.failed})")
        return of_this and error.startswith("its relay died") is self.died


@dataclass(slots=True)
class Lane:
    """Who may mark events of a lane sent."""

    owner: str | None = None
    until: float = 0.0
    fence: int = 0

    def claim(self, owner: str, ttl: float, now: float) -> bool:
        """Take it, if it is free at this very instant."""
        if self.owner is not None and now < self.until:
            return False
        self.owner, self.until, self.fence = owner, now + ttl, self.fence + 1
        return True

    def keep(self, lease: Lease, ttl: float, now: float) -> None:
        """Renew it, or claim it again if it ran out and is free; else it is lost."""
        if (self.owner, self.fence) == (lease.owner, lease.fence) and now < self.until:
            self.until = now + ttl
        elif not self.claim(lease.owner, ttl, now):
            raise LeaseLost(lease, LeaseRecord(lease.id, self.owner, self.fence, self.until))

    def give_back(self, lease: Lease) -> None:
        """Free it, unless somebody else has claimed it since."""
        if (self.owner, self.fence) == (lease.owner, lease.fence):
            self.owner, self.until = None, 0.0


class OutboxModel:
    """The outbox, verb by verb."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.lanes: dict[str, Lane] = {}
        self._places = 0

    def add(
        self, id: str, payload: Any, *, topic: str, lane: str, headers: dict[str, str], now: float
    ) -> str | None:
        """Once by id; the same again is nothing, another event under the id a conflict."""
        row = self.rows.get(id)
        if row is None:
            self._places += 1
            self.rows[id] = Row(id, self._places, lane, topic, payload, headers, now)
            return id
        if (row.topic, row.lane) == (topic, lane) and same(row.payload, payload):
            return None
        raise OutboxConflict(id)

    def waiting(self, lane: str) -> list[Row]:
        """What is to be sent on a lane, in the order of insertion."""
        rows = [row for row in self.rows.values() if row.lane == lane and row.waits]
        return sorted(rows, key=lambda row: row.place)

    def pending(self, limit: int, lane: str) -> list[str]:
        """The ids that must come, in their order."""
        return [row.id for row in self.waiting(lane)[:limit]]

    def quarantine(self, id: str, reason: str) -> bool:
        """Only what is pending can be set aside."""
        row = self.rows.get(id)
        if row is None or not row.waits:
            return False
        row.state, row.reason = EventState.QUARANTINED, reason
        return True

    def requeue(self, id: str, *, payload: Any = KEPT, by: str, reason: str, now: float) -> int | None:
        """Back to the old place, afresh, with a note; the answer is how many are ahead of it."""
        row = self.rows.get(id)
        if row is None or row.state is not EventState.QUARANTINED:
            return None
        mended = payload is not KEPT
        row.payload = payload if mended else row.payload
        row.state, row.attempts, row.failed, row.reason = EventState.PENDING, 0, 0, None
        note = (now, by, reason, EventState.QUARANTINED.value, mended)
        row.requeues = [*row.requeues, note][-HISTORY:]
        return sum(other.place < row.place for other in self.waiting(row.lane))

    def purge(self, *, before: float, limit: int, gone: Iterable[str]) -> int:
        """Up to ``limit`` events sent before then, whichever: those that are ``gone`` were chosen."""
        old = {row.id for row in self.rows.values() if row.sent_at is not None and row.sent_at < before}
        old = {id for id in old if self.rows[id].state is EventState.SENT}
        chosen = set(gone)
        if not chosen <= old or len(chosen) != min(limit, len(old)):
            raise Disagreement(f"purge took {chosen} of {old}, at most {limit}")
        for id in chosen:
            del self.rows[id]
        return len(chosen)

    def stats(self, now: float) -> dict[str, LaneStats]:
        """What an operator sees of each lane."""
        return {lane: self._stats(lane, now) for lane in {row.lane for row in self.rows.values()}}

    def _stats(self, lane: str, now: float) -> LaneStats:
        rows = [row for row in self.rows.values() if row.lane == lane]
        waiting = self.waiting(lane)
        oldest = max((now - row.created_at for row in waiting), default=None)
        return LaneStats(
            pending=len(waiting),
            oldest=None if oldest is None else max(0.0, oldest),
            attempts=max((row.attempts for row in waiting), default=0),
            sent=sum(row.state is EventState.SENT for row in rows),
            quarantined=sum(row.state is EventState.QUARANTINED for row in rows),
        )

    def agree(self, seen: Mapping[str, EventRecord | None], lanes: Mapping[str, LeaseRecord | None]) -> None:
        """Raise `Disagreement` unless the store's rows are these: each by itself, and in this order."""
        there = {id: record for id, record in seen.items() if record is not None}
        if there.keys() != self.rows.keys():
            raise Disagreement(f"events {sorted(there)}, expected {sorted(self.rows)}")
        for id, record in there.items():
            if not self.rows[id].agrees(record):
                raise Disagreement(f"event {id!r} is {record}, expected {self.rows[id]}")
        order = sorted(there, key=lambda id: there[id].seq)
        if order != sorted(there, key=lambda id: self.rows[id].place):
            raise Disagreement(f"the order of seq is {order}, expected that of insertion")
        for name, lock in lanes.items():
            mine, its = self.lanes.get(name, Lane()), lock or LeaseRecord(name, None, 0, 0.0)
            if (mine.owner, mine.until, mine.fence) != (its.owner, its.until, its.fence):
                raise Disagreement(f"lane {name!r} is {its}, expected {mine}")


# --- a relay --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """How a relay works."""

    owner: str
    limit: int = 16
    ttl: float = 60.0
    mark_every: int = 1
    max_attempts: int | None = None

    def used_up(self, attempts: int) -> bool:
        """Whether no further attempt is given."""
        return self.max_attempts is not None and attempts >= self.max_attempts


@dataclass(frozen=True)
class Became:
    """What became of an event: acknowledged or not, and whether the relay was told to stop meanwhile."""

    acknowledged: bool
    stop: bool = False


@dataclass(slots=True, eq=False)
class Read:
    """A row as the turn has read it."""

    row: Row
    payload: Any
    attempts: int

    def unchanged(self, model: OutboxModel, attempts: int) -> bool:
        """Whether it still waits, and was neither mended, requeued nor tried by another relay since."""
        row = self.row
        there = model.rows.get(row.id) is row
        return there and row.waits and row.attempts == attempts and same(row.payload, self.payload)


Clock = Callable[[], float]
Relaying = Generator[Event, Became, int]


class Turn:
    """One turn of a relay on one lane: what it has read, and what it gathers to mark together."""

    def __init__(self, model: OutboxModel, lane: str, how: Options, lease: Lease, goes_on: bool) -> None:
        self._model = model
        self._lane = lane
        self._how = how
        self._goes_on = goes_on
        self.lease = lease
        self.reads: list[Read] = []
        self._gathered: list[Read] = []
        self._counted: Read | None = None
        self._marked = 0
        self.sent = 0
        self.moved = False
        self._read()

    def _read(self) -> None:
        how = self._how
        size = max(how.limit, how.mark_every)
        self.reads = [Read(row, row.payload, row.attempts) for row in self._model.waiting(self._lane)[:size]]
        tried = any(read.attempts for read in self.reads[:1])  # after a failure or a crash they go one by one
        self._mark_every = 1 if tried else how.mark_every

    def next(self, now: float) -> Event | None:
        """The event that must be sent now; those whose attempts are used up are set aside before."""
        while self.reads and self._how.used_up(self.reads[0].attempts):
            self._settle(now, aside=self.reads.pop(0))
        if not self.reads:
            return None
        read, fence = self.reads[0], self.lease.fence
        row = read.row
        return Event(
            row.id, row.place, fence, row.topic, row.lane, read.payload, row.headers, row.created_at,
            read.attempts + 1,
        )  # fmt: skip

    def begin(self) -> None:
        """It is being sent. Its attempt counts, except amid others that are gathered: then with the mark."""
        if not self._gathered:
            self._counted = self.reads[0]
            self._counted.row.attempts += 1

    def marks_next(self) -> bool:
        """Whether an acknowledgement now would be marked at once."""
        return len(self._gathered) + 1 >= self._mark_every or len(self.reads) == 1

    def keeps_lane(self, now: float) -> bool:
        """Whether the lease is live, or the lane free to be claimed again."""
        lane = self._model.lanes[self._lane]
        ours = (lane.owner, lane.fence) == (self.lease.owner, self.lease.fence)
        return ours or lane.owner is None or lane.until <= now

    def acknowledged(self, now: float) -> None:
        """Mark it, or gather it."""
        marks = self.marks_next()
        self._gathered.append(self.reads.pop(0))
        if marks:
            all_of_them, last = self._marked + len(self._gathered), not self.reads
            self._settle(now)
            if self._goes_on and last and self._marked == all_of_them:  # else one was mended, and comes first
                self._read()

    def failed(self, now: float) -> bool:
        """Keep the error; whether the event is set aside, so that the lane goes on."""
        read = self.reads.pop(0)
        aside = self._how.used_up(read.attempts + 1)
        if not aside:
            self.reads = []
        self._settle(now, failure=read, aside=read if aside else None)
        return aside

    def give_back(self, now: float) -> None:
        """Mark what is gathered, and free the lane."""
        lane = self._model.lanes[self._lane]
        if self._gathered:
            self._keep(now)
            self._mark(now)
        lane.give_back(self.lease)

    def die(self, *, counted: bool = False) -> None:
        """It is asked for nothing more; ``counted``: the next event's attempt has been counted already."""
        if counted and self.reads:
            self.begin()

    def _settle(self, now: float, failure: Read | None = None, aside: Read | None = None) -> None:
        fence = self.lease.fence
        gathered = bool(self._gathered)
        self._keep(now)
        self._mark(now)
        for read in {failure, aside} - {None}:
            self._note(read, counts=gathered, tried=read is failure, aside=read is aside)
        alone = self.lease.fence <= fence + 1  # else another relay has been here
        if not (alone and self.reads and self.reads[0].unchanged(self._model, self.reads[0].attempts)):
            self.reads = []

    def _note(self, read: Any, *, counts: bool, tried: bool, aside: bool) -> None:
        row = read.row
        if counts and tried and read.unchanged(self._model, read.attempts):
            row.attempts += 1
        if read.unchanged(self._model, read.attempts + tried):
            if tried or row.failed != read.attempts:  # else it has the error of its last attempt already
                row.failed, row.died = read.attempts + tried, not tried
            if aside:
                row.state, row.reason = EventState.QUARANTINED, "attempts used up"
        self.moved = self.moved or aside

    def _keep(self, now: float) -> None:
        lane = self._model.lanes[self._lane]
        lane.keep(self.lease, self._how.ttl, now)
        self.lease = Lease(self.lease.id, self._how.owner, lane.fence, lane.until)

    def _mark(self, now: float) -> None:
        for read in self._gathered:
            row = read.row
            if self._model.rows.get(row.id) is row and row.waits and same(row.payload, read.payload):
                row.state, row.sent_at, row.fence, row.failed = EventState.SENT, now, self.lease.fence, 0
                row.attempts += read is not self._counted
                self._marked += 1
        self.sent += len(self._gathered)
        self.moved = self.moved or bool(self._gathered)
        self._gathered = []


def take(
    model: OutboxModel, lane: str, how: Options, now: float, *, goes_on: bool = False
) -> Turn | None:  # fmt: skip
    """A turn on a lane, if there is something to send and no other relay holds it."""
    if not model.waiting(lane):
        return None
    held = model.lanes.setdefault(lane, Lane())
    if not held.claim(how.owner, how.ttl, now):
        return None
    lease = Lease(f"outbox:{lane}", how.owner, held.fence, held.until)
    return Turn(model, lane, how, lease, goes_on)


class Unsent(Exception):
    """The event was not acknowledged: a batch ends with the sender's own error."""


class Relay:
    """A relay that is being run: the turn it is in, and what it has sent."""

    def __init__(self, model: OutboxModel, how: Options, clock: Clock) -> None:
        self._model = model
        self._how = how
        self._clock = clock
        self._stopped = False
        self.turn: Turn | None = None

    def dispatching(self, lane: str) -> Relaying:
        """One batch: the first failure ends it."""
        self.turn = turn = take(self._model, lane, self._how, self._clock())
        if turn is None:
            return 0
        failed = yield from self._sending(turn)
        turn.give_back(self._clock())
        if failed:
            raise Unsent
        return turn.sent

    def relaying(self, lanes: list[str]) -> Relaying:
        """Turns on all lanes, over and over, until a round finds nothing, or it is told to stop.

        On one lane alone a turn lasts until there is nothing left.
        """
        total = 0
        waits: set[str] = set()
        while True:
            moved = False
            for lane in lanes:
                if self._stopped:
                    return total
                turn = self.turn = take(self._model, lane, self._how, self._clock(), goes_on=len(lanes) == 1)
                waits.discard(lane)
                if turn is None:
                    continue
                if (yield from self._taking_its_turn(turn)):
                    waits.add(lane)
                total, moved = total + turn.sent, moved or turn.moved
            if self._stopped or not (moved or waits):
                return total

    def _taking_its_turn(self, turn: Turn) -> Generator[Event, Became, bool]:
        """Whether the lane has to wait and be tried again."""
        try:
            failed = yield from self._sending(turn)
            turn.give_back(self._clock())
        except LeaseLost:
            return True
        return failed

    def _sending(self, turn: Turn) -> Generator[Event, Became, bool]:
        """Whether it ended with a failure."""
        while not self._stopped and (event := turn.next(self._clock())) is not None:
            became = yield event
            self._stopped = self._stopped or became.stop
            if became.acknowledged:
                turn.acknowledged(self._clock())
            elif not self._goes_on(turn):
                return True
        return False

    def _goes_on(self, turn: Turn) -> bool:
        """Whether the lane goes on after a failure; that the lane was lost does not hide the failure."""
        try:
            return turn.failed(self._clock())
        except LeaseLost:
            return False


# --- the inbox ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Message:
    """One message as it must be."""

    payload: Any
    received_at: float
    fence: int | None
    duplicates: int = 0
    conflicts: int = 0


class InboxModel:
    """The inbox, verb by verb; ``effects`` counts what was applied."""

    def __init__(self) -> None:
        self.messages: dict[tuple[str, str], Message] = {}
        self.effects: dict[tuple[str, str], int] = {}

    def accept(self, id: str, payload: Any, *, source: str, fence: int | None, now: float) -> bool:
        """New once, then a duplicate; another payload is a conflict, which is counted and changes nothing."""
        key = (source, id)
        message = self.messages.get(key)
        if message is None:
            self.messages[key] = Message(payload, now, fence)
            self.effects[key] = self.effects.get(key, 0) + 1
            return True
        if not same(message.payload, payload):
            message.conflicts += 1
            raise InboxConflict(id, source)
        message.duplicates += 1
        if fence is not None and (message.fence is None or message.fence < fence):
            message.fence = fence
        return False

    def purge(self, older_than: float, limit: int, *, now: float, gone: Iterable[tuple[str, str]]) -> int:
        """Up to ``limit`` of the old ones, the oldest first; those that are ``gone`` were chosen."""
        old = {key: m.received_at for key, m in self.messages.items() if m.received_at < now - older_than}
        chosen, kept = set(gone), old.keys() - set(gone)
        if not chosen <= old.keys() or len(chosen) != min(limit, len(old)):
            raise Disagreement(f"purge took {chosen} of {old}, at most {limit}")
        if chosen and kept and max(old[key] for key in chosen) > min(old[key] for key in kept):
            raise Disagreement(f"purge took {chosen}, and left older ones of {old}")
        for key in chosen:
            del self.messages[key]
        return len(chosen)

    def stats(self) -> InboxStats:
        """What an operator sees."""
        messages = self.messages.values()
        return InboxStats(
            len(self.messages), sum(m.duplicates for m in messages), sum(m.conflicts for m in messages)
        )
