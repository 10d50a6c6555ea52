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
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine, create_engine, event, make_url, text

from fencedjobs import Store, schema

URLS = (
    "postgresql+psycopg://postgres@127.0.0.1/postgres",
    "mysql+pymysql://root@127.0.0.1/mysql",
    "sqlite://",
)
LEASED = 10_000
FAR = 4e9  # an instant that no test lives to see

# What is loaded beside the jobs to claim: state, until, owner, fence.
SCENARIOS = {
    "ready": ("'ready'", "0", "NULL", "0"),
    "done": ("'done'", "0", "NULL", "1"),
    "scheduled": ("'scheduled'", f"{FAR}", "NULL", "0"),
    "leased": ("'leased'", f"{FAR}", "'other'", "1"),
}
NUMBERS = {
    "postgresql": "SELECT g FROM generate_series(1, {n}) AS s(g)",
    "mysql": "SELECT seq AS g FROM seq_1_to_{n}",
    "sqlite": "WITH RECURSIVE s(g) AS (SELECT 1 UNION ALL SELECT g + 1 FROM s LIMIT {n}) SELECT g FROM s",
}
FILL = """
INSERT INTO fenced_jobs (id, queue, state, until, owner, fence, created_at, due_at, payload)
SELECT {prefix}, 'default', {state}, {until}, {owner}, {fence}, 0, 0, 'null' FROM ({numbers}) AS n
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--url", nargs="*", default=URLS)
    parser.add_argument("--scenario", nargs="*", default=list(SCENARIOS))
    options = parser.parse_args()
    heads = ("beside", 10), ("rows", 11), ("claim 1", 12), ("ratio", 8), ("claim 100", 12), ("ratio", 8)
    print(f"{'database':12}" + "".join(f"{head:>{width}}" for head, width in heads))
    for url in options.url:
        for scenario in options.scenario:
            rows = min(options.rows, LEASED) if scenario == "leased" else options.rows
            measure(url, scenario, rows)


def measure(url: str, scenario: str, rows: int) -> None:
    with scratch(url, "fj_growth_empty") as empty, scratch(url, "fj_growth_full") as full:
        load(full, scenario, rows)
        stores = Store(empty), Store(full)
        for engine in (empty, full):
            load(engine, "ready", 6000, prefix="top")
            analyze(engine)
        one = compare([lambda s=s: s.claim("w", ttl=1e6) for s in stores], 300)
        many = compare([lambda s=s: s.claim_many("w", ttl=1e6, limit=100) for s in stores], 40)
    name = make_url(url).get_backend_name()
    print(
        f"{name:12}{scenario:>10}{rows:>11,}"
        f"{one[1]:>9.2f} ms{one[1] / one[0]:>8.2f}{many[1]:>9.2f} ms{many[1] / many[0]:>8.2f}",
        flush=True,
    )


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
    joined = f"concat('{prefix}-', g)" if name != "sqlite" else f"'{prefix}-' || g"
    numbers = NUMBERS[name].format(n=rows)
    fill = FILL.format(prefix=joined, state=state, until=until, owner=owner, fence=fence, numbers=numbers)
    with engine.begin() as connection:
        connection.execute(text(fill))


def analyze(engine: Engine) -> None:
    commands = {"postgresql": "VACUUM ANALYZE fenced_jobs", "mysql": "ANALYZE TABLE fenced_jobs"}
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(commands.get(engine.dialect.name, "ANALYZE"))


@contextmanager
def scratch(url: str, name: str) -> Iterator[Engine]:
    """An engine on a migrated database of its own, dropped afterwards."""
    parsed = make_url(url)
    with tempfile.TemporaryDirectory() as folder:
        if parsed.get_backend_name() == "sqlite":
            engine = create_engine(f"sqlite:///{Path(folder) / name}.db")
            event.listen(engine, "connect", lambda dbapi, _: dbapi.execute("PRAGMA journal_mode = WAL"))
        else:
            administer(url, f"DROP DATABASE IF EXISTS {name}", f"CREATE DATABASE {name}")
            engine = create_engine(parsed.set(database=name))
        try:
            schema.upgrade(engine)
            yield engine
        finally:
            engine.dispose()
            if parsed.get_backend_name() != "sqlite":
                administer(url, f"DROP DATABASE {name}")


def administer(url: str, *statements: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


if __name__ == "__main__":
    main()
