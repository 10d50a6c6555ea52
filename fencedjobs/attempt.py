"""A job in hand: one attempt, from its claim to its end, as the threads of a worker share it."""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable
from threading import Event, Lock
from typing import Any

from fencedjobs.errors import LeaseLost, OutcomeUnknown
from fencedjobs.handlers import Handler
from fencedjobs.values import JobLease, Lease

clock = time.monotonic


class Attempt:
    """One lease in the hands of a worker.

    Its local end is counted from when the request for the lease was *sent*, so that it is never later
    than the database's. Whoever wants to end the attempt asks `end` first; one is told that it may.
    """

    def __init__(self, lease: JobLease, handler: Handler, ends: float, latest: float) -> None:
        self.lease = lease
        self.handler = handler
        self.ends = min(ends, latest)  #: by the local clock
        self.is_lost = False  #: the handler has been told that it may have no right any more
        self.started: float | None = None
        self.committing = False  #: the completion is on its way, and a refused renewal says nothing
        self.completed = False  #: by the handler's own transaction
        self.failure: BaseException | None = None  #: of the handler's last transaction
        self.unknown = False  #: whether one of its transactions may have completed the job, or not
        self.progress = lease.progress
        self._latest = latest  # the job's deadline, by the local clock
        self._ended = False
        self._told = False
        self._interrupt: Callable[[], object] | None = None
        self._lost: Event | None = None  # made for who asks, since that is most of what an attempt costs
        self._lock = Lock()

    def facts(self) -> dict[str, Any]:
        """What every observation about this attempt says."""
        lease = self.lease
        return {
            "id": lease.id,
            "kind": lease.kind,
            "queue": lease.queue,
            "owner": lease.owner,
            "fence": lease.fence,
            "attempt": lease.attempt,
        }

    @property
    def lost(self) -> Event:
        """Set once `is_lost`, for who waits for it."""
        with self._lock:
            if self._lost is None:
                self._lost = Event()
                if self.is_lost:
                    self._lost.set()
            return self._lost

    @property
    def remaining(self) -> float:
        """Seconds that the lease surely lasts; not above 0 when it may be over."""
        return self.ends - clock()

    @property
    def is_renewed(self) -> bool:
        """Whether there is still a right to keep."""
        return not (self.is_lost or self.completed)

    @property
    def seconds(self) -> float:
        """How long the handler has run."""
        return 0.0 if self.started is None else clock() - self.started

    @property
    def overdue_at(self) -> float:
        """When the handler will have run too long, by the local clock."""
        if self.handler.max_runtime is None or self._ended:
            return float("inf")
        started = self.started  # not before now, if it has not been called yet
        return (clock() if started is None else started) + self.handler.max_runtime

    def renewed(self, lease: JobLease, ends: float) -> None:
        """The database has extended the lease."""
        self.lease, self.ends = lease, min(ends, self._latest)

    def transaction_failed(self, error: BaseException) -> None:
        """The handler's transaction was rolled back, or nobody knows: its COMMIT may have been sent."""
        cut = self.committing and not isinstance(error, Exception)  # as by a cancellation
        self.failure = error
        self.unknown = (
            self.unknown or cut or (isinstance(error, OutcomeUnknown) and self.is_subject(error.subject))
        )
        self.committing = self.unknown

    def transaction_succeeded(self) -> None:
        """The handler's transaction has completed the job: renewals are refused from now on."""
        self.failure, self.completed, self.unknown = None, True, False

    def is_over(self, error: BaseException | None) -> bool:
        """Whether the handler ended because its lease was lost: there is nothing left to write."""
        if isinstance(error, LeaseLost):
            return self.is_subject(error.held)
        return self.is_lost and isinstance(error, CancelledError)

    def is_subject(self, lease: Any) -> bool:
        """Whether it is the lease of this attempt, renewed or not."""
        return isinstance(lease, Lease) and (lease.id, lease.fence) == (self.lease.id, self.lease.fence)

    def begin(self) -> bool:
        """The handler starts; false if the attempt was ended before."""
        with self._lock:
            if not self._ended:
                self.started = clock()
            return not self._ended

    def end(self) -> bool:
        """Whether it is up to the caller to end the attempt: true for the first alone."""
        with self._lock:
            first, self._ended = not self._ended, True
            return first

    def tell_completed(self) -> bool:
        """Whether the caller is the first to learn that the job is done: once it is observed and counted."""
        with self._lock:
            first, self._told = not self._told, True
            return first

    def lose(self) -> bool:
        """Tell the handler that it has no right any more; whether it had not been told yet."""
        with self._lock:
            first, interrupt, self.is_lost = not self.is_lost, self._interrupt, True
            if self._lost is not None:
                self._lost.set()
        if first and interrupt is not None:
            interrupt()
        return first

    def on_lost(self, interrupt: Callable[[], object]) -> None:
        """How to interrupt the handler; done at once if the lease is lost already."""
        with self._lock:
            self._interrupt, lost = interrupt, self.is_lost
        if lost:
            interrupt()


class InHand:
    """The attempts that a worker has not settled yet: those are to be renewed."""

    def __init__(self) -> None:
        self._attempts: dict[Attempt, None] = {}
        self._lock = Lock()

    def add(self, attempts: Iterable[Attempt]) -> None:
        with self._lock:
            self._attempts.update(dict.fromkeys(attempts))

    def discard(self, attempt: Attempt) -> None:
        with self._lock:
            self._attempts.pop(attempt, None)

    def all(self) -> list[Attempt]:
        with self._lock:
            return list(self._attempts)

    def __len__(self) -> int:
        return len(self._attempts)
