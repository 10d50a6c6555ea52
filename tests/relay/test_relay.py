"""The long-running form: many lanes, waits after failures, poison, and stops that leave nothing half done."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy import event as listen
from sqlalchemy.exc import OperationalError

from fencedjobs import InvalidValue, Store
from fencedjobs.aio_relay import AsyncRelay
from fencedjobs.batch import Batch
from fencedjobs.metrics import Observed
from fencedjobs.relay import Relay, dispatch
from fencedjobs.retry import Retry
from fencedjobs.values import Event
from tests.outbox.helpers import T, add, event, ids, states
from tests.relay.helpers import Clock, FakeTime, Receiver, Relays, Seen, lane_is_free, lane_lock, stopping


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Time that passes only while a relay waits."""
    fake = FakeTime()

    async def wait_async(_: AsyncRelay, seconds: float) -> None:
        fake.wait(seconds)

    monkeypatch.setattr("fencedjobs.relay.time", fake)
    monkeypatch.setattr("fencedjobs.batch.time", fake)
    monkeypatch.setattr(Relay, "_wait", lambda _, seconds: fake.wait(seconds))
    monkeypatch.setattr(AsyncRelay, "_wait", wait_async)
    return fake


def no(*_: Any) -> Any:
    raise OSError("no")


# --- lanes ----------------------------------------------------------------------------------------


def test_every_lane_is_sent_in_its_own_order(relays: Relays) -> None:
    lanes = {lane: [f"{lane}{n}" for n in range(20)] for lane in ("b", "a")}
    for n in range(20):
        for lane in lanes:
            add(relays.store, lanes[lane][n], lane=lane)
    add(relays.store, "elsewhere", lane="other")
    receiver = Receiver()
    assert relays(receiver, lanes=[*lanes]).run(until_empty=True) == 40
    for lane, names in lanes.items():
        assert [id for id in receiver.ids if id.startswith(lane)] == names
        assert lane_is_free(relays.store, lane)
    assert ids(relays.store.outbox.pending(lane="other")) == ["elsewhere"]


def test_a_relay_of_one_lane_keeps_it_until_it_has_sent_all_there_is(relays: Relays) -> None:
    for n in range(5):
        add(relays.store, f"e{n}")

    def more(_: Event) -> bool:
        add(relays.store, "late")
        return True

    receiver = Receiver({"e4": more})
    assert relays(receiver, limit=2).run(until_empty=True) == 6
    assert receiver.ids == ["e0", "e1", "e2", "e3", "e4", "late"]
    assert len({event.fence for event in receiver.got}) == 1, "it was never given back"
    assert lane_is_free(relays.store)


def test_it_reads_on_only_from_what_was_mended_while_it_was_being_sent(relays: Relays) -> None:
    add(relays.store, "a")
    add(relays.store, "b")

    def mend(sent: Event) -> bool:
        if sent.payload != "mended":
            assert relays.store.outbox.quarantine("a", "it chokes")
            relays.store.outbox.requeue("a", payload="mended", by="ann", reason="typo")
        return True

    receiver = Receiver({"a": mend})
    assert relays(receiver, limit=1).run(until_empty=True) == 3
    assert receiver.ids == ["a", "a", "b"]


def test_when_it_is_stopped_what_it_has_read_on_is_not_an_attempt(relays: Relays) -> None:
    add(relays.store, "a")
    add(relays.store, "b")
    receiver = Receiver()
    relay = relays(receiver, limit=1)
    receiver.answers = {"a": lambda _: relay.stop() or True}
    assert relay.run() == 1
    record = relays.store.outbox.get("b")
    assert record is not None
    assert record.attempts == 0
    assert lane_is_free(relays.store)


def test_a_lane_in_trouble_does_not_hold_up_the_others(relays: Relays, time: FakeTime) -> None:
    add(relays.store, "stuck", lane="a")
    receiver = Receiver({"stuck": no})
    relay = relays(receiver, lanes=["a", "b"], poll=1.0, retry=Retry(base=64, cap=64, jitter=False))
    time.at(3, lambda: add(relays.store, "fine", lane="b"))
    time.at(5, relay.stop)
    relay.run()
    assert receiver.ids == ["stuck", "fine"]


def test_a_lane_that_another_relay_holds_is_not_waited_for(relays: Relays) -> None:
    add(relays.store, "a")
    held = relays.store.locks.claim("outbox:default", "another", ttl=60)
    assert held is not None
    assert relays(Receiver()).run(until_empty=True) == 0
    relays.store.locks.release(held)
    assert relays(Receiver()).run(until_empty=True) == 1


def test_with_nothing_to_send_it_looks_again_after_a_while(relays: Relays, time: FakeTime) -> None:
    receiver = Receiver()
    relay = relays(receiver, poll=3.0)
    time.at(6, lambda: add(relays.store, "late"))
    time.at(9, relay.stop)
    assert relay.run() == 1
    assert time.waits == [3.0, 3.0, 3.0]
    assert receiver.ids == ["late"]


# --- waiting after failures -----------------------------------------------------------------------


def test_the_wait_after_failures_grows_up_to_its_cap_and_starts_again(relays: Relays, time: FakeTime) -> None:
    add(relays.store, "a")
    receiver = Receiver({"a": no})
    relay = relays(receiver, poll=0.5, retry=Retry(base=1, cap=8, jitter=False))

    def mended() -> None:
        receiver.answers.clear()

    def worse() -> None:
        receiver.answers["b"] = no
        add(relays.store, "b")

    time.at(23, mended)
    time.at(23.5, worse)
    time.at(26.5, relay.stop)
    relay.run()
    assert time.waits == [1, 2, 4, 8, 8, 0.5, 1, 2]


def test_the_wait_has_full_jitter(relays: Relays, time: FakeTime) -> None:
    add(relays.store, "a")
    relay = relays(Receiver({"a": no}), poll=99.0, retry=Retry(base=8, cap=8))
    time.at(300, relay.stop)  # about 75 waits: by chance all are on one side once in 10**22 runs
    relay.run()
    assert all(0 <= wait <= 8 for wait in time.waits)
    assert len(set(time.waits)) == len(time.waits) > 5
    assert max(time.waits) > 4 > min(time.waits)


def test_the_default_wait_is_capped_at_a_minute(store: Store, time: FakeTime) -> None:
    add(store, "a")
    relay = Relay(store, Receiver({"a": no}))
    time.at(1000, relay.stop)
    relay.run()
    assert all(wait <= 60 for wait in time.waits)
    assert any(wait > 5 for wait in time.waits)


# --- poison ---------------------------------------------------------------------------------------


def test_poison_blocks_its_lane_with_an_alert_each_time(relays: Relays) -> None:
    add(relays.store, "a", "poison", "b")
    receiver, seen = Receiver({"poison": no}), Seen()
    relay = relays(receiver, observe=seen)
    stop = stopping(relay, OSError("no"))
    receiver.answers["poison"] = lambda e: stop(e) if e.attempt == 3 else no()
    assert relay.run() == 1
    assert receiver.ids == ["a", "poison", "poison", "poison"]
    assert states(relays.store, "a", "poison", "b") == ["sent", "pending", "pending"]
    assert seen.names == ["relay.sent", *["relay.failed"] * 3]
    assert seen.of(Observed.FAILED)[-1] == {
        "lane": "default", "id": "poison", "attempt": 3, "error": "OSError: no",
    }  # fmt: skip
    receiver.answers.clear()
    relays(receiver).run(until_empty=True)
    assert receiver.ids[4:] == ["poison", "b"], "the order is kept"


def test_with_max_attempts_poison_is_set_aside_and_the_lane_goes_on(relays: Relays) -> None:
    add(relays.store, "a", "poison", "b")
    receiver, seen = Receiver({"poison": no}), Seen()
    assert relays(receiver, max_attempts=3, observe=seen).run(until_empty=True) == 2
    assert receiver.ids == ["a", "poison", "poison", "poison", "b"]
    assert [e.attempt for e in receiver.got] == [1, 1, 2, 3, 1]
    aside = event(relays.store, "poison")
    assert (aside.state, aside.attempts, aside.reason) == ("quarantined", 3, "attempts used up")
    assert aside.last_error == "OSError: no (attempt 3)"
    assert seen.of(Observed.QUARANTINED) == [
        {"lane": "default", "id": "poison", "attempt": 3, "error": "OSError: no"}
    ]
    assert relays.store.outbox.stats()["default"].quarantined == 1


def test_a_long_row_of_poison_does_not_look_like_an_empty_lane(relays: Relays) -> None:
    poison = [f"p{n}" for n in range(5)]
    add(relays.store, *poison, "good")
    receiver = Receiver(dict.fromkeys(poison, no))
    assert relays(receiver, max_attempts=1, limit=2).run(until_empty=True) == 1
    assert receiver.ids == [*poison, "good"]


def test_a_requeued_event_is_sent_at_its_old_place(relays: Relays) -> None:
    store = relays.store
    add(store, "a", "poison")
    receiver = Receiver({"poison": lambda e: e.payload == "mended"})
    relays(receiver, max_attempts=1).run(until_empty=True)
    add(store, "b")
    assert store.outbox.requeue("poison", payload="mended", by="ann", reason="typo") == 0
    relays(receiver, max_attempts=1).run(until_empty=True)
    assert receiver.ids == ["a", "poison", "poison", "b"]
    assert states(store, "poison", "b") == ["sent", "sent"]


def die_sending(store: Store, clock: Clock, times: int, **options: Any) -> None:
    """Relays that die while they send the first event, and never say so."""
    for _ in range(times):
        batch = Batch(store, "default", **options)
        batch.open()
        assert batch.next() is not None
        batch.copy()
        clock.now += 60


def test_an_event_that_kills_its_relay_is_set_aside_too(store: Store, clock: Clock) -> None:
    add(store, "killer", "b")
    die_sending(store, clock, 3)
    receiver, seen = Receiver(), Seen()
    relay = Relay(store, receiver, max_attempts=3, observe=seen)
    assert relay.run(until_empty=True) == 1
    assert receiver.ids == ["b"], "it has had its three attempts"
    aside = event(store, "killer")
    assert (aside.state, aside.attempts) == ("quarantined", 3)
    assert aside.last_error == "its relay died while sending it (attempt 3)"
    assert event(store, "b").attempts == 1
    assert [facts["attempt"] for facts in seen.of(Observed.QUARANTINED)] == [3]


def fail_sending(store: Store, id: str, times: int) -> None:
    for n in range(times):
        with pytest.raises(OSError, match="no"):
            dispatch(store, Receiver({id: OSError(f"no {n}")}))


@pytest.mark.parametrize("first", [True, False])
def test_attempts_used_up_before_there_was_a_limit_keep_their_last_error(store: Store, first: bool) -> None:
    """Its relay did not die: the reason that it gave is what a person needs."""
    if not first:
        add(store, "a")
        store.outbox.quarantine("a", "it comes back before the other")
    add(store, "choked", "b")
    fail_sending(store, "choked", 4)
    if not first:
        assert store.outbox.requeue("a", by="ann", reason="r") == 0
    receiver, seen = Receiver(), Seen()
    Relay(store, receiver, max_attempts=3, observe=seen).run(until_empty=True)
    assert receiver.ids == (["b"] if first else ["a", "b"])
    aside = event(store, "choked")
    assert (aside.state, aside.attempts, aside.reason) == ("quarantined", 4, "attempts used up")
    assert aside.last_error == "OSError: no 3 (attempt 4)"
    assert seen.of(Observed.QUARANTINED) == [
        {"lane": "default", "id": "choked", "attempt": 4, "error": "OSError: no 3"}
    ]


def test_an_error_of_an_earlier_attempt_does_not_hide_that_the_relay_died(store: Store, clock: Clock) -> None:
    add(store, "killer", "b")
    fail_sending(store, "killer", 2)
    die_sending(store, clock, 1)
    assert event(store, "killer").last_error == "OSError: no 1 (attempt 2)"
    Relay(store, Receiver(), max_attempts=3).run(until_empty=True)
    aside = event(store, "killer")
    assert (aside.state, aside.attempts) == ("quarantined", 3)
    assert aside.last_error == "its relay died while sending it (attempt 3)"


def test_the_longest_error_says_of_which_attempt_it_is(store: Store) -> None:
    add(store, "a")
    with pytest.raises(OSError, match="x"):
        dispatch(store, Receiver({"a": OSError("x" * 5000)}))
    kept = event(store, "a").last_error
    assert kept is not None
    assert len(kept) == 2000
    Relay(store, Receiver(), max_attempts=1).run(until_empty=True)
    assert event(store, "a").last_error == kept


def test_without_max_attempts_nothing_is_set_aside(store: Store, clock: Clock) -> None:
    add(store, "killer")
    die_sending(store, clock, 30)
    receiver = Receiver()
    assert Relay(store, receiver).run(until_empty=True) == 1
    assert [e.attempt for e in receiver.got] == [31]


class Ended(BaseException):
    """Like `SystemExit`: nothing to wait for and to try again."""


@pytest.mark.parametrize("mark_every", [1, 16])
def test_what_ends_the_process_ends_the_relay_and_leaves_the_lane_in_order(
    relays: Relays, mark_every: int
) -> None:
    add(relays.store, "a", "b", "c")
    end = Ended()
    receiver, seen = Receiver({"b": end}), Seen()
    with pytest.raises(Ended) as raised:
        relays(receiver, mark_every=mark_every, max_attempts=3, observe=seen).run()
    assert raised.value is end
    assert receiver.ids == ["a", "b"]
    assert states(relays.store, "a", "b", "c") == ["sent", "pending", "pending"]
    assert lane_is_free(relays.store)
    assert seen.names == ["relay.sent"]


# --- stopping -------------------------------------------------------------------------------------


def test_a_stop_lets_the_event_be_finished_and_marked(relays: Relays) -> None:
    add(relays.store, "a", "b", "c")
    receiver = Receiver()
    relay = relays(receiver)
    receiver.answers["b"] = stopping(relay)
    assert relay.run() == 2
    assert states(relays.store, "a", "b", "c") == ["sent", "sent", "pending"]
    assert lane_is_free(relays.store)
    assert relay.run() == 0, "it stays stopped"


def test_a_stop_costs_no_attempt(relays: Relays) -> None:
    """The next event's attempt was counted with the mark; with max_attempts=1 a stop would set it aside."""
    add(relays.store, "a", "b", "c")
    receiver = Receiver()
    for id in ("a", "b"):
        relay = relays(receiver, max_attempts=1)
        receiver.answers = {id: stopping(relay)}
        assert relay.run() == 1
    assert [event(relays.store, id).attempts for id in ("a", "b", "c")] == [1, 1, 0]
    assert relays(receiver, max_attempts=1).run(until_empty=True) == 1
    assert [(e.id, e.attempt) for e in receiver.got] == [("a", 1), ("b", 1), ("c", 1)]


def test_a_stop_after_a_failure_keeps_what_the_failure_says(relays: Relays) -> None:
    add(relays.store, "a", "b")
    receiver = Receiver()
    relay = relays(receiver)
    receiver.answers["a"] = stopping(relay, OSError("no"))
    relay.run()
    assert (event(relays.store, "a").attempts, event(relays.store, "a").last_error) == (
        1, "OSError: no (attempt 1)",
    )  # fmt: skip
    assert event(relays.store, "b").attempts == 0
    assert lane_is_free(relays.store)


def test_a_stop_ends_the_round(relays: Relays) -> None:
    add(relays.store, "a", lane="first")
    add(relays.store, "b", lane="second")
    receiver = Receiver()
    relay = relays(receiver, lanes=["first", "second"])
    receiver.answers["a"] = stopping(relay)
    assert relay.run() == 1
    assert receiver.ids == ["a"]
    assert lane_lock(relays.store, "second") is None, "it was not even looked at"


def test_a_relay_that_is_stopped_before_it_runs_does_nothing(relays: Relays) -> None:
    add(relays.store, "a")
    relay = relays(Receiver())
    relay.stop()
    assert relay.run() == 0


# --- marks that are gathered ----------------------------------------------------------------------


def marks(engine: Engine) -> list[str]:
    """The statements, from now on, that mark events."""
    said: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "UPDATE fenced_outbox SET state=" in statement:
            said.append(statement)

    listen.listen(engine, "before_cursor_execute", note)
    return said


@pytest.mark.parametrize(("mark_every", "expected"), [(1, 40), (16, 3), (100, 1)])
def test_marks_are_gathered(store: Store, engine: Engine, mark_every: int, expected: int) -> None:
    names = [f"e{n}" for n in range(40)]
    add(store, *names)
    said = marks(engine)
    receiver = Receiver()
    assert Relay(store, receiver, mark_every=mark_every).run(until_empty=True) == 40
    assert receiver.ids == names
    assert len(said) == expected
    assert states(store, *names) == ["sent"] * 40
    assert {event(store, id).attempts for id in names} == {1}, "each was sent once"


def test_what_is_gathered_is_marked_when_the_next_one_fails(relays: Relays) -> None:
    add(relays.store, "a", "b", "c", "d")
    receiver, seen = Receiver({"c": no}), Seen()
    relay = relays(receiver, mark_every=100, observe=seen)
    receiver.answers["c"] = stopping(relay, OSError("no"))
    assert relay.run() == 2
    assert states(relays.store, "a", "b", "c", "d") == ["sent", "sent", "pending", "pending"]
    assert [event(relays.store, id).attempts for id in ("a", "b", "c", "d")] == [1, 1, 1, 0]
    assert event(relays.store, "c").last_error == "OSError: no (attempt 1)"
    assert seen.names == ["relay.sent", "relay.sent", "relay.failed"]


def test_what_is_gathered_is_marked_at_a_stop(relays: Relays) -> None:
    add(relays.store, "a", "b", "c")
    receiver = Receiver()
    relay = relays(receiver, mark_every=100)
    receiver.answers["b"] = stopping(relay)
    assert relay.run() == 2
    assert states(relays.store, "a", "b", "c") == ["sent", "sent", "pending"]
    assert [event(relays.store, id).attempts for id in ("a", "b", "c")] == [1, 1, 0]
    assert lane_is_free(relays.store)


def test_a_crash_sends_again_what_was_gathered_and_loses_nothing(store: Store, clock: Clock) -> None:
    names = [f"e{n}" for n in range(30)]
    add(store, *names)
    batch = Batch(store, "default", mark_every=10)
    batch.open()
    for _ in range(9):
        batch.copy()
        batch.acknowledged()
    clock.now += 60
    receiver = Receiver()
    assert Relay(store, receiver, mark_every=10).run(until_empty=True) == 30
    assert receiver.ids == names


def test_a_crash_amid_gathered_events_is_held_against_the_one_to_blame(store: Store, clock: Clock) -> None:
    """Only the first of a group is counted beforehand. After a crash they go one by one."""
    add(store, "a", "b", "killer", "c")
    crashes = 0

    class Killed(BaseException):
        pass

    def send(sent: Event) -> bool:
        if sent.id == "killer":
            raise Killed
        got.append(sent.id)
        return True

    def crash() -> None:
        """As far as a relay comes that dies at the killer: without any cleaning up."""
        batch = Batch(store, "default", mark_every=100, max_attempts=2)
        batch.open()
        while batch.next() is not None:
            send(batch.copy())
            batch.acknowledged()

    got: list[str] = []
    for _ in range(9):
        try:
            crash()
            break
        except Killed:
            crashes += 1
            clock.now += 60
    assert states(store, "a", "b", "killer", "c") == ["sent", "sent", "quarantined", "sent"]
    assert got == ["a", "b", "a", "b", "c"]
    assert crashes == 3, "one for the group, and two attempts of its own"


def test_gathered_events_do_not_outlive_the_lease(relays: Relays, time: FakeTime, clock: Clock) -> None:
    """A hundred sends of a second each are longer than a lease of 60 seconds."""
    names = [f"e{n}" for n in range(100)]
    add(relays.store, *names)

    def slow(_: Event) -> bool:
        clock.now += 1
        time.now += 1
        assert not relays.store.locks.claim("outbox:default", "another", ttl=1), "the lane is free to take"
        return True

    receiver = Receiver(dict.fromkeys(names, slow))
    assert relays(receiver, mark_every=100, ttl=60).run(until_empty=True) == 100
    assert {e.fence for e in receiver.got} == {1}


def test_marks_come_early_enough_for_a_slow_sender(store: Store, time: FakeTime, clock: Clock) -> None:
    """A send that may take 50 of 60 seconds must not begin when 11 are over."""
    names = [f"e{n}" for n in range(20)]
    add(store, *names)

    class Slow(Receiver):
        timeout = 50.0

    def answer(sent: Event) -> bool:
        took = 49 if sent.id in ("e7", "e15") else 4
        clock.now += took
        time.now += took
        return True

    receiver = Slow(dict.fromkeys(names, answer))
    assert Relay(store, receiver, mark_every=100, ttl=60).run(until_empty=True) == 20
    assert {e.fence for e in receiver.got} == {1}


# --- trouble with the database --------------------------------------------------------------------


def test_it_outlives_trouble_with_the_database(store: Store, engine: Engine, time: FakeTime) -> None:
    add(store, "a", "b")
    seen, away = Seen(), {"the database"}

    def refuse(*_: Any) -> None:
        if away:
            raise OperationalError("SELECT", {}, OSError("the database is away"))

    listen.listen(engine, "before_cursor_execute", refuse)
    receiver = Receiver()
    relay = Relay(store, receiver, retry=Retry(base=1, cap=8, jitter=False), poll=1.0, observe=seen)
    time.at(15, away.clear)
    time.at(16, relay.stop)
    assert relay.run() == 2
    assert time.waits == [1, 2, 4, 8, 1]
    assert seen.names == [*["relay.trouble"] * 4, "relay.sent", "relay.sent"]
    assert "the database is away" in seen.all[0][1]["error"]
    assert seen.all[0][1]["lane"] == "default"


def test_a_lost_lane_is_observed_and_tried_again(store: Store, clock: Clock) -> None:
    add(store, "a")

    class Patient(Seen):
        def __call__(self, what: Observed, /, **facts: Any) -> None:
            super().__call__(what, **facts)
            clock.now += 5

    seen = Patient()

    def slow(sent: Event) -> bool:
        if sent.attempt == 1:
            clock.now += 60
            store.locks.claim("outbox:default", "another", ttl=5)
        return True

    receiver = Receiver({"a": slow})
    relay = Relay(store, receiver, owner="me", retry=Retry(base=0), poll=0.0, observe=seen)
    assert relay.run(until_empty=True) == 1
    assert seen.names == ["relay.lane_lost", "relay.sent"]
    assert seen.all[0][1] == {"lane": "default", "owner": "me", "fence": 1}
    assert [(e.fence, e.attempt) for e in receiver.got] == [(1, 1), (3, 2)]


# --- what it is told ------------------------------------------------------------------------------


class Slow:
    def __init__(self, timeout: Any) -> None:
        self.timeout = timeout

    def __call__(self, event: Event) -> bool:
        return True


@pytest.mark.parametrize("timeout", [60, 60.0, 61, float("inf"), float("nan")])
def test_a_sender_that_may_outlast_the_lease_is_refused(store: Store, timeout: float) -> None:
    add(store, "a")
    with pytest.raises(InvalidValue, match="ttl") as refused:
        Relay(store, Slow(timeout), ttl=60)
    assert refused.value.field == "ttl"
    with pytest.raises(InvalidValue, match="ttl"):
        dispatch(store, Slow(timeout), ttl=60)
    assert event(store, "a").attempts == 0


@pytest.mark.parametrize("timeout", [59.9, 10, None, "of its own kind"])
def test_a_sender_that_is_quick_enough_or_says_nothing_is_taken(store: Store, timeout: Any) -> None:
    add(store, "a")
    assert dispatch(store, Slow(timeout), ttl=60) == 1


@pytest.mark.parametrize("options", [
    *({"lanes": bad} for bad in ("default", "", [], [""], ["x" * 256], [7])),
    *({"limit": bad} for bad in (0, 17, "1", True)),
    *({"mark_every": bad} for bad in (0, 101, 1.5, True, {"max_attempts": 1})),
    *({"max_attempts": bad} for bad in (0, -1, True, "1")),
    *({"ttl": bad} for bad in (0, -1, float("nan"), "60")),
    *({"poll": bad} for bad in (-1, float("nan"), "1")),
    {"owner": ""},
])  # fmt: skip
def test_bad_options_are_refused_when_it_is_made(store: Store, options: dict[str, Any]) -> None:
    (field,) = options
    if options == {"mark_every": {"max_attempts": 1}}:
        options = {"mark_every": 2, "max_attempts": 1}
    with pytest.raises(InvalidValue) as refused:
        Relay(store, Slow(None), **options)
    assert refused.value.field == field


def test_what_is_sent_is_observed(relays: Relays) -> None:
    add(relays.store, "a", lane="l", now=T)
    seen = Seen()
    relays(Receiver(), lanes=["l"], observe=seen).run(until_empty=True)
    assert seen.all == [("relay.sent", {"lane": "l", "id": "a", "attempt": 1, "fence": 1})]
