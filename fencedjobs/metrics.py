"""What is observed, once: the names are stable, adapters count or log them."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Any, Final, Protocol


class Observed(StrEnum):
    """What happened. The comment says which facts come along.

    All that is about a job has its id, kind, queue, owner, fence and attempt. Times are seconds.
    """

    CLAIMED = "job.claimed"  #: waited: since it could have been claimed
    COMPLETED = "job.completed"  #: seconds: of the handler, remaining: of the lease
    RETRIED = "job.retried"  #: seconds, error, state: the attempt failed and the job is tried again
    JOB_QUARANTINED = "job.quarantined"  #: seconds, error: the job waits for a person
    CANCELLED = "job.cancelled"  #: seconds, error: the handler has cancelled it
    SNOOZED = "job.snoozed"  #: seconds, delay: the handler has put it off
    GIVEN_BACK = "job.given_back"  #: seconds, why: unfinished, without being charged for the attempt
    LOST = "job.lost"  #: seconds, why: the worker cannot be sure of its lease any more, and told the handler
    REFUSED = "job.refused"  #: seconds, what: it came too late, and the database has refused it
    IGNORED = "job.ignored"  #: what: came from the handler of a job that had ended already

    STARTED = "worker.started"  #: owner, queues, concurrency
    STOPPING = "worker.stopping"  #: owner, running
    STOPPED = "worker.stopped"  #: owner, completed
    WORKER_TROUBLE = "worker.trouble"  #: owner, part, error; that part of the worker waits and tries again
    MAINTAINED = "worker.maintained"  #: owner, what, rows: swept or purged
    OLDEST = "worker.oldest"  #: queue, waited: of the job that has waited longest

    SENT = "relay.sent"  #: lane, id, attempt, fence
    FAILED = "relay.failed"  #: lane, id, attempt, error; the lane waits and then tries this event again
    QUARANTINED = "relay.quarantined"  #: lane, id, attempt, error; the lane goes on without this event
    LANE_LOST = "relay.lane_lost"  #: lane, owner, fence; another relay has the lane
    TROUBLE = "relay.trouble"  #: lane, error; the lane could not be worked on at all


class Observer(Protocol):
    """Called with everything that is observed, in whatever thread that is; it must not block.

    What it raises is not handled by a relay, and logged by a worker.
    """

    def __call__(self, what: Observed, /, **facts: Any) -> None: ...


_LEVELS: Final = {
    Observed.CLAIMED: logging.DEBUG,
    Observed.COMPLETED: logging.INFO,
    Observed.RETRIED: logging.WARNING,
    Observed.JOB_QUARANTINED: logging.ERROR,
    Observed.CANCELLED: logging.INFO,
    Observed.SNOOZED: logging.INFO,
    Observed.GIVEN_BACK: logging.INFO,
    Observed.LOST: logging.WARNING,
    Observed.REFUSED: logging.WARNING,
    Observed.IGNORED: logging.WARNING,
    Observed.STARTED: logging.INFO,
    Observed.STOPPING: logging.INFO,
    Observed.STOPPED: logging.INFO,
    Observed.WORKER_TROUBLE: logging.ERROR,
    Observed.MAINTAINED: logging.INFO,
    Observed.OLDEST: logging.DEBUG,
    Observed.SENT: logging.DEBUG,
    Observed.FAILED: logging.WARNING,
    Observed.QUARANTINED: logging.ERROR,
    Observed.LANE_LOST: logging.WARNING,
    Observed.TROUBLE: logging.ERROR,
}
_log = logging.getLogger("fencedjobs")


def logged(what: Observed, /, **facts: Any) -> None:
    """The default observer: one log line, with the facts as ``key=value`` and as attributes of the record."""
    if not _log.isEnabledFor(_LEVELS[what]):
        return
    said = " ".join(f"{name}={value!r}" for name, value in facts.items())
    _log.log(_LEVELS[what], "%s %s", what.value, said, extra={"event": what.value, "facts": facts})


def harmless(observe: Observer) -> Observer:
    """The observer, whose own mistakes are logged instead of raised where work would be lost by them."""

    def call(what: Observed, /, **facts: Any) -> None:
        try:
            observe(what, **facts)
        except Exception:  # noqa: BLE001 - it is the user's, and may raise anything
            _log.exception("the observer failed with %s", what.value)

    return call
