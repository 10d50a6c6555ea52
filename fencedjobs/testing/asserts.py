"""Assertions for unit tests: what was enqueued, and what is in the outbox."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import select

from fencedjobs.models import Job, OutboxEvent
from fencedjobs.payload import decode
from fencedjobs.store import Store
from fencedjobs.transaction import Transaction

_ANY: Final[Any] = object()
_current: list[Store] = []  # of the fixtures that are in use, the innermost last


def assert_enqueued(
    kind: str,
    *,
    payload: Any = _ANY,
    id: str = _ANY,
    queue: str = _ANY,
    count: int | None = None,
    store: Store | None = None,
) -> None:
    """`AssertionError`, with what there is, unless a job of this kind is there, and is as told.

    In whatever state; exactly ``count`` of them, if given (0: none). ``store`` is the fixture's if
    the test uses ``fencedjobs_store``.
    """
    _assert("job", Job, {"kind": kind, "payload": payload, "id": id, "queue": queue}, count, store)


def assert_sent(
    topic: str,
    *,
    payload: Any = _ANY,
    id: str = _ANY,
    lane: str = _ANY,
    count: int | None = None,
    store: Store | None = None,
) -> None:
    """`AssertionError`, with what there is, unless an event of this topic is in the outbox, and is as told.

    Whether a relay has delivered it already or not: the transaction that added it has sent it.
    """
    _assert("event", OutboxEvent, {"topic": topic, "payload": payload, "id": id, "lane": lane}, count, store)


def _assert(
    what: str, model: type[Any], wanted: dict[str, Any], count: int | None, store: Store | None
) -> None:
    wanted = {name: value for name, value in wanted.items() if value is not _ANY}
    rows = _rows(model, store or _fixtures_store())
    found = sum(all(row[name] == value for name, value in wanted.items()) for row in rows)
    if (found == count) if count is not None else found:
        return
    told = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    there = "\n".join(f"  {row}" for row in rows) or "  nothing"
    number = "no" if not found else str(found)
    expected = "at least one" if count is None else str(count)
    raise AssertionError(f"{number} {what} with {told}, where {expected} was expected; there is:\n{there}")


def _rows(model: type[Any], store: Store) -> list[dict[str, Any]]:
    names = ("kind", "queue") if model is Job else ("topic", "lane")

    def read(tx: Transaction) -> list[dict[str, Any]]:
        c = tx.tables[model.__tablename__].c
        query = select(c.id, *(c[name] for name in names), c.state, c.payload).order_by(c.seq)
        return [{**row._mapping, "payload": decode(row.payload)} for row in tx.execute(query)]

    return store.run(read, reading=True)


def _fixtures_store() -> Store:
    assert _current, "use the fixture fencedjobs_store, or give store="
    return _current[-1]
