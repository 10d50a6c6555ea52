"""The engine room of a worker: claims what there is room for, and sees every attempt to its end.

Its threads have connections of their own and never wait for a handler. Handlers run elsewhere: in
threads (`worker`) or on the caller's event loop (`aio_worker`). The room's own thread never waits for
the database either: it tells handlers in time that their lease is over, and ends what must end.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from fencedjobs import dialects, threads
from fencedjobs import payload as edge
from fencedjobs.attempt import Attempt, InHand, clock
from fencedjobs.claims import Jobs
from fencedjobs.errors import LeaseLost, SchemaMismatch, UnsupportedDatabase
from fencedjobs.handlers import Handlers
from fencedjobs.heartbeat import MARGIN, Heartbeat
from fencedjobs.line import Backoff, Line
from fencedjobs.maintenance import Housekeeper, Maintenance
from fencedjobs.metrics import Observed, Observer
from fencedjobs.settling import Ending, Failed, GivenBack, Settler, ending_of
from fencedjobs.store import Store
from fencedjobs.values import JobLease

_LAST_WORDS: Final = 5.0  # seconds for what is still to be written when the worker stops
_AHEAD: Final = 400  # finished jobs that are not written down yet, before no more are claimed
_CALM: Final = 0.01  # seconds between two looks at what is in hand, which has its price when there is much
_GATHER: Final = 0.002  # seconds in which places gather, while the queue fills them all
_GATHERINGS: Final = 4  # of these, until a quarter of the places is free
_LISTEN: Final = 0.25  # seconds in which a listener looks whether it is to stop


@dataclass(frozen=True, slots=True)
class Plan:
    """How a worker works."""

    owner: str
    queues: tuple[str, ...]
    concurrency: int
    ttl: float
    grace: float
    poll: float
    listen: bool
    maintenance: Maintenance | None
    until_empty: bool


class Executor(Protocol):
    """Where handlers run."""

    def start(self, attempts: list[Attempt]) -> None:
        """Have the handlers called; `Room.finished` is told when they return."""

    def abandon(self, attempt: Attempt) -> None:
        """Nobody waits for this handler any more: it does not take a place."""

    def close(self) -> None:
        """There will be no more attempts."""


class Room:
    """Runs in a thread of its own until it is told to stop, or nothing is left to do."""

    def __init__(self, store: Store, handlers: Handlers, plan: Plan, observe: Observer) -> None:
        self._store = store
        self._handlers = handlers
        self._plan = plan
        self._observe = observe
        self._in_hand = InHand()
        self._owned = partial(observe, owner=plan.owner)  # where nothing else says whose it is
        self._settler = Settler(self._owned, self._settled, plan.ttl)
        self._keeper: Housekeeper | None = None
        self._heartbeat = Heartbeat(self._in_hand, plan.ttl, self._owned)
        self._executor: Executor | None = None
        # Signals call `stop`: what it does may interrupt itself, which an Event does not bear.
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._claims_woken: SimpleQueue[None] = SimpleQueue()
        self._closing = threading.Event()
        self._busy = 0
        self._lock = threading.Lock()
        self._announced = False
        self._look_at = 0.0
        self._found_nothing, self._found_all = True, False
        self._idle = Pauses(plan.poll)
        self._backoff = Backoff(0.25, max(plan.poll, 5.0))
        self._stops = 0
        self._stopped_at: float | None = None
        self._parts: dict[str, threading.Thread] = {}
        self._ended: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None
        self.completed = 0
        self.error: BaseException | None = None  #: a mistake in the worker itself

    @property
    def owner(self) -> str:
        return self._plan.owner

    # --- from outside ---------------------------------------------------------------------------

    def start(self, executor: Executor, ended: Callable[[], object]) -> None:
        """Start; ``ended`` is called, in the room's thread, when all is over."""
        self._executor, self._ended = executor, ended
        self._thread = threads.start("room", self._run)

    def join(self) -> None:
        """Wait for the room's thread, which has nothing left to do once it has said that all is over."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Claim no more, let handlers finish within the grace; the second time do not wait for them."""
        self._stops += 1
        self._woken.put(None)

    def finished(self, attempt: Attempt, result: Any, error: BaseException | None) -> bool:
        """A handler has returned or raised; false if it was given up before."""
        first = attempt.end()
        try:
            self._conclude(attempt, first, result, attempt.failure if error is None else error)
        finally:
            if first:
                self._free()
            self._wake()
        return first

    def committed(self, attempt: Attempt) -> None:
        """A handler's own transaction has completed the job; the handler goes on."""
        if attempt.tell_completed():
            self._count()
            facts = attempt.facts() | {"seconds": attempt.seconds, "remaining": attempt.remaining}
            self._observe(Observed.COMPLETED, **facts)

    # --- the ends of attempts -------------------------------------------------------------------

    def _conclude(self, attempt: Attempt, first: bool, result: Any, error: BaseException | None) -> None:
        if attempt.completed:
            self._in_hand.discard(attempt)
            ours = attempt.is_over(error)  # the cancellation of one that had not returned, which was told
            if not ours and (error is not None or result is not None):
                self._ignore(attempt, result if error is None else ": ".join(edge.described(error)))
        elif first and attempt.unknown:
            self._settler.put(attempt, ending_of(attempt.handler, result, error), unknown=True)
        elif not first or attempt.is_over(error):
            self._too_late(attempt, first, error)
        else:
            self._settler.put(attempt, ending_of(attempt.handler, result, error))

    def _too_late(self, attempt: Attempt, first: bool, error: BaseException | None) -> None:
        """The end of a handler whose job is not its own any more."""
        if first:
            self._in_hand.discard(attempt)
        if attempt.unknown:
            pass  # the answer to what was put in its place tells
        elif error is None or error is attempt.failure:
            what = "Done" if error is None else "transaction"
            self._observe(Observed.REFUSED, **attempt.facts(), seconds=attempt.seconds, what=what)
        elif not attempt.is_lost:
            self._heartbeat.give_up(attempt, "the database has refused what the handler did")

    def _ignore(self, attempt: Attempt, what: Any) -> None:
        self._observe(Observed.IGNORED, **attempt.facts(), what=what)

    def _settled(self, attempt: Attempt, completed: bool) -> None:
        self._in_hand.discard(attempt)
        if completed:
            self._count()
        if not len(self._in_hand) or self._places() == 1:
            self._wake()

    def _count(self) -> None:
        with self._lock:
            self.completed += 1

    def _free(self) -> None:
        with self._lock:
            self._busy -= 1

    def _wake(self) -> None:
        self._woken.put(None)
        self._claims_woken.put(None)

    def _abandon(self, attempt: Attempt, ending: Ending) -> None:
        """End an attempt over its handler's head."""
        if not attempt.end():
            return
        attempt.lose()
        if attempt.started is not None and self._executor is not None:
            self._executor.abandon(attempt)  # before there is a place for another
        if attempt.completed:
            self._in_hand.discard(attempt)
            self._ignore(attempt, "it did not return after its transaction")
        else:
            self._settler.put(attempt, ending)
        self._free()
        self._wake()

    # --- the room's own thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
            while not self._is_over():
                _sleep(self._woken, self._turn())
                if not self._stops:
                    time.sleep(_CALM)
        except BaseException as error:  # noqa: BLE001 - who waits for the end must be told
            self.error = self.error or error
        self._stops += 2
        self._close()
        self._ended()

    def _open(self) -> None:
        plan = self._plan
        self._part("settling", self._settler.run)
        self._part("heartbeat", self._heartbeat.run)
        if plan.maintenance is not None:
            self._keeper = Housekeeper(plan.maintenance, plan.owner, self._owned)
            self._part("maintenance", self._keeper.run)
        if plan.listen:
            self._part("listening", self._listen)
        self._part("claims", self._claims)

    def _close(self) -> None:
        """End the parts, and with them their connections; one that waits for the database is left alone."""
        self._closing.set()
        self._claims_woken.put(None)
        self._settler.stop()
        if self._keeper is not None:
            self._keeper.stop()
        end = clock() + _LAST_WORDS + 1.0
        if "settling" in self._parts:
            self._parts["settling"].join(_LAST_WORDS)
        self._heartbeat.stop()
        if self._executor is not None:
            self._executor.close()
        for part in self._parts.values():
            part.join(max(0.0, end - clock()))

    def _part(self, name: str, run: Callable[[Line], None]) -> None:
        def body() -> None:
            try:
                with Line(self._store) as line:
                    run(line)
            except BaseException as error:  # noqa: BLE001 - a worker must not go on with half its parts
                self.error = self.error or error
                self._stops += 2
            self._woken.put(None)

        self._parts[name] = threads.start(name, body)

    def _is_over(self) -> bool:
        if self._stopped_at is None:
            return False
        if clock() > self._grace_ends() + _LAST_WORDS:
            return True
        claiming = self._parts["claims"].is_alive() and clock() < self._stopped_at + _LAST_WORDS
        return not len(self._in_hand) and not claiming

    def _grace_ends(self) -> float:
        assert self._stopped_at is not None
        return self._stopped_at + (0.0 if self._stops > 1 else self._plan.grace)

    def _turn(self) -> float:
        """One look at what is in hand; the seconds until the next."""
        soonest = self._watch()
        if self._stops:
            soonest = self._wind_up(soonest)
        return max(0.0, soonest - clock())

    def _watch(self) -> float:
        """Give up what is lost or has run too long; when to look again, by the local clock."""
        soonest = self._heartbeat.overlooked()
        for attempt in self._in_hand.all():
            if (overdue := attempt.overdue_at) <= clock():
                limit = attempt.handler.max_runtime
                error = TimeoutError(f"the handler ran longer than its max_runtime of {limit:g} s")
                self._abandon(attempt, Failed(error, attempt.handler.retry))
            else:
                soonest = min(soonest, overdue)
        return soonest

    def _wind_up(self, soonest: float) -> float:
        """After `stop`: give back what has not begun; when the grace is over, the rest too."""
        if self._stopped_at is None:
            self._stopped_at = clock()
            self._closing.set()
            self._claims_woken.put(None)
            self._owned(Observed.STOPPING, running=self._busy)
        over = self._grace_ends()
        for attempt in self._in_hand.all():
            if attempt.started is None or clock() >= over:
                self._abandon(attempt, GivenBack("the worker stops"))
        return min(soonest, clock() + 0.05)

    # --- claims -----------------------------------------------------------------------------------

    def _claims(self, line: Line) -> None:
        while not self._stops:
            alone = self._plan.until_empty and not len(
                self._in_hand
            )  # before the look: its end may bring more
            places = self._gathered()
            if places > 0 and self._is_due(alone):
                found = self._look(line, places)
                if found == 0 and alone:
                    self.stop()
                continue
            due = self._look_at if places > 0 else clock() + self._plan.poll
            _sleep(self._claims_woken, due - clock())

    def _is_due(self, alone: bool) -> bool:
        return self._announced or clock() >= self._look_at or (alone and not self._backoff.failures)

    def _gathered(self) -> int:
        """The places there are; a moment later, if there are few, and more is certain to be in the queue."""
        places, turns = self._places(), _GATHERINGS if self._found_all else 0
        while turns and 0 < places < self._plan.concurrency / 4 and not self._stops:
            time.sleep(_GATHER)
            places, turns = self._places(), turns - 1
        return places

    def _places(self) -> int:
        """How many more jobs can be taken; few when what is finished cannot be written down as fast."""
        concurrency = self._plan.concurrency
        return min(concurrency - self._busy, concurrency + _AHEAD - len(self._in_hand))

    def _look(self, line: Line, room: int) -> int | None:
        """Claim for all the room there is; how many jobs there were, or ``None`` if nobody knows."""
        self._announced = False  # before the look: what is announced meanwhile is not in it
        try:
            found = self._claim_all(line, room)
        except (SchemaMismatch, UnsupportedDatabase):
            raise  # no time will mend that
        except Exception as error:  # noqa: BLE001 - whatever the database raises: wait, and try again
            self._look_at = clock() + self._backoff.failed() * random.uniform(0.5, 1)
            self._trouble("claims", error)
            return None
        self._backoff.succeeded()
        self._found_nothing, self._found_all = not found, found == room
        self._look_at = clock() + (0 if found == room else self._idle.next(found > 0))
        return found

    def _claim_all(self, line: Line, room: int) -> int:
        """Claim from the queues in their order; how many jobs there were."""
        plan, kinds, left = self._plan, self._handlers.kinds, room
        for queue in plan.queues:
            sent = clock()
            claim = partial(_claim, plan.owner, plan.ttl, left, queue, kinds, self._found_nothing)
            if leases := line.call(claim):
                self._take(line, leases, sent)
                left -= len(leases)
            if not left or self._stops:
                break
        return room - left

    def _take(self, line: Line, leases: Sequence[JobLease], sent: float) -> None:
        ends, attempts = sent + self._plan.ttl, []
        for lease, latest in zip(leases, self._deadlines(line, leases, sent), strict=True):
            attempts.append(Attempt(lease, self._handlers.of(lease.kind), ends, latest))
            self._observe(Observed.CLAIMED, **attempts[-1].facts(), waited=lease.waited)
        if self._stops:
            self._return(line, attempts)
            return
        self._in_hand.add(attempts)
        with self._lock:
            self._busy += len(attempts)
        late = clock() >= ends - self._plan.ttl / MARGIN  # no sooner taken than given up for lost
        for stale in [attempt for attempt in attempts if late or attempt.remaining <= 0]:
            attempts.remove(stale)
            self._abandon(stale, GivenBack("the claim took as long as its lease"))
        assert self._executor is not None
        try:
            self._executor.start(attempts)
        except BaseException:
            for attempt in attempts:
                if attempt.started is None:
                    self._abandon(attempt, GivenBack("it could not be started"))
            raise
        self._woken.put(None)

    def _return(self, line: Line, attempts: Sequence[Attempt]) -> None:
        """Give back what a claim has brought that was under way when the worker was told to stop."""
        for attempt in attempts:
            ending = GivenBack("the worker stops")
            what, facts = ending.observed()
            try:
                line.call(partial(ending.write, attempt=attempt))
            except Exception as error:  # noqa: BLE001 - the others are to be given back all the same
                what, facts = Observed.REFUSED, {"what": type(ending).__name__}
                if not isinstance(error, LeaseLost):
                    self._trouble("claims", error)
            self._observe(what, **attempt.facts(), seconds=0.0, **facts)

    def _deadlines(self, line: Line, leases: Sequence[JobLease], sent: float) -> list[float]:
        """When the jobs must have ended, by the local clock: never later than by the database's."""
        asked, now = sent, 0.0
        if any(lease.until == lease.deadline for lease in leases):
            asked = clock()
            try:
                now = line.call(Store.now)
            except Exception as error:  # noqa: BLE001 - the leases are ours, but nobody knows for how long
                self._trouble("claims", error)
                now = float("inf")
        return [self._deadline(lease, sent, asked, now) for lease in leases]

    def _deadline(self, lease: JobLease, sent: float, asked: float, now: float) -> float:
        if lease.deadline is None:
            return float("inf")
        if lease.until == lease.deadline:
            return asked + lease.deadline - now
        return sent + self._plan.ttl + lease.deadline - lease.until  # which was ``ttl`` after the claim

    def _trouble(self, part: str, error: Exception) -> None:
        self._owned(Observed.WORKER_TROUBLE, part=part, error=repr(error))

    # --- notifications --------------------------------------------------------------------------

    def _listen(self, line: Line) -> None:
        """Look as soon as a job is announced. One that is missed costs a poll, so nothing is lost."""
        backoff = Backoff(1.0, 30.0)
        while not self._stops:
            try:
                if not line.call(partial(self._hear, backoff)):
                    return
            except Exception as error:  # noqa: BLE001 - polling goes on; listen again later
                self._trouble("listening", error)
                self._closing.wait(backoff.failed())

    def _hear(self, backoff: Backoff, store: Store) -> bool:
        with store.transactions.engine.connect() as connection:
            wait = dialects.listening(connection)
            if wait is None:
                return False
            backoff.succeeded()
            self._notified()  # of what was announced before
            while not self._stops:
                if wait(_LISTEN):
                    self._notified()
        return True

    def _notified(self) -> None:
        self._announced = True
        self._claims_woken.put(None)


def _claim(
    owner: str, ttl: float, limit: int, queue: str, kinds: Sequence[str], reading_first: bool, store: Store
) -> list[JobLease]:
    """Claim; ``reading_first``: where a claim locks more than what it takes, only if there is something.

    SQLite locks the database, MariaDB each row that it has to read over, of whatever kind.
    """
    capabilities = dialects.capabilities(store.transactions.engine.dialect)
    looks = reading_first and not (capabilities.row_locks and capabilities.update_returning)
    if looks and not store.run(lambda tx: Jobs(tx).may_claim(queue, kinds), reading=True):
        return []
    return store.claim_many(owner, ttl=ttl, limit=limit, queue=queue, kinds=kinds)


def _sleep(woken: SimpleQueue[None], seconds: float) -> None:
    """Sleep until somebody wakes; all the words there are count as one."""
    with suppress(Empty):
        woken.get(timeout=None if seconds == float("inf") else max(0.0, seconds))
        while True:
            woken.get_nowait()


class Pauses:
    """How long to wait before an empty queue is looked at again: longer and longer, up to ``poll``."""

    def __init__(self, poll: float) -> None:
        self._poll = poll
        self._bound = poll / 16

    def next(self, found: bool) -> float:
        """The next pause; from the start if something was found. Jittered, so that workers spread out."""
        self._bound = self._poll / 16 if found else min(2 * self._bound, self._poll)
        return self._bound * random.uniform(0.5, 1)
