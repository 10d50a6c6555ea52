"""What MariaDB rolls back behind the handler's back, and what it keeps. FAULTS 31, 76, 77, 78."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from fencedjobs import JobState, TransactionLost
from tests.hosts import Handler, Host, on, told
from tests.transactions.handlers import add, swallowing
from tests.transactions.rival import Rival, locking, rival

pytestmark = on("mariadb")
LOST = ("TransactionLost", "leased")


@pytest.fixture
def other(host: Host) -> Iterator[Rival]:
    with rival(host.observer) as other:
        yield other


def outcome(host: Host, handler: Handler) -> tuple[object, ...]:
    """As `Host.verdict`, without the rows that are there to be fought over."""
    lease = host.leased()
    error = told(host.completing, lease, handler)
    rows = [note for note in host.notes() if not note.startswith("row ")]
    return (type(error).__name__ if error else "", str(host.state(lease)), *rows)


def test_a_swallowed_deadlock_completes_nothing(host: Host, other: Rival) -> None:
    def handler(session: Session) -> None:
        add(session, "a")
        with suppress(OperationalError):
            other.deadlock(session)
        add(session, "b")

    assert outcome(host, handler) == LOST


def test_a_deadlock_that_only_the_driver_saw_completes_nothing(host: Host, other: Rival) -> None:
    def handler(session: Session) -> None:
        add(session, "a")
        cursor: Any = session.connection().connection.cursor()

        def raw(statement: Any) -> None:
            cursor.execute(str(statement.compile(session.get_bind(), compile_kwargs={"literal_binds": True})))

        unseen = type("Unseen", (), {"execute": staticmethod(raw)})()
        with suppress(Exception):
            other.deadlock(unseen)
        cursor.close()
        add(session, "b")

    assert outcome(host, handler) == LOST


def test_a_deadlock_swallowed_in_a_savepoint_completes_nothing(host: Host, other: Rival) -> None:
    def handler(session: Session) -> None:
        add(session, "a")
        with swallowing(), session.begin_nested():
            other.deadlock(session)
        with swallowing():
            add(session, "b")

    assert outcome(host, handler) == LOST


def test_the_deadlock_comes_out_when_nobody_swallows_it(host: Host, other: Rival) -> None:
    def handler(session: Session) -> None:
        add(session, "a")
        other.deadlock(session)

    lease = host.leased()
    error = told(host.completing, lease, handler)
    assert isinstance(error, OperationalError)
    assert error.orig is not None
    assert error.orig.args[0] == 1213
    assert host.state(lease) is JobState.LEASED


def test_the_handlers_own_error_comes_out_although_its_savepoint_is_gone(host: Host, other: Rival) -> None:
    mishap = ValueError()

    def handler(session: Session) -> None:
        session.begin_nested()
        add(session, "a")
        with suppress(OperationalError):
            other.deadlock(session)
        raise mishap

    assert told(host.completing, host.leased(), handler) is mishap
    assert "a" not in host.notes()


def test_a_swallowed_lock_wait_timeout_completes_nothing(host: Host, other: Rival) -> None:
    def handler(session: Session) -> None:
        add(session, "a")
        with suppress(OperationalError):
            session.execute(locking("row 2", nowait=True))  # error 1205, as after a long wait
        add(session, "b")

    assert outcome(host, handler) == LOST


def test_a_lock_wait_timeout_in_a_savepoint_that_is_rolled_back_is_forgiven(host: Host, other: Rival) -> None:
    def handler(session: Session) -> None:
        add(session, "a")
        with suppress(OperationalError), session.begin_nested():
            add(session, "lost")
            session.execute(locking("row 2", nowait=True))
        add(session, "b")

    assert outcome(host, handler) == ("", "done", "a", "b")


def test_a_verb_that_met_a_deadlock_inside_its_own_savepoint_is_repeated(host: Host, other: Rival) -> None:
    met: list[str] = []

    def meet(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO fenced_jobs") and not met:
            met.append(statement)
            other.deadlock(connection)

    event.listen(host.engine, "before_cursor_execute", meet)
    assert host.store.enqueue_many({"id": id} for id in ("a", "b")) == ["a", "b"]
    assert met
    assert [record.state for id in ("a", "b") if (record := host.store.get(id))] == ["ready", "ready"]


def test_a_block_that_met_a_deadlock_is_not_repeated(host: Host, other: Rival) -> None:
    calls = []

    def handler(session: Session) -> None:
        calls.append(session)
        other.deadlock(session)

    assert isinstance(told(host.begin, handler), OperationalError)
    assert len(calls) == 1


def test_a_snapshot_that_refuses_changed_rows_does_not_stop_a_completion(host: Host) -> None:
    """innodb_snapshot_isolation, on by default in newer servers: a renewal meanwhile would be error 1020."""
    lease = host.leased()
    with host.store.completing(lease) as uow:
        run: Any = getattr(uow.session, "run_sync", lambda work: work(uow.session))
        run(lambda session: session.execute(text("SET innodb_snapshot_isolation = ON")))
        run(lambda session: session.execute(text("SELECT count(*) FROM fenced_jobs")).all())
        host.store.renew(lease, ttl=900)
        run(lambda session: add(session, "a"))
        run(lambda session: session.execute(text("SET innodb_snapshot_isolation = DEFAULT")))
    assert (host.state(lease), host.notes()) == (JobState.DONE, ["a"])


def test_a_lost_transaction_says_what_happened(host: Host, other: Rival) -> None:
    def handler(session: Session) -> None:
        with suppress(OperationalError):
            other.deadlock(session)

    error = told(host.completing, host.leased(), handler)
    assert isinstance(error, TransactionLost)
    assert "a statement failed and the error was swallowed" in str(error)
