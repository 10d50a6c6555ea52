"""``work``: a worker of the app's as a real process, on the demo's orders; Ctrl-C loses nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, create_engine, text

from fencedjobs import Store
from fencedjobs.cli.demo.orders import read_orders
from tests.cli.helpers import COMMAND, EACH_DATABASE, environment, run, spawn, text_of
from tests.databases import ASYNC_DRIVER, Database
from tests.worker.helpers import until

MODULE = """
import asyncio
import time

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from fencedjobs import AsyncStore, AsyncWorker, Store, Worker

OPTIONS = {{"queues": ["orders"], "concurrency": 2, "poll": 0.1, "grace": 0.2}}
engine = create_engine({url!r})
worker = Worker(Store(engine), **OPTIONS)
INSERT = text("INSERT INTO shipments (order_id, qty) VALUES (:id, :qty)")


@worker.handler("pack")
def pack(ctx):
    time.sleep(ctx.payload.get("takes", 0.02))
    with ctx.transaction() as uow:
        uow.session.execute(INSERT, {{"id": ctx.id, "qty": ctx.payload["qty"]}})


on_asyncio = AsyncWorker(AsyncStore(create_async_engine({async_url!r})), **OPTIONS)


@on_asyncio.handler("pack")
async def pack_too(ctx):
    await asyncio.sleep(ctx.payload.get("takes", 0.02))
    async with ctx.transaction() as uow:
        await uow.session.execute(INSERT, {{"id": ctx.id, "qty": ctx.payload["qty"]}})
"""

ROUNDS = 12


@pytest.fixture
def app(engine: Engine, url: URL, tmp_path: Path, database: Database) -> Path:
    """A folder with the app's module, on a database with the demo's orders, each several times."""
    async_url = database.async_url(ASYNC_DRIVER[database.backend])
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS shipments"))
        connection.execute(text("CREATE TABLE shipments (order_id VARCHAR(99), qty INTEGER)"))
    orders = [(f"{n} {order.id}", order.qty) for n in range(ROUNDS) for order in read_orders(None)]
    Store(engine).enqueue_many(
        [{"id": id, "payload": {"qty": qty}, "kind": "pack", "queue": "orders"} for id, qty in orders]
    )
    source = MODULE.format(url=text_of(url), async_url=text_of(async_url))
    (tmp_path / "shop.py").write_text(source)
    return tmp_path


def shipments(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return [row[0] for row in connection.execute(text("SELECT order_id FROM shipments"))]


@EACH_DATABASE
@pytest.mark.parametrize("worker", ["worker", "on_asyncio"])
def test_an_interruption_in_the_middle_loses_nothing_and_leaves_nothing_leased(
    engine: Engine, app: Path, worker: str
) -> None:
    store = Store(engine)
    store.enqueue("slow", {"qty": 1, "takes": 30}, kind="pack", queue="orders", priority=1)
    child = subprocess.Popen(
        [*COMMAND, "work", f"shop:{worker}"], cwd=app, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    until(lambda: len(shipments(engine)) > 5, 30)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    counts = store.counts()["orders"]
    first = shipments(engine)
    assert child.returncode == 0, err
    assert "Traceback" not in err
    assert out == f"{len(first)} completed\n"
    assert set(counts) == {"done", "ready"}
    slow = store.get("slow")
    assert slow is not None
    assert (slow.state, slow.attempts, slow.fence) == ("ready", 0, 1)
    store.cancel("slow")

    assert spawn("work", f"shop:{worker}", "--until-empty", "--concurrency", "8", cwd=app).code == 0
    packed = shipments(engine)
    assert len(packed) == len(set(packed)) == ROUNDS * len(read_orders(None))
    assert set(store.counts()["orders"]) == {"done", "cancelled"}


def test_as_json_each_event_is_a_line(app: Path) -> None:
    done = spawn("work", "shop:worker", "--until-empty", "--json", cwd=app)
    events = [json.loads(line) for line in done.out.splitlines()]
    completed = [event for event in events if event["event"] == "job.completed"]
    assert (done.code, done.err) == (0, "")
    assert len(completed) == ROUNDS * len(read_orders(None))
    assert {"at", "id", "owner", "fence", "remaining"} <= set(completed[0])
    assert events[-1]["event"] == "worker.stopped"


def test_other_queues_than_the_workers_own(engine: Engine, app: Path) -> None:
    Store(engine).enqueue("other", {"qty": 1}, kind="pack", queue="express")
    done = spawn("work", "shop:worker", "--queues", "express, fast", "--until-empty", cwd=app)
    assert (done.code, done.out) == (0, "1 completed\n")
    assert shipments(engine) == ["other"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["shop"], "must be MODULE:WORKER"),
        (["nowhere.at.all:worker"], "there is no module 'nowhere.at.all'"),
        (["json:worker"], "no Worker or AsyncWorker, but NoneType"),
        (["json:dumps"], "no Worker or AsyncWorker, but function"),
        (["shop:worker", "--concurrency", "0"], "--concurrency"),
        (["shop:worker", "--concurrency", "10000"], "the pool of the engine gives"),
        (["shop:worker", "--queues", ""], "--queues"),
        (["shop:worker", "--url", "sqlite://"], "the worker's own store"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(app: Path, arguments: list[str], says: str) -> None:
    done = spawn("work", *arguments, cwd=app)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert "Traceback" not in done.err


def test_a_module_that_cannot_import_something_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import not_installed\n")
    done = spawn("work", "broken:worker", cwd=tmp_path)
    assert done.code == 1
    assert "No module named 'not_installed'" in done.err
    assert "broken.py" in done.err


def test_without_tables_it_says_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    (tmp_path / "shop.py").write_text(
        MODULE.format(url=url, async_url=f"sqlite+aiosqlite:///{tmp_path}/e.db")
    )
    done = spawn("work", "shop:worker", cwd=tmp_path)
    assert done.code == 3
    assert "upgrade" in done.err
    assert "Traceback" not in done.err


def test_the_help_is_there() -> None:
    assert "MODULE:WORKER" in run("work", "--help").out


def test_the_readmes_first_worker_is_the_example_and_runs(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    example = (root / "examples" / "first_worker.py").read_text()
    code = [line for line in example.splitlines()[2:] if line]
    readme = [line for line in (root / "README.md").read_text().splitlines() if line]
    start = readme.index("worker.run()".rjust(16)) + 1 - len(code)
    assert readme[start : start + len(code)] == code
    assert len(code) <= 15

    child = subprocess.Popen(
        [sys.executable, str(root / "examples" / "first_worker.py")], cwd=tmp_path, env=environment()
    )
    until((tmp_path / "shop.db").exists)
    store = Store(create_engine(f"sqlite:///{tmp_path / 'shop.db'}"))
    until(lambda: _is_migrated(store))
    store.enqueue("order-7", {"qty": 7}, kind="pack", queue="orders")
    until(lambda: store.counts()["orders"] == {"done": 1})
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == 0
    assert [event.id for event in store.outbox.pending()] == ["order-7"]


def _is_migrated(store: Store) -> bool:
    try:
        store.counts()
    except Exception:  # noqa: BLE001 - not yet
        return False
    return True
