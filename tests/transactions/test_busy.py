"""SQLite files that somebody else is using: waited for, at BEGIN and at COMMIT. FAULTS 68 and 72."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from fencedjobs import own
from fencedjobs.own import Patience, Transactions
from tests.databases import Database
from tests.hosts import Host, hosted, on, told
from tests.transactions.handlers import core_statements

pytestmark = on("sqlite")

MODES: dict[str, dict[str, Any]] = {"legacy": {}, "no time-out": {"timeout": 0}}
if sys.version_info >= (3, 12):
    MODES["autocommit=False"] = {"timeout": 0, "autocommit": False}


@dataclass
class Crowd:
    """An application, and a connection of somebody else's to its file."""

    host: Host
    other: sqlite3.Connection
    leave_at: int = 3  #: somebody leaves when this was tried so many times
    watched: str = ""
    tries: list[str] = field(default_factory=list)

    def on_statement(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(self.watched or "nothing"):
            self.tries.append(statement)
            if len(self.tries) == self.leave_at:
                self.other.execute("ROLLBACK")

    def on_commit(self, connection: Any) -> None:
        """A verb of one statement leaves the COMMIT to the driver, in its legacy mode."""
        driver = connection.connection.driver_connection
        legacy = getattr(getattr(driver, "_conn", driver), "autocommit", True) is not False
        if self.watched == "COMMIT" and legacy and driver.in_transaction:
            self.on_statement(connection, None, "COMMIT")

    def somebody_reads(self) -> None:
        self.other.execute("BEGIN")
        self.other.execute("SELECT count(*) FROM fenced_jobs").fetchall()
        self.watched, self.tries = "COMMIT", []

    def somebody_writes(self) -> None:
        self.other.execute("BEGIN IMMEDIATE")
        self.watched, self.tries = "BEGIN IMMEDIATE", []


@pytest.fixture(params=MODES)
def crowd(request: pytest.FixtureRequest, database: Database, driver: str | None) -> Iterator[Crowd]:
    # The driver's own wait of some seconds for each try would only make the tests longer.
    arguments = {"timeout": 0.01} | MODES[request.param]
    with hosted(database, driver, connect_args=arguments) as host:
        other = sqlite3.connect(str(database.url.database), isolation_level=None, check_same_thread=False)
        crowd = Crowd(host, other)
        event.listen(host.engine, "before_cursor_execute", crowd.on_statement)
        event.listen(host.engine, "commit", crowd.on_commit)
        yield crowd
        other.close()


def verbs(host: Host) -> dict[str, Callable[[], object]]:
    leases = [host.leased() for _ in range(2)]
    return {
        "enqueue": lambda: host.store.enqueue("j"),
        "complete": lambda: host.store.complete(leases[0]),
        "completing": lambda: host.completing(leases[1], core_statements),
        "begin": lambda: host.begin(core_statements),
    }


def test_a_commit_in_a_readers_way_is_sent_again(crowd: Crowd) -> None:
    for name, verb in verbs(crowd.host).items():
        crowd.somebody_reads()
        assert told(verb) is None, name
        assert len(crowd.tries) == crowd.leave_at, name
        assert crowd.host.left_behind() == [], name
        crowd.host.clear()
    assert crowd.host.store.counts() == {"default": {"ready": 1, "done": 2}}


def test_a_writer_is_waited_for(crowd: Crowd) -> None:
    for name, verb in verbs(crowd.host).items():
        crowd.somebody_writes()
        assert told(verb) is None, name
        assert len(crowd.tries) == crowd.leave_at, name
        crowd.host.clear()
    assert crowd.host.store.counts() == {"default": {"ready": 1, "done": 2}}


def test_a_reader_who_stays_is_told_and_nothing_is_left_open(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transactions, "patience", lambda self, seconds=0: Patience(self.sleep, 0.05))
    crowd.leave_at = 0
    for name, verb in verbs(crowd.host).items():
        before = crowd.host.store.counts()
        crowd.somebody_reads()
        error = told(verb)
        crowd.other.execute("ROLLBACK")
        assert isinstance(error, OperationalError), f"{name}: {error!r}"
        assert "locked" in str(error), name
        assert len(crowd.tries) > 1, name
        assert crowd.host.left_behind() == [], name
        assert (crowd.host.store.counts(), crowd.host.notes()) == (before, []), name
        assert told(verb) is None, "and then it works"
        crowd.host.clear()


def test_a_writer_who_stays_is_told_and_nothing_is_left_open(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transactions, "patience", lambda self, seconds=0: Patience(self.sleep, 0.05))
    crowd.leave_at = 0
    for name, verb in verbs(crowd.host).items():
        crowd.somebody_writes()
        error = told(verb)
        crowd.other.execute("ROLLBACK")
        assert isinstance(error, OperationalError), f"{name}: {error!r}"
        assert crowd.host.left_behind() == [], name
        assert told(verb) is None, "and then it works"
        crowd.host.clear()


def test_reading_does_not_wait_for_a_writer(crowd: Crowd) -> None:
    lease = crowd.host.leased()
    crowd.other.execute("BEGIN IMMEDIATE")
    record = crowd.host.store.get(lease.id)
    crowd.other.execute("ROLLBACK")
    assert record is not None
    assert own.PATIENCE > 1, "a wait would have been long"
