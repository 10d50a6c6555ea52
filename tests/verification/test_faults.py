"""Each planted fault is caught on every database where it can occur, and a sound store is not blamed.

Faults that the machine must find are looked for twice: along the shortest way to each, which is quick,
and (``-m nightly``, and for some always) at random, as if nobody knew the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, event

from fencedjobs import Store
from fencedjobs.testing import event_stages, faults, stages
from fencedjobs.testing.faults import hunt, planted
from fencedjobs.testing.machines import Effort
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.planting import FAULTS
from fencedjobs.testing.ways import SHORTEST
from tests.databases import Database

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
    try:
        stages.walk(store, Effort(), SHORTEST[name])
    finally:
        stages.emptied(store)


@pytest.mark.parametrize("name", BY_MACHINE)
def test_the_shortest_way_to_a_fault_shows_it(name: str, quick: Store) -> None:
    walk(quick, name)
    with planted(name), pytest.raises(Disagreement):
        walk(quick, name)
    walk(quick, name)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_hunt_on_a_known_way_takes_a_few_steps(quick: Store) -> None:
    for name in BY_MACHINE:
        caught = hunt(name, quick, **faults.options(FAULTS[name], examples=0, start=1))
        assert caught is not None, name
        assert caught.effort.steps <= 5, name


def found(name: str, store: Store) -> None:
    """At random, where there is chance in it."""
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


@pytest.mark.kit
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
