"""A hostile answer costs no memory: it is read up to the limit, and never unpacked."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable

import pytest

from fencedjobs import InvalidValue
from fencedjobs.senders.http import HttpSender
from tests.senders.helpers import EVENT, GRACE, at_most, awaited, refusal
from tests.senders.receiver import Connection, Receiver, Request, answer, says

MIB = 1024 * 1024
_CHUNK = b"10000\r\n" + b" " * 65536 + b"\r\n"
_BOMB = gzip.compress(b'{"id": "order-7"' + b" " * (200 * MIB) + b"}")  # 200 kB on the wire


def _chunks_without_end(connection: Connection, request: Request) -> None:
    connection.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not connection.stopping.is_set():
        connection.say(_CHUNK)


def _until_closed(connection: Connection, request: Request) -> None:
    connection.say(b"HTTP/1.1 200 OK\r\n\r\n")
    while not connection.stopping.is_set():
        connection.say(b" " * 65536)


def _headers_without_end(connection: Connection, request: Request) -> None:
    connection.say(b"HTTP/1.1 200 OK\r\n")
    while not connection.stopping.is_set():
        connection.say(b"X-More: " + b"x" * 65536 + b"\r\n")


def _trailers_without_end(connection: Connection, request: Request) -> None:
    connection.say(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n{"id": "order-7"}\r\n0\r\n')
    while not connection.stopping.is_set():
        connection.say(b"X-More: " + b"x" * 65536 + b"\r\n")


HOSTILE: dict[str, tuple[Callable[[Connection, Request], None], str]] = {
    "a gzip bomb": (says(answer("200 OK", _BOMB, "Content-Encoding: gzip")), "packed as 'gzip'"),
    "a bomb in two wrappings": (
        says(answer("200 OK", _BOMB, "Content-Encoding: identity, deflate, gzip")),
        "packed as",
    ),
    "a bomb that is not called one": (says(answer("200 OK", _BOMB)), "more than 65536 bytes"),
    "a bomb as transfer encoding": (
        says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n" + _BOMB),
        "RemoteProtocolError",
    ),
    "a body of 1 GiB": (
        says(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n"),
        "more than 65536 bytes",
    ),
    "a refusal of 1 GiB": (
        says(b"HTTP/1.1 503 Busy\r\nContent-Length: 1073741824\r\n\r\n"),
        "status 503, but its body has more than 65536 bytes",
    ),
    "chunks without end": (_chunks_without_end, "more than 65536 bytes"),
    "a body until the end of days": (_until_closed, "more than 65536 bytes"),
    "headers without end": (_headers_without_end, "RemoteProtocolError"),
    "trailers without end": (_trailers_without_end, "RemoteProtocolError"),
    "a chunk header without end": (
        says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * (8 * MIB)),
        "RemoteProtocolError",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_refused_at_once_and_costs_no_memory(name: str) -> None:
    script, reason = HOSTILE[name]
    with Receiver(script) as receiver, HttpSender(receiver.url, timeout=2) as send:
        refusal(send)  # what is allocated once
        tracemalloc.start()
        try:
            with at_most(GRACE):
                assert reason in refusal(send)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        awaited(lambda: receiver.ended == receiver.accepted == 2)  # neither connection is left open
    assert peak < 5 * MIB, f"{peak / MIB:.1f} MiB"


def test_what_is_kept_of_a_refusal_is_short() -> None:
    with Receiver(says(answer("500 Oops", b"x" * 60_000))) as receiver, HttpSender(receiver.url) as send:
        assert len(refusal(send)) < 300


@pytest.mark.parametrize(("size", "refused"), [(17, False), (16, True)])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_limit_is_exact(size: int, refused: bool, chunked: bool) -> None:
    whole = answer("200 OK", b'{"id": "order-7"}')
    chunks = (
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{"id": "\r\n9\r\norder-7"}\r\n0\r\n\r\n'
    )
    receiver = Receiver(says(chunks if chunked else whole))
    with receiver, HttpSender(receiver.url, max_bytes=size) as send:
        if refused:
            assert "more than 16 bytes" in refusal(send)
        else:
            assert send(EVENT) is True


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_the_limit_is_a_whole_number(limit: int) -> None:
    with pytest.raises(InvalidValue, match="max_bytes"):
        HttpSender("http://127.0.0.1:1", max_bytes=limit)
