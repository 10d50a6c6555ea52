"""What happened, line by line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fencedjobs.cli.output import exact


@dataclass(frozen=True)
class Moment:
    """One line of the timeline; ``at`` is seconds since the start."""

    at: float
    who: str
    event: str
    order: str | None
    fence: int | None
    text: str
    until: str | None = None  #: the end of the lease that was claimed


@dataclass
class Timeline:
    """What happened so far, and whom to tell."""

    listener: Callable[[Moment], None]
    began: float = 0.0
    moments: list[Moment] = field(default_factory=list)

    def begin(self) -> None:
        """Time runs from now on."""
        self.began = time.monotonic()

    def tell(
        self, who: str, event: str, text: str, *, order: str | None = None, fence: int | None = None,
        clock: float | None = None, until: float | None = None,
    ) -> None:  # fmt: skip
        """Add a line."""
        at = (time.monotonic() if clock is None else clock) - self.began
        moment = Moment(round(at, 3), who, event, order, fence, text, exact(until))
        self.moments.append(moment)
        self.listener(moment)

    def has(self, who: str, event: str) -> bool:
        """Whether this has happened to them."""
        return any((moment.who, moment.event) == (who, event) for moment in self.moments)
