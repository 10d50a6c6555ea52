"""``demo``: with real processes on each database, interrupted at every step, and judging honestly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import URL, Engine, inspect

from fencedjobs import Store
from fencedjobs.cli.demo.invariants import Facts, check
from fencedjobs.cli.demo.orders import Order, read_orders
from fencedjobs.cli.demo.story import LONG
from fencedjobs.values import JobRecord, JobState
from tests.cli.helpers import COMMAND, environment, run, spawn, text_of
from tests.databases import Database


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    """Where the demo puts what is temporary."""
    made = tmp_path / "temp"
    made.mkdir()
    return made


def assert_the_story(facts: dict[str, Any], orders: int) -> None:
    assert facts["ok"], facts["invariants"]
    assert [invariant["holds"] for invariant in facts["invariants"]] == [True] * 4
    told = [(moment["who"], moment["event"], moment["fence"]) for moment in facts["timeline"]]
    assert told[:3] == [("shop", "enqueued", None), ("A", "claimed", 1), ("A", "stopped", 1)]
    assert told[-2:] == [("A", "continued", 1), ("A", "refused", 1)]
    b = [(event, fence) for who, event, fence in told if who == "B" and event != "nothing"]
    assert b == [("claimed", 2), ("completed", 2)] + [("claimed", 1), ("completed", 1)] * (orders - 1)
    ends = [
        datetime.fromisoformat(m["until"]).timestamp() for m in facts["timeline"] if m["event"] == "claimed"
    ]
    assert ends[1] - LONG >= ends[0] - 1e-5  # B's lease began, by the database's clock, when A's was over
    assert "LeaseLost" in facts["timeline"][-1]["text"]


# --- the story ------------------------------------------------------------------------------------


def test_on_a_temporary_database(temp: Path) -> None:
    answer = spawn("demo", "--json", cwd=temp.parent, TMPDIR=str(temp))
    assert answer.code == 0, answer.err
    assert_the_story(answer.json(), orders=5)
    assert not list(temp.iterdir())


def test_as_text_it_tells_who_held_which_fence(temp: Path) -> None:
    elsewhere = "postgresql+psycopg://u@127.0.0.1:1/x"  # the environment's database is not for play
    answer = spawn("demo", cwd=temp.parent, TMPDIR=str(temp), FENCEDJOBS_URL=elsewhere)
    assert (answer.code, answer.err) == (0, "")
    for line in (
        r"A     fence 1  claims order-1001 for 1 s",
        r"B              asks for order-1001, gets nothing",
        r"B     fence 2  claims order-1001",
        r"A     fence 1  REFUSED, .*LeaseLost",
        r"holds   every order is done, once",
    ):
        assert re.search(line, answer.out), answer.out
    assert answer.out.endswith("\nAll invariants hold.\n")
    assert "BROKEN" not in answer.out


def test_on_a_database_with_tables_it_leaves_only_what_was_there(
    engine: Engine, url: URL, temp: Path
) -> None:
    store = Store(engine)
    store.enqueue("order-1001", {"mine": True})
    before, tables = store.get("order-1001"), inspect(engine).get_table_names()
    answer = spawn("demo", "--json", "--url", text_of(url), cwd=temp, TMPDIR=str(temp))
    assert answer.code == 0, answer.err
    assert_the_story(answer.json(), orders=5)
    assert store.get("order-1001") == before
    assert store.counts() == {"default": {JobState.READY: 1}}
    assert inspect(engine).get_table_names() == tables
    assert not list(temp.iterdir())


def test_on_a_database_without_tables_it_removes_those_it_made(empty: Database, temp: Path) -> None:
    answer = spawn("demo", "--json", "--url", text_of(empty.url), cwd=temp, TMPDIR=str(temp))
    assert answer.code == 0, answer.err
    assert inspect(empty.engine()).get_table_names() == []


# --- orders of the user ---------------------------------------------------------------------------


def test_orders_of_the_user(temp: Path) -> None:
    orders = temp.parent / "orders.jsonl"
    orders.write_text(
        '{"id": "größer", "qty": 1, "n": "🙂"}\n\n{"id": "x [red]", "qty": 0}\n{"id": "größer", "qty": 9}\n'
    )
    answer = spawn("demo", "--json", "--orders", orders, cwd=temp, TMPDIR=str(temp))
    assert answer.code == 0, answer.err
    assert_the_story(answer.json(), orders=2)
    assert "1 more had an id that was there already" in answer.json()["timeline"][0]["text"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there are no orders"),
        ('{"id": "a", "qty": 1}\n{', "line 2: is not JSON"),
        ('{"qty": 1}', "line 1: has no 'id'"),
        ('{"id": "a"}', "line 1: has no 'qty'"),
        ('{"id": 7, "qty": 1}', "line 1: id: must be a string"),
        ('{"id": "a", "qty": "7"}', "line 1: qty: must be a whole number"),
        ('{"id": "a", "qty": -1}', "line 1: qty: must be from 0"),
        ('{"id": "a", "qty": 1, "x": "\\ud800"}', "line 1: order.x: has a lone surrogate"),
        ('{"id": "' + 201 * "a" + '", "qty": 1}', "line 1: id: must have at most 200"),
    ],
)
def test_bad_orders_end_it_before_it_begins(tmp_path: Path, text: str, words: str) -> None:
    orders = tmp_path / "orders.jsonl"
    orders.write_text(text)
    answer = run("demo", "--orders", orders)
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.err


def test_a_missing_file_of_orders_is_a_usage_error(tmp_path: Path) -> None:
    assert run("demo", "--orders", tmp_path / "missing").code == 2
    assert run("demo", "--orders", tmp_path).code == 2


def test_the_orders_of_the_package_say_that_they_are_invented() -> None:
    assert all("invented" in order.body["note"] for order in read_orders(None))


# --- interrupted ----------------------------------------------------------------------------------

STEPS = [
    "The late courier",
    "enqueues",
    "A     fence 1  claims",
    "is stopped",
    "B     fence 2  claims",
    "goes on",
]


@contextmanager
def started(temp: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demo as the leader of a process group of its own, as a shell starts it."""
    child = subprocess.Popen(
        [*COMMAND, "demo", *arguments], cwd=temp, env=environment(TMPDIR=str(temp)), process_group=0,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def interrupt_at(child: subprocess.Popen[str], step: str, number: signal.Signals, *, group: bool) -> str:
    assert child.stdout
    for line in child.stdout:
        if step in line:
            (os.killpg if group else os.kill)(child.pid, number)
            break
    _, said = child.communicate(timeout=30)
    return said


def assert_no_process_is_left(group: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


@pytest.mark.parametrize("step", STEPS)
def test_ctrl_c_leaves_nothing_behind(temp: Path, step: str) -> None:
    with started(temp) as child:
        said = interrupt_at(child, step, signal.SIGINT, group=True)
        assert (child.returncode, said) == (130, "Interrupted.\n")
        assert_no_process_is_left(child.pid)
    assert not list(temp.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ends_leave_nothing_behind_either(temp: Path, number: signal.Signals) -> None:
    with started(temp) as child:
        said = interrupt_at(child, "is stopped", number, group=False)
        assert (child.returncode, said) == (128 + number, "Interrupted.\n")
        assert_no_process_is_left(child.pid)
    assert not list(temp.iterdir())


@pytest.mark.parametrize("step", ["The late courier", "is stopped"])
def test_ctrl_c_on_a_database_of_the_user_removes_rows_and_tables(
    empty: Database, temp: Path, step: str
) -> None:
    with started(temp, "--url", text_of(empty.url)) as child:
        said = interrupt_at(child, step, signal.SIGINT, group=True)
        assert (child.returncode, said) == (130, "Interrupted.\n")
        assert_no_process_is_left(child.pid)
    engine = empty.engine()
    assert inspect(engine).get_table_names() == []
    engine.dispose()


def test_a_courier_that_dies_ends_the_demo_with_its_last_words(temp: Path) -> None:
    with started(temp) as child:
        assert child.stdout
        pid = next(found[1] for line in child.stdout if (found := re.search(r"SIGSTOP, pid (\d+)", line)))
        os.kill(int(pid), signal.SIGKILL)
        _, said = child.communicate(timeout=30)
        assert child.returncode == 1
        assert said == "Error: courier A ended early: without a word\n"
        assert_no_process_is_left(child.pid)
    assert not list(temp.iterdir())


# --- the judge ------------------------------------------------------------------------------------

ORDERS = [Order("first", 7, {}), Order("second", 3, {})]


def job(**marks: Any) -> Any:
    whole = {"state": "done", "owner": None, "last_owner": "B", "fence": 1, "until": 0.0, "attempts": 1}
    return SimpleNamespace(**whole | {"finished_at": 5.0} | marks)


def first(**marks: Any) -> Facts:
    return replace(GOOD, jobs={**GOOD.jobs, "first": job(**{"fence": 2, "attempts": 2} | marks)})


def shipment(order: str, qty: int, fence: int, courier: str = "B") -> Any:
    return SimpleNamespace(order_id=order, qty=qty, fence=fence, courier=courier)


BEFORE: Any = job(fence=2, attempts=2)
GOOD = Facts(
    {"first": job(fence=2, attempts=2), "second": job()}, [shipment("first", 7, 2), shipment("second", 3, 1)]
)


def broken(facts: Facts, before: JobRecord | None = BEFORE, *, refused: bool = True) -> list[str]:
    return [one.name for one in check(ORDERS, facts, before, refused) if not one.holds]


def test_a_good_end_holds() -> None:
    assert broken(GOOD) == []


@pytest.mark.parametrize(
    ("word", "facts"),
    [
        ("is done", replace(GOOD, jobs={**GOOD.jobs, "second": job(state="leased")})),
        ("is done", replace(GOOD, jobs={"first": GOOD.jobs["first"]})),
        ("is done", replace(GOOD, jobs={**GOOD.jobs, "third": job()})),
        ("one shipment", replace(GOOD, shipments=GOOD.shipments[:1])),
        ("one shipment", replace(GOOD, shipments=[*GOOD.shipments, shipment("first", 7, 2)])),
        ("one shipment", replace(GOOD, shipments=[shipment("first", 8, 2), GOOD.shipments[1]])),
        ("one shipment", replace(GOOD, shipments=[shipment("first", 7, 1), GOOD.shipments[1]])),
        ("fences", replace(GOOD, jobs={**GOOD.jobs, "second": job(fence=2)})),
        ("fences", first(fence=3)),
        ("late completion", replace(GOOD, shipments=[*GOOD.shipments, shipment("first", 7, 1, "A")])),
        ("late completion", first(last_owner="A")),
        ("late completion", first(finished_at=6.0)),
    ],
)  # fmt: skip
def test_each_broken_end_is_seen(word: str, facts: Facts) -> None:
    assert any(word in name for name in broken(facts)), broken(facts)


def test_a_completion_that_was_not_refused_is_seen() -> None:
    assert any("late completion" in name for name in broken(GOOD, refused=False))
    assert any("late completion" in name for name in broken(GOOD, before=None))


def test_broken_invariants_end_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fencedjobs.cli.demo.command.read", lambda engine, stage: Facts({}, []))
    answer = run("demo", "--json")
    assert (answer.code, json.loads(answer.out)["ok"]) == (1, False)
