"""How long a failed job waits before its next attempt. Pure: chance comes in as an argument."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from fencedjobs.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Retry:
    """Exponential back-off with a cap and full jitter.

    After the n-th attempt the wait is drawn evenly from 0 to ``min(cap, base * factor ** (n - 1))``
    seconds; with ``jitter=False`` it is that bound itself. Full jitter keeps jobs that failed
    together from coming back together
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).

    ``backoff`` replaces the bound by a function of the attempt. If it raises, or returns anything
    but a finite number of seconds from 0 on, the default bound is used: a mistake in it cannot lose
    a job.
    """

    base: float = 1.0
    factor: float = 2.0
    cap: float = 3600.0
    jitter: bool = True
    backoff: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        for name, least in (("base", 0.0), ("factor", 1.0), ("cap", 0.0)):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= least):
                raise InvalidValue(name, f"must be a finite number of at least {least:g}, got {value!r}")

    def bound(self, attempt: int) -> float:
        """The longest wait after this attempt (the first is 1), in seconds: finite, never above ``cap``."""
        custom = self._custom(attempt)
        if custom is not None:
            return min(self.cap, custom)
        try:
            # As floats: a whole factor would be multiplied out, digit by digit.
            return min(self.cap, self.base * float(self.factor) ** (max(attempt, 1) - 1))
        except OverflowError:
            return self.cap if self.base else 0.0

    def delay(self, attempt: int, chance: Callable[[], float] = random.random) -> float:
        """The wait after this attempt, in seconds; ``chance`` gives a number from 0 up to 1."""
        bound = self.bound(attempt)
        return bound * chance() if self.jitter else bound

    def _custom(self, attempt: int) -> float | None:
        if self.backoff is None:
            return None
        try:
            wait = float(self.backoff(attempt))
        except Exception:  # noqa: BLE001 - the user's function may raise anything; the job must live on
            return None
        return wait if math.isfinite(wait) and wait >= 0 else None
