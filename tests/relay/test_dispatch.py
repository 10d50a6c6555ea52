"""One batch: what is sent, what counts as acknowledged, what is marked, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from fencedjobs import InvalidValue, NotAcknowledged, Store, UnitOfWork
from fencedjobs.relay import dispatch
from fencedjobs.values import Event
from tests.databases import Database
from tests.outbox.helpers import OUTBOX, SERVERS, T, add, event, host_table, ids, order, rows, states
from tests.relay.helpers import Clock, Receiver, lane_is_free, lane_lock


class Equal:
    """Like numpy's and other people's booleans: equal to ``True``, true, and not ``True``."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(True)

    def __bool__(self) -> bool:
        return True


class Unspeakable:
    """Whose representation is an error of its own."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


# --- what is sent ---------------------------------------------------------------------------------


def test_a_batch_is_sent_in_order_and_marked(store: Store, clock: Clock) -> None:
    add(store, "z", "a", "m")
    receiver = Receiver()
    assert dispatch(store, receiver, owner="relay-1") == 3
    assert receiver.ids == ["z", "a", "m"]
    assert states(store, "z", "a", "m") == ["sent"] * 3
    assert [(e.fence, e.attempt) for e in receiver.got] == [(1, 1)] * 3
    assert [e.seq for e in receiver.got] == [event(store, id).seq for id in ("z", "a", "m")]
    marked = event(store, "a")
    assert (marked.fence, marked.attempts, marked.sent_at, marked.last_error) == (1, 1, T, None)
    assert store.outbox.pending() == []


def test_an_event_is_sent_as_it_was_added(store: Store) -> None:
    store.outbox.add("e", {"qty": [7]}, topic="warehouse", headers={"trace": "1"}, now=T - 5)
    receiver = Receiver()
    dispatch(store, receiver)
    (sent,) = receiver.got
    assert (sent.topic, sent.lane, sent.payload) == ("warehouse", "default", {"qty": [7]})
    assert (sent.headers, sent.created) == ({"trace": "1"}, T - 5)


@pytest.mark.parametrize("limit", [1, 5, 16])
def test_a_batch_is_no_longer_than_its_limit(store: Store, limit: int) -> None:
    add(store, *map(str, range(17)))
    assert dispatch(store, Receiver(), limit=limit) == limit
    assert ids(store.outbox.pending(1)) == [str(limit)]


@pytest.mark.parametrize("arguments", [
    *({"limit": bad} for bad in (0, -1, 17, 1.0, True, None)),
    *({"ttl": bad} for bad in (0, -1, float("nan"), float("inf"), None, "1")),
    {"lane": ""}, {"lane": "x" * 256}, {"lane": 7}, {"owner": ""},
])  # fmt: skip
def test_bad_arguments_are_refused_before_anything_happens(store: Store, arguments: dict[str, Any]) -> None:
    add(store, "e")
    receiver = Receiver()
    with pytest.raises(InvalidValue) as refused:
        dispatch(store, receiver, **arguments)
    assert refused.value.field == next(iter(arguments))
    assert isinstance(refused.value, ValueError)
    assert receiver.got == []
    assert lane_lock(store) is None


def test_an_empty_lane_is_left_alone(store: Store) -> None:
    add(store, "e", lane="other")
    assert dispatch(store, Receiver()) == 0
    assert lane_lock(store) is None, "not even its lease was taken"


def test_the_longest_lane_is_served(store: Store) -> None:
    """Its lock is longer than a key may be, which once kept every such event in the outbox."""
    lane = "\U0001f600" * 255
    add(store, "e", lane=lane)
    assert dispatch(store, Receiver(), lane=lane) == 1


def test_lanes_do_not_wait_for_each_other(store: Store) -> None:
    add(store, "outer", lane="a")
    add(store, "inner", lane="b")
    inner = Receiver()
    outer = Receiver({"outer": lambda _: dispatch(store, inner, lane="b") == 1})
    assert dispatch(store, outer, lane="a") == 1
    assert inner.ids == ["inner"]


# --- what is an acknowledgement -------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", [1, 1.0, "True", "", None, False, [True], {"ok": 1}, object(), Equal(), Unspeakable()]
)  # fmt: skip
def test_only_the_exact_true_is_an_acknowledgement(store: Store, answer: Any) -> None:
    add(store, "a", "b", "c")
    receiver = Receiver({"b": lambda _: answer})
    with pytest.raises(NotAcknowledged) as refused:
        dispatch(store, receiver)
    assert (refused.value.id, refused.value.answer) == ("b", answer)
    assert "'b'" in str(refused.value)
    assert receiver.ids == ["a", "b"], "nothing overtakes what failed"
    assert states(store, "a", "b", "c") == ["sent", "pending", "pending"]
    assert lane_is_free(store)


class Cut(Exception):
    """A connection that was cut."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [
    Cut("no answer"), Mute(), OSError("\x00\ud800"), StopIteration(3), OperationalError("x", {}, OSError()),
    KeyboardInterrupt(), SystemExit(3), GeneratorExit(),
], ids=lambda error: type(error).__name__)  # fmt: skip
def test_the_senders_own_error_comes_out_unchanged(store: Store, error: BaseException) -> None:
    add(store, "a", "b", "c")
    receiver = Receiver({"b": error})
    with pytest.raises(type(error)) as raised:
        dispatch(store, receiver)
    assert raised.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert receiver.ids == ["a", "b"]
    assert states(store, "a", "b", "c") == ["sent", "pending", "pending"]
    assert lane_is_free(store)
    assert dispatch(store, receiver.__class__()) == 2, "the next run goes on from there"


def test_the_error_is_kept_with_the_event_until_it_is_sent(store: Store) -> None:
    add(store, "e")
    with pytest.raises(Cut):
        dispatch(store, Receiver({"e": Cut("x" * 5000 + "\x00")}))
    kept = event(store, "e").last_error
    assert kept is not None
    assert kept.startswith("Cut: xxx")
    assert len(kept) <= 2000
    with pytest.raises(NotAcknowledged):
        dispatch(store, Receiver({"e": None}))
    assert "None" in str(event(store, "e").last_error)
    dispatch(store, Receiver())
    assert event(store, "e").last_error is None


def test_the_attempts_are_counted(store: Store) -> None:
    add(store, "a", "b")
    for n in (1, 2, 3):
        failing = Receiver({"a": Cut()})
        with pytest.raises(Cut):
            dispatch(store, failing)
        assert [e.attempt for e in failing.got] == [n]
        assert [event(store, id).attempts for id in ("a", "b")] == [n, 0]
    receiver = Receiver()
    dispatch(store, receiver)
    assert [e.attempt for e in receiver.got] == [4, 1]
    assert [event(store, id).attempts for id in ("a", "b")] == [4, 1]


def test_an_attempt_is_counted_before_the_event_is_sent(store: Store, engine: Engine) -> None:
    """So that an event that kills its relay is counted, too."""
    add(store, "a", "b")
    counted: list[int] = []

    def send(sent: Event) -> bool:
        counted.append(event(store, sent.id).attempts)
        return True

    dispatch(store, send)
    assert counted == [1, 1]


# --- the copy -------------------------------------------------------------------------------------


def vandal(other: Event) -> Callable[[Event], bool]:
    def send(event: Event) -> bool:
        event.payload["deep"].append("changed")
        event.payload.clear()
        event.headers.clear()  # type: ignore[attr-defined]
        for name in ("id", "seq", "lane", "topic", "fence", "attempt"):
            object.__setattr__(event, name, getattr(other, name))
        object.__setattr__(event, "payload", None)
        return True

    return send


def test_what_is_done_to_the_copy_changes_nothing(store: Store) -> None:
    for id in ("a", "b", "c"):
        store.outbox.add(id, {"deep": [id]}, topic="t", headers={"h": id})
    third = store.outbox.pending()[2]
    spoil = vandal(third)
    after: list[tuple[str, Any, Any]] = []

    def send(event: Event) -> Any:
        if event.id == "c":
            return None
        return spoil(event)

    def after_delivery(event: Event) -> None:
        after.append(deepcopy((event.id, event.payload, event.headers)))
        spoil(event)

    with pytest.raises(NotAcknowledged) as refused:
        dispatch(store, send, after_delivery=after_delivery)
    assert refused.value.id == "c"
    assert after == [("a", {"deep": ["a"]}, {"h": "a"}), ("b", {"deep": ["b"]}, {"h": "b"})]
    assert states(store, "a", "b", "c") == ["sent", "sent", "pending"], "c was never acknowledged"
    assert [event(store, id).payload for id in ("a", "b", "c")] == [{"deep": [id]} for id in ("a", "b", "c")]


# --- after the delivery, before the mark ----------------------------------------------------------


def test_after_delivery_comes_after_the_acknowledgement_and_before_the_mark(store: Store) -> None:
    add(store, "a", "b")
    story: list[str] = []

    def send(event: Event) -> bool:
        story.append(f"send {event.id}")
        return True

    def after(sent: Event) -> None:
        story.append(f"after {sent.id}: {event(store, sent.id).state}")

    dispatch(store, send, after_delivery=after)
    assert story == ["send a", "after a: pending", "send b", "after b: pending"]


def test_after_delivery_is_not_called_without_an_acknowledgement(store: Store) -> None:
    add(store, "a")
    with pytest.raises(NotAcknowledged):
        dispatch(store, Receiver({"a": 1}), after_delivery=lambda _: pytest.fail("there was none"))


def test_an_error_after_the_delivery_leaves_the_event_pending(store: Store) -> None:
    add(store, "a", "b")
    died = Cut()

    def die(event: Event) -> None:
        raise died

    with pytest.raises(Cut) as raised:
        dispatch(store, Receiver(), after_delivery=die)
    assert raised.value is died
    assert states(store, "a", "b") == ["pending", "pending"]
    again = Receiver()
    assert dispatch(store, again) == 2
    assert again.ids == ["a", "b"], "sent again, under the same id"


# --- no lock while sending ------------------------------------------------------------------------


@pytest.fixture
def host(engine: Engine) -> Iterator[Engine]:
    with host_table(engine):
        yield engine


def test_while_sending_others_write(store: Store, host: Engine, database: Database) -> None:
    """A competing connection really begins a write transaction, enqueues and adds events to this lane."""
    add(store, "a", "b")
    rival_engine = database.engine(pool_size=1, max_overflow=0)
    rival = Store(rival_engine)
    accepted: list[str] = []

    def send(event: Event) -> bool:
        pool: Any = host.pool
        assert pool.checkedout() == 0, "no connection of ours is in use"
        with rival.begin() as uow:
            impatient(uow.session)
            order(uow.session, event.id)
            uow.jobs.enqueue(f"job-{event.id}")
            uow.outbox.add(f"new-{event.id}", None, topic="t")
            uow.inbox.accept(event.id, None)
        accepted.append(event.id)
        return True

    assert dispatch(store, send) == 2
    rival_engine.dispose()
    assert accepted == ["a", "b"]
    assert ids(store.outbox.pending()) == ["new-a", "new-b"], "added meanwhile: for the next batch"
    assert store.get("job-a") is not None


def impatient(session: Any) -> None:
    """Lose at once rather than wait, if somebody holds a lock."""
    name = session.get_bind().dialect.name
    limits = {
        "postgresql": "SET LOCAL lock_timeout = '2s'",
        "mysql": "SET innodb_lock_wait_timeout = 2",
        "sqlite": "PRAGMA busy_timeout = 2000",
    }
    session.execute(text(limits[name]))


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_while_sending_the_very_event_may_be_locked_and_changed(store: Store, engine: Engine) -> None:
    add(store, "a")

    def send(event: Event) -> bool:
        with engine.begin() as connection:
            taken = connection.execute(OUTBOX.select().with_for_update(nowait=True)).all()
        return len(taken) == 1

    assert dispatch(store, send) == 1


def test_the_callers_session_may_be_in_the_middle_of_something(store: Store, engine: Engine) -> None:
    """A host's open read transaction keeps no relay from marking."""
    add(store, "a")
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            mode = connection.exec_driver_sql("PRAGMA journal_mode=WAL").scalar()
        assert mode == "wal"
    with Session(engine) as session:
        assert len(session.execute(OUTBOX.select()).all()) == 1
        assert dispatch(store, Receiver()) == 1
    with Session(engine) as session:
        assert UnitOfWork(session).outbox.pending() == []


def test_nothing_is_written_when_nothing_was_sent(store: Store, engine: Engine) -> None:
    add(store, "a")
    before = rows(engine, OUTBOX)
    held = store.locks.claim("outbox:default", "another relay", ttl=60)
    assert held is not None
    assert dispatch(store, Receiver()) == 0
    assert rows(engine, OUTBOX) == before
