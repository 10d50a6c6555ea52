"""What is observed, once: the names are stable, adapters count or log them."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Any, Final, Protocol


class Observed(StrEnum):
    """What happened. The comment says which facts come along."""

    SENT = "relay.sent"  #: lane, id, attempt, fence
    FAILED = "relay.failed"  #: lane, id, attempt, error; the lane waits and then tries this event again
    QUARANTINED = "relay.quarantined"  #: lane, id, attempt, error; the lane goes on without this event
    LANE_LOST = "relay.lane_lost"  #: lane, owner, fence; another relay has the lane
    TROUBLE = "relay.trouble"  #: lane, error; the lane could not be worked on at all


class Observer(Protocol):
    """Called with everything that is observed; must not block, and what it raises is not handled."""

    def __call__(self, what: Observed, /, **facts: Any) -> None: ...


_LEVELS: Final = {
    Observed.SENT: logging.DEBUG,
    Observed.FAILED: logging.WARNING,
    Observed.QUARANTINED: logging.ERROR,
    Observed.LANE_LOST: logging.WARNING,
    Observed.TROUBLE: logging.ERROR,
}
_log = logging.getLogger("fencedjobs")


def logged(what: Observed, /, **facts: Any) -> None:
    """The default observer: one log line, with the facts as ``key=value`` and as attributes of the record."""
    said = " ".join(f"{name}={value!r}" for name, value in facts.items())
    _log.log(_LEVELS[what], "%s %s", what.value, said, extra={"event": what.value, "facts": facts})
