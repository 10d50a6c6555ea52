"""Five verbs that any queue has, so that one that is not ours can be checked too.

    class Mine:
        def enqueue(self, id, now): ...
        ...

    print(history.trial(Mine(), seed=1) or "no contradiction found")

The contract for them is that of leases. A claim takes a job that is free, or whose lease ended at or
before ``now``, until ``now + ttl``. Renew and complete change something, and say so, only for the
attempt that the claim's token names, and only while its lease runs, which at its very end it does
not. Release does so until another attempt begins. A completed job is not claimed again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from fencedjobs.errors import LeaseLost
from fencedjobs.store import Store
from fencedjobs.values import JobLease


class Queue(Protocol):
    """What is checked. Every verb is told the time, in seconds, and reads no clock.

    Verbs are called from many threads at once. A token is whatever a claim gave, and comes back as it is.
    """

    def enqueue(self, id: str, now: float) -> object:
        """Add a job; nothing if there is one with this id. The answer is not looked at."""
        ...

    def claim(self, worker: str, now: float, ttl: float) -> tuple[str, Any] | None:
        """Any free job until ``now + ttl``: its id, and the token that names this attempt."""
        ...

    def renew(self, id: str, worker: str, token: Any, now: float, ttl: float) -> bool:
        """Let the attempt have the job until ``now + ttl``; whether it still had it."""
        ...

    def complete(self, id: str, worker: str, token: Any, now: float, result: Any) -> bool:
        """The job is done; whether the attempt still had it."""
        ...

    def release(self, id: str, worker: str, token: Any, now: float) -> bool:
        """Give the job back. After the lease's end either answer will do, until somebody else claims it."""
        ...


class StoreQueue:
    """A `Store` by these five verbs, all its jobs in one queue. A token is a `JobLease`."""

    def __init__(self, store: Store, queue: str = "default") -> None:
        self._store = store
        self._queue = queue

    def enqueue(self, id: str, now: float) -> object:
        """See `Queue`."""
        return self._store.enqueue(id, queue=self._queue, now=now)

    def claim(self, worker: str, now: float, ttl: float) -> tuple[str, Hashable] | None:
        """See `Queue`."""
        lease = self._store.claim(worker, ttl=ttl, queue=self._queue, now=now)
        return None if lease is None else (lease.id, lease)

    def renew(self, id: str, worker: str, token: JobLease, now: float, ttl: float) -> bool:
        """See `Queue`."""
        return _kept(lambda: self._store.renew(token, ttl=ttl, now=now))

    def complete(self, id: str, worker: str, token: JobLease, now: float, result: Any) -> bool:
        """See `Queue`."""
        return _kept(lambda: self._store.complete(token, result, now=now))

    def release(self, id: str, worker: str, token: JobLease, now: float) -> bool:
        """See `Queue`."""
        return _kept(lambda: self._store.release(token, now=now))


def _kept(verb: Any) -> bool:
    try:
        verb()
    except LeaseLost:
        return False
    return True
