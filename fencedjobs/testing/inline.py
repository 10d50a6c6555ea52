"""Run a worker's due jobs here and now, for unit tests: no threads, no heartbeat, no waiting."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any, Final

from fencedjobs.attempt import Attempt
from fencedjobs.context import AsyncContext, Context
from fencedjobs.handlers import Verdict
from fencedjobs.settling import ending_of
from fencedjobs.store import Store
from fencedjobs.values import JobLease
from fencedjobs.worker import WorkerBase

_TTL: Final = 3600.0
_FOREVER: Final = float("inf")


def drain(worker: WorkerBase, store: Store, *, raising: bool = True, limit: int = 1000) -> list[str]:
    """Run what is due on ``store`` with the handlers of ``worker``, one after the other; the ids, in order.

    Jobs that handlers enqueue are run as well. An error of a handler comes out when its job has been
    failed; with ``raising=False`` the job is failed and the others are run. `AssertionError` after
    ``limit`` jobs, so that a job that enqueues itself does not run for ever.
    """
    ran = []
    for lease in _leases(worker, store, limit):
        attempt = Attempt(lease, worker.handlers.of(lease.kind), _FOREVER, _FOREVER)
        result: Any = None
        error: BaseException | None = None
        try:
            result = attempt.handler.function(Context(store, attempt, lambda _: None))
            if inspect.iscoroutine(result):
                result = asyncio.run(_awaited(result))
        except Exception as raised:  # noqa: BLE001 - it comes out below
            error = raised
        _end(store, attempt, result, error, raising)
        ran.append(str(lease.id))
    return ran


async def drain_async(worker: Any, store: Any, *, raising: bool = True, limit: int = 1000) -> list[str]:
    """`drain` for an `AsyncWorker` on an `AsyncStore`."""
    from sqlalchemy.util import greenlet_spawn

    ran: list[str] = []
    leases = _leases(worker, store.sync_store, limit)
    while (lease := await greenlet_spawn(next, leases, None)) is not None:
        attempt = Attempt(lease, worker.handlers.of(lease.kind), _FOREVER, _FOREVER)
        result: Any = None
        error: BaseException | None = None
        try:
            result = attempt.handler.function(AsyncContext(store, attempt, lambda _: None))
            if inspect.isawaitable(result):
                result = await result
        except Exception as raised:  # noqa: BLE001 - it comes out below
            error = raised
        await greenlet_spawn(_end, store.sync_store, attempt, result, error, raising)
        ran.append(str(lease.id))
    return ran


async def _awaited(result: Any) -> Any:
    return await result


def _leases(worker: WorkerBase, store: Store, limit: int) -> Iterator[JobLease]:
    """The due jobs of the worker's queues and kinds, claimed one by one."""
    number = 0
    while leases := _next(worker, store):
        number += 1
        assert number <= limit, f"{limit} jobs have been run, and there are more: does one enqueue itself?"
        yield from leases


def _next(worker: WorkerBase, store: Store) -> list[JobLease]:
    for queue in worker.queues:
        if leases := store.claim_many(ttl=_TTL, limit=1, queue=queue, kinds=worker.handlers.kinds):
            return leases
    return []


def _end(store: Store, attempt: Attempt, result: Any, error: BaseException | None, raising: bool) -> None:
    if not attempt.completed:
        failure = attempt.failure if error is None else error  # of a transaction that the handler swallowed
        ending_of(attempt.handler, result, failure).write(store, attempt)
    if error is not None and raising and not isinstance(error, Verdict):
        raise error
