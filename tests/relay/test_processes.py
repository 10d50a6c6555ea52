"""Relays as processes of their own: one holds a lane, another takes over, and SIGTERM ends one cleanly."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest
from sqlalchemy import Engine

from fencedjobs import Store
from fencedjobs.relay import Relay
from tests.databases import ASYNC_DRIVERS, Database
from tests.outbox.helpers import add, event, states
from tests.relay.children import children, ended, exit_code, spawned, stopping_all_the_time, talking
from tests.relay.helpers import Receiver, lane_is_free

PATIENCE = 30.0


@pytest.fixture
def store(engine: Engine) -> Store:
    """By the database's clock: other processes share no other."""
    return Store(engine)


class Talker:
    """A relay in another process, that asks before each send."""

    def __init__(self, process: ForkServerProcess, talk: Connection) -> None:
        self.process = process
        self._talk = talk

    def sends(self, within: float = PATIENCE) -> str | None:
        """What it is about to send; ``None`` if it is not."""
        return self._talk.recv() if self._talk.poll(within) else None

    def go_on(self) -> None:
        self._talk.send("go on")


@pytest.fixture
def start(database: Database) -> Iterator[Any]:
    with ExitStack() as stack:

        def start(driver: str | None = None, **options: Any) -> Talker:
            ours, theirs = children().Pipe()
            url = database.url.render_as_string(hide_password=False)
            other = driver and database.async_url(driver).render_as_string(hide_password=False)
            process = stack.enter_context(ended(spawned(talking, url, other, theirs, options)))
            return Talker(process, ours)

        yield start


def test_one_relay_holds_the_lane_and_another_takes_over_when_it_is_killed(store: Store, start: Any) -> None:
    ttl = 1.0
    add(store, "a", "b")
    first = start(ttl=30)
    assert first.sends() == "a"
    second = start(ttl=ttl)
    assert second.sends(0.5) is None, "the lane is held"
    first.go_on()
    assert first.sends() == "b"
    first.process.kill()
    first.process.join()
    store.locks.release(held(store))  # the end of its lease, sooner than in 30 seconds
    assert second.sends() == "b"
    second.go_on()
    second.process.terminate()
    assert exit_code(second.process) == 0
    assert states(store, "a", "b") == ["sent", "sent"]
    assert [event(store, id).attempts for id in ("a", "b")] == [1, 2]


def held(store: Store) -> Any:
    return store.locks.get("outbox:default")


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_takeover_comes_within_the_lease(store: Store, start: Any) -> None:
    ttl = 1.0
    add(store, "a")
    first = start(ttl=ttl)
    assert first.sends() == "a"
    second = start(ttl=ttl)
    killed_at = time.monotonic()
    first.process.kill()
    assert second.sends() == "a"
    assert time.monotonic() - killed_at < ttl + 2, "and what a busy machine takes to notice"
    assert held(store).fence == 2


FORMS = [
    *((backend, None) for backend in ("sqlite", "postgresql", "mariadb")),
    *((ASYNC_DRIVERS[driver][0], driver) for driver in ("aiosqlite", "asyncpg")),
]


@pytest.mark.parametrize(
    ("database", "driver"), FORMS, indirect=["database"], ids=[f"{d or b}" for b, d in FORMS]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_lets_the_event_be_finished(
    store: Store, start: Any, driver: str | None, number: signal.Signals
) -> None:
    add(store, "a", "b", "c")
    relay = start(driver, max_attempts=1)
    assert relay.sends() == "a"
    relay.go_on()
    assert relay.sends() == "b"
    os.kill(relay.process.pid, number)
    relay.go_on()
    assert exit_code(relay.process) == 0
    assert states(store, "a", "b", "c") == ["sent", "sent", "pending"]
    assert event(store, "c").attempts == 0
    assert lane_is_free(store)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_signal_ends_an_idle_relay_at_once(store: Store, start: Any) -> None:
    add(store, "a")
    relay = start(poll=60.0)
    assert relay.sends() == "a"
    relay.go_on()
    while states(store, "a") != ["sent"] or not lane_is_free(store):
        time.sleep(0.02)
    relay.process.terminate()
    assert exit_code(relay.process, within=10) == 0


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_signal_at_any_instant_does_not_lock_the_relay(url: Any, store: Store) -> None:
    """`threading.Event.set` in a handler waits for ever for the lock of the `wait` that it interrupts."""
    assert exit_code(spawned(stopping_all_the_time, str(url)), within=30) == 0


# --- handlers -------------------------------------------------------------------------------------


@contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_hosts_handlers_are_put_back(store: Store) -> None:
    def ours(*_: Any) -> None: ...

    add(store, "a")
    seen: list[Any] = []

    def send(event: Any) -> bool:
        seen.append(signal.getsignal(signal.SIGTERM))
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    with handled(signal.SIGTERM, ours):
        assert Relay(store, send).run() == 1
        assert signal.getsignal(signal.SIGTERM) is ours
    assert seen != [ours]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_in_another_thread_it_leaves_signals_alone(store: Store) -> None:
    add(store, "a")
    seen: list[Any] = []

    def send(event: Any) -> bool:
        seen.append(signal.getsignal(signal.SIGTERM))
        return True

    relay = Relay(store, send)
    total: list[int] = []
    thread = threading.Thread(target=lambda: total.append(relay.run(until_empty=True)))
    thread.start()
    thread.join()
    assert total == [1]
    assert seen == [signal.getsignal(signal.SIGTERM)]
    assert Relay(store, Receiver()).run(until_empty=True) == 0
