"""What an operator does with events: looks, sets aside, mends and lets back in, counts, purges."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from fencedjobs import InvalidValue, OutboxConflict, Store
from fencedjobs.values import EventState, LaneStats, Requeue
from tests.outbox.helpers import OUTBOX, T, add, event, ids, states


def mark_sent(engine: Engine, *names: str, at: float = T) -> None:
    with engine.begin() as connection:
        connection.execute(OUTBOX.update().where(OUTBOX.c.id.in_(names)).values(state="sent", sent_at=at))


# --- quarantine -----------------------------------------------------------------------------------


def test_a_quarantined_event_is_out_of_the_way_and_says_why(store: Store) -> None:
    add(store, "a", "b")
    assert store.outbox.quarantine("a", "the receiver chokes on it")
    assert ids(store.outbox.pending()) == ["b"]
    assert (event(store, "a").state, event(store, "a").reason) == (
        EventState.QUARANTINED,
        "the receiver chokes on it",
    )


def test_only_a_pending_event_is_quarantined(sync_store: Store, engine: Engine) -> None:
    add(sync_store, "sent", "aside")
    mark_sent(engine, "sent")
    sync_store.outbox.quarantine("aside", "first")
    assert [sync_store.outbox.quarantine(id, "again") for id in ("sent", "aside", "nobody")] == [False] * 3
    assert states(sync_store, "sent", "aside") == ["sent", "quarantined"]
    assert event(sync_store, "aside").reason == "first"


def test_a_reason_is_made_storable_and_must_be_given(sync_store: Store) -> None:
    add(sync_store, "e")
    for bad in ("", None, 7):
        with pytest.raises(InvalidValue, match="reason"):
            sync_store.outbox.quarantine("e", bad)  # type: ignore[arg-type]
    assert sync_store.outbox.quarantine("e", "a\x00b\ud800" + "x" * 5000)
    reason = event(sync_store, "e").reason
    assert reason is not None
    assert reason.startswith("a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}x")
    assert len(reason) == 2000


# --- requeue --------------------------------------------------------------------------------------


def test_a_requeued_event_comes_back_at_its_old_place(store: Store) -> None:
    add(store, "a", "b", "c", "d")
    add(store, "elsewhere", lane="other")
    assert store.outbox.requeue("c", by="ann", reason="r") is None, "it is not quarantined"
    for id in ("b", "c"):
        store.outbox.quarantine(id, "why")
    assert store.outbox.requeue("c", by="ann", reason="mended") == 1, "a is ahead of it"
    assert store.outbox.requeue("b", by="ann", reason="mended") == 1
    assert ids(store.outbox.pending()) == ["a", "b", "c", "d"]
    assert store.outbox.requeue("nobody", by="ann", reason="r") is None


def test_who_when_and_why_is_kept(store: Store) -> None:
    store.outbox.add("e", {"qty": -7}, topic="t")
    for n in range(12):
        store.outbox.quarantine("e", f"why {n}")
        mended: dict[str, Any] = {"payload": {"qty": n}} if n % 2 else {}
        assert store.outbox.requeue("e", by=f"by {n}", reason=f"since {n}", now=T + n, **mended) == 0
    kept = event(store, "e").requeues
    assert kept == tuple(
        Requeue(T + n, f"by {n}", f"since {n}", "quarantined", bool(n % 2)) for n in range(2, 12)
    )
    assert event(store, "e").payload == {"qty": 11}


def test_a_requeued_event_starts_afresh_under_its_id(sync_store: Store, engine: Engine) -> None:
    sync_store.outbox.add("e", 1, topic="t", headers={"h": "v"}, now=T)
    with engine.begin() as connection:
        connection.execute(OUTBOX.update().values(attempts=9, last_error="no"))
    sync_store.outbox.quarantine("e", "why")
    before = event(sync_store, "e")
    sync_store.outbox.requeue("e", by="ann", reason="r")
    after = event(sync_store, "e")
    assert (after.attempts, after.reason, after.last_error) == (0, None, None)
    for name in ("id", "seq", "lane", "topic", "payload", "headers", "created_at"):
        assert getattr(after, name) == getattr(before, name)
    (pending,) = sync_store.outbox.pending()
    assert pending.attempt == 1


def test_a_mended_payload_is_the_events_own_from_then_on(sync_store: Store) -> None:
    sync_store.outbox.add("e", {"qty": -7}, topic="t")
    sync_store.outbox.quarantine("e", "why")
    sync_store.outbox.requeue("e", payload=None, by="ann", reason="it was nothing")
    assert event(sync_store, "e").payload is None
    assert sync_store.outbox.add("e", None, topic="t") is None
    with pytest.raises(OutboxConflict):
        sync_store.outbox.add("e", {"qty": -7}, topic="t")


def test_a_requeue_that_is_refused_changes_nothing(sync_store: Store) -> None:
    add(sync_store, "e")
    sync_store.outbox.quarantine("e", "why")
    before = event(sync_store, "e")
    good: dict[str, Any] = {"by": "ann", "reason": "r"}
    bad: list[dict[str, Any]] = [
        {"by": ""}, {"by": "x" * 256}, {"by": None}, {"reason": ""}, {"reason": None},
        {"payload": float("nan")}, {"payload": object()}, {"now": float("inf")},
    ]  # fmt: skip
    for wrong in bad:
        with pytest.raises(InvalidValue):
            sync_store.outbox.requeue("e", **{**good, **wrong})
    assert event(sync_store, "e") == before


# --- get, stats, purge ----------------------------------------------------------------------------


def test_an_event_that_is_not_there_is_none(sync_store: Store) -> None:
    assert sync_store.outbox.get("nobody") is None


def test_stats_tell_of_each_lane(store: Store, engine: Engine) -> None:
    assert store.outbox.stats() == {}
    add(store, "a", "b", now=T)
    add(store, "c", now=T + 5)
    add(store, "x", lane="other", now=T + 10)
    add(store, "y", lane="third", now=T)
    store.outbox.quarantine("y", "why")
    mark_sent(engine, "a")
    with engine.begin() as connection:
        connection.execute(OUTBOX.update().where(OUTBOX.c.id == "c").values(attempts=3))
    assert store.outbox.stats(now=T + 20) == {
        "default": LaneStats(pending=2, oldest=20, attempts=3, sent=1, quarantined=0),
        "other": LaneStats(pending=1, oldest=10, attempts=0, sent=0, quarantined=0),
        "third": LaneStats(pending=0, oldest=None, attempts=0, sent=0, quarantined=1),
    }
    assert store.outbox.stats(now=T - 5)["other"].oldest == 0, "a clock that jumped back"


def test_ages_are_by_the_databases_clock(sync_store: Store) -> None:
    add(sync_store, "e")
    oldest = sync_store.outbox.stats()["default"].oldest
    assert oldest is not None
    assert 0 <= oldest < 60


def test_purge_forgets_old_sent_events_and_nothing_else(store: Store, engine: Engine) -> None:
    add(store, "old", "older", "new", "pending", "aside")
    store.outbox.quarantine("aside", "why")
    mark_sent(engine, "older", at=T - 2)
    mark_sent(engine, "old", at=T - 1)
    mark_sent(engine, "new", at=T)
    assert store.outbox.purge(before=T, limit=1) == 1
    assert store.outbox.purge(before=T) == 1
    assert store.outbox.purge(before=T) == 0
    assert states(store, "new", "pending", "aside") == ["sent", "pending", "quarantined"]
    assert store.outbox.get("old") is store.outbox.get("older") is None


def test_the_number_of_a_purged_event_is_not_given_again(sync_store: Store, engine: Engine) -> None:
    add(sync_store, "e")
    seq = event(sync_store, "e").seq
    mark_sent(engine, "e")
    assert sync_store.outbox.purge(before=T + 1) == 1
    add(sync_store, "e")
    assert event(sync_store, "e").seq > seq


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("before", {"before": float("nan")}),
        ("before", {"before": None}),
        ("limit", {"before": T, "limit": 0}),
    ],
)
def test_a_purge_of_nonsense_is_refused(sync_store: Store, field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=field):
        sync_store.outbox.purge(**arguments)
