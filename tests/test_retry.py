"""The back-off: pure, finite, capped, and never in the way of the job."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from fencedjobs import InvalidValue, Retry


def test_the_bound_doubles_up_to_the_cap() -> None:
    retry = Retry(base=1, factor=2, cap=10)
    assert [retry.bound(n) for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]


@pytest.mark.parametrize(
    "retry",
    [
        Retry(), Retry(base=2), Retry(base=2, factor=3.5, cap=1e9), Retry(base=1e-300, factor=1.0001),
        Retry(base=1, factor=10, cap=1e308), Retry(base=0), Retry(cap=0), Retry(base=1e308, cap=5),
        Retry(base=1, factor=1), Retry(base=1, factor=1e300, cap=1e308),
    ],
    ids=str,
)  # fmt: skip
def test_the_bound_is_finite_capped_and_monotone_for_ten_thousand_attempts(retry: Retry) -> None:
    """FAULTS 67."""
    bounds = [retry.bound(n) for n in range(1, 10_001)]
    assert all(math.isfinite(bound) and 0 <= bound <= retry.cap for bound in bounds)
    assert all(before <= after for before, after in pairwise(bounds))
    assert retry.bound(10**9) <= retry.cap


def test_no_base_is_no_wait_however_many_attempts() -> None:
    waits = {Retry(base=0).delay(n) for n in (1, 2, 1000, 1025, 5000, 10**6)}
    assert waits == {0.0}


def test_jitter_is_drawn_from_nothing_up_to_the_bound() -> None:
    retry = Retry(base=8, factor=1)
    assert [retry.delay(1, chance=lambda value=value: value) for value in (0.0, 0.25, 0.5)] == [0, 2, 4]  # type: ignore[misc]
    drawn = [retry.delay(1) for _ in range(500)]
    assert all(0 <= wait < 8 for wait in drawn)
    assert min(drawn) < 1 < 7 < max(drawn)


def test_without_jitter_the_wait_is_the_bound() -> None:
    assert [Retry(base=3, jitter=False).delay(n) for n in (1, 2, 3)] == [3, 6, 12]


def test_a_function_of_the_user_takes_the_bound_s_place() -> None:
    retry = Retry(backoff=lambda attempt: attempt * 5.0, cap=12, jitter=False)
    assert [retry.delay(n) for n in (1, 2, 3)] == [5, 10, 12]


def test_a_mistake_in_the_user_s_function_cannot_lose_a_job() -> None:
    default = Retry(jitter=False)

    def raising(attempt: int) -> float:
        raise RuntimeError("mistake")

    wrong: list[Any] = [
        raising, lambda n: -1, lambda n: math.inf, lambda n: math.nan, lambda n: None, lambda n: "soon",
        lambda n: -math.inf, lambda n: 10**400,
    ]  # fmt: skip
    for backoff in wrong:
        retry = Retry(backoff=backoff, jitter=False)
        assert [retry.delay(n) for n in (1, 2, 3)] == [default.delay(n) for n in (1, 2, 3)]


def test_attempts_below_the_first_count_as_the_first() -> None:
    assert [Retry(jitter=False).delay(n) for n in (-5, 0, 1)] == [1, 1, 1]


def test_a_policy_that_cannot_be_one_is_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"base": -1}, {"base": math.nan}, {"base": math.inf}, {"factor": 0.5}, {"factor": math.inf},
        {"cap": -1}, {"cap": math.inf}, {"cap": math.nan}, {"base": "1"}, {"factor": None},
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(InvalidValue, match=next(iter(arguments))):
            Retry(**arguments)


def test_a_policy_is_a_value() -> None:
    assert Retry() == Retry(1.0, 2.0, 3600.0, True, None)
    assert Retry() in {Retry()}
    with pytest.raises(AttributeError):
        Retry().cap = 5  # type: ignore[misc]
