"""The lab's contract, clause by clause."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.engine import make_url

from fencedjobs import InvalidValue, service
from tests.databases import Database
from tests.jobs.helpers import just_after, just_before

#: instants at which a caller's clock may stand
CLOCKS = [0, 1764000000.25]
FRESH = {"owner": None, "until": 0.0, "fence": 0, "result": None, "done": 0}


def leased(where: Any, id: str = "j", owner: str = "a", *, now: float = 100, ttl: float = 30) -> int:
    service.enqueue(where, id)
    fence = service.claim(where, id, owner, now, ttl)
    assert fence is not None, f"cannot be claimed at {now}: {service.state(where, id)}"
    return fence


def unchanged(where: Any, verb: Callable[[], Any], id: str = "j") -> Any:
    """What the verb answers; it must have changed nothing."""
    before = service.state(where, id)
    answer = verb()
    after = service.state(where, id)
    assert after == before, f"answered {answer!r} and changed the row:\n was {before}\n is  {after}"
    return answer


# --- init_db --------------------------------------------------------------------------------------


def test_init_db_may_be_called_again_and_keeps_everything(where: Any) -> None:
    leased(where)
    assert unchanged(where, lambda: service.init_db(where)) is None
    service.init_db(where)


def test_the_table_on_sqlite_is_exactly_that_of_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "lab.db"
    service.init_db(path)
    contract = sqlite3.connect(":memory:")
    contract.execute(
        "CREATE TABLE jobs(id TEXT PRIMARY KEY, owner TEXT, until REAL NOT NULL DEFAULT 0, "
        "fence INTEGER NOT NULL DEFAULT 0, result TEXT, done INTEGER NOT NULL DEFAULT 0)"
    )
    expected = contract.execute("PRAGMA table_info(jobs)").fetchall()
    with sqlite3.connect(path) as found:
        assert found.execute("PRAGMA table_info(jobs)").fetchall() == expected
        names = found.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite%'").fetchall()
    assert names == [("jobs",)]


def test_the_columns_are_wide_and_exact_elsewhere(where: Any, url: str, database: Database) -> None:
    engine = create_engine(url)
    columns = {column["name"]: str(column["type"]) for column in inspect(engine).get_columns("jobs")}
    here = {"postgresql": "current_schema", "mariadb": "database"}.get(database.backend)
    with engine.connect() as connection:
        collations = connection.execute(text(COLLATIONS.format(here=here))).all() if here else []
    engine.dispose()
    assert list(columns) == ["id", "owner", "until", "fence", "result", "done"]
    numbers, exact = {
        "postgresql": (["DOUBLE PRECISION", "BIGINT"], "C"),
        "mariadb": (["DOUBLE", "BIGINT"], "utf8mb4_nopad_bin"),
        "sqlite": (["REAL", "INTEGER"], None),
    }[database.backend]
    assert [columns["until"], columns["fence"].split("(")[0]] == numbers
    assert {name: collation for name, collation in collations if name in ("id", "owner")} == (
        {"id": exact, "owner": exact} if exact else {}
    )


COLLATIONS = """
    SELECT column_name, collation_name FROM information_schema.columns
    WHERE table_name = 'jobs' AND table_schema = {here}()
"""


# --- enqueue and state ----------------------------------------------------------------------------


def test_enqueue_says_whether_the_job_is_new(where: Any) -> None:
    assert service.enqueue(where, "j") is True
    assert service.state(where, "j") == {"id": "j"} | FRESH
    assert unchanged(where, lambda: service.enqueue(where, "j")) is False


def test_state_has_exactly_these_keys_and_types(where: Any) -> None:
    leased(where)
    service.complete(where, "j", "a", 1, 101, "ok")
    state = service.state(where, "j")
    assert state == {"id": "j", "owner": "a", "until": 130.0, "fence": 1, "result": "ok", "done": 1}
    assert list(state) == ["id", "owner", "until", "fence", "result", "done"]
    assert [type(value) for value in state.values()] == [str, str, float, int, str, int]


def test_there_is_no_state_of_a_job_that_is_not_registered(where: Any) -> None:
    assert service.state(where, "missing") is None


def test_registering_again_leaves_a_running_lease_and_a_result_alone(where: Any) -> None:
    leased(where)
    assert unchanged(where, lambda: service.enqueue(where, "j")) is False
    assert service.complete(where, "j", "a", 1, 101, "ok")
    assert unchanged(where, lambda: service.enqueue(where, "j")) is False


def test_ids_are_told_apart_byte_for_byte(where: Any) -> None:
    names = ["a", "A", "a ", "á", "a\u0301", "ß", "ss", "SS"]
    assert [service.enqueue(where, name) for name in names] == [True] * len(names)
    for n, name in enumerate(names):
        assert service.claim(where, name, f"w{n}", 100, 30) == 1, f"{name!r} was claimed as another"
    seen = {name: (service.state(where, name) or {})["owner"] for name in names}
    assert seen == {name: f"w{n}" for n, name in enumerate(names)}


def test_owners_are_told_apart_byte_for_byte(where: Any) -> None:
    leased(where, owner="a")
    for other in ("A", "a ", "á", " a"):
        assert unchanged(where, lambda other=other: service.renew(where, "j", other, 1, 101, 30)) is False  # type: ignore[misc]
        assert unchanged(where, lambda other=other: service.release(where, "j", other, 1)) is False  # type: ignore[misc]
    assert service.renew(where, "j", "a", 1, 101, 30) is True


# --- claim ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", CLOCKS)
def test_the_first_claim_gives_fence_one_and_each_next_one_more(where: Any, now: float) -> None:
    service.enqueue(where, "j")
    for n in range(4):
        at = now + 10 * n
        assert service.claim(where, "j", f"w{n}", at, 10) == n + 1
        expected = {"id": "j"} | FRESH | {"owner": f"w{n}", "until": at + 10, "fence": n + 1}
        assert service.state(where, "j") == expected


@pytest.mark.parametrize("now", CLOCKS)
def test_a_live_lease_is_not_handed_over_before_its_end_and_is_at_it(where: Any, now: float) -> None:
    leased(where, now=now, ttl=30)
    end = now + 30.0
    for at in (now, just_before(end)):
        assert unchanged(where, lambda at=at: service.claim(where, "j", "b", at, 30)) is None  # type: ignore[misc]
        assert unchanged(where, lambda at=at: service.claim(where, "j", "a", at, 30)) is None  # type: ignore[misc]
    assert service.claim(where, "j", "b", end, 30) == 2


def test_a_job_that_is_done_or_unknown_is_not_claimed(where: Any) -> None:
    leased(where)
    assert service.complete(where, "j", "a", 1, 101, None)
    assert unchanged(where, lambda: service.claim(where, "j", "b", 1e9, 30)) is None
    assert service.claim(where, "missing", "b", 100, 30) is None
    assert service.state(where, "missing") is None


# --- renew ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", CLOCKS)
def test_renewal_moves_the_end_while_the_lease_runs(where: Any, now: float) -> None:
    leased(where, now=now, ttl=30)
    assert service.renew(where, "j", "a", 1, just_before(now + 30.0), 10) is True
    state = service.state(where, "j")
    assert state == {"id": "j"} | FRESH | {"owner": "a", "until": just_before(now + 30.0) + 10, "fence": 1}


def test_renewal_does_not_revive_what_has_run_out(where: Any) -> None:
    leased(where, ttl=30)
    for now in (130.0, just_after(130.0), 1e9):
        assert unchanged(where, lambda now=now: service.renew(where, "j", "a", 1, now, 30)) is False  # type: ignore[misc]


def test_renewing_in_the_same_instant_is_still_held(where: Any) -> None:
    leased(where)
    assert [service.renew(where, "j", "a", 1, 100, 30) for _ in range(3)] == [True] * 3


# --- complete -------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", CLOCKS)
def test_completion_stores_the_result_while_the_lease_runs(where: Any, now: float) -> None:
    leased(where, now=now, ttl=30)
    assert service.complete(where, "j", "a", 1, just_before(now + 30.0), "höchst ok \U0001f600") is True
    expected = {
        "id": "j", "owner": "a", "until": now + 30.0, "fence": 1, "result": "höchst ok \U0001f600", "done": 1,
    }  # fmt: skip
    assert service.state(where, "j") == expected


def test_completion_at_or_after_the_end_is_refused(where: Any) -> None:
    leased(where, ttl=30)
    for now in (130.0, just_after(130.0), 1e9):
        assert unchanged(where, lambda now=now: service.complete(where, "j", "a", 1, now, "late")) is False  # type: ignore[misc]


def test_a_late_worker_cannot_complete_what_another_has_claimed(where: Any) -> None:
    leased(where, owner="a", now=0, ttl=1000)
    assert service.claim(where, "j", "b", 1000, 1000) == 2
    assert unchanged(where, lambda: service.complete(where, "j", "a", 1, 1001, "A")) is False
    assert service.complete(where, "j", "b", 2, 1002, "B") is True


def test_a_completed_job_stays_as_it_is(where: Any) -> None:
    leased(where)
    assert service.complete(where, "j", "a", 1, 101, "first")
    for verb in (
        lambda: service.complete(where, "j", "a", 1, 102, "second"),
        lambda: service.renew(where, "j", "a", 1, 102, 30),
        lambda: service.release(where, "j", "a", 1),
    ):
        assert unchanged(where, verb) is False
    assert unchanged(where, lambda: service.claim(where, "j", "a", 1e6, 30)) is None


# --- release --------------------------------------------------------------------------------------


def test_a_released_job_is_free_at_once_and_keeps_its_fence(where: Any) -> None:
    leased(where)
    assert service.release(where, "j", "a", 1) is True
    assert service.state(where, "j") == {"id": "j"} | FRESH | {"fence": 1}
    assert unchanged(where, lambda: service.release(where, "j", "a", 1)) is False
    assert service.claim(where, "j", "b", 100, 30) == 2


def test_a_lease_that_has_run_out_may_be_released_while_nobody_has_it(where: Any) -> None:
    leased(where, now=100, ttl=1)
    assert service.release(where, "j", "a", 1) is True


# --- refusals -------------------------------------------------------------------------------------


def test_every_mark_must_match(where: Any) -> None:
    """Another owner, an older or a newer fence, another job: false, and nothing changes."""
    leased(where, owner="a")
    service.release(where, "j", "a", 1)
    leased(where, owner="a")
    service.enqueue(where, "other")
    for id, owner, fence in (("j", "b", 2), ("j", "a", 1), ("j", "a", 3), ("j", "a", 0), ("other", "a", 2)):
        for verb in (
            lambda id=id, o=owner, f=fence: service.renew(where, id, o, f, 101, 30),
            lambda id=id, o=owner, f=fence: service.complete(where, id, o, f, 101, "x"),
            lambda id=id, o=owner, f=fence: service.release(where, id, o, f),
        ):
            assert unchanged(where, verb) is False, (id, owner, fence)
            assert service.state(where, "other") == {"id": "other"} | FRESH
    assert service.complete(where, "j", "a", 2, 101, "x") is True


def test_verbs_on_an_unknown_job_are_false_and_make_none(where: Any) -> None:
    answers = [
        service.renew(where, "missing", "a", 1, 101, 30),
        service.complete(where, "missing", "a", 1, 101, "x"),
        service.release(where, "missing", "a", 1),
    ]
    assert answers == [False] * 3
    assert service.state(where, "missing") is None


def test_the_same_owner_s_former_fence_is_refused(where: Any) -> None:
    leased(where, owner="same", now=0, ttl=10)
    assert service.claim(where, "j", "same", 10, 10) == 2
    assert unchanged(where, lambda: service.complete(where, "j", "same", 1, 11, "x")) is False
    assert unchanged(where, lambda: service.renew(where, "j", "same", 1, 11, 9)) is False
    assert unchanged(where, lambda: service.release(where, "j", "same", 1)) is False


def test_a_ttl_that_is_no_time_is_a_value_error_before_any_write(where: Any) -> None:
    service.enqueue(where, "free")
    leased(where)
    for ttl in (0, -1, -0.0, math.nan, math.inf, -math.inf):
        for verb in (
            lambda ttl=ttl: service.claim(where, "free", "b", 100, ttl),
            lambda ttl=ttl: service.claim(where, "missing", "b", 100, ttl),
            lambda ttl=ttl: service.renew(where, "j", "a", 1, 101, ttl),
            lambda ttl=ttl: service.renew(where, "j", "stranger", 1, 101, ttl),
            lambda ttl=ttl: service.claim_many(where, "free", ["x", "y"], 100, ttl),
        ):
            with pytest.raises(ValueError, match="ttl"):
                verb()
    assert service.state(where, "free") == {"id": "free"} | FRESH
    assert service.state(where, "j") == {"id": "j"} | FRESH | {"owner": "a", "until": 130.0, "fence": 1}


def test_an_instant_that_is_none_is_a_value_error(where: Any) -> None:
    leased(where)
    for now in (math.nan, math.inf, -math.inf):
        for verb in (
            lambda now=now: service.claim(where, "j", "b", now, 30),
            lambda now=now: service.renew(where, "j", "a", 1, now, 30),
            lambda now=now: service.complete(where, "j", "a", 1, now, "x"),
            lambda now=now: service.claim_many(where, "j", ["b"], now, 30),
        ):
            with pytest.raises(ValueError, match="now"):
                verb()
    assert service.state(where, "j") == {"id": "j"} | FRESH | {"owner": "a", "until": 130.0, "fence": 1}


def test_names_and_results_that_a_database_cannot_hold_are_refused(where: Any) -> None:
    """FAULTS 56, 57, 66: never cut, never swallowed."""
    leased(where)
    bad: list[Any] = ["", "x" * 256, "a\x00b", "\ud800", 7, None]
    for name in bad:
        for verb in (
            lambda n=name: service.enqueue(where, n),
            lambda n=name: service.state(where, n),
            lambda n=name: service.claim(where, n, "a", 100, 30),
            lambda n=name: service.claim(where, "j", n, 1000, 30),
            lambda n=name: service.claim_many(where, "j", ["ok", n], 1000, 30),
        ):
            with pytest.raises(InvalidValue):
                verb()
    for result in ("a\x00b", "\udfff", 7, {"a": 1}):
        with pytest.raises(InvalidValue, match="result"):
            service.complete(where, "j", "a", 1, 101, result)  # type: ignore[arg-type]
    assert service.state(where, "j") == {"id": "j"} | FRESH | {"owner": "a", "until": 130.0, "fence": 1}
    assert service.enqueue(where, "\U0001f600" * 255) is True


# --- where ----------------------------------------------------------------------------------------


def test_the_first_argument_may_be_a_path_a_url_or_an_engine(where: Any, url: str) -> None:
    engine = create_engine(url)
    forms: list[Any] = [where, url, make_url(url), engine]
    if isinstance(where, str):
        forms.append(Path(where))
    for n, form in enumerate(forms):
        service.init_db(form)
        assert service.enqueue(form, f"j{n}") is True
        assert service.claim(form, f"j{n}", "a", 100, 30) == 1
        assert service.complete(form, f"j{n}", "a", 1, 101, "ok") is True
        assert (service.state(where, f"j{n}") or {})["done"] == 1
    engine.dispose()


def test_a_database_in_memory_would_be_gone_after_each_call() -> None:
    with pytest.raises(InvalidValue, match="path"):
        service.init_db(":memory:")


def test_a_relative_path_is_that_of_the_present_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        service.init_db("lab.db")
        assert service.enqueue("lab.db", "j") is True, f"there is a job in the new database {name}/lab.db"


def test_odd_characters_in_a_path_are_part_of_the_path(tmp_path: Path) -> None:
    for name in ("a b.db", "a?mode=ro.db", "ä#%20.db", ":lab:"):
        path = tmp_path / name
        service.init_db(str(path))
        assert service.enqueue(path, "j") is True
        assert path.exists()


def test_reading_goes_over_another_connection(tmp_path: Path) -> None:
    path = str(tmp_path / "lab.db")
    service.init_db(path)
    leased(path)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE jobs SET fence = 41")
    assert (service.state(path, "j") or {})["fence"] == 41
    assert service.claim(path, "j", "b", 130, 30) == 42
