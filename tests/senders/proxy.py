"""A TCP relay in front of a real server, to lose the server without stopping it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self


@dataclass
class Proxy:
    """Passes bytes on both ways. `cut` ends every connection, `mute` swallows what the server says."""

    host: str
    to: int
    connections: int = 0
    _open: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listener: socket.socket | None = None
        self._muted = threading.Event()
        self.port = 0
        self.up()
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def up(self) -> None:
        """Accept connections, at the port of before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self) -> None:
        """Refuse connections, and end those there are."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.cut()

    def cut(self) -> None:
        while self._open:
            with suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def mute(self, muted: bool = True) -> None:
        if muted:
            self._muted.set()
        else:
            self._muted.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                self.connections += 1
                far = socket.create_connection((self.host, self.to))
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(
                        target=self._pass, args=(source, target, source is far), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError), source:
            while data := source.recv(65536):
                if not (answers and self._muted.is_set()):
                    target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
