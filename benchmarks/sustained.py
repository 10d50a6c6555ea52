"""Enqueue and drain for minutes: does the last minute look like the first, and does the table stay small?

    python -m benchmarks.sustained [--seconds 600] [--rate 500] [--database postgresql …]

Every job is enqueued by itself, at a steady rate, and completed by a `Worker`, whose maintenance purges
what was done a few seconds ago.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any, Final

from sqlalchemy import URL, Engine, text

from benchmarks.bases import URLS, engine_of, scratch
from benchmarks.ours import PAYLOAD, observed
from fencedjobs import Store, Worker, schema
from fencedjobs.maintenance import Maintenance

SIZES: Final = {
    "postgresql": "SELECT pg_table_size('fenced_jobs'), pg_indexes_size('fenced_jobs')",
    "mysql": "SELECT data_length, index_length FROM information_schema.tables"
    " WHERE table_schema = database() AND table_name = 'fenced_jobs'",
    "sqlite": "SELECT page_count * page_size, 0 FROM pragma_page_count, pragma_page_size",
}
KEPT: Final = 5.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--database", nargs="*", default=list(URLS), choices=URLS)
    parser.add_argument("--url", help="another server than that of the standard port, for one database")
    options = parser.parse_args()
    heads = ("jobs/s", "p99 ms", "table MB", "indexes MB")
    print(f"{'database':12}{'part':8}" + "".join(f"{head:>12}" for head in heads))
    for database in options.database:
        with scratch(options.url or URLS[database], "fj_sustained") as url:
            run(database, url, options.seconds, options.rate)


def run(database: str, url: URL, seconds: float, rate: float) -> None:
    """Print the first and the last tenth."""
    engine = engine_of(url)
    schema.upgrade(engine)
    store, done = Store(engine), list[tuple[float, float]]()
    keeping = Maintenance(every=1.0, done=KEPT)
    worker = Worker(store, concurrency=8, maintenance=keeping, poll=0.05, observe=observed)

    @worker.handler("noop")
    def finished(ctx: Any) -> None:
        now = time.perf_counter()
        done.append((now, now - ctx.payload["at"]))

    thread = threading.Thread(target=worker.run)
    thread.start()
    start, sent = time.perf_counter(), 0
    first: tuple[float, float] | None = None
    while (now := time.perf_counter() - start) < seconds:
        if first is None and now >= seconds / 10:
            first = sizes(engine)
        if sent <= now * rate:
            store.enqueue(payload=PAYLOAD | {"at": time.perf_counter()}, kind="noop")
            sent += 1
        else:
            time.sleep(min(0.001, sent / rate - now))
    last = sizes(engine)
    worker.stop()
    thread.join()
    engine.dispose()
    tenth = seconds / 10
    for part, since, size in (("first", 0.0, first or last), ("last", seconds - tenth, last)):
        waits = [wait for at, wait in done if since <= at - start < since + tenth]
        p99 = statistics.quantiles(waits, n=100)[-1] * 1e3
        told = (len(waits) / tenth, p99, *size)
        print(f"{database:12}{part:8}" + "".join(f"{one:12.1f}" for one in told), flush=True)


def sizes(engine: Engine) -> tuple[float, float]:
    """Megabytes of the table and of its indexes (SQLite: of the file)."""
    with engine.connect() as connection:
        if engine.dialect.name == "mysql":
            connection.execute(text("ANALYZE TABLE fenced_jobs"))
        table, indexes = connection.execute(text(SIZES[engine.dialect.name])).one()
    return table / 2**20, indexes / 2**20


if __name__ == "__main__":
    main()
