"""upgrade, downgrade, current, status, jobs and fence: what they print, change and answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, inspect

from fencedjobs import JobState, LeaseLost, Store
from tests.cli.helpers import EACH_DATABASE, EACH_EMPTY, ISO, run
from tests.databases import Database


@pytest.fixture
def store(engine: Engine) -> Store:
    return Store(engine)


# --- the tables -----------------------------------------------------------------------------------


@EACH_EMPTY
def test_upgrade_makes_the_tables_and_downgrade_removes_them(empty: Database) -> None:
    if empty.backend == "sqlite":  # looking does not make the file
        assert run("current", url=empty.url).code == 3
        assert not Path(str(empty.url.database)).exists()
    made = run("upgrade", "--json", url=empty.url)
    revision = made.json()["after"]
    assert made.code == 0
    assert made.json() == {"before": None, "after": revision}
    assert run("current", url=empty.url).out == f"{revision}\n"
    assert run("upgrade", url=empty.url).out == f"already at {revision}\n"
    assert run("downgrade", "base", url=empty.url).out == f"{revision} -> none\n"
    assert run("current", "--json", url=empty.url).json() == {"revision": None}


@EACH_EMPTY
def test_commands_without_tables_say_how_to_make_them(empty: Database) -> None:
    engine = empty.engine()
    engine.connect().close()  # SQLite's file is there
    engine.dispose()
    for command in (["status"], ["jobs", "list"], ["jobs", "show", "x"], ["enqueue", "-"]):
        answer = run(*command, url=empty.url)
        assert (answer.code, answer.out) == (3, "")
        assert "fencedjobs upgrade" in answer.err


@EACH_DATABASE
def test_downgrade_does_not_drop_rows_unasked(store: Store, engine: Engine, url: URL) -> None:
    store.enqueue("order-1")
    store.outbox.add("order-1", 1, topic="warehouse")
    refused = run("downgrade", "base", url=url)
    assert (refused.code, refused.out) == (1, "")
    assert "fenced_jobs (1 rows), fenced_outbox (1 rows);" in refused.err
    assert store.get("order-1") is not None
    assert run("downgrade", "base", "--yes", url=url).code == 0
    assert not inspect(engine).has_table("fenced_jobs")


def test_upgrade_prints_sql_without_a_database() -> None:
    answer = run("upgrade", "--sql", "postgresql")
    assert answer.code == 0
    assert "fenced_jobs (" in answer.out
    assert run("upgrade", "--sql", "nonsense").code == 2


def test_an_unknown_revision_is_a_usage_error(url: URL) -> None:
    assert run("upgrade", "nonsense", url=url).code == 2


# --- status ---------------------------------------------------------------------------------------


def test_status_of_nothing(url: URL) -> None:
    assert run("status", url=url).out == "No jobs.\n"
    assert run("status", "--json", url=url).json()["queues"] == []


@EACH_DATABASE
def test_status_counts_and_shows_what_waits_and_what_ends(store: Store, url: URL) -> None:
    store.enqueue("done", queue="shop")
    lease = store.claim("worker-a", ttl=60, queue="shop")
    assert lease
    store.complete(lease)
    store.enqueue("running", queue="shop")
    store.claim("worker-a", ttl=60, queue="shop")
    store.enqueue("waiting", queue="shop")
    store.enqueue("later", queue="shop", delay=60)
    store.enqueue("lost", queue="mail")
    store.claim("worker-b", ttl=1e-6, queue="mail")

    facts = run("status", "--json", url=url).json()
    mail, shop = facts["queues"]
    assert shop["counts"] == {
        "ready": 1, "scheduled": 1, "leased": 1, "done": 1, "quarantined": 0, "cancelled": 0
    }  # fmt: skip
    assert shop["oldest_waiting"]["id"] == "waiting"
    assert mail["oldest_waiting"]["id"] == "lost"
    assert mail["oldest_waiting"]["state"] == "leased"
    assert [lease["id"] for lease in facts["leases"]] == ["lost", "running"]
    assert facts["leases"][0]["seconds"] < 0 < facts["leases"][1]["seconds"] <= 60
    assert ISO.fullmatch(facts["leases"][1]["until"])

    text = run("status", url=url).out
    assert "free to claim" in text
    assert "worker-a" in text
    assert run("status", "--json", "--leases", "1", url=url).json()["leases"][0]["id"] == "lost"


# --- jobs -----------------------------------------------------------------------------------------


@EACH_DATABASE
def test_list_is_newest_first_and_says_when_there_is_more(store: Store, url: URL) -> None:
    for number in range(4):
        store.enqueue(f"order-{number}", queue="shop" if number % 2 else "mail")
    store.cancel("order-1")

    def ids(*options: str) -> list[str]:
        return [job["id"] for job in run("jobs", "list", "--json", *options, url=url).json()]

    assert ids() == ["order-3", "order-2", "order-1", "order-0"]
    assert ids("--queue", "shop") == ["order-3", "order-1"]
    assert ids("--state", "cancelled") == ["order-1"]
    assert ids("--queue", "nothing") == []
    cut = run("jobs", "list", "--limit", "2", "--json", url=url)
    assert [job["id"] for job in cut.json()] == ["order-3", "order-2"]
    assert "There are more" in cut.err
    assert run("jobs", "list", "--limit", "4", url=url).err == ""


def test_tombstones_are_listed_only_when_asked_for(store: Store, url: URL) -> None:
    store.enqueue("order-1")
    store.cancel("order-1")
    store.purge(before=1e12)
    assert run("jobs", "list", "--json", url=url).json() == []
    (purged,) = run("jobs", "list", "--json", "--state", "purged", url=url).json()
    assert purged["id"] == "order-1"


@EACH_DATABASE
def test_show_tells_everything(store: Store, url: URL) -> None:
    store.enqueue("order-1", {"qty": 7}, kind="pack", deadline=4e9, max_attempts=2)
    lease = store.claim("worker-a", ttl=60)
    assert lease
    store.checkpoint(lease, {"shelf": "ä"})
    store.fail(lease, ValueError("no such shelf"), retry=None)
    store.requeue("order-1", by="ann", reason="shelf is back")

    facts = run("jobs", "show", "order-1", "--json", url=url).json()
    assert (facts["id"], facts["state"], facts["fence"], facts["until"]) == ("order-1", "ready", 1, None)
    assert (facts["payload"], facts["progress"]) == ({"qty": 7}, {"shelf": "ä"})
    assert facts["deadline"] == "2096-10-02T07:06:40.000000Z"
    (error,), (requeue,) = facts["errors"], facts["requeues"]
    assert (error["kind"], error["text"]) == ("ValueError", "no such shelf")
    assert ISO.fullmatch(error["time"])
    assert (requeue["by"], requeue["reason"]) == ("ann", "shelf is back")

    text = run("jobs", "show", "order-1", url=url).out
    for word in (
        "no such shelf",
        "shelf is back",
        '{"qty": 7}',
        '{"shelf": "ä"}',
        "2096-10-02T07:06:40.000000Z",
    ):
        assert word in text


def test_show_of_a_missing_job_is_1(url: URL) -> None:
    answer = run("jobs", "show", "order-1", url=url)
    assert (answer.code, answer.out, answer.err) == (1, "", "Error: there is no job 'order-1'\n")
    assert run("jobs", "show", "x" * 256, url=url).code == 2


def test_what_is_printed_cannot_steer_the_terminal(store: Store, url: URL) -> None:
    store.enqueue("a\x1b[31m\x9b", {"x": "\x1b]0;title\x07[red]"}, queue="q\u202e")
    store.claim("w\x1b[2J", ttl=60, id="a\x1b[31m\x9b")
    for command in (["status"], ["jobs", "list"], ["jobs", "show", "a\x1b[31m\x9b"]):
        printed = run(*command, url=url).out
        assert "[31m" in printed or command == ["status"]
        assert not {c for c in printed if not (c.isprintable() or c == "\n")}


@pytest.mark.parametrize("backend_clock", [1e300, -1e300])
def test_instants_of_no_calendar_are_printed_as_numbers(store: Store, url: URL, backend_clock: float) -> None:
    store.enqueue("order-1", run_at=backend_clock)
    assert run("jobs", "show", "order-1", "--json", url=url).json()["until"] == repr(backend_clock)
    assert run("jobs", "list", url=url).code == 0


def test_cancel_refuses_what_is_done_and_reports_each(store: Store, url: URL) -> None:
    for name in ("waiting", "done"):
        store.enqueue(name)
    lease = store.claim("worker-a", ttl=60, id="done")
    assert lease
    store.complete(lease)
    answer = run("jobs", "cancel", "--json", "waiting", "done", "missing", url=url)
    assert answer.code == 1
    assert answer.json() == [
        {"id": "waiting", "changed": True, "state": "cancelled"},
        {"id": "done", "changed": False, "state": "done"},
        {"id": "missing", "changed": False, "state": None},
    ]
    again = run("jobs", "cancel", "waiting", "missing", url=url)
    assert (again.code, again.out) == (1, "")
    assert again.err == "waiting: not cancelled, it is cancelled\nmissing: there is no such job\n"


def test_quarantine_and_requeue_keep_reason_person_and_fence(store: Store, url: URL) -> None:
    store.enqueue("order-1", {"qty": 7})
    lease = store.claim("worker-a", ttl=60)
    assert lease
    assert run("jobs", "quarantine", "order-1", "--reason", "bad address", url=url).code == 0
    with pytest.raises(LeaseLost):
        store.complete(lease)
    job = store.get("order-1")
    assert job
    assert (job.state, job.reason) == (JobState.QUARANTINED, "bad address")
    answer = run("jobs", "requeue", "order-1", "--by", "ann", "--payload", '{"qty": 8}', url=url)
    assert (answer.code, answer.out) == (0, "order-1: requeued\n")
    job = store.get("order-1")
    assert job
    assert (job.state, job.fence, job.payload) == (JobState.READY, 1, {"qty": 8})
    assert (job.requeues[-1].by, job.requeues[-1].reason) == ("ann", "by hand")


@pytest.mark.parametrize("text", ["{", "NaN", '"\\ud800"'])
def test_a_mended_payload_must_be_json(store: Store, url: URL, text: str) -> None:
    store.enqueue("order-1")
    store.cancel("order-1")
    answer = run("jobs", "requeue", "order-1", "--payload", text, url=url)
    assert (answer.code, "payload" in answer.err) == (2, True)
    assert run("jobs", "requeue", "order-1", "order-2", "--payload", "1", url=url).code == 2


# --- fence ----------------------------------------------------------------------------------------


@EACH_DATABASE
def test_fence_advance_raises_every_fence_and_ends_every_lease(store: Store, url: URL) -> None:
    store.enqueue("order-1")
    lease = store.claim("worker-a", ttl=60)
    lock = store.locks.claim("leader", "worker-a", ttl=60)
    assert lease
    assert lock
    assert run("fence", "advance", "--by", "100", url=url).code == 1
    store.complete(store.renew(lease, ttl=60), {"still": "mine"})
    assert run("jobs", "show", "order-1", "--json", url=url).json()["fence"] == 1

    store.enqueue("order-2")
    lease = store.claim("worker-a", ttl=60)
    assert lease
    answer = run("fence", "advance", "--by", "100", "--yes", "--json", url=url)
    assert answer.json() == {"by": 100, "jobs": 2, "locks": 1}
    with pytest.raises(LeaseLost):
        store.complete(lease)
    with pytest.raises(LeaseLost):
        store.locks.renew(lock, ttl=60)
    assert run("jobs", "show", "order-2", "--json", url=url).json()["fence"] == 101
