"""The examples run as a reader would run them, and end well."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("late_courier", "one shipment, packed by B"),
        ("fencing_lab", "'result': 'done by one', 'done': 1"),
        ("ack_recovery", "pending in the outbox: 0, requests seen: 2, stock: 7"),
    ],
)
def test_an_example_runs_and_says_what_it_shows(name: str, says: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert says in ran.stdout, ran.stdout
