"""Adding an event: in the caller's transaction, idempotent by id, checked before anything is written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy import event as listen
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from fencedjobs import AsyncUnitOfWork, InvalidValue, OutboxConflict, Store, UnitOfWork
from tests.outbox.helpers import ORDERS, OUTBOX, SERVERS, T, add, event, host_table, ids, order, rows

VALUES: list[Any] = [
    None, False, 0, 1.5, -0.0, 2**53 + 1, 2**70, "", "ä\u2028😀", [], {}, {"a": {"b": [1, None, "x"]}, "": 0},
]  # fmt: skip
KEYS = ["A", "a", "a ", "á", "ß", "ss", "\u00e9", "e\u0301"]


@pytest.fixture
def host(engine: Engine) -> Iterator[Engine]:
    with host_table(engine):
        yield engine


def orders(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return sorted(connection.scalars(select(ORDERS.c.id)))


def added(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(select(OUTBOX.c.id).order_by(OUTBOX.c.seq)))


# --- in the caller's transaction ------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
def test_the_event_shares_the_fate_of_the_business_row(host: Engine, commits: bool) -> None:
    with Session(host) as session:
        order(session, "o-1")
        assert UnitOfWork(session).outbox.add("o-1", {"qty": 7}, topic="warehouse") == "o-1"
        assert session.in_transaction(), "the caller's transaction is the caller's to end"
        if commits:
            session.commit()
        else:
            session.rollback()
    assert orders(host) == added(host) == (["o-1"] if commits else [])


def test_the_event_shares_the_fate_of_a_savepoint(host: Engine) -> None:
    with Session(host) as session:
        uow = UnitOfWork(session)
        for id, keeps in (("kept", True), ("undone", False), ("kept-too", True)):
            savepoint = session.begin_nested()
            order(session, id)
            uow.outbox.add(id, None, topic="t")
            if keeps:
                savepoint.commit()
            else:
                savepoint.rollback()
        session.commit()
    assert orders(host) == added(host) == ["kept", "kept-too"]


def test_a_savepoint_that_was_kept_goes_with_the_whole(host: Engine) -> None:
    with Session(host) as session:
        uow = UnitOfWork(session)
        with session.begin_nested():
            order(session, "o-1")
            uow.outbox.add("o-1", None, topic="t")
        session.rollback()
    assert orders(host) == added(host) == []


async def test_the_async_form_is_in_the_callers_transaction(async_engine: AsyncEngine) -> None:
    async with AsyncSession(async_engine) as session:
        outbox = AsyncUnitOfWork(session).outbox
        await outbox.add("undone", None, topic="t")
        await session.rollback()
        await outbox.add("kept", None, topic="t")
        async with session.begin_nested() as savepoint:
            await outbox.add("undone-too", None, topic="t")
            await savepoint.rollback()
        assert ids(await outbox.pending()) == ["kept"]
        await session.commit()
    async with AsyncSession(async_engine) as session:
        assert ids(await AsyncUnitOfWork(session).outbox.pending()) == ["kept"]


def test_a_block_that_fails_adds_nothing(store: Store) -> None:
    with suppress(ZeroDivisionError), store.begin() as uow:
        uow.outbox.add("e", None, topic="t")
        raise ZeroDivisionError
    assert store.outbox.pending() == []


# --- idempotent by id -----------------------------------------------------------------------------


def test_the_same_event_again_is_none_and_changes_nothing(store: Store) -> None:
    payload = {"qty": 7, "of": ["a", "b"]}
    store.outbox.add("e", payload, topic="t", lane="l", headers={"k": "v"}, now=T)
    before = event(store, "e")
    same = {"of": ["a", "b"], "qty": 7}  # the order of keys is not part of a value
    assert store.outbox.add("e", same, topic="t", lane="l", headers={"k": "w"}, now=T + 9) is None
    assert event(store, "e") == before
    assert before.headers == {"k": "v"}


@pytest.mark.parametrize("state", ["sent", "quarantined"])
def test_an_event_that_has_left_the_lane_does_not_come_back(
    sync_store: Store, engine: Engine, state: str
) -> None:
    add(sync_store, "e")
    with engine.begin() as connection:
        connection.execute(OUTBOX.update().values(state=state))
    before = event(sync_store, "e")
    assert sync_store.outbox.add("e", "e", topic="t") is None
    with pytest.raises(OutboxConflict):
        sync_store.outbox.add("e", "other", topic="t")
    assert event(sync_store, "e") == before


def test_another_event_under_the_same_id_is_a_conflict(store: Store) -> None:
    store.outbox.add("e", {"qty": 7}, topic="t", lane="l", now=T)
    before = event(store, "e")
    others: list[tuple[Any, str, str]] = [
        ({"qty": 8}, "t", "l"), ({"qty": 7.0}, "t", "l"), ({"qty": True}, "t", "l"), (None, "t", "l"),
        ({"qty": 7}, "T", "l"), ({"qty": 7}, "t", "l "),
    ]  # fmt: skip
    for payload, topic, lane in others:
        with pytest.raises(OutboxConflict) as refused:
            store.outbox.add("e", payload, topic=topic, lane=lane, now=T + 1)
        assert refused.value.id == "e"
        assert "'e'" in str(refused.value)
    assert event(store, "e") == before
    assert len(store.outbox.pending(16, "l")) == 1


def test_a_conflict_undoes_the_block_it_happens_in(sync_store: Store) -> None:
    add(sync_store, "e")
    with suppress(OutboxConflict), sync_store.begin() as uow:
        uow.outbox.add("new", None, topic="t")
        uow.outbox.add("e", "other", topic="t")
        pytest.fail("should be a conflict")
    assert ids(sync_store.outbox.pending()) == ["e"]


def test_ids_lanes_and_topics_are_compared_byte_for_byte(sync_store: Store) -> None:
    for key in KEYS:
        add(sync_store, key, lane=key)
    for key in KEYS:
        assert [(e.id, e.lane, e.payload) for e in sync_store.outbox.pending(16, key)] == [(key, key, key)]


@pytest.mark.parametrize("commits", [True, False])
def test_of_two_writers_of_one_id_the_second_waits_for_the_first(host: Engine, commits: bool) -> None:
    answers: list[Any] = []

    def second() -> None:
        with Session(host) as session:
            answers.append(UnitOfWork(session).outbox.add("e", 1, topic="t"))
            session.commit()

    with Session(host) as session:
        UnitOfWork(session).outbox.add("e", 1, topic="t")
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.3)
        assert answers == [], "the outcome is not known yet"
        if commits:
            session.commit()
        else:
            session.rollback()
    waiting.join()
    assert answers == [None if commits else "e"]
    assert added(host) == ["e"]


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_the_same_event_may_come_while_a_relay_marks_it(engine: Engine) -> None:
    """Reading past the relay's row lock once found nothing there, and said conflict."""
    store = Store(engine)
    answers: list[Any] = []
    add(store, "e")

    def again() -> None:
        try:
            answers.append(store.outbox.add("e", "e", topic="t"))
        except OutboxConflict as conflict:
            answers.append(conflict)

    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        marking = OUTBOX.update().where(OUTBOX.c.seq == event(store, "e").seq).values(state="sent")
        connection.execute(marking)
        adding = threading.Thread(target=again)
        adding.start()
        adding.join(0.3)
        connection.commit()
    adding.join()
    assert answers == [None]


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_writers_under_the_hosts_repeatable_read_do_not_deadlock(engine: Engine) -> None:
    """A locking look for an id that is not there locked the gap, against every other writer."""
    first, second = Session(engine), Session(engine)
    with first, second:
        for session in (first, second):
            session.execute(text("SET innodb_lock_wait_timeout = 2"))
        UnitOfWork(first).outbox.add("a", None, topic="t")
        UnitOfWork(second).outbox.add("b", None, topic="t")
        UnitOfWork(first).outbox.add("c", None, topic="t")
        UnitOfWork(second).outbox.add("d", None, topic="t")
        first.commit()
        second.commit()
    assert sorted(added(engine)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_event_that_is_purged_while_it_comes_again_is_new(engine: Engine) -> None:
    """It was there for the INSERT and gone for the look, which once was called a conflict."""
    store = Store(engine)
    add(store, "e")

    inserts: list[str] = []

    def purge(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT"):
            inserts.append(statement)
            if len(inserts) == 1:
                with engine.begin() as other:
                    other.execute(OUTBOX.delete())

    listen.listen(engine, "after_cursor_execute", purge)
    assert store.outbox.add("e", "e", topic="t") == "e"
    assert added(engine) == ["e"]


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_an_event_from_after_the_hosts_snapshot_is_seen(engine: Engine) -> None:
    store = Store(engine)
    with Session(engine) as session:
        session.execute(select(OUTBOX)).all()  # what plain reads show from now on
        add(store, "same", "other")
        uow = UnitOfWork(session)
        assert uow.outbox.add("same", "same", topic="t") is None
        with pytest.raises(OutboxConflict):
            uow.outbox.add("other", "?", topic="t")


# --- what is kept ---------------------------------------------------------------------------------


def test_values_read_back_as_they_were(store: Store) -> None:
    for n, value in enumerate(VALUES):
        store.outbox.add(f"e-{n}", value, topic="t", headers={"n": str(n), "ä": "😀"})
    for n, (value, found) in enumerate(zip(VALUES, store.outbox.pending(16), strict=True)):
        assert (found.payload, repr(found.payload)) == (value, repr(value))
        assert found.headers == {"n": str(n), "ä": "😀"}


def test_an_event_says_what_it_is(store: Store) -> None:
    store.outbox.add("e", {"qty": 7}, topic="warehouse", lane="eu", now=T)
    (found,) = store.outbox.pending(lane="eu")
    facts = (found.id, found.topic, found.lane, found.payload, found.headers, found.created)
    assert facts == ("e", "warehouse", "eu", {"qty": 7}, {}, T)
    assert (found.fence, found.attempt) == (0, 1), "outside of a relay there is no fence"
    assert found.seq == event(store, "e").seq


# --- checked before anything is written -----------------------------------------------------------

BAD_KEYS: list[Any] = ["", "x" * 256, "a\x00b", "a\ud800", 7, None, b"x", ["a"]]
BAD: list[tuple[str, dict[str, Any]]] = [
    *(("id", {"id": bad}) for bad in BAD_KEYS),
    *(("topic", {"topic": bad}) for bad in BAD_KEYS),
    *(("lane", {"lane": bad}) for bad in BAD_KEYS),
    *(
        ("payload", {"payload": bad})
        for bad in (float("nan"), [float("inf")], "\x00", {"\ud800": 1}, {1: 2}, (1,), {1}, b"x", object())
    ),
    ("payload", {"payload": "x" * 1024 * 1024}),
    *(
        ("headers", {"headers": bad})
        for bad in ({"a": 1}, {1: "a"}, {"a": None}, {"a": "\x00"}, {"\ud800": "a"}, 5, "a", [("a", "b")])
    ),
    *(("now", {"now": bad}) for bad in (float("nan"), "soon", True)),
]  # fmt: skip


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_refused_is_refused_before_anything_is_written(sync_store: Store, inside: bool) -> None:
    good: dict[str, Any] = {"id": "e", "payload": None, "topic": "t"}
    if inside:
        with sync_store.begin() as uow:
            refuse_all(uow.outbox, good)
    else:
        refuse_all(sync_store.outbox, good)
    assert sync_store.outbox.stats() == {}
    assert sync_store.outbox.add(**good) == "e"


def refuse_all(outbox: Any, good: dict[str, Any]) -> None:
    for field, bad in BAD:
        with pytest.raises(InvalidValue) as refused:
            outbox.add(**{**good, **bad})
        assert refused.value.field.startswith(field), f"{bad!r}: {refused.value}"


@pytest.mark.parametrize("length", [1, 255])
def test_the_longest_and_shortest_keys_are_kept_whole(sync_store: Store, length: int) -> None:
    key = "\U0001f600" * length
    sync_store.outbox.add(key, None, topic=key, lane=key)
    (found,) = sync_store.outbox.pending(1, key)
    assert (found.id, found.topic, found.lane) == (key, key, key)


def test_nothing_that_is_written_says_ignore(engine: Engine, database: Any) -> None:
    """INSERT IGNORE would cut what is too long, and call it success."""
    assert rows(engine, OUTBOX) == []
    said: list[str] = []

    listen.listen(engine, "before_cursor_execute", lambda c, cur, text, *_: said.append(text.upper()))
    store = Store(engine)
    with store.begin() as uow:
        uow.outbox.add("e", None, topic="t")
        uow.outbox.add("e", None, topic="t")
        uow.inbox.accept("e", None)
        uow.inbox.accept("e", None)
        uow.guards.admit("r", 1)
    written = [text for text in said if text.startswith("INSERT")]
    assert len(written) >= 4
    assert not [text for text in written if "IGNORE" in text or "REPLACE" in text]
