"""Words that the tests of the relay share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from fencedjobs import Store
from fencedjobs.aio_relay import AsyncRelay
from fencedjobs.metrics import Observed
from fencedjobs.relay import Relay
from fencedjobs.retry import Retry
from fencedjobs.values import Event, LeaseRecord
from tests.forms import Blocking
from tests.outbox.helpers import T

AT_ONCE = Retry(base=0)


MANY = 500


class Runaway(BaseException):
    """A relay that would go on for ever fails its test."""


@dataclass
class Clock:
    """A store's clock that stands still until it is moved."""

    now: float = T

    def __call__(self) -> float:
        return self.now


@dataclass
class Receiver:
    """A sender that notes what it gets, and answers as it is told: by default it acknowledges."""

    answers: dict[str, Any] = field(default_factory=dict)
    got: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> Any:
        self.got.append(event)
        if len(self.got) > MANY:
            raise Runaway("it sends for ever")
        answer = self.answers.get(event.id, True)
        if isinstance(answer, BaseException):
            raise answer
        return answer(event) if callable(answer) else answer

    @property
    def ids(self) -> list[str]:
        return [event.id for event in self.got]


@dataclass
class Seen:
    """An observer that notes what it is told."""

    all: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, what: Observed, /, **facts: Any) -> None:
        self.all.append((what.value, facts))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.all]

    def of(self, what: Observed) -> list[dict[str, Any]]:
        return [facts for name, facts in self.all if name == what.value]


class FakeTime:
    """Time that passes only while somebody waits; ``at`` does something when it has come so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self._agenda: list[tuple[float, Callable[[], Any]]] = []

    def monotonic(self) -> float:
        return self.now

    def at(self, instant: float, do: Callable[[], Any]) -> None:
        self._agenda.append((instant, do))

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        if len(self.waits) > MANY:
            raise Runaway("it waits for ever")
        due = [do for instant, do in self._agenda if instant <= self.now]
        self._agenda = [(instant, do) for instant, do in self._agenda if instant > self.now]
        for do in due:
            do()


def stopping(relay: Relay, answer: Any = True) -> Callable[[Event], Any]:
    """Stop the relay while the event is being sent, then answer or raise."""

    def answering(event: Event) -> Any:
        relay.stop()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return answering


def lane_lock(store: Store, lane: str = "default") -> LeaseRecord | None:
    return store.locks.get(f"outbox:{lane}")


def lane_is_free(store: Store, lane: str = "default") -> bool:
    lock = lane_lock(store, lane)
    return lock is None or lock.owner is None


class Relays:
    """Makes relays, sync or async, that do not wait between their tries; ``store`` is a sync one."""

    def __init__(self, store: Store, form: Any) -> None:
        self.store = store
        self._form = form

    def __call__(self, send: Callable[[Event], Any], **options: Any) -> Relay:
        options = {"retry": AT_ONCE, "poll": 0.0, **options}
        if not isinstance(self._form, Blocking):
            return Relay(self._form, send, **options)

        async def awaited(event: Event) -> Any:
            return send(event)

        target, runner = self._form._target, self._form._runner
        return cast("Relay", Blocking(AsyncRelay(target, awaited, **options), runner))
