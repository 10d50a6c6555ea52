"""The parts of a store: the verbs of locks, leases, outbox, inbox and guards in own transactions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from fencedjobs.errors import InboxConflict
from fencedjobs.guards import JoinedGuards
from fencedjobs.inbox import JoinedInbox
from fencedjobs.leases import Again, Part
from fencedjobs.locks import Locks
from fencedjobs.outbox import JoinedOutbox
from fencedjobs.row_leases import JoinedLeases, Leases
from fencedjobs.transaction import Transaction
from fencedjobs.values import Lease, LeaseRecord

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")
L = TypeVar("L", bound=Lease)


class Runner(Protocol):
    """What runs a verb in a transaction of its own: the store."""

    def run(
        self,
        verb: Callable[[Transaction], T],
        *,
        subject: Any = None,
        reading: bool = False,
        single: bool = False,
        direct: bool = True,
    ) -> T: ...

    def claiming(
        self,
        verb: Callable[[Transaction, int], list[L] | Part | Again],
        limit: int,
        *,
        subject: Any,
        single: bool = False,
        direct: bool = True,
    ) -> list[L]: ...

    def who(self, owner: str | None) -> str: ...


def own(
    verbs: Callable[[Transaction], V],
    verb: Callable[Concatenate[V, P], T],
    *,
    reading: bool = False,
    single: bool = False,
) -> Callable[Concatenate[Any, P], T]:
    """A verb of ``verbs`` as a method that runs it in a transaction of its own; see `Transactions.run`."""
    about = next(iter([*inspect.signature(verb).parameters][1:]), "")

    @functools.wraps(verb)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        runner: Runner = getattr(self, "_store", self)
        # The transaction may be repeated as a whole, and an iterator would be empty by then.
        given: Any = [_kept(value) for value in args]
        named: Any = {name: _kept(value) for name, value in kwargs.items()}
        subject = given[0] if given else named.get(about)
        return runner.run(
            lambda tx: verb(verbs(tx), *given, **named), subject=subject, reading=reading, single=single
        )

    return call


def _kept(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


class StoreHeld:
    """What ends, extends or checks a lease of one table, each verb in a short transaction of its own."""

    def __init__(self, store: Runner, verbs: Callable[[Transaction], Leases]) -> None:
        self._store = store
        self._verbs = verbs

    def renew(self, lease: Lease, *, ttl: float, now: float | None = None) -> Lease:
        """The lease with a new end; `LeaseLost` if it has run out or is not held."""
        return self._store.run(
            lambda tx: self._verbs(tx).renew(lease, ttl=ttl, now=now), subject=lease, single=True
        )

    def release(self, lease: Lease) -> None:
        """Give the lease back, also after its end; `LeaseLost` if it is not held."""
        self._store.run(lambda tx: self._verbs(tx).release(lease), subject=lease, single=True)

    def check(self, lease: Lease, *, now: float | None = None) -> bool:
        """Whether the lease is held and still runs."""
        return self._store.run(lambda tx: self._verbs(tx).check(lease, now=now), reading=True, single=True)

    def _claim(self, id: Any, owner: str | None, ttl: float, now: float | None) -> Lease | None:
        who = self._store.who(owner)
        return self._store.run(lambda tx: self._verbs(tx).claim(id, who, ttl=ttl, now=now), subject=id)

    def _get(self, id: Any) -> LeaseRecord | None:
        return self._store.run(lambda tx: self._verbs(tx).get(id), reading=True)


class StoreLeases(StoreHeld):
    """Leases on a table of the host, each verb in a short transaction of its own; see `Leases`."""

    def claim(
        self, pk: Any, owner: str | None = None, *, ttl: float, now: float | None = None
    ) -> Lease | None:
        """Take the lease of this row for ``ttl`` seconds; ``None`` if it is held or not there."""
        return self._claim(pk, owner, ttl, now)

    def claim_where(
        self,
        condition: Any,
        *,
        owner: str | None = None,
        order_by: Any = None,
        limit: int,
        ttl: float,
        now: float | None = None,
    ) -> list[Lease]:
        """Take up to ``limit`` rows (1 to 1000) that are free, open, and fulfil ``condition``.

        ``condition`` is an SQL expression on the mapped class. Rows are taken, and come back, by ``order_by``
        (a column, an expression, or several), then by the key. A row that somebody else has locked is passed
        by. An empty list means that there is nothing to take, or that others held all of it for some time.
        """
        who = self._store.who(owner)
        return self._store.claiming(
            lambda tx, limit: self._verbs(tx).claim_where(
                condition, who, order_by=order_by, limit=limit, ttl=ttl, now=now
            ),
            limit,
            subject=who,
            direct=False,  # SQLAlchemy knows a statement again that was made for one call
        )

    def get(self, pk: Any) -> LeaseRecord | None:
        """The lease columns of the row; ``None`` if there is none."""
        return self._get(pk)

    def settle(self, lease: Lease, /, *, now: float | None = None, **values: Any) -> None:
        """Write ``values`` to the row and give the lease back; `LeaseLost` if it is not held or ran out."""
        settle: Callable[[JoinedLeases], None] = lambda verbs: verbs.settle(lease, now=now, **values)  # noqa: E731
        self._store.run(lambda tx: settle(self._verbs(tx)), subject=lease)


class StoreLocks(StoreHeld):
    """Named locks, each verb in a short transaction of its own. A name need not be made first."""

    def __init__(self, store: Runner) -> None:
        super().__init__(store, Locks)

    def claim(
        self, name: str, owner: str | None = None, *, ttl: float, now: float | None = None
    ) -> Lease | None:
        """Take the lock of this name for ``ttl`` seconds; ``None`` while somebody holds it."""
        return self._claim(name, owner, ttl, now)

    def get(self, name: str) -> LeaseRecord | None:
        """Who holds the lock of this name; ``None`` if it was never claimed."""
        return self._get(name)


class StoreOutbox:
    """The outbox, each verb in a short transaction of its own; see `JoinedOutbox`."""

    def __init__(self, store: Runner) -> None:
        self._store = store

    add = own(JoinedOutbox, JoinedOutbox.add)
    pending = own(JoinedOutbox, JoinedOutbox.pending, reading=True)
    quarantine = own(JoinedOutbox, JoinedOutbox.quarantine)
    requeue = own(JoinedOutbox, JoinedOutbox.requeue)
    get = own(JoinedOutbox, JoinedOutbox.get, reading=True)
    stats = own(JoinedOutbox, JoinedOutbox.stats, reading=True)
    purge = own(JoinedOutbox, JoinedOutbox.purge)


class StoreInbox:
    """The inbox, each verb in a short transaction of its own; see `JoinedInbox`."""

    def __init__(self, store: Runner) -> None:
        self._store = store

    def accept(
        self,
        id: str,
        payload: Any,
        *,
        source: str = "",
        fence: int | None = None,
        now: float | None = None,
    ) -> bool:
        """Whether this message is new. `InboxConflict`, counted, if it came before with another payload.

        For a receiver whose effect is elsewhere; an effect in this database belongs into the same
        transaction: ``uow.inbox.accept`` in ``store.begin()``.
        """
        with self.counting():
            return self._store.run(
                lambda tx: JoinedInbox(tx).accept(id, payload, source=source, fence=fence, now=now),
                subject=id,
                single=True,
            )

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around a transaction of the store's: the conflict that ended it is counted, and comes out."""
        try:
            yield
        except InboxConflict as conflict:
            with suppress(Exception):  # what keeps it from being counted must not hide it
                self.record_conflict(conflict)
            raise

    _accept = own(JoinedInbox, JoinedInbox.accept)
    record_conflict = own(JoinedInbox, JoinedInbox.record_conflict)
    stats = own(JoinedInbox, JoinedInbox.stats, reading=True)
    purge = own(JoinedInbox, JoinedInbox.purge)


class StoreGuards:
    """The guards, each verb in a short transaction of its own; see `JoinedGuards`."""

    def __init__(self, store: Runner) -> None:
        self._store = store

    admit = own(JoinedGuards, JoinedGuards.admit)
    highest = own(JoinedGuards, JoinedGuards.highest, reading=True)
