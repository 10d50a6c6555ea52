"""More ways to look for a mistake: of outbox, inbox and guards, of cut COMMITs, of clocks and of plans.

Like those of `stages`, each is called with a store on empty tables and an `Effort` that it counts up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import event, insert, select, text

from fencedjobs.dialects import capabilities
from fencedjobs.errors import InboxConflict, LeaseLost
from fencedjobs.line import apart
from fencedjobs.models import Base, Job
from fencedjobs.relay import Relay
from fencedjobs.store import Store
from fencedjobs.testing import injection
from fencedjobs.testing.machines import Effort
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.outbox_machines import outbox_machine
from fencedjobs.testing.stages import THREADS, together
from fencedjobs.values import Event, JobState, Lease

_jobs = Base.metadata.tables[Job.__tablename__]


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Disagreement(otherwise)


# --- the machine of the outbox --------------------------------------------------------------------


def outbox(store: Store, effort: Effort, *, examples: int = 200, start: int = 1) -> None:
    """Events, relays that die, and the inbox against the oracle, from a seed; not shrunk, to be quick."""
    checked: Any = seed(start)(outbox_machine(store.transactions.engine))
    checked.effort = effort
    how = settings(
        max_examples=examples, stateful_step_count=40, phases=[Phase.generate], deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=False, report_multiple_bugs=False,
    )  # fmt: skip
    run_state_machine_as_test(checked, settings=how)


# --- races ----------------------------------------------------------------------------------------


def inbox_races(store: Store, effort: Effort, *, rounds: int = 30) -> None:
    """Threads deliver one message, or knock at one guard, at the same moment."""
    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(rounds):
            effort.examples += 1
            for race in (_one_message, _one_message_with_its_effect, _one_guard):
                race(store, pool, f"{race.__name__}-{number}")


def _one_message(store: Store, pool: ThreadPoolExecutor, name: str) -> None:
    ids = [f"{name}-{n}" for n in range(5)]
    answers = together(pool, [lambda: [store.inbox.accept(id, 1) for id in ids]] * THREADS)
    for id, new in zip(ids, zip(*answers, strict=True), strict=True):
        _require(new.count(True) == 1, f"{new.count(True)} of {THREADS} deliveries of {id} were new")


def _one_message_with_its_effect(store: Store, pool: ThreadPoolExecutor, name: str) -> None:
    def deliver() -> bool:
        with store.begin() as uow:
            new = uow.inbox.accept(name, 1)
            if new:
                uow.jobs.enqueue(queue=name)
        return new

    together(pool, [deliver] * THREADS)
    effects = sum(store.counts().get(name, {}).values())
    _require(effects == 1, f"{name} had {effects} effects")


def _one_guard(store: Store, pool: ThreadPoolExecutor, name: str) -> None:
    """Whoever is admitted last has the highest fence."""
    written: list[int] = []

    def knock(fence: int) -> Callable[[], None]:
        def run() -> None:
            with store.begin() as uow:
                if uow.guards.admit(name, fence):
                    written.append(fence)

        return run

    together(pool, [knock(fence) for fence in range(THREADS)])
    _require(written == sorted(written), f"admitted one after the other: {written}")
    highest = store.guards.highest(name)
    _require(highest == max(written), f"the highest fence is {highest}, admitted were {written}")


# --- guards ---------------------------------------------------------------------------------------


def guards(store: Store, effort: Effort, *, rounds: int = 50) -> None:
    """A guard admits a fence if, and only if, none that is higher was there before."""
    chance = random.Random(1)
    highest: dict[str, int] = {}
    for number in range(rounds):
        effort.examples += 1
        resource = chance.choice(("disk", "Disk", "disk "))
        fence = max(0, highest.get(resource, 0) + chance.choice((-2, -1, 0, 0, 1, 2**40 * (number == 9))))
        want = fence >= highest.get(resource, 0)
        got = store.guards.admit(resource, fence, now=float(number))
        _require(got is want, f"fence {fence} after {highest.get(resource)}: admitted is {got}")
        highest[resource] = max(highest.get(resource, 0), fence)
        _require(store.guards.highest(resource) == highest[resource], f"the highest should be {highest}")


# --- COMMIT ---------------------------------------------------------------------------------------


def unknown(store: Store, effort: Effort) -> None:
    """The line is cut before and after the COMMIT of every verb: told as unknown, and never repeated."""
    injection.inject(store.transactions.engine, effort, injection.is_cut_commit, injection.COMMITTING)


# --- clocks ---------------------------------------------------------------------------------------

_SHORT: Final = 0.05  # seconds of a lease


def clocks(store: Store, effort: Effort) -> None:
    """The instant of a verb is its own, not that of the transaction that it is in."""
    own = Store(store.transactions.engine)  # by the database's clock
    for number, verb in enumerate((_completes, _checkpoints, _fails)):
        effort.examples += 1
        own.enqueue(f"late-{number}")
        lease = own.claim("w", ttl=_SHORT, id=f"late-{number}")
        assert lease is not None
        with own.begin() as uow:
            uow.jobs.get(lease.id)
            time.sleep(2 * _SHORT)
            try:
                verb(uow, lease)
            except LeaseLost:
                continue
        raise Disagreement(f"a lease of {_SHORT} s still ran after {2 * _SHORT} s: {verb.__name__}")


def _completes(uow: Any, lease: Lease) -> None:
    uow.jobs.complete(lease)


def _checkpoints(uow: Any, lease: Lease) -> None:
    uow.jobs.checkpoint(lease, 1)


def _fails(uow: Any, lease: Lease) -> None:
    uow.jobs.fail(lease, "why")


# --- plans ----------------------------------------------------------------------------------------

_NESTED: Final = ("hashjoin", "mergejoin", "material")
_PLANNERS: Final = (
    _NESTED,
    (*_NESTED, "hashagg", "sort"),
    (*_NESTED, "indexscan", "bitmapscan", "indexonlyscan"),
    (*_NESTED, "hashagg", "sort", "indexscan", "bitmapscan", "indexonlyscan"),
)  # what it may not use
_MANY: Final = 2_000


def plans(store: Store, effort: Effort) -> None:
    """Whatever the planner believes, a claim takes as many jobs as it was asked for."""
    engine = store.transactions.engine
    can = capabilities(engine.dialect)
    _fill(store, "done", _MANY)
    if can.arrays:
        with engine.begin() as connection:
            connection.execute(text(f"ANALYZE {_jobs.name}"))
    _fill(store, "ready", 500)
    taken = 0
    for without in _PLANNERS if can.arrays else ((),):
        misled = apart(engine)
        for part in without:
            event.listen(misled, "connect", _setting(f"SET enable_{part} = off"))
        for limit in (1, 10, 1):
            effort.examples += 1
            got = Store(misled).claim_many("w", ttl=9.0, limit=limit, now=1.0)
            taken += limit
            with engine.connect() as connection:
                owned = len(connection.execute(select(_jobs.c.id).where(_jobs.c.owner == "w")).all())
            _require(len(got) == limit and owned == taken, f"limit {limit}: {len(got)} given, {owned} leased")
        misled.dispose()


def _setting(statement: str) -> Callable[[Any, Any], None]:
    def run(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(statement)
        cursor.close()
        connection.commit()

    return run


def _fill(store: Store, state: str, count: int) -> None:
    rows = [
        {"id": f"{state}-{number}", "queue": "default", "state": state, "due_at": 0.0, "created_at": 0.0,
         "until": 0.0, "fence": 0, "payload": "null", "finished_at": 1.0 if state == JobState.DONE else None}
        for number in range(count)
    ]  # fmt: skip
    with store.begin() as uow:
        uow.session.execute(insert(_jobs), rows)


# --- mended events --------------------------------------------------------------------------------


def mended(store: Store, effort: Effort) -> None:
    """A relay of one lane comes back to an event that was mended while it was sent, before it reads on."""
    for number in range(3):
        effort.examples += 1
        _mended(store, f"a{number}", f"b{number}")


def _mended(store: Store, first: str, then: str) -> None:
    sent: list[tuple[str, Any]] = []

    def send(event: Event) -> bool:
        sent.append((event.id, event.payload))
        if sent == [(first, 1)]:
            store.outbox.quarantine(first, "it chokes")
            store.outbox.requeue(first, payload=2, by="ann", reason="mended")
        return True

    for id in (first, then):
        store.outbox.add(id, 1, topic="t")
    Relay(store, send, limit=1).run(until_empty=True)
    _require(sent == [(first, 1), (first, 2), (then, 1)], f"it sent {sent}")


# --- conflicts ------------------------------------------------------------------------------------


def conflicts(store: Store, effort: Effort) -> None:
    """Another payload under the same id changes nothing, and is counted."""
    for number in range(3):
        effort.examples += 1
        _require(store.inbox.accept(f"m{number}", 1), "a new message was none")
        try:
            again = store.inbox.accept(f"m{number}", 2)
        except InboxConflict:
            pass
        else:
            raise Disagreement(f"another payload was accepted as {'new' if again else 'a duplicate'}")
        _require(store.inbox.stats().conflicts == number + 1, "a conflict was not counted")
