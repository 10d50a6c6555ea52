"""The benchmarks run, and say what their readers take from them. (Nothing is timed here.)"""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_table_as_rows() -> None:
    cells = "enqueue_many|one at a time|mark_every|inbox, new|Worker, 1 process"
    options = ["--quick", "--database", "sqlite", "--json", "--cell", cells]
    command = [sys.executable, "-m", "benchmarks", *options]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == 5
    for row in rows:
        assert row.keys() == {"cell", "database", "ratio", "goal", "reached"}
        assert row["database"] == "sqlite"
        assert row["reached"] is (row["ratio"] >= row["goal"])


def test_what_our_sql_costs_and_how_tables_grow() -> None:
    commands = {
        "floor": ["--database", "sqlite", "--reps", "1"],
        "upkeep": ["--database", "sqlite", "--rounds", "1", "--jobs", "200", "--seconds", "0"],
    }
    for name, options in commands.items():
        command = [sys.executable, "-m", f"benchmarks.{name}", *options]
        run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        assert "sqlite" in run.stdout
