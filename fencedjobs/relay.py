"""The relay: sends what is in the outbox, lane by lane, and marks what was acknowledged."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypedDict, Unpack

from fencedjobs import payload as edge
from fencedjobs.batch import Batch, acknowledge
from fencedjobs.errors import InvalidValue, LeaseLost
from fencedjobs.metrics import Observed, Observer, logged
from fencedjobs.outbox import BATCH
from fencedjobs.retry import Retry
from fencedjobs.store import Store
from fencedjobs.values import Event

Send = Callable[[Event], Any]


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
    batch = Batch(store, lane, owner=owner, limit=limit, ttl=ttl, timeout=timeout_of(send, ttl))
    with batch.opened():
        while (event := batch.next()) is not None:
            with batch.delivering():
                acknowledge(event.id, send(batch.copy()))
                if after_delivery is not None:
                    after_delivery(batch.copy())
            batch.acknowledged()
    return batch.sent


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
        self._lanes = [_Lane(lane, retry) for lane in _names(lanes)]
        self._poll = edge.duration("poll", poll)
        self._observe = observe
        timeout = timeout_of(send, ttl)
        self._new_batch: Callable[[str], Batch] = lambda lane: Batch(
            store,
            lane,
            owner=owner,
            limit=limit,
            ttl=ttl,
            timeout=timeout,
            mark_every=mark_every,
            max_attempts=max_attempts,
            goes_on=len(self._lanes) == 1,  # else the others have their turn
            observe=observe,
        )
        for lane in self._lanes:
            self._new_batch(lane.name)  # bad arguments are refused here, not in the loop

    def _is_done(self, moved: bool) -> bool:
        """Whether a round over all lanes found nothing to send, and no lane waits to be tried again."""
        return not moved and not any(lane.failures for lane in self._lanes)

    def _pause(self) -> float:
        """Seconds until a lane is worth another look."""
        return min(lane.wait(self._poll) for lane in self._lanes)

    def _failed(self, lane: _Lane, error: Exception) -> None:
        lane.failed()
        if not isinstance(error, (Blocked, LeaseLost)):  # those were observed where they happened
            self._observe(Observed.TROUBLE, lane=lane.name, error=repr(error))


class Relay(RelayBase):
    """The long-running form: sends the events of its lanes until it is told to stop.

    Any number of relays may run; one at a time holds a lane, and takes over within ``ttl`` seconds
    when another has died. A single lane is kept for as long as there are events; several have up to
    ``limit`` events each, in turn. ``send`` must return within ``ttl``. After a failure the lane waits
    as ``retry`` says (capped exponential, full jitter); with nothing to send it looks again after
    ``poll`` seconds. The options and their defaults are those of `RelayBase`.

    An event that keeps failing blocks its lane, which keeps the order and is observed as
    ``relay.failed`` each time. With ``max_attempts`` it is quarantined after as many, the lane goes
    on, and the order is what ``outbox.requeue`` makes of it. ``mark_every`` up to 100 marks as many
    acknowledged events in one statement; a crash then sends up to as many again.
    """

    def __init__(self, store: Store, send: Send, **options: Unpack[RelayOptions]) -> None:
        super().__init__(store, send, **options)
        self._stopped = False
        self._woken: SimpleQueue[None] = SimpleQueue()  # its `put` may interrupt its `get`, as signals do

    def stop(self) -> None:
        """Finish the event that is being sent, mark it, give the lane back and return from `run`."""
        self._stopped = True
        self._woken.put(None)

    def run(self, *, until_empty: bool = False) -> int:
        """Relay until `stop`, SIGTERM or SIGINT; how many events were sent.

        ``until_empty`` returns as soon as a round over all lanes finds nothing to send; what another
        relay is sending is not waited for. Signals are handled in the main thread only; the former
        handlers are put back at the end.
        """
        total = 0
        with signals(self.stop):
            while not self._stopped:
                batches = [self._turn(lane) for lane in self._lanes if lane.is_due() and not self._stopped]
                total += sum(batch.sent for batch in batches)
                moved = any(batch.moved for batch in batches)
                if until_empty and self._is_done(moved):
                    break
                if not moved:
                    self._wait(self._pause())
        return total

    def _turn(self, lane: _Lane) -> Batch:
        batch = self._new_batch(lane.name)
        try:
            with batch.opened():
                while not self._stopped and batch.next() is not None:
                    if self._deliver(batch):
                        batch.acknowledged()
            lane.succeeded()
        except Exception as error:  # noqa: BLE001 - whatever the sender or the database raises: wait, go on
            self._failed(lane, error)
        return batch

    def _deliver(self, batch: Batch) -> bool:
        event = batch.copy()
        try:
            acknowledge(event.id, self._send(event))
        except Exception as error:
            if batch.failed(error):
                return False
            raise Blocked from error
        return True

    def _wait(self, seconds: float) -> None:
        with suppress(Empty):
            self._woken.get(timeout=seconds)


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


def timeout_of(send: Any, ttl: float) -> float:
    """The sender's own time-out, which the lease must outlast; 0 if it says none."""
    timeout = getattr(send, "timeout", None)
    if not isinstance(timeout, (int, float)):
        return 0.0
    if not timeout < edge.ttl(ttl):
        raise InvalidValue("ttl", f"{ttl!r} must be longer than the sender's timeout of {timeout!r} seconds")
    return timeout


def _names(lanes: Iterable[str]) -> list[str]:
    names = [] if isinstance(lanes, str) else [edge.key("lanes", lane) for lane in lanes]
    if not names:
        raise InvalidValue("lanes", f"must be names of lanes, got {lanes!r}")
    return list(dict.fromkeys(names))


@contextmanager
def signals(stop: Callable[[], object]) -> Iterator[None]:
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
