"""Writers, operators and relays that overtake each other: nothing is lost, and nothing sent without an ack.

Default: a second or so a database. ``pytest -m soak tests/relay/test_crowd.py`` is 15.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from fencedjobs import OutboxConflict, Store
from fencedjobs.metrics import Observed
from fencedjobs.relay import Relay
from fencedjobs.retry import Retry
from fencedjobs.values import Event
from tests.databases import Database
from tests.outbox.helpers import event
from tests.relay.helpers import Seen

TTL = 0.3
SECONDS = pytest.mark.parametrize("seconds", [1.0, pytest.param(15.0, marks=pytest.mark.soak)])


@pytest.fixture(autouse=True)
def bounded() -> None:
    """Here time passes."""


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = database.engine(pool_size=10)
    yield engine
    engine.dispose()


@pytest.fixture
def store(engine: Engine) -> Store:
    return Store(engine)


class Receiver:
    """What was acknowledged, by id and payload. Some sends fail, and some outlast the lease."""

    def __init__(self) -> None:
        self.got: set[tuple[str, Any]] = set()
        self.relays: dict[tuple[str, int], set[str]] = {}  #: by lane and fence
        self._chance = random.Random()

    def by(self, relay: str) -> Callable[[Event], bool]:
        def send(sent: Event) -> bool:
            self.relays.setdefault((sent.lane, sent.fence), set()).add(relay)
            fate = self._chance.random()
            time.sleep(TTL + 0.1 if fate < 0.02 else 0.005)
            if fate > 0.9:
                raise OSError("no")
            self.got.add((sent.id, sent.payload))
            return True

        return send


def crowd(store: Store, receiver: Receiver, seconds: float, *works: Callable[[int], None]) -> Seen:
    """All of them over and over, three relays among them, until the time is over and the lanes are empty."""
    end, errors, seen = time.monotonic() + seconds, list[BaseException](), Seen()
    relays = [
        Relay(
            store, receiver.by(f"relay {n}"), lanes=["a", "b"], ttl=TTL, poll=0.01, mark_every=mark_every,
            retry=Retry(base=0.01, cap=0.05), observe=seen,
        )
        for n, mark_every in enumerate((1, 3, 8))
    ]  # fmt: skip

    def repeated(work: Callable[[int], None]) -> None:
        n = 0
        try:
            while time.monotonic() < end:
                work(n)
                n += 1
                time.sleep(0.002)
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            errors.append(error)

    relaying = [threading.Thread(target=relay.run) for relay in relays]
    working = [threading.Thread(target=repeated, args=(work,)) for work in works]
    for thread in (*relaying, *working):
        thread.start()
    for thread in working:
        thread.join()
    patience = time.monotonic() + 60
    while any(lane.pending for lane in store.outbox.stats().values()) and time.monotonic() < patience:
        time.sleep(0.02)
    for relay in relays:
        relay.stop()
    for thread in relaying:
        thread.join()
    assert errors == []
    assert seen.of(Observed.TROUBLE) == [], "deadlocks, say"
    assert all(len(relays) == 1 for relays in receiver.relays.values()), "two under one fence"
    return seen


@SECONDS
def test_operators_may_mend_what_relays_send(store: Store, seconds: float) -> None:
    names: list[str] = []

    def write(n: int) -> None:
        store.outbox.add(f"e{n}", 0, topic="t", lane="ab"[n % 2])
        names.append(f"e{n}")

    def mend(n: int) -> None:
        """What is next on its lane, and most likely being sent."""
        for next_one in store.outbox.pending(1, "ab"[n % 2]):
            if store.outbox.quarantine(next_one.id, "it chokes"):
                time.sleep(0.005)
                store.outbox.requeue(next_one.id, payload=n, by="ann", reason="mended")

    receiver = Receiver()
    crowd(store, receiver, seconds, write, mend)
    ends = [event(store, name) for name in names]
    assert {end.state for end in ends} == {"sent"}
    assert {(end.id, end.payload) for end in ends} <= receiver.got, "an ack for another payload"


@SECONDS
def test_ids_may_be_purged_and_used_again(store: Store, seconds: float) -> None:
    added: set[tuple[str, Any]] = set()

    def writing(writer: int) -> Callable[[int], None]:
        def write(n: int) -> None:
            new = (f"e{n % 5}", f"{writer}.{n}")
            try:
                if store.outbox.add(*new, topic="t", lane="ab"[n % 5 % 2]):
                    added.add(new)
            except OutboxConflict:
                pass

        return write

    def purge(n: int) -> None:
        store.outbox.purge(before=time.time() + 1e6)

    receiver = Receiver()
    crowd(store, receiver, seconds, writing(1), writing(2), purge)
    assert receiver.got == added, "one was lost, or sent though it was never added"
