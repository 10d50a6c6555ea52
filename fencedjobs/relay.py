"""The relay: sends what is in the outbox, lane by lane, and marks what was acknowledged.

A batch is one relay's turn on one lane: claim the lane and read, then send one by one with no
transaction open, marking each event right after its acknowledgement. Death at any point leaves what
is not marked pending, to be sent again under the same id.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final, TypedDict, Unpack

from fencedjobs import payload as edge
from fencedjobs.errors import InvalidValue, LeaseLost, NotAcknowledged
from fencedjobs.locks import Locks
from fencedjobs.metrics import Observed, Observer, logged
from fencedjobs.outbox import BATCH, Outbox
from fencedjobs.retry import Retry
from fencedjobs.store import Store
from fencedjobs.values import Event, Lease

Send = Callable[[Event], Any]
MARK_EVERY: Final = 100


def dispatch(
    store: Store,
    send: Send,
    *,
    lane: str = "default",
    owner: str | None = None,
    limit: int = BATCH,
    ttl: float = 60,
    after_delivery: Callable[[Event], Any] | None = None,
) -> int:
    """Send one batch of a lane; how many events were acknowledged and marked.

    Takes the lane's lease for ``ttl`` seconds (0 events while another relay holds it), reads up to
    ``limit`` events, and calls ``send`` with a copy of each, no transaction being open. Only the exact
    ``True`` acknowledges; then ``after_delivery`` is called, and the event is marked sent while the
    lease is renewed. The first failure ends the batch and comes out, anything but ``True`` as
    `NotAcknowledged`: what was sent stays sent, the rest stays pending. If the lease ran out during a
    send and another relay has taken the lane, that is `LeaseLost`.
    """
    limit = edge.whole("limit", limit, least=1, most=BATCH)
    batch = Batch(store, lane, owner=owner, limit=limit, ttl=outlasting(send, ttl))
    with batch.opened():
        while (event := batch.next()) is not None:
            with batch.delivering():
                acknowledge(event.id, send(batch.copy()))
                if after_delivery is not None:
                    after_delivery(batch.copy())
            batch.acknowledged()
    return batch.sent


class Batch:
    """One turn on one lane: which event is next, and what becomes of it.

    Every step is a short transaction of its own. With ``mark_every`` above 1 acknowledged events are
    gathered and marked together, so that a crash sends up to as many again. With ``max_attempts`` an
    event that fails so often, or kills its relay so often, is quarantined, and the lane goes on.
    """

    def __init__(
        self,
        store: Store,
        lane: str,
        *,
        owner: str | None = None,
        limit: int = BATCH,
        ttl: float = 60,
        mark_every: int = 1,
        max_attempts: int | None = None,
        observe: Observer = logged,
    ) -> None:
        self._store = store
        self._lane = edge.key("lane", lane)
        self._owner = store.who(owner)
        self._limit = edge.whole("limit", limit, least=1)
        self._ttl = edge.ttl(ttl)
        self._mark_every = edge.whole("mark_every", mark_every, least=1, most=MARK_EVERY)
        self._max_attempts = (
            None if max_attempts is None else edge.whole("max_attempts", max_attempts, least=1)
        )
        self._observe = observe
        self._lease: Lease | None = None
        self._waiting: list[Event] = []
        self._acknowledged: list[Event] = []
        self.sent = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Take the lane and the next events; at the end mark what is gathered and give the lane back."""
        self.open()
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the error that ended the batch comes out, not what follows from it
                self.close()
            raise
        self.close()

    def open(self) -> None:
        """Take the lane and the next events, if there are any and no other relay has it."""
        taken = self._store.run(
            lambda tx: Outbox(tx).take(self._lane, self._owner, limit=self._limit, ttl=self._ttl)
        )
        if taken is not None:
            self._lease, self._waiting = taken

    def next(self) -> Event | None:
        """The event to send now; events with their attempts used up are quarantined on the way."""
        while self._waiting and self._used_up(self._waiting[0].attempt - 1):
            self._fail(self._waiting[0], "its relay died while sending it", aside=True)
        return self._waiting[0] if self._waiting else None

    def copy(self) -> Event:
        """A copy of the event to send: whatever is done to it changes nothing here."""
        return deepcopy(self._waiting[0])

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Around a delivery: its error is kept with the event, and comes out."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):  # what keeps the error from being noted must not hide it
                self.failed(error)
            raise

    def acknowledged(self) -> None:
        """The event was delivered: mark it, or gather it to be marked with others."""
        self._acknowledged.append(self._waiting.pop(0))
        if len(self._acknowledged) >= self._mark_every or not self._waiting:
            self._mark()

    def failed(self, error: BaseException) -> bool:
        """The delivery failed: keep the error; whether the event was set aside, so that the lane goes on."""
        event = self._waiting[0]
        kind, text = edge.described(error)
        aside = self._used_up(event.attempt)
        self._fail(event, edge.sanitised(f"{kind}: {text}"), aside=aside)
        return aside

    def close(self) -> None:
        """Mark what is gathered and give the lane back, unless another relay has it already."""
        try:
            if self._acknowledged:
                self._mark()
        finally:
            lease, self._lease = self._lease, None
            if lease is not None:
                with suppress(LeaseLost):
                    self._store.run(lambda tx: Locks(tx).release(lease))

    def _used_up(self, attempts: int) -> bool:
        return self._max_attempts is not None and attempts >= self._max_attempts

    def _mark(self) -> None:
        marked, then = self._acknowledged, self._waiting[0] if self._waiting else None
        self._keep(lambda outbox, lease: outbox.mark(lease, marked, then=then, ttl=self._ttl))
        self._acknowledged = []
        self.sent += len(marked)
        for event in marked:
            self._observe(
                Observed.SENT, lane=event.lane, id=event.id, attempt=event.attempt, fence=event.fence
            )

    def _fail(self, event: Event, error: str, *, aside: bool) -> None:
        reason = "attempts used up" if aside else None
        then = self._waiting[1] if aside and len(self._waiting) > 1 else None
        if self._acknowledged:
            self._mark()
        self._keep(
            lambda outbox, lease: outbox.failed(lease, event, error, aside=reason, then=then, ttl=self._ttl)
        )
        if aside:
            self._waiting.pop(0)
        self._observe(
            Observed.QUARANTINED if aside else Observed.FAILED,
            lane=event.lane,
            id=event.id,
            attempt=event.attempt,
            error=error,
        )

    def _keep(self, step: Callable[[Outbox, Lease], Lease]) -> None:
        """A step that needs the lane's lease and renews it; events that follow carry its fence."""
        lease = self._lease
        assert lease is not None, "the lane was given back"
        try:
            self._lease = kept = self._store.run(lambda tx: step(Outbox(tx), lease), subject=lease)
        except LeaseLost:
            self._lease = None
            self._observe(Observed.LANE_LOST, lane=self._lane, owner=lease.owner, fence=lease.fence)
            raise
        if kept.fence != lease.fence:
            self._waiting = [_with_fence(event, kept.fence) for event in self._waiting]


class RelayOptions(TypedDict, total=False):
    """How a relay works; the defaults are those of `RelayBase`."""

    lanes: Iterable[str]
    owner: str | None
    limit: int
    ttl: float
    mark_every: int
    max_attempts: int | None
    poll: float
    retry: Retry
    observe: Observer


class RelayBase:
    """What a long-running relay is told, and how its lanes are doing."""

    def __init__(
        self,
        store: Store,
        send: Callable[[Event], Any],
        *,
        lanes: Iterable[str] = ("default",),
        owner: str | None = None,
        limit: int = BATCH,
        ttl: float = 60,
        mark_every: int = 1,
        max_attempts: int | None = None,
        poll: float = 1.0,
        retry: Retry = Retry(base=0.5, cap=60),  # noqa: B008 - immutable, and the default shows
        observe: Observer = logged,
    ) -> None:
        self._send = send
        self._lanes = [_Lane(edge.key("lanes", lane), retry) for lane in lanes]
        self._poll = edge.duration("poll", poll)
        self._observe = observe
        ttl = outlasting(send, ttl)
        self._new_batch: Callable[[str], Batch] = lambda lane: Batch(
            store,
            lane,
            owner=owner,
            limit=max(limit, mark_every),
            ttl=ttl,
            mark_every=mark_every,
            max_attempts=max_attempts,
            observe=observe,
        )
        for lane in self._lanes:
            self._new_batch(lane.name)  # bad arguments are refused here, not in the loop

    def _is_empty(self, sent: int) -> bool:
        """Whether a round over all lanes found nothing to send."""
        return not sent and not any(lane.failures for lane in self._lanes)

    def _pause(self) -> float:
        """Seconds until a lane is worth another look."""
        return min((lane.wait(self._poll) for lane in self._lanes), default=self._poll)

    def _failed(self, lane: _Lane, error: Exception) -> None:
        lane.failed()
        if not isinstance(error, (Blocked, LeaseLost)):  # those were observed where they happened
            self._observe(Observed.TROUBLE, lane=lane.name, error=repr(error))


class Relay(RelayBase):
    """The long-running form: sends the events of its lanes until it is told to stop.

    Any number of relays may run; one at a time holds a lane, and takes over within ``ttl`` seconds
    when another has died. ``send`` must return within ``ttl``. After a failure the lane waits as
    ``retry`` says (capped exponential, full jitter); with nothing to send it looks again after
    ``poll`` seconds. The options and their defaults are those of `RelayBase`.

    An event that keeps failing blocks its lane, which keeps the order and is observed as
    ``relay.failed`` each time. With ``max_attempts`` it is quarantined after as many, the lane goes
    on, and the order is what ``outbox.requeue`` makes of it. ``mark_every`` up to 100 marks as many
    acknowledged events in one statement; a crash then sends up to as many again.
    """

    def __init__(self, store: Store, send: Send, **options: Unpack[RelayOptions]) -> None:
        super().__init__(store, send, **options)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Finish the event that is being sent, mark it, give the lane back and return from `run`."""
        self._stopped.set()

    def run(self, *, until_empty: bool = False) -> int:
        """Relay until `stop`, SIGTERM or SIGINT; how many events were sent.

        ``until_empty`` returns as soon as a round over all lanes finds nothing to send. Signals are
        handled in the main thread only; the former handlers are put back at the end.
        """
        total = 0
        with _signals(self.stop):
            while not self._stopped.is_set():
                sent = sum(self._turn(lane) for lane in self._lanes if lane.is_due())
                total += sent
                if until_empty and self._is_empty(sent):
                    break
                if not sent:
                    self._stopped.wait(self._pause())
        return total

    def _turn(self, lane: _Lane) -> int:
        batch = self._new_batch(lane.name)
        try:
            with batch.opened():
                while not self._stopped.is_set() and batch.next() is not None:
                    if self._deliver(batch):
                        batch.acknowledged()
            lane.succeeded()
        except Exception as error:  # noqa: BLE001 - whatever the sender or the database raises: wait, go on
            self._failed(lane, error)
        return batch.sent

    def _deliver(self, batch: Batch) -> bool:
        event = batch.copy()
        try:
            acknowledge(event.id, self._send(event))
        except Exception as error:
            if batch.failed(error):
                return False
            raise Blocked from error
        return True


class Blocked(Exception):
    """The lane waits before its first event is tried again."""


class _Lane:
    """How often a lane has failed in a row, and until when it waits."""

    def __init__(self, name: str, retry: Retry) -> None:
        self.name = name
        self.failures = 0
        self._retry = retry
        self._not_before = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._not_before

    def wait(self, poll: float) -> float:
        return max(self._not_before - time.monotonic(), 0.0) if self.failures else poll

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self) -> None:
        self.failures += 1
        self._not_before = time.monotonic() + self._retry.delay(self.failures)


def outlasting(send: Any, ttl: float) -> float:
    """The lease's ``ttl``, if a sender that knows its own time-out will have returned by then."""
    timeout = getattr(send, "timeout", None)
    if isinstance(timeout, (int, float)) and not timeout < ttl:
        raise InvalidValue("ttl", f"{ttl!r} must be longer than the sender's timeout of {timeout!r} seconds")
    return ttl


def acknowledge(id: str, answer: Any) -> None:
    """Raise `NotAcknowledged` unless the answer is the exact ``True``."""
    if answer is not True:
        raise NotAcknowledged(id, answer)


def _with_fence(event: Event, fence: int) -> Event:
    return replace(event, fence=fence)


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT stop the relay while it runs, where a program's signals can be had."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    former = {number: signal.signal(number, lambda *_: stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
