"""Measure fencedjobs against the raw limit of each database.

The raw limit is the least SQL that a fenced queue can do with, by the bare driver, in this same run and
on this same database; see `benchmarks/limit.py`. Each figure is a median of runs taken in turn. Needs
servers on the standard local ports. The databases that are made are dropped at the end.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version

from sqlalchemy import URL

from benchmarks import cells, other, peers
from benchmarks.bases import URLS, described, scratch
from benchmarks.limit import limit_of
from benchmarks.ours import Ours

PEER_JOBS = 2000


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database", nargs="*", default=list(URLS), choices=URLS)
    parser.add_argument("--cell", default="", help="only cells whose name matches this expression")
    parser.add_argument("--reps", type=int, default=3, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, once: about a minute")
    parser.add_argument("--json", action="store_true", help="rows of cell, database, ratio, goal, reached")
    parser.add_argument("--peers", action="store_true", help="also other queues that are installed")
    options = parser.parse_args(arguments)
    scale, repetitions = (0.1, 1) if options.quick else (1.0, options.reps)

    def wanted(name: str) -> bool:
        return bool(re.search(options.cell, name))

    if not options.json:
        print(told())
    for result in measured(options.database, wanted, repetitions, scale):
        print(json.dumps(result.row()) if options.json else result, flush=True)
    if options.peers:
        for database in options.database:
            compare(database, repetitions)


def told() -> str:
    """What was measured with what."""
    packages = ("fencedjobs", "SQLAlchemy", "psycopg", "PyMySQL", "asyncpg")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    heads = f"{'database':11} {'cell':43}{'limit/s':>10}{'ours/s':>10}{'ratio':>8}  goal"
    return f"Python {platform.python_version()}, {versions}\n{heads}"


def measured(
    databases: list[str], wanted: Callable[[str], bool], repetitions: int, scale: float
) -> Iterator[cells.Result]:
    """All cells that are wanted."""
    for database in databases:
        with scratch(URLS[database], "fj_bench") as url:
            yield from cells.run(database, url, wanted, repetitions, scale)
            yield from cells.bounds(database, url, wanted, scale)
        yield from cells.grown(database, wanted, scale)
    if wanted(name := "import beyond sqlalchemy, ms"):
        yield cells.Result(name, "-", other.importing(max(3, int(11 * scale))), 30.0)


def compare(database: str, repetitions: int) -> None:
    """The limit, us and other queues in turn, each on a database of its own."""
    rates: dict[str, list[tuple[float, ...]]] = {}
    sides: dict[str, Callable[[URL], tuple[float, ...]]] = {
        "raw limit": partial(_side, "limit", cells.RAW_DRAIN),
        "fencedjobs": partial(_side, "ours", cells.OWN_DRAIN),
    }
    for peer in peers.PEERS:
        if peer.database == database and peer.is_installed():
            sides[f"{peer.name} {version(peer.package)}"] = partial(_peer, peer)
    for _ in range(repetitions):
        for name, side in sides.items():
            with scratch(URLS[database], "fj_peers") as url:
                rates.setdefault(name, []).append(side(url))
    with scratch(URLS[database], "fj_peers") as url:
        print(f"\n{described(url)}; jobs per second, ratio to the limit")
    print(f"{'':22}{'enqueue each':>20}{'enqueue 10,000':>20}{'drain, 1 process':>20}")
    medians = {name: [*map(statistics.median, zip(*runs, strict=True))] for name, runs in rates.items()}
    for name, row in medians.items():
        pairs = zip(row, medians["raw limit"], strict=True)
        print(f"{name:22}" + "".join(f"{f'{rate:,.0f} ({rate / raw:.2f})':>20}" for rate, raw in pairs))


def _side(name: str, drain: cells.Side, url: URL) -> tuple[float, ...]:
    """The limit, or ours."""
    bench = cells.Bench(url, limit_of(url), Ours(url), 1.0)
    side = getattr(bench, name)
    side.make()
    each = cells.seconds(lambda: side.enqueue_each(PEER_JOBS))
    side.clear()
    many = cells.seconds(lambda: side.enqueue_many(10_000))
    side.clear()
    number, taken = drain(bench)
    bench.limit.close()
    bench.ours.close()
    return PEER_JOBS / each, 10_000 / many, number / taken


def _peer(kind: type[peers.Peer], url: URL) -> tuple[float, ...]:
    peer = kind(url)
    peer.make()
    each = peer.enqueue_each(PEER_JOBS)
    many = peer.enqueue_many(10_000)
    jobs = 10_000 + PEER_JOBS
    return PEER_JOBS / each, 10_000 / many, jobs / peer.drain(jobs)


if __name__ == "__main__":
    main()
