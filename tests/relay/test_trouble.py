"""The line to the database is cut: at a COMMIT, whose outcome is unknown then, and for a while. FAULTS 54."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy import event as listen
from sqlalchemy.ext.asyncio import create_async_engine

from fencedjobs import AsyncStore, OutcomeUnknown, Store
from fencedjobs.aio_relay import AsyncRelay
from fencedjobs.metrics import Observed
from fencedjobs.relay import Relay, dispatch
from fencedjobs.retry import Retry
from tests.databases import ASYNC_DRIVERS, Database
from tests.outbox.helpers import ORDERS, SERVERS, add, event, host_table, order, rows, states
from tests.proxy import Cut, Proxy, proxy
from tests.relay.helpers import Clock, Receiver, Seen, lane_is_free
from tests.senders.proxy import Proxy as Switch

ON_SERVERS = pytest.mark.parametrize("database", SERVERS, indirect=True)
CUTS = pytest.mark.parametrize("cut", [Cut.REQUEST, Cut.ANSWER], ids=["never sent", "answer lost"])


class Line:
    """A store whose line is cut at the ``nth`` COMMIT from when it is told so."""

    def __init__(self, engine: Engine, clock: Clock, between: Proxy) -> None:
        self.store = Store(engine, clock=clock)
        self._between = between
        self._cut: tuple[Cut, int] | None = None
        listen.listen(engine, "commit", self._on_commit)

    def cut_at(self, cut: Cut, nth: int = 1) -> None:
        self._cut = (cut, nth)

    def _on_commit(self, _: Any) -> None:
        if self._cut is not None:
            cut, nth = self._cut
            self._cut = (cut, nth - 1) if nth > 1 else None
            if nth == 1:
                self._between.arm(cut)


def through(url: URL, port: int) -> URL:
    return url.set(host="127.0.0.1", port=port)


@pytest.fixture
def line(url: URL, clock: Clock) -> Iterator[Line]:
    with proxy(str(url.host), int(url.port or 0)) as between:
        engine = create_engine(through(url, between.port))
        yield Line(engine, clock, between)
        engine.dispose()


# --- COMMITs whose outcome is unknown -------------------------------------------------------------


@CUTS
@ON_SERVERS
def test_adding_again_finds_out_whether_the_event_was_added(line: Line, store: Store, cut: Cut) -> None:
    line.store.outbox.pending()  # the first use checks the tables, in a transaction of its own
    line.cut_at(cut)
    with pytest.raises(OutcomeUnknown) as unknown:
        line.store.outbox.add("e", {"qty": 7}, topic="t")
    assert unknown.value.subject == "e"
    there = store.outbox.get("e") is not None
    assert there is (cut is Cut.ANSWER)
    assert line.store.outbox.add("e", {"qty": 7}, topic="t") == (None if there else "e")
    assert store.outbox.stats()["default"].pending == 1


@CUTS
@ON_SERVERS
def test_delivering_again_finds_out_whether_the_effect_is_there(
    line: Line, store: Store, engine: Engine, cut: Cut
) -> None:
    def receive() -> bool:
        with line.store.begin() as uow:
            if new := uow.inbox.accept("m", {"qty": 7}):
                order(uow.session, "m")
        return new

    with host_table(engine):
        line.store.inbox.stats()
        line.cut_at(cut)
        with pytest.raises(OutcomeUnknown):
            receive()
        there = rows(engine, ORDERS) != []
        assert there is (cut is Cut.ANSWER)
        assert receive() is not there
        assert rows(engine, ORDERS) == [("m", 7)], "the effect is there once"


@CUTS
@ON_SERVERS
def test_the_mark_is_made_good_by_the_same_relay(line: Line, store: Store, cut: Cut) -> None:
    """The acknowledgement is still known here, and marking twice is marking once."""
    add(store, "a", "b")
    receiver = Receiver()
    line.store.outbox.pending()
    line.cut_at(cut, nth=2)
    with pytest.raises(OutcomeUnknown) as unknown:
        dispatch(line.store, receiver)
    assert unknown.value.subject.id == "outbox:default"
    assert states(store, "a", "b") == ["sent", "pending"]
    assert [event(store, id).attempts for id in ("a", "b")] == [1, 0]
    assert lane_is_free(store)
    assert dispatch(line.store, receiver) == 1
    assert receiver.ids == ["a", "b"], "neither lost nor sent again"


@CUTS
@ON_SERVERS
def test_a_lane_that_was_perhaps_taken_is_free_after_its_lease(
    line: Line, store: Store, clock: Clock, cut: Cut
) -> None:
    add(store, "a")
    line.store.outbox.pending()
    line.cut_at(cut)
    with pytest.raises(OutcomeUnknown):
        dispatch(line.store, Receiver(), ttl=60)
    taken = cut is Cut.ANSWER
    assert lane_is_free(store) is not taken
    receiver = Receiver()
    assert dispatch(store, receiver) == (0 if taken else 1)
    clock.now += 60
    assert dispatch(store, receiver) == (1 if taken else 0)
    assert receiver.ids == ["a"]


@CUTS
@ON_SERVERS
def test_a_lane_that_was_perhaps_given_back_has_its_events_sent(line: Line, store: Store, cut: Cut) -> None:
    add(store, "a")
    line.store.outbox.pending()
    line.cut_at(cut, nth=3)
    with pytest.raises(OutcomeUnknown):
        dispatch(line.store, Receiver())
    assert states(store, "a") == ["sent"]


@ON_SERVERS
def test_a_relay_lives_through_lost_commits(line: Line, store: Store, clock: Clock) -> None:
    names = [f"e{n}" for n in range(12)]
    add(store, *names)
    commits = 0

    def bad_line(_: Any) -> None:
        nonlocal commits
        commits += 1
        clock.now += 60  # what was left held is free again
        if commits % 5 == 0:
            line.cut_at((Cut.REQUEST, Cut.ANSWER)[commits % 2])

    listen.listen(line.store.transactions.engine, "commit", bad_line, insert=True)
    receiver, seen = Receiver(), Seen()
    Relay(line.store, receiver, retry=Retry(base=0), poll=0.0, observe=seen).run(until_empty=True)
    assert states(store, *names) == ["sent"] * 12
    assert receiver.ids == names, "each once: no process died"
    assert seen.of(Observed.TROUBLE)


# --- away for a while -----------------------------------------------------------------------------


class Story(Seen):
    """An observer that says when something has been seen."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()

    def __call__(self, what: Observed, /, **facts: Any) -> None:
        with self._news:
            super().__call__(what, **facts)
            self._news.notify_all()

    def awaits(self, enough: Callable[[Story], bool]) -> None:
        with self._news:
            assert self._news.wait_for(lambda: enough(self), timeout=30), self.all


IMPATIENT: dict[str, Any] = {"ttl": 1, "poll": 0.05, "retry": Retry(base=0.02, cap=0.1)}


def outage(switch: Switch, store: Store, story: Story, receiver: Receiver) -> None:
    """An event is sent; the database goes away; it comes back; the next event is sent within the lease."""
    story.awaits(lambda story: "relay.sent" in story.names)
    switch.down()
    story.awaits(lambda story: story.names.count("relay.trouble") >= 2)
    add(store, "late")
    assert receiver.ids == ["early"]
    switch.up()
    story.awaits(lambda story: story.names.count("relay.sent") == 2)


@ON_SERVERS
def test_it_outlives_a_database_that_is_away(url: URL, store: Store) -> None:
    add(store, "early")
    story, receiver = Story(), Receiver()
    with Switch(str(url.host), int(url.port or 0)) as switch:
        engine = create_engine(through(url, switch.port))
        relay = Relay(Store(engine), receiver, observe=story, **IMPATIENT)
        running = threading.Thread(target=relay.run)
        running.start()
        try:
            outage(switch, store, story, receiver)
        finally:
            relay.stop()
            running.join()
        engine.dispose()
    assert receiver.ids == ["early", "late"]
    assert states(store, "early", "late") == ["sent", "sent"]


@pytest.mark.parametrize(
    ("database", "driver"),
    [(backend, driver) for driver, (backend, _) in ASYNC_DRIVERS.items() if backend in SERVERS],
    indirect=["database"],
    ids=[driver for driver, (backend, _) in ASYNC_DRIVERS.items() if backend in SERVERS],
)
def test_the_async_form_does_so_too(database: Database, driver: str, store: Store) -> None:
    add(store, "early")
    story, receiver = Story(), Receiver()
    url = database.async_url(driver)

    async def send(sent: Any) -> Any:
        return receiver(sent)

    async def run(switch: Switch) -> None:
        engine = create_async_engine(through(url, switch.port))
        relay = AsyncRelay(AsyncStore(engine), send, observe=story, **IMPATIENT)
        running = asyncio.create_task(relay.run())
        try:
            await asyncio.to_thread(outage, switch, store, story, receiver)
        finally:
            relay.stop()
            await running
            await engine.dispose()

    with Switch(str(url.host), int(url.port or 0)) as switch:
        asyncio.run(run(switch))
    assert receiver.ids == ["early", "late"]
    assert states(store, "early", "late") == ["sent", "sent"]
