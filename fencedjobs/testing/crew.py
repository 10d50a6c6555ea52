"""Clients as processes: they share a clock and a database and nothing else, and some are killed.

Each writes its calls to a file as it makes them, so that the call in which it was killed is known too.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

from sqlalchemy import create_engine

from fencedjobs.store import Store
from fencedjobs.testing.clients import Calls, Cell, LostAnswers, StoreClient
from fencedjobs.testing.sequential import Call

_PATIENCE: Final = 120.0  # seconds that a history may take


@dataclass(frozen=True)
class Task:
    """What a client is to do in one history; ``dies`` is the call in which it kills itself."""

    seed: str
    ids: Sequence[str]
    queue: str
    calls: int
    cuts: float
    path: Path
    dies: int | None = None


class Crew:
    """So many processes, each a client of the database at ``url``."""

    def __init__(self, url: str, clients: int, *, schema: str | None = None) -> None:
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self._url, self._schema = url, schema
        self._cell = self._context.Value("d", 0.0)
        self._folder = TemporaryDirectory()
        self._names = [f"c{number}" for number in range(1, clients + 1)]
        self._members: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._members.values():
            with suppress(OSError):  # it may have died
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()

    def play(
        self, number: int, seed: str, ids: Sequence[str], queue: str, calls: int, *, start: float,
        cuts: float, kill: bool,
    ) -> list[Call]:  # fmt: skip
        """The calls of all clients, of which one is killed in the middle if ``kill`` says so."""
        self._cell.value = start
        chance = random.Random(f"{seed}-kill")
        victim = chance.choice(self._names) if kill else None
        tasks = {}
        for name in self._names:
            path = Path(self._folder.name) / f"{number}-{name}"
            dies = chance.randrange(calls // 4, calls) if name == victim else None
            tasks[name] = Task(f"{seed}-{name}", ids, queue, calls, cuts, path, dies)
        members = {name: self._member(name) for name in tasks}
        for name, (_, pipe) in members.items():
            pipe.send(tasks[name])
        return [call for name in tasks for call in self._finished(name, tasks[name])]

    def _member(self, name: str) -> tuple[Any, Any]:
        if name not in self._members:
            ours, theirs = self._context.Pipe()
            arguments = (name, self._url, self._schema, self._cell, theirs)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._members[name] = process, ours
        return self._members[name]

    def _finished(self, name: str, task: Task) -> list[Call]:
        process, pipe = self._members[name]
        try:
            error = pipe.recv() if pipe.poll(_PATIENCE) else f"no end after {_PATIENCE:g} seconds"
        except EOFError:  # it has died, as it was told to; another takes its place in the next history
            process.join(10)
            del self._members[name]
            error = None if task.dies is not None else f"exit code {process.exitcode}"
        if error is not None:
            raise RuntimeError(f"the client {name} failed: {error}")
        calls = _read(name, task.path)
        task.path.unlink()
        return calls


class _File:
    """A log that outlives its process."""

    def __init__(self, task: Task) -> None:
        self._file = os.open(task.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._left = task.dies
        self._chance = random.Random(f"{task.seed}-death")

    def began(self, verb: str, given: Mapping[str, Any], at: int) -> None:
        os.write(self._file, pickle.dumps((verb, given, at)))
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                threading.Thread(target=_die, args=(self._chance.uniform(0, 0.004),), daemon=True).start()

    def ended(self, at: int, answer: Any) -> None:
        os.write(self._file, pickle.dumps((at, answer)))

    def close(self) -> None:
        os.close(self._file)


def _die(after: float) -> None:
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def _read(client: str, path: Path) -> list[Call]:
    log = Calls(client)
    with path.open("rb") as file:
        while True:
            try:
                entry = pickle.load(file)
            except EOFError:
                return log.calls
            except pickle.UnpicklingError:  # cut off by the kill
                return log.calls
            if len(entry) == 3:
                log.began(*entry)
            else:
                log.ended(*entry)


def _serve(name: str, url: str, schema: str | None, cell: Cell, pipe: Any) -> None:
    """The life of a client process: one history after the other."""
    engine = create_engine(url)
    store, lost = Store(engine, schema=schema), LostAnswers(engine)
    store.counts()  # connected, and the tables checked
    while (task := pipe.recv()) is not None:
        log = _File(task)
        client = StoreClient(
            name, task.seed, task.ids, cell, log, store=store, queue=task.queue, lost=lost, cuts=task.cuts
        )
        try:
            client.run(task.calls)
            error = None
        except Exception as failed:  # noqa: BLE001 - it is told to who plays
            error = f"{type(failed).__name__}: {failed}"
        log.close()
        pipe.send(error)
    engine.dispose()
