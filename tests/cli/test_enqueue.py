"""``enqueue``: what enters, what is refused, and what is said about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, text

from fencedjobs import JobState, Store
from fencedjobs.cli.lines import LONGEST
from tests.cli.helpers import COMMAND, EACH_DATABASE, environment, run, text_of

BAD = {
    b"not json": "is not JSON",
    b"[1]": "is not an object but a list",
    b"null": "is not an object but null",
    b"7": "is not an object but a number",
    b'{"id": 4}': "id: must be a string",
    b'{"id": ""}': "id: must have 1 to 255 characters",
    b'{"payload": NaN}': "has NaN",
    b'{"payload": 1e999}': "payload: inf is not JSON",
    b'{"payload": "\\ud800"}': "payload: has a lone surrogate",
    b'{"payloads": 1}': "has unknown 'payloads'",
    b'{"now": 1}': "has unknown 'now'",
    b'{"delay": 1, "run_at": 2}': "delay: goes without run_at",
    b'{"delay": -1}': "delay: must not be negative",
    b'{"run_at": "2030-01-01T00:00:00"}': "run_at: '2030-01-01T00:00:00' has no time zone",
    b'{"deadline": "soon"}': "deadline: 'soon' is neither seconds nor an ISO 8601 time",
    b'{"max_attempts": 0}': "max_attempts: must be from 1",
    b"\xff\xfe": "is not UTF-8 at byte 1",
    b"[" * 100_000: "is nested too deeply",
    b'{"payload": "' + b"x" * LONGEST + b'"}': "is longer than",
}

FULL_AT_700 = """
    CREATE TRIGGER full BEFORE INSERT ON fenced_jobs WHEN NEW.id = 'order-700'
    BEGIN SELECT RAISE(ABORT, 'the shelf is full'); END
"""


@pytest.fixture
def store(engine: Engine) -> Store:
    return Store(engine)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "jobs.jsonl"


@EACH_DATABASE
def test_lines_become_jobs_with_all_arguments(store: Store, url: URL, file: Path) -> None:
    whole = {
        "id": "order-1", "payload": {"qty": 7, "für": "🙂"}, "kind": "pack", "queue": "shop", "key": "ann",
        "priority": 3, "run_at": "2030-01-01T01:00:00+01:00", "deadline": 4e9, "max_attempts": 2,
    }  # fmt: skip
    file.write_text(f'\ufeff{json.dumps(whole, ensure_ascii=False)}\n\n  \n{{"delay": 60}}\r\n{{}}')
    answer = run("enqueue", file, url=url)
    assert (answer.code, answer.out) == (0, "3 new, 0 existed, 0 bad\n"), answer.err
    job = store.get("order-1")
    assert job
    assert (job.payload, job.kind, job.queue, job.key) == (whole["payload"], "pack", "shop", "ann")
    assert (job.priority, job.until, job.deadline, job.max_attempts) == (3, 1893456000.0, 4e9, 2)
    assert store.counts()["default"] == {JobState.SCHEDULED: 1, JobState.READY: 1}


@EACH_DATABASE
def test_a_file_can_be_enqueued_again(store: Store, url: URL, file: Path) -> None:
    lines = [json.dumps({"id": f"order-{number}"}) for number in range(1201)]  # more than two batches
    file.write_text("\n".join([*lines, lines[0]]))
    assert run("enqueue", file, "--json", url=url).json() == {"new": 1201, "existed": 1, "bad": []}
    lease = store.claim("worker-a", ttl=60)
    assert run("enqueue", file, "--json", url=url).json() == {"new": 0, "existed": 1202, "bad": []}
    assert lease
    store.complete(lease)


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=BAD.values())
def test_a_bad_line_is_reported_by_number_and_skipped(
    store: Store, url: URL, line: bytes, reason: str
) -> None:
    stdin = b'{"id": "before"}\n' + line + b'\n{"id": "after"}\n'
    answer = run("enqueue", "-", url=url, stdin=stdin)
    assert answer.code == 1
    assert answer.err.startswith(f"line 2: {reason}")
    assert answer.out == "2 new, 0 existed, 1 bad\n"
    (bad,) = run("enqueue", "-", "--json", url=url, stdin=stdin).json()["bad"]
    assert bad["line"] == 2
    assert reason in bad["reason"]


def test_strict_writes_nothing_of_a_file_with_a_bad_line(store: Store, url: URL) -> None:
    good = "".join(json.dumps({"id": f"order-{number}"}) + "\n" for number in range(1000))
    answer = run("enqueue", "-", "--strict", url=url, stdin=good + "{")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("Error: line 1001: is not JSON")
    assert answer.err.endswith("nothing of the file is written\n")
    assert store.counts() == {}
    assert run("enqueue", "-", "--strict", url=url, stdin=good).out == "1000 new, 0 existed, 0 bad\n"


def test_strict_reads_a_pipe_that_cannot_be_read_twice(url: URL, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"id": "order-1"}\n')
    os.close(writing)
    done = subprocess.run(
        [*COMMAND, "enqueue", "--strict", "-", "--url", text_of(url)], stdin=reading, cwd=tmp_path,
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(reading)
    assert (done.returncode, done.stdout) == (0, "1 new, 0 existed, 0 bad\n"), done.stderr


def test_a_file_that_cannot_be_read_is_a_usage_error(url: URL, tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        answer = run("enqueue", path, url=url)
        assert (answer.code, answer.out) == (2, "")


def test_an_error_of_the_database_tells_how_far_it_came(
    store: Store, engine: Engine, url: URL, file: Path
) -> None:
    file.write_text("".join(json.dumps({"id": f"order-{number}"}) + "\n" for number in range(1500)))
    with engine.begin() as connection:
        connection.execute(text(FULL_AT_700))
    answer = run("enqueue", file, url=url)
    assert answer.code == 3
    stopped = "Stopped: lines up to 500, perhaps up to 1000 are enqueued (500 new, 0 existed, 0 bad)."
    assert answer.err.splitlines() == [stopped, "Error: the database said: the shelf is full"]
    assert sum(store.counts()["default"].values()) == 500


def test_ctrl_c_ends_with_130_and_tells_how_far_it_came(url: URL, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [*COMMAND, "enqueue", "-", "--url", text_of(url)], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=tmp_path, env=environment(), text=True,
    )  # fmt: skip
    assert child.stdin
    assert child.stderr
    child.stdin.write("{\n")
    child.stdin.flush()
    assert child.stderr.readline().startswith("line 1: is not JSON")  # now it waits for more
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert said.endswith("Stopped: lines up to 0 are enqueued (0 new, 0 existed, 1 bad).\nInterrupted.\n")
