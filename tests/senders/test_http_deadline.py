"""One deadline over the whole exchange: wherever a server dawdles, the send ends in time."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from fencedjobs import InvalidValue
from fencedjobs.relay import Relay, dispatch
from fencedjobs.senders.base import Sender
from fencedjobs.senders.http import AsyncHttpSender, HttpSender
from tests.senders.helpers import (
    EVENT,
    GRACE,
    async_refusal,
    at_most,
    awaited,
    event,
    left_pending,
    refusal,
    with_event,
)
from tests.senders.receiver import Connection, Receiver, Request, acknowledges, answer, listening

TIMEOUT = 0.5
_ACK = answer("200 OK", b'{"id": "order-7"}')
_LONG = b"x" * 10_000


def _body_drips(connection: Connection, request: Request) -> None:
    connection.say(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
    connection.drip(_LONG)


def _chunks_drip(connection: Connection, request: Request) -> None:
    connection.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    connection.drip(b"1\r\n \r\n" * 10_000)


def _ack_comes_and_the_end_does_not(connection: Connection, request: Request) -> None:
    connection.say(b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{"id": "order-7"}')
    connection.linger()


def _hints_without_end(connection: Connection, request: Request) -> None:
    while not connection.stopping.wait(0.01):
        connection.say(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")


DAWDLING: dict[str, Callable[[Connection, Request], None]] = {
    "no answer": lambda connection, request: connection.linger(),
    "a status line that drips": lambda connection, request: connection.drip(_ACK, every=0.1),
    "headers that drip": lambda connection, request: connection.drip(b"HTTP/1.1 200 OK\r\nX-Long: " + _LONG),
    "a body that drips": _body_drips,
    "chunks that drip": _chunks_drip,
    "an ack before the end": _ack_comes_and_the_end_does_not,
    "hints without end": _hints_without_end,
}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", DAWDLING)
def test_a_dawdling_server_cannot_outlast_the_deadline(engine: Engine, name: str) -> None:
    with Receiver(DAWDLING[name]) as receiver, HttpSender(receiver.url, timeout=TIMEOUT) as send:
        store = with_event(engine)
        with at_most(TIMEOUT + GRACE):
            reason = left_pending(store, send)
        assert "no acknowledgement within 0.5 seconds" in reason
        awaited(lambda: receiver.ended == receiver.accepted == 1)  # and the connection is closed


def test_a_handshake_that_drips_cannot_outlast_it() -> None:
    def drip(accepted: socket.socket, stopping: threading.Event) -> None:
        for byte in b"\x16\x03\x03\x40\x00" + b"\x00" * 1000:
            accepted.sendall(bytes([byte]))
            if stopping.wait(0.02):
                return

    with listening(drip) as port, HttpSender(f"https://127.0.0.1:{port}", timeout=TIMEOUT) as send:
        send.close()
        with at_most(TIMEOUT + GRACE):
            assert "no acknowledgement" in refusal(send)


def test_a_server_that_reads_nothing_cannot_outlast_it() -> None:
    with (
        listening(lambda accepted, stopping: bool(stopping.wait(10))) as port,
        HttpSender(f"http://127.0.0.1:{port}", timeout=TIMEOUT) as send,
        at_most(TIMEOUT + GRACE + 0.3),  # writing 20 MB of JSON is ours
    ):
        assert "no acknowledgement" in refusal(send, event(payload="x" * 20_000_000))


def test_a_connection_that_is_never_accepted_cannot_outlast_it() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with HttpSender(url, timeout=TIMEOUT) as send, at_most(TIMEOUT + GRACE):
            assert "no acknowledgement" in refusal(send)
        for one in waiting:
            one.close()


def test_the_async_form_has_the_same_deadline() -> None:
    with Receiver(_body_drips) as receiver, at_most(TIMEOUT + GRACE):
        assert "no acknowledgement" in async_refusal(AsyncHttpSender(receiver.url, timeout=TIMEOUT))


def test_a_loop_that_is_blocked_does_not_keep_the_caller() -> None:
    """Should anything in the sender's thread block, the caller comes back all the same."""
    with Receiver(acknowledges) as receiver, HttpSender(receiver.url, timeout=0.3) as send:
        assert send(EVENT) is True
        loop = send._thread._running_loop()
        loop.call_soon_threadsafe(time.sleep, 1)
        with at_most(0.3 + GRACE):
            assert "no acknowledgement" in refusal(send)


async def test_a_cancelled_send_closes_its_connection() -> None:
    with Receiver(_body_drips) as receiver:
        sender = AsyncHttpSender(receiver.url)
        task = asyncio.create_task(sender(EVENT))
        while not receiver.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(awaited, lambda: receiver.ended == 1)
        await sender.aclose()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_lease_has_to_be_longer_than_the_deadline(engine: Engine) -> None:
    store = with_event(engine)
    with HttpSender("http://127.0.0.1:1", timeout=30) as send:
        with pytest.raises(InvalidValue, match="timeout of 30"):
            dispatch(store, send, ttl=30)
        with pytest.raises(InvalidValue, match="timeout of 30"):
            Relay(store, send, ttl=30)
        Relay(store, send, ttl=31)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "10", None])
def test_the_deadline_is_a_number_of_seconds(timeout: float) -> None:
    with pytest.raises(InvalidValue, match="timeout"):
        HttpSender("http://127.0.0.1:1", timeout=timeout)


def test_the_default_is_ten_seconds() -> None:
    sender: Sender = HttpSender("http://127.0.0.1:1")
    assert sender.timeout == AsyncHttpSender("http://127.0.0.1:1").timeout == 10
