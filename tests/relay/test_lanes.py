"""The lane's lease: one relay at a time, kept while it sends, claimed again when it ran out, given back."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from fencedjobs import LeaseLost, NotAcknowledged, Store
from fencedjobs.relay import Relay, dispatch
from fencedjobs.values import Event
from tests.jobs.helpers import just_before
from tests.outbox.helpers import OUTBOX, T, add, event, ids, rows, states
from tests.relay.helpers import Clock, Receiver, lane_is_free, lane_lock


def taking(clock: Clock, seconds: float, then: Any = True) -> Any:
    """An answer after so many seconds."""

    def answer(event: Event) -> Any:
        clock.now += seconds
        return then(event) if callable(then) else then

    return answer


# --- one at a time --------------------------------------------------------------------------------


def test_a_lane_that_another_relay_holds_is_left_alone(store: Store, clock: Clock) -> None:
    add(store, "a")
    store.locks.claim("outbox:default", "another", ttl=60)
    clock.now = just_before(T + 60)
    assert dispatch(store, Receiver()) == 0
    assert event(store, "a").attempts == 0
    clock.now = T + 60
    assert dispatch(store, Receiver()) == 1, "at the end of its lease, and not later"


def test_a_relay_within_a_relay_finds_the_lane_taken(store: Store) -> None:
    add(store, "a")
    receiver = Receiver({"a": lambda _: dispatch(store, Receiver()) == 0})
    assert dispatch(store, receiver, owner="same name") == 1


def test_the_lane_is_given_back_and_its_fence_rises(store: Store) -> None:
    for n, name in enumerate(("a", "b", "c"), start=1):
        add(store, name)
        receiver = Receiver()
        assert dispatch(store, receiver) == 1
        assert [e.fence for e in receiver.got] == [n]
        assert lane_is_free(store)


def test_while_sending_the_lane_is_held_by_its_owner(store: Store, clock: Clock) -> None:
    add(store, "a")
    held: list[Any] = []

    def send(event: Event) -> bool:
        held.append(lane_lock(store))
        return True

    dispatch(store, send, owner="relay-1", ttl=7)
    assert [(lock.owner, lock.until, lock.fence) for lock in held] == [("relay-1", T + 7, 1)]


# --- kept between sends ---------------------------------------------------------------------------


def test_the_lease_is_renewed_with_each_mark(store: Store, clock: Clock) -> None:
    """Five sends of almost a whole lease each: it never ends."""
    names = [*"abcde"]
    add(store, *names)
    receiver = Receiver(dict.fromkeys(names, taking(clock, 59)))
    assert dispatch(store, receiver, ttl=60) == 5
    assert [e.fence for e in receiver.got] == [1] * 5


# --- ran out during a send ------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1000])
def test_a_lease_that_ran_out_is_claimed_again_and_the_event_marked(
    store: Store, clock: Clock, late: float
) -> None:
    add(store, "a", "b", "c")
    receiver = Receiver({"a": taking(clock, 60 + late)})
    assert dispatch(store, receiver, ttl=60) == 3
    assert receiver.ids == ["a", "b", "c"]
    assert [e.fence for e in receiver.got] == [1, 2, 2], "later events carry the new fence"
    assert [event(store, id).fence for id in ("a", "b", "c")] == [2, 2, 2]
    assert lane_is_free(store)


def test_a_lease_that_has_not_run_out_is_only_renewed(store: Store, clock: Clock) -> None:
    add(store, "a", "b")
    clock.now = 1000.0
    receiver = Receiver({"a": taking(clock, just_before(1060.0) - 1000.0)})
    assert dispatch(store, receiver, ttl=60) == 2
    assert [e.fence for e in receiver.got] == [1, 1]


@pytest.mark.parametrize("answer", [True, None, OSError("late")], ids=["acknowledged", "refused", "failed"])
def test_a_lane_that_another_relay_has_taken_is_lost(
    store: Store, engine: Engine, clock: Clock, answer: Any
) -> None:
    add(store, "a", "b")
    seen: list[Any] = []

    def send(event: Event) -> Any:
        clock.now += 60
        store.locks.claim("outbox:default", "another", ttl=60)
        seen.extend(rows(engine, OUTBOX))
        if isinstance(answer, Exception):
            raise answer
        return answer

    expected = LeaseLost if answer is True else Exception
    with pytest.raises(expected) as lost:
        dispatch(store, send, owner="late", ttl=60)
    if answer is True:
        assert isinstance(lost.value, LeaseLost)
        assert lost.value.held.owner == "late"
        assert lost.value.current.owner == "another"
    elif answer is not None:
        assert lost.value is answer, "the sender's own error"
    assert rows(engine, OUTBOX) == seen, "nothing is marked"
    lock = lane_lock(store)
    assert lock is not None
    assert (lock.owner, lock.until) == ("another", T + 120), "and the other keeps the lane"


def test_a_namesake_that_took_the_lane_is_another_relay_too(store: Store, clock: Clock) -> None:
    add(store, "a")
    take = taking(clock, 60, lambda _: store.locks.claim("outbox:default", "same", ttl=60) is not None)
    with pytest.raises(LeaseLost):
        dispatch(store, Receiver({"a": take}), owner="same", ttl=60)
    assert states(store, "a") == ["pending"]


def test_what_another_relay_sent_meanwhile_is_not_sent_again(store: Store, clock: Clock) -> None:
    """It has come and gone during one long send: the rest of the batch is its history, not ours."""
    add(store, "a", "b", "c")
    quick = Receiver()
    slow = Receiver({"a": taking(clock, 60, lambda _: dispatch(store, quick) == 3)})
    assert dispatch(store, slow, ttl=60) == 1
    assert quick.ids == ["a", "b", "c"]
    assert slow.ids == ["a"]
    assert [(e.fence, e.attempts) for e in (event(store, id) for id in ("a", "b", "c"))] == [
        (2, 2),
        (2, 1),
        (2, 1),
    ]


def test_what_another_relay_left_is_sent_with_the_next_batch(store: Store, clock: Clock) -> None:
    add(store, "a", "b", "c")

    def other(event: Event) -> bool:
        with pytest.raises(OSError, match="no"):
            dispatch(store, Receiver({"b": OSError("no")}))
        return True

    slow = Receiver({"a": taking(clock, 60, other)})
    assert dispatch(store, slow, ttl=60) == 1
    assert states(store, "a", "b", "c") == ["sent", "pending", "pending"]
    assert ids(store.outbox.pending()) == ["b", "c"]
    assert [event(store, id).attempts for id in ("a", "b", "c")] == [2, 1, 0]
    assert dispatch(store, slow, ttl=60) == 2


def test_a_relay_that_stops_takes_back_no_attempt_that_another_relay_has_counted(
    store: Store, clock: Clock
) -> None:
    def send(event: Event) -> bool:
        clock.now += 60
        with pytest.raises(NotAcknowledged):
            dispatch(store, Receiver({"b": False}), owner="another")
        relay.stop()
        return True

    add(store, "a", "b")
    relay = Relay(store, send, mark_every=2)
    relay.run()
    assert states(store, "a", "b") == ["sent", "pending"]
    assert event(store, "b").attempts == 1, "the other relay's"


def test_a_late_acknowledgement_marks_what_another_relay_could_not_send(store: Store, clock: Clock) -> None:
    """It is as good as any: the receiver has the event."""
    add(store, "a")

    def other(event: Event) -> bool:
        with pytest.raises(OSError, match="no"):
            dispatch(store, Receiver({"a": OSError("no")}))
        return True

    assert dispatch(store, Receiver({"a": taking(clock, 60, other)}), ttl=60) == 1
    assert states(store, "a") == ["sent"]


@pytest.mark.parametrize("by", [-1e6, -60, 59.999, 60, 1e6])
def test_a_clock_that_jumps_during_each_send_neither_loses_nor_repeats(
    store: Store, clock: Clock, by: float
) -> None:
    add(store, "a", "b", "c")
    receiver = Receiver(dict.fromkeys("abc", taking(clock, by)))
    assert sum(dispatch(store, receiver, ttl=60) for _ in range(3)) == 3
    assert receiver.ids == ["a", "b", "c"]
    assert states(store, "a", "b", "c") == ["sent"] * 3
    assert [event(store, id).attempts for id in "abc"] == [1] * 3
    assert lane_is_free(store)


def test_an_acknowledgement_is_not_for_a_new_event_under_the_old_id(store: Store, clock: Clock) -> None:
    """During one long send another relay sent the event, it was purged, and its id is used again."""
    add(store, "a")

    def reborn(sent: Event) -> bool:
        assert dispatch(store, Receiver()) == 1
        clock.now += 1
        assert store.outbox.purge(before=clock.now) == 1
        assert store.outbox.add("a", "a", topic="t") == "a"
        return True

    slow = Receiver({"a": taking(clock, 60, reborn)})
    dispatch(store, slow, ttl=60)
    assert states(store, "a") == ["pending"]
    assert event(store, "a").attempts == 0
    again = Receiver()
    assert dispatch(store, again) == 1
    assert again.ids == ["a"]


def test_a_failure_is_not_held_against_a_new_event_under_the_old_id(store: Store, clock: Clock) -> None:
    add(store, "a")

    def reborn(sent: Event) -> bool:
        assert dispatch(store, Receiver()) == 1
        clock.now += 1
        assert store.outbox.purge(before=clock.now) == 1
        assert store.outbox.add("a", "a", topic="t") == "a"
        raise OSError("late")

    with pytest.raises(OSError, match="late"):
        dispatch(store, Receiver({"a": taking(clock, 60, reborn)}), ttl=60)
    assert (event(store, "a").attempts, event(store, "a").last_error) == (0, None)


# --- an operator at the same time -----------------------------------------------------------------


def mend(store: Store, id: str, payload: Any) -> None:
    assert store.outbox.quarantine(id, "it chokes")
    assert store.outbox.requeue(id, payload=payload, by="ann", reason="mended") is not None


def test_an_event_that_was_set_aside_during_the_batch_is_not_sent(store: Store) -> None:
    add(store, "a", "b", "c")
    receiver = Receiver({"a": lambda _: store.outbox.quarantine("b", "it chokes")})
    dispatch(store, receiver)
    dispatch(store, receiver)
    assert receiver.ids == ["a", "c"]
    assert states(store, "a", "b", "c") == ["sent", "quarantined", "sent"]
    assert event(store, "b").attempts == 0


def test_an_event_that_was_mended_during_the_batch_is_sent_mended_and_in_order(store: Store) -> None:
    add(store, "a", "b", "c")

    def mending(_: Event) -> bool:
        mend(store, "b", "good")
        return True

    receiver = Receiver({"a": mending})
    dispatch(store, receiver)
    dispatch(store, receiver)
    assert [(e.id, e.payload) for e in receiver.got] == [("a", "a"), ("b", "good"), ("c", "c")]


def test_an_acknowledgement_is_for_the_payload_that_was_sent(store: Store) -> None:
    """What was mended while the old one was under way has not been acknowledged by anybody."""
    add(store, "a")

    def mending(sent: Event) -> bool:
        if sent.attempt == 1 and sent.payload == "a":
            mend(store, "a", "good")
        return True

    receiver = Receiver({"a": mending})
    dispatch(store, receiver)
    assert states(store, "a") == ["pending"]
    dispatch(store, receiver)
    assert [e.payload for e in receiver.got] == ["a", "good"]
    assert states(store, "a") == ["sent"]


def test_an_event_set_aside_while_it_is_sent_stays_aside(store: Store) -> None:
    """Whoever set it aside is told by the receiver's inbox whether it arrived."""
    add(store, "a", "b")
    assert dispatch(store, Receiver({"a": lambda _: store.outbox.quarantine("a", "stop")})) >= 1
    assert states(store, "a") == ["quarantined"]
    assert event(store, "a").reason == "stop"


def test_a_failure_from_before_a_requeue_is_not_held_against_it(store: Store) -> None:
    add(store, "a")

    def requeued_then_fails(_: Event) -> bool:
        store.outbox.quarantine("a", "why")
        store.outbox.requeue("a", by="ann", reason="r")
        raise OSError("old")

    with pytest.raises(OSError, match="old"):
        dispatch(store, Receiver({"a": requeued_then_fails}))
    assert (event(store, "a").attempts, event(store, "a").last_error) == (0, None)
