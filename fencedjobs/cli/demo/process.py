"""The parent's side of a child process: start it, talk to it, stop and continue it, and be rid of it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, Final

PATIENCE: Final = 30.0  # seconds for one answer; a healthy run needs about one
ENDS: Final = [
    number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None
]


class ChildFailed(Exception):
    """A child process died or fell silent; the text has its last words."""


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and the like wait. Processes and threads that start meanwhile never see them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    # -P and the parent's own path: the same package as here, whatever lies in the current folder.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"{__package__}.actor"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip


class ChildProcess:
    """A child process that runs `actor`; ``name`` is what it is called at present."""

    def __init__(self, name: str, cleanup: ExitStack) -> None:
        self.name = name
        self._stderr = cleanup.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - a context of cleanup
        self._child: subprocess.Popen[bytes] | None = None
        cleanup.callback(self.end)
        self._heard: queue.Queue[bytes] = queue.Queue()
        with _signals_held():  # there is no moment in which the child runs and `end` does not know it
            self._child = _start(self._stderr)
            threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._child is not None
        return self._child.pid

    def brief(self, name: str, part: str, /, **facts: Any) -> None:
        """Give it a part to play; it will say when it is ``ready``."""
        self.name = name
        self.tell({"part": part, **facts})

    def tell(self, command: Any) -> None:
        """Send one line."""
        stdin = self._child.stdin if self._child else None
        assert stdin is not None
        with suppress(BrokenPipeError):  # it died; what it said last tells more, see hear()
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next event."""
        try:
            line = self._heard.get(timeout=PATIENCE)
        except queue.Empty:
            raise ChildFailed(f"{self.name} said nothing for {PATIENCE:.0f} s") from None
        if not line:
            raise ChildFailed(f"{self.name} ended early: {self._last_words()}")
        event: dict[str, Any] = json.loads(line)
        return event

    def hear_until(self, last: str, each: Callable[[dict[str, Any]], None]) -> None:
        """Pass every event to ``each`` until ``last`` has come."""
        while (event := self.hear())["event"] != last:
            each(event)

    def expect(self, name: str) -> dict[str, Any]:
        """The next event, which has to be this one."""
        event = self.hear()
        if event["event"] != name:
            raise ChildFailed(f"expected {name!r} of {self.name}, got {event}")
        return event

    def exit_code(self) -> int:
        """Wait until it has ended by itself."""
        assert self._child is not None
        try:
            return self._child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{self.name} did not end within {PATIENCE:.0f} s") from None

    def stop(self) -> None:
        """SIGSTOP, and wait until the system says that it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise ChildFailed(f"{self.name} ended early: {self._last_words()}")

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill it by its id, also when it is stopped, and wait for it."""
        child = self._child
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _listen(self) -> None:
        stdout = self._child.stdout if self._child else None
        assert stdout is not None
        with suppress(ValueError):  # closed while reading: nobody listens any more
            for line in stdout:
                self._heard.put(line)
        self._heard.put(b"")

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"
