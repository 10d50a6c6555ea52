"""Enqueue: idempotent by id, checked before anything is written, and never in a running lease's way."""

from __future__ import annotations

import math
import uuid
from typing import Any

import pytest

from fencedjobs import InvalidValue, JobState, Store
from tests.jobs.helpers import T, claimed, ids, refused, row


def test_a_new_job_waits_as_it_was_given(store: Store) -> None:
    given = {
        "kind": "pack", "queue": "shop", "key": "customer-3", "priority": -7,
        "deadline": T + 500, "max_attempts": 5, "payload": {"qty": 7, "tags": ["a", None, True, 1.5]},
    }  # fmt: skip
    assert store.enqueue("order-7", now=T, **given) == "order-7"  # type: ignore[arg-type]
    expected = given | {
        "id": "order-7", "state": JobState.READY, "owner": None, "until": 0.0, "fence": 0, "attempts": 0,
        "created_at": T, "finished_at": None, "result": None, "reason": None, "last_owner": None,
        "errors": (), "requeues": (), "progress": None,
    }  # fmt: skip
    assert row(store, "order-7", *expected) == expected


def test_the_defaults_are_those_of_the_contract(store: Store) -> None:
    store.enqueue("j", now=T)
    expected = {
        "queue": "default", "kind": "", "key": None, "priority": 0, "deadline": None, "max_attempts": 20,
        "payload": None, "state": JobState.READY,
    }  # fmt: skip
    assert row(store, "j", *expected) == expected


def test_an_id_that_exists_is_none_and_changes_nothing(store: Store) -> None:
    store.enqueue("j", {"v": 1}, now=T)
    before = store.get("j")
    again = store.enqueue("j", {"v": 2}, queue="other", priority=9, run_at=T + 9, max_attempts=1, now=T + 1)
    assert again is None
    assert store.get("j") == before


def test_enqueue_leaves_a_job_in_every_state_alone(store: Store) -> None:
    for id in ("leased", "done", "cancelled", "quarantined", "scheduled"):
        store.enqueue(id, run_at=T + 99 if id == "scheduled" else None, now=T)
    lease = claimed(store, "leased")
    store.complete(claimed(store, "done"), now=T)
    store.cancel("cancelled", now=T)
    store.quarantine("quarantined", "why", now=T)
    before = [store.get(id) for id in ("leased", "done", "cancelled", "quarantined", "scheduled")]
    for record in before:
        assert record is not None
        assert record.id == record.state
        assert store.enqueue(record.id, {"new": 1}, now=T + 1) is None
        assert store.enqueue_many([{"id": record.id, "payload": {"new": 1}}], now=T + 1) == []
        assert store.get(record.id) == record
    store.complete(lease, now=T + 2)


def test_without_an_id_a_uuid7_is_made(store: Store) -> None:
    made = [store.enqueue(now=T) for _ in range(3)] + store.enqueue_many([{}, {}], now=T)
    assert len(set(made)) == 5
    assert [uuid.UUID(id).version for id in made] == [7] * 5
    assert ids(store.claim_many("a", ttl=9, limit=9, now=T)) == made


def test_what_is_refused_is_refused_before_anything_is_written(store: Store) -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        *(("id", {"id": id}) for id in ("", "x" * 256, "a\x00b", "a\ud800", 7, b"x", ["a"])),
        *(("queue", {"queue": queue}) for queue in ("", "x" * 256, "\x00", None)),
        *(("kind", {"kind": kind}) for kind in ("x" * 256, "\x00", None, 1)),
        *(("key", {"key": key}) for key in ("", "x" * 256, "\udfff", 1)),
        *(("priority", {"priority": n}) for n in (1.5, "1", True, 2**31, -(2**31) - 1, None)),
        *(("run_at", {"run_at": at}) for at in (math.nan, math.inf, "soon", True, 10**400)),
        *(("delay", {"delay": delay}) for delay in (math.nan, math.inf, -1, "1", True)),
        *(("deadline", {"deadline": at}) for at in (math.nan, -math.inf, "never", True)),
        *(("max_attempts", {"max_attempts": n}) for n in (0, -1, 1.5, True, None, 2**63)),
        *(("now", {"now": now}) for now in (math.nan, math.inf, "now", True)),
        *(("payload", {"payload": value}) for value in (math.nan, {1: 2}, (1,), {1}, b"x", object(), "\x00")),
        ("delay", {"delay": 1, "run_at": T}),
    ]
    for field, arguments in bad:
        refused(field, store.enqueue, **{"id": "j", "now": T} | arguments)
    for field, arguments in bad:
        if field != "now":
            items = [{"id": "good"}, {"id": "j"} | arguments]
            refused(f"items[1].{field}", store.enqueue_many, items, now=T)
    assert store.counts() == {}


def test_the_limits_themselves_are_accepted(store: Store) -> None:
    longest = "\N{PILE OF POO}" * 255
    given = {
        "queue": longest, "kind": longest, "key": longest, "priority": -(2**31), "max_attempts": 2**63 - 1,
        "run_at": -1.0, "deadline": 1e300,
    }  # fmt: skip
    assert store.enqueue(longest, now=T, **given) == longest  # type: ignore[arg-type]
    lease = store.claim(longest, ttl=1e18, queue=longest, now=T)
    assert lease is not None
    del given["run_at"]
    assert row(store, longest, *given) == given


def test_a_payload_reads_back_equal_from_the_job_and_from_the_lease(store: Store) -> None:
    """FAULTS 62, and whatever else a JSON column would have changed."""
    payloads: list[Any] = [
        {"n": 2**53 + 1}, [2**63, 2**70, -(2**64)], [0.1, 1e308, 5e-324, -0.0, 1.0], "", None, False,
        "\U0001f600 \u2028 \\ \x01\x7f", {"": {"a.b": [[], {}]}, "\u00e9": "e\u0301"}, "x" * 100_000,
        "'; DROP TABLE x; --", "%s %(a)s ?",
    ]  # fmt: skip
    store.enqueue_many([{"id": f"j{n}", "payload": value} for n, value in enumerate(payloads)], now=T)
    leases = store.claim_many("a", ttl=9, limit=99, now=T)
    assert repr([lease.payload for lease in leases]) == repr(payloads)
    assert repr([row(store, lease.id, "payload")["payload"] for lease in leases]) == repr(payloads)


def test_ids_are_told_apart_byte_for_byte(store: Store) -> None:
    """FAULTS 59."""
    names = ["a", "A", "a ", " a", "á", "a\u0301", "ß", "ss", "SS", "\u00e9", "e\u0301", "e", "a\t", "\u212b"]
    for name in names:
        assert store.enqueue(name, name, queue=name, kind=name, key=name, now=T) == name
    assert sorted(store.counts()) == sorted(names)
    for n, name in enumerate(names):
        lease = store.claim(name, ttl=30, queue=name, now=T)
        assert lease is not None, f"nothing in queue {name!r}"
        assert (lease.id, lease.payload, lease.kind, lease.owner) == (name, name, name, name)
        assert store.claim("x", ttl=30, queue=name, now=T) is None
        assert store.complete_many([lease], now=T + n) == []
        assert row(store, name, "last_owner", "key") == {"last_owner": name, "key": name}


def test_kinds_and_owners_are_told_apart_byte_for_byte(store: Store) -> None:
    for name in ("k", "K", "k "):
        store.enqueue(f"id {name}!", kind=name, now=T)
    leases = store.claim_many("w", ttl=30, limit=9, kinds=["k "], now=T)
    assert ids(leases) == ["id k !"]
    (lease,) = leases
    for owner in ("W", "w "):
        stranger = type(lease)(
            **{f: getattr(lease, f) for f in lease.__dataclass_fields__} | {"owner": owner}
        )
        assert store.complete_many([stranger], now=T) == [stranger], f"{owner!r} passed for 'w'"


# --- many -----------------------------------------------------------------------------------------


def test_many_are_created_in_input_order(store: Store) -> None:
    names = [f"{(n * 7919) % 1000:03}" for n in range(150)]
    assert store.enqueue_many([{"id": name} for name in names], now=T) == names
    assert ids(store.claim_many("a", ttl=9, limit=200, now=T)) == names


def test_many_takes_all_the_arguments_of_one(store: Store) -> None:
    item = {
        "id": "j", "payload": [1], "kind": "k", "queue": "q", "key": "c", "priority": 3, "delay": 2,
        "deadline": T + 9, "max_attempts": 4,
    }  # fmt: skip
    assert store.enqueue_many([item, {"id": "plain"}, {"id": "at", "run_at": T + 3}], now=T) == [
        "j",
        "plain",
        "at",
    ]
    expected = {k: v for k, v in item.items() if k != "delay"} | {
        "state": JobState.SCHEDULED, "until": T + 2, "created_at": T
    }  # fmt: skip
    assert row(store, "j", *expected) == expected
    assert row(store, "plain", "state", "until") == {"state": JobState.READY, "until": 0.0}
    assert row(store, "at", "state", "until") == {"state": JobState.SCHEDULED, "until": T + 3}


def test_many_with_existing_repeated_and_purged_ids(store: Store) -> None:
    store.enqueue("existing", 0, now=T)
    store.enqueue("purged", 0, now=T)
    store.complete(claimed(store, "purged"), now=T)
    assert store.purge(before=T + 1) == 1
    lease = claimed(store, "existing")
    before = store.get("existing")
    items: list[dict[str, Any]] = [
        {"id": "new", "payload": 1}, {"id": "existing", "payload": 1}, {"id": "purged", "payload": 1},
        {"id": "new", "payload": 2}, {"payload": 3}, {"id": "purged", "payload": 2}, {"id": "last"},
    ]  # fmt: skip
    created = store.enqueue_many(items, now=T + 1)
    assert [created[0], created[1], created[3]] == ["new", "purged", "last"]
    assert len(created) == 4, created
    assert store.get("existing") == before
    assert row(store, "new", "payload") == {"payload": 1}, "of an id that comes twice the first counts"
    expected = {"payload": 1, "fence": 1, "attempts": 0, "state": JobState.READY}
    assert row(store, "purged", *expected) == expected
    store.complete(lease, now=T + 1)


def test_many_of_none_is_none(store: Store) -> None:
    assert store.enqueue_many([], now=T) == []


def test_many_takes_any_iterable_of_mappings(store: Store) -> None:
    assert store.enqueue_many(({"id": f"j{n}"} for n in range(3)), now=T) == ["j0", "j1", "j2"]


def test_many_refuses_what_is_no_item(store: Store) -> None:
    refused("items[1]", store.enqueue_many, [{"id": "a"}, "b"], now=T)
    refused("items[0].colour", store.enqueue_many, [{"id": "a", "colour": 1}], now=T)
    refused("items[0].now", store.enqueue_many, [{"id": "a", "now": T}], now=T)
    assert store.counts() == {}


def test_more_than_one_statement_holds_is_still_one_transaction(sync_store: Store) -> None:
    items: list[dict[str, Any]] = [{"id": f"j{n}"} for n in range(2500)]
    assert len(sync_store.enqueue_many(items, now=T)) == 2500
    assert sync_store.counts() == {"default": {JobState.READY: 2500}}
    with pytest.raises(InvalidValue):
        sync_store.enqueue_many([{"id": f"k{n}"} for n in range(2500)] + [{"id": ""}], now=T)
    assert sync_store.counts() == {"default": {JobState.READY: 2500}}


# --- revival --------------------------------------------------------------------------------------


def test_a_purged_id_comes_back_with_its_fence_and_nothing_else(store: Store) -> None:
    store.enqueue("j", {"old": 1}, kind="old", queue="old", key="old", priority=5, max_attempts=2, now=T)
    store.fail(claimed(store, "j"), "old error", now=T, retry=None)
    store.requeue("j", by="me", reason="again", now=T)
    store.complete(claimed(store, "j"), {"old": 2}, now=T)
    assert store.purge(before=T + 1) == 1
    assert store.enqueue("j", {"new": 1}, now=T + 5) == "j"
    expected = {
        "payload": {"new": 1}, "kind": "", "queue": "default", "key": None, "priority": 0, "max_attempts": 20,
        "state": JobState.READY, "fence": 2, "attempts": 0, "errors": (), "requeues": (), "result": None,
        "reason": None, "last_owner": None, "created_at": T + 5, "finished_at": None, "until": 0.0,
        "deadline": None, "owner": None,
    }  # fmt: skip
    assert row(store, "j", *expected) == expected
    assert store.enqueue("j", now=T + 6) is None


def test_a_revived_job_takes_a_new_place_in_the_order(store: Store) -> None:
    store.enqueue("old", now=T)
    store.complete(claimed(store, "old"), now=T)
    store.enqueue("young", now=T)
    store.purge(before=T + 1)
    store.enqueue("old", now=T + 1)
    store.enqueue("younger", now=T + 1)
    assert ids(store.claim_many("a", ttl=9, limit=9, now=T + 1)) == ["young", "old", "younger"]


def test_a_revived_job_may_wait(store: Store) -> None:
    store.enqueue("j", now=T)
    store.cancel("j", now=T)
    store.purge(before=T + 1)
    assert store.enqueue("j", delay=10, deadline=T + 100, now=T + 1) == "j"
    assert row(store, "j", "state", "until", "deadline") == {
        "state": JobState.SCHEDULED,
        "until": T + 11,
        "deadline": T + 100,
    }
