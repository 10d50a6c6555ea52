"""A TCP proxy on loopback that loses a client's next request or the answer to it, is down, or silent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from threading import Event, Lock, Thread


class Cut(Enum):
    """What becomes of the next request after `Proxy.arm`; the client's connection is cut in any case."""

    REQUEST = "the request never reaches the server"
    ANSWER = "the server has answered, and the answer is lost"
    DELAYED = "the request reaches the server when `Proxy.deliver` is called, long after the client's end"


class Proxy:
    """What passes between clients and one server, and can be cut, delayed and silenced."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = Lock()
        self._armed: Cut | None = None
        self.cuts = 0
        self._deliver = Event()
        self._answered = Event()
        self._lost: socket.socket | None = None
        self._open: list[socket.socket] = []
        self._flowing = Event()
        self._flowing.set()
        self._is_down = False

    def arm(self, cut: Cut) -> None:
        """Do this to the next request of any client."""
        with self._lock:
            self._armed = cut
            self._deliver.clear()

    def deliver(self) -> None:
        """Let the delayed request through to the server."""
        self._deliver.set()

    def down(self) -> None:
        """Cut all connections, and every new one at once, until `up`."""
        self._is_down = True
        for one in [*self._open]:
            _cut(one)

    def up(self) -> None:
        """Let connections through again."""
        self._is_down = False

    def silence(self) -> None:
        """Pass nothing on in either direction until `speak`; nobody is told."""
        self._flowing.clear()

    def speak(self) -> None:
        """Pass on again."""
        self._flowing.set()

    def serve(self) -> None:
        """Accept connections until `close`."""
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._is_down:
                    _cut(client)
                    continue
                server = socket.create_connection(self._target)
                self._open += [client, server]
                Thread(target=self._requests, args=(client, server), daemon=True).start()
                Thread(target=self._answers, args=(client, server), daemon=True).start()

    def close(self) -> None:
        """Cut everything, and accept nothing more."""
        self._deliver.set()
        self._flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            _cut(one)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                with self._lock:
                    cut, self._armed = self._armed, None
                    self.cuts += cut is not None
                if cut is not None:
                    self._lose(cut, data, client, server)
                    break
                self._flowing.wait()
                server.sendall(data)
        _cut(server, client)

    def _lose(self, cut: Cut, data: bytes, client: socket.socket, server: socket.socket) -> None:
        if cut is Cut.REQUEST:
            return
        if cut is Cut.DELAYED:
            _cut(client)
            self._deliver.wait(20)
            server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            return
        self._answered.clear()
        self._lost = server  # `_answers` will not pass on what comes from now on
        server.sendall(data)
        self._answered.wait(20)

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if self._lost is server:
                    self._answered.set()
                    break
                self._flowing.wait()
                client.sendall(data)
        _cut(client)


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            end.close()


@contextmanager
def proxy(host: str, port: int) -> Iterator[Proxy]:
    """A proxy in front of this server."""
    one = Proxy(host, port)
    accepting = Thread(target=one.serve, daemon=True)
    accepting.start()
    try:
        yield one
    finally:
        one.close()
        accepting.join(5)
