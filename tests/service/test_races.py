"""Many at once: threads, and real processes started together."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from sqlalchemy import create_engine

from fencedjobs import service
from tests.databases import Database
from tests.processes import together

ROUNDS = 6


def test_of_sixteen_claims_of_a_fresh_job_exactly_one_wins(where: Any) -> None:
    owners = [f"w{n}" for n in range(16)]
    for round in range(ROUNDS):
        id = f"j{round}"
        service.enqueue(where, id)
        answers = service.claim_many(where, id, owners, 1764000000.25, 30)
        winners = [owner for owner, fence in zip(owners, answers, strict=True) if fence is not None]
        assert sorted(answers, key=str) == [1] + [None] * 15, f"round {round}: {answers}"
        assert service.state(where, id) == {
            "id": id, "owner": winners[0], "until": 1764000030.25, "fence": 1, "result": None, "done": 0,
        }  # fmt: skip


def test_of_many_claims_of_an_expired_lease_exactly_one_wins(where: Any) -> None:
    service.enqueue(where, "j")
    assert service.claim(where, "j", "dead", 0, 1) == 1
    for round in range(1, ROUNDS):
        answers = service.claim_many(where, "j", [f"w{n}" for n in range(8)], round, 1)
        assert sorted(answers, key=str) == [round + 1] + [None] * 7, f"round {round}: {answers}"


def test_the_answers_come_in_the_order_of_the_owners(where: Any) -> None:
    service.enqueue(where, "j")
    assert service.claim_many(where, "j", ["only"], 0, 1) == [1]
    assert service.claim_many(where, "j", [], 0, 1) == []
    assert service.claim_many(where, "j", ["a", "b"], 0.5, 1) == [None, None]
    assert service.claim_many(where, "missing", ["a", "b"], 0, 1) == [None, None]
    answers = service.claim_many(where, "j", ["same"] * 4, 1, 1)
    winner = answers.index(2)
    assert answers == [2 if n == winner else None for n in range(4)]


def test_a_job_is_registered_once_by_many_threads(where: Any) -> None:
    barrier = Barrier(8)

    def register(id: str) -> bool:
        barrier.wait()
        return service.enqueue(where, id)

    for round in range(ROUNDS):
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(register, [f"j{round}"] * 8))
        assert sorted(answers) == [False] * 7 + [True], answers


def test_the_table_may_be_made_by_many_at_once(empty: Database) -> None:
    engine = create_engine(empty.url)
    barrier = Barrier(6)

    def make(_: int) -> None:
        barrier.wait()
        service.init_db(engine)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(make, range(6)))
    assert service.enqueue(engine, "j") is True
    engine.dispose()


def claim_in_child(url: str, id: str, owner: str) -> int | None:
    return service.claim(url, id, owner, 1764000000.25, 30)


def test_of_processes_started_together_one_wins_and_the_others_see_it(where: Any, url: str) -> None:
    for round in range(2):
        service.enqueue(where, f"j{round}")
        answers = together(claim_in_child, [(url, f"j{round}", f"w{n}") for n in range(3)])
        assert sorted(answers, key=str) == [1, None, None], answers
        state = service.state(where, f"j{round}")
        assert (state or {})["owner"] == f"w{answers.index(1)}"


def claim_and_die(url: str, id: str, owner: str) -> None:
    service.claim(url, id, owner, 100, 30)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_keeps_its_lease_until_the_end_and_not_longer(where: Any, url: str) -> None:
    service.enqueue(where, "j")
    assert together(claim_and_die, [(url, "j", "a")]) == [-signal.SIGKILL]
    assert service.claim(where, "j", "b", 129, 30) is None
    assert service.claim(where, "j", "b", 130, 30) == 2
    assert service.complete(where, "j", "a", 1, 131, "late") is False
    assert service.complete(where, "j", "b", 2, 131, "ok") is True
