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
from fencedjobs.models import LeaseMixin
from fencedjobs.retry import Retry
from fencedjobs.store import Store
from fencedjobs.uow import UnitOfWork
from fencedjobs.values import Event, JobLease, JobRecord, JobState, Lease, Outcome

if TYPE_CHECKING:
    from fencedjobs.aio import AsyncStore, AsyncUnitOfWork

__all__ = [
    "AsyncStore",
    "AsyncUnitOfWork",
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
    "NotAcknowledged",
    "OutboxConflict",
    "Outcome",
    "OutcomeUnknown",
    "Retry",
    "SchemaMismatch",
    "Store",
    "TransactionLost",
    "UnfencedWrite",
    "UnitOfWork",
    "UnsupportedDatabase",
]


def __getattr__(name: str) -> Any:
    """The async forms when they are asked for: they need greenlet, which a sync app may not have."""
    if name in ("AsyncStore", "AsyncUnitOfWork"):
        from fencedjobs import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
