"""outbox, inbox and their part of status: what an operator sees and decides."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from sqlalchemy import URL, Engine

from fencedjobs import InboxConflict, Store
from fencedjobs.relay import dispatch
from fencedjobs.values import EventState
from tests.cli.helpers import EACH_DATABASE, ISO, run


@pytest.fixture
def store(engine: Engine) -> Store:
    return Store(engine)


def add(store: Store, *names: str, lane: str = "default", payload: Any = None) -> None:
    for name in names:
        store.outbox.add(name, payload or {"qty": 7}, topic="warehouse", lane=lane, headers={"trace": "1"})


def refuse(event: object) -> bool:
    raise ValueError("no such shelf")


def fail(store: Store, lane: str = "default") -> None:
    with pytest.raises(ValueError, match="no such shelf"):
        dispatch(store, refuse, lane=lane)


# --- status ---------------------------------------------------------------------------------------


@EACH_DATABASE
def test_status_shows_lanes_and_inbox_when_there_are_any(store: Store, url: URL) -> None:
    assert run("status", url=url).out == "No jobs.\n"
    nothing = run("status", "--json", url=url).json()
    assert (nothing["lanes"], nothing["inbox"]) == ([], {"messages": 0, "duplicates": 0, "conflicts": 0})

    add(store, "order-1", "order-2", "order-3")
    assert dispatch(store, lambda event: True, limit=1) == 1
    fail(store)
    add(store, "mail-1", lane="mail")
    store.outbox.quarantine("mail-1", "bad address")
    assert store.inbox.accept("m-1", 1)
    assert not store.inbox.accept("m-1", 1)
    with pytest.raises(InboxConflict):
        store.inbox.accept("m-1", 2)

    facts = run("status", "--json", url=url).json()
    default, mail = facts["lanes"]
    assert 0 <= default.pop("oldest_seconds") < 60
    assert default == {"lane": "default", "pending": 2, "attempts": 1, "sent": 1, "quarantined": 0}
    assert mail == {
        "lane": "mail", "pending": 0, "oldest_seconds": None, "attempts": 0, "sent": 0, "quarantined": 1
    }  # fmt: skip
    assert facts["inbox"] == {"messages": 1, "duplicates": 1, "conflicts": 1}
    text = run("status", url=url).out
    assert re.search(r"^default +2  .+ 1 +1 +0$", text, re.MULTILINE)
    assert re.search(r"^mail +0  - +0 +0 +1$", text, re.MULTILINE)
    assert "\nOutbox:\nlane " in text
    assert "\nInbox:\nmessages  duplicates  conflicts\n       1           1          1\n" in text


# --- looking --------------------------------------------------------------------------------------


@EACH_DATABASE
def test_list_is_newest_first_and_what_is_pending_in_the_order_of_its_lane(store: Store, url: URL) -> None:
    assert run("outbox", "list", url=url).out == "No events.\n"
    add(store, "z", "a", "b")
    add(store, "m", lane="mail")
    assert dispatch(store, lambda event: True, limit=1) == 1
    fail(store)

    def ids(*options: str) -> list[str]:
        return [event["id"] for event in run("outbox", "list", "--json", *options, url=url).json()]

    assert ids() == ["m", "b", "a", "z"]
    assert ids("--state", "pending", "--lane", "default") == ["a", "b"]
    assert ids("--state", "sent") == ["z"]
    assert ids("--lane", "mail") == ["m"]
    assert ids("--lane", "nothing") == []
    z = run("outbox", "list", "--json", "--state", "sent", url=url).json()[0]
    assert ISO.fullmatch(z["sent_at"])
    assert "no such shelf" in run("outbox", "list", url=url).out


@pytest.mark.parametrize(("state", "which"), [([], "newest"), (["--state", "pending"], "first")])
def test_list_says_when_there_is_more(store: Store, url: URL, state: list[str], which: str) -> None:
    add(store, "1", "2", "3")
    cut = run("outbox", "list", "--limit", "2", *state, url=url)
    assert cut.err == f"There are more; these are the {which} 2 (--limit).\n"
    assert run("outbox", "list", "--limit", "3", *state, url=url).err == ""


def test_show_tells_everything(store: Store, url: URL) -> None:
    add(store, "order-1")
    fail(store)
    store.outbox.quarantine("order-1", "bad address")
    store.outbox.requeue("order-1", payload={"qty": 8}, by="ann", reason="mended")

    facts = run("outbox", "show", "order-1", "--json", url=url).json()
    assert (facts["id"], facts["lane"], facts["topic"]) == ("order-1", "default", "warehouse")
    assert (facts["state"], facts["payload"], facts["headers"]) == ("pending", {"qty": 8}, {"trace": "1"})
    assert ISO.fullmatch(facts["created_at"])
    (requeue,) = facts["requeues"]
    assert (requeue["by"], requeue["reason"], requeue["mended"]) == ("ann", "mended", True)
    text = run("outbox", "show", "order-1", url=url).out
    for word in ('{"qty": 8}', '{"trace": "1"}', "ann", "mended", requeue["time"]):
        assert word in text


def test_show_of_a_missing_event_is_1(url: URL) -> None:
    answer = run("outbox", "show", "order-1", url=url)
    assert (answer.code, answer.out, answer.err) == (1, "", "Error: there is no event 'order-1'\n")
    assert run("outbox", "show", "x" * 256, url=url).code == 2


def test_what_is_printed_cannot_steer_the_terminal(store: Store, url: URL) -> None:
    name = "a\x1b[31m\x9b"
    store.outbox.add(name, "\x1b]0;title\x07", topic="t\u202e", lane="l\x1b[2J", headers={"x": "\x1b[1m"})
    store.outbox.quarantine(name, "why\x1b[5m\r")
    for command in (["status"], ["outbox", "list"], ["outbox", "show", name], ["outbox", "requeue", name]):
        printed = run(*command, url=url).out
        assert printed
        assert not {c for c in printed if not (c.isprintable() or c == "\n")}


# --- deciding -------------------------------------------------------------------------------------


def test_quarantine_and_requeue_keep_reason_person_and_place(store: Store, url: URL) -> None:
    add(store, "order-1", "order-2", "order-3")
    set_aside = run("outbox", "quarantine", "order-1", "order-3", "--reason", "bad address", url=url)
    assert (set_aside.code, set_aside.out) == (0, "order-1: quarantined\norder-3: quarantined\n")
    event = store.outbox.get("order-1")
    assert event
    assert (event.state, event.reason) == (EventState.QUARANTINED, "bad address")

    mended = run("outbox", "requeue", "order-1", "--by", "ann", "--payload", '{"qty": 8}', url=url)
    assert (mended.code, mended.out) == (0, "order-1: requeued, first in its lane\n")
    event = store.outbox.get("order-1")
    assert event
    assert (event.state, event.payload) == (EventState.PENDING, {"qty": 8})
    assert (event.requeues[-1].by, event.requeues[-1].reason) == ("ann", "by hand")

    behind = run("outbox", "requeue", "order-3", "--json", url=url)
    assert behind.json() == [{"id": "order-3", "changed": True, "ahead": 2, "state": "pending"}]
    assert [event.id for event in store.outbox.pending()] == ["order-1", "order-2", "order-3"]


def test_requeue_says_how_many_are_ahead(store: Store, url: URL) -> None:
    add(store, "order-1", "order-2", "order-3")
    store.outbox.quarantine("order-3", "bad address")
    assert (
        run("outbox", "requeue", "order-3", url=url).out
        == "order-3: requeued, behind 2 pending ones in its lane\n"
    )


@pytest.mark.parametrize("verb", ["quarantine", "requeue"])
def test_what_is_refused_is_said_for_each(store: Store, url: URL, verb: str) -> None:
    add(store, "sent", "other")
    assert dispatch(store, lambda event: True, limit=1) == 1
    if verb == "requeue":
        store.outbox.quarantine("other", "bad address")
    answer = run("outbox", verb, "sent", "missing", "other", "sent", url=url)
    assert (answer.code, answer.out.partition(",")[0].strip()) == (1, f"other: {verb.removesuffix('e')}ed")
    assert answer.err == f"sent: not {verb}d, it is sent\nmissing: there is no such event\n"


@pytest.mark.parametrize("text", ["{", "NaN", '"\\ud800"'])
def test_a_mended_payload_must_be_json(store: Store, url: URL, text: str) -> None:
    add(store, "order-1")
    store.outbox.quarantine("order-1", "bad address")
    answer = run("outbox", "requeue", "order-1", "--payload", text, url=url)
    assert (answer.code, "payload" in answer.err) == (2, True)
    assert run("outbox", "requeue", "order-1", "order-2", "--payload", "1", url=url).code == 2
    event = store.outbox.get("order-1")
    assert event
    assert event.state is EventState.QUARANTINED


# --- forgetting -----------------------------------------------------------------------------------


@EACH_DATABASE
def test_outbox_purge_deletes_what_was_sent_before_and_nothing_else(store: Store, url: URL) -> None:
    add(store, "sent", "pending", "aside")
    assert dispatch(store, lambda event: True, limit=1) == 1
    store.outbox.quarantine("aside", "bad address")
    assert run("outbox", "purge", "--before", "2020-01-01T00:00:00Z", url=url).out == "0 events deleted\n"
    purged = run("outbox", "purge", "--before", "4e9", "--json", url=url)
    assert (purged.code, purged.json()) == (0, {"purged": 1})
    assert [store.outbox.get(name) is None for name in ("sent", "pending", "aside")] == [True, False, False]


def test_purges_go_on_until_nothing_is_left(store: Store, url: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fencedjobs.cli.outbox._BATCH", 2)
    monkeypatch.setattr("fencedjobs.cli.inbox._BATCH", 2)
    add(store, *map(str, range(5)))
    assert dispatch(store, lambda event: True) == 5
    assert run("outbox", "purge", "--before", "4e9", url=url).out == "5 events deleted\n"
    for number in range(5):
        store.inbox.accept(str(number), 1)
    assert run("inbox", "purge", "--older-than", "0s", url=url).out == "5 messages forgotten\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("soon", "neither seconds nor an ISO 8601 time"),
        ("2030-01-01T00:00:00", "has no time zone"),
        ("nan", "must be finite"),
        ("", "neither seconds nor"),
    ],
)
def test_outbox_purge_needs_an_instant(url: URL, text: str, words: str) -> None:
    answer = run("outbox", "purge", "--before", text, url=url)
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.err
    assert run("outbox", "purge", url=url).code == 2


@EACH_DATABASE
def test_inbox_stats_and_purge(store: Store, url: URL) -> None:
    store.inbox.accept("old", 1, now=1000.0)
    store.inbox.accept("new", 1)
    store.inbox.accept("new", 1)
    assert run("inbox", "stats", "--json", url=url).json() == {"messages": 2, "duplicates": 1, "conflicts": 0}
    assert run("inbox", "stats", url=url).out == (
        "messages  duplicates  conflicts\n       2           1          0\n"
    )
    assert run("inbox", "purge", "--older-than", "12h", url=url).out == "1 messages forgotten\n"
    assert run("inbox", "purge", "--older-than", "1d", "--json", url=url).json() == {"purged": 0}
    assert not store.inbox.accept("new", 1)


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1w", "1 day", "1d 2h", "9" * 400 + "d", "nan"])
def test_inbox_purge_needs_a_length_of_time(url: URL, text: str) -> None:
    answer = run("inbox", "purge", "--older-than", text, url=url)
    assert (answer.code, "such as 90s, 45min, 12h or 30d" in answer.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5 min", 90), ("12h", 43200), ("30d", 2592000)]
)
def test_lengths_of_time_have_units(store: Store, url: URL, text: str, seconds: float) -> None:
    now = time.time()
    store.inbox.accept("older", 1, now=now - seconds - 30)
    store.inbox.accept("younger", 1, now=now - seconds + 30)
    assert run("inbox", "purge", "--older-than", text, url=url).out == "1 messages forgotten\n"
    assert not store.inbox.accept("younger", 1)
