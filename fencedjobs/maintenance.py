"""Housekeeping, by one worker at a time: set aside what can never run, empty what is long done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Final

from sqlalchemy import select

from fencedjobs import payload as edge
from fencedjobs.errors import LeaseLost
from fencedjobs.job_sql import ENDED
from fencedjobs.line import Line
from fencedjobs.metrics import Observed, Observer
from fencedjobs.models import Base, Job, OutboxEvent
from fencedjobs.store import Store
from fencedjobs.transaction import Transaction
from fencedjobs.values import EventState, Lease

LOCK: Final = "fencedjobs:maintenance"
MOMENT: Final = 0.05  # seconds after which a claim has let go what it read


@dataclass(frozen=True, slots=True)
class Maintenance:
    """What the workers of a database do beside their jobs, one of them at a time, every so many seconds.

    They always sweep (see `Store.sweep`) and observe how long the oldest job of each queue has waited.
    They purge only what is asked for: ``done`` is how many seconds done and cancelled jobs are kept,
    ``most_done`` how many of them, ``sent`` and ``most_sent`` the same for sent events, ``received``
    for messages in the inbox, after which a duplicate is not recognised any more. ``batch`` rows go in
    one short transaction.
    """

    every: float = 60.0
    done: float | None = None
    most_done: int | None = None
    sent: float | None = None
    most_sent: int | None = None
    received: float | None = None
    batch: int = 1000

    def __post_init__(self) -> None:
        edge.ttl(self.every)
        edge.whole("batch", self.batch, least=1)
        for name in ("done", "sent", "received"):
            if (seconds := getattr(self, name)) is not None:
                edge.duration(name, seconds)
        for name in ("most_done", "most_sent"):
            if (number := getattr(self, name)) is not None:
                edge.whole(name, number, least=1)


Step = Callable[[Store, float], int]  # what one transaction does, at that instant; the rows it changed


class Housekeeper:
    """Does the maintenance in a thread of its own, in small transactions.

    The lock is not given back: it lasts for ``every`` seconds, so that of all workers one does the
    work once in that time.
    """

    def __init__(self, plan: Maintenance, owner: str, observe: Observer) -> None:
        self._plan = plan
        self._owner = owner
        self._observe = observe
        self._stopped = Event()

    def stop(self) -> None:
        """Return from `run` after the transaction that is under way."""
        self._stopped.set()

    def run(self, line: Line) -> None:
        """Do what is due until `stop`."""
        pause = 0.0
        while not self._stopped.wait(pause):
            pause = self._plan.every
            try:
                self._turn(line)
            except LeaseLost:
                pass  # the database was slow, and another worker does it now
            except Exception as error:  # noqa: BLE001 - whatever the database raises: the next time, then
                self._observe(Observed.WORKER_TROUBLE, part="maintenance", error=repr(error))

    def _turn(self, line: Line) -> None:
        every = self._plan.every
        lease = line.call(lambda store: store.locks.claim(LOCK, self._owner, ttl=every))
        if lease is None:
            return
        for what, step in self._steps():
            lease = self._batches(line, lease, what, step)
        for queue, waited in line.call(lambda store: store.oldest_waiting()).items():
            self._observe(Observed.OLDEST, queue=queue, waited=waited)

    def _batches(self, line: Line, lease: Lease, what: str, step: Step) -> Lease:
        """Repeat a step until it twice in a row did not fill its batch, under the lock.

        Once would not do: rows that are locked at that moment are skipped, and a claim of MariaDB locks
        each row that it reads over.
        """
        now, rows, short = line.call(Store.now), 0, 0
        while short < 2 and not self._stopped.wait(short * MOMENT):
            lease = line.call(partial(_renew, lease, self._plan.every))
            changed = line.call(partial(_at, step, now))
            rows += changed
            short = 0 if changed >= self._plan.batch else short + 1
        if rows:
            self._observe(Observed.MAINTAINED, what=what, rows=rows)
        return lease

    def _steps(self) -> Iterator[tuple[str, Step]]:
        plan, limit = self._plan, self._plan.batch
        yield "swept", partial(_sweep, limit)
        if plan.done is not None:
            yield "purged jobs", partial(_purge_jobs, plan.done, limit)
        if plan.most_done is not None:
            yield "purged jobs", partial(_keep_jobs, plan.most_done, limit)
        if plan.sent is not None:
            yield "purged events", partial(_purge_events, plan.sent, limit)
        if plan.most_sent is not None:
            yield "purged events", partial(_keep_events, plan.most_sent, limit)
        if plan.received is not None:
            yield "purged messages", partial(_purge_messages, plan.received, limit)


def _renew(lease: Lease, ttl: float, store: Store) -> Lease:
    return store.locks.renew(lease, ttl=ttl)


def _at(step: Step, now: float, store: Store) -> int:
    return step(store, now)


def _sweep(limit: int, store: Store, now: float) -> int:
    return store.sweep(limit=limit)


def _purge_jobs(seconds: float, limit: int, store: Store, now: float) -> int:
    return store.purge(before=now - seconds, limit=limit)


def _purge_events(seconds: float, limit: int, store: Store, now: float) -> int:
    return store.outbox.purge(before=now - seconds, limit=limit)


def _purge_messages(seconds: float, limit: int, store: Store, now: float) -> int:
    return store.inbox.purge(seconds, limit)


def _keep_jobs(most: int, limit: int, store: Store, now: float) -> int:
    before = store.run(lambda tx: _nth_newest(tx, Job, "finished_at", ENDED, most), reading=True)
    return 0 if before is None else store.purge(before=before, limit=limit)


def _keep_events(most: int, limit: int, store: Store, now: float) -> int:
    before = store.run(
        lambda tx: _nth_newest(tx, OutboxEvent, "sent_at", (EventState.SENT,), most), reading=True
    )
    return 0 if before is None else store.outbox.purge(before=before, limit=limit)


def _nth_newest(tx: Transaction, model: type[Base], name: str, states: Sequence[str], n: int) -> float | None:
    """The instant of the n-th newest of the rows that have ended; ``None`` if there are not so many.

    Nothing has an index for it: finished rows are in none, so that claims do not pay for them.
    """
    c = tx.tables[model.__tablename__].c
    newest = select(c[name]).where(c.state.in_(states)).order_by(c[name].desc())
    instant: float | None = tx.execute(newest.offset(n - 1).limit(1)).scalar()
    return instant
