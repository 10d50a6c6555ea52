"""The pytest plugin in somebody's project: stores of their own, jobs run inline, assertions that tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, inspect, text

from tests.cli.helpers import environment, text_of

APP = """
import pytest
from fencedjobs import AsyncWorker, Quarantine, Snooze, Store, UnitOfWork, Worker
from fencedjobs.testing import assert_enqueued, assert_sent
from sqlalchemy import create_engine

worker = Worker(Store(create_engine("sqlite:///never-opened.db")), queues=("mail", "default"))


@worker.handler("pack")
def pack(ctx):
    if ctx.payload["qty"] == 0:
        raise ValueError("nothing to pack")
    with ctx.transaction("packed") as uow:
        uow.outbox.add(ctx.id, ctx.payload, topic="warehouse")
        uow.jobs.enqueue(f"mail {ctx.id}", kind="mail", queue="mail")


@worker.handler("mail")
async def mail(ctx):
    return "mailed"


@worker.handler("later")
def later(ctx):
    raise Snooze(60)
"""

TESTS = """
from app import *


def test_due_jobs_are_run_inline(fencedjobs_store, fencedjobs_drain):
    fencedjobs_store.enqueue("order-7", {"qty": 7}, kind="pack")
    assert_enqueued("pack", payload={"qty": 7}, queue="default", count=1)
    assert_enqueued("mail", count=0)
    assert fencedjobs_drain(worker) == ["order-7", "mail order-7"]
    assert_sent("warehouse", id="order-7", payload={"qty": 7})
    assert fencedjobs_store.get("mail order-7").result == "mailed"


def test_each_test_finds_the_tables_empty(fencedjobs_store):
    assert fencedjobs_store.counts() == {}


def test_an_error_comes_out_when_its_job_is_failed(fencedjobs_store, fencedjobs_drain):
    fencedjobs_store.enqueue("order-8", {"qty": 0}, kind="pack", max_attempts=1)
    with pytest.raises(ValueError, match="nothing to pack"):
        fencedjobs_drain(worker)
    assert fencedjobs_store.get("order-8").state == "quarantined"


def test_the_clock_is_moved_by_hand(fencedjobs_store, fencedjobs_clock, fencedjobs_drain):
    fencedjobs_store.enqueue("a", kind="later")
    assert fencedjobs_drain(worker) == ["a"]
    assert fencedjobs_drain(worker) == []
    fencedjobs_clock.advance(59.5)
    assert fencedjobs_drain(worker) == []
    fencedjobs_clock.advance(0.5)
    assert fencedjobs_drain(worker) == ["a"]


def test_async(fencedjobs_async_store, fencedjobs_store, fencedjobs_drain):
    import asyncio

    async_worker = AsyncWorker(fencedjobs_async_store)

    @async_worker.handler("k")
    async def k(ctx):
        await ctx.checkpoint(1)
        async with ctx.transaction() as uow:
            await uow.outbox.add(ctx.id, ctx.progress, topic="t")

    fencedjobs_store.enqueue("a", kind="k")
    assert asyncio.run(fencedjobs_drain(async_worker)) == ["a"]
    assert_sent("t", payload=1)


def test_a_session_of_the_hosts_joins(fencedjobs_store):
    from sqlalchemy.orm import Session

    with Session(fencedjobs_store.transactions.engine) as session:
        UnitOfWork(session).jobs.enqueue("a", kind="pack")
        session.commit()
    assert_enqueued("pack", id="a")


def test_a_job_that_enqueues_itself_ends(fencedjobs_store, fencedjobs_drain):
    endless = Worker(fencedjobs_store)

    @endless.handler("again")
    def again(ctx):
        fencedjobs_store.enqueue(kind="again")

    fencedjobs_store.enqueue(kind="again")
    with pytest.raises(AssertionError, match="does one enqueue itself"):
        fencedjobs_drain(endless, limit=10)


def test_what_is_missing_is_told(fencedjobs_store):
    fencedjobs_store.enqueue("a", {"qty": 3}, kind="pack")
    with pytest.raises(AssertionError, match=r"no job with kind='pack', payload={'qty': 4}(.|\\n)*'qty': 3"):
        assert_enqueued("pack", payload={"qty": 4})
    with pytest.raises(AssertionError, match="no event with topic='t'(.|\\n)*nothing"):
        assert_sent("t")
"""


def pytest_in(folder: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    (folder / "app.py").write_text(APP)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:pytest_alembic",
        *arguments,
    ]
    return subprocess.run(
        command, cwd=folder, env=environment(PYTEST_ADDOPTS="", **changes), timeout=120,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_projects_tests_run_on_its_database(tmp_path: Path, engine: Engine, url: URL) -> None:
    (tmp_path / "test_app.py").write_text(TESTS)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO fenced_guards VALUES ('the host''s', 7, 0)"))
    before = places(engine)
    ran = pytest_in(tmp_path, "--fencedjobs-url", text_of(url.difference_update_query(["ssl_disabled"])))
    assert ran.returncode == 0, ran.stdout
    assert "8 passed" in ran.stdout
    assert places(engine) == before
    with engine.connect() as connection:
        assert connection.execute(text("SELECT resource FROM fenced_guards")).scalars().all() == [
            "the host's"
        ]
    assert not (tmp_path / "never-opened.db").exists()


def places(engine: Engine) -> tuple[list[str], list[str]]:
    found = inspect(engine)
    return sorted(n for n in found.get_schema_names() if "verify" in n), sorted(found.get_table_names())


@pytest.mark.kit
def test_without_a_url_it_is_a_file_of_its_own_and_the_variable_is_heard(tmp_path: Path) -> None:
    (tmp_path / "test_app.py").write_text(TESTS)
    assert "8 passed" in pytest_in(tmp_path).stdout
    refused = pytest_in(tmp_path, "-x", FENCEDJOBS_URL="postgresql+psycopg://nobody@127.0.0.1:1/none")
    assert refused.returncode == 1
    assert "127.0.0.1" in refused.stdout


def test_where_it_is_not_used_nothing_is_imported(tmp_path: Path) -> None:
    (tmp_path / "test_bare.py").write_text(
        "import sys\n\n\ndef test_bare():\n    assert 'fencedjobs.testing.plugin' in sys.modules\n"
        "    assert not {'sqlalchemy', 'alembic', 'hypothesis', 'fencedjobs.store'} & set(sys.modules)\n"
    )
    ran = pytest_in(tmp_path, "-p", "no:asyncio", "-p", "no:hypothesispytest", "test_bare.py")
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("name", ["Store", "AsyncWorker", "LeaseLost", "Snooze", "UnitOfWork"])
def test_a_public_name_is_there_when_it_is_asked_for(name: str) -> None:
    import fencedjobs

    assert getattr(fencedjobs, name).__name__ == name
    assert name in dir(fencedjobs)
