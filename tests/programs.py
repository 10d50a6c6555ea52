"""An app's own programs as children: servers, workers and relays as a shell starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tests.cli.helpers import environment
from tests.worker.helpers import until

_PATIENCE = 60.0  # seconds; a busy machine takes its time


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that programs do, patiently: each look costs them time."""
    until(condition, _PATIENCE, every=0.05)


@contextmanager
def imported(folder: Path, *names: str) -> Iterator[dict[str, ModuleType]]:
    """Modules of an app in this process, as new; later ones may import earlier ones."""
    path = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield {name: import_module(name) for name in names}
    finally:
        sys.path[:] = path
        for name in names:
            sys.modules.pop(name, None)


class Program:
    """One that runs, and whose output goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def says(self, pattern: str) -> re.Match[str]:
        """Wait until it has written this."""
        eventually(lambda: self._ended() or re.search(pattern, self.said) is not None)
        found = re.search(pattern, self.said)
        assert found, f"it ended without a word of {pattern!r}:\n{self.said}"
        return found

    def told(self, number: signal.Signals) -> int:
        """Its exit code after this signal."""
        self._process.send_signal(number)
        return self._process.wait(_PATIENCE)

    def end(self) -> None:
        """Whatever the test found: it does not outlive it."""
        if not self._ended():
            self._process.kill()
            self._process.wait()

    def _ended(self) -> bool:
        return self._process.poll() is not None


class Programs:
    """Those of an app in ``folder``; ``variables`` are their environment, beside that of this process."""

    def __init__(self, folder: Path, outputs: Path, **variables: str) -> None:
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._variables = {"PATH": beside, "PYTHONUNBUFFERED": "1", **variables}
        self._folder = folder
        self._outputs = outputs
        self._started: list[Program] = []

    def run(self, *command: str) -> str:
        """A program that ends well by itself; what it has written."""
        done = subprocess.run(
            command, cwd=self._folder, env=environment(**self._variables), timeout=_PATIENCE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def start(self, *command: str, **variables: str) -> Program:
        """A program that runs until it is told to end, or the test is over."""
        output = self._outputs / f"output-{len(self._started)}.txt"
        with output.open("wb") as written:
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment(**self._variables, **variables),
                stdout=written, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._started.append(Program(process, output))
        return self._started[-1]

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *error: object) -> None:
        for program in self._started:
            program.end()
