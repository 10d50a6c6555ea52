"""Three ways to look for a mistake in a store: the machine, races of threads, and broken transactions.

Each is called with a store on empty tables and an `Effort` that it counts up. It returns if the store
kept the contract, and raises if not. A `Store`, not an `AsyncStore`: the verbs are the same.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import DBAPIError

from fencedjobs.dialects import capabilities
from fencedjobs.models import Base, Job, Lock
from fencedjobs.store import Store
from fencedjobs.testing.machines import Effort, job_machine
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.ways import Way
from fencedjobs.uow import UnitOfWork
from fencedjobs.values import JobLease, JobState

T = TypeVar("T")

THREADS: Final = 4
_jobs, _locks = (Base.metadata.tables[model.__tablename__] for model in (Job, Lock))
_ALL: Final = tuple(Base.metadata.sorted_tables)


def is_empty(store: Store) -> bool:
    """Whether there is nothing in any of our tables."""
    with store.begin() as uow:
        rows = [uow.session.execute(select(table).limit(1)).first() for table in _ALL]
    return not any(rows)


def emptied(store: Store) -> None:
    """Delete everything, whatever a mistake has made of it."""
    with store.begin() as uow:
        for table in _ALL:
            uow.session.execute(delete(table))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Disagreement(otherwise)


# --- the machine ----------------------------------------------------------------------------------


def machine(
    store: Store, effort: Effort, *, examples: int = 200, start: int = 1, way: Way | None = None
) -> None:
    """Random verbs, clocks and leases against the oracle, from a seed; not shrunk, to be quick.

    ``way``: these steps before all others.
    """
    if way is not None:
        walk(store, effort, way)
        emptied(store)
    if not examples:
        return
    checked = seed(start)(job_machine(store))
    checked.effort = effort
    how = settings(
        max_examples=examples, stateful_step_count=40, phases=[Phase.generate], deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    run_state_machine_as_test(checked, settings=how)


def walk(store: Store, effort: Effort, way: Way) -> None:
    """These steps of the machine, on two jobs."""
    job, steps = way
    checked = job_machine(store)
    checked.effort = effort
    machine = checked()
    try:
        machine.start(now=1000.0, joined=False, jobs=[{"id": "a", **job}, {"id": "b"}])
        for one in steps:
            machine.step(one)
    finally:
        machine.watcher.close()


# --- races ----------------------------------------------------------------------------------------


def races(store: Store, effort: Effort, *, rounds: int = 150) -> None:
    """Threads that start together, on what only one of them may have."""
    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(rounds):
            effort.examples += 1
            for race in (_one_job, _many_jobs, _one_job_after_another, _sweep_and_cancel):
                race(store, pool, f"{race.__name__}-{number}")


def together(pool: ThreadPoolExecutor, runners: Sequence[Callable[[], T]]) -> list[T]:
    """What these answer, which begin at the same moment."""
    barrier = threading.Barrier(len(runners))

    def run(runner: Callable[[], T]) -> T:
        barrier.wait(timeout=30)
        return runner()

    return list(pool.map(run, runners))


def _one_job(store: Store, pool: ThreadPoolExecutor, name: str) -> None:
    store.enqueue(name, now=0.0)
    claims = together(pool, [lambda: store.claim(ttl=9.0, id=name, now=0.0)] * THREADS)
    winners = [lease for lease in claims if lease]
    _require(len(winners) == 1, f"{len(winners)} of {THREADS} claims got {name}")


def _many_jobs(store: Store, pool: ThreadPoolExecutor, name: str) -> None:
    store.enqueue_many([{"id": f"{name}-{n}", "queue": name} for n in range(3 * THREADS)], now=0.0)

    def drain() -> list[str]:
        claims = iter(lambda: store.claim_many(ttl=9.0, limit=2, queue=name, now=0.0), [])
        return [lease.id for leases in claims for lease in leases]

    taken = sorted(itertools.chain.from_iterable(together(pool, [drain] * THREADS)))
    _require(len(taken) == len({*taken}) == 3 * THREADS, f"claimed were {taken}")


def _one_job_after_another(store: Store, pool: ThreadPoolExecutor, name: str) -> None:
    """Each claim finds the lease of the one before it ended, so all may win, but with fences of their own."""
    store.enqueue(name, max_attempts=1000, now=0.0)
    instants = itertools.count(1)

    def claim() -> list[JobLease]:
        claims = [store.claim(ttl=1.0, id=name, now=float(next(instants))) for _ in range(3)]
        return [lease for lease in claims if lease]

    leases = list(itertools.chain.from_iterable(together(pool, [claim] * THREADS)))
    fences = sorted(lease.fence for lease in leases)
    _require(len(fences) == len({*fences}), f"fences given out: {fences}")


def _sweep_and_cancel(store: Store, pool: ThreadPoolExecutor, name: str) -> None:
    """A cancelled job stays cancelled, whatever a sweep saw before."""
    ids = [f"{name}-{n}" for n in range(3 * THREADS)]
    store.enqueue_many([{"id": id, "queue": name, "deadline": 1.0} for id in ids], now=0.0)

    def cancel(these: list[str]) -> Callable[[], object]:
        return lambda: [store.cancel(id, now=2.0) for id in these]

    def sweep() -> None:
        while store.sweep(limit=3, now=2.0):
            pass

    together(pool, [sweep, sweep, cancel(ids[::2]), cancel(ids[1::2])])
    states = {id: record.state for id in ids if (record := store.get(id))}
    wrong = {id: str(state) for id, state in states.items() if state is not JobState.CANCELLED}
    _require(not wrong, f"cancelled, and then swept: {wrong}")


# --- transactions ---------------------------------------------------------------------------------


@dataclass
class Scene:
    """A handler's transaction: its effect is a row of the locks table, written by hand."""

    store: Store
    uow: UnitOfWork
    effect: str

    def write(self, *names: str) -> None:
        """Add rows, in one statement."""
        self.uow.session.execute(insert(_locks).values([{"name": name} for name in names]))


def transactions(store: Store, effort: Effort) -> None:
    """Handlers whose transaction breaks: the effect and the completion are both there, or neither."""
    set_scene(store)
    for handler in handlers(store):
        effort.examples += 1
        play(store, handler)


def set_scene(store: Store) -> None:
    """The rows that handlers stumble over."""
    with store.begin() as uow:
        uow.session.execute(insert(_locks).values([{"name": name} for name in (TAKEN, FIRST, SECOND)]))


def handlers(store: Store) -> list[Callable[[Scene], None]]:
    """All handlers that mean something on this database."""
    can = capabilities(store.transactions.engine.dialect)
    return [*_WHOLE, *_BROKEN, _ended_by_a_deadlock if can.row_locks else _ended_by_a_conflict]


def play(store: Store, handler: Callable[[Scene], None]) -> None:
    """Complete a job with this handler, and look at what is there afterwards."""
    name = handler.__name__.lstrip("_")
    store.enqueue(name, now=0.0)
    lease = store.claim("A", ttl=9.0, id=name, now=0.0)
    if lease is None:
        raise Disagreement(f"{name} could not be claimed")
    _handle(store, handler, lease)
    _judge(store, name, whole=handler in _WHOLE)


def _handle(store: Store, handler: Callable[[Scene], None], lease: JobLease) -> None:
    now = lease.until if handler is _ends_too_late else 1.0
    with suppress(Exception), store.completing(lease, now=now) as uow:
        handler(Scene(store, uow, f"effect of {lease.id}"))


def _judge(store: Store, name: str, *, whole: bool) -> None:
    record, effect = store.get(name), store.locks.get(f"effect of {name}")
    done = record is not None and record.state is JobState.DONE
    told = f"the handler {name}: the job is {record and record.state}, its effect is {effect}"
    _require(done == (effect is not None) and (done or not whole), told)


TAKEN, FIRST, SECOND = "taken", "first", "second"


def _writes(scene: Scene) -> None:
    scene.write(scene.effect)


def _ends_too_late(scene: Scene) -> None:
    scene.write(scene.effect)


def _keeps_an_error_in_a_savepoint(scene: Scene) -> None:
    scene.write(scene.effect)
    with suppress(DBAPIError), scene.uow.session.begin_nested():
        scene.write(TAKEN)


def _swallows_an_error(scene: Scene) -> None:
    with suppress(DBAPIError):
        scene.write(scene.effect, TAKEN)


def _rolls_back(scene: Scene) -> None:
    scene.write(scene.effect)
    scene.uow.session.rollback()


def _rolls_back_by_hand(scene: Scene) -> None:
    scene.write(scene.effect)
    scene.uow.session.connection().exec_driver_sql("ROLLBACK")


def _commits_and_breaks(scene: Scene) -> None:
    scene.write(scene.effect)
    scene.uow.session.commit()
    raise RuntimeError("the rest of the work failed")


def _ended_by_a_conflict(scene: Scene) -> None:
    """SQLite ends the whole transaction, as it does when the disk is full."""
    scene.write(scene.effect)
    with suppress(DBAPIError):
        scene.uow.session.execute(insert(_locks).prefix_with("OR ROLLBACK").values(name=TAKEN))


def _ended_by_a_deadlock(scene: Scene) -> None:
    """MariaDB rolls back everything and goes on in a new transaction; PostgreSQL refuses to go on."""
    scene.write(scene.effect)
    with _rival(scene) as rival_waits:
        _touch(scene.uow.session.connection(), FIRST)
        rival_waits()
        with suppress(DBAPIError):
            _touch(scene.uow.session.connection(), SECOND)


@contextmanager
def _rival(scene: Scene) -> Iterator[Callable[[], None]]:
    """A transaction that holds SECOND and is made to want FIRST; the heavier one, so that it survives."""
    holds, go = threading.Event(), threading.Event()

    def run() -> None:
        with scene.store.transactions.engine.connect() as connection:
            connection.execute(insert(_locks), [{"name": f"weight-{n}"} for n in range(50)])
            _touch(connection, SECOND)
            holds.set()
            go.wait(timeout=30)
            with suppress(DBAPIError):
                _touch(connection, FIRST)
            connection.rollback()

    thread = threading.Thread(target=run)
    thread.start()
    holds.wait(timeout=30)
    try:
        yield go.set
    finally:
        go.set()
        thread.join(timeout=30)


def _touch(connection: Connection, name: str) -> Any:
    return connection.execute(update(_locks).where(_locks.c.name == name).values(until=_locks.c.until + 1))


_WHOLE: Final = [_writes, _keeps_an_error_in_a_savepoint]
_BROKEN: Final = [_ends_too_late, _swallows_an_error, _rolls_back, _rolls_back_by_hand, _commits_and_breaks]
