"""Words that the tests of jobs share."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fencedjobs import InvalidValue, JobLease, LeaseLost, Store

#: an instant like those that hosts have, with a fraction
T = 1_764_000_000.25


def on(*backends: str) -> pytest.MarkDecorator:
    """This test is about these databases alone."""
    return pytest.mark.parametrize("database", backends, indirect=True)


def just_before(instant: float) -> float:
    return math.nextafter(instant, -math.inf)


def just_after(instant: float) -> float:
    return math.nextafter(instant, math.inf)


def row(store: Store, id: str, *names: str) -> dict[str, Any]:
    """These attributes of the job as they are now, to be compared with what they should be."""
    record = store.get(id)
    assert record is not None, f"there is no job {id!r}"
    return {name: getattr(record, name) for name in names}


def claimed(store: Store, id: str, owner: str = "a", *, ttl: float = 30, now: float = T) -> JobLease:
    """The lease of this job, which must be claimable."""
    lease = store.claim(owner, ttl=ttl, id=id, now=now)
    assert lease is not None, f"{id!r} cannot be claimed at {now}: {store.get(id)}"
    return lease


def ids(leases: list[JobLease]) -> list[str]:
    return [lease.id for lease in leases]


def lost(verb: Any, *args: Any, **kwargs: Any) -> LeaseLost | None:
    """The `LeaseLost` that this call raises; none if it raises none."""
    try:
        verb(*args, **kwargs)
    except LeaseLost as error:
        return error
    return None


def refused(field: str, verb: Any, *args: Any, **kwargs: Any) -> None:
    """This call must raise `InvalidValue` about this field."""
    try:
        answer = verb(*args, **kwargs)
    except InvalidValue as error:
        named = error.field
        assert named.startswith(field), f"{args} {kwargs}: refused for {named!r}, expected {field!r}"
    else:
        raise AssertionError(f"{args} {kwargs}: should be refused for {field!r}, but gave {answer!r}")
