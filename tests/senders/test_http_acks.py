"""What is an acknowledgement, and what looks like one: each wrong answer leaves the event pending."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from fencedjobs import AsyncStore, NotAcknowledged
from fencedjobs.aio_relay import AsyncRelay
from fencedjobs.relay import dispatch
from fencedjobs.senders.http import AsyncHttpSender, HttpSender
from tests.senders.helpers import EVENT, event, left_pending, refusal, with_event
from tests.senders.receiver import Connection, Receiver, Request, acknowledges, answer, says

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)

_GOOD = b'{"id": "order-7"}'

#: name: (what the receiver says, what the stored reason has to say)
WRONG = {
    "another id": (answer("200 OK", b'{"id": "order-8"}'), "acknowledges the id 'order-8'"),
    "the id in another case": (answer("200 OK", b'{"id": "ORDER-7"}'), "acknowledges the id"),
    "the id with a space": (answer("200 OK", b'{"id": "order-7 "}'), "acknowledges the id"),
    "an id that is no text": (answer("200 OK", b'{"id": ["order-7"]}'), "acknowledges the id"),
    "no id": (answer("200 OK", b'{"status": "ok"}'), "no JSON object with an id"),
    "the id alone": (answer("200 OK", b'"order-7"'), "no JSON object with an id"),
    "a list": (answer("200 OK", b'[{"id": "order-7"}]'), "no JSON object with an id"),
    "the id twice": (answer("200 OK", b'{"id": "order-8", "id": "order-7"}'), "not JSON"),
    "the id twice, once in disguise": (
        answer("200 OK", b'{"\\u0069d": "order-8", "id": "order-7"}'),
        "not JSON",
    ),
    "a key twice elsewhere": (answer("200 OK", b'{"id": "order-7", "x": {"a": 1, "a": 2}}'), "not JSON"),
    "the id of something inside": (
        answer("200 OK", b'{"data": {"id": "order-7"}}'),
        "no JSON object with an id",
    ),
    "a byte order mark": (answer("200 OK", b"\xef\xbb\xbf" + _GOOD), "not JSON"),
    "two objects": (answer("200 OK", _GOOD * 2), "not JSON"),
    "NaN": (answer("200 OK", b'{"id": "order-7", "x": NaN}'), "not JSON"),
    "JSON in UTF-16": (answer("200 OK", '{"id": "order-7"}'.encode("utf-16")), "not JSON"),
    "bytes that are no text": (answer("200 OK", b'{"id": "order-7", "x": "\xff"}'), "not JSON"),
    "JSON nested deeply": (answer("200 OK", b"[" * 60000), "not JSON"),
    "a number of 60,000 digits": (answer("200 OK", b"1" * 60000), "not JSON"),
    "a page": (
        answer("200 OK", b"<html>order-7</html>", "Content-Type: text/html"),
        "not JSON: <html>order-7",
    ),
    "nothing": (answer("200 OK"), "its body is empty"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", "status 204, but its body is empty"),
    "no content, and yet the id": (
        b"HTTP/1.1 204 No Content\r\nContent-Length: 17\r\n\r\n" + _GOOD,
        "status 204, but its body is empty",
    ),
    "a status of four digits": (b"HTTP/1.1 2000 OK\r\nContent-Length: 17\r\n\r\n" + _GOOD, "status line"),
    "500 with the right id": (answer("500 Oops", _GOOD), 'status 500: {"id": "order-7"}'),
    "409": (answer("409 Conflict", b"another payload"), "status 409: another payload"),
    "304": (b"HTTP/1.1 304 Not Modified\r\n\r\n", "status 304, a redirect"),
    "a switch of protocols": (answer("101 Switching Protocols", _GOOD), "RemoteProtocolError"),
    "a packed body": (answer("200 OK", gzip.compress(_GOOD), "Content-Encoding: gzip"), "packed as 'gzip'"),
    "a packed body, and a lie about it": (
        answer("200 OK", _GOOD, "Content-Encoding: identity", "Content-Encoding: gzip"),
        "packed as 'identity, gzip'",
    ),
    "a body that is longer than it says": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + _GOOD,
        'not JSON: {"id": "or',
    ),
    "a length that only Python reads": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_7\r\n\r\n" + _GOOD,
        "Content-Length",
    ),
    "a body that breaks off": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n" + _GOOD,
        "RemoteProtocolError",
    ),
    "a chunk that breaks off": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n" + _GOOD,
        "RemoteProtocolError",
    ),
    "a head that breaks off": (b"HTTP/1.1 200 OK\r\nContent-", "RemoteProtocolError"),
    "no word": (b"", "RemoteProtocolError: Server disconnected"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", "RemoteProtocolError"),
    "two lengths": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 17\r\nContent-Length: 5\r\n\r\n" + _GOOD,
        "Content-Length",
    ),
    "a negative length": (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n" + _GOOD, "Content-Length"),
}


@pytest.fixture
def warehouse() -> Iterator[Receiver]:
    with Receiver(acknowledges) as receiver:
        yield receiver


@on_sqlite
def test_the_exact_id_in_a_2xx_marks_the_event_sent(engine: Engine, warehouse: Receiver) -> None:
    store = with_event(engine)
    with HttpSender(warehouse.url) as send:
        assert dispatch(store, send) == 1
    record = store.outbox.get("order-7")
    assert record is not None
    assert (record.state, record.last_error) == ("sent", None)


#: what is unusual, and an acknowledgement all the same
RIGHT = {
    "interim answers before": b"HTTP/1.1 102 Processing\r\n\r\n" * 100 + answer("200 OK", _GOOD),
    "a trailer behind": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n"
        + _GOOD
        + b"\r\n0\r\nX-Checksum: 1\r\n\r\n"
    ),
    "escapes": answer("201 Created", b'{"\\u0069d": "order\\u002d7"}'),
    "no length": b"HTTP/1.0 200 OK\r\n\r\n" + _GOOD,
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_unusual_answer_that_names_the_id_is_an_ack(name: str) -> None:
    def once(connection: Connection, request: Request) -> None:
        connection.say(RIGHT[name])
        connection.socket.close()

    with Receiver(once) as receiver, HttpSender(receiver.url) as send:
        assert send(EVENT) is True


@on_sqlite
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_leaves_the_event_pending_with_the_reason(engine: Engine, name: str) -> None:
    data, reason = WRONG[name]
    gc.collect()  # what other tests have left must not be finalised in the depth of this one

    def once(connection: Connection, request: Request) -> None:
        connection.say(data)
        connection.socket.close()

    with Receiver(once) as receiver, HttpSender(receiver.url, timeout=2) as send:
        assert reason in left_pending(with_event(engine), send)
        assert len(receiver.requests) == 1  # nothing retried behind the relay's back


@on_sqlite
def test_a_receiver_that_commits_and_cuts_the_line_gets_the_same_id_again(engine: Engine) -> None:
    seen: list[str] = []

    def cut_first(connection: Connection, request: Request) -> None:
        seen.append(request.json["id"])
        if len(seen) == 1:
            connection.socket.close()
        else:
            acknowledges(connection, request)

    store = with_event(engine)
    with Receiver(cut_first) as receiver, HttpSender(receiver.url) as send:
        left_pending(store, send)
        assert dispatch(store, send) == 1
    assert seen == ["order-7", "order-7"]


@on_sqlite
def test_nobody_there_leaves_the_event_pending(engine: Engine) -> None:
    with Receiver(acknowledges) as receiver:
        url = receiver.url
    with HttpSender(url) as send:
        assert "ConnectError" in left_pending(with_event(engine), send)


@pytest.mark.parametrize("status", ["200 OK", "202 Accepted", "204 No Content"])
def test_plain_2xx_is_enough_where_it_is_asked_for(status: str) -> None:
    with Receiver(says(answer(status))) as receiver, HttpSender(receiver.url, ack="status") as send:
        assert send(EVENT) is True


@pytest.mark.parametrize(
    "name", [name for name, (data, _) in WRONG.items() if not data.startswith(b"HTTP/1.1 20")]
)
def test_other_than_2xx_is_never_enough(name: str) -> None:
    def once(connection: Connection, request: Request) -> None:
        connection.say(WRONG[name][0])
        connection.socket.close()

    with Receiver(once) as receiver, HttpSender(receiver.url, ack="status", timeout=2) as send:
        refusal(send)


def test_the_event_goes_out_whole(warehouse: Receiver) -> None:
    with HttpSender(warehouse.url, headers={"Authorization": "Bearer abc"}) as send:
        send(EVENT)
    (request,) = warehouse.requests
    assert request.line == "POST /events HTTP/1.1"
    assert request.json == {
        "id": "order-7",
        "seq": 3,
        "fence": 2,
        "topic": "warehouse",
        "lane": "default",
        "payload": {"qty": 7, "name": "Tür"},
        "headers": {"traceparent": "00-ab-cd-01"},
        "created": 1700000000.25,
    }
    expected = {
        "host": f"127.0.0.1:{warehouse.port}",
        "content-type": "application/json",
        "content-length": str(len(request.body)),
        "accept": "application/json",
        "accept-encoding": "identity",
        "idempotency-key": "order-7",
        "authorization": "Bearer abc",
    }
    assert request.headers == expected


@pytest.mark.parametrize(
    ("id", "key"),
    [
        ("order 7", "order%207"),
        ("50%", "50%25"),
        ("a\r\nX-Admin: yes", "a%0D%0AX-Admin:%20yes"),
        ("é", "%C3%A9"),
        ("{a/b}~'\"", "{a/b}~'\""),
        ("漢" * 255, "%E6%BC%A2" * 255),
    ],
)
def test_any_id_makes_a_header_and_no_two(warehouse: Receiver, id: str, key: str) -> None:
    with HttpSender(warehouse.url) as send:
        assert send(event(id=id)) is True
    (request,) = warehouse.requests
    assert request.headers["idempotency-key"] == key
    assert "x-admin" not in request.headers
    assert request.json["id"] == id


def test_an_answer_to_one_event_is_none_to_the_next() -> None:
    """The body goes on after its end, with what looks like the answer to the next request."""
    double = answer("200 OK", _GOOD) + answer("200 OK", _GOOD)
    silent = Receiver(
        lambda connection, request: connection.say(double) if request.json["id"] == "order-7" else None
    )
    with silent as receiver:
        with HttpSender(receiver.url, ack="status", timeout=0.4) as send:
            assert send(EVENT) is True
            assert "no acknowledgement" in refusal(send, event(id="order-8"))
        with HttpSender(receiver.url, timeout=0.4) as send:
            assert send(EVENT) is True
            refusal(send, event(id="order-8"))


def test_connections_are_kept_between_events(warehouse: Receiver) -> None:
    with HttpSender(warehouse.url) as send:
        for n in range(5):
            assert send(event(id=f"order-{n}")) is True
    assert warehouse.accepted == 1


def test_a_connection_that_the_server_closed_meanwhile_costs_no_attempt() -> None:
    closed = threading.Semaphore(0)

    def once(connection: Connection, request: Request) -> None:
        acknowledges(connection, request)
        connection.socket.close()
        closed.release()

    with Receiver(once) as receiver, HttpSender(receiver.url) as send:
        for _ in range(3):
            assert send(EVENT) is True
            assert closed.acquire(timeout=5)


def test_cookies_are_not_kept() -> None:
    baked = answer("200 OK", _GOOD, "Set-Cookie: session=1; Path=/")
    with Receiver(says(baked)) as receiver, HttpSender(receiver.url) as send:
        assert [send(EVENT), send(EVENT)] == [True, True]
        assert all("cookie" not in request.headers for request in receiver.requests)


async def test_the_async_form_is_awaited(warehouse: Receiver) -> None:
    async with AsyncHttpSender(warehouse.url) as send:
        assert await send(EVENT) is True
        with pytest.raises(NotAcknowledged):
            await send(event(id="order-8", payload=float("nan")))


def test_the_async_form_moves_to_another_loop(warehouse: Receiver) -> None:
    sender = AsyncHttpSender(warehouse.url)

    async def send() -> bool:
        return await sender(EVENT)

    assert [asyncio.run(send()) for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("async_url", ["aiosqlite"], indirect=True)
async def test_an_async_relay_sends_with_it(async_engine: object, warehouse: Receiver) -> None:
    store = AsyncStore(async_engine)  # type: ignore[arg-type]
    async with store.begin() as uow:
        for n in range(3):
            await uow.outbox.add(f"order-{n}", {"qty": n}, topic="warehouse")
    async with AsyncHttpSender(warehouse.url) as send:
        assert await AsyncRelay(store, send, ttl=30).run(until_empty=True) == 3
    assert [json.loads(request.body)["id"] for request in warehouse.requests] == [
        "order-0",
        "order-1",
        "order-2",
    ]
