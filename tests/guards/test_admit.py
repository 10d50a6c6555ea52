"""Guards: a receiver's memory of the highest fence. Equal is admitted, lower refused, whoever wins a race."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy import event as listen
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from fencedjobs import AsyncUnitOfWork, InvalidValue, Store, UnitOfWork
from fencedjobs.models import Base
from tests.databases import Database
from tests.outbox.helpers import T, rows

GUARDS = Base.metadata.tables["fenced_guards"]
KEYS = ["A", "a", "a ", "á", "ß", "ss", "\u00e9", "e\u0301"]


def test_equal_is_admitted_and_lower_refused(store: Store) -> None:
    steps = [
        (5, True, 5), (5, True, 5), (4, False, 5), (6, True, 6), (5, False, 6), (0, False, 6),
        (2**63 - 1, True, 2**63 - 1),
    ]  # fmt: skip
    for fence, admitted, highest in steps:
        assert store.guards.admit("r", fence) is admitted
        assert store.guards.highest("r") == highest


def test_the_lowest_fence_of_a_fresh_resource_is_admitted(store: Store) -> None:
    assert store.guards.highest("r") is None
    assert store.guards.admit("r", 0)
    assert store.guards.highest("r") == 0
    assert store.guards.admit("r", 0)


def test_resources_are_compared_byte_for_byte(sync_store: Store) -> None:
    for n, key in enumerate(KEYS):
        assert sync_store.guards.admit(key, n)
    assert [sync_store.guards.highest(key) for key in KEYS] == [*range(len(KEYS))]
    assert not sync_store.guards.admit("e\u0301", 6)
    longest = "\U0001f600" * 255
    assert sync_store.guards.admit(longest, 1)


def test_a_refusal_changes_nothing(sync_store: Store, engine: Engine) -> None:
    sync_store.guards.admit("r", 5, now=T)
    before = rows(engine, GUARDS)
    assert not sync_store.guards.admit("r", 4, now=T + 1)
    assert rows(engine, GUARDS) == before
    assert sync_store.guards.admit("r", 5, now=T + 2)
    assert rows(engine, GUARDS) == [("r", 5, T + 2)]


@pytest.mark.parametrize("commits", [True, False])
def test_it_is_in_the_callers_transaction(engine: Engine, commits: bool) -> None:
    store = Store(engine)
    store.guards.admit("r", 1)
    with Session(engine) as session:
        guards = UnitOfWork(session).guards
        assert guards.admit("r", 2)
        assert guards.highest("r") == 2
        assert not guards.admit("r", 1)
        if commits:
            session.commit()
        else:
            session.rollback()
    assert store.guards.highest("r") == (2 if commits else 1)


async def test_the_async_form_is_too(async_engine: AsyncEngine) -> None:
    async with AsyncSession(async_engine) as session:
        guards = AsyncUnitOfWork(session).guards
        assert await guards.admit("r", 2)
        await session.rollback()
        assert await guards.highest("r") is None
        assert await guards.admit("r", 1)
        await session.commit()
        assert not await guards.admit("r", 0)


BAD: list[tuple[str, tuple[Any, Any]]] = [
    *(("resource", (bad, 1)) for bad in ("", "x" * 256, "\x00", "\ud800", None, 7)),
    *(("fence", ("r", bad)) for bad in (-1, 2**63, 1.0, "1", True, None)),
]


def test_what_is_refused_is_refused_before_anything_is_written(sync_store: Store, engine: Engine) -> None:
    for field, arguments in BAD:
        with pytest.raises(InvalidValue, match=field):
            sync_store.guards.admit(*arguments)
    assert rows(engine, GUARDS) == []


@pytest.mark.parametrize("admits", [True, False])
def test_the_row_stays_locked_until_the_write_is_over(engine: Engine, admits: bool) -> None:
    """Whoever comes meanwhile waits, so that no lower fence slips in between the answer and the write."""
    store = Store(engine)
    store.guards.admit("r", 5)
    answers: list[bool] = []
    with Session(engine) as session:
        assert UnitOfWork(session).guards.admit("r", 7)
        coming = threading.Thread(target=lambda: answers.append(store.guards.admit("r", 6)))
        coming.start()
        coming.join(0.2)
        assert answers == []
        if admits:
            session.rollback()
        else:
            session.commit()
    coming.join()
    assert answers == [admits]


# --- races ----------------------------------------------------------------------------------------

THREADS = 8


@pytest.fixture
def crowded(database: Database) -> Iterator[Engine]:
    engine = database.engine(pool_size=THREADS)
    if database.backend == "sqlite":
        listen.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = OFF"))
    yield engine
    engine.dispose()


def test_races_end_at_the_highest_and_admit_no_lower_one_after_it(crowded: Engine) -> None:
    """Each transaction tells when it began and ended; who began after a higher one's commit is refused."""
    tickets = itertools.count()
    told: list[tuple[int, int, int, bool]] = []  #: began, ended, fence, admitted
    barrier = threading.Barrier(THREADS)
    store = Store(crowded)
    store.guards.highest("r")

    def work(number: int) -> None:
        chance = random.Random(number)
        fence = number
        barrier.wait(60)
        for _ in range(12):
            began = next(tickets)
            with store.begin() as uow:
                admitted = uow.guards.admit("r", fence)
            told.append((began, next(tickets), fence, admitted))
            fence += chance.randint(0, 2 * THREADS)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 12 * THREADS
    highest = max(fence for _, _, fence, admitted in told if admitted)
    assert highest == max(fence for _, _, fence, _ in told), "the highest of all is admitted by anybody"
    with crowded.connect() as connection:
        assert connection.scalar(select(GUARDS.c.fence)) == highest
    for began, _, fence, admitted in told:
        over = [f for _, ended, f, a in told if a and ended < began]
        if admitted:
            assert fence >= max(over, default=0), "a lower one was admitted after a higher one"
    assert not all(admitted for *_, admitted in told), "this was no race"
