"""Whose clock counts, and what a failover may lose."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import Engine, event

from fencedjobs import LeaseLost, Retry, Store
from fencedjobs.models import Job
from tests.databases import Database
from tests.jobs.helpers import T, on, row


def test_the_worker_s_clock_decides_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS 36: an hour ahead, an hour behind, and jumping. SQLite has the process's."""
    store = Store(engine)
    store.enqueue("j", max_attempts=999)
    store.enqueue("later", delay=1000)
    lease = store.claim("a", ttl=100, id="j")
    assert lease is not None
    real = time.time
    own_clock = engine.dialect.name == "sqlite"
    for shift in (3600, -3600, 600, -600, 7200):
        monkeypatch.setattr(time, "time", lambda shift=shift: real() + shift)
        if own_clock:
            continue
        assert store.claim("b", ttl=100, id="j") is None, f"taken early at {shift:+} s"
        assert store.claim("b", ttl=100, id="later") is None, f"run early at {shift:+} s"
        renewed = store.renew(lease, ttl=100)
        assert abs(renewed.until - real() - 100) < 30, (
            f"{shift:+} s: ends {renewed.until - real():+.1f} s from now"
        )
    if own_clock:  # time only triggers; the fence keeps it safe
        taken = store.claim("b", ttl=100, id="j")
        assert taken is not None
        assert taken.fence == 2
        with pytest.raises(LeaseLost):
            store.complete(lease)


def test_a_store_s_own_clock_is_used_by_every_verb(engine: Engine) -> None:
    instant = [0.0]
    store = Store(engine, clock=lambda: instant[0])
    store.enqueue("j", delay=5, deadline=100)
    assert store.claim("a", ttl=10) is None
    instant[0] = 5
    lease = store.claim("a", ttl=10)
    assert lease is not None
    assert lease.until == 15
    instant[0] = 14.9
    lease = store.renew(lease, ttl=10)
    assert lease.until == 24.9
    instant[0] = 24.9
    with pytest.raises(LeaseLost):
        store.complete(lease)
    second = store.claim("b", ttl=10)
    assert second is not None
    store.fail(second, "x", retry=Retry(base=3, factor=1, jitter=False))
    assert row(store, "j", "until") == {"until": 27.9}
    lock = store.locks.claim("l", "a", ttl=1)
    assert lock is not None
    assert lock.until == 25.9
    instant[0] = 100
    assert store.sweep() == 1
    assert row(store, "j", "finished_at", "reason") == {"finished_at": 100, "reason": "deadline passed"}


def test_a_half_second_lease_lasts_half_a_second(engine: Engine) -> None:
    """FAULTS 37, by the database's own clock."""
    store = Store(engine)
    store.enqueue("j")
    lease = store.claim("a", ttl=0.5, id="j")
    assert lease is not None
    assert abs(lease.until - time.time() - 0.5) < 5
    while store.claim("b", ttl=9, id="j") is None:
        time.sleep(0.05)
        assert time.time() < lease.until + 5, "it was not taken over"
    assert time.time() >= lease.until - 0.05, "it was taken over early"


@on("mariadb", "postgresql")
def test_the_session_s_time_zone_moves_nothing(database: Database, engine: Engine) -> None:
    zone = {"mariadb": "SET time_zone = '+11:00'", "postgresql": "SET TIME ZONE 'Asia/Tokyo'"}[
        database.backend
    ]

    @event.listens_for(engine, "connect")
    def elsewhere(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(zone)
        connection.commit()

    store = Store(engine)
    store.enqueue("j")
    lease = store.claim("a", ttl=100)
    assert lease is not None
    assert abs(lease.until - time.time() - 100) < 30


def test_after_a_failover_that_lost_claims_the_stale_holder_is_refused(engine: Engine) -> None:
    """FAULTS 28: the fences are granted a second time; default owners tell the holders apart."""
    before, after = Store(engine), Store(engine)
    before.enqueue("j", max_attempts=10**6, now=T)
    for lost in (1, 2, 5):
        record = row(before, "j", "fence", "attempts")
        stale = [before.claim(ttl=1, id="j", now=T + n) for n in range(lost)]
        with engine.begin() as connection:  # the server that was promoted has not seen these claims
            values = {"state": "ready", "owner": None, "until": 0.0, **record}
            connection.execute(Job.__table__.update().values(values))  # type: ignore[attr-defined]
        holder = [after.claim(ttl=1 if n < lost - 1 else 999, id="j", now=T + n) for n in range(lost)][-1]
        assert holder is not None
        assert stale[-1] is not None
        assert holder.fence == stale[-1].fence, "the same fence was granted twice"
        for lease in stale:
            assert lease is not None
            with pytest.raises(LeaseLost):
                before.complete(lease, now=T + lost)
            assert before.complete_many([lease], now=T + lost) == [lease]
            assert before.renew_many([lease], ttl=9, now=T + lost) == [None]
        after.release(holder, now=T + lost)


def test_the_lease_that_is_returned_is_the_one_that_is_kept(store: Store) -> None:
    """To the last bit, by whatever statements and at whatever instants the two were made."""
    store.enqueue_many([{"id": f"j{n}", "delay": 0.001 if n % 2 else None} for n in range(6)])
    leases = store.claim_many("a", ttl=30, limit=5)
    leases += [lease for n in range(6) if (lease := store.claim("a", ttl=30, id=f"j{n}"))]
    assert len(leases) == 6
    for lease in leases:
        record = store.get(lease.id)
        assert record is not None
        kept = (record.owner, record.fence, record.until, record.attempts)
        assert kept == (lease.owner, lease.fence, lease.until, lease.attempt)
    lock = store.locks.claim("l", "a", ttl=30)
    seen = store.locks.get("l")
    assert lock is not None
    assert seen is not None
    assert (seen.owner, seen.fence, seen.until) == (lock.owner, lock.fence, lock.until)
