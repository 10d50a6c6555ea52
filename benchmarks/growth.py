"""Does the cost of a claim grow with what else is in the table?

    python -m benchmarks.growth [--rows 1000000] [--url URL ...]

For each database two sets of tables are claimed from in turn: one that holds nothing but the jobs to
claim, and one with a million ready, done or scheduled rows, or ten thousand running leases, beside
them. The table shows the median cost of a claim and the ratio of the two. The tables live in
databases (SQLite: files) that the run makes and drops.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import Engine, make_url

from benchmarks.bases import URLS, engine_of, scratch
from fencedjobs import Store, schema

LEASED = 10_000
FAR = 4e9  # an instant that no test lives to see

# What is loaded beside the jobs to claim: state, until, owner, fence.
SCENARIOS = {
    "ready": ("'ready'", "0", "NULL", "0"),
    "done": ("'done'", "0", "NULL", "1"),
    "scheduled": ("'scheduled'", f"{FAR}", "NULL", "0"),
    "leased": ("'leased'", f"{FAR}", "'other'", "1"),
}
# Ids in the order of insertion, as those that the store makes: neighbours are on one page of their index.
IDS = {
    "postgresql": "concat('{prefix}-', lpad(g::text, 9, '0'))",
    "mysql": "concat('{prefix}-', lpad(g, 9, '0'))",
    "sqlite": "printf('{prefix}-%09d', g)",
}
NUMBERS = {
    "postgresql": "SELECT g FROM generate_series(1, {n}) AS s(g)",
    "mysql": "SELECT seq AS g FROM seq_1_to_{n}",
    "sqlite": "WITH RECURSIVE s(g) AS (SELECT 1 UNION ALL SELECT g + 1 FROM s LIMIT {n}) SELECT g FROM s",
}
FILL = """
INSERT INTO fenced_jobs (id, queue, state, until, owner, fence, created_at, due_at, payload)
SELECT {ids}, 'default', {state}, {until}, {owner}, {fence}, 0, 0, 'null' FROM ({numbers}) AS n
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--url", nargs="*", default=[*URLS.values()])
    parser.add_argument("--scenario", nargs="*", default=list(SCENARIOS))
    options = parser.parse_args()
    heads = ("beside", 10), ("rows", 11), ("claim 1", 12), ("ratio", 8), ("claim 100", 12), ("ratio", 8)
    print(f"{'database':12}" + "".join(f"{head:>{width}}" for head, width in heads))
    for url in options.url:
        for scenario in options.scenario:
            rows = min(options.rows, LEASED) if scenario == "leased" else options.rows
            measure(url, scenario, rows)


def measure(url: str, scenario: str, rows: int) -> None:
    one, many = taken(url, scenario, rows)
    name = make_url(url).get_backend_name()
    print(
        f"{name:12}{scenario:>10}{rows:>11,}"
        f"{one[1]:>9.2f} ms{one[1] / one[0]:>8.2f}{many[1]:>9.2f} ms{many[1] / many[0]:>8.2f}",
        flush=True,
    )


def ratios(url: str, scenario: str, rows: int) -> tuple[float, float]:
    """Of a claim of 1 and of 100: beside these rows over beside none."""
    one, many = taken(url, scenario, rows)
    return one[1] / one[0], many[1] / many[0]


def taken(url: str, scenario: str, rows: int) -> tuple[list[float], list[float]]:
    """Median milliseconds of a claim of 1 and of 100, from the empty tables and from the full ones."""
    with scratch(url, "fj_growth_empty") as one_url, scratch(url, "fj_growth_full") as other_url:
        empty, full = engine_of(one_url), engine_of(other_url)
        for engine in (empty, full):
            schema.upgrade(engine)
        load(full, scenario, rows)
        stores = Store(empty), Store(full)
        for engine in (empty, full):
            load(engine, "ready", 6000, prefix="top")
            analyze(engine)
        one = compare([partial(store.claim, "w", ttl=1e6) for store in stores], 300)
        many = compare([partial(store.claim_many, "w", ttl=1e6, limit=100) for store in stores], 40)
        for engine in (empty, full):
            engine.dispose()
    return one, many


def compare(calls: list[Callable[[], object]], times: int) -> list[float]:
    """Median milliseconds of each call, taken in turn."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(times):
        for call, into in zip(calls, taken, strict=True):
            start = time.perf_counter()
            answer = call()
            into.append((time.perf_counter() - start) * 1e3)
            assert answer, "the queue ran dry"
    return [statistics.median(each) for each in taken]


def load(engine: Engine, scenario: str, rows: int, prefix: str = "old") -> None:
    state, until, owner, fence = SCENARIOS[scenario]
    name = engine.dialect.name
    ids, numbers = IDS[name].format(prefix=prefix), NUMBERS[name].format(n=rows)
    fill = FILL.format(ids=ids, state=state, until=until, owner=owner, fence=fence, numbers=numbers)
    with engine.begin() as connection:
        connection.exec_driver_sql(fill)


def analyze(engine: Engine) -> None:
    commands = {"postgresql": "VACUUM ANALYZE fenced_jobs", "mysql": "ANALYZE TABLE fenced_jobs"}
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(commands.get(engine.dialect.name, "ANALYZE"))


if __name__ == "__main__":
    main()
