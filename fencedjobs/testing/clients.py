"""Clients that hammer a few jobs, each from a seed of its own, and write down what they call and hear.

Time is a number that all clients share and now and then move on, so that leases run out in the middle
of things and instants meet exactly. Each call is told it as ``now=``.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from sqlalchemy import Engine, event

from fencedjobs import dialects, direct
from fencedjobs.errors import LeaseLost, OutcomeUnknown
from fencedjobs.retry import Retry
from fencedjobs.store import Store
from fencedjobs.testing.linearize import FOREVER
from fencedjobs.testing.queue import Queue
from fencedjobs.testing.sequential import Answer, Call, Granted, Seen
from fencedjobs.values import JobLease, JobRecord, JobState

STARTS: Final = (1000.0, 1_764_000_000.25)
_TTLS: Final = (1.0, 2.0, 3.0, 6.0)
_WAITS: Final = (None, 0.0, 1.0, 3.0)


class Cell(Protocol):
    """A number that threads or processes share, with a lock; ``multiprocessing.Value`` is one."""

    value: float

    def get_lock(self) -> Any:
        """What to hold while the number is changed."""
        ...


class Local:
    """A number for the threads of this process."""

    def __init__(self) -> None:
        self.value = 0.0
        self._lock = threading.Lock()

    def get_lock(self) -> Any:
        """The lock."""
        return self._lock


class Log(Protocol):
    """Where a client writes what it does, as it does it."""

    def began(self, verb: str, given: Mapping[str, Any], at: int) -> None:
        """A call is about to be made."""
        ...

    def ended(self, at: int, answer: Any) -> None:
        """It has returned, and has nothing more to do in the database."""
        ...


class Calls:
    """A log in memory."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.calls: list[Call] = []

    def began(self, verb: str, given: Mapping[str, Any], at: int) -> None:
        """The call stands there without an answer until there is one."""
        self.calls.append(Call(self.client, verb, given, at))

    def ended(self, at: int, answer: Any) -> None:
        """Without an instant its effect may still come."""
        call = self.calls[-1]
        self.calls[-1] = Call(call.client, call.verb, call.given, call.invoked, at, answer)


class AnswerLost(ConnectionResetError):
    """The connection seemed to break in a COMMIT."""


class LostAnswers:
    """Commits whose answer is lost, on demand of a thread: after they have happened, or before.

    The connection stays, so that all is over when the call returns.
    """

    def __init__(self, engine: Engine) -> None:
        self._plan = threading.local()
        direct.tell(engine)
        event.listen(engine, "before_cursor_execute", self._send)
        event.listen(engine, "after_cursor_execute", lambda *_: self._sent())
        event.listen(engine, "commit", self._commit)

    @contextmanager
    def planned(self, how: str) -> Iterator[None]:
        """The next commit of this thread is cut ``"before"`` or ``"after"`` it happens."""
        self._plan.how = how
        try:
            yield
        finally:
            self._plan.how = self._plan.sent = None

    def _send(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement == "COMMIT":
            self._cut("before")

    def _commit(self, connection: Any) -> None:
        self._cut("before")
        if dialects.is_single(connection):
            self._plan.sent = True
            return
        if getattr(self._plan, "how", None) == "after":
            connection.connection.dbapi_connection.commit()
        self._cut("after")

    def _sent(self) -> None:
        """A statement has ended; it may have been its own COMMIT."""
        if getattr(self._plan, "sent", None):
            self._plan.sent = None
            self._cut("after")

    def _cut(self, how: str) -> None:
        if getattr(self._plan, "how", None) == how:
            self._plan.how = None
            raise AnswerLost(f"the answer to COMMIT was lost {how} it took effect")


class Client:
    """One of those that call; a subclass says what."""

    def __init__(self, name: str, seed: str, ids: Sequence[str], clock: Cell, log: Log) -> None:
        self.name = name
        self.ids = ids
        self.chance = random.Random(seed)
        self._clock = clock
        self._log = log
        self._numbers = itertools.count(1)

    def run(self, calls: int) -> None:
        """Make so many calls."""
        for _ in range(calls):
            self.one()

    def one(self) -> None:
        """Make a call."""
        raise NotImplementedError

    def now(self) -> float:
        """The time, which goes on by one of eight looks at it."""
        draw = self.chance.random()
        if draw < 0.125:
            with self._clock.get_lock():
                self._clock.value += 1.0 if draw > 0.005 else 5.0
        return self._clock.value

    def unique(self) -> int:
        """A value that no other call writes."""
        return int(self.name.strip("abcdefghijklmnopqrstuvwxyz") or 0) * 1_000_000 + next(self._numbers)

    def call(self, verb: str, given: Mapping[str, Any], do: Callable[[], Any]) -> Any:
        """Call, and write it down."""
        self._log.began(verb, given, time.monotonic_ns())
        try:
            answer = do()
        except LeaseLost:
            answer = Answer.LOST
        except OutcomeUnknown as lost:
            answer = Answer.UNKNOWN
            if not isinstance(lost.__cause__, AnswerLost):
                return answer  # it may still be under way
        self._log.ended(time.monotonic_ns(), answer)
        return answer


# --- the whole store ------------------------------------------------------------------------------

_WITH_A_LEASE: Final[Mapping[str, int]] = {
    "renew": 18, "renew_many": 4, "complete": 7, "complete_many": 4, "fail": 12, "release": 15,
    "checkpoint": 10, "set_aside": 3, "outcome": 4, "other": 23,
}  # fmt: skip
MIX: Final[Mapping[str, int]] = {
    "claim_by_id": 28, "claim_next": 18, "claim_many": 5, "enqueue": 14, "cancel": 3, "quarantine": 2,
    "requeue": 8, "sweep": 5, "purge": 7, "get": 8,
}  # fmt: skip


class StoreClient(Client):
    """A client of the whole API of jobs. It keeps old leases and uses them again.

    ``lost`` cuts the answer to ``cuts`` of its commits (a fraction). ``mix`` says how often it makes which
    of the calls that need no lease.
    """

    def __init__(
        self, name: str, seed: str, ids: Sequence[str], clock: Cell, log: Log, *,
        store: Store, queue: str, lost: LostAnswers | None = None, cuts: float = 0.0,
        mix: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, seed, ids, clock, log)
        self._store = store
        self._queue = queue
        self._lost = lost
        self._cuts = cuts
        self._mix = mix or MIX
        self._leases: list[JobLease] = []

    def one(self) -> None:
        """One of all verbs, perhaps with its answer cut off."""
        verb = self._drawn(_WITH_A_LEASE) if self._leases else "other"
        verb = self._drawn(self._mix) if verb == "other" else verb
        draw = self.chance.random()
        if self._lost is None or draw >= self._cuts:
            getattr(self, f"_{verb}")()
        else:
            with self._lost.planned("before" if draw < self._cuts / 2 else "after"):
                getattr(self, f"_{verb}")()

    def _drawn(self, weights: Mapping[str, int]) -> str:
        return self.chance.choices(list(weights), list(weights.values()))[0]

    # claims

    def _claim_by_id(self) -> None:
        self._claim(1, self.chance.choice(self.ids))

    def _claim_next(self) -> None:
        self._claim(1)

    def _claim_many(self) -> None:
        self._claim(2)

    def _claim(self, limit: int, id: str | None = None) -> None:
        ttl, now, where = self.chance.choice(_TTLS), self.now(), {"queue": self._queue}

        def do() -> tuple[Granted, ...]:
            if limit > 1:
                leases = self._store.claim_many(self.name, ttl=ttl, limit=limit, now=now, **where)
            else:
                one = where if id is None else {"id": id}
                lease = self._store.claim(self.name, ttl=ttl, now=now, **one)
                leases = [] if lease is None else [lease]
            self._leases = [*self._leases, *leases][-8:]
            return tuple(map(_granted, leases))

        self.call("claim", {"id": id, "limit": limit, "owner": self.name, "ttl": ttl, "now": now}, do)

    # with leases

    def _some(self, number: int) -> list[JobLease]:
        """The latest lease mostly, sometimes an old one; no job twice."""
        old = self.chance.random() < 0.3
        leases = self.chance.sample(self._leases, len(self._leases)) if old else self._leases[::-1]
        return list({lease.id: lease for lease in leases[:number]}.values())

    def _with(self, verb: str, number: int, do: Callable[[list[JobLease]], Any], **given: Any) -> None:
        leases = self._some(number)
        given["leases"] = [(lease.id, (lease.owner, lease.fence)) for lease in leases]
        answer = self.call(verb, given, lambda: do(leases))
        lost = answer is Answer.LOST or answer == (Answer.LOST,)
        if lost and self.chance.random() < 0.7:
            self._leases = [lease for lease in self._leases if lease not in leases]

    def _renew(self) -> None:
        now, ttl = self.now(), self.chance.choice(_TTLS)
        self._with(
            "renew", 1, lambda these: (self._store.renew(these[0], ttl=ttl, now=now).until,), now=now, ttl=ttl
        )

    def _renew_many(self) -> None:
        now, ttl = self.now(), self.chance.choice(_TTLS)

        def do(these: list[JobLease]) -> tuple[Any, ...]:
            renewed = self._store.renew_many(these, ttl=ttl, now=now)
            return tuple(Answer.LOST if lease is None else lease.until for lease in renewed)

        self._with("renew", 2, do, now=now, ttl=ttl)

    def _complete(self) -> None:
        now, result = self.now(), self.unique()
        self._with(
            "complete", 1, lambda these: _ok(self._store.complete(these[0], result, now=now)),
            now=now, extras=[result],
        )  # fmt: skip

    def _complete_many(self) -> None:
        now = self.now()

        def do(these: list[JobLease]) -> tuple[Any, ...]:
            lost = self._store.complete_many(these, now=now)
            return tuple(Answer.LOST if lease in lost else Answer.OK for lease in these)

        self._with("complete", 2, do, now=now)

    def _fail(self) -> None:
        now, wait = self.now(), self.chance.choice(_WAITS)
        retry = None if wait is None else Retry(base=wait, factor=1.0, jitter=False)
        self._with(
            "fail", 1, lambda these: (self._store.fail(these[0], "no", retry=retry, now=now),),
            now=now, wait=wait,
        )  # fmt: skip

    def _release(self) -> None:
        now, delay, refund = self.now(), self.chance.choice((0, 0, 1.0)), self.chance.random() < 0.3
        self._with(
            "release", 1,
            lambda these: _ok(self._store.release(these[0], delay=delay, refund=refund, now=now)),
            now=now, delay=delay, refund=int(refund),
        )  # fmt: skip

    def _checkpoint(self) -> None:
        now, data = self.now(), self.unique()
        self._with(
            "checkpoint", 1, lambda these: _ok(self._store.checkpoint(these[0], data, now=now)),
            now=now, extras=[data],
        )  # fmt: skip

    def _set_aside(self) -> None:
        now, state = self.now(), self.chance.choice((JobState.QUARANTINED, JobState.CANCELLED))
        self._with(
            "set_aside", 1, lambda these: _ok(self._store.set_aside(these[0], "no", state=state, now=now)),
            now=now, state=state,
        )  # fmt: skip

    def _outcome(self) -> None:
        self._with("outcome", 1, lambda these: (self._store.outcome(these[0]),))

    # operators and others

    def _enqueue(self) -> None:
        number = self.chance.randrange(len(self.ids))
        job: dict[str, Any] = {"id": self.ids[number], "payload": self.unique(), "max_attempts": FOREVER}
        now = self.now()
        if number % 4 == 1:
            job["max_attempts"] = self.chance.choice((1, 2, 3))
        elif number % 4 == 2:
            job["deadline"] = self.chance.choice((None, now + 3.0, now + 10.0))
        elif number % 4 == 3:
            job["delay"] = self.chance.choice((0.0, 2.0))
        self.call(
            "enqueue", {**job, "now": now},
            lambda: self._store.enqueue(**job, queue=self._queue, now=now) is not None,
        )  # fmt: skip

    def _cancel(self) -> None:
        id, now = self.chance.choice(self.ids), self.now()
        self.call("cancel", {"id": id, "now": now}, lambda: self._store.cancel(id, now=now))

    def _quarantine(self) -> None:
        id, now = self.chance.choice(self.ids), self.now()
        self.call("quarantine", {"id": id, "now": now}, lambda: self._store.quarantine(id, "odd", now=now))

    def _requeue(self) -> None:
        id, now = self.chance.choice(self.ids), self.now()
        mended: dict[str, Any] = {"payload": self.unique()} if self.chance.random() < 0.5 else {}
        self.call(
            "requeue", {"id": id, "now": now, **mended},
            lambda: self._store.requeue(id, by="operator", reason="mended", now=now, **mended),
        )  # fmt: skip

    def _sweep(self) -> None:
        now = self.now()
        self.call("sweep", {"now": now}, lambda: self._store.sweep(now=now))

    def _purge(self) -> None:
        before = self.now()
        self.call("purge", {"before": before}, lambda: self._store.purge(before=before))

    def _get(self) -> None:
        self.read(self.chance.choice(self.ids))

    def read(self, id: str) -> None:
        """Look at a job."""
        self.call("get", {"id": id}, lambda: _seen(self._store.get(id)))


def _ok(_: None) -> tuple[Answer]:
    return (Answer.OK,)


def _granted(lease: JobLease) -> Granted:
    return Granted(
        lease.id, (lease.owner, lease.fence), lease.fence, lease.until, lease.attempt, lease.payload,
        lease.progress,
    )  # fmt: skip


def _seen(record: JobRecord | None) -> Seen | None:
    if record is None:
        return None
    return Seen(
        record.state, record.owner, record.until, record.fence, record.attempts, record.payload,
        record.progress, record.result,
    )  # fmt: skip


# --- five verbs of any queue ----------------------------------------------------------------------


class QueueClient(Client):
    """A client of the five verbs. An attempt is named by who claimed it, and how often it had claimed."""

    def __init__(
        self, name: str, seed: str, ids: Sequence[str], clock: Cell, log: Log, *, queue: Queue
    ) -> None:
        super().__init__(name, seed, ids, clock, log)
        self._queue = queue
        self._held: list[tuple[str, Any, Any]] = []  # id, key, token

    def one(self) -> None:
        """Claim, or go on with an attempt, in time or late; or add a job, so that there are some."""
        draw = self.chance.random()
        if self._held and draw < 0.65:
            self._go_on(self.chance.choices(("renew", "complete", "release"), (3, 2, 3))[0])
        elif draw < 0.9:
            self._claim()
        else:
            id, now = self.chance.choice(self.ids), self.now()
            self.call("enqueue", {"id": id, "now": now}, lambda: self._added(id, now))

    def _added(self, id: str, now: float) -> Answer:
        self._queue.enqueue(id, now)
        return Answer.SILENT

    def _claim(self) -> None:
        ttl, now, key = self.chance.choice(_TTLS), self.now(), (self.name, self.unique() % 1_000_000)

        def do() -> tuple[Granted, ...]:
            claimed = self._queue.claim(self.name, now, ttl)
            if claimed is None:
                return ()
            id, token = claimed
            self._held = [*self._held, (id, key, token)][-4:]
            return (Granted(id, key),)

        self.call("claim", {"id": None, "limit": 1, "owner": self.name, "ttl": ttl, "now": now}, do)

    def _go_on(self, verb: str) -> None:
        held = self._held[-1] if self.chance.random() < 0.7 else self.chance.choice(self._held)
        id, key, token = held
        now, ttl, result = self.now(), self.chance.choice(_TTLS), self.unique()
        more = {"renew": (ttl,), "complete": (result,), "release": ()}[verb]

        def do() -> tuple[Answer]:
            kept = getattr(self._queue, verb)(id, self.name, token, now, *more)
            return (Answer.OK if kept else Answer.LOST,)

        given: dict[str, Any] = {"leases": [(id, key)], "now": now, "extras": [result], "lenient": True}
        given |= {"ttl": ttl} if verb == "renew" else {}
        if self.call(verb, given, do) == (Answer.LOST,) and self.chance.random() < 0.7:
            self._held.remove(held)
