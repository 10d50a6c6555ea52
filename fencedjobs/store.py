"""The store: every verb in a short transaction of its own, and completion with business writes."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, Self, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from fencedjobs import dialects, schema
from fencedjobs import payload as edge
from fencedjobs.claims import Jobs
from fencedjobs.errors import InvalidValue, UnsupportedDatabase
from fencedjobs.facets import StoreGuards, StoreInbox, StoreLeases, StoreLocks, StoreOutbox, own
from fencedjobs.jobs import JoinedJobs
from fencedjobs.leases import Again, Part
from fencedjobs.own import Transactions
from fencedjobs.proof import Sessions, Token, Watch
from fencedjobs.row_leases import Leases, of_model
from fencedjobs.transaction import JOB, Clock, Transaction, answered, connected, saw_begin
from fencedjobs.uow import UnitOfWork
from fencedjobs.values import JobLease, Lease

P = ParamSpec("P")
T = TypeVar("T")
L = TypeVar("L", bound=Lease)

_CLAIM_PATIENCE: Final = 0.2  # seconds in which a claim looks again for rows that others have locked


class Store:
    """Jobs, locks, outbox and inbox in a database, each verb in a short transaction of its own.

    ``bind`` is an `Engine`, or a `sessionmaker` (any callable that gives sessions) for business
    writes through the host's own session class. ``schema`` is where the tables are, ``clock`` a
    function of the seconds now, instead of the database's clock.

    Transactions run READ COMMITTED whatever the engine's default (BEGIN IMMEDIATE on SQLite), are
    repeated as a whole after deadlocks, serialisation failures and BUSY, for at most 10 seconds, and
    raise `OutcomeUnknown` when the answer to COMMIT is lost. Where one statement is all, it goes without
    BEGIN and COMMIT on PostgreSQL and SQLite, and is its own. The first use checks server and tables:
    `UnsupportedDatabase`, `SchemaMismatch`.

    On PostgreSQL a job that is ready at once wakes the workers that listen, when its transaction has
    committed, and never if it has not. ``notify=False`` leaves them to their polling: NOTIFY makes
    the commits that carry one wait for each other, each until it is on disk and whatever database of
    the server it is in, which many concurrent enqueues may feel.

    A store may be shared by threads. In a forked child it gives the engine a new pool at the first
    use, as SQLAlchemy asks for, and leaves the parent's connections to the parent.
    """

    def __init__(
        self,
        bind: Engine | sessionmaker[Any] | Callable[[], Session],
        *,
        schema: str | None = None,
        clock: Clock | None = None,
        notify: bool = True,
    ) -> None:
        if type(bind).__module__.startswith("sqlalchemy.ext.asyncio"):
            raise InvalidValue("bind", f"{type(bind).__name__} goes with AsyncStore")
        if isinstance(bind, Connection) or not (isinstance(bind, Engine) or callable(bind)):
            raise InvalidValue("bind", f"must be an Engine or a sessionmaker, got {type(bind).__name__}")
        self._sessions = Sessions.of(sessionmaker(bind) if isinstance(bind, Engine) else maker_of(bind))
        self._schema = schema
        self._clock = clock
        self._notify = notify
        self._transactions = self._on(bind) if isinstance(bind, Engine) else None
        self._checked = False
        self._pid = os.getpid()
        self._owner: tuple[int, str] | None = None
        self.locks = StoreLocks(self)
        self.outbox = StoreOutbox(self)
        self.inbox = StoreInbox(self)
        self.guards = StoreGuards(self)

    @property
    def transactions(self) -> Transactions:
        """The store's own transactions, on the engine that the sessions are bound to."""
        if self._transactions is None:
            with self._new_session() as session:
                bind = session.get_bind(JOB)
            if not isinstance(bind, Engine):
                raise UnsupportedDatabase(
                    "the sessions are bound to one connection, where the store cannot have transactions "
                    "of its own; bind them to an Engine, or use UnitOfWork(session)"
                )
            self._transactions = self._on(bind)
        return self._transactions

    def _on(self, engine: Engine) -> Transactions:
        return Transactions(engine, schema=self._schema, clock=self._clock, notify=self._notify)

    def on(self, engine: Engine) -> Self:
        """The same store on another engine."""
        return type(self)(engine, schema=self._schema, clock=self._clock, notify=self._notify)

    @property
    def owner(self) -> str:
        """The default owner: host, process and a random part, so that no two incarnations share it."""
        pid = os.getpid()
        if self._owner is None or self._owner[0] != pid:
            self._owner = (pid, new_owner())
        return self._owner[1]

    @property
    def schema(self) -> str | None:
        """The schema that the tables are in; ``None`` for the default one."""
        return self._schema

    def run(
        self,
        verb: Callable[[Transaction], T],
        *,
        subject: Any = None,
        reading: bool = False,
        single: bool = False,
        direct: bool = True,
    ) -> T:
        """Run ``verb`` in a transaction of its own, on a database that has been checked."""
        self._check()
        return self.transactions.run(verb, subject=subject, reading=reading, single=single, direct=direct)

    @contextmanager
    def begin(self) -> Iterator[UnitOfWork]:
        """One short transaction on a session of the store's: commits at the end, rolls back on an error.

        `TransactionLost`, and nothing is committed, if a statement failed and its error was swallowed
        outside of a savepoint, or if the block ended the transaction itself. `OutcomeUnknown` if the
        answer to COMMIT was lost.
        """
        with self._new_session() as session, self.in_session(session) as uow:
            yield uow

    @contextmanager
    def completing(
        self, lease: JobLease, result: Any = None, *, now: float | None = None
    ) -> Iterator[UnitOfWork]:
        """Business writes and the completion of the job, together or not at all.

        The block writes through ``uow.session``. At its end the session is flushed, the transaction
        is proven whole, the job is completed under its lease, and all is committed. `LeaseLost`,
        `TransactionLost` and the block's own errors roll everything back; see `begin`.
        """
        with self._new_session() as session, self.completing_in(session, lease, result, now=now) as uow:
            yield uow

    @contextmanager
    def completing_in(
        self, session: Session, lease: JobLease, result: Any = None, *, now: float | None = None
    ) -> Iterator[UnitOfWork]:
        """`completing` on a fresh session of the caller's making."""
        if result is not None:
            edge.encode("result", result)
        complete = functools.partial(JoinedJobs.complete, lease=lease, result=result, now=now)
        with self.in_session(session, lambda uow: complete(uow.jobs), subject=lease) as uow:
            yield uow

    @contextmanager
    def in_session(
        self,
        session: Session,
        last: Callable[[UnitOfWork], None] = lambda uow: None,
        subject: Any = None,
    ) -> Iterator[UnitOfWork]:
        """A transaction of the store's on a fresh session; ``last`` runs when the block is proven whole."""
        self._check()
        watch = Watch(self.transactions.patience())
        with (
            self.inbox.counting(),
            self.transactions.alone() as options,
            self._begun(session, options | watch.options) as (uow, connection),
        ):
            token = Token(session, connection, watch)
            try:
                yield uow
                token.redeem()
                last(uow)
                with answered(lambda: subject, lambda: watch.sent):
                    session.commit()
            finally:
                token.close()

    @contextmanager
    def _begun(self, session: Session, options: dict[str, Any]) -> Iterator[tuple[UnitOfWork, Connection]]:
        """The session in a transaction of the store's, which is rolled back on an error."""
        if session.twophase:
            raise UnsupportedDatabase("a twophase session cannot complete a job; use sessions without it")
        patience = self.transactions.patience()
        while True:
            try:
                connection = self._begin(session, options)
                break
            except DBAPIError as error:
                if not (dialects.is_transient(error) and patience()):
                    raise
        try:
            uow = UnitOfWork(session, schema=self._schema, clock=self._clock, notify=self._notify)
            yield uow, connection
        except BaseException:
            dialects.abandon(connection)
            _roll_back(session)
            raise

    def _begin(self, session: Session, options: dict[str, Any]) -> Connection:
        try:
            session.begin()
            connection = connected(session, **options)
            dialects.begun(connection)
        except BaseException:
            _roll_back(session)
            raise
        saw_begin(session)
        return connection

    def _new_session(self) -> Session:
        session = self._sessions()
        refuse_used(session)
        return session

    def _check(self) -> None:
        if self._pid != os.getpid():
            self.transactions.engine.dispose(close=False)
            self._pid, self._checked = os.getpid(), False
        if not self._checked:
            if self.transactions.run(self._require, reading=True, direct=False):
                dialects.refuse_shared_connections(self.transactions.engine)
            self._checked = True

    def _require(self, tx: Transaction) -> bool:
        dialects.require_version(tx.connection)
        schema.require(tx.connection, self._schema)
        return dialects.may_lose_statements(tx.connection)

    # --- jobs -------------------------------------------------------------------------------------

    enqueue = own(JoinedJobs, JoinedJobs.enqueue, single=True)
    enqueue_many = own(JoinedJobs, JoinedJobs.enqueue_many)
    complete = own(JoinedJobs, JoinedJobs.complete, single=True)
    complete_many = own(JoinedJobs, JoinedJobs.complete_many, single=True)
    checkpoint = own(JoinedJobs, JoinedJobs.checkpoint, single=True)
    set_aside = own(JoinedJobs, JoinedJobs.set_aside, single=True)
    fail = own(JoinedJobs, JoinedJobs.fail)
    release = own(JoinedJobs, JoinedJobs.release, single=True)
    cancel = own(JoinedJobs, JoinedJobs.cancel, single=True)
    quarantine = own(JoinedJobs, JoinedJobs.quarantine, single=True)
    requeue = own(JoinedJobs, JoinedJobs.requeue)
    sweep = own(JoinedJobs, JoinedJobs.sweep)
    purge = own(JoinedJobs, JoinedJobs.purge)
    get = own(JoinedJobs, JoinedJobs.get, reading=True, single=True)
    counts = own(JoinedJobs, JoinedJobs.counts, reading=True, single=True)
    oldest_waiting = own(JoinedJobs, JoinedJobs.oldest_waiting, reading=True, single=True)

    def claim(
        self,
        owner: str | None = None,
        *,
        ttl: float,
        id: str | None = None,
        queue: str = "default",
        now: float | None = None,
    ) -> JobLease | None:
        """Take a job for ``ttl`` seconds: the one named ``id`` (in whatever queue), or the next of ``queue``.

        ``None`` if there is nothing to claim. The lease ends at the job's deadline at the latest. The
        attempt counts from now on, and the fence has risen by 1. The claim is committed on return.
        """
        if id is None:
            leases = self.claim_many(owner, ttl=ttl, limit=1, queue=queue, now=now)
            return leases[0] if leases else None
        who = self.who(owner)
        return self.run(lambda tx: Jobs(tx).claim_named(id, who, ttl=ttl, now=now), subject=id, single=True)

    def claim_many(
        self,
        owner: str | None = None,
        *,
        ttl: float,
        limit: int,
        queue: str = "default",
        kinds: Iterable[str] | None = None,
        now: float | None = None,
    ) -> list[JobLease]:
        """Take up to ``limit`` jobs of ``queue``, of these ``kinds`` if given; see `claim`.

        The order is exact among ready jobs: higher priority first, then insertion. An empty list
        means that there is nothing to claim, not that somebody was in the way for a moment.
        """
        who, kinds = self.who(owner), None if kinds is None else list(kinds)

        return self.claiming(
            lambda tx, limit: Jobs(tx).claim_next(
                who, ttl=ttl, limit=limit, queue=queue, kinds=kinds, now=now
            ),
            limit,
            subject=who,
            single=True,
        )

    def claiming(
        self,
        verb: Callable[[Transaction, int], list[L] | Part | Again],
        limit: int,
        *,
        subject: Any,
        single: bool = False,
        direct: bool = True,
    ) -> list[L]:
        """Run a claim of several rows, and again while it says so; a short time if others hold the rows."""
        patience = self.transactions.patience(_CLAIM_PATIENCE)
        found: list[L] = []

        def rest(tx: Transaction) -> list[L] | Part | Again:
            return verb(tx, limit - len(found) if found else limit)  # a limit that the verb is to check

        while True:
            try:
                answer = self.run(rest, subject=subject, single=single, direct=direct)
            except Exception:
                if found:  # they are the caller's; the error comes again if it lasts
                    return found
                raise
            if isinstance(answer, list):
                return found + answer
            if isinstance(answer, Part):
                found += answer.leases
            elif answer is Again.SOON and not patience():
                return found
            single = False

    def renew(self, lease: JobLease, *, ttl: float, now: float | None = None) -> JobLease:
        """The lease with a new end: ``ttl`` seconds from now, at most the deadline.

        `LeaseLost` unless it is held and still runs: what has run out is not revived.
        """
        return self.run(lambda tx: Jobs(tx).renew(lease, ttl=ttl, now=now), subject=lease, single=True)

    def renew_many(
        self, leases: Iterable[JobLease], *, ttl: float, wait: bool = True, now: float | None = None
    ) -> list[JobLease | None]:
        """Renew many leases in one statement; aligned with the input, ``None`` for a lost one.

        Without ``wait`` a lease whose row somebody has locked comes back as it is, not renewed:
        an operator's open transaction on one job must not keep the others from being renewed.
        """
        these = list(leases)
        verb = Jobs.renew_many if wait else Jobs.renew_free
        return self.run(lambda tx: verb(Jobs(tx), these, ttl=ttl, now=now), subject=these)

    def outcome(self, lease: JobLease) -> Any:
        """After `OutcomeUnknown`: what became of the lease, as an `Outcome`.

        Reads the row on another connection and under a lock, so that it waits for a COMMIT that is
        still under way: ``completed`` by this very lease; still ``held`` by it, so that nothing
        was written and the work may be repeated; or ``ended``, by whatever way.
        """
        self._check()
        return self.transactions.run(
            lambda tx: Jobs(tx).outcome(lease), subject=lease, reading=True, current=True
        )

    def now(self) -> float:
        """The instant that the store compares with: of its clock, else of the database's.

        (Of the process's on SQLite, where SQL has milliseconds only.)
        """
        return self.run(Transaction.clock, reading=True)

    def leases(self, model: type[Any], open: ColumnElement[bool] | None = None) -> StoreLeases:
        """The leases of a mapped class of the host with `LeaseMixin`, each verb in an own transaction.

        ``open`` is the condition under which a row can still be worked on.
        """
        leased = of_model(model, open)
        return StoreLeases(self, lambda tx: Leases(tx, leased))

    def who(self, owner: str | None) -> str:
        """The owner as given, or the default one."""
        return self.owner if owner is None else edge.key("owner", owner)


def new_owner() -> str:
    """The name of one incarnation of a worker: host, process and a random part."""
    return f"{socket.gethostname()[:200]}:{os.getpid()}:{secrets.token_hex(6)}"


def maker_of(bind: Any) -> Any:
    """What makes new sessions: of a ``scoped_session``, whose session is the host's, what is behind it."""
    return getattr(bind, "session_factory", bind)


def refuse_used(session: Session) -> None:
    """Refuse a session that is in a transaction, before it is closed and its transaction lost."""
    if session.in_transaction():
        raise UnsupportedDatabase(
            "the store was given a session that is in a transaction already; it needs new ones, as from "
            "a sessionmaker. Within a transaction of yours use UnitOfWork(session)"
        )


def _roll_back(session: Session) -> None:
    """Roll back and raise nothing, so that the error that led here comes out."""
    for way in (session.rollback, session.close, session.invalidate):
        try:
            way()
        except Exception:  # noqa: BLE001 - then the next way, which asks less of the connection
            continue
        return
