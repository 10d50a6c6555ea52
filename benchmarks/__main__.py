"""Measure fencedjobs against the raw limit of each database."""

from __future__ import annotations

import argparse
import json
import re

from benchmarks import cells
from benchmarks.bases import URLS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--database", nargs="*", default=list(URLS), choices=URLS)
    parser.add_argument("--cell", default="", help="only cells whose name matches this expression")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, once")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    scale, repetitions = (0.2, 1) if options.quick else (1.0, options.reps)
    pattern = re.compile(options.cell)
    for database in options.database:
        for result in cells.run(database, lambda cell: bool(pattern.search(cell.name)), repetitions, scale):
            if options.json:
                print(json.dumps(result.row()))


if __name__ == "__main__":
    main()
