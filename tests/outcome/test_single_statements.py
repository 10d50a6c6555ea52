"""Verbs of one statement that is its own COMMIT: its lost answer is told as unknown, and never before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from sqlalchemy import event

from fencedjobs import JobLease, OutcomeUnknown
from fencedjobs.own import Transactions
from tests.hosts import told
from tests.jobs.test_statements import watched
from tests.outcome.line import Line
from tests.proxy import Cut

pytestmark = [
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
    pytest.mark.parametrize("driver", [None, "psycopg", "asyncpg"], indirect=True),
]
_numbers = count()

Verb = Callable[[Any, JobLease, str], object]
VERBS: dict[str, Verb] = {
    "enqueue": lambda store, lease, id: store.enqueue(f"new {id}"),
    "claim": lambda store, lease, id: store.claim("w", ttl=60, queue=id),
    "claim by id": lambda store, lease, id: store.claim("w", ttl=60, id=f"next {id}"),
    "renew": lambda store, lease, id: store.renew(lease, ttl=900),
    "checkpoint": lambda store, lease, id: store.checkpoint(lease, {"page": 2}),
    "complete": lambda store, lease, id: store.complete(lease, {"n": 1}),
    "complete_many": lambda store, lease, id: store.complete_many([lease]),
    "release": lambda store, lease, id: store.release(lease),
    "set aside": lambda store, lease, id: store.set_aside(lease, "why"),
    "quarantine": lambda store, lease, id: store.quarantine(lease.id, "why"),
    "cancel": lambda store, lease, id: store.cancel(lease.id),
    "accept": lambda store, lease, id: store.inbox.accept(id, {}),
}


def prepared(line: Line) -> tuple[JobLease, str]:
    """What a verb can work on."""
    id = f"q{next(_numbers)}"
    line.direct.enqueue(f"next {id}", queue=id)
    return line.host.leased(), id


def seen(line: Line, lease: JobLease, id: str) -> list[object]:
    """Everything that one of the verbs could have changed."""
    jobs = [line.direct.get(job) for job in (lease.id, f"new {id}", f"next {id}")]
    return [*jobs, line.direct.inbox.stats().messages]


@pytest.fixture(params=VERBS)
def verb(request: pytest.FixtureRequest, line: Line) -> Verb:
    """A verb on a connection that has just done the same, so that a driver has prepared the statement."""
    chosen = VERBS[request.param]
    chosen(line.host.store, *prepared(line))
    return chosen


def test_it_is_one_statement_without_begin_and_commit(line: Line, verb: Verb) -> None:
    lease, id = prepared(line)
    line.host.store.counts()
    with watched(line.host.engine) as sent:
        verb(line.host.store, lease, id)
    assert len(sent.statements) == 1, sent


def test_a_statement_that_never_arrived_is_unknown_and_did_nothing(line: Line, verb: Verb) -> None:
    lease, id = prepared(line)
    before = seen(line, lease, id)
    error = line.losing(Cut.REQUEST, verb, line.host.store, lease, id)
    assert isinstance(error, OutcomeUnknown)
    assert line.commits == 1, "it was repeated"
    assert seen(line, lease, id) == before


def test_a_statement_whose_answer_was_lost_is_unknown_and_happened_once(line: Line, verb: Verb) -> None:
    lease, id = prepared(line)
    before = seen(line, lease, id)
    error = line.losing(Cut.ANSWER, verb, line.host.store, lease, id)
    assert isinstance(error, OutcomeUnknown)
    assert line.commits == 1, "it was repeated"
    changed = [a != b for a, b in zip(before, seen(line, lease, id), strict=True)]
    assert changed.count(True) == 1


def test_a_connection_that_was_closed_while_nobody_used_it_is_no_more_than_a_delay(
    line: Line, verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, id = prepared(line)
    line.proxy.down()
    line.proxy.up()
    monkeypatch.setattr(Transactions, "trusted", 0.0)
    assert told(verb, line.host.store, lease, id) is None


def test_the_connection_goes_back_as_it_was(line: Line, verb: Verb) -> None:
    lease, id = prepared(line)
    verb(line.host.store, lease, id)

    def autocommits() -> object:
        with line.host.engine.connect() as connection:
            return connection.connection.dbapi_connection.autocommit  # type: ignore[union-attr]

    assert line.host.run(autocommits) is False
    assert line.host.left_behind() == []


@pytest.mark.parametrize("name", ["begin", "checkout"])
def test_what_the_application_begins_on_the_connection_is_no_harm(line: Line, verb: Verb, name: str) -> None:
    """As it does that sets a role or a tenant for each transaction."""

    def on_begin(connection: Any) -> None:
        connection.exec_driver_sql("SET LOCAL application_name = 'shop'")

    def on_checkout(driver: Any, *_: Any) -> None:
        cursor = driver.cursor()
        cursor.execute("SET LOCAL application_name = 'shop'")
        cursor.close()

    lease, id = prepared(line)
    before = seen(line, lease, id)
    target, listener = (
        (line.host.engine, on_begin) if name == "begin" else (line.host.engine.pool, on_checkout)
    )
    event.listen(target, name, listener)
    verb(line.host.store, lease, id)
    event.remove(target, name, listener)
    changed = [a != b for a, b in zip(before, seen(line, lease, id), strict=True)]
    assert changed.count(True) == 1
    assert line.host.left_behind() == []
