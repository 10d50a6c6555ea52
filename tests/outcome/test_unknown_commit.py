"""A COMMIT whose answer is lost is unknown: told, never repeated blindly, and found out. FAULTS 54."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fencedjobs import JobLease, Outcome, OutcomeUnknown
from fencedjobs.own import Transactions
from tests.databases import ASYNC_DRIVERS
from tests.hosts import MORE_DRIVERS, Host, on, told
from tests.outcome.line import Line
from tests.proxy import Cut
from tests.transactions.handlers import add

pytestmark = on("postgresql", "mariadb", drivers=(None, *ASYNC_DRIVERS, *MORE_DRIVERS))


@pytest.fixture(autouse=True)
def with_begin_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verb without them, as on a connection that was not used for a while; see test_single_statements."""
    monkeypatch.setattr(Transactions, "trusted", 0.0)


def add_a(session: Session) -> None:
    add(session, "a")


Verb = Callable[[JobLease, str], object]


def verbs(host: Host) -> dict[str, tuple[Verb, Verb]]:
    """Each verb on a leased job and a fresh id; and what it should name as its subject."""
    store = host.store
    return {
        "enqueue": (lambda _, id: store.enqueue(id), lambda _, id: id),
        "enqueue_many": (lambda _, id: store.enqueue_many([{"id": id}]), lambda _, id: [id]),
        "claim": (lambda *_: store.claim("w", ttl=60, queue="claims"), lambda *_: "w"),
        "by id": (lambda _, id: store.claim("w", ttl=60, id=f"ready {id}"), lambda _, id: f"ready {id}"),
        "renew": (lambda lease, _: store.renew(lease, ttl=900), lambda lease, _: lease),
        "renew_many": (lambda lease, _: store.renew_many([lease], ttl=900), lambda lease, _: [lease]),
        "complete": (lambda lease, _: store.complete(lease), lambda lease, _: lease),
        "complete, named": (lambda lease, _: store.complete(lease=lease), lambda lease, _: lease),
        "complete_many": (lambda lease, _: store.complete_many([lease]), lambda lease, _: [lease]),
        "fail": (lambda lease, _: store.fail(lease, "why"), lambda lease, _: lease),
        "release": (lambda lease, _: store.release(lease), lambda lease, _: lease),
        "completing": (lambda lease, _: host.completing(lease, add_a), lambda lease, _: lease),
        "begin": (lambda *_: host.begin(add_a), lambda *_: None),
        "lock": (lambda _, id: store.locks.claim(f"lock {id}", "w", ttl=60), lambda _, id: f"lock {id}"),
    }  # fmt: skip


def seen(line: Line, lease: JobLease, id: str) -> list[object]:
    """Everything that one of the verbs could have changed."""
    jobs = [line.direct.get(job) for job in (lease.id, id, f"ready {id}", f"next {id}")]
    return [*jobs, line.direct.locks.get(f"lock {id}"), line.host.notes()]


def each(line: Line) -> Iterator[tuple[str, Any, Any, JobLease, str]]:
    for number, (name, (verb, subject)) in enumerate(verbs(line.host).items()):
        lease, id = line.host.leased(), f"new {number}"
        line.direct.enqueue(f"ready {id}")
        line.direct.enqueue(f"next {id}", queue="claims")
        yield name, verb, subject, lease, id
        line.direct.cancel(f"next {id}")
        line.host.clear()


def test_a_commit_that_never_arrived_is_unknown_and_did_nothing(line: Line) -> None:
    for name, verb, subject, lease, id in each(line):
        before = seen(line, lease, id)
        error = line.losing(Cut.REQUEST, verb, lease, id)
        assert isinstance(error, OutcomeUnknown), f"{name}: {error!r}"
        assert error.subject == subject(lease, id), name
        assert line.commits == 1, f"{name} was repeated"
        assert line.host.store.outcome(lease) is Outcome.HELD, name
        assert seen(line, lease, id) == before, name


def test_a_commit_whose_answer_was_lost_is_unknown_and_happened_once(line: Line) -> None:
    ended = {"fail", "release"}
    for name, verb, subject, lease, id in each(line):
        before = seen(line, lease, id)
        error = line.losing(Cut.ANSWER, verb, lease, id)
        assert isinstance(error, OutcomeUnknown), f"{name}: {error!r}"
        assert error.subject == subject(lease, id), name
        assert line.commits == 1, f"{name} was repeated"
        truth = Outcome.COMPLETED if "compl" in name else Outcome.ENDED if name in ended else Outcome.HELD
        assert line.host.store.outcome(lease) is truth, name
        changed = [a != b for a, b in zip(before, seen(line, lease, id), strict=True)]
        assert changed.count(True) == (2 if name == "completing" else 1), f"{name}: {changed}"


def test_the_outcome_waits_for_a_commit_that_is_still_under_way(line: Line) -> None:
    lease = line.host.leased()
    error = line.losing(Cut.DELAYED, line.host.completing, lease, add_a)
    assert isinstance(error, OutcomeUnknown)
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(line.direct.outcome, lease)
        with pytest.raises(TimeoutError):
            asking.result(timeout=0.2)
        assert line.direct.get(lease.id).state == "leased"  # type: ignore[union-attr]
        line.proxy.deliver()
        assert asking.result(timeout=20) is Outcome.COMPLETED
    assert line.host.notes() == ["a"]


def test_the_outcome_is_asked_again_when_its_own_answer_is_lost(line: Line) -> None:
    lease = line.host.leased()
    line.statement = "FROM fenced_jobs"
    assert line.host.store.outcome(lease) is Outcome.HELD
    assert line.proxy.cuts == 1


def test_an_unknown_outcome_leaves_the_lease_to_be_completed_again_or_found_completed(line: Line) -> None:
    for cut in (Cut.REQUEST, Cut.ANSWER):
        lease = line.host.leased()
        assert isinstance(line.losing(cut, line.host.completing, lease, add_a), OutcomeUnknown)
        if line.host.store.outcome(lease) is Outcome.HELD:
            line.host.completing(lease, add_a)
        assert (line.host.state(lease), line.host.notes()) == ("done", ["a"])
        line.host.clear()


STATEMENTS = {
    "enqueue": "INSERT INTO fenced_jobs", "enqueue_many": "INSERT INTO fenced_jobs",
    "claim": "fenced_jobs", "by id": "fenced_jobs", "lock": "fenced_locks",
}  # fmt: skip


def test_a_connection_lost_before_the_commit_is_no_more_than_a_delay(line: Line) -> None:
    for name, verb, _, lease, id in each(line):
        if name in ("completing", "begin"):
            continue
        before = seen(line, lease, id)
        line.statement = STATEMENTS.get(name, "UPDATE fenced_jobs")
        cuts = line.proxy.cuts
        error = told(verb, lease, id)
        assert error is None, f"{name}: {error!r}"
        assert line.proxy.cuts == cuts + 1, name
        changed = [a != b for a, b in zip(before, seen(line, lease, id), strict=True)]
        assert changed.count(True) == 1, f"{name}: {changed}"


def test_in_a_block_a_connection_lost_before_the_commit_is_the_databases_own_error(line: Line) -> None:
    for statement in ("INSERT INTO host_orders", "RELEASE SAVEPOINT", "UPDATE fenced_jobs"):
        lease = line.host.leased()
        calls: list[Session] = []

        def handler(session: Session, calls: list[Session] = calls) -> None:
            calls.append(session)
            add(session, "a")

        line.statement = statement
        error = told(line.host.completing, lease, handler)
        assert isinstance(error, DBAPIError) or statement.startswith("RELEASE"), f"{statement}: {error!r}"
        assert not isinstance(error, OutcomeUnknown), statement
        assert error is not None
        assert len(calls) == 1, "the block is not repeated"
        assert (line.direct.outcome(lease), line.host.notes()) == (Outcome.HELD, []), statement
        line.host.completing(lease, add_a)
        assert line.host.notes() == ["a"]
        line.host.clear()


def test_reading_has_no_unknown_outcome(line: Line) -> None:
    lease = line.host.leased()
    assert line.losing(Cut.REQUEST, line.host.store.get, lease.id) is None
    assert line.losing(Cut.REQUEST, line.host.store.counts) is None
    assert line.losing(Cut.REQUEST, line.host.store.outcome, lease) is None
    assert line.commits == 0
