"""``verify``: all stages in a place of their own, a verdict with its seed, and a story when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, inspect

from fencedjobs import Store
from fencedjobs.testing import verify
from fencedjobs.testing.faults import planted
from fencedjobs.testing.planting import FAULTS
from tests.cli.helpers import EACH_DATABASE, Answer, run

TINY = verify.Profile(examples=3, steps=10, rounds=1, hunt=200)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile that takes a second, and one fault of each stage."""
    monkeypatch.setitem(verify.PROFILES, "quick", TINY)
    chosen = {name: FAULTS[name] for name in ("complete_by_id", "claim_by_select_then_update", "no_token")}
    monkeypatch.setattr(verify, "FAULTS", chosen)


@pytest.fixture
def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickest: for what has nothing to do with the stages."""
    monkeypatch.setattr(verify, "STAGES", [stage for stage in verify.STAGES if stage.name == "guards"])


def names(engine: Engine) -> set[str]:
    """The tables, and the schemas that a check may have made."""
    places = {name for name in inspect(engine).get_schema_names() if name.startswith("fj_verify")}
    return {*places, *inspect(engine).get_table_names()}


@pytest.mark.kit
@EACH_DATABASE
def test_every_stage_is_run_and_nothing_is_left_behind(engine: Engine, url: URL, tmp_path: Path) -> None:
    Store(engine).enqueue("somebody's")
    before = names(engine)
    report = tmp_path / "report.html"
    done = run("verify", "--seed", "7", "--faults", "--report", report, url=url)
    assert done.code == 0, done.out
    for word in (*(stage.name for stage in verify.STAGES), "fault: complete_by_id", "seed 7", "isolation"):
        assert word in done.out
    facts = json.loads((tmp_path / "report.json").read_text())
    assert (facts["passed"], facts["seed"], facts["profile"]) == (True, 7, "quick")
    assert [result["passed"] for result in facts["results"]] == [True] * (len(verify.STAGES) + 3)
    assert '<span class="passed">passed</span>' in report.read_text()
    assert names(engine) == before
    assert Store(engine).get("somebody's") is not None


def test_what_each_verb_has_met_is_printed_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair is met by any profile: the first example of the machines calls them one by one."""
    monkeypatch.setattr(verify, "STAGES", [s for s in verify.STAGES if s.name in ("jobs", "leases")])
    quiet, told = (run("verify", "--seed", "7", *more, url="sqlite://") for more in ((), ("--verbose",)))
    heading = "jobs: how often each verb met which lease"
    assert (heading in told.out, heading in quiet.out) == (True, False), told.out
    facts = run("verify", "--seed", "7", "--json", url="sqlite://").json()
    for stage in ("jobs", "leases"):
        pairs = next(result["pairs"] for result in facts["results"] if result["stage"] == stage)
        assert all(count > 0 for met in pairs.values() for count in met.values()), pairs


def failing() -> Answer:
    with planted("attempts_counted_at_failure"):
        return run("verify", "--seed", "1", "--json", url="sqlite://")


def test_a_store_that_breaks_the_contract_is_told_by_a_short_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "STAGES", verify.STAGES[:1])  # shrinking is what takes its time
    monkeypatch.setitem(verify.PROFILES, "quick", verify.Profile(examples=20, steps=4, rounds=1, hunt=1))
    done = failing()
    facts = done.json()
    jobs = next(result for result in facts["results"] if result["stage"] == "jobs")
    steps = [line for line in jobs["story"].splitlines() if line.startswith("state.")]
    assert (done.code, facts["passed"], jobs["passed"]) == (1, False, False)
    assert "Disagreement" in jobs["story"]
    assert 1 <= len(steps) <= 10, jobs["story"]


@pytest.mark.usefixtures("one_stage")
def test_a_fault_that_is_not_caught_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = verify.Profile(examples=1, steps=1, rounds=1, hunt=1, known=False)
    monkeypatch.setitem(verify.PROFILES, "quick", chance)
    done = run("verify", "--seed", "1", "--faults", url="sqlite://")
    assert done.code == 1
    assert "NOT caught by machine" in done.out


def test_a_file_that_is_named_is_not_made(tmp_path: Path) -> None:
    assert run("verify", url=f"sqlite:///{tmp_path / 'mine.db'}").code == 0
    assert not (tmp_path / "mine.db").exists()


@pytest.mark.usefixtures("one_stage")
def test_a_report_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    done = run("verify", "--report", tmp_path / "no" / "report.html", url="sqlite://")
    assert done.code == 3
    assert "cannot be written" in done.err


def test_a_database_that_is_not_there_is_said() -> None:
    done = run("verify", url="postgresql+psycopg://nobody@127.0.0.1:1/none")
    assert done.code == 3
    assert "cannot connect" in done.err
