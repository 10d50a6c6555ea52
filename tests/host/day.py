"""What a store does in a day, and what it must answer whatever the host's engine is."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy.orm import Session

from fencedjobs import LeaseLost
from tests.hosts import Host, Order, told, within
from tests.transactions.handlers import a_duplicate_in_a_savepoint, add

EXPECTED: dict[str, Any] = {
    "enqueue": ["a", "b", None],
    "enqueue_many": ["c"],
    "claims": [("a", 1), ("b", 1), None, ("c", 1)],
    "renewed": True,
    "done with": ["a", "b"],
    "lost": "LeaseLost",
    "rolled back": ("TransactionLost", ["a", "b"]),
    "begun": ["a", "b", "d"],
    "failed": "quarantined",
    "states": {"a": "done", "b": "quarantined", "c": "ready", "d": "ready"},
    "lock": [1, None, 2],
    "counts": {"default": {"done": 1, "quarantined": 1, "ready": 2}},
}


def day(host: Host) -> dict[str, Any]:
    """Every kind of transaction once; what came of it."""
    store, seen = host.store, dict[str, Any]()
    seen["enqueue"] = [store.enqueue(id) for id in ("a", "b", "a")]
    seen["enqueue_many"] = store.enqueue_many([{"id": "a"}, {"id": "c"}])
    a, b = (store.claim("w", ttl=600) for _ in range(2))
    assert a is not None
    assert b is not None
    other = store.claim("other", ttl=600, id="a")
    c = store.claim("w", ttl=600)
    seen["claims"] = [(lease.id, lease.fence) if lease else None for lease in (a, b, other, c)]
    seen["renewed"] = store.renew(a, ttl=900).until > a.until
    host.completing(a, a_duplicate_in_a_savepoint)
    seen["done with"] = host.notes()
    lost = told(host.completing, a, lambda session: add(session, "twice"))
    seen["lost"] = type(lost).__name__ if isinstance(lost, LeaseLost) and lost.completed else repr(lost)
    seen["rolled back"] = (type(told(host.completing, b, rolls_back)).__name__, host.notes())
    with store.begin() as uow:
        within(uow, add_d)
        uow.jobs.enqueue("d")
    seen["begun"] = host.notes()
    seen["failed"] = str(store.fail(b, "why", retry=None))
    assert c is not None
    store.release(c)
    seen["states"] = {id: str(record.state) for id in "abcd" if (record := store.get(id))}
    lock = store.locks.claim("l", "w", ttl=600)
    locks = [lock, store.locks.claim("l", "x", ttl=600)]
    assert lock is not None
    store.locks.release(lock)
    locks.append(store.locks.claim("l", "x", ttl=600))
    seen["lock"] = [one.fence if one else None for one in locks]
    seen["counts"] = {name: {str(state): n for state, n in of.items()} for name, of in store.counts().items()}
    return seen


def add_d(session: Session) -> None:
    session.add(Order(id=4, note="d"))


def rolls_back(session: Session) -> None:
    add(session, "lost")
    session.rollback()
    session.add(Order(id=5, note="late"))


def rest(host: Host) -> None:
    """The verbs that the day has not called."""
    store = host.store
    lease = host.leased()
    store.checkpoint(lease, {"page": 1})
    assert [one is not None for one in store.renew_many([lease], ttl=60)] == [True]
    assert store.complete_many([lease]) == []
    assert store.inbox.accept("m", {"a": 1}) is True
    assert store.inbox.accept("m", {"a": 1}) is False
    assert store.guards.admit("r", 5) is True
    assert store.guards.admit("r", 4) is False
    assert [event.id for event in store.outbox.pending()] == ["order-1"]
    assert store.purge(before=time.time() + 999) >= 2
    assert store.sweep() == 0
