"""Rows commit out of the order of their numbers, roll back, or idle: none is skipped. FAULTS 40 and 41.

Eight writers against a real relay. One in five draws its number early, before its transaction, and commits
late; that is where "seq > the last one" skips 40 % of the rows, and a snapshot's xmin in addition 8 %.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from fencedjobs import Store, UnitOfWork, payload
from fencedjobs.relay import Relay
from fencedjobs.values import Event
from tests.databases import Database
from tests.outbox.helpers import OUTBOX, SERVERS

WRITERS = 8


class Writer(threading.Thread):
    """Adds events for so many seconds, each in its own transaction, quick or slow, kept or not."""

    def __init__(self, engine: Engine, number: int, seconds: float, start: threading.Barrier) -> None:
        super().__init__()
        self._engine = engine
        self._seconds = seconds
        self._start = start
        self._number = number
        self._chance = random.Random()
        self.committed: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._draw()  # so that it is connected
            self._start.wait(60)
            end = time.monotonic() + self._seconds
            while time.monotonic() < end:
                self._write(f"{self._chance.random()}-{self._number}")
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            self.error = error

    def _write(self, id: str) -> None:
        way = self._chance.choices(["quick", "early", "undone", "idle"], [60, 20, 10, 10])[0]
        early = self._draw() if way == "early" else None
        if early is not None:
            self._pause(0.1)
        with Session(self._engine) as session:
            if early is None:
                UnitOfWork(session).outbox.add(id, id, topic="t")
            else:
                session.execute(OUTBOX.insert().values(row(id, early)))
            self._pause(0.2 if way == "idle" else 0.03)
            if way == "undone":
                session.rollback()
                return
            session.commit()
        self.committed.append(id)

    def _draw(self) -> int:
        """A number that a later transaction will use: drawn by an INSERT that is undone."""
        with self._engine.connect() as connection:
            answer = connection.execute(OUTBOX.insert().values(row(f"draws {self._chance.random()}")))
            key: Any = answer.inserted_primary_key
            connection.rollback()
            return int(key[0])

    def _pause(self, most: float) -> None:
        time.sleep(self._chance.uniform(0, most))


def row(id: str, seq: int | None = None) -> dict[str, Any]:
    """What `add` writes, under a number of our own choice."""
    plain = {"id": id, "lane": "default", "topic": "t", "payload": payload.encode("payload", id)}
    number = {} if seq is None else {"seq": seq}
    return {**plain, **number, "digest": payload.digest("t", "default", id), "created_at": time.time()}


def watermark_would_skip(seqs: list[int]) -> int:
    """How many of these, in the order in which they could be seen, a "seq > last" had passed over."""
    last = skipped = 0
    for seq in seqs:
        skipped += seq < last
        last = max(last, seq)
    return skipped


def simulate(engine: Engine, seconds: float) -> tuple[list[str], list[Event]]:
    got: list[Event] = []

    def send(event: Event) -> bool:
        got.append(event)
        return True

    store = Store(engine)
    relay = Relay(store, send, poll=0.002, mark_every=16)
    relaying = threading.Thread(target=relay.run)
    start = threading.Barrier(WRITERS)
    writers = [Writer(engine, n, seconds, start) for n in range(WRITERS)]
    for thread in (relaying, *writers):
        thread.start()
    for writer in writers:
        writer.join()
    relay.stop()
    relaying.join()
    Relay(store, send).run(until_empty=True)
    for writer in writers:
        if writer.error is not None:
            raise writer.error
    return [id for writer in writers for id in writer.committed], got


def check(database: Database, seconds: float) -> str:
    engine = database.engine(pool_size=2 * WRITERS + 2)
    committed, got = simulate(engine, seconds)
    engine.dispose()
    skipped = watermark_would_skip([event.seq for event in got])
    assert skipped > len(got) / 100, "the simulation is not one of rows out of order"
    received = [event.id for event in got]
    assert len(received) == len(set(received)), "a duplicate, and no relay died"
    assert set(received) == set(committed), "one was skipped, or came from a transaction that was undone"
    return f"{database.backend}: {len(got)} events, 0 skipped; a watermark would have skipped {skipped}"


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_no_row_is_skipped_whatever_order_they_commit_in(database: Database) -> None:
    check(database, seconds=1.5)


@pytest.mark.soak
@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_no_row_is_skipped_in_a_longer_run(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    told = check(database, seconds=15)
    with capsys.disabled():
        print(f"\n{told}")
