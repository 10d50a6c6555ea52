"""A real HTTP server on a socket that answers as a test says, however wrong that is."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Request:
    line: str
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Connection:
    """What a script answers on."""

    socket: socket.socket
    stopping: threading.Event

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)

    def drip(self, data: bytes, every: float = 0.02) -> None:
        """One byte at a time, for as long as the other side listens."""
        for byte in data:
            self.say(bytes([byte]))
            if self.stopping.wait(every):
                return

    def linger(self) -> None:
        """Say nothing until the other side hangs up."""
        while self.socket.recv(65536):
            pass


Script = Callable[[Connection, Request], None]


@dataclass
class Receiver:
    """Runs ``script`` for each request; what was requested, and how many connections were made and ended."""

    script: Script
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    accepted: int = 0
    ended: int = 0

    def __enter__(self) -> Self:
        self._stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/events"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would leave it in `accept`
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                self.accepted += 1
                threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with suppress(OSError, EOFError), accepted:
            accepted.settimeout(10)
            if self.tls is not None:
                accepted = self.tls.wrap_socket(accepted, server_side=True)
            with accepted:
                connection = Connection(accepted, self._stopping)
                while (request := _read(accepted)) is not None:
                    self.requests.append(request)
                    self.script(connection, request)
        self.ended += 1


def _read(connection: socket.socket) -> Request | None:
    head = b""
    while b"\r\n\r\n" not in head:
        if not (data := connection.recv(65536)):
            return None
        head += data
    head, _, body = head.partition(b"\r\n\r\n")
    line, *rest = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in rest)}
    while len(body) < int(headers.get("content-length", 0)):
        if not (data := connection.recv(65536)):
            return None
        body += data
    return Request(line, headers, body)


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def says(data: bytes) -> Script:
    """Answers each request with these bytes."""
    return lambda connection, request: connection.say(data)


def acknowledges(connection: Connection, request: Request) -> None:
    """As a receiver should: with the id of the event."""
    connection.say(answer("200 OK", json.dumps({"id": request.json["id"]}).encode()))


@contextmanager
def listening(tarry: Callable[[socket.socket, threading.Event], object]) -> Iterator[int]:
    """A port where each connection is left to ``tarry``, before any protocol."""
    stopping = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(accepted: socket.socket) -> None:
            with suppress(OSError), accepted:
                tarry(accepted, stopping)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        stopping.set()
        listener.shutdown(socket.SHUT_RDWR)
