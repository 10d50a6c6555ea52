"""Relays that are really killed, at every point of the loop: nothing is lost, and each effect is there once.

Default: a few kills a point and database. ``pytest -m soak tests/relay/test_kills.py`` is 200 a database
and prints the figures.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine

from fencedjobs import Store
from tests.outbox.helpers import T, event, states
from tests.relay.children import (
    POINTS,
    SENT_IN_VAIN,
    Death,
    Warehouse,
    dispatching,
    exit_code,
    killed_by_its_event,
    relaying,
    spawned,
)
from tests.relay.helpers import lane_is_free


@dataclass
class Storm:
    """An outbox, a receiver, and relays that die one after the other."""

    store: Store
    url: URL
    receiver: URL
    chance: random.Random
    now: float = T
    names: list[str] = field(default_factory=list)  #: all events, in the order they were added
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POINTS, 0))

    def __post_init__(self) -> None:
        self.warehouse = Warehouse(str(self.receiver))
        self.warehouse.open()

    def add(self, count: int) -> None:
        for _ in range(count):
            name = f"{self.chance.random()}-{len(self.names)}"  # not in the order of their names
            assert self.store.outbox.add(name, {"qty": len(self.names)}, topic="stock") == name
            self.names.append(name)

    def relay(self, death: Death | None, mark_every: int | None = None) -> int | None:
        """One relay, to its end; the lease of the one before is over."""
        self.now += 1000
        if mark_every is None:
            process = spawned(dispatching, rendered(self.url), str(self.receiver), death, self.now)
        else:
            process = spawned(relaying, rendered(self.url), str(self.receiver), death, self.now, mark_every)
        return exit_code(process)

    def kill(self, point: str, mark_every: int | None = None, most: int = 3) -> Death:
        death = Death(point, self.chance.randint(1, most), self.chance.random() < 0.5)
        self.add(death.nth + self.chance.randint(0, 2))
        assert self.relay(death, mark_every) == death.exit_code, f"it did not die {death}"
        self.kills[point] += 1
        return death

    def settle(self) -> None:
        """One more relay that lives, and then: all sent, in order, each effect once, under the same ids."""
        assert self.relay(None) == 0
        lanes = self.store.outbox.stats()
        assert (lanes["default"].pending, lanes["default"].sent) == (0, len(self.names))
        assert lane_is_free(self.store)
        assert self.warehouse.stock() == [(name, n) for n, name in enumerate(self.names)]
        seen = self.warehouse.store.inbox.stats()
        assert (seen.messages, seen.conflicts) == (len(self.names), 0)

    @property
    def duplicates(self) -> int:
        return self.warehouse.store.inbox.stats().duplicates


def rendered(url: URL) -> str:
    return url.render_as_string(hide_password=False)


@pytest.fixture
def storm(engine: Engine, url: URL, tmp_path: Path, request: pytest.FixtureRequest) -> Storm:
    seed = getattr(request, "param", None) or random.randrange(2**32)
    print("seed", seed)
    receiver = URL.create("sqlite", database=str(tmp_path / "warehouse.db"))
    return Storm(Store(engine), url, receiver, random.Random(seed))


def test_relays_that_die_anywhere_lose_nothing_and_apply_nothing_twice(storm: Storm) -> None:
    expected = 0
    for point in POINTS:
        for _ in range(2):
            storm.kill(point)
            expected += point in SENT_IN_VAIN
    storm.settle()
    assert storm.duplicates == expected, "one for each that died between delivery and mark, and no more"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_marks_that_are_gathered_are_sent_again_and_not_lost(storm: Storm) -> None:
    most = sum(storm.kill(point, mark_every=10, most=9).nth for point in ("before send", "after send") * 2)
    storm.settle()
    assert 0 < storm.duplicates <= most


def test_an_event_that_kills_its_relay_is_set_aside_by_the_next(store: Store, url: URL) -> None:
    """Attempts are counted before the send: nobody is left to count them afterwards."""
    for name in ("a", "poison", "b"):
        store.outbox.add(name, name, topic="t")
    codes = [exit_code(spawned(killed_by_its_event, rendered(url), T + 1000 * n, 2)) for n in range(1, 5)]
    assert codes == [-9, -9, 0, 0]
    assert states(store, "a", "poison", "b") == ["sent", "quarantined", "sent"]
    poison = event(store, "poison")
    assert (poison.attempts, poison.reason) == (2, "attempts used up")
    assert poison.last_error == "its relay died while sending it (attempt 2)"


@pytest.mark.soak
def test_a_storm_of_two_hundred_kills(
    storm: Storm, database: object, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = 0
    for n in range(200):
        point = POINTS[n % len(POINTS)]
        storm.kill(point)
        expected += point in SENT_IN_VAIN
    storm.settle()
    assert storm.duplicates == expected
    with capsys.disabled():
        print(
            f"\n{database}: kills {storm.kills}, events {len(storm.names)}, lost 0, effects twice 0, ", end=""
        )
        print(f"duplicates {storm.duplicates}")
