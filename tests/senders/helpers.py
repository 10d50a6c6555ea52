"""Events, stores with events, and what became of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine

from fencedjobs import Event, NotAcknowledged, Store
from fencedjobs.relay import dispatch
from fencedjobs.senders.base import AsyncSender

EVENT = Event(
    id="order-7",
    seq=3,
    fence=2,
    topic="warehouse",
    lane="default",
    payload={"qty": 7, "name": "Tür"},
    headers={"traceparent": "00-ab-cd-01"},
    created=1700000000.25,
    attempt=1,
)

#: what has to be noticed within the time-out may be noticed this much later
GRACE = 0.5


def event(**changed: Any) -> Event:
    return replace(EVENT, **changed)


def refusal(send: Callable[[Event], Any], sent: Event = EVENT) -> str:
    """Why this was not acknowledged."""
    with pytest.raises(NotAcknowledged) as caught:
        send(sent)
    assert caught.value.id == sent.id
    return str(caught.value.answer)


def async_refusal(sender: AsyncSender, sent: Event = EVENT) -> str:
    """Why the async form did not acknowledge this."""

    async def sending() -> None:
        async with sender:
            await sender(sent)

    return refusal(lambda _: asyncio.run(sending()), sent)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took <= seconds, f"took {took:.2f} s, may take {seconds:.2f} s"


def awaited(holds: Callable[[], bool]) -> None:
    """What another thread is about to do has to hold within a second."""
    end = time.monotonic() + 1
    while not holds():
        assert time.monotonic() < end, "waited for a second"
        time.sleep(0.01)


def with_event(
    engine: Engine, id: str = "order-7", *, topic: str = "warehouse", payload: Any = None
) -> Store:
    """A store with one pending event."""
    store = Store(engine)
    with store.begin() as uow:
        uow.outbox.add(id, {"qty": 7} if payload is None else payload, topic=topic)
    return store


def left_pending(store: Store, send: Callable[[Event], Any], id: str = "order-7") -> str:
    """Dispatch has to fail; the reason that is stored with the event, which stays pending."""
    with pytest.raises(NotAcknowledged):
        dispatch(store, send)
    record = store.outbox.get(id)
    assert record is not None
    assert (record.state, record.sent_at) == ("pending", None)
    assert record.last_error is not None
    return record.last_error
