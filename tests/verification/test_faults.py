"""Each planted fault is caught on every database where it can occur, and a sound store is not blamed.

Faults that the machine must find are looked for twice: along the shortest way to each, which is quick,
and (``-m nightly``, and for some always) at random, as if nobody knew the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, event

from fencedjobs import Retry, Store
from fencedjobs.testing import event_stages, faults, stages
from fencedjobs.testing.faults import hunt, planted
from fencedjobs.testing.machines import Effort, Past, Step, job_machine
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.planting import FAULTS
from tests.databases import Database

LATEST, BEFORE = Past(0, None), Past(1, None)


def step(verb: str, /, **arguments: Any) -> Step:
    return Step(verb, arguments)


def claim(ttl: float = 10.0) -> Step:
    return step("claim_by_id", name="a", owner="A", ttl=ttl)


def attempt(
    end: str, *, wait: int | None = None, forged: str | None = None, retry: Retry | None = None
) -> Step:
    way = {"nth": 0, "owner": "A", "ttl": 10.0, "wait": wait, "forged": forged}
    return step("attempt", **way, end=end, retry=retry, result=None)


#: the jobs "a" (with these arguments) and "b", and the steps that lead to the fault
SHORTEST: dict[str, tuple[dict[str, Any], list[Step]]] = {
    "complete_by_id": ({}, [claim(1.0), step("creep", by=1.0), claim(), step(
        "end", past=BEFORE, end="complete", retry=None, result=None
    )]),
    "complete_by_owner": ({}, [attempt("complete", forged="older")]),
    "complete_by_fence": ({}, [attempt("complete", forged="owner")]),
    "complete_many_by_id": ({}, [claim(), step("complete_many", pasts=[Past(0, "older")], results=False)]),
    "complete_late": ({}, [attempt("complete", wait=1)]),
    "release_by_owner": ({}, [attempt("release", forged="older")]),
    "checkpoint_late": ({}, [attempt("checkpoint", wait=1)]),
    "set_aside_by_id": ({}, [attempt("set_aside", forged="older")]),
    "waits_since_the_last_attempt": ({}, [claim(1.0), step("creep", by=3.0), step(
        "claim_next", owner="A", ttl=1.0, queue="default"
    )]),
    "checkpoint_of_another_payload": ({}, [
        claim(), step("end", past=LATEST, end="checkpoint", retry=None, result=1),
        step("operate", verb="quarantine", name="a", payload=None),
        step("operate", verb="requeue", name="a", payload={"qty": 7}),
    ]),
    "renew_revives": ({}, [attempt("renew", wait=1)]),
    "valid_at_the_end": ({}, [attempt("complete", wait=0)]),
    "free_after_the_end": ({}, [claim(1.0), step("creep", by=1.0), claim()]),
    "fence_reset_on_release": ({}, [attempt("release")]),
    "fence_reset_on_quarantine": ({}, [claim(), step("operate", verb="quarantine", name="a", payload=None)]),
    "fence_reset_on_requeue": ({}, [claim(), step("set_aside_and_requeue", name="a", verb="cancel")]),
    "fence_lost_by_purge": ({}, [claim(), step("cancel_and_purge", name="a", ago=-1.0)]),
    "fence_reset_on_revival": ({}, [claim(), step("cancel_and_purge", name="a", ago=-1.0)]),
    "attempts_counted_at_failure": ({}, [claim()]),
    "poison_is_not_capped": ({"max_attempts": 1}, [claim(1.0), step("creep", by=1.0), claim()]),
    "lease_outlives_the_deadline": ({"deadline": 2.5}, [claim()]),
    "promotion_keeps_the_owner": ({}, [claim(1.0), step("creep", by=1.0), step(
        "claim_many", owner="A", ttl=1.0, limit=1, queue="default", kinds=("mail",)
    )]),
    "cancel_keeps_the_lease": ({}, [claim(), step("operate", verb="cancel", name="a", payload=None)]),
    "priority_is_ignored": ({"priority": -1}, [step("claim_next", owner="A", ttl=1.0, queue="default")]),
    "one_too_many": ({}, [step("claim_next", owner="A", ttl=1.0, queue="default")]),
    "latest_due_first": ({"delay": 1.0}, [
        step("enqueue", job={"id": "A", "delay": 2.0}, named=True), step("creep", by=3.0),
        step("claim_next", owner="A", ttl=1.0, queue="default"),
    ]),
    "sweep_kills_the_living": ({"max_attempts": 1}, [claim(), step("sweep", limit=1)]),
    "retry_beyond_its_bound": ({}, [attempt("fail", retry=Retry(jitter=False))]),
    "lock_without_a_fence": ({}, [step("lock", name="cron", owner="A", ttl=1.0)]),
    "enqueue_overwrites": ({}, [claim(), step("enqueue", job={"id": "a"}, named=True)]),
}  # fmt: skip
ALWAYS_AT_RANDOM = ("complete_by_id", "poison_is_not_capped", "cancel_keeps_the_lease")

BY_MACHINE = [name for name, fault in FAULTS.items() if fault.stage == "machine"]
BY_OUTBOX_MACHINE = [name for name, fault in FAULTS.items() if fault.stage == "outbox"]
OTHERS = [name for name in FAULTS if name not in (*BY_MACHINE, *BY_OUTBOX_MACHINE)]

#: what the outbox's machine needs more than a second or two for
LONGER = ("goes_on_after_a_rival", "old_ack_for_the_mended", "event_outlives_the_rollback", "seq_watermark")


@pytest.fixture
def quick(database: Database) -> Iterator[Store]:
    """A store that does not wait for the disk, where a connection may choose: these are many commits."""
    unhurried = {
        "sqlite": "PRAGMA synchronous = OFF",
        "postgresql": "SET synchronous_commit = off",
    }.get(database.backend)
    engine = create_engine(database.url)
    if unhurried:

        @event.listens_for(engine, "connect")
        def hurry(connection: Any, record: object) -> None:
            connection.cursor().execute(unhurried)
            connection.commit()

    yield Store(engine)
    engine.dispose()


def walk(store: Store, name: str) -> None:
    """The shortest way to this fault, on the store and on the oracle."""
    job, steps = SHORTEST[name]
    machine = job_machine(store)()
    try:
        machine.start(now=1000.0, joined=False, jobs=[{"id": "a", **job}, {"id": "b"}])
        for one in steps:
            machine.step(one)
    finally:
        stages.emptied(store)


@pytest.mark.parametrize("name", BY_MACHINE)
def test_the_shortest_way_to_a_fault_shows_it(name: str, quick: Store) -> None:
    walk(quick, name)
    with planted(name), pytest.raises(Disagreement):
        walk(quick, name)
    walk(quick, name)


def found(name: str, store: Store) -> None:
    fault = FAULTS[name]
    caught = hunt(name, store)
    if fault.occurs_on(store):
        assert caught is not None, f"{fault.told}: not noticed by {fault.stage}"
    else:
        assert caught is None, f"{name} was said not to occur here, but: {caught.seen}"


@pytest.mark.parametrize("name", OTHERS)
def test_its_stage_shows_the_fault(name: str, quick: Store) -> None:
    found(name, quick)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", [name for name in BY_OUTBOX_MACHINE if name not in LONGER])
def test_the_outboxes_machine_finds_the_fault(name: str, quick: Store) -> None:
    found(name, quick)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BY_OUTBOX_MACHINE)
def test_the_outboxes_machine_finds_each_fault_on_each_database(name: str, quick: Store) -> None:
    found(name, quick)


#: what shows that the token is missing, beside the handlers that show it everywhere
SHOWS_NO_TOKEN = {
    "sqlite": {"_swallows_an_error", "_ended_by_a_conflict"},
    "postgresql": set(),  # it refuses everything after an error by itself
    "mariadb": {"_swallows_an_error", "_ended_by_a_deadlock"},
}


def test_each_broken_transaction_shows_that_the_token_is_missing(quick: Store, database: Database) -> None:
    stages.set_scene(quick)
    shown = set()
    with planted("no_token"):
        for handler in stages.handlers(quick):
            try:
                stages.play(quick, handler)
            except Disagreement:
                shown.add(handler.__name__)
    everywhere = {"_rolls_back", "_rolls_back_by_hand", "_commits_and_breaks"}
    assert shown == everywhere | SHOWS_NO_TOKEN[database.backend]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", ALWAYS_AT_RANDOM)
def test_the_machine_finds_the_fault_by_itself(name: str, quick: Store) -> None:
    found(name, quick)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BY_MACHINE)
def test_the_machine_finds_each_fault_by_itself(name: str, quick: Store) -> None:
    found(name, quick)


@pytest.mark.parametrize("stage", faults.OTHERS, ids=lambda stage: stage.__name__)
def test_a_sound_store_passes(stage: Any, quick: Store) -> None:
    effort = Effort()
    with_rounds = stage in (stages.races, event_stages.inbox_races)
    stage(quick, effort, **({"rounds": 5} if with_rounds else {}))
    assert effort.examples > 2


def test_every_fault_names_a_stage_that_a_sound_store_must_pass() -> None:
    assert {fault.look for fault in FAULTS.values()} <= {*faults.RANDOM, *faults.OTHERS}
    assert len(FAULTS) >= 60


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_leaves_when_its_block_ends(name: str) -> None:
    def parts() -> list[object]:
        return [vars(owner)[attribute] for owner, attribute, _ in FAULTS[name].patches()]

    sound = parts()
    with planted(name):
        planted_ones = [vars(owner)[attribute] for owner, attribute, _ in FAULTS[name].patches()]
        assert all(one is not other for one, other in zip(planted_ones, sound, strict=True))
    assert all(one is other for one, other in zip(parts(), sound, strict=True))


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_command_prints_a_line_for_each_fault(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    url = database.url.render_as_string(hide_password=False)
    assert faults.main(["--url", url, "--examples", "2", "--only", "no_token", "swallowed_errors"]) == 0
    assert capsys.readouterr().out.count("transactions | ") == 2
    Store(database.engine()).locks.claim("somebody's", ttl=1)
    with pytest.raises(SystemExit):
        faults.main(["--url", url])
