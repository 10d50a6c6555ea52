"""Leased jobs with fencing tokens in your own database and your own transactions, by SQLAlchemy.

At-least-once execution, and every write that ends an attempt names the attempt it ends.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fencedjobs.aio import AsyncStore, AsyncUnitOfWork
    from fencedjobs.aio_worker import AsyncWorker
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

_HOMES = {
    "aio": ("AsyncStore", "AsyncUnitOfWork"),
    "aio_worker": ("AsyncWorker",),
    "handlers": ("Cancel", "Quarantine", "Snooze"),
    "maintenance": ("Maintenance",),
    "models": ("LeaseMixin",),
    "retry": ("Retry",),
    "store": ("Store",),
    "uow": ("UnitOfWork",),
    "values": ("Event", "JobLease", "JobRecord", "JobState", "Lease", "Outcome"),
    "worker": ("Worker",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name when it is asked for.

    Importing the package imports nothing: pytest does so in every project where it is installed, and
    the async forms need greenlet, which a sync app may not have.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    return found


def __dir__() -> list[str]:
    return [*__all__, *globals()]
