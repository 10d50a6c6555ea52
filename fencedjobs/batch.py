"""One relay's turn on one lane: claim and read, then what becomes of each event, then give back.

It opens no transaction around a send, and ends none late: every step is a short one of its own. Death
at any point leaves what is not marked pending, to be sent again under the same id.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

from fencedjobs import dialects
from fencedjobs import payload as edge
from fencedjobs.errors import InvalidValue, LeaseLost, NotAcknowledged
from fencedjobs.lanes import Failure, Fetched, Lanes
from fencedjobs.metrics import Observed, Observer, logged
from fencedjobs.outbox import BATCH
from fencedjobs.store import Store
from fencedjobs.values import Event, Lease

MARK_EVERY: Final = 100
DIED: Final = "its relay died while sending it"


class Batch:
    """One turn on one lane: which event is next, and what becomes of it.

    Every step is a short transaction of its own, and each carries the count of the next attempt, so
    that it is there before the event is sent. With ``mark_every`` above 1 acknowledged events are
    gathered and marked together, so that a crash sends up to as many again. With ``max_attempts`` an
    event that fails so often, or kills its relay so often, is quarantined, and the lane goes on. With
    ``goes_on`` the next events are read together with the mark of the last, for as long as there are any.
    """

    def __init__(
        self,
        store: Store,
        lane: str,
        *,
        owner: str | None = None,
        limit: int = BATCH,
        ttl: float = 60,
        timeout: float = 0.0,
        mark_every: int = 1,
        max_attempts: int | None = None,
        goes_on: bool = False,
        observe: Observer = logged,
    ) -> None:
        self._store = store
        self._at_once = dialects.capabilities(store.transactions.engine.dialect).arrays
        self._lane = edge.key("lane", lane)
        self._owner = store.who(owner)
        self._ttl = edge.ttl(ttl)
        self._fresh = min(ttl / 2, ttl - timeout)
        self._gathers = edge.whole("mark_every", mark_every, least=1, most=MARK_EVERY)
        self._limit = max(edge.whole("limit", limit, least=1, most=BATCH), self._gathers)
        self._max_attempts = (
            None if max_attempts is None else edge.whole("max_attempts", max_attempts, least=1)
        )
        if self._max_attempts == 1 and self._gathers > 1:
            raise InvalidValue(
                "mark_every", "must be 1 with max_attempts=1: a crash tells of no single event"
            )
        self._goes_on = goes_on
        self._observe = observe
        self._lease: Lease | None = None
        self._waiting: list[Fetched] = []
        self._acknowledged: list[Fetched] = []
        self._begun: Fetched | None = None
        self._settled_at = 0.0
        self.sent = 0
        self.moved = False  #: whether any event was sent or set aside

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
            lambda tx: Lanes(tx).take(self._lane, self._owner, limit=self._limit, ttl=self._ttl)
        )
        if taken is None:
            return
        self._lease, self._waiting = taken
        self._settled_at = time.monotonic()
        self._have_read()

    def _have_read(self) -> None:
        """Which of those gathered before was to blame for a crash shows only one by one."""
        self._mark_every = 1 if self._waiting and self._waiting[0].attempt > 1 else self._gathers

    def next(self) -> Event | None:
        """The event to send now; events with their attempts used up are quarantined on the way."""
        while self._waiting and self._used_up(self._waiting[0].attempt - 1):
            self._set_aside(self._waiting[0])
        return self._waiting[0] if self._waiting else None

    def copy(self) -> Event:
        """A copy of the event to send: whatever is done to it changes nothing here."""
        event = self._begun = self._waiting[0]
        return event.copy()

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
        is_old = time.monotonic() - self._settled_at >= self._fresh  # the lane's lease must outlast a send
        if len(self._acknowledged) >= self._mark_every or not self._waiting or is_old:
            self._settle(more=self._limit if self._goes_on and not self._waiting else 0)

    def failed(self, error: BaseException) -> bool:
        """The delivery failed: keep the error; whether the event was set aside, so that the lane goes on."""
        event = self._waiting.pop(0)
        kind, text = edge.described(error)
        aside = "attempts used up" if self._used_up(event.attempt) else None
        if aside is None:
            self._waiting = []  # nothing overtakes it
        self._settle(Failure(event, edge.sanitised(f"{kind}: {text}"), aside, event.attempt))
        return aside is not None

    def close(self) -> None:
        """Mark what is gathered and give the lane back, unless another relay has it already."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        sent, unsent = self._acknowledged, self._waiting[0] if self._waiting else None
        if unsent is self._begun:  # whether it arrived or not, that was an attempt
            unsent = None
        with self._losing(lease):
            self._store.run(lambda tx: Lanes(tx).give_back(lease, sent, unsent, ttl=self._ttl), subject=lease)
        self._count(sent)

    def _set_aside(self, event: Fetched) -> None:
        """Quarantine it unsent, with the error of its last attempt; if that left none, its relay died."""
        attempts = event.attempt - 1
        error = self._store.run(lambda tx: Lanes(tx).last_words(event, attempts))
        self._waiting.pop(0)
        self._settle(Failure(event, error or DIED, "attempts used up", attempts))

    def _used_up(self, attempts: int) -> bool:
        return self._max_attempts is not None and attempts >= self._max_attempts

    def _settle(self, failure: Failure | None = None, more: int = 0) -> None:
        """Write down what became of events, and count the attempt of the next one; see `Lanes.settle`."""
        lease, sent, then = self._lease, self._acknowledged, self._waiting[0] if self._waiting else None
        assert lease is not None, "the lane was given back"
        single = bool(sent) and failure is None and self._at_once
        with self._losing(lease):
            settled = self._store.run(
                lambda tx: Lanes(tx).settle(lease, sent, failure, then, ttl=self._ttl, more=more),
                subject=lease,
                single=single,
            )
        kept = self._lease = settled.lease
        self._settled_at = time.monotonic()
        if not settled.goes_on:
            self._waiting = settled.more  # what there is else is read anew
            self._have_read()
        elif kept.fence != lease.fence:
            self._waiting = [replace(event, fence=kept.fence) for event in self._waiting]
        self._count(sent)
        if failure is not None:
            self._observe_failure(failure)

    @contextmanager
    def _losing(self, lease: Lease) -> Iterator[None]:
        try:
            yield
        except LeaseLost:
            self._lease = None
            self._observe(Observed.LANE_LOST, lane=self._lane, owner=lease.owner, fence=lease.fence)
            raise

    def _count(self, sent: list[Fetched]) -> None:
        self._acknowledged = []
        self.sent += len(sent)
        self.moved = self.moved or bool(sent)
        for event in sent:
            facts = {"lane": event.lane, "id": event.id, "attempt": event.attempt, "fence": event.fence}
            self._observe(Observed.SENT, **facts)

    def _observe_failure(self, failure: Failure) -> None:
        event = failure.event
        self.moved = self.moved or failure.aside is not None
        what = Observed.FAILED if failure.aside is None else Observed.QUARANTINED
        facts = {"lane": event.lane, "id": event.id, "attempt": failure.attempts, "error": failure.error}
        self._observe(what, **facts)


def acknowledge(id: str, answer: Any) -> None:
    """Raise `NotAcknowledged` unless the answer is the exact ``True``."""
    if answer is not True:
        raise NotAcknowledged(id, answer)
