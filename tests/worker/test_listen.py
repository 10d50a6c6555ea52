"""Wake-ups: an idle worker starts a job when it is committed, where the database can tell; else it polls."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import text

from fencedjobs import Store, dialects
from fencedjobs.metrics import Observed
from tests.hosts import on
from tests.worker.helpers import Workers, until


class Started:
    """A handler that notes when it was called."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.called = threading.Event()

    async def __call__(self, ctx: Any) -> None:
        self.at.append(time.monotonic())
        self.called.set()


def idle(workers: Workers, claims: list[float]) -> None:
    """It has looked, found nothing, and will not look again for long."""
    until(lambda: bool(claims) and time.monotonic() - claims[-1] > 0.3)


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    claim_many = Store.claim_many

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(time.monotonic())
        return claim_many(*args, **kwargs)

    monkeypatch.setattr(Store, "claim_many", noted)
    return made


@pytest.fixture(autouse=True)
def listeners(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The server's numbers of the connections that listen, or have listened."""
    made: list[int] = []
    listening = dialects.listening

    def noted(connection: Any) -> Any:
        pid = (
            0
            if connection.dialect.name != "postgresql"
            else connection.scalar(text("SELECT pg_backend_pid()"))
        )
        wait = listening(connection)
        made.append(pid)
        return wait

    monkeypatch.setattr(dialects, "listening", noted)
    return made


@pytest.fixture
def listener(database: Any, driver: str | None, engine: Any) -> Workers:
    return Workers(database, driver, Store(engine))


@on("postgresql")
def test_an_idle_worker_starts_a_job_when_it_is_committed(
    listener: Workers, claims: list[float], listeners: list[int]
) -> None:
    started = Started()
    with listener.in_background({"k": started}, poll=600):
        until(lambda: bool(listeners))
        idle(listener, claims)
        with listener.store.begin() as uow:
            uow.jobs.enqueue("a", kind="k")
            time.sleep(0.3)
            assert started.at == []
        committed = time.monotonic()
        assert started.called.wait(5)
    assert started.at[0] - committed < 0.5


@on("postgresql")
def test_a_rollback_wakes_nobody(listener: Workers, claims: list[float], listeners: list[int]) -> None:
    with listener.in_background({"k": Started()}, poll=600):
        until(lambda: bool(listeners))
        idle(listener, claims)
        before = len(claims)
        with suppress(ZeroDivisionError), listener.store.begin() as uow:
            uow.jobs.enqueue("a", kind="k")
            raise ZeroDivisionError
        time.sleep(0.4)
        assert len(claims) == before


@on("postgresql")
def test_a_listener_whose_connection_is_killed_listens_again(
    listener: Workers, claims: list[float], listeners: list[int]
) -> None:
    started = Started()
    with listener.in_background({"k": started}, poll=600):
        until(lambda: bool(listeners))
        with listener.engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": listeners[0]})
        until(lambda: len(listeners) == 2)
        assert listener.seen.of(Observed.WORKER_TROUBLE)[0]["part"] == "listening"
        idle(listener, claims)
        listener.store.enqueue("a", kind="k")
        assert started.called.wait(2)


@on("postgresql")
def test_a_word_that_comes_during_a_look_is_not_lost(
    listener: Workers, listeners: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, looking, told = Started(), threading.Event(), threading.Event()
    claim_many = Store.claim_many

    def slow(*args: Any, **kwargs: Any) -> Any:
        leases = claim_many(*args, **kwargs)
        if looking.is_set() and not told.is_set():
            listener.store.enqueue("a", kind="k")
            time.sleep(0.4)  # the word is here, and the answer is not
            told.set()
        return leases

    monkeypatch.setattr(Store, "claim_many", slow)
    with listener.in_background({"k": started}, poll=600):
        until(lambda: bool(listeners))
        time.sleep(0.3)
        looking.set()
        listener.store.enqueue("other", kind="another kind")
        assert started.called.wait(3)


@on("postgresql")
def test_without_listen_nobody_listens(listener: Workers, claims: list[float], listeners: list[int]) -> None:
    started = Started()
    with listener.in_background({"k": started}, poll=0.2, listen=False):
        idle_since = len(claims)
        until(lambda: len(claims) > idle_since)
        assert listeners == []
        listener.store.enqueue("a", kind="k")
        assert started.called.wait(2)


def test_polling_is_the_floor(workers: Workers) -> None:
    started = Started()
    with workers.in_background({"k": started}, poll=0.2, listen=False):
        time.sleep(0.3)
        workers.store.enqueue("a", kind="k")
        begun = time.monotonic()
        assert started.called.wait(5)
    assert started.at[0] - begun < 1
