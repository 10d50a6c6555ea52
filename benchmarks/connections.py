"""Claims per second with more and more worker connections to one PostgreSQL, and what the limit does.

    python -m benchmarks.connections [--connections 1 8 32 90] [--batch 1 10] [--url URL]

Each connection claims and completes in a thread of one of two processes; the raw limit does the same.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL

from benchmarks import processes
from benchmarks.bases import URLS, engine_of, scratch
from benchmarks.limit import limit_of
from benchmarks.ours import TTL, Ours
from fencedjobs import Store

PROCESSES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--connections", nargs="*", type=int, default=[1, 8, 32, 90])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 10])
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--url", default=URLS["postgresql"], help="a server that lets in as many")
    options = parser.parse_args()
    print(f"{'connections':>12}{'batch':>8}{'limit/s':>12}{'ours/s':>12}{'ratio':>8}")
    with scratch(options.url, "fj_connections") as url:
        limit, own = limit_of(url), Ours(url)
        limit.make()
        own.make()
        for batch in options.batch:
            for connections in options.connections:
                jobs = options.jobs * min(batch, 5)
                limit.clear()
                own.clear()
                limit.enqueue_many(jobs)
                own.enqueue_many(jobs)
                raw = jobs / timed(url, connections, raw_claims, batch)
                ours = jobs / timed(url, connections, own_claims, batch)
                print(
                    f"{connections:12}{batch:8}{raw:12,.0f}{ours:12,.0f}{ours / raw:8.2f}",
                    flush=True,
                )
        limit.close()
        own.close()


def timed(url: URL, connections: int, work: processes.Work, batch: int) -> float:
    number = min(PROCESSES, connections)
    return processes.timed(url, number, work, connections // number, batch)


def raw_claims(url: URL, threads: int, batch: int, ready: Callable[[], None]) -> None:
    limits = [limit_of(url) for _ in range(threads)]

    def one(limit: Any) -> None:
        while jobs := limit.claim(batch):
            limit.complete_many(jobs)

    _together([lambda limit=limit: one(limit) for limit in limits], ready)
    for limit in limits:
        limit.close()


def own_claims(url: URL, threads: int, batch: int, ready: Callable[[], None]) -> None:
    engine = engine_of(url, pool_size=threads)
    store = Store(engine)
    held = [engine.connect() for _ in range(threads)]  # connecting is not what is measured
    for connection in held:
        connection.close()

    def one() -> None:
        while leases := store.claim_many(ttl=TTL, limit=batch):
            store.complete_many(leases)

    _together([one] * threads, ready)
    engine.dispose()


def _together(works: list[Any], ready: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    ready()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
