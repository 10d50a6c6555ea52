"""A queue as people write it is replaced: with rows in all states, by real Alembic, on each database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fencedjobs import JobState, Store, Worker
from tests.cli.helpers import text_of
from tests.databases import Database
from tests.pages import blocks
from tests.programs import imported

FOLDER = Path(__file__).parents[2] / "examples" / "hand_rolled"
REVISION = "migrations/versions/0002_fencedjobs.py"
PAGE = "replace_your_queue.md"
HOUR = 3600


class App:
    """The app of the example, with its own queue and its own history, on one database."""

    def __init__(self, business: Any, before: Any, after: Any) -> None:
        self.business, self.before, self.after = business, before, after
        self.engine: Engine = business.engine
        self.store = Store(self.engine)
        self._config = Config(str(FOLDER / "alembic.ini"))

    def upgrade(self, revision: str) -> None:
        command.upgrade(self._config, revision)

    def repeat(self) -> None:
        """The last revision once more, as when it was interrupted before it was recorded."""
        command.stamp(self._config, "0001")
        self.upgrade("head")

    def add(self, order: str, **values: Any) -> int:
        """A row of the old queue."""
        values = {"payload": {"order": order, "qty": 1}, **values}
        with Session(self.engine) as session, session.begin():
            job = self.before.Job(**values)
            session.add(job)
            session.flush()
            return int(job.id)

    def stalled(self, worker: str) -> Any:
        """A job of a worker that has not been heard of for longer than the queue has patience."""
        job = self.before.claim_next_job(worker)
        gone = self.before.now() - self.before.PATIENCE - timedelta(seconds=2)
        self.sql("UPDATE jobs SET locked_at = :gone WHERE id = :id", gone=gone, id=job.id)
        return job

    def sql(self, statement: str, **values: Any) -> list[Any]:
        with self.engine.begin() as connection:
            answer = connection.execute(text(statement), values)
            return sorted(map(tuple, answer)) if answer.returns_rows else []

    def shipped(self) -> list[str]:
        return [order for (order,) in self.sql("SELECT order_id FROM shipments")]

    def work(self, later: float = 0) -> None:
        """The new worker, on the database as it is in so many seconds."""
        if not later:
            self.after.worker.run(until_empty=True)
            return
        worker = Worker(Store(self.engine, clock=lambda: time.time() + later))
        worker.handler("pack")(self.after.pack)
        worker.run(until_empty=True)


@pytest.fixture
def app(empty: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    monkeypatch.setenv("DATABASE_URL", text_of(empty.url))
    with imported(FOLDER, "business", "before", "after") as modules:
        app = App(**modules)
        app.upgrade("0001")
        yield app
        app.engine.dispose()


def refused(write: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(DBAPIError, match="jobs"):
        write(*arguments)


# --- the page -------------------------------------------------------------------------------------


def test_the_page_shows_the_code_that_is_tested() -> None:
    shown = dict(filter(None, (block.file for block in blocks(PAGE))))
    assert set(shown) == {"before.py", "after.py", REVISION}
    for name, code in shown.items():
        assert code == (FOLDER / name).read_text(), f"{name} is another on the page"


def test_the_change_on_the_page_is_one_of_this_code() -> None:
    (change,) = (block for block in blocks(PAGE) if block.language == "diff")
    for sign, name in (("-", "before.py"), ("+", "after.py")):
        lines = [line[1:] for line in change.text.splitlines()[2:] if line[0] == sign]
        assert "\n".join(lines) in (FOLDER / name).read_text(), f"{name} does not have the lines with {sign}"


# --- what is wrong with it ------------------------------------------------------------------------


def test_a_stalled_worker_of_the_old_queue_packs_what_another_has_packed(app: App) -> None:
    app.add("order-1")
    late = app.stalled("A")
    app.before.work("B")
    app.before.pack(late)
    assert app.shipped() == ["order-1", "order-1"]


# --- its replacement ------------------------------------------------------------------------------


def test_what_was_not_done_is_done_once_and_what_was_done_is_not_done_again(app: App) -> None:
    before = app.before
    app.add("done")
    before.work("A")
    app.add("stalled")
    late = app.stalled("A")
    waits = app.add("waits")
    in_an_hour = app.add("in an hour", run_at=before.now() + timedelta(seconds=HOUR))
    failed_twice = app.add("failed twice", attempts=2, error="no paper")
    running = app.add("died", status="running", attempts=4, locked_by="B", locked_at=before.now())
    last = app.add("died at last", status="running", attempts=5, locked_by="B", locked_at=before.now())
    failed = app.add("failed", status="failed", attempts=5, error="no such shelf")

    app.upgrade("head")
    app.repeat()
    assert app.store.counts() == {
        "default": {JobState.READY: 5, JobState.SCHEDULED: 1, JobState.QUARANTINED: 1}
    }
    left = {id: job(app, id).max_attempts for id in (waits, failed_twice, running, last, failed)}
    assert left == {waits: 5, failed_twice: 3, running: 1, last: 1, failed: 5}
    assert job(app, failed).reason == "no such shelf"
    assert abs(job(app, in_an_hour).until - time.time() - HOUR) < 120
    assert app.sql("SELECT status, COUNT(*) FROM old_jobs GROUP BY status") == [("done", 1), ("moved", 7)]

    refused(before.pack, late)
    refused(before.heartbeat, late.id)
    refused(before.claim_next_job, "A")
    assert app.shipped() == ["done"]
    app.work()
    unfinished = ["died", "died at last", "done", "failed twice", "stalled", "waits"]
    assert app.shipped() == unfinished
    refused(before.pack, late)
    app.work(later=HOUR + 60)
    assert app.shipped() == sorted([*unfinished, "in an hour"])
    assert app.store.counts() == {"default": {JobState.DONE: 6, JobState.QUARANTINED: 1}}

    assert app.store.requeue(f"jobs-{failed}", by="an operator", reason="the shelf is there")
    with Session(app.engine) as session, session.begin():
        app.after.enqueue(session, {"order": "new", "qty": 1})
    app.repeat()
    app.work()
    assert app.shipped() == sorted([*unfinished, "in an hour", "failed", "new"])


@pytest.mark.parametrize("empty", ["postgresql", "mariadb"], indirect=True)  # SQLite lets one write at a time
def test_a_worker_in_the_middle_of_its_transaction_is_refused_with_all_of_it(app: App) -> None:
    app.add("order-1")
    late = app.stalled("A")

    def packs() -> None:
        with Session(app.engine) as session, session.begin():
            session.add(app.business.Shipment(order_id="order-1", qty=1))
            session.flush()
            app.upgrade("head")
            app.before.complete(session, late.id, {"packed": 1})

    refused(packs)
    assert app.shipped() == []
    app.work()
    assert app.shipped() == ["order-1"]


def test_an_upgrade_that_was_interrupted_goes_on(app: App) -> None:
    app.add("waits")
    app.sql("ALTER TABLE jobs RENAME TO old_jobs")
    app.upgrade("head")
    app.work()
    assert app.shipped() == ["waits"]


def job(app: App, old: int) -> Any:
    found = app.store.get(f"jobs-{old}")
    assert found is not None
    return found
