"""``demo``: with real processes on each database, interrupted at every step, and judging honestly."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from sqlalchemy import URL, Engine, MetaData, func, inspect, select

from fencedjobs import JobState, Store
from fencedjobs.cli import main
from fencedjobs.cli.demo import delivery, evidence, story, world
from fencedjobs.cli.demo.evidence import Outcome, Sight
from fencedjobs.cli.demo.invariants import Facts, Invariant, check
from fencedjobs.cli.demo.orders import Order, read_orders
from fencedjobs.cli.demo.stage import Stage
from fencedjobs.relay import dispatch
from fencedjobs.values import JobRecord
from tests.cli.helpers import EACH_DATABASE, EACH_EMPTY, Answer, run, spawn, text_of
from tests.databases import Database
from tests.processes import FRESH

#: leases that somebody waits for the end of; the others are long, however busy the machine is
BRIEF = 0.3


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    """Where the demo puts what is temporary."""
    made = tmp_path / "temp"
    made.mkdir()
    return made


@pytest.fixture
def demo(temp: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Runs the command in this process; the children are real ones. Nothing temporary may stay."""
    monkeypatch.setattr(story, "SHORT", BRIEF)
    monkeypatch.setattr(delivery, "SHORT", BRIEF)
    monkeypatch.setattr(tempfile, "tempdir", str(temp))

    def demo(*arguments: str | Path, url: URL | None = None) -> Answer:
        answer = run("demo", "--json", *arguments, url=url)
        assert not list(temp.iterdir())
        return answer

    return demo


def assert_the_first_chapter(timeline: list[dict[str, Any]], orders: int) -> None:
    told = [(moment["who"], moment["event"], moment["fence"]) for moment in timeline]
    assert told[:3] == [("shop", "enqueued", None), ("A", "claimed", 1), ("A", "stopped", 1)]
    b = [(event, fence) for who, event, fence in told if who == "B" and event != "nothing"]
    assert b == [("claimed", 2), ("completed", 2)] + [("claimed", 1), ("completed", 1)] * (orders - 1)
    assert [(event, fence) for who, event, fence in told if who == "A"][-2:] == [
        ("continued", 1),
        ("refused", 1),
    ]
    ends = [datetime.fromisoformat(m["until"]).timestamp() for m in timeline if m["event"] == "claimed"]
    assert (
        ends[1] - story.LONG >= ends[0] - 1e-5
    )  # B's lease began, by the database's clock, when A's was over
    (refused,) = [moment for moment in timeline if moment["event"] == "refused"]
    assert "LeaseLost" in refused["text"]


def assert_the_second_chapter(timeline: list[dict[str, Any]], died: str, cut: str) -> None:
    told = [
        (moment["who"], moment["event"], moment["order"])
        for moment in timeline
        if moment["who"] in ("relay 1", "relay 2", "warehouse", "evidence") and moment["event"] != "nothing"
    ]
    assert told[:8] == [
        ("relay 1", "sending", died), ("warehouse", "received", died), ("relay 1", "died", died),
        ("evidence", "seen", died),
        ("relay 2", "sending", died), ("warehouse", "received", died), ("relay 2", "acknowledged", died),
        ("relay 2", "sending", cut),
    ]  # fmt: skip
    assert told[8:14] == [
        ("warehouse", "received", cut), ("relay 2", "failed", cut), ("evidence", "seen", cut),
        ("relay 2", "sending", cut), ("warehouse", "received", cut), ("relay 2", "acknowledged", cut),
    ]  # fmt: skip
    assert {event for _, event, _ in told[14:]} <= {"delivered"}
    first, second = [moment["text"] for moment in timeline if moment["event"] == "seen"]
    assert first.startswith(f"{died}: pending here; in the inbox there")
    assert second.startswith(f"{cut}: pending here; in the inbox there")


def assert_all_holds(answer: Answer) -> None:
    assert answer.code == 0, answer.out + answer.err
    assert [invariant["holds"] for invariant in answer.json()["invariants"]] == [True] * 9


def rows(engine: Engine) -> dict[str, int]:
    """How many rows each table has."""
    found = MetaData()
    found.reflect(engine)
    with engine.connect() as connection:
        return {
            name: connection.scalar(select(func.count()).select_from(table)) or 0
            for name, table in found.tables.items()
        }


# --- the story ------------------------------------------------------------------------------------


def test_as_text_it_tells_who_held_which_fence_and_what_is_evident(temp: Path) -> None:
    elsewhere = "postgresql+psycopg://u@127.0.0.1:1/x"  # the environment's database is not for play
    answer = spawn("demo", cwd=temp.parent, TMPDIR=str(temp), FENCEDJOBS_URL=elsewhere)
    assert (answer.code, answer.err) == (0, "")
    for line in (
        r"A +fence 1  claims order-1001 for 1 s",
        r"B +fence 2  claims order-1001",
        r"A +fence 1  REFUSED, .*LeaseLost",
        r"relay 1 +fence 1  sends order-1001 \(7 pieces\)",
        r"warehouse +new: stock 0 -> 7; acknowledges",
        r"relay 1 +fence 1  has the ACK, and DIES before its mark: exit code 73",
        r"evidence +order-1001: pending here; in the inbox there, stock 7",
        r"relay 2 +fence 2  sends order-1001 again, under the same id",
        r"warehouse +a duplicate: stock stays 7; acknowledges",
        r"warehouse +new: stock 7 -> 10; CUTS the connection, no answer",
        r"evidence +order-1002: pending here; in the inbox there, stock 10",
        r"warehouse +a duplicate: stock stays 10; acknowledges",
        r"holds   every order is done, once",
        r"holds   the stock is the sum of the orders\n +stock 28, ordered 28",
    ):
        assert re.search(line, answer.out), answer.out
    assert answer.out.endswith("\nAll invariants hold.\n")
    assert "BROKEN" not in answer.out
    assert not list(temp.iterdir())


@EACH_DATABASE
def test_on_a_database_with_tables_it_leaves_only_what_was_there(
    engine: Engine, url: URL, demo: Callable[..., Answer], tmp_path: Path
) -> None:
    """With orders of the user, an id of which comes twice."""
    orders = tmp_path / "orders.jsonl"
    orders.write_text(
        '{"id": "größer", "qty": 1, "n": "🙂"}\n\n{"id": "x [red]", "qty": 0}\n'
        '{"id": "größer", "qty": 9}\n{"id": "order-1001", "qty": 7}'
    )
    store = Store(engine)
    store.enqueue("order-1001", {"mine": True})
    store.outbox.add("order-1001", {"mine": True}, topic="mine")
    before, there = store.get("order-1001"), rows(engine)
    answer = demo("--orders", orders, url=url)
    assert_all_holds(answer)
    timeline = answer.json()["timeline"]
    assert_the_first_chapter(timeline, orders=3)
    assert_the_second_chapter(timeline, died="größer", cut="x [red]")
    assert "1 more had an id that was there already" in timeline[0]["text"]
    assert store.get("order-1001") == before
    assert store.counts() == {"default": {JobState.READY: 1}}
    assert rows(engine) == there


def play_a_little(stage: Stage, engine: Engine) -> None:
    """What the processes leave in somebody's database: a job, a sent event, the lease of a lane."""
    store = Store(engine)
    store.enqueue(stage.job_id("x"), queue=stage.queue)
    store.outbox.add(stage.job_id("x"), 1, topic="warehouse", lane=stage.lane)
    assert dispatch(store, lambda event: True, lane=stage.lane) == 1


@EACH_EMPTY
def test_on_a_database_without_tables_those_it_made_are_removed(empty: Database) -> None:
    with ExitStack() as place:
        play_a_little(*world.borrowed(empty.url, None, place))
    engine = empty.engine()
    assert inspect(engine).get_table_names() == []
    engine.dispose()


@EACH_EMPTY
def test_tables_stay_when_somebody_else_has_begun_to_use_them(
    empty: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = empty.engine()
    with ExitStack() as place:
        play_a_little(*world.borrowed(empty.url, None, place))
        Store(engine).enqueue("order-1")
    assert {name: count for name, count in rows(engine).items() if count} == {
        "fenced_jobs": 1, "fenced_version": 1
    }  # fmt: skip
    assert "somebody else uses them" in capsys.readouterr().err
    engine.dispose()


# --- orders of the user ---------------------------------------------------------------------------


def test_a_single_order_dies_is_cut_off_and_arrives(tmp_path: Path, demo: Callable[..., Answer]) -> None:
    orders = tmp_path / "orders.jsonl"
    orders.write_text('{"id": "only", "qty": 7}')
    answer = demo("--orders", orders)
    assert_all_holds(answer)
    received = [m["text"] for m in answer.json()["timeline"] if m["event"] == "received"]
    assert received == [
        "new: stock 0 -> 7; acknowledges",
        "a duplicate: stock stays 7; CUTS the connection, no answer",
        "a duplicate: stock stays 7; acknowledges",
    ]


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

#: how far it is, and which signal comes then; Ctrl-C goes to the whole group of processes
STEPS = [
    ("1. The late courier", signal.SIGINT),
    ("A          fence 1  claims", signal.SIGHUP),
    ("is stopped", signal.SIGINT),
    ("B          fence 2  claims", signal.SIGTERM),
    ("goes on", signal.SIGINT),
    ("DIES", signal.SIGTERM),
    ("CUTS", signal.SIGINT),
]


class Running:
    """The demo as the leader of a process group, as a shell starts it; forked, since importing takes long."""

    def __init__(self, place: Path, *arguments: str) -> None:
        pipes = [FRESH.Pipe(duplex=False) for _ in ("stdout", "stderr")]
        self._readers = [reader for reader, _ in pipes]
        told = (place, [writer for _, writer in pipes], ["fencedjobs", "demo", *arguments])
        self.process = FRESH.Process(target=play_impatiently, args=told)
        self.process.start()
        for _, writer in pipes:
            writer.close()
        self.stdout, self.stderr = (os.fdopen(reader.fileno(), closefd=False) for reader in self._readers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()  # no matter if it has ended
        self.process.join()
        for stream, reader in zip((self.stdout, self.stderr), self._readers, strict=True):
            stream.close()
            reader.close()

    def line_with(self, pattern: str) -> re.Match[str]:
        """The first line in which this is found."""
        return next(found for line in self.stdout if (found := re.search(pattern, line)))

    def end(self) -> tuple[int | None, str]:
        """The exit code, and what was said on stderr."""
        said = self.stderr.read()
        self.process.join(30)
        return self.process.exitcode, said


def play_impatiently(place: Path, writers: list[Any], arguments: list[str]) -> None:
    """In the forked process: become what a shell would have started."""
    os.setpgid(0, 0)
    for number, writer in enumerate(writers, start=1):
        os.dup2(writer.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
    os.chdir(place)
    tempfile.tempdir = str(place)
    delivery.SHORT = story.SHORT = BRIEF  # type: ignore[misc]
    sys.argv = arguments
    main()


def left_of(group: int) -> str:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return "nothing"
    return "a process"


def interrupted(place: Path, step: str, number: signal.Signals, *arguments: str) -> tuple[Any, ...]:
    """The exit code, what was said, the processes and the files that are left."""
    place.mkdir()
    with Running(place, *arguments) as demo:
        demo.line_with(re.escape(step))
        group = demo.process.pid or 0
        (os.killpg if number == signal.SIGINT else os.kill)(group, number)
        return *demo.end(), left_of(group), list(place.iterdir())


def test_an_interruption_at_any_step_leaves_nothing_behind(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:  # side by side: most of a run is waiting
        runs = [pool.submit(interrupted, tmp_path / str(n), *step) for n, step in enumerate(STEPS)]
    assert {step: run.result() for step, run in zip(STEPS, runs, strict=True)} == {
        (step, number): (128 + number, "Interrupted.\n", "nothing", []) for step, number in STEPS
    }


@EACH_EMPTY
@pytest.mark.parametrize("step", ["1. The late courier", "is stopped"])
def test_ctrl_c_on_a_database_of_the_user_removes_rows_and_tables(
    empty: Database, tmp_path: Path, step: str
) -> None:
    end = interrupted(tmp_path / "place", step, signal.SIGINT, "--url", text_of(empty.url))
    assert end == (130, "Interrupted.\n", "nothing", [])
    engine = empty.engine()
    assert inspect(engine).get_table_names() == []
    engine.dispose()


def test_a_courier_that_dies_ends_the_demo_with_its_last_words(temp: Path) -> None:
    with Running(temp) as demo:
        os.kill(int(demo.line_with(r"SIGSTOP, pid (\d+)")[1]), signal.SIGKILL)
        assert demo.end() == (1, "Error: courier A ended early: without a word\n")
        assert left_of(demo.process.pid or 0) == "nothing"
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


def sight(order: str, here: str | None = "pending", there: bool = True) -> Sight:
    return Sight(order, here, there, 7)


def message(order: str, duplicates: int = 1, conflicts: int = 0) -> Any:
    return SimpleNamespace(id=order, duplicates=duplicates, conflicts=conflicts)


STAGE = Stage("", "orders", "shipments")
END = Outcome(
    events={"first": "sent", "second": "sent"},
    inbox=[message("first"), message("second")],
    deliveries=[("first", 1), ("first", 2), ("second", 2), ("second", 3)],
    stock=10,
)
SIGHTS = [sight("first"), sight("second")]


def wrong(end: Outcome = END, sights: list[Sight] = SIGHTS, exit_code: int | None = 73) -> list[str]:
    return [one.name for one in evidence.check(ORDERS, STAGE, end, sights, exit_code) if not one.holds]


def test_a_good_end_of_the_deliveries_holds() -> None:
    assert wrong() == []


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("is sent", replace(END, events={"first": "sent", "second": "pending"})),
        ("is sent", replace(END, events={"first": "sent"})),
        ("is sent", replace(END, events={**END.events, "third": "sent"})),
        ("sum of the orders", replace(END, stock=17)),
        ("once, however often", replace(END, inbox=[message("first")])),
        ("once, however often", replace(END, inbox=[*END.inbox, message("third")])),
        ("once, however often", replace(END, inbox=[message("first", 0), message("second")])),
        ("once, however often", replace(END, inbox=[message("first", conflicts=1), message("second")])),
        ("between ACK and mark", replace(END, deliveries=END.deliveries[1:])),
        ("between ACK and mark", replace(END, deliveries=[("first", 2), ("first", 1), *END.deliveries[2:]])),
        ("without an answer", replace(END, deliveries=END.deliveries[:3])),
    ],
)  # fmt: skip
def test_each_broken_end_of_the_deliveries_is_seen(word: str, end: Outcome) -> None:
    assert any(word in name for name in wrong(end)), wrong(end)


@pytest.mark.parametrize(
    ("word", "sights"),
    [
        ("between ACK and mark", [sight("first", here="sent"), SIGHTS[1]]),
        ("between ACK and mark", [sight("first", here=None), SIGHTS[1]]),
        ("between ACK and mark", [sight("first", there=False), SIGHTS[1]]),
        ("between ACK and mark", []),
        ("without an answer", [SIGHTS[0], sight("second", here="sent")]),
        ("without an answer", [SIGHTS[0], sight("second", there=False)]),
        ("without an answer", SIGHTS[:1]),
    ],
)
def test_each_sight_that_proves_nothing_is_seen(word: str, sights: list[Sight]) -> None:
    assert any(word in name for name in wrong(sights=sights))


def test_a_relay_that_did_not_die_is_seen() -> None:
    assert any("between ACK and mark" in name for name in wrong(exit_code=0))


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_broken_invariants_end_with_1(monkeypatch: pytest.MonkeyPatch, holds: bool, code: int) -> None:
    monkeypatch.setattr(
        "fencedjobs.cli.demo.command.play",
        lambda *_, **__: [Invariant("good", True, ""), Invariant("?", holds, "")],
    )
    answer = run("demo", "--json")
    assert (answer.code, json.loads(answer.out)["ok"]) == (code, holds)
    assert ("BROKEN" in run("demo").out) is not holds
