"""Concurrent histories: clients hammer a few jobs on a real database, and every call is written down.

    python -m fencedjobs.testing.history --url … --histories 1000 --clients 8 --calls 200 --processes

`linearize` then decides whether some order of the overlapping calls fits the contract. If none does,
the smallest part that can be found is printed as a timeline.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, Final

from sqlalchemy import URL, create_engine, delete, make_url, select

from fencedjobs import schema
from fencedjobs.dialects import capabilities, server
from fencedjobs.models import Job, tables
from fencedjobs.store import Store
from fencedjobs.testing import linearize
from fencedjobs.testing.clients import STARTS, Calls, Client, Local, LostAnswers, QueueClient, StoreClient
from fencedjobs.testing.crew import Crew
from fencedjobs.testing.linearize import PATIENCE, Undecided
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.queue import Queue
from fencedjobs.testing.sequential import Answer, Call
from fencedjobs.testing.timeline import told

JOBS: Final = 4
CUTS: Final = 0.003  #: the part of calls whose answer to COMMIT is lost, if there is one


@dataclass(frozen=True)
class History:
    """What all clients called and heard, and the jobs that it was about."""

    ids: Sequence[str]
    calls: Sequence[Call]
    patience: float = PATIENCE
    seconds: float = field(default=0.0, compare=False)

    def contradictions(self) -> list[str]:
        """Timelines of what no order explains, one for each job; `Undecided` if that takes too long."""
        found = linearize.check(self.calls, self.ids, patience=self.patience)
        return [told(story) for story in found]


def _run(clients: Sequence[Client], calls: int) -> None:
    """All at once, each in a thread of its own; the first error that is not an answer comes out."""
    barrier, errors = threading.Barrier(len(clients)), list[BaseException]()

    def run(client: Client) -> None:
        try:
            barrier.wait(30)
            client.run(calls)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# --- the store ------------------------------------------------------------------------------------


class Recorder:
    """Histories of a store on tables that are empty. ``close`` it, or use it in a with block.

    ``clients`` threads or, with ``url``, processes make ``calls`` calls each on a few jobs. ``cuts``
    is the part of their commits whose answer is lost; of the processes one is killed in every
    ``kill_every``th history. ``mix``, for threads, weighs the calls that need no lease. ``schema`` is where
    the store has its tables.
    """

    def __init__(
        self, store: Store, *, clients: int = 8, calls: int = 200, seed: int = 1, cuts: float = CUTS,
        url: URL | None = None, kill_every: int = 10, mix: Mapping[str, int] | None = None,
        schema: str | None = None,
    ) -> None:  # fmt: skip
        require_empty(store, schema)
        self._jobs = tables(schema)[Job.__tablename__]
        self._store, self._calls, self._seed, self._cuts = store, calls, seed, cuts
        self._names = [f"c{number}" for number in range(1, clients + 1)]
        self._kill_every, self._mix = kill_every, mix
        self._lost = LostAnswers(store.transactions.engine)
        self._stack = ExitStack()
        self._crew: Crew | None = None
        if url is not None:
            text = url.render_as_string(hide_password=False)
            self._crew = self._stack.enter_context(Crew(text, clients, schema=schema))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self._stack.close()

    def record(self, number: int = 0) -> History:
        """The history of this number: its seed is told by it and by the recorder's."""
        seed, start = f"{self._seed}-{number}", STARTS[number % len(STARTS)]
        queue = f"history-{number}"
        ids = [f"{queue}-{place}" for place in range(JOBS)]
        began = time.monotonic()
        try:
            calls = self._crowd(number, seed, ids, queue, start)
            seconds = time.monotonic() - began
            return History(ids, [*calls, *self._last_look(ids)], seconds=seconds)
        finally:
            self._clean(ids)

    def _crowd(self, number: int, seed: str, ids: list[str], queue: str, start: float) -> list[Call]:
        if self._crew is not None:
            kill = self._kill_every > 0 and number % self._kill_every == self._kill_every - 1
            return self._crew.play(
                number, seed, ids, queue, self._calls, start=start, cuts=self._cuts, kill=kill
            )
        clock, logs = Local(), [Calls(name) for name in self._names]
        clock.value = start
        clients = [
            StoreClient(
                log.client, f"{seed}-{log.client}", ids, clock, log,
                store=self._store, queue=queue, lost=self._lost, cuts=self._cuts,
                mix=self._mix,
            )
            for log in logs
        ]  # fmt: skip
        _run(clients, self._calls)
        return [call for log in logs for call in log.calls]

    def _last_look(self, ids: Sequence[str]) -> list[Call]:
        """How all jobs are when everybody has gone."""
        log = Calls("end")
        reader = StoreClient("end", "", ids, Local(), log, store=self._store, queue="")
        for id in ids:
            reader.read(id)
        return log.calls

    def _clean(self, ids: Sequence[str]) -> None:
        with self._store.begin() as uow:
            uow.session.execute(delete(self._jobs).where(self._jobs.c.id.in_(ids)))


def require_empty(store: Store, schema: str | None = None) -> None:
    """Refuse a table with jobs or tombstones: sweeps and purges are of the whole table."""
    with store.begin() as uow:
        if uow.session.execute(select(tables(schema)[Job.__tablename__].c.id).limit(1)).first():
            raise ValueError("there are jobs in this database already; histories need empty tables")


def histories(
    store: Store,
    effort: Any = None,
    *,
    number: int = 20,
    clients: int = 4,
    calls: int = 40,
    seed: int = 1,
    mix: Mapping[str, int] | None = None,
    schema: str | None = None,
) -> int:
    """Record and check so many histories; how many calls they had.

    `Disagreement`, with the timeline, at the first that contradicts the contract.
    """
    total = 0
    with Recorder(store, clients=clients, calls=calls, seed=seed, mix=mix, schema=schema) as recorder:
        for place in range(number):
            history = recorder.record(place)
            total += len(history.calls)
            if effort is not None:
                effort.examples += 1
            if found := history.contradictions():
                raise Disagreement("\n\n".join(found))
    return total


# --- somebody else's queue ------------------------------------------------------------------------


def trial(
    queue: Queue, *, number: int = 20, clients: int = 4, calls: int = 50, seed: int = 1, prefix: str = "job"
) -> str | None:
    """Look for a contradiction in a queue that has the five verbs: its timeline, or ``None``.

    Jobs are named ``<prefix>-<history>-<n>``; no others may be in the queue. They stay in it.
    """
    for place in range(number):
        ids = [f"{prefix}-{place}-{n}" for n in range(2 * JOBS)]
        clock, logs = Local(), [Calls(f"c{n}") for n in range(1, clients + 1)]
        clock.value = STARTS[0] + 1000.0 * place
        crowd = [
            QueueClient(log.client, f"{seed}-{place}-{log.client}", ids, clock, log, queue=queue)
            for log in logs
        ]
        _run(crowd, calls)
        history = History(_named(ids, logs), [call for log in logs for call in log.calls], patience=0.0)
        if found := history.contradictions():
            return found[0]
    return None


def _named(ids: Sequence[str], logs: Sequence[Calls]) -> list[str]:
    """Jobs of earlier histories may be claimed as well, and are not looked at: how they were is unknown."""
    return [id for id in ids if any(call.given.get("id") == id for log in logs for call in log.calls)]


# --- the command ----------------------------------------------------------------------------------


@dataclass
class _Sum:
    """What a run has come to."""

    histories: int = 0
    calls: int = 0
    unknown: int = 0
    gave_up: int = 0
    undecided: int = 0
    recording: float = 0.0
    checking: float = 0.0
    found: list[str] = field(default_factory=list)

    def add(self, history: History) -> None:
        began = time.monotonic()
        try:
            self.found += history.contradictions()
        except Undecided:
            self.undecided += 1
        self.checking += time.monotonic() - began
        self.histories += 1
        self.calls += len(history.calls)
        self.unknown += sum(call.answer is Answer.UNKNOWN for call in history.calls)
        self.gave_up += sum(_gave_up(call) for call in history.calls)
        self.recording += history.seconds


def _gave_up(call: Call) -> bool:
    nothing = call.verb == "claim" and call.answer == () and call.given["id"] is None
    return nothing and ((call.returned or 0) - call.invoked) / 1e9 >= PATIENCE


def main(arguments: list[str] | None = None) -> int:
    """Record histories of many clients on an empty database, and look for one that no order explains."""
    parser = argparse.ArgumentParser(
        prog="python -m fencedjobs.testing.history", description=main.__doc__,
        epilog="The exit code is 1 if a history contradicts the contract, 2 if one stayed undecided.",
    )  # fmt: skip
    parser.add_argument("--url", required=True, help="an empty database; our tables are made if need be")
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--calls", type=int, default=200, help="of each client in each history")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", action="store_true", help="clients are processes, not threads")
    parser.add_argument(
        "--kill-every", type=int, default=10, help="a process dies in every so-manieth history"
    )
    parser.add_argument("--keep", type=Path, help="where to write a history that contradicts, as a pickle")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long; 0: never")
    asked = parser.parse_args(arguments)
    url = make_url(asked.url)
    store = Store(create_engine(url, pool_size=asked.clients))
    schema.upgrade(store.transactions.engine)
    try:
        require_empty(store)
    except ValueError as refused:
        parser.error(str(refused))
    total = _play(store, asked, url)
    sys.stdout.write(_report(store, asked, total))
    store.transactions.engine.dispose()
    return 1 if total.found else 2 if total.undecided else 0


def _play(store: Store, asked: argparse.Namespace, url: URL) -> _Sum:
    total, until = _Sum(), time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    how = {"clients": asked.clients, "calls": asked.calls, "seed": asked.seed, "kill_every": asked.kill_every}
    with Recorder(store, url=url if asked.processes else None, **how) as recorder:
        for number in range(asked.histories):
            history = recorder.record(number)
            total.add(history)
            if total.found and asked.keep:
                asked.keep.write_bytes(pickle.dumps(history))
            if total.found or time.monotonic() > until:
                break
    return total


def _report(store: Store, asked: argparse.Namespace, total: _Sum) -> str:
    kind = "processes" if asked.processes else "threads"
    own = capabilities(store.transactions.engine.dialect).read_committed
    with store.transactions.engine.connect() as connection:
        level = "READ COMMITTED" if own else connection.get_isolation_level()
    lines = [
        *total.found,
        f"histories {total.histories} of {asked.clients} {kind} with {asked.calls} calls each, "
        f"seed {asked.seed}",
        f"calls {total.calls}, without an answer {total.unknown}, claims that gave up {total.gave_up}",
        f"calls/s {total.calls / max(total.recording, 1e-9):.0f} recorded, "
        f"{total.calls / max(total.checking, 1e-9):.0f} checked",
        f"{store.run(lambda tx: server(tx.dialect), reading=True)}, Python {python_version()}, "
        f"SQLAlchemy {version('sqlalchemy')}, isolation level {level}",
        f"undecided {total.undecided}, contradictions {len(total.found)}",
    ]
    return "\n".join([*lines, _verdict(total), ""])


def _verdict(total: _Sum) -> str:
    if total.found:
        return "the contract was broken"
    return "not all could be decided" if total.undecided else "every history fits the contract"


if __name__ == "__main__":
    raise SystemExit(main())
