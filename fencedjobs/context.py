"""What a handler is called with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any

from fencedjobs.attempt import Attempt
from fencedjobs.errors import LeaseLost, TransactionLost
from fencedjobs.store import Store
from fencedjobs.uow import UnitOfWork
from fencedjobs.values import JobLease

if TYPE_CHECKING:
    from fencedjobs.aio import AsyncStore, AsyncUnitOfWork


class BaseContext:
    """One attempt at a job, as its handler sees it."""

    def __init__(self, attempt: Attempt, committed: Callable[[Attempt], None]) -> None:
        self._attempt = attempt
        self._committed = committed

    @property
    def lease(self) -> JobLease:
        """The lease as it was last renewed."""
        return self._attempt.lease

    @property
    def id(self) -> str:
        """The job's id."""
        return str(self.lease.id)

    @property
    def kind(self) -> str:
        """What picked this handler."""
        return self.lease.kind

    @property
    def queue(self) -> str:
        """The queue that the job was in."""
        return self.lease.queue

    @property
    def payload(self) -> Any:
        """The job's JSON value."""
        return self.lease.payload

    @property
    def attempt(self) -> int:
        """The number of this attempt; the first is 1."""
        return self.lease.attempt

    @property
    def fence(self) -> int:
        """The fence of this attempt, for systems outside of the database; see docs/guards.md."""
        return self.lease.fence

    @property
    def deadline(self) -> float | None:
        """When the job must have ended, in seconds of the store's clock; ``None`` if it need not."""
        return self.lease.deadline

    @property
    def progress(self) -> Any:
        """What the last `checkpoint` of the job kept, of this attempt or a former one; else ``None``."""
        return self._attempt.progress

    @property
    def lost(self) -> Event:
        """Set when the lease is lost, or the worker will not wait for this handler any longer."""
        return self._attempt.lost

    @property
    def remaining(self) -> float:
        """Seconds that the lease surely lasts if it is not renewed any more."""
        return self._attempt.remaining

    def check(self) -> None:
        """`LeaseLost` if the lease is lost or has run out: go no further. Asks the local clock only."""
        if self._attempt.is_lost or self._attempt.remaining <= 0:
            raise LeaseLost(self.lease)

    @contextmanager
    def _refusable(self) -> Iterator[None]:
        """A write that the database refuses when the lease is over; the handler may swallow that."""
        try:
            yield
        except LeaseLost as lost:
            self._attempt.failure = lost
            raise

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Around a transaction that completes the job: what became of it is kept with the attempt."""
        if self._attempt.completed:
            raise TransactionLost(f"job {self.id!r} was completed by an earlier transaction of its handler")
        try:
            yield
        except BaseException as error:
            if self._was_completed(error):
                self._completed()
            else:
                self._attempt.transaction_failed(error)
            raise
        self._completed()

    def _was_completed(self, error: BaseException) -> bool:
        """Whether the job is done all the same, by a transaction of this attempt whose answer was lost."""
        return isinstance(error, LeaseLost) and error.completed and self._attempt.is_subject(error.held)

    def _completed(self) -> None:
        self._attempt.transaction_succeeded()
        self._committed(self._attempt)


class Context(BaseContext):
    """One attempt at a job, as a handler in a `Worker` sees it.

    What the handler returns is the job's result; it raises `Snooze`, `Quarantine` or `Cancel` to end
    the job otherwise, and any other error to have it tried again.
    """

    def __init__(self, store: Store, attempt: Attempt, committed: Callable[[Attempt], None]) -> None:
        super().__init__(attempt, committed)
        self._store = store

    @contextmanager
    def transaction(self, result: Any = None) -> Iterator[UnitOfWork]:
        """Business writes and the completion of the job, together or not at all.

        The block writes through ``uow.session``; at its end the job is completed with ``result`` and
        all is committed, see `Store.completing`. If that fails, nothing was written and the block may
        be tried again, unless the error is `LeaseLost`; a handler that returns after a transaction
        that failed has failed with it, whether it let the error out or not. Once it is committed the
        job is done, and what the handler returns or raises changes nothing any more.
        """
        with self._ending(), self._store.completing(self.lease, result) as uow:
            yield uow
            self._attempt.committing = True

    def checkpoint(self, data: Any) -> None:
        """Keep a JSON value with the job, in a short transaction of its own: the next attempt finds it.

        `LeaseLost` if the lease is lost, and then nothing is kept.
        """
        with self._refusable():
            self._store.checkpoint(self.lease, data)
        self._attempt.progress = data


class AsyncContext(BaseContext):
    """One attempt at a job, as a handler in an `AsyncWorker` sees it; see `Context`.

    The handler is cancelled when the lease is lost.
    """

    def __init__(self, store: AsyncStore, attempt: Attempt, committed: Callable[[Attempt], None]) -> None:
        super().__init__(attempt, committed)
        self._store = store

    @asynccontextmanager
    async def transaction(self, result: Any = None) -> AsyncIterator[AsyncUnitOfWork]:
        """Business writes and the completion of the job, together or not at all; see `Context`."""
        with self._ending():
            async with self._store.completing(self.lease, result) as uow:
                yield uow
                self._attempt.committing = True

    async def checkpoint(self, data: Any) -> None:
        """Keep a JSON value with the job; see `Context`."""
        with self._refusable():
            await self._store.checkpoint(self.lease, data)
        self._attempt.progress = data
