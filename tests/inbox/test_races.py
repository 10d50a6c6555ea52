"""Sixteen deliveries of the same message at once: the effect is there exactly once. FAULTS 49.

Default: 60 rounds a database, half by the store and half on a host's session. 1,000 of each:
``pytest -m soak tests/inbox/test_races.py``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, func, insert, select
from sqlalchemy import event as listen
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fencedjobs import Store, UnitOfWork, dialects
from fencedjobs.values import InboxStats
from tests.databases import Database

THREADS = 16

#: without any key that would keep an effect from being there twice
EFFECTS = Table("effects", MetaData(), Column("n", Integer, primary_key=True), Column("message", String(40)))


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = database.engine(pool_size=THREADS, pool_timeout=120)
    if database.backend == "sqlite":
        listen.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = OFF"))
    EFFECTS.create(engine)
    yield engine
    EFFECTS.drop(engine)
    engine.dispose()


Receive = Callable[[str], bool]


def by_the_store(engine: Engine) -> Receive:
    store = Store(engine)

    def receive(id: str) -> bool:
        with store.begin() as uow:
            if new := uow.inbox.accept(id, {"qty": 7}):
                uow.session.execute(insert(EFFECTS).values(message=id))
        return new

    return receive


def by_the_host(engine: Engine) -> Receive:
    """On the host's own session and isolation; it repeats what its database asks it to repeat."""

    def once(id: str) -> bool:
        with Session(engine) as session, session.begin():
            if new := UnitOfWork(session).inbox.accept(id, {"qty": 7}):
                session.execute(insert(EFFECTS).values(message=id))
        return new

    def receive(id: str) -> bool:
        while True:
            try:
                return once(id)
            except DBAPIError as error:
                if not dialects.is_transient(error):
                    raise

    return receive


def deliver(receive: Receive, rounds: int) -> Counter[str]:
    """Each message by all threads at the same time; by message, how many were told that it is new."""
    barrier = threading.Barrier(THREADS)
    news: Counter[str] = Counter()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for n in range(rounds):
                barrier.wait(60)
                if receive(f"m-{n}"):
                    news[f"m-{n}"] += 1
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return news


def check(engine: Engine, receive: Receive, rounds: int) -> None:
    news = deliver(receive, rounds)
    once = {f"m-{n}": 1 for n in range(rounds)}
    assert news == once
    with engine.connect() as connection:
        by_message = select(EFFECTS.c.message, func.count()).group_by(EFFECTS.c.message)
        assert {row[0]: row[1] for row in connection.execute(by_message)} == once
    assert Store(engine).inbox.stats() == InboxStats(rounds, (THREADS - 1) * rounds, 0)


WAYS = pytest.mark.parametrize("way", [by_the_store, by_the_host], ids=["store", "host"])


@WAYS
def test_the_effect_is_there_exactly_once(engine: Engine, way: Callable[[Engine], Receive]) -> None:
    check(engine, way(engine), rounds=30)


@pytest.mark.soak
@WAYS
def test_a_thousand_rounds(engine: Engine, way: Callable[[Engine], Receive]) -> None:
    check(engine, way(engine), rounds=1000)
