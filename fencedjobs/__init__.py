"""Leased jobs with fencing tokens in your own database and your own transactions, by SQLAlchemy.

At-least-once execution, and every write that ends an attempt names the attempt it ends.
"""

from fencedjobs.errors import (
    FencedJobsError,
    InvalidValue,
    LeaseLost,
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
from fencedjobs.values import JobLease, JobRecord, JobState, Lease, Outcome

__all__ = [
    "FencedJobsError",
    "InvalidValue",
    "JobLease",
    "JobRecord",
    "JobState",
    "Lease",
    "LeaseLost",
    "LeaseMixin",
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
