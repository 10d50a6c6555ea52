"""A full disk at every step: SQLite rolls back by itself, and what follows would run alone. FAULTS 32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import NullPool, event, insert
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from fencedjobs import JobState
from tests.databases import Database
from tests.hosts import Host, Order, hosted, on, told

pytestmark = on("sqlite")
BIG = "x" * 9000  # some pages


class Disk:
    """A database file that may grow by so many pages only."""

    def __init__(self) -> None:
        self.host: Host
        self.left: int | None = None

    def limit(self, dbapi_connection: Any, _: Any) -> None:
        if self.left is not None:
            cursor = dbapi_connection.cursor()
            cursor.execute("PRAGMA page_count")
            pages = cursor.fetchone()[0]
            cursor.execute(f"PRAGMA max_page_count = {pages + self.left}")
            cursor.close()

    def with_pages(self, left: int, work: Callable[[], object]) -> BaseException | None:
        self.left = left
        try:
            return told(work)
        finally:
            self.left = None


@pytest.fixture
def disk(database: Database, driver: str | None) -> Iterator[Disk]:
    disk = Disk()

    def adapt(engine: Any) -> None:
        event.listen(engine, "connect", disk.limit)

    # The limit is the connection's: a new one for each transaction.
    with hosted(database, driver, adapt=adapt, poolclass=NullPool) as disk.host:
        yield disk


def two_effects(session: Session) -> None:
    session.execute(insert(Order), {"id": 1, "note": "a" + BIG})
    session.execute(insert(Order), {"id": 2, "note": "b" + BIG})


def two_effects_and_swallows(session: Session) -> None:
    with suppress(OperationalError):
        session.execute(insert(Order), {"id": 1, "note": "a" + BIG})
    with suppress(OperationalError):
        session.execute(insert(Order), {"id": 2, "note": "b" + BIG})


def two_effects_by_the_drivers_own_cursor(session: Session) -> None:
    cursor: Any = session.connection().connection.cursor()
    for number, note in enumerate("ab"):
        with suppress(Exception):
            cursor.execute("INSERT INTO host_orders VALUES (?, ?)", (number, note + BIG))
    cursor.close()


@pytest.mark.parametrize(
    "handler", [two_effects, two_effects_and_swallows, two_effects_by_the_drivers_own_cursor]
)
def test_a_job_is_never_done_without_its_effects_wherever_the_disk_is_full(disk: Disk, handler: Any) -> None:
    host, seen = disk.host, set[str]()
    for pages in range(20):
        lease = host.leased()
        error = disk.with_pages(pages, lambda: host.completing(lease, handler, result=BIG))  # noqa: B023
        state, effects = host.state(lease), len(host.notes())
        done = (error is None, state, effects) == (True, JobState.DONE, 2)
        nothing = (error is None, state, effects) == (False, JobState.LEASED, 0)
        assert done or nothing, f"{pages} pages: {error!r}, {state}, {effects} effects"
        seen.add("done" if done else type(error).__name__)
        host.clear()
        if done:
            break
    assert seen >= {"done", "TransactionLost" if handler is not two_effects else "OperationalError"}


def test_every_verb_happens_or_says_so_wherever_the_disk_is_full(disk: Disk) -> None:
    host = disk.host
    store = host.store
    verbs: dict[str, Callable[[str], object]] = {
        "enqueue": lambda id: store.enqueue(f"new {id}", BIG),
        "enqueue_many": lambda id: store.enqueue_many([{"id": f"new {id}", "payload": BIG}]),
        "claim": lambda id: store.claim("w" * 200, ttl=60, id=f"ready {id}"),
        "complete": lambda id: store.complete(leases[id], BIG),
        "fail": lambda id: store.fail(leases[id], BIG),
        "requeue": lambda id: store.requeue(f"cancelled {id}", payload=BIG, by="me", reason=BIG),
        "lock": lambda id: store.locks.claim(f"lock {id}", "w" * 250, ttl=60),
    }
    leases: dict[str, Any] = {}
    for name, verb in verbs.items():
        for pages in range(12):
            id = f"{name}-{pages}"
            store.enqueue(f"ready {id}")
            store.enqueue(f"cancelled {id}")
            store.cancel(f"cancelled {id}")
            store.enqueue(id)
            leases[id] = store.claim("w", ttl=600, id=id)
            before = [store.get(job) for job in (id, f"new {id}", f"ready {id}", f"cancelled {id}")]
            error = disk.with_pages(pages, lambda: verb(id))  # noqa: B023
            after = [store.get(job) for job in (id, f"new {id}", f"ready {id}", f"cancelled {id}")]
            if error is None:
                assert name == "lock" or after != before, f"{id} said nothing and did nothing"
                break
            assert isinstance(error, OperationalError), repr(error)
            assert after == before, f"{id} said {error!r}, and did something"
        else:
            raise AssertionError(f"{name} never worked")
