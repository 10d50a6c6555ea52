"""How large the table becomes as jobs come and go, and what a purge costs.

    python -m benchmarks.upkeep [--rounds 24] [--jobs 5000] [--seconds 5] [--database postgresql …]

In each round jobs are enqueued, completed and purged, with a pause in which the database may clean up as
it does by default. The sizes are of the table of jobs at the end of a round (SQLite: of the file); purges
are of jobs with generated ids, which are deleted, and of named ones, which leave a tombstone.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Engine, text

from benchmarks.bases import URLS, described, scratch
from benchmarks.cells import BATCH, seconds
from benchmarks.ours import PAYLOAD, Ours
from benchmarks.sustained import sizes

FAR = 1e12  # an instant after any end
DEAD = "SELECT n_dead_tup, autovacuum_count FROM pg_stat_user_tables WHERE relname = 'fenced_jobs'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=5.0, help="the pause after each round")
    parser.add_argument("--database", nargs="*", default=list(URLS), choices=URLS)
    parser.add_argument("--url", help="another server than that of the standard port, for one database")
    options = parser.parse_args()
    for database in options.database:
        with scratch(options.url or URLS[database], "fj_upkeep") as url:
            ours = Ours(url)
            ours.make()
            print(
                f"\n{described(url)}\n{'round':>6}{'table MB':>10}{'indexes MB':>12}   dead rows, autovacuums"
            )
            spent = Spent()
            for number in range(1, options.rounds + 1):
                turn(ours, options.jobs, spent)
                time.sleep(options.seconds)
                if number in (1, options.rounds) or number % 6 == 0:
                    table, indexes = sizes(ours.engine)
                    print(
                        f"{number:>6}{table:>10.1f}{indexes:>12.1f}   {left(ours.engine)}",
                        flush=True,
                    )
            print(spent.told(options.rounds * options.jobs))
            ours.close()


@dataclass
class Spent:
    """Seconds in all."""

    enqueued: float = 0.0
    drained: float = 0.0
    deleted: float = 0.0
    emptied: float = 0.0

    def told(self, jobs: int) -> str:
        """Microseconds of each job; half of them were named."""
        each, half = 1e6 / jobs, 2e6 / jobs
        return (
            f"us a job: enqueue_many {self.enqueued * each:.0f}, claim 100 and complete 100"
            f" {self.drained * each:.0f}, purge {self.deleted * half:.0f} (deleted),"
            f" {self.emptied * half:.0f} (tombstone)"
        )


def turn(ours: Ours, jobs: int, spent: Spent) -> None:
    """Half of the jobs with generated ids, half with names of their own."""
    named = time.time_ns()
    for ids in ([None] * (jobs // 2), [f"{named}-{n}" for n in range(jobs // 2)]):
        items = [{"id": id, "payload": PAYLOAD} for id in ids]
        spent.enqueued += seconds(partial(ours.store.enqueue_many, items))
        spent.drained += seconds(partial(ours.drain, len(items), BATCH))
        purging = seconds(partial(purge, ours))
        if ids[0] is None:
            spent.deleted += purging
        else:
            spent.emptied += purging


def purge(ours: Ours) -> None:
    while ours.store.purge(before=FAR, limit=1000):
        pass


def left(engine: Engine) -> str:
    """What PostgreSQL has not cleaned up, and how often it did."""
    if engine.dialect.name != "postgresql":
        return ""
    with engine.connect() as connection:
        dead, vacuums = connection.execute(text(DEAD)).one()
    return f"{dead:,} {vacuums}"


if __name__ == "__main__":
    main()
