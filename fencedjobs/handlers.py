"""What a worker calls for each kind of job, and what a handler raises to end a job in another way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fencedjobs import payload as edge
from fencedjobs.errors import InvalidValue
from fencedjobs.retry import Retry


class Verdict(Exception):
    """Raised by a handler: the job does not end as done, and the handler has not failed either."""


class Snooze(Verdict):
    """Not now: give the job back, to be claimed again after so many seconds. No attempt is charged."""

    def __init__(self, seconds: float) -> None:
        self.seconds = edge.duration("seconds", seconds)
        super().__init__(f"not for another {self.seconds:g} s")


class Quarantine(Verdict):
    """Never like this: set the job aside for a person, whatever attempts are left."""

    def __init__(self, reason: str) -> None:
        self.reason = edge.reason("reason", reason)
        super().__init__(self.reason)


class Cancel(Verdict):
    """Not any more: the job is cancelled."""

    def __init__(self, reason: str) -> None:
        self.reason = edge.reason("reason", reason)
        super().__init__(self.reason)


@dataclass(frozen=True, slots=True)
class Handler:
    """What is called for the jobs of one kind."""

    kind: str
    function: Callable[[Any], Any]
    retry: Retry | None
    max_runtime: float | None
    is_async: bool  #: whether a call gives something to be awaited


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - not whether, but of what kind
    )


class Handlers:
    """The handlers of a worker, by kind."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Handler] = {}

    def add(
        self, kind: str, function: Callable[[Any], Any], *, retry: Retry | None, max_runtime: float | None
    ) -> None:
        """Register; refused if the kind has a handler already."""
        kind = edge.label("kind", kind)
        if kind in self._by_kind:
            raise InvalidValue("kind", f"{kind!r} has a handler already")
        if not callable(function):
            raise InvalidValue("handler", f"must be callable, got {type(function).__name__}")
        limit = None if max_runtime is None else edge.ttl(max_runtime)
        self._by_kind[kind] = Handler(kind, function, retry, limit, _is_async(function))

    @property
    def kinds(self) -> list[str]:
        return list(self._by_kind)

    def of(self, kind: str) -> Handler:
        return self._by_kind[kind]
