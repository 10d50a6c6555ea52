"""The async forms: one line a verb, over the one sync core.

`greenlet_spawn` runs the sync verb, and SQLAlchemy awaits the async driver inside it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from traceback import clear_frames
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import ColumnElement, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only, greenlet_spawn

from fencedjobs.errors import InvalidValue
from fencedjobs.facets import StoreGuards, StoreHeld, StoreInbox, StoreLeases, StoreLocks, StoreOutbox
from fencedjobs.guards import JoinedGuards
from fencedjobs.inbox import JoinedInbox
from fencedjobs.jobs import JoinedJobs
from fencedjobs.outbox import JoinedOutbox
from fencedjobs.own import Transactions
from fencedjobs.proof import Hearing
from fencedjobs.row_leases import JoinedLeases
from fencedjobs.store import Store, maker_of, refuse_used
from fencedjobs.transaction import Clock
from fencedjobs.uow import UnitOfWork
from fencedjobs.values import JobLease

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


async def _spawn(work: Callable[[], T]) -> T:
    try:
        return await greenlet_spawn(work)
    except asyncio.CancelledError as error:
        _let_go(error)
        raise


def _let_go(error: BaseException) -> None:
    """Free what the frames of a cancelled call hold.

    They hold the cursor of the statement that was cancelled, in a circle. SQLite keeps a lock as long
    as a statement of a closed connection lives, which would be until the next garbage collection.
    """
    clear_frames(error.__traceback__)


def _awaited(verb: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A sync verb of ``self._sync``, to be awaited; with the same arguments and documentation."""

    @functools.wraps(verb)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _spawn(lambda: verb(self._sync, *args, **kwargs))

    return call


def _joined(verb: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A verb of a unit of work, to be awaited in the session's transaction."""

    @functools.wraps(verb)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _spawn(lambda: verb(self._verbs(), *args, **kwargs))

    return call


class _GreenTransactions(Transactions):
    """Transactions inside a greenlet: they must not block the loop when they wait."""

    def sleep(self, seconds: float) -> None:
        await_only(asyncio.sleep(seconds))


class _GreenStore(Store):
    def _on(self, engine: Engine) -> Transactions:
        return _GreenTransactions(engine, schema=self._schema, clock=self._clock, notify=self._notify)


class AsyncJobs:
    """The verbs of jobs in the caller's transaction, to be awaited; see `JoinedJobs`."""

    def __init__(self, verbs: Callable[[], JoinedJobs]) -> None:
        self._verbs = verbs

    enqueue = _joined(JoinedJobs.enqueue)
    enqueue_many = _joined(JoinedJobs.enqueue_many)
    complete = _joined(JoinedJobs.complete)
    complete_many = _joined(JoinedJobs.complete_many)
    checkpoint = _joined(JoinedJobs.checkpoint)
    set_aside = _joined(JoinedJobs.set_aside)
    fail = _joined(JoinedJobs.fail)
    release = _joined(JoinedJobs.release)
    cancel = _joined(JoinedJobs.cancel)
    quarantine = _joined(JoinedJobs.quarantine)
    requeue = _joined(JoinedJobs.requeue)
    sweep = _joined(JoinedJobs.sweep)
    purge = _joined(JoinedJobs.purge)
    get = _joined(JoinedJobs.get)
    counts = _joined(JoinedJobs.counts)
    oldest_waiting = _joined(JoinedJobs.oldest_waiting)


class AsyncOutbox:
    """The outbox in the caller's transaction, to be awaited; see `JoinedOutbox`."""

    def __init__(self, verbs: Callable[[], JoinedOutbox]) -> None:
        self._verbs = verbs

    add = _joined(JoinedOutbox.add)
    pending = _joined(JoinedOutbox.pending)
    quarantine = _joined(JoinedOutbox.quarantine)
    requeue = _joined(JoinedOutbox.requeue)
    get = _joined(JoinedOutbox.get)
    stats = _joined(JoinedOutbox.stats)
    purge = _joined(JoinedOutbox.purge)


class AsyncInbox:
    """The inbox in the caller's transaction, to be awaited; see `JoinedInbox`."""

    def __init__(self, verbs: Callable[[], JoinedInbox]) -> None:
        self._verbs = verbs

    accept = _joined(JoinedInbox.accept)
    record_conflict = _joined(JoinedInbox.record_conflict)
    stats = _joined(JoinedInbox.stats)
    purge = _joined(JoinedInbox.purge)


class AsyncGuards:
    """The guards in the caller's transaction, to be awaited; see `JoinedGuards`."""

    def __init__(self, verbs: Callable[[], JoinedGuards]) -> None:
        self._verbs = verbs

    admit = _joined(JoinedGuards.admit)
    highest = _joined(JoinedGuards.highest)


class AsyncJoinedLeases:
    """Leases on a host's table in the caller's transaction, to be awaited; see `JoinedLeases`."""

    def __init__(self, verbs: Callable[[], JoinedLeases]) -> None:
        self._verbs = verbs

    check = _joined(JoinedLeases.check)
    release = _joined(JoinedLeases.release)
    settle = _joined(JoinedLeases.settle)
    get = _joined(JoinedLeases.get)


class AsyncUnitOfWork:
    """fencedjobs inside a transaction of the caller's `AsyncSession`; see `UnitOfWork`."""

    def __init__(
        self,
        session: AsyncSession | async_scoped_session[Any],
        *,
        schema: str | None = None,
        clock: Clock | None = None,
        notify: bool = True,
    ) -> None:
        self.session: AsyncSession = session() if isinstance(session, async_scoped_session) else session
        self._join = functools.partial(
            UnitOfWork, self.session.sync_session, schema=schema, clock=clock, notify=notify
        )
        self.jobs = AsyncJobs(lambda: self._join().jobs)
        self.outbox = AsyncOutbox(lambda: self._join().outbox)
        self.inbox = AsyncInbox(lambda: self._join().inbox)
        self.guards = AsyncGuards(lambda: self._join().guards)

    def leases(self, model: type[Any], open: ColumnElement[bool] | None = None) -> AsyncJoinedLeases:
        """The leases of a mapped class of the host with `LeaseMixin`; see `UnitOfWork.leases`."""
        return AsyncJoinedLeases(lambda: self._join().leases(model, open))


class AsyncStoreHeld:
    """What ends, extends or checks a lease, to be awaited; see `StoreHeld`."""

    def __init__(self, sync: StoreHeld) -> None:
        self._sync = sync

    renew = _awaited(StoreHeld.renew)
    release = _awaited(StoreHeld.release)
    check = _awaited(StoreHeld.check)


class AsyncStoreLeases(AsyncStoreHeld):
    """Leases on a table of the host, each verb in a short transaction of its own; see `StoreLeases`."""

    claim = _awaited(StoreLeases.claim)
    claim_where = _awaited(StoreLeases.claim_where)
    get = _awaited(StoreLeases.get)
    settle = _awaited(StoreLeases.settle)


class AsyncStoreLocks(AsyncStoreHeld):
    """Named locks, each verb in a short transaction of its own; see `StoreLocks`."""

    claim = _awaited(StoreLocks.claim)
    get = _awaited(StoreLocks.get)


class AsyncStoreOutbox:
    """The outbox, each verb in a short transaction of its own; see `StoreOutbox`."""

    def __init__(self, sync: StoreOutbox) -> None:
        self._sync = sync

    add = _awaited(StoreOutbox.add)
    pending = _awaited(StoreOutbox.pending)
    quarantine = _awaited(StoreOutbox.quarantine)
    requeue = _awaited(StoreOutbox.requeue)
    get = _awaited(StoreOutbox.get)
    stats = _awaited(StoreOutbox.stats)
    purge = _awaited(StoreOutbox.purge)


class AsyncStoreInbox:
    """The inbox, each verb in a short transaction of its own; see `StoreInbox`."""

    def __init__(self, sync: StoreInbox) -> None:
        self._sync = sync

    accept = _awaited(StoreInbox.accept)
    record_conflict = _awaited(StoreInbox.record_conflict)
    stats = _awaited(StoreInbox.stats)
    purge = _awaited(StoreInbox.purge)


class AsyncStoreGuards:
    """The guards, each verb in a short transaction of its own; see `StoreGuards`."""

    def __init__(self, sync: StoreGuards) -> None:
        self._sync = sync

    admit = _awaited(StoreGuards.admit)
    highest = _awaited(StoreGuards.highest)


class _AsyncSessions:
    """`Sessions` for an ``async_sessionmaker``."""

    def __init__(self, maker: async_sessionmaker[Any]) -> None:
        self._maker = maker
        self._hearing: Hearing | None = None

    @classmethod
    def of(cls, maker: Callable[[], AsyncSession]) -> Callable[[], AsyncSession]:
        return cls(maker) if type(maker) is async_sessionmaker else maker

    def __call__(self) -> AsyncSession:
        options = dict(self._maker.kw)
        of = options.get("sync_session_class") or self._maker.class_.sync_session_class
        if self._hearing is None or self._hearing.of is not of:
            self._hearing = Hearing(of)
        options["sync_session_class"] = self._hearing.session_class
        if isinstance(options.get("bind"), AsyncEngine) and not options.get("binds"):
            options["bind"] = AsyncEngine(self._hearing.engine(options["bind"].sync_engine))
        session: AsyncSession = self._maker.class_(**options)
        return session


class AsyncStore:
    """`Store` for an `AsyncEngine` or an `async_sessionmaker`: the same verbs, to be awaited."""

    def __init__(
        self,
        bind: AsyncEngine | async_sessionmaker[Any] | Callable[[], AsyncSession],
        *,
        schema: str | None = None,
        clock: Clock | None = None,
        notify: bool = True,
    ) -> None:
        if not (isinstance(bind, AsyncEngine) or callable(bind)):
            raise InvalidValue(
                "bind", f"must be an AsyncEngine or async_sessionmaker, got {type(bind).__name__}"
            )
        self._sessions = _AsyncSessions.of(
            async_sessionmaker(bind) if isinstance(bind, AsyncEngine) else maker_of(bind)
        )
        source: Any = bind.sync_engine if isinstance(bind, AsyncEngine) else self._sync_session
        self._options: dict[str, Any] = {"schema": schema, "clock": clock, "notify": notify}
        self._sync = _GreenStore(source, **self._options)
        self.locks = AsyncStoreLocks(self._sync.locks)
        self.outbox = AsyncStoreOutbox(self._sync.outbox)
        self.inbox = AsyncStoreInbox(self._sync.inbox)
        self.guards = AsyncStoreGuards(self._sync.guards)

    @property
    def sync_store(self) -> Store:
        """The sync core, to be used inside ``greenlet_spawn`` only."""
        return self._sync

    @property
    def schema(self) -> str | None:
        """The schema that the tables are in; ``None`` for the default one."""
        return self._sync.schema

    @property
    def owner(self) -> str:
        """The default owner: host, process and a random part, so that no two incarnations share it."""
        return self._sync.owner

    enqueue = _awaited(Store.enqueue)
    enqueue_many = _awaited(Store.enqueue_many)
    claim = _awaited(Store.claim)
    claim_many = _awaited(Store.claim_many)
    renew = _awaited(Store.renew)
    renew_many = _awaited(Store.renew_many)
    complete = _awaited(Store.complete)
    complete_many = _awaited(Store.complete_many)
    checkpoint = _awaited(Store.checkpoint)
    set_aside = _awaited(Store.set_aside)
    fail = _awaited(Store.fail)
    release = _awaited(Store.release)
    cancel = _awaited(Store.cancel)
    quarantine = _awaited(Store.quarantine)
    requeue = _awaited(Store.requeue)
    sweep = _awaited(Store.sweep)
    purge = _awaited(Store.purge)
    get = _awaited(Store.get)
    counts = _awaited(Store.counts)
    oldest_waiting = _awaited(Store.oldest_waiting)
    outcome = _awaited(Store.outcome)
    now = _awaited(Store.now)

    def leases(self, model: type[Any], open: ColumnElement[bool] | None = None) -> AsyncStoreLeases:
        """The leases of a mapped class of the host with `LeaseMixin`; see `Store.leases`."""
        return AsyncStoreLeases(self._sync.leases(model, open))

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncUnitOfWork]:
        """One short transaction on a session of the store's; see `Store.begin`."""
        async with self._new_session() as session, self._entered(session, self._sync.in_session) as uow:
            yield uow

    @asynccontextmanager
    async def completing(
        self, lease: JobLease, result: Any = None, *, now: float | None = None
    ) -> AsyncIterator[AsyncUnitOfWork]:
        """Business writes and the completion of the job, together or not at all; see `Store.completing`."""
        completing = functools.partial(self._sync.completing_in, lease=lease, result=result, now=now)
        async with self._new_session() as session, self._entered(session, completing) as uow:
            yield uow

    @asynccontextmanager
    async def _entered(
        self, session: AsyncSession, enter: Callable[[Session], AbstractContextManager[Any]]
    ) -> AsyncIterator[AsyncUnitOfWork]:
        block = enter(session.sync_session)
        await _spawn(block.__enter__)
        try:
            yield AsyncUnitOfWork(session, **self._options)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                _let_go(error)
            await greenlet_spawn(block.__exit__, type(error), error, error.__traceback__)
            raise
        await _spawn(lambda: block.__exit__(None, None, None))

    def _new_session(self) -> AsyncSession:
        session: AsyncSession = self._sessions()
        refuse_used(session.sync_session)
        return session

    def _sync_session(self) -> Session:
        session: Session = self._sessions().sync_session
        return session
