"""What is next on a lane: in the order of insertion, 1 to 16 at a time, and without a trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sqlalchemy import Engine

from fencedjobs import InvalidValue, Store
from tests.outbox.helpers import OUTBOX, SERVERS, T, add, ids, rows


def test_the_order_is_that_of_insertion_and_of_nothing_else(store: Store) -> None:
    names = [f"{random.random()}" for _ in range(20)]
    for n, name in enumerate(names):
        add(store, name, now=T - n)
    pending = store.outbox.pending(16)
    assert ids(pending) == names[:16]
    assert [e.seq for e in pending] == sorted(e.seq for e in pending)
    assert [e.created for e in pending] == [T - n for n in range(16)]


def test_reading_changes_nothing(store: Store, engine: Engine) -> None:
    add(store, "a", "b", now=T)
    before = rows(engine, OUTBOX)
    assert store.outbox.pending() == store.outbox.pending()
    with store.begin() as uow:
        assert ids(uow.outbox.pending(1)) == ["a"]
    assert rows(engine, OUTBOX) == before


@pytest.mark.parametrize("limit", [0, -1, 17, 1.0, True, None, "1", 2**70])
def test_a_limit_that_is_not_from_1_to_16_is_refused(sync_store: Store, limit: Any) -> None:
    with pytest.raises(ValueError, match="limit"):
        sync_store.outbox.pending(limit)


def test_the_limit_is_kept(sync_store: Store) -> None:
    add(sync_store, *map(str, range(17)))
    assert [len(sync_store.outbox.pending(limit)) for limit in range(1, 17)] == [*range(1, 17)]
    assert len(sync_store.outbox.pending()) == 16


def test_lanes_are_streams_of_their_own(sync_store: Store) -> None:
    add(sync_store, "a1", lane="a")
    add(sync_store, "b1", lane="b")
    add(sync_store, "a2", lane="a")
    assert ids(sync_store.outbox.pending(lane="a")) == ["a1", "a2"]
    assert ids(sync_store.outbox.pending(lane="b")) == ["b1"]
    assert sync_store.outbox.pending() == []
    with pytest.raises(InvalidValue, match="lane"):
        sync_store.outbox.pending(lane="")


def test_only_pending_events_are_pending(sync_store: Store, engine: Engine) -> None:
    add(sync_store, "sent", "quarantined", "pending")
    with engine.begin() as connection:
        connection.execute(OUTBOX.update().values(state=OUTBOX.c.id))
    assert ids(sync_store.outbox.pending()) == ["pending"]


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_what_is_not_committed_is_not_pending(sync_store: Store) -> None:
    """A row of a lower number that commits later is found all the same."""
    with sync_store.begin() as early:
        early.outbox.add("early", None, topic="t")
        with sync_store.begin() as late:
            late.outbox.add("late", None, topic="t")
        assert ids(sync_store.outbox.pending()) == ["late"]
    assert ids(sync_store.outbox.pending()) == ["early", "late"]
