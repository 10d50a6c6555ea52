"""The verbs in a transaction of the caller's: they only write, and what they wrote ends with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from fencedjobs import JobState, LeaseLost, Store, UnitOfWork
from fencedjobs.models import Job
from tests.jobs.helpers import T, claimed, ids, row


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """A session as a host makes it, on a plain engine."""
    with Session(engine) as session:
        yield session


@pytest.fixture
def shop(engine: Engine) -> Store:
    return Store(engine)


def test_an_enqueue_is_seen_after_the_commit_and_not_before_or_without_it(
    shop: Store, session: Session
) -> None:
    """FAULTS 55."""
    uow = UnitOfWork(session)
    assert uow.jobs.enqueue("j", {"qty": 7}, now=T) == "j"
    assert uow.jobs.get("j") is not None
    if session.get_bind().dialect.name != "sqlite":  # where a claim waits for the writer
        assert shop.claim("a", ttl=9, now=T) is None
    session.rollback()
    assert shop.get("j") is None
    assert uow.jobs.enqueue("j", now=T) == "j"
    session.commit()
    assert claimed(shop, "j").fence == 1


def test_an_enqueue_goes_with_the_savepoint_it_is_in(shop: Store, session: Session) -> None:
    """FAULTS 55 and 70, with the driver's default transaction mode."""
    uow = UnitOfWork(session)
    uow.jobs.enqueue("outside", now=T)
    inside = session.begin_nested()
    uow.jobs.enqueue("inside", now=T)
    inside.rollback()
    with session.begin_nested():
        uow.jobs.enqueue("kept", now=T)
    session.commit()
    assert ids(shop.claim_many("a", ttl=9, limit=9, now=T)) == ["outside", "kept"]


def test_a_released_savepoint_does_not_survive_the_outer_rollback(shop: Store, session: Session) -> None:
    """FAULTS 70: in the legacy mode of SQLite's driver it did."""
    uow = UnitOfWork(session)
    with session.begin_nested():
        uow.jobs.enqueue("j", now=T)
    session.rollback()
    assert shop.get("j") is None
    assert shop.claim("a", ttl=9, now=T) is None


def test_everything_but_claim_and_renew_is_offered(session: Session) -> None:
    offered = {name for name in dir(UnitOfWork(session).jobs) if not name.startswith("_")}
    assert offered == {
        "enqueue", "enqueue_many", "complete", "complete_many", "fail", "release", "cancel", "quarantine",
        "requeue", "sweep", "purge", "get", "counts", "oldest_waiting", "checkpoint", "set_aside",
    }  # fmt: skip


def test_every_verb_writes_in_the_caller_s_transaction_and_not_elsewhere(store: Store) -> None:
    """FAULTS 71, too: a RETURNING that is not read to its end would keep SQLite from committing."""
    store.enqueue_many([{"id": id} for id in ("complete", "fail", "release", "many", "cancel")], now=T)
    store.enqueue_many([{"id": id} for id in ("quarantine", "requeue", "sweep", "purge")], now=T)
    leases = {id: claimed(store, id) for id in ("complete", "fail", "release", "many")}
    store.cancel("requeue", now=T)
    store.cancel("purge", now=T - 100)
    before = {id: store.get(id) for id in (*leases, "cancel", "quarantine", "requeue", "purge")}

    def all_of_them(jobs: Any) -> None:
        jobs.complete(leases["complete"], "ok", now=T)
        jobs.fail(leases["fail"], "no", retry=None, now=T)
        jobs.release(leases["release"], now=T)
        assert jobs.complete_many([leases["many"]], now=T) == []
        assert jobs.cancel("cancel", now=T)
        assert jobs.quarantine("quarantine", "why", now=T)
        assert jobs.requeue("requeue", by="eve", reason="x", now=T)
        assert jobs.purge(before=T) == 1
        assert jobs.enqueue("new", deadline=T, now=T) == "new"
        assert jobs.enqueue("complete", now=T) is None
        assert jobs.sweep(now=T) == 1

    class Stop(Exception):
        pass

    def stopped() -> None:
        with store.begin() as uow:
            all_of_them(uow.jobs)
            raise Stop

    with pytest.raises(Stop):
        stopped()
    assert {id: store.get(id) for id in before} == before
    assert store.get("new") is None
    with store.begin() as uow:
        all_of_them(uow.jobs)
    states = {id: str(row(store, id, "state")["state"]) for id in (*before, "new")}
    assert states == {
        "complete": "done", "fail": "quarantined", "release": "ready", "many": "done", "cancel": "cancelled",
        "quarantine": "quarantined", "requeue": "ready", "purge": "purged", "new": "quarantined",
    }  # fmt: skip


def test_many_are_added_in_a_transaction_of_the_store(store: Store) -> None:
    with store.begin() as uow:
        assert uow.jobs.enqueue_many([{"id": "a"}, {"id": "b"}], now=T) == ["a", "b"]
        assert uow.jobs.enqueue_many([{"id": "b"}, {"id": "c"}], now=T) == ["c"]
    assert ids(store.claim_many("w", ttl=9, limit=9, now=T)) == ["a", "b", "c"]


def test_a_lost_lease_rolls_back_the_business_rows(store: Store) -> None:
    store.enqueue("j", now=T)
    a = claimed(store, "j", ttl=1)
    claimed(store, "j", "b", now=T + 1)

    def late() -> None:
        with store.begin() as uow:
            uow.jobs.enqueue("business", now=T)
            uow.jobs.complete(a, now=T + 1)

    with pytest.raises(LeaseLost):
        late()
    assert store.get("business") is None
    assert row(store, "j", "owner", "fence") == {"owner": "b", "fence": 2}


def test_the_clock_is_that_of_the_statement_and_not_of_an_old_transaction(
    shop: Store, session: Session
) -> None:
    """FAULTS 34: PostgreSQL's now() stands still while a transaction is open."""
    shop.enqueue("j")
    session.execute(text("SELECT 1"))  # from here on it is open
    lease = shop.claim(ttl=0.2)
    assert lease is not None
    time.sleep(0.3)
    uow = UnitOfWork(session)
    with pytest.raises(LeaseLost):
        uow.jobs.complete(lease)
    uow.jobs.enqueue("later", delay=50)
    later = uow.jobs.get("later")
    session.commit()
    assert later is not None
    assert later.until > lease.until + 50, "the delay counts from the beginning of the transaction"
    assert later.created_at > lease.until


def test_instances_that_the_session_holds_show_what_the_verbs_wrote(shop: Store, session: Session) -> None:
    names = ("complete", "many", "fail", "release", "cancel", "quarantine", "requeue", "sweep")
    shop.enqueue_many([{"id": id, "deadline": T + 100 if id == "sweep" else None} for id in names], now=T)
    leases = {id: claimed(shop, id) for id in ("complete", "many", "fail", "release")}
    shop.quarantine("requeue", "x", now=T)
    held = {id: session.get_one(Job, id) for id in names}
    jobs = UnitOfWork(session).jobs
    jobs.complete(leases["complete"], now=T)
    jobs.complete_many([leases["many"]], now=T)
    jobs.fail(leases["fail"], "no", retry=None, now=T)
    jobs.release(leases["release"], now=T)
    jobs.cancel("cancel", now=T)
    jobs.quarantine("quarantine", "x", now=T)
    jobs.requeue("requeue", by="eve", reason="x", now=T)
    jobs.sweep(now=T + 100)
    assert {id: job.state for id, job in held.items()} == {
        "complete": "done", "many": "done", "fail": "quarantined", "release": "ready", "cancel": "cancelled",
        "quarantine": "quarantined", "requeue": "ready", "sweep": "quarantined",
    }  # fmt: skip


def test_instances_show_what_purge_and_revival_did(shop: Store, session: Session) -> None:
    shop.enqueue("one", {"old": 1}, now=T)
    shop.enqueue("many", {"old": 1}, now=T)
    for id in ("one", "many"):
        shop.cancel(id, now=T)
    held = [session.get_one(Job, id) for id in ("one", "many")]
    jobs = UnitOfWork(session).jobs
    assert jobs.purge(before=T + 1) == 2
    assert [job.state for job in held] == ["purged", "purged"]
    assert jobs.enqueue("one", {"new": 1}, now=T) == "one"
    assert jobs.enqueue_many([{"id": "many", "payload": {"new": 1}}], now=T) == ["many"]
    assert [(job.state, job.payload) for job in held] == [("ready", '{"new":1}')] * 2
    session.rollback()


def test_instances_of_another_identity_are_left_alone(shop: Store, session: Session) -> None:
    shop.enqueue_many([{"id": "a"}, {"id": "b"}], now=T)
    b = session.get_one(Job, "b")
    UnitOfWork(session).jobs.cancel("a", now=T)
    assert "state" in b.__dict__, "b needs not be read again"
    assert b.state == JobState.READY
