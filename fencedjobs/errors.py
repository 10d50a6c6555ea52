"""What can go wrong, each with the facts a caller needs to decide what to do next."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

_SHORT = Repr()  # of a thousand leases some are enough
_SHORT.maxother = _SHORT.maxstring = 300


class FencedJobsError(Exception):
    """Base of every error that fencedjobs raises on its own account."""


class InvalidValue(FencedJobsError, ValueError):
    """An argument was refused before anything was written.

    ``field`` is the argument's name (for payloads with the path inside it).
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class LeaseLost(FencedJobsError):
    """The attempt that this lease names is over; nothing was written.

    ``held`` is the lease the caller presented, ``current`` the row as it is now (a `JobRecord` for
    jobs, a `Lease`-like `LeaseRecord` otherwise, ``None`` if there is no row). ``completed`` is true
    when it was this very lease that completed the job before, as after a repeated call.

    It is an exception, not a result, because it must roll back the caller's writes.
    """

    def __init__(self, held: Any, current: Any = None) -> None:
        self.held = held
        self.current = current
        self.completed = bool(getattr(current, "completed_by", lambda _: False)(held))
        super().__init__(self._story())

    def _story(self) -> str:
        held, current = self.held, self.current
        told = f"lease of {held.id!r} by {held.owner!r} with fence {held.fence} is lost: "
        if current is None:
            return told + "there is no such row"
        if self.completed:
            return told + "this very lease completed the job before"
        if current.fence != held.fence:
            return told + f"the row is at fence {current.fence}, owner {current.owner!r}"
        if current.owner != held.owner:
            return told + f"its owner is {current.owner!r}, state {getattr(current, 'state', 'free')}"
        return told + f"it ran out at {current.until!r}"


class TransactionLost(FencedJobsError):
    """The transaction that should hold the caller's writes is not whole any more.

    A statement in it failed and the error was swallowed, the database rolled it back, or the handler
    committed or rolled it back. Nothing was completed.
    """


class OutcomeUnknown(FencedJobsError):
    """COMMIT was sent and its answer was lost: the transaction may or may not have happened.

    So it is with a statement that is its own COMMIT, as most verbs of a store send one on PostgreSQL.

    Never retried blindly. ``subject`` is what the transaction was about: the lease, the id of the
    job, or a list of them; for a claim of whatever comes next, the owner. Ask
    ``store.outcome(lease)``, or repeat an enqueue under the same id; a claim that did take effect
    runs out by itself.
    """

    def __init__(self, subject: Any) -> None:
        about = "" if subject is None else f": {_SHORT.repr(subject)}"
        super().__init__(f"the answer to COMMIT was lost, so it is unknown whether it took effect{about}")
        self.subject = subject


class OutboxConflict(FencedJobsError):
    """An event with this id is in the outbox already, and has another topic, lane or payload."""

    def __init__(self, id: str) -> None:
        super().__init__(f"outbox event {id!r} exists with another topic, lane or payload")
        self.id = id


class InboxConflict(FencedJobsError):
    """A message with this id was accepted before, and had another payload. Nothing was changed.

    Roll the transaction back. Where the transaction is the caller's, ``inbox.record_conflict(error)``
    counts it afterwards; the store's own verbs do so themselves.
    """

    def __init__(self, id: str, source: str) -> None:
        told = f" from {source!r}" if source else ""
        super().__init__(f"message {id!r}{told} was accepted before with another payload")
        self.id = id
        self.source = source


class NotAcknowledged(FencedJobsError):
    """The receiver's answer was not the exact ``True`` that acknowledges an event; it stays pending."""

    def __init__(self, id: str, answer: Any) -> None:
        super().__init__(f"event {id!r} was not acknowledged: {_shown(answer)}")
        self.id = id
        self.answer = answer


def _shown(answer: Any) -> str:
    """Whatever a receiver answers must not turn this error into another one."""
    try:
        return repr(answer)[:1000]
    except Exception:  # noqa: BLE001 - it is the receiver's class, which may raise anything
        return f"a {type(answer).__name__} that cannot be shown"


class UnfencedWrite(FencedJobsError):
    """The ORM was about to write columns that only the verbs may write, without a guard."""


class UnsupportedDatabase(FencedJobsError):
    """This database, version, driver or set-up cannot keep the contract; the text says why."""


class SchemaMismatch(FencedJobsError):
    """The tables are missing, or of a version that this release does not work on."""
