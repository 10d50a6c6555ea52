"""The plans of the hot statements, on a table with 50,000 finished jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text

from fencedjobs import JobLease, Retry, Store
from tests.databases import Database
from tests.jobs.fill import analyze, fill
from tests.jobs.helpers import T, on

READY, WAITING, ID = "ready", "waiting", "id"
_MEANINGS = {"_ready": READY, "_waiting": WAITING, "uq_fenced_jobs_id": ID, "autoindex_fenced_jobs": ID}

#: the indexes that the statements of a verb must go by
INDEXES: dict[str, set[str]] = {
    "claim": {READY, WAITING}, "claim by id": {ID}, "renew": {ID}, "complete": {ID},
    "claim 100": {READY, WAITING}, "renew 100": {ID}, "fail": {ID}, "release": {ID}, "complete 100": {ID},
    "get": {ID}, "cancel": {ID}, "enqueue an id that exists": {ID}, "claim of nothing": {READY, WAITING},
}  # fmt: skip


def hot_verbs(store: Store) -> dict[str, Callable[[], Any]]:
    one: list[Any] = []
    many: list[JobLease] = []
    return {
        "claim": lambda: one.append(store.claim("w", ttl=9, now=T)),
        "claim by id": lambda: store.claim("w", ttl=9, id="ready300", now=T),
        "renew": lambda: store.renew(one[0], ttl=9, now=T),
        "complete": lambda: store.complete(one[0], now=T),
        "claim 100": lambda: many.extend(store.claim_many("w", ttl=9, limit=100, now=T)),
        "renew 100": lambda: store.renew_many(many, ttl=9, now=T),
        "fail": lambda: store.fail(many.pop(), "x", retry=Retry(base=0), now=T),
        "release": lambda: store.release(many.pop(), now=T),
        "complete 100": lambda: store.complete_many(many, now=T),
        "get": lambda: store.get("done777"),
        "cancel": lambda: store.cancel("ready400", now=T),
        "enqueue an id that exists": lambda: store.enqueue("done777", now=T),
        "claim of nothing": lambda: store.claim("w", ttl=9, queue="empty", now=T),
    }


@dataclass
class Plans:
    """What the plans of some statements say."""

    indexes: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def used(self) -> set[str]:
        """Which of our indexes; the primary key names rows that were read before, and is no matter."""
        return {means for name in self.indexes for word, means in _MEANINGS.items() if word in name}


@contextmanager
def explained(engine: Engine, backend: str) -> Iterator[Plans]:
    """The plans of all statements on jobs, each asked for at the moment when it is executed."""
    plans = Plans()

    def executed(connection: Any, _: Any, statement: str, parameters: Any, *__: Any) -> None:
        if statement.split()[0] in ("SELECT", "UPDATE", "DELETE"):
            cursor = connection.connection.cursor()
            indexes, faults = EXPLAIN[backend](cursor, statement, parameters)
            cursor.close()
            plans.indexes |= indexes
            plans.faults += [f"{fault} in the plan of {statement}" for fault in faults]

    event.listen(engine, "before_cursor_execute", executed)
    yield plans
    event.remove(engine, "before_cursor_execute", executed)


def explained_by_postgresql(cursor: Any, statement: str, parameters: Any) -> tuple[set[str], list[str]]:
    """The indexes that a statement uses, and its faults."""
    cursor.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters)
    steps = list(nodes(cursor.fetchone()[0][0]["Plan"]))
    scans = [step for step in steps if step.get("Relation Name") == "fenced_jobs"]
    faults = [step["Node Type"] for step in scans if step["Node Type"] == "Seq Scan"]
    return {step["Index Name"] for step in steps if "Index Name" in step}, faults


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


def explained_by_mariadb(cursor: Any, statement: str, parameters: Any) -> tuple[set[str], list[str]]:
    cursor.execute(f"EXPLAIN {statement}", parameters)
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    ours = [row for row in rows if row["table"] == "fenced_jobs"]
    bad = [f"{row['type']} {row['Extra']}" for row in ours if row["type"] in ("ALL", "index")]
    bad += [row["Extra"] for row in ours if "filesort" in (row["Extra"] or "")]
    return {row["key"] for row in ours if row["key"]}, bad


def explained_by_sqlite(cursor: Any, statement: str, parameters: Any) -> tuple[set[str], list[str]]:
    steps = [row[3] for row in cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    bad = [step for step in steps if step.startswith("SCAN fenced_jobs") or "TEMP B-TREE" in step]
    return {step.split("INDEX ")[1].split()[0] for step in steps if "INDEX " in step}, bad


EXPLAIN = {
    "postgresql": explained_by_postgresql,
    "mariadb": explained_by_mariadb,
    "sqlite": explained_by_sqlite,
}


@pytest.fixture
def full(database: Database) -> Iterator[Engine]:
    """Mostly finished jobs, some of every kind that waits."""
    engine = database.engine()
    with engine.begin() as connection:
        fill(connection, database.backend, 50_000, "done")
        fill(connection, database.backend, 500, "ready")
        fill(connection, database.backend, 500, "scheduled", until="9e9")
        fill(connection, database.backend, 300, "leased", until="9e9")
        fill(connection, database.backend, 50, "scheduled", name="due", until="1")
        analyze(connection, database.backend)
    yield engine
    if database.backend != "sqlite":
        with engine.begin() as connection:
            connection.execute(text("TRUNCATE TABLE fenced_jobs"))
    engine.dispose()


def test_hot_statements_go_by_their_indexes_and_never_over_the_table(
    full: Engine, database: Database
) -> None:
    store = Store(full)
    store.get("ready1")
    for name, verb in hot_verbs(store).items():
        with explained(full, database.backend) as plans:
            verb()
        assert not plans.faults, name
        assert INDEXES[name] <= plans.used(), f"{name} goes by {plans.indexes}, expected {INDEXES[name]}"


@pytest.fixture
def quiet(database: Database) -> Iterator[Engine]:
    """Statistics of a moment in which all but one job were finished."""
    engine = database.engine()
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE fenced_jobs SET (autovacuum_enabled = false)"))
        fill(connection, database.backend, 50_000, "done")
        fill(connection, database.backend, 1, "leased", until="9e9")
        analyze(connection, database.backend)
        fill(connection, database.backend, 30, "ready")
    yield engine
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE TABLE fenced_jobs"))
        connection.execute(text("ALTER TABLE fenced_jobs RESET (autovacuum_enabled)"))
    engine.dispose()


@pytest.mark.parametrize("options", ["force_custom_plan", "force_generic_plan"])
@on("postgresql")
def test_named_leases_go_by_the_id_and_not_over_all_leases_in_flight(
    quiet: Engine, database: Database, options: str
) -> None:
    """With the state in its condition completion was planned over the partial index of leased rows."""
    engine = create_engine(quiet.url, connect_args={"options": f"-c plan_cache_mode={options}"})
    verbs = hot_verbs(Store(engine))
    for name in ("claim", "renew", "complete", "claim 100", "renew 100", "fail", "release", "complete 100"):
        with explained(engine, database.backend) as plans:
            verbs[name]()
        if "claim" not in name:
            assert (plans.used(), plans.faults) == ({ID}, []), f"{name} goes by {plans.indexes}"
    engine.dispose()
