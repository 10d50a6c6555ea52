"""How attempts end: what becomes of them, written in batches by a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from fencedjobs import dialects
from fencedjobs import payload as edge
from fencedjobs.attempt import Attempt, clock
from fencedjobs.claims import Jobs
from fencedjobs.errors import InvalidValue, LeaseLost, OutcomeUnknown
from fencedjobs.handlers import Cancel, Handler, Quarantine, Snooze
from fencedjobs.jobs import JoinedJobs
from fencedjobs.leases import identity
from fencedjobs.line import Backoff, Line
from fencedjobs.metrics import Observed, Observer
from fencedjobs.retry import Retry
from fencedjobs.store import Store
from fencedjobs.transaction import Transaction
from fencedjobs.values import JobLease, JobState, Outcome

_LOCKED: Final = 0.05  # seconds until a row that somebody had locked is looked at again
_BATCH: Final = 200  # endings in one round
_REFUSALS: Final = 3  # by the database itself, of one completion alone, before it counts as a failure


Verbs = Store | JoinedJobs  # each verb in a transaction of its own, or all in one that there is


class Ending(Protocol):
    """What becomes of an attempt."""

    def write(self, jobs: Verbs, attempt: Attempt) -> None:
        """Write it under the lease; `LeaseLost` if that is over."""

    def observed(self) -> tuple[Observed, dict[str, Any]]:
        """What happened, once it is written."""


@dataclass(slots=True)
class Done:
    """The handler has returned."""

    result: Any

    def write(self, jobs: Verbs, attempt: Attempt) -> None:
        jobs.complete(attempt.lease, self.result)

    def observed(self) -> tuple[Observed, dict[str, Any]]:
        return Observed.COMPLETED, {}


@dataclass(slots=True)
class Failed:
    """The handler has raised, or run too long: tried again as ``retry`` says."""

    error: BaseException | str
    retry: Retry | None
    state: JobState | None = None

    def write(self, jobs: Verbs, attempt: Attempt) -> None:
        self.state = jobs.fail(attempt.lease, self.error, retry=self.retry)

    def observed(self) -> tuple[Observed, dict[str, Any]]:
        what = Observed.JOB_QUARANTINED if self.state is JobState.QUARANTINED else Observed.RETRIED
        return what, {"error": ": ".join(edge.described(self.error)), "state": str(self.state or "")}


@dataclass(slots=True)
class GivenBack:
    """Unfinished, and the attempt is not charged."""

    why: str
    delay: float | None = None

    def write(self, jobs: Verbs, attempt: Attempt) -> None:
        jobs.release(attempt.lease, delay=self.delay or 0, refund=True)

    def observed(self) -> tuple[Observed, dict[str, Any]]:
        if self.delay is None:
            return Observed.GIVEN_BACK, {"why": self.why}
        return Observed.SNOOZED, {"delay": self.delay}


@dataclass(slots=True)
class SetAside:
    """Not to be tried again."""

    reason: str
    state: JobState

    def write(self, jobs: Verbs, attempt: Attempt) -> None:
        jobs.set_aside(attempt.lease, self.reason, state=self.state)

    def observed(self) -> tuple[Observed, dict[str, Any]]:
        cancelled = self.state is JobState.CANCELLED
        return Observed.CANCELLED if cancelled else Observed.JOB_QUARANTINED, {"error": self.reason}


def ending_of(handler: Handler, result: Any, error: BaseException | None) -> Ending:
    """What becomes of an attempt whose handler returned ``result`` or raised ``error``."""
    match error:
        case None:
            return _done(result)
        case Snooze(seconds=seconds):
            return GivenBack("snoozed", seconds)
        case Quarantine(reason=reason):
            return SetAside(reason, JobState.QUARANTINED)
        case Cancel(reason=reason):
            return SetAside(reason, JobState.CANCELLED)
        case _:
            return Failed(error, handler.retry)


def _done(result: Any) -> Ending:
    """Done; a result that cannot be kept would be refused again and again, so that a person must look."""
    try:
        if result is not None:
            edge.encode("result", result)
    except InvalidValue as error:
        return Failed(error, None)
    return Done(result)


def _parted(items: Sequence[_Item]) -> tuple[list[_Item], list[_Item]]:
    """The completions that may go in one statement, and the rest."""
    parts: tuple[list[_Item], list[_Item]] = ([], [])
    for item in items:
        parts[not isinstance(item.ending, Done) or item.unknown or item.tries > 0].append(item)
    return parts


def _complete_free(
    leases: list[JobLease], results: list[Any] | None, store: Store
) -> tuple[list[JobLease], list[JobLease]]:
    """Complete what nobody else has locked; the leases that somebody has, and those that are lost.

    (In one statement they cannot be told apart: which it is shows when each is tried by itself.)
    """

    def verb(tx: Transaction) -> tuple[list[JobLease], list[JobLease]]:
        jobs, tx.waits = Jobs(tx), False
        lost = jobs.complete_many(leases, results)
        if tx.single:
            return [], lost
        locked = {identity(lease) for lease in jobs.locked(lost)}
        kept = [lease for lease in lost if identity(lease) in locked]
        return kept, [lease for lease in lost if identity(lease) not in locked]

    return store.run(verb, subject=leases, single=True)


def _write_free(item: _Item, store: Store) -> bool:
    """Write one ending; false if somebody has locked the row. `LeaseLost` comes out."""
    lease = item.attempt.lease

    def verb(tx: Transaction) -> bool:
        jobs = Jobs(tx)
        if jobs.locked([lease]):
            return False
        item.ending.write(jobs, item.attempt)
        return True

    return store.run(verb, subject=lease)


# --- the thread -----------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Item:
    attempt: Attempt
    ending: Ending
    unknown: bool = False  #: whether an answer to COMMIT was lost, so that the row must be asked first
    tries: int = 0  #: those that failed least go first, and by itself what has failed with others
    sent: bool = False  #: whether this ending may have been written, too
    refusals: int = 0  #: of this ending alone, by the database's own word
    until: float = float("inf")  #: when to leave it to the end of the lease, by the local clock


class Settler:
    """Writes endings down: completions that are there together in one statement, the others one by one.

    While the database is away an ending is tried again for as long as the lease lasts; then the job
    is another worker's, and what was done here is done again. So it is with an ending that the
    database refuses for ``ttl`` seconds. A completion that it refuses again and again, as a result
    that is too large for it, is a failure of the attempt.
    """

    def __init__(self, observe: Observer, settled: Callable[[Attempt, bool], None], ttl: float) -> None:
        self._observe = observe
        self._ttl = ttl
        self._settled = settled
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._again: list[_Item] = []  # what is tried again as soon as the back-off is over
        self._later: list[tuple[float, _Item]] = []  # what waits for somebody's lock, and until when
        self._backoff = Backoff(0.05, 2.0)
        self._stopped = False

    def put(self, attempt: Attempt, ending: Ending, *, unknown: bool = False) -> None:
        """Have an ending written; ``unknown``: unless a transaction without an answer was the end already."""
        attempt.committing = True
        self._queue.put(_Item(attempt, ending, unknown))

    def stop(self) -> None:
        """Write what is there, and return from `run`; what cannot be written now is left."""
        self._queue.put(None)

    def run(self, line: Line) -> None:
        """Write endings until `stop`."""
        while not self._stopped:
            self._settle(line, self._gather())
        for item in [*self._again, *(item for _, item in self._later)]:
            self._end(item, refused=True)

    def _gather(self) -> list[_Item]:
        """What there is, at least one ending or one that is due again."""
        items: list[_Item] = []
        with suppress(Empty):
            self._keep(items, self._queue.get(timeout=self._pause()))
            while not self._stopped and len(items) < _BATCH:
                self._keep(items, self._queue.get_nowait())
        now = clock()
        due = [item for at, item in self._later if at <= now]
        self._later = [(at, item) for at, item in self._later if at > now]
        if self._again and not self._backoff.wait:
            due, self._again = due + self._again, []
        return sorted(due + items, key=lambda item: item.tries)

    def _pause(self) -> float | None:
        """Seconds until something is due again; ``None`` if nothing waits."""
        pauses = [max(0.0, at - clock()) for at, _ in self._later]
        if self._again:
            pauses.append(self._backoff.wait)
        return min(pauses, default=None)

    def _keep(self, items: list[_Item], item: _Item | None) -> None:
        if item is None:
            self._stopped = True
        else:
            items.append(item)

    def _settle(self, line: Line, items: list[_Item]) -> None:
        together, alone = _parted(items)
        if len(together) > 1:
            self._complete(line, together)
        else:
            alone += together
        for item in alone:
            if self._backoff.wait and not self._stopped:
                self._again.append(item)
            elif not item.unknown or self._is_still_held(line, item):
                self._write(line, item)

    def _complete(self, line: Line, items: list[_Item]) -> None:
        leases = [item.attempt.lease for item in items]
        results = [item.ending.result for item in items if isinstance(item.ending, Done)]
        given = results if any(result is not None for result in results) else None
        try:
            locked, lost = line.call(partial(_complete_free, leases, given))
        except OutcomeUnknown as error:
            self._ask_again(items, error)
        except Exception as error:  # noqa: BLE001 - one by one shows whether it is one of them, or all
            for item in items:
                self._try_again(item, error)
        else:
            self._succeeded()
            alone = {identity(lease) for lease in (*locked, *lost)}
            for item, lease in zip(items, leases, strict=True):
                if identity(lease) in alone:
                    self._again.append(item)  # by itself: later, or to learn why
                    item.tries += 1
                else:
                    self._end(item)

    def _write(self, line: Line, item: _Item) -> None:
        try:
            written = line.call(partial(_write_free, item))
        except LeaseLost as lost:
            if lost.completed:  # by the handler's own transaction, or by one whose answer was lost
                item.ending = Done(None)
            self._end(item, refused=not lost.completed)
        except OutcomeUnknown as error:
            self._ask_again([item], error)
        except Exception as error:  # noqa: BLE001 - whatever the database raises: wait, and try again
            self._count_refusal(item, error)
            self._try_again(item, error)
        else:
            self._succeeded()
            if written:
                self._end(item)
            else:
                self._wait_for(item)

    def _wait_for(self, item: _Item) -> None:
        """Somebody has locked the row, as an operator's open transaction does: the others do not wait."""
        if self._may_try(item):
            self._later.append((clock() + _LOCKED, item))
        else:
            self._end(item, refused=True)

    def _count_refusal(self, item: _Item, error: Exception) -> None:
        item.refusals += dialects.says_no(error) and not dialects.is_transient(error)
        if item.refusals >= _REFUSALS and isinstance(item.ending, Done) and item.ending.result is not None:
            item.ending = Failed(error, item.attempt.handler.retry)

    def _is_still_held(self, line: Line, item: _Item) -> bool:
        """After a lost answer: whether the ending must be written again, for it was not."""
        try:
            outcome = line.call(lambda store: store.outcome(item.attempt.lease))
        except Exception as error:  # noqa: BLE001 - the database may be away for longer
            self._try_again(item, error)
            return False
        if outcome is Outcome.HELD:
            item.unknown = False
            return True
        if outcome is Outcome.COMPLETED:
            item.ending = Done(None)
        # Else it has ended by the ending whose answer was lost, or by time, as the next attempt will show.
        never = isinstance(item.ending, Done) or not item.sent
        self._end(item, refused=outcome is Outcome.ENDED and never)
        return False

    def _ask_again(self, items: Sequence[_Item], error: Exception) -> None:
        for item in items:
            item.unknown = item.sent = True
            self._try_again(item, error)

    def _try_again(self, item: _Item, error: Exception) -> None:
        self._trouble(error)
        if self._may_try(item):
            self._again.append(item)
        else:
            self._end(item, refused=True)

    def _may_try(self, item: _Item) -> bool:
        """Whether it is worth another try: for as long as the lease lasts, or a job can be given back."""
        item.tries += 1
        item.until = min(item.until, clock() + self._ttl)
        ends = item.until if isinstance(item.ending, GivenBack) else min(item.attempt.ends, item.until)
        return ends > clock() and not self._stopped

    def _trouble(self, error: Exception) -> None:
        if not self._backoff.wait:
            self._backoff.failed()
            self._observe(Observed.WORKER_TROUBLE, part="settling", error=repr(error))

    def _succeeded(self) -> None:
        self._backoff.succeeded()

    def _end(self, item: _Item, *, refused: bool = False) -> None:
        attempt = item.attempt
        what, facts = item.ending.observed()
        if refused:
            what, facts = Observed.REFUSED, {"what": type(item.ending).__name__}
        completed = what is Observed.COMPLETED
        if completed:
            facts = {"remaining": attempt.remaining}
        known = completed and not attempt.tell_completed()
        if not known:
            self._observe(what, **attempt.facts(), seconds=attempt.seconds, **facts)
        self._settled(attempt, completed and not known)
