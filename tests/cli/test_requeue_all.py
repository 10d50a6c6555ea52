"""``jobs requeue --all``: which jobs it takes, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from fencedjobs import JobState, Retry, Store
from fencedjobs.cli import reads
from tests.cli.helpers import EACH_DATABASE, run


@pytest.fixture
def store(engine: Engine) -> Store:
    return Store(engine)


def failed(store: Store, id: str, *errors: BaseException | str, queue: str = "shop") -> None:
    """A job that failed with these errors, the last time for good."""
    store.enqueue(id, queue=queue)
    for error in errors:
        lease = store.claim("w", ttl=60, id=id)
        assert lease
        store.fail(lease, error, retry=None if error is errors[-1] else Retry(base=0))


def ready(store: Store) -> set[str]:
    queues = ("shop", "mail")
    return {lease.id for queue in queues for lease in store.claim_many(ttl=60, limit=500, queue=queue)}


def test_all_quarantined_jobs_are_requeued_and_no_others(store: Store, url: URL) -> None:
    failed(store, "a", "no")
    failed(store, "b", "no", queue="mail")
    for id in ("cancelled", "waiting", "done"):
        store.enqueue(id, queue="other")
    store.cancel("cancelled")
    lease = store.claim("w", ttl=60, id="done")
    assert lease
    store.complete(lease)
    answer = run("jobs", "requeue", "--all", "--by", "ann", "--reason", "fixed", url=url)
    assert (answer.code, answer.out, answer.err) == (0, "2 jobs requeued\n", "")
    job = store.get("a")
    assert job
    assert (job.state, job.attempts, job.fence) == (JobState.READY, 0, 1)
    assert (job.requeues[-1].by, job.requeues[-1].reason) == ("ann", "fixed")
    assert store.counts()["other"] == {JobState.READY: 1, JobState.DONE: 1, JobState.CANCELLED: 1}
    again = run("jobs", "requeue", "--all", "--json", url=url)
    assert (again.code, again.json()) == (0, {"requeued": 0})


def test_a_queue_and_a_state_may_be_said(store: Store, url: URL) -> None:
    for id, queue in (("a", "shop"), ("b", "mail")):
        failed(store, id, "no", queue=queue)
    for id, queue in (("c", "shop"), ("d", "mail")):
        store.enqueue(id, queue=queue)
        store.cancel(id)
    assert run("jobs", "requeue", "--all", "--queue", "mail", url=url).out == "1 job requeued\n"
    assert ready(store) == {"b"}
    chosen = ("--queue", "shop", "--state", "cancelled")
    assert run("jobs", "requeue", "--all", *chosen, url=url).out == "1 job requeued\n"
    assert ready(store) == {"c"}


@EACH_DATABASE
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("time", {"late"}), ("Time", {"class"}), ("TimeoutError: 5 s", {"class"}), ("100%", {"percent"}),
        ("s_x", {"under"}), ("\\", {"slash"}), ("tÃ", set()), ("té", {"accent"}), ('"q"', {"quote"}),
        ("by hand", {"hand"}), ("first", set()), ("attempts", set()), ("", {
            "late", "class", "percent", "under", "slash", "accent", "quote", "hand", "twice",
        }),
    ],
)  # fmt: skip
def test_a_text_is_looked_for_as_it_is_in_the_reason_and_the_last_error(
    store: Store, url: URL, text: str, found: set[str]
) -> None:
    failed(store, "late", "a time out")
    failed(store, "class", TimeoutError("5 s"))
    failed(store, "percent", "disk 100% full")
    failed(store, "under", "class s_x")
    failed(store, "slash", "C:\\temp")
    failed(store, "accent", "été")
    failed(store, "quote", 'the "q" key')
    failed(store, "twice", "the first", "the other")
    store.enqueue("hand", queue="shop")
    store.quarantine("hand", "looked at, by hand")
    answer = run("jobs", "requeue", "--all", "--error-like", text, "--json", url=url)
    assert answer.json() == {"requeued": len(found)}
    assert ready(store) == found


def test_a_dry_run_lists_and_changes_nothing(store: Store, url: URL) -> None:
    failed(store, "a", ValueError("no such city"))
    failed(store, "b", "other")
    answer = run("jobs", "requeue", "--all", "--error-like", "city", "--dry-run", url=url)
    assert answer.err == "1 job would be requeued\n"
    assert "ValueError: no such city" in answer.out
    (listed,) = run("jobs", "requeue", "--all", "--error-like", "city", "--dry-run", "--json", url=url).json()
    assert listed == {
        "id": "a", "queue": "shop", "kind": "", "state": "quarantined", "attempts": 1, "fence": 1,
        "reason": "failed for good", "error": "ValueError: no such city",
    }  # fmt: skip
    assert ready(store) == set()


def test_a_job_that_was_decided_about_meanwhile_is_left_alone(
    store: Store, url: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in ("a", "b"):
        failed(store, id, "no")

    def cancelled_after_reading(*about: Any) -> Iterator[list[Any]]:
        for batch in sound(*about):
            store.cancel("a")
            yield batch

    sound = reads.set_aside
    monkeypatch.setattr(reads, "set_aside", cancelled_after_reading)
    assert run("jobs", "requeue", "--all", url=url).out == "1 job requeued\n"
    assert store.counts() == {"shop": {JobState.READY: 1, JobState.CANCELLED: 1}}


@EACH_DATABASE
def test_many_are_requeued_in_batches(store: Store, url: URL) -> None:
    ids = store.enqueue_many([{"queue": "shop"} for _ in range(250)])
    for id in ids:
        if id != ids[120]:
            store.quarantine(id, "odd" if id == ids[70] else "even")
    answer = run("jobs", "requeue", "--all", "--error-like", "even", url=url)
    assert answer.out == "248 jobs requeued\n"
    assert store.counts() == {"shop": {JobState.READY: 249, JobState.QUARANTINED: 1}}


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["--queue", "shop"], ["--dry-run"], ["a", "--error-like", "x"], ["a", "--all"],
        ["a", "--dry-run"], ["a", "--state", "cancelled"], ["--all", "--payload", "1"],
        ["--all", "--state", "ready"],
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(store: Store, url: URL, arguments: list[str]) -> None:
    failed(store, "a", "no")
    assert run("jobs", "requeue", *arguments, url=url).code == 2
    assert ready(store) == set()
