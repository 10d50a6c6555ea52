"""The worker: claims jobs, calls their handlers in threads, and sees every attempt to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypedDict, TypeVar, Unpack

from sqlalchemy import Engine
from sqlalchemy.pool import QueuePool

from fencedjobs import payload as edge
from fencedjobs.attempt import Attempt
from fencedjobs.context import Context
from fencedjobs.errors import InvalidValue
from fencedjobs.handlers import Handlers
from fencedjobs.line import apart
from fencedjobs.maintenance import Maintenance
from fencedjobs.metrics import Observed, Observer, harmless, logged
from fencedjobs.relay import signals
from fencedjobs.retry import Retry
from fencedjobs.room import Plan, Room
from fencedjobs.store import Store, new_owner
from fencedjobs.threads import Slots

F = TypeVar("F", bound=Callable[[Any], Any])

_RETRY: Final = Retry()
_WORKERS: Final[Any] = object()  # the worker's own, where a handler says nothing
_MOST: Final = 10_000  # handlers at once

#: Seconds after which a signal is noticed at the latest. One that comes between the interpreter's last look
#: and the system call that waits does not interrupt that, and its handler would not run until the end.
NOTICED: Final = 0.25


class WorkerOptions(TypedDict, total=False):
    """How a worker works; the defaults are those of `WorkerBase`."""

    queues: Iterable[str]
    concurrency: int
    ttl: float
    grace: float
    poll: float
    retry: Retry | None
    max_runtime: float | None
    listen: bool
    maintenance: Maintenance | None
    owner: str | None
    observe: Observer


class WorkerBase:
    """What a worker is told, whatever its handlers run in.

    ``queues`` are claimed from in this order, so that a later one waits for the earlier ones.
    ``concurrency`` is how many handlers run at once, ``ttl`` the seconds of a lease, which is renewed
    three times in that time. When it is told to stop it waits ``grace`` seconds for its handlers. An
    empty queue is looked at again after ``poll`` seconds at the latest, and at once when a job is
    announced (PostgreSQL, with ``listen``). ``retry`` and ``max_runtime`` (seconds) are for handlers
    that say nothing else. ``owner`` is the name in the leases; the default is another one each time
    the worker runs. ``observe`` is called from several threads.
    """

    def __init__(
        self,
        store: Store,
        *,
        queues: Iterable[str] = ("default",),
        concurrency: int = 8,
        ttl: float = 30.0,
        grace: float = 20.0,
        poll: float = 1.0,
        retry: Retry | None = _RETRY,
        max_runtime: float | None = None,
        listen: bool = True,
        maintenance: Maintenance | None = Maintenance(),  # noqa: B008 - immutable, and the default shows
        owner: str | None = None,
        observe: Observer = logged,
    ) -> None:
        self._store = store
        self.queues = _names(queues)
        self._concurrency = edge.whole("concurrency", concurrency, least=1, most=_MOST)
        self._ttl = edge.ttl(ttl)
        self._grace = edge.duration("grace", grace)
        self._poll = _positive("poll", poll)
        self._retry = retry
        self._max_runtime = None if max_runtime is None else _positive("max_runtime", max_runtime)
        self._listen = listen
        self._maintenance = maintenance
        self._owner = None if owner is None else edge.key("owner", owner)
        self._observe = harmless(observe)
        self.handlers = Handlers()  #: by kind
        self._room: Room | None = None

    def handler(
        self, kind: str, *, retry: Retry | None = _WORKERS, max_runtime: float | None = None
    ) -> Callable[[F], F]:
        """Register a function for the jobs of this kind: ``@worker.handler("pack")``.

        It is called with the context of the attempt; what it returns, a JSON value, is the job's
        result. If it raises, the job is tried again as ``retry`` says (``None``: not at all, it is
        quarantined). After ``max_runtime`` seconds the attempt has failed, and the function is
        interrupted if it is async. Jobs of other kinds are not claimed.
        """
        chosen = self._retry if retry is _WORKERS else retry
        limit = self._max_runtime if max_runtime is None else _positive("max_runtime", max_runtime)

        def register(function: F) -> F:
            self.handlers.add(kind, function, retry=chosen, max_runtime=limit)
            return function

        return register

    @property
    def engine(self) -> Engine:
        """The engine of the store, which handlers use; the worker's own connections are made like its."""
        return self._store.transactions.engine

    def stop(self) -> None:
        """Claim no more, wait ``grace`` seconds for the handlers, give the rest back and return from `run`.

        The second time it does not wait. May be called from a handler, another thread or a signal's.
        """
        if self._room is not None:
            self._room.stop()

    def limit(self, *, queues: Iterable[str] | None = None, concurrency: int | None = None) -> None:
        """Use other queues or another concurrency from the next `run` on."""
        if queues is not None:
            self.queues = _names(queues)
        if concurrency is not None:
            self._concurrency = edge.whole("concurrency", concurrency, least=1, most=_MOST)

    def _opened(self, until_empty: bool) -> Room:
        """The engine room for one run; what is wrong is refused here."""
        if not self.handlers.kinds:
            raise InvalidValue("handler", 'register at least one, with @worker.handler("kind")')
        if self._room is not None:
            raise InvalidValue("run", "this worker runs already")
        apart(self.engine).dispose()
        _require_room(self.engine, self._concurrency)
        plan = Plan(
            owner=self._owner or new_owner(),
            queues=self.queues,
            concurrency=self._concurrency,
            ttl=self._ttl,
            grace=self._grace,
            poll=self._poll,
            listen=self._listen,
            maintenance=self._maintenance,
            until_empty=until_empty,
        )
        self._observe(
            Observed.STARTED, owner=plan.owner, queues=list(plan.queues), concurrency=plan.concurrency
        )
        self._room = Room(self._store, self.handlers, plan, self._observe)
        return self._room

    def _closed(self, room: Room) -> int:
        room.join()
        self._room = None
        self._observe(Observed.STOPPED, owner=room.owner, completed=room.completed)
        if room.error is not None:
            raise room.error
        return room.completed


class Worker(WorkerBase):
    """Runs the jobs of its queues in threads until it is told to stop.

    Leases are renewed on a thread and a connection of their own, whatever handlers do. A handler that
    is async runs on an event loop of its own thread. The options are those of `WorkerBase`.

    Delivery is at least once: a job whose worker dies, or loses its lease, is run again elsewhere, and
    what the former attempt still does to it is refused.
    """

    def __init__(self, store: Store, **options: Unpack[WorkerOptions]) -> None:
        if not isinstance(store, Store):
            raise InvalidValue("store", f"must be a Store, got {type(store).__name__}")
        super().__init__(store, **options)

    def run(self, *, until_empty: bool = False) -> int:
        """Work until `stop`, SIGTERM or SIGINT; how many jobs were completed.

        ``until_empty`` returns as soon as nothing can be claimed and no handler runs. Signals are
        handled in the main thread only; the former handlers are put back at the end.
        """
        room, over = self._opened(until_empty), SimpleQueue[None]()
        with signals(self.stop):
            room.start(_Threads(self._store, room, self._concurrency), lambda: over.put(None))
            try:
                _await(over)
            except BaseException:  # a signal handler of the program's own has raised
                room.stop()
                room.stop()
                _await(over)
                room.join()
                self._room = None
                raise
        return self._closed(room)


def _await(over: SimpleQueue[None]) -> None:
    """Wait for the end, looking up now and then; see `NOTICED`."""
    while True:
        try:
            return over.get(timeout=NOTICED)
        except Empty:
            continue


class _Threads:
    """Handlers in threads."""

    def __init__(self, store: Store, room: Room, size: int) -> None:
        self._store = store
        self._room = room
        self._slots = Slots(size, self._work)

    def start(self, attempts: list[Attempt]) -> None:
        self._slots.start(attempts)

    def abandon(self, attempt: Attempt) -> None:
        self._slots.abandon()

    def close(self) -> None:
        self._slots.close()

    def _work(self, attempt: Attempt) -> bool:
        context = Context(self._store, attempt, self._room.committed)
        call = partial(_awaited, attempt) if attempt.handler.is_async else attempt.handler.function
        return work(self._room, attempt, partial(call, context))


def work(room: Room, attempt: Attempt, call: Callable[[], Any]) -> bool:
    """Call a handler in this thread; whether the thread may take another attempt."""
    if not attempt.begin():
        return True
    result: Any = None
    failure: BaseException | None = None
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - whatever it raises is its failure, not the worker's
        failure = error
    return room.finished(attempt, result, failure)


def _awaited(attempt: Attempt, context: Context) -> Any:
    """Run an async handler on an event loop of this thread; it is cancelled when the lease is lost."""

    async def cancellable() -> Any:
        interrupt_on_loss(attempt)
        return await attempt.handler.function(context)

    return asyncio.run(cancellable())


def interrupt_on_loss(attempt: Attempt) -> None:
    """Have the task that runs now cancelled when the attempt loses its lease."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        with suppress(RuntimeError):  # the loop is closed: the handler has returned
            loop.call_soon_threadsafe(task.cancel)

    attempt.on_lost(interrupt)


def _require_room(engine: Engine, concurrency: int) -> None:
    """Refuse a pool in which handlers would wait for each other's connections."""
    pool = engine.pool
    overflow = getattr(pool, "_max_overflow", -1)
    if isinstance(pool, QueuePool) and overflow >= 0 and pool.size() + overflow < concurrency:
        raise InvalidValue(
            "concurrency",
            f"{concurrency} handlers may need as many connections, but the pool of the engine gives "
            f"{pool.size() + overflow}: give it a larger pool_size or max_overflow, or use fewer handlers",
        )


def _names(queues: Iterable[str]) -> tuple[str, ...]:
    names = [] if isinstance(queues, str) else [edge.key("queues", queue) for queue in queues]
    if not names:
        raise InvalidValue("queues", f"must be names of queues, got {queues!r}")
    return tuple(dict.fromkeys(names))


def _positive(field: str, seconds: float) -> float:
    value = edge.duration(field, seconds)
    if value <= 0:
        raise InvalidValue(field, f"must be more than 0 seconds, got {seconds!r}")
    return value
