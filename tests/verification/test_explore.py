"""Every way that two workers and two jobs can go, in the oracle, and in oracles with one mistake."""

from __future__ import annotations

import pytest

from fencedjobs.testing import explore
from fencedjobs.testing.explore import BROKEN


def test_the_oracle_keeps_its_promises_on_every_way_of_four_steps() -> None:
    seen = explore.explore(depth=4)
    assert seen.broken is None
    assert seen.states > 400


@pytest.mark.nightly
def test_the_oracle_keeps_its_promises_on_every_way_of_twelve_steps() -> None:
    seen = explore.explore(depth=12)
    assert seen.broken is None, seen
    assert seen.closed or seen.depth == 12


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_in_the_oracle_shows_within_five_steps(name: str) -> None:
    seen = explore.explore(BROKEN[name], depth=5)
    assert seen.broken is not None
    assert len(seen.story) == seen.depth


def test_the_command_prints_what_it_has_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.main(["--depth", "1"]) == 1  # not all mistakes show so early
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("the oracle: 7 states (there are more), ")
    assert len(lines) == 1 + len(BROKEN)
