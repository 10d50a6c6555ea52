"""FAULTS 1: PostgreSQL's planner, misled on purpose, must not make a claim take more than its limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, text

from fencedjobs import JobState, Store, TransactionLost
from fencedjobs import leases as core
from fencedjobs.own import Transactions
from tests.databases import Database
from tests.jobs.fill import analyze, fill
from tests.jobs.helpers import T

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)

PLANNERS = {
    "as it is": "",
    "nested loops only": "-c enable_hashjoin=off -c enable_mergejoin=off",
    "no indexes": "-c enable_indexscan=off -c enable_bitmapscan=off -c enable_indexonlyscan=off",
    "generic plans": "-c plan_cache_mode=force_generic_plan",
}


@pytest.fixture
def misled(database: Database) -> Iterator[Engine]:
    """20,000 finished rows, and statistics that were gathered while nothing waited."""
    engine = database.engine()
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE fenced_jobs SET (autovacuum_enabled = false)"))
        fill(connection, "postgresql", 20_000, "done")
        analyze(connection, "postgresql")
    yield engine
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE fenced_jobs"))
        connection.execute(text("ALTER TABLE fenced_jobs RESET (autovacuum_enabled)"))
        analyze(connection, "postgresql")
    engine.dispose()


def test_a_claim_takes_exactly_its_limit_whatever_the_planner_believes(misled: Engine) -> None:
    with misled.begin() as connection:
        fill(connection, "postgresql", 500, "ready")
        fill(connection, "postgresql", 300, "scheduled", until="1")
        fill(connection, "postgresql", 300, "leased", until="2")
    taken = 0
    for analyzed in (False, True):
        if analyzed:
            with misled.begin() as connection:
                analyze(connection, "postgresql")
        for name, options in PLANNERS.items():
            engine = create_engine(misled.url, connect_args={"options": options})
            store = Store(engine)
            for limit in (1, 10, 1, 10, 1, 10, 1):
                leases = store.claim_many("w", ttl=99, limit=limit, now=T)
                taken += limit
                assert len(leases) == limit, f"{name}, analyzed: {analyzed}: {len(leases)} for limit {limit}"
            engine.dispose()
            with misled.connect() as connection:
                owned = connection.scalar(text("SELECT count(*) FROM fenced_jobs WHERE owner = 'w'"))
            assert owned == taken, (
                f"{name}, analyzed: {analyzed}: {owned} rows are leased, {taken} were given"
            )


def test_promotion_and_sweep_keep_to_their_limits_too(misled: Engine) -> None:
    store = Store(misled)
    with misled.begin() as connection:
        fill(connection, "postgresql", 300, "scheduled", until="1")
    assert len(store.claim_many("w", ttl=99, limit=1, now=T)) == 1
    assert store.counts()["default"][JobState.SCHEDULED] == 299, "a claim of one promotes one"
    with misled.begin() as connection:
        connection.execute(text("UPDATE fenced_jobs SET deadline = 1 WHERE state = 'scheduled'"))
    assert store.sweep(limit=7, now=T) == 7
    assert store.purge(before=2, limit=7) == 7
    assert store.purge(before=2, limit=7, forget=True) == 7


def test_the_library_itself_refuses_more_rows_than_the_limit(
    misled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(misled)
    store.enqueue_many([{"id": f"j{n}"} for n in range(5)], now=T)
    monkeypatch.setattr(Transactions, "trusted", 0.0)  # a claim of one statement has nothing to roll back
    honest = core._made
    monkeypatch.setattr(core, "_made", lambda tx, one, given: honest(tx, one, {**given, "limit": 3}))
    with pytest.raises(TransactionLost, match="3 rows changed for a limit of 1"):
        store.claim("w", ttl=9, now=T)
    assert store.counts()["default"][JobState.READY] == 5
