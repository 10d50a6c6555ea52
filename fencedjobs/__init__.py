"""Leased jobs with fencing tokens in your own database and your own transactions, by SQLAlchemy.

At-least-once execution, and every write that ends an attempt names the attempt it ends.
"""

from typing import TYPE_CHECKING, Any

from fencedjobs.errors import (
    FencedJobsError,
    InboxConflict,
    InvalidValue,
    LeaseLost,
    NotAcknowledged,
    OutboxConflict,
    OutcomeUnknown,
    SchemaMismatch,
    TransactionLost,
    UnfencedWrite,
    UnsupportedDatabase,
)
from fencedjobs.handlers import Cancel, Quarantine, Snooze
from fencedjobs.maintenance import Maintenance
from fencedjobs.models import LeaseMixin
from fencedjobs.retry import Retry
from fencedjobs.store import Store
from fencedjobs.uow import UnitOfWork
from fencedjobs.values import Event, JobLease, JobRecord, JobState, Lease, Outcome
from fencedjobs.worker import Worker

if TYPE_CHECKING:
    from fencedjobs.aio import AsyncStore, AsyncUnitOfWork
    from fencedjobs.aio_worker import AsyncWorker

__all__ = [
    "AsyncStore",
    "AsyncUnitOfWork",
    "AsyncWorker",
    "Cancel",
    "Event",
    "FencedJobsError",
    "InboxConflict",
    "InvalidValue",
    "JobLease",
    "JobRecord",
    "JobState",
    "Lease",
    "LeaseLost",
    "LeaseMixin",
    "Maintenance",
    "NotAcknowledged",
    "OutboxConflict",
    "Outcome",
    "OutcomeUnknown",
    "Quarantine",
    "Retry",
    "SchemaMismatch",
    "Snooze",
    "Store",
    "TransactionLost",
    "UnfencedWrite",
    "UnitOfWork",
    "UnsupportedDatabase",
    "Worker",
]


def __getattr__(name: str) -> Any:
    """The async forms when they are asked for: they need greenlet, which a sync app may not have."""
    if name in ("AsyncStore", "AsyncUnitOfWork"):
        from fencedjobs import aio

        return getattr(aio, name)
    if name == "AsyncWorker":
        from fencedjobs.aio_worker import AsyncWorker

        return AsyncWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
