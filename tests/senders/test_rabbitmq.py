"""Against a real RabbitMQ: the ack is the confirm of a message that a queue took."""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import aio_pika
import pytest
from aio_pika.abc import AbstractIncomingMessage, DeliveryMode
from sqlalchemy import Engine

from fencedjobs import Event, InvalidValue, NotAcknowledged
from fencedjobs.relay import dispatch
from fencedjobs.senders.rabbitmq import AsyncRabbitSender, RabbitSender
from tests.senders.helpers import EVENT, GRACE, at_most, event, left_pending, refusal, with_event
from tests.senders.proxy import Proxy

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
TIMEOUT = 0.5


class Queue:
    """A queue, and an exchange if one is made, of this test alone."""

    def __init__(self, url: str, name: str, run: Callable[[Any], Any]) -> None:
        self.url, self.name, self._run = url, name, run

    def make(self, **arguments: Any) -> None:
        self._run(self._with(lambda channel: channel.declare_queue(self.name, arguments=arguments)))

    def bind(self, kind: str, key: str) -> None:
        """An exchange of the queue's name that hands it what has this key."""

        async def binding(channel: Any) -> None:
            exchange = await channel.declare_exchange(self.name, kind)
            await (await channel.get_queue(self.name)).bind(exchange, key)

        self._run(self._with(binding))

    def delete(self) -> None:
        async def deleting(channel: Any) -> None:
            await channel.queue_delete(self.name)
            await channel.exchange_delete(self.name)

        self._run(self._with(deleting))

    def messages(self) -> list[AbstractIncomingMessage]:
        """Takes them out."""

        async def reading(channel: Any) -> list[AbstractIncomingMessage]:
            queue = await channel.get_queue(self.name)
            found = []
            while (message := await queue.get(no_ack=True, fail=False)) is not None:
                found.append(message)
            return found

        return self._run(self._with(reading))  # type: ignore[no-any-return]

    async def _with(self, act: Callable[[Any], Any]) -> Any:
        async with await aio_pika.connect(self.url) as connection:
            return await act(await connection.channel())


@pytest.fixture
def queue(rabbitmq_url: str, name: str, runner: Callable[[Any], Any]) -> Iterator[Queue]:
    queue = Queue(rabbitmq_url, name, runner)
    queue.make()
    yield queue
    queue.delete()


@pytest.fixture
def proxy(rabbitmq_url: str) -> Iterator[Proxy]:
    parts = urlsplit(rabbitmq_url)
    with Proxy(parts.hostname or "", parts.port or 5672) as proxy:
        yield proxy


@pytest.fixture
def through(rabbitmq_url: str, proxy: Proxy) -> str:
    """The server's URL by way of the proxy."""
    parts = urlsplit(rabbitmq_url)
    return parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}").geturl()


@pytest.fixture
def send(queue: Queue, through: str) -> Iterator[RabbitSender]:
    with RabbitSender(through, routing_key=queue.name, timeout=TIMEOUT) as sender:
        yield sender


def test_the_queue_has_the_payload_and_who_sent_it(queue: Queue) -> None:
    with RabbitSender(queue.url) as send:
        assert send(event(topic=queue.name)) is True
    (message,) = queue.messages()
    assert json.loads(message.body) == {"qty": 7, "name": "Tür"}
    assert (message.message_id, message.content_type) == ("order-7", "application/json")
    assert message.delivery_mode is DeliveryMode.PERSISTENT
    assert message.headers == {
        "Fenced-Seq": "3",
        "Fenced-Fence": "2",
        "Fenced-Topic": queue.name,
        "Fenced-Lane": "default",
        "Fenced-Created": "1700000000.25",
        "traceparent": "00-ab-cd-01",
    }


@on_sqlite
def test_dispatch_marks_what_the_broker_confirmed(engine: Engine, queue: Queue) -> None:
    store = with_event(engine, topic=queue.name)
    with RabbitSender(queue.url) as send:
        assert dispatch(store, send) == 1
    assert store.outbox.pending() == []


@on_sqlite
def test_a_message_that_no_queue_takes_is_no_ack(engine: Engine, queue: Queue) -> None:
    store = with_event(engine, topic=queue.name + ".none")
    with RabbitSender(queue.url, timeout=TIMEOUT) as send:
        assert "no queue takes the routing key" in left_pending(store, send)
        assert send(event(topic=queue.name)) is True  # the channel is still good
    assert len(queue.messages()) == 1


def test_an_exchange_routes_by_topic(queue: Queue) -> None:
    queue.bind("topic", "orders.*")
    with RabbitSender(queue.url, exchange=queue.name, routing_key="orders.{topic}") as send:
        assert send(EVENT) is True
    with RabbitSender(queue.url, exchange=queue.name) as send:
        assert "no queue takes the routing key 'warehouse'" in refusal(send)
    assert [message.routing_key for message in queue.messages()] == ["orders.warehouse"]


@on_sqlite
def test_an_exchange_that_does_not_exist_is_no_ack(engine: Engine, queue: Queue) -> None:
    store = with_event(engine)
    with RabbitSender(queue.url, exchange=queue.name, timeout=TIMEOUT) as send:
        for _ in range(2):
            assert "no exchange" in left_pending(store, send)
        queue.bind("fanout", "")
        assert dispatch(store, send) == 1


@on_sqlite
def test_a_queue_that_is_full_refuses(
    engine: Engine, rabbitmq_url: str, name: str, runner: Callable[[Any], Any]
) -> None:
    queue = Queue(rabbitmq_url, name, runner)
    queue.make(**{"x-max-length": 1, "x-overflow": "reject-publish"})
    try:
        with RabbitSender(rabbitmq_url, routing_key=name) as send:
            assert send(event(id="first")) is True
            store = with_event(engine)
            assert "the broker refused it (nack)" in left_pending(store, send)
            assert [message.message_id for message in queue.messages()] == ["first"]
            assert dispatch(store, send) == 1
    finally:
        queue.delete()


async def test_the_same_id_twice_at_once_is_not_confirmed_by_mistake(rabbitmq_url: str, name: str) -> None:
    async with AsyncRabbitSender(rabbitmq_url, routing_key=name) as send:
        answers = await asyncio.gather(*(send(EVENT) for _ in range(20)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [NotAcknowledged] * 20


@on_sqlite
def test_a_server_that_is_gone_leaves_the_event_pending_and_gets_it_when_it_is_back(
    engine: Engine, queue: Queue, proxy: Proxy, send: RabbitSender
) -> None:
    store = with_event(engine)
    assert send(event(id="before")) is True
    proxy.down()
    for _ in range(2):
        with at_most(TIMEOUT + GRACE):
            left_pending(store, send)
    proxy.up()
    assert dispatch(store, send) == 1
    assert [message.message_id for message in queue.messages()] == ["before", "order-7"]


def test_a_connection_that_died_while_idle_costs_no_attempt(proxy: Proxy, send: RabbitSender) -> None:
    assert send(event(id="a")) is True
    proxy.cut()
    send._thread.run(asyncio.sleep(0.1), within=1)  # as it reads while a relay is idle
    assert send(event(id="b")) is True
    assert proxy.connections == 2


def test_a_connection_that_dies_during_a_send_is_noticed_at_once(
    queue: Queue, through: str, proxy: Proxy
) -> None:
    with RabbitSender(through, routing_key=queue.name) as send:
        assert send(EVENT) is True
        proxy.mute()
        threading.Timer(0.1, proxy.cut).start()
        with at_most(0.1 + GRACE):
            refusal(send)


def test_heartbeats_go_on_while_nothing_is_sent(queue: Queue, through: str, proxy: Proxy) -> None:
    """The server drops a client after two heartbeats without a sign of life."""
    with RabbitSender(through + "?heartbeat=1", routing_key=queue.name) as send:
        assert send(event(id="a")) is True
        send._thread.run(asyncio.sleep(2.2), within=3)
        assert send(event(id="b")) is True
    assert proxy.connections == 1


def test_a_confirm_that_is_lost_is_none_and_the_event_is_sent_again(
    queue: Queue, proxy: Proxy, send: RabbitSender
) -> None:
    assert send(event(id="a")) is True
    proxy.mute()
    with at_most(TIMEOUT + GRACE):
        assert "no acknowledgement within 0.5 seconds" in refusal(send)
    proxy.mute(False)
    assert send(EVENT) is True
    assert proxy.connections == 2  # the one whose answers are late is not used again
    assert [message.message_id for message in queue.messages()] == ["a", "order-7", "order-7"]


def test_a_server_that_accepts_and_says_nothing_ends_at_the_deadline(
    proxy: Proxy, send: RabbitSender
) -> None:
    proxy.mute()
    with at_most(TIMEOUT + GRACE):
        assert "no acknowledgement within 0.5 seconds" in refusal(send)


async def test_many_at_once_over_one_connection(queue: Queue, through: str, proxy: Proxy) -> None:
    async with AsyncRabbitSender(through, routing_key=queue.name) as send:
        assert await asyncio.gather(*(send(event(id=f"order-{n}")) for n in range(20))) == [True] * 20
    assert proxy.connections == 1


def test_the_async_form_moves_to_another_loop(queue: Queue) -> None:
    sender = AsyncRabbitSender(queue.url, routing_key=queue.name)

    async def send() -> bool:
        async with sender:
            return await sender(EVENT)

    assert [asyncio.run(send()) for _ in range(3)] == [True] * 3


def test_the_routing_key_may_be_a_function(queue: Queue) -> None:
    def routing_key(of: Event) -> str:
        return queue.name if of.payload["qty"] == 7 else "none"

    with RabbitSender(queue.url, routing_key=routing_key) as send:
        assert send(EVENT) is True


def test_ids_and_topics_of_any_kind_stay_as_they_are(queue: Queue) -> None:
    ids = ["é", "e\u0301", "a ", "a\r\nb", "漢" * 85]
    with RabbitSender(queue.url, routing_key=queue.name) as send:
        for id in ids:
            assert send(event(id=id, topic=id)) is True
        for long in (event(id="漢" * 86), event(id="x" * 254 + "é")):
            with pytest.raises(InvalidValue, match="id: takes more than 255 bytes"):
                send(long)
    found = queue.messages()
    assert [message.message_id for message in found] == ids
    assert [message.headers["Fenced-Topic"] for message in found] == ids


def test_a_routing_key_that_is_too_long_is_refused(queue: Queue) -> None:
    with (
        RabbitSender(queue.url) as send,
        pytest.raises(InvalidValue, match="routing_key: takes more than 255"),
    ):
        send(event(topic="é" * 128))


@pytest.mark.parametrize("headers", [{"x-match": "all"}, {"Fenced-Fence": "9"}, {"X Y": "a"}])
def test_headers_of_an_event_cannot_be_taken_for_ours(queue: Queue, headers: dict[str, str]) -> None:
    with RabbitSender(queue.url) as send, pytest.raises(InvalidValue, match="headers: "):
        send(event(topic=queue.name, headers=headers))


@on_sqlite
def test_headers_that_the_broker_refuses_are_no_ack(engine: Engine, queue: Queue) -> None:
    with RabbitSender(queue.url, routing_key=queue.name, timeout=TIMEOUT) as send:
        assert "PRECONDITION_FAILED" in refusal(send, event(headers={"CC": "elsewhere"}))
        assert send(EVENT) is True


@pytest.mark.parametrize("url", ["", "http://127.0.0.1", "127.0.0.1:5672", "amqp:guest"])
def test_a_url_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match="url: "):
        RabbitSender(url)


def test_passwords_do_not_come_into_errors(rabbitmq_url: str) -> None:
    parts = urlsplit(rabbitmq_url)
    for at in (f"{parts.hostname}:{parts.port}", "127.0.0.1:1"):
        with RabbitSender(f"amqp://robber:sword%66ish@{at}/", timeout=2) as send:
            with pytest.raises(NotAcknowledged) as caught:
                send(EVENT)
            shown = "".join(traceback.format_exception(caught.value))
            assert "swordfish" not in shown
            assert "sword%66ish" not in str(caught.value)
