"""Against a real NATS server with JetStream: the ack is the stream's."""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest
from nats.js.api import DiscardPolicy, RawStreamMsg, RetentionPolicy, StreamConfig
from sqlalchemy import Engine

from fencedjobs import Event, InvalidValue, NotAcknowledged
from fencedjobs.relay import dispatch
from fencedjobs.senders.nats import AsyncJetStreamSender, JetStreamSender
from tests.senders.helpers import (
    EVENT,
    GRACE,
    async_refusal,
    at_most,
    event,
    left_pending,
    refusal,
    with_event,
)
from tests.senders.proxy import Proxy

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
TIMEOUT = 0.5


class Stream:
    """A stream of this test alone, on the subjects ``<name>.>``."""

    def __init__(self, url: str, name: str, run: Callable[[Any], Any]) -> None:
        self.url, self.name, self._run = url, name, run
        self.subject = name + ".{topic}"

    def make(self, **config: Any) -> None:
        wanted = StreamConfig(name=self.name, subjects=[f"{self.name}.>"], **config)
        self._run(self._with(lambda js: js.add_stream(wanted)))

    def delete(self) -> None:
        self._run(self._with(lambda js: js.delete_stream(self.name)))

    def forget(self, seq: int) -> None:
        self._run(self._with(lambda js: js.delete_msg(self.name, seq)))

    def count(self) -> int:
        async def read(js: Any) -> int:
            return int((await js.stream_info(self.name)).state.messages)

        return self._run(self._with(read))  # type: ignore[no-any-return]

    def messages(self) -> list[RawStreamMsg]:
        async def read(js: Any) -> list[RawStreamMsg]:
            state = (await js.stream_info(self.name)).state
            return [await js.get_msg(self.name, seq) for seq in range(1, state.last_seq + 1)]

        return self._run(self._with(read))  # type: ignore[no-any-return]

    async def _with(self, act: Callable[[Any], Any]) -> Any:
        async with await nats.connect(self.url) as client:
            return await act(client.jetstream())


@pytest.fixture
def stream(nats_url: str, name: str, runner: Callable[[Any], Any]) -> Iterator[Stream]:
    stream = Stream(nats_url, name, runner)
    stream.make()
    yield stream
    stream.delete()


@pytest.fixture
def proxy(nats_url: str) -> Iterator[Proxy]:
    parts = urlsplit(nats_url)
    with Proxy(parts.hostname or "", parts.port or 4222) as proxy:
        yield proxy


@pytest.fixture
def send(stream: Stream, proxy: Proxy) -> Iterator[JetStreamSender]:
    url = f"nats://127.0.0.1:{proxy.port}"
    with JetStreamSender(url, subject=stream.subject, timeout=TIMEOUT) as sender:
        yield sender


def test_the_stream_has_the_payload_and_who_sent_it(stream: Stream) -> None:
    with JetStreamSender(stream.url, subject=stream.subject, stream=stream.name) as send:
        assert send(EVENT) is True
    (message,) = stream.messages()
    assert message.subject == f"{stream.name}.warehouse"
    assert json.loads(message.data or b"") == {"qty": 7, "name": "Tür"}
    expected = {
        "Nats-Msg-Id": "order-7",
        "Nats-Expected-Stream": stream.name,
        "Fenced-Seq": "3",
        "Fenced-Fence": "2",
        "Fenced-Topic": "warehouse",
        "Fenced-Lane": "default",
        "Fenced-Created": "1700000000.25",
        "traceparent": "00-ab-cd-01",
    }
    assert message.headers == expected


@on_sqlite
def test_dispatch_marks_what_the_stream_acknowledged(engine: Engine, stream: Stream) -> None:
    store = with_event(engine)
    with JetStreamSender(stream.url, subject=stream.subject) as send:
        assert dispatch(store, send) == 1
    assert store.outbox.pending() == []


def test_what_is_sent_again_is_stored_once(stream: Stream) -> None:
    with JetStreamSender(stream.url, subject=stream.subject) as send:
        assert [send(EVENT), send(EVENT)] == [True, True]
    with JetStreamSender(stream.url, subject=stream.subject) as another:
        assert another(event(fence=9)) is True
    assert len(stream.messages()) == 1


@on_sqlite
def test_a_mended_event_that_the_stream_drops_is_no_ack(engine: Engine, stream: Stream) -> None:
    """The stream has the former payload under this id, and calls the mended one a duplicate of it."""
    store = with_event(engine)

    def answer_lost(sent: Event) -> None:
        assert send(sent) is True

    with JetStreamSender(stream.url, subject=stream.subject) as send:
        with pytest.raises(NotAcknowledged):
            dispatch(store, answer_lost)
        store.outbox.quarantine("order-7", "wrong quantity")
        store.outbox.requeue("order-7", payload={"qty": 8}, by="ann", reason="mended")
        assert "has another payload under this id, as its message 1" in left_pending(store, send)
    assert [json.loads(message.data or b"") for message in stream.messages()] == [{"qty": 7}]


def test_a_repetition_of_what_is_gone_from_the_stream_is_an_ack(stream: Stream) -> None:
    with JetStreamSender(stream.url, subject=stream.subject) as send:
        assert send(EVENT) is True
        stream.forget(1)
        assert send(EVENT) is True
    assert stream.count() == 0


@on_sqlite
def test_without_a_stream_there_is_no_ack(engine: Engine, nats_url: str, name: str) -> None:
    with JetStreamSender(nats_url, subject=name, timeout=TIMEOUT) as send:
        assert f"no stream has the subject '{name}'" in left_pending(with_event(engine), send).replace(
            "\\", ""
        )


@pytest.mark.parametrize(
    ("size", "reason"),
    [(1024 * 1024 - 2, "maximum payload violation"), (1024 * 1024, "maximum payload exceeded")],
)
def test_more_than_the_server_takes_is_no_ack(stream: Stream, size: int, reason: str) -> None:
    """The first fits without its headers, and the server ends the connection; the second never leaves."""
    with JetStreamSender(stream.url, subject=stream.subject) as send, at_most(GRACE):
        assert reason in refusal(send, event(payload="x" * size)).lower()
        assert send(EVENT) is True
    assert len(stream.messages()) == 1


@on_sqlite
def test_another_stream_than_the_named_one_is_no_ack(engine: Engine, stream: Stream) -> None:
    with JetStreamSender(stream.url, subject=stream.subject, stream="other", timeout=TIMEOUT) as send:
        assert "expected stream does not match" in left_pending(with_event(engine), send)
    assert stream.messages() == []


def test_a_stream_that_is_full_refuses(nats_url: str, name: str, runner: Callable[[Any], Any]) -> None:
    stream = Stream(nats_url, name, runner)
    stream.make(max_msgs=1, discard=DiscardPolicy.NEW, retention=RetentionPolicy.LIMITS)
    try:
        with JetStreamSender(nats_url, subject=stream.subject) as send:
            assert send(EVENT) is True
            assert "maximum messages exceeded" in refusal(send, event(id="order-8"))
    finally:
        stream.delete()


async def test_an_answer_that_is_no_ack_of_a_stream_is_none(nats_url: str, name: str) -> None:
    """Anybody may subscribe to the subject and answer."""
    for answer in (
        b"",
        b"+OK",
        b"{}",
        b"[]",
        b'"ok"',
        b'{"stream": "", "seq": 1}',
        b'{"stream": "a", "seq": 0}',
    ):
        async with _answering(nats_url, name, answer), AsyncJetStreamSender(nats_url, subject=name) as send:
            with pytest.raises(NotAcknowledged):
                await send(EVENT)


async def test_nobody_answering_ends_at_the_deadline(nats_url: str, name: str) -> None:
    async with (
        _answering(nats_url, name, None),
        AsyncJetStreamSender(nats_url, subject=name, timeout=TIMEOUT) as send,
    ):
        with at_most(TIMEOUT + GRACE), pytest.raises(NotAcknowledged, match="no acknowledgement within"):
            await send(EVENT)


@on_sqlite
def test_a_server_that_is_gone_leaves_the_event_pending_and_gets_it_when_it_is_back(
    engine: Engine, stream: Stream, proxy: Proxy, send: JetStreamSender
) -> None:
    store = with_event(engine)
    assert send(event(id="before")) is True
    proxy.down()
    with at_most(TIMEOUT + GRACE):
        left_pending(store, send)
    with at_most(TIMEOUT + GRACE):
        assert "no server can be reached: ConnectionRefusedError" in left_pending(store, send)
    proxy.up()
    assert dispatch(store, send) == 1
    assert len(stream.messages()) == 2


def test_a_connection_that_died_while_idle_costs_no_attempt(proxy: Proxy, send: JetStreamSender) -> None:
    assert send(event(id="a")) is True
    proxy.cut()
    _seen_by_the_loop(send)
    assert send(event(id="b")) is True
    assert proxy.connections == 2


def test_a_connection_that_dies_during_a_send_is_noticed_at_once(stream: Stream, proxy: Proxy) -> None:
    with JetStreamSender(f"nats://127.0.0.1:{proxy.port}", subject=stream.subject) as send:
        assert send(EVENT) is True
        proxy.mute()
        threading.Timer(0.1, proxy.cut).start()
        with at_most(0.1 + GRACE):
            assert "the connection was lost" in refusal(send)


def test_an_ack_that_is_lost_is_none_and_the_stream_still_has_the_event_once(
    stream: Stream, proxy: Proxy, send: JetStreamSender
) -> None:
    assert send(event(id="a")) is True
    proxy.mute()
    with at_most(TIMEOUT + GRACE):
        assert "no acknowledgement within 0.5 seconds" in refusal(send)
    proxy.mute(False)
    assert send(EVENT) is True
    assert proxy.connections == 2  # the one whose answers are late is not used again
    assert len(stream.messages()) == 2


def test_what_was_refused_is_not_sent_later_by_itself(
    stream: Stream, proxy: Proxy, send: JetStreamSender
) -> None:
    assert send(event(id="before")) is True
    proxy.down()
    refusal(send)
    proxy.up()
    _seen_by_the_loop(send)
    assert len(stream.messages()) == 1


def test_a_server_that_accepts_and_says_nothing_ends_at_the_deadline(
    proxy: Proxy, send: JetStreamSender
) -> None:
    proxy.mute()
    with at_most(TIMEOUT + GRACE):
        refusal(send)


def test_of_several_servers_one_is_enough(stream: Stream, proxy: Proxy) -> None:
    proxy.down()
    servers = [f"nats://127.0.0.1:{proxy.port}", stream.url]
    for n in range(4):
        with JetStreamSender(servers, subject=stream.subject) as send:
            assert send(event(id=f"order-{n}")) is True


async def test_many_at_once_over_one_connection(stream: Stream, proxy: Proxy) -> None:
    url = f"nats://127.0.0.1:{proxy.port}"
    async with AsyncJetStreamSender(url, subject=stream.subject) as send:
        assert await asyncio.gather(*(send(event(id=f"order-{n}")) for n in range(50))) == [True] * 50
    assert proxy.connections == 1


def test_the_async_form_moves_to_another_loop(stream: Stream) -> None:
    sender = AsyncJetStreamSender(stream.url, subject=stream.subject)

    async def send() -> bool:
        return await sender(EVENT)

    async def send_and_close() -> bool:
        async with sender:
            return await sender(EVENT)

    assert [asyncio.run(once()) for once in (send, send_and_close, send_and_close)] == [True] * 3


def test_the_subject_may_be_a_function(stream: Stream) -> None:
    def subject(of: Event) -> str:
        return f"{stream.name}.{of.payload['qty']}"

    with JetStreamSender(stream.url, subject=subject) as send:
        assert send(EVENT) is True
    assert [message.subject for message in stream.messages()] == [f"{stream.name}.7"]


@pytest.mark.parametrize(
    "topic", ["a b", "a\tb", "a\r\nPUB x 0\r\n", "*", "a.*", ">", "a.>", "", ".a", "a.", "a..b", "a\u2003b"]
)
def test_a_topic_that_is_no_subject_is_refused(stream: Stream, topic: str) -> None:
    with JetStreamSender(stream.url, timeout=TIMEOUT) as send, pytest.raises(InvalidValue, match="subject: "):
        send(event(topic=topic))


@pytest.mark.parametrize(
    "headers",
    [{"Nats-Msg-Id": "other"}, {"nats-rollup": "all"}, {"Fenced-Fence": "9"}, {"X": "a\r\nNats-Rollup: all"},
     {"X": " a"}, {"X Y": "a"}, {"": "a"}],
)  # fmt: skip
def test_headers_of_an_event_cannot_command_the_server(stream: Stream, headers: dict[str, str]) -> None:
    with JetStreamSender(stream.url, subject=stream.subject) as send:
        with pytest.raises(InvalidValue, match="headers: "):
            send(event(headers=headers))
        assert send(EVENT) is True
    assert len(stream.messages()) == 1


def test_ids_and_topics_of_any_kind_stay_apart(stream: Stream) -> None:
    ids = ["é", "e\u0301", "a", "a ", " a", "A", "a%20", "a\r\nb", "漢" * 255]
    with JetStreamSender(stream.url, subject=f"{stream.name}.all") as send:
        for id in ids:
            assert send(event(id=id, topic=id)) is True
    headers = [message.headers or {} for message in stream.messages()]
    assert len({header["Nats-Msg-Id"] for header in headers}) == len(ids)
    assert [header["Fenced-Topic"] for header in headers] == [header["Nats-Msg-Id"] for header in headers]


@pytest.mark.parametrize("subject", ["{", "{id}", "{topic.x}", "{0}", "{topic!z}"])
def test_a_format_that_cannot_be_used_is_refused(subject: str) -> None:
    with pytest.raises(InvalidValue, match="subject: "):
        JetStreamSender("nats://127.0.0.1:1", subject=subject)


def test_no_server_is_refused() -> None:
    with pytest.raises(InvalidValue, match="servers: "):
        JetStreamSender([])


def test_passwords_do_not_come_into_errors() -> None:
    for options in ({}, {"token": "swordfish"}):
        sender = AsyncJetStreamSender("nats://robber:sword%66ish@127.0.0.1:1", timeout=1, options=options)
        assert "no server can be reached" in async_refusal(sender)
        with pytest.raises(NotAcknowledged) as caught:
            asyncio.run(_sent(sender))
        assert "swordfish" not in "".join(traceback.format_exception(caught.value))


async def _sent(sender: AsyncJetStreamSender) -> None:
    await sender(EVENT)


@asynccontextmanager
async def _answering(url: str, subject: str, answer: bytes | None) -> AsyncIterator[None]:
    async with await nats.connect(url) as client:

        async def respond(message: Any) -> None:
            if answer is not None:
                await message.respond(answer)

        await client.subscribe(subject, cb=respond)
        await client.flush()
        yield


def _seen_by_the_loop(send: JetStreamSender) -> None:
    """Let the sender's thread read what has come, as it does while a relay is idle."""
    send._thread.run(asyncio.sleep(0.1), within=1)
