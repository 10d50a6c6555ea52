"""The inbox: a message is accepted once, in the transaction of its effect, and told from its likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy import event as listen
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from fencedjobs import AsyncUnitOfWork, InboxConflict, InvalidValue, Store, UnitOfWork
from fencedjobs.values import InboxStats
from tests.outbox.helpers import INBOX, ORDERS, SERVERS, T, host_table, order, rows

KEYS = ["A", "a", "a ", "á", "ß", "ss", "\u00e9", "e\u0301"]


@pytest.fixture
def host(engine: Engine) -> Iterator[Engine]:
    with host_table(engine):
        yield engine


def orders(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return sorted(connection.scalars(select(ORDERS.c.id)))


def column(engine: Engine, name: str) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.scalars(select(INBOX.c[name]).order_by(INBOX.c.source, INBOX.c.id)))


# --- once -----------------------------------------------------------------------------------------


def test_a_message_is_new_once_and_then_a_duplicate(store: Store) -> None:
    assert store.inbox.accept("m", {"qty": 7}) is True
    assert [store.inbox.accept("m", {"qty": 7}) for _ in range(3)] == [False] * 3
    assert store.inbox.stats() == InboxStats(messages=1, duplicates=3, conflicts=0)


def test_within_one_transaction_it_is_new_once_too(store: Store) -> None:
    with store.begin() as uow:
        assert [uow.inbox.accept("m", 1) for _ in range(3)] == [True, False, False]
        assert uow.inbox.stats() == InboxStats(1, 2, 0)


@pytest.mark.parametrize("commits", [True, False])
def test_effect_and_row_commit_together_or_not_at_all(host: Engine, commits: bool) -> None:
    with Session(host) as session:
        assert UnitOfWork(session).inbox.accept("m", None)
        order(session, "m")
        assert session.in_transaction(), "the caller's transaction is the caller's to end"
        if commits:
            session.commit()
        else:
            session.rollback()
    assert orders(host) == column(host, "id") == (["m"] if commits else [])
    with Session(host) as session:
        assert UnitOfWork(session).inbox.accept("m", None) is not commits


def test_an_effect_that_fails_leaves_the_message_to_be_delivered_again(store: Store) -> None:
    for fails in (True, True, False):
        with suppress(ZeroDivisionError), store.begin() as uow:
            assert uow.inbox.accept("m", None)
            uow.jobs.enqueue("effect")
            if fails:
                raise ZeroDivisionError
    assert store.inbox.stats() == InboxStats(1, 0, 0)
    assert store.counts() == {"default": {"ready": 1}}


def test_a_savepoint_that_is_rolled_back_takes_the_message_with_it(host: Engine) -> None:
    with Session(host) as session:
        inbox = UnitOfWork(session).inbox
        with session.begin_nested() as savepoint:
            assert inbox.accept("m", None)
            order(session, "m")
            savepoint.rollback()
        assert inbox.accept("m", None), "it is new again"
        session.commit()
    assert (orders(host), column(host, "id")) == ([], ["m"])


async def test_the_async_form_is_in_the_callers_transaction(async_engine: AsyncEngine) -> None:
    async with AsyncSession(async_engine) as session:
        inbox = AsyncUnitOfWork(session).inbox
        assert await inbox.accept("m", 1)
        await session.rollback()
        assert await inbox.accept("m", 1)
        await session.commit()
        assert not await inbox.accept("m", 1)
        with pytest.raises(InboxConflict) as conflict:
            await inbox.accept("m", 2)
        await session.rollback()
        await inbox.record_conflict(conflict.value)
        await session.commit()
        assert await inbox.stats() == InboxStats(1, 0, 1), "the duplicate was rolled back"


# --- conflicts ------------------------------------------------------------------------------------

SAME: list[tuple[Any, Any]] = [
    ({"a": 1, "b": [{"c": 2, "d": 3}]}, {"b": [{"d": 3, "c": 2}], "a": 1}),  # the order of keys
    (1e2, 100.0), (2**70, 2**70), ("ä", "\u00e4"), ([], []), (None, None),
]  # fmt: skip
OTHER: list[tuple[Any, Any]] = [
    ({"qty": 7}, {"qty": 8}), ([1, 2], [2, 1]), (None, {}), ({}, []), ("1", 1), ({"a": None}, {}),
    # what Python calls equal, and JSON text does not
    (1, 1.0), (1, True), (0, False), (0.0, -0.0), (2**53, float(2**53)), ({"qty": 1}, {"qty": True}),
    # what looks the same
    ("\u00e1", "a\u0301"), ("a", "a "),
]  # fmt: skip


def test_the_same_value_is_a_duplicate_however_it_is_written(sync_store: Store) -> None:
    for n, (first, second) in enumerate(SAME):
        assert sync_store.inbox.accept(f"m-{n}", first), first
        assert not sync_store.inbox.accept(f"m-{n}", second), second


def test_another_value_is_a_conflict_and_changes_nothing(sync_store: Store, engine: Engine) -> None:
    for n, (first, _) in enumerate(OTHER):
        assert sync_store.inbox.accept(f"m-{n}", first, now=T)
    before = rows(engine, INBOX)
    for n, (_, second) in enumerate(OTHER):
        with pytest.raises(InboxConflict) as conflict, sync_store.begin() as uow:
            uow.inbox.accept(f"m-{n}", second, fence=9, now=T + 1)
        assert (conflict.value.id, conflict.value.source) == (f"m-{n}", "")
        assert f"'m-{n}'" in str(conflict.value)
    conflicts = INBOX.c.keys().index("conflicts")
    assert [(*row[:conflicts], 0, *row[conflicts + 1 :]) for row in rows(engine, INBOX)] == before
    assert sync_store.inbox.stats() == InboxStats(len(OTHER), 0, len(OTHER))


def test_store_verbs_count_their_conflicts(store: Store) -> None:
    store.inbox.accept("m", 1, source="s")
    with pytest.raises(InboxConflict) as conflict:
        store.inbox.accept("m", 2, source="s")
    assert conflict.value.source == "s"
    with suppress(InboxConflict), store.begin() as uow:
        uow.jobs.enqueue("undone")
        uow.inbox.accept("m", 3, source="s")
        pytest.fail("should be a conflict")
    assert store.inbox.stats() == InboxStats(1, 0, 2)
    assert store.get("undone") is None, "the block was rolled back"


def by_the_store(store: Store) -> None:
    store.inbox.accept("m", 2)


def by_a_block(store: Store) -> None:
    with store.begin() as uow:
        uow.inbox.accept("m", 2)


@pytest.mark.parametrize("accept", [by_the_store, by_a_block])
def test_a_conflict_that_cannot_be_counted_is_a_conflict_all_the_same(
    engine: Engine, accept: Callable[[Store], None]
) -> None:
    """The database goes away, say, or is read-only after a failover: the sender must hear of the conflict."""
    store = Store(engine)
    store.inbox.accept("m", 1)

    def refused(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "SET conflicts=" in statement:
            raise OSError("gone")

    listen.listen(store.transactions.engine, "before_cursor_execute", refused)
    with pytest.raises(InboxConflict) as conflict:
        accept(store)
    assert conflict.value.id == "m"
    assert store.inbox.stats() == InboxStats(1, 0, 0)


def test_on_the_callers_session_the_caller_counts(host: Engine, engine: Engine) -> None:
    store = Store(engine)
    store.inbox.accept("m", 1)
    with Session(host) as session:
        uow = UnitOfWork(session)
        order(session, "undone")
        with pytest.raises(InboxConflict) as conflict:
            uow.inbox.accept("m", 2)
        session.rollback()
        uow.inbox.record_conflict(conflict.value)
        session.commit()
    assert store.inbox.stats() == InboxStats(1, 0, 1)
    assert orders(host) == []


def test_a_swallowed_conflict_has_changed_nothing_either(store: Store) -> None:
    store.inbox.accept("m", 1)
    with store.begin() as uow, suppress(InboxConflict):
        uow.inbox.accept("m", 2)
    assert store.inbox.stats() == InboxStats(1, 0, 0)
    assert not store.inbox.accept("m", 1), "it is still the message that was accepted"


def test_a_message_in_conflict_is_accepted_again_as_what_it_was(store: Store) -> None:
    store.inbox.accept("m", 1)
    with pytest.raises(InboxConflict):
        store.inbox.accept("m", 2)
    assert store.inbox.accept("m", 1) is False
    assert store.inbox.stats() == InboxStats(1, 1, 1)


# --- names ----------------------------------------------------------------------------------------


def test_ids_and_sources_are_compared_byte_for_byte(sync_store: Store) -> None:
    for key in KEYS:
        assert sync_store.inbox.accept(key, None)
        assert sync_store.inbox.accept("m", None, source=key)
    assert sync_store.inbox.stats().messages == 2 * len(KEYS)


def test_the_source_tells_ids_apart(store: Store) -> None:
    for new in (True, False):
        for n, source in enumerate(("", "a", "b")):
            assert store.inbox.accept("m", n, source=source) is new


LONG = "\U0001f600" * 255
BAD: list[tuple[str, dict[str, Any]]] = [
    *(("id", {"id": bad}) for bad in ("", LONG + "x", "x" * 100_000, "a\x00b", "a\ud800", 7, None, b"x")),
    *(("source", {"source": bad}) for bad in (LONG + "x", "\x00", None, 7)),
    *(("payload", {"payload": bad}) for bad in (float("nan"), "\x00", {1: 2}, (1,), object(), "x" * 2**20)),
    *(("fence", {"fence": bad}) for bad in (-1, 2**63, 1.0, True, "1")),
    *(("now", {"now": bad}) for bad in (float("nan"), "soon")),
]  # fmt: skip


def test_what_is_refused_is_refused_before_anything_is_written(sync_store: Store) -> None:
    """In particular, an id that is too long is an error, and is not cut to one that somebody else has."""
    sync_store.inbox.accept(LONG, 1, source=LONG)
    for field, bad in BAD:
        with pytest.raises(InvalidValue) as refused:
            sync_store.inbox.accept(**{"id": "m", "payload": 1, **bad})
        assert refused.value.field.startswith(field), f"{bad!r}: {refused.value}"
    assert sync_store.inbox.stats() == InboxStats(1, 0, 0)
    assert not sync_store.inbox.accept(LONG, 1, source=LONG)


# --- what is kept ---------------------------------------------------------------------------------


def test_the_highest_fence_that_brought_it_is_kept(sync_store: Store, engine: Engine) -> None:
    for fence, kept in ((None, None), (3, 3), (2, 3), (None, 3), (2**63 - 1, 2**63 - 1)):
        sync_store.inbox.accept("m", 1, fence=fence)
        assert column(engine, "fence") == [kept]
    with pytest.raises(InboxConflict):
        sync_store.inbox.accept("m", 2, fence=2**63 - 1)
    assert column(engine, "fence") == [2**63 - 1]


def test_the_first_delivery_is_when_it_was_received(sync_store: Store, engine: Engine) -> None:
    for now in (T, T + 1, T - 1):
        sync_store.inbox.accept("m", 1, now=now)
    assert column(engine, "received_at") == [T]


def test_the_stats_of_an_empty_inbox_are_zero(store: Store) -> None:
    assert store.inbox.stats() == InboxStats(0, 0, 0)


# --- purge ----------------------------------------------------------------------------------------


def test_purge_forgets_old_messages_in_small_batches(store: Store) -> None:
    for n in range(7):
        store.inbox.accept(f"m-{n}", n, now=T + n)
    assert store.inbox.purge(10, limit=3, now=T + 14) == 3
    assert store.inbox.purge(10, limit=3, now=T + 14) == 1, "older than that, and not as old"
    assert store.inbox.purge(10, limit=3, now=T + 14) == 0
    assert [store.inbox.accept(f"m-{n}", n, now=T + 14) for n in range(7)] == [True] * 4 + [False] * 3


@pytest.mark.parametrize(("field", "arguments"), [
    *(("older_than", (bad,)) for bad in (-1, float("nan"), None, "1")),
    *(("limit", (1, bad)) for bad in (0, -1, 1.5)),
])  # fmt: skip
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_purge_of_nonsense_is_refused(sync_store: Store, field: str, arguments: Any) -> None:
    with pytest.raises(InvalidValue, match=field):
        sync_store.inbox.purge(*arguments)


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_purge_does_not_forget_what_came_again_meanwhile(engine: Engine) -> None:
    """Between its look and its DELETE another purge was quicker, and the message came again as new."""
    store = Store(engine)
    store.inbox.accept("m", 1, now=T)
    slow = Store(engine)
    looked: list[str] = []

    def meanwhile(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if not looked and statement.startswith("SELECT fenced_inbox.source"):
            looked.append(statement)
            assert store.inbox.purge(10, now=T + 11) == 1
            assert store.inbox.accept("m", 1, now=T + 11)

    listen.listen(engine, "after_cursor_execute", meanwhile)
    assert slow.inbox.purge(10, now=T + 11) == 0
    assert looked
    assert store.inbox.accept("m", 1, now=T + 12) is False, "or its effect would be there twice"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_large_batch_is_not_a_long_statement(engine: Engine) -> None:
    """A thousand listed pairs took 6 seconds among 60,000 messages: each was compared with each."""
    store = Store(engine)
    for n in range(12):
        store.inbox.accept(f"m-{n}", n, now=T)
    said: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE"):
            said.append(statement)

    listen.listen(engine, "before_cursor_execute", note)
    assert [store.inbox.purge(1, limit=limit, now=T + 9) for limit in (2, 9)] == [2, 9]
    assert len(set(said)) == 1
