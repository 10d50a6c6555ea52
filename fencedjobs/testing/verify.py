"""All stages on one database, in a place of their own: what `fencedjobs verify` runs."""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencedjobs.dialects import server
from fencedjobs.models import LeaseMixin
from fencedjobs.store import Store
from fencedjobs.testing import event_stages, injection, lease_machines, machines, network, stages
from fencedjobs.testing.faults import hunt, options
from fencedjobs.testing.history import histories
from fencedjobs.testing.home import own_home
from fencedjobs.testing.inbox_machines import inbox_machine
from fencedjobs.testing.lease_machines import lease_machine
from fencedjobs.testing.machines import Effort, job_machine
from fencedjobs.testing.outbox_machines import outbox_machine
from fencedjobs.testing.planting import FAULTS, Fault, Look
from fencedjobs.testing.queue import StoreQueue
from fencedjobs.testing.queue_machines import queue_machine
from fencedjobs.testing.scene import VERBS

_IN_VAIN: Final = 10  # examples in which a fault that cannot occur must not be caught
_PACKAGES: Final = ("fencedjobs", "sqlalchemy", "alembic", "hypothesis")


@dataclass(frozen=True)
class Profile:
    """How much is tried."""

    examples: int  #: of each machine
    steps: int  #: in each of them, at most
    rounds: int  #: of races
    hunt: int  #: examples in which a planted fault must show
    known: bool = True  #: the way to a fault of jobs, where it is the shortest; else all is chance
    stride: int = 8  #: of the operations that can fail, each so-many-th does
    histories: tuple[int, int, int] = (4, 4, 40)  #: of concurrent calls: how many, clients, calls of each


PROFILES: Final = {
    "quick": Profile(examples=25, steps=40, rounds=20, hunt=200),
    "ci": Profile(examples=200, steps=50, rounds=200, hunt=300, stride=2, histories=(40, 4, 100)),
    "nightly": Profile(
        examples=10_000, steps=50, rounds=5_000, hunt=1_000, known=False, stride=1, histories=(1_000, 8, 200)
    ),
}


@dataclass
class Result:
    """What one stage tried, and what it found; ``story`` is how the store broke the contract."""

    stage: str
    about: str
    tried: str = ""
    seed: int | None = None
    seconds: float = 0.0
    passed: bool = False
    story: str = ""
    pairs: dict[str, dict[str, int]] | None = None  #: how often a verb met a lease in each condition


@dataclass
class Verdict:
    """What was checked, where, and with what result."""

    database: dict[str, str]
    profile: str
    seed: int
    results: list[Result] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every stage passed: the store kept the contract, and every planted fault was caught."""
        return bool(self.results) and all(result.passed for result in self.results)

    def facts(self) -> dict[str, Any]:
        """As plain values, for a report."""
        return {**asdict(self), "passed": self.passed}


Watch = Callable[[str, Effort, int], Any]  # a stage begins: its name, what counts up, and to how much


@dataclass(frozen=True)
class Stage:
    """One way to look for a breach of the contract."""

    name: str
    about: str
    run: Callable[[Engine, Profile, int, Effort], None]
    total: Callable[[Profile], int]
    unit: str = "rounds"


def verify(
    engine: Engine,
    *,
    profile: str = "quick",
    seed: int | None = None,
    faults: bool = False,
    watch: Watch = lambda *_: None,
) -> Verdict:
    """Run all stages on the database of ``engine``, in a schema of their own that is made and dropped.

    With ``faults`` each planted fault is looked for as well, and must be caught. ``seed`` makes the
    random parts the same again (threads are never the same).
    """
    start = random.randrange(2**31) if seed is None else seed
    chosen = PROFILES[profile]
    with own_home(engine) as home:
        verdict = Verdict(about(home.engine), profile, start)
        for stage in STAGES:
            result = Result(stage.name, stage.about, seed=start)
            watch(stage.name, effort := Effort(), stage.total(chosen))
            with _judged(result):
                stage.run(home.engine, chosen, start, effort)
            result.tried = str(effort) if effort.steps else f"{effort.examples} {stage.unit}"
            result.pairs = None if effort.coverage is None else effort.coverage.facts()
            verdict.results.append(result)
        if faults:
            verdict.results += _hunts(Store(home.engine), chosen, start, watch)
    return verdict


@contextmanager
def _judged(result: Result) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
        result.passed = True
    except Exception as error:  # noqa: BLE001 - whatever comes out of a store that is not sound
        result.story = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    result.seconds = time.monotonic() - began


def about(engine: Engine) -> dict[str, str]:
    """Versions and settings that a result depends on."""
    with engine.connect() as connection:
        facts = {"database": server(connection.dialect), "driver": engine.dialect.driver}
        facts["isolation of the engine"] = connection.get_isolation_level()
    return facts | {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


# --- the stages -----------------------------------------------------------------------------------


def _how(profile: Profile, part: int = 1) -> settings:
    return settings(
        max_examples=max(1, profile.examples // part), stateful_step_count=profile.steps, deadline=None,
        database=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
        print_blob=False,
    )  # fmt: skip


def _jobs(engine: Engine, profile: Profile, seed: int, effort: Effort) -> None:
    """What chance brings, whose story is shrunk, then each verb with each lease."""
    machine = seeded(seed)(job_machine(Store(engine)))
    machine.effort, effort.coverage = effort, machine.coverage
    run_state_machine_as_test(machine, settings=_how(profile))
    machines.every_pair(machine)


def _backwards(engine: Engine, profile: Profile, seed: int, effort: Effort) -> None:
    machine = seeded(seed)(job_machine(Store(engine), backwards=True))
    machine.effort, effort.coverage = effort, machine.coverage
    run_state_machine_as_test(machine, settings=_how(profile, part=4))


class _Host(DeclarativeBase):
    pass


class _Thing(LeaseMixin, _Host):
    """A table as a host has it, with a condition of its own."""

    __tablename__ = "fj_verify_things"

    id: Mapped[int] = mapped_column(primary_key=True)
    done: Mapped[int] = mapped_column(default=0)


def _leases(engine: Engine, profile: Profile, seed: int, effort: Effort) -> None:
    machine = seeded(seed)(
        lease_machine(Store(engine), _Thing, open=_Thing.done == 0, values={"done": [0, 1]})
    )
    machine.effort, effort.coverage = effort, machine.coverage
    _Host.metadata.create_all(engine)
    try:
        run_state_machine_as_test(machine, settings=_how(profile, part=2))
        lease_machines.every_pair(machine)
    finally:
        _Host.metadata.drop_all(engine)


def _inbox(engine: Engine, profile: Profile, seed: int, effort: Effort) -> None:
    machine = seeded(seed)(inbox_machine(Store(engine)))
    machine.effort = effort
    run_state_machine_as_test(machine, settings=_how(profile, part=2))


def _queue(engine: Engine, profile: Profile, seed: int, effort: Effort) -> None:
    machine = seeded(seed)(queue_machine(StoreQueue(store := Store(engine))))
    machine.effort = effort
    try:
        run_state_machine_as_test(machine, settings=_how(profile, part=4))
    finally:
        stages.emptied(store)


def _outbox(engine: Engine, profile: Profile, seed: int, effort: Effort) -> None:
    machine: Any = seeded(seed)(outbox_machine(engine))
    machine.effort = effort
    run_state_machine_as_test(machine, settings=_how(profile))


def _races(engine: Engine, profile: Profile, seed: int, effort: Effort) -> None:
    store = Store(engine)
    stages.races(store, effort, rounds=profile.rounds)
    stages.emptied(store)
    event_stages.inbox_races(store, effort, rounds=profile.rounds)
    stages.emptied(store)


def _histories(engine: Engine, profile: Profile, seed: int, effort: Effort) -> None:
    number, clients, calls = profile.histories
    histories(Store(engine), effort, number=number, clients=clients, calls=calls, seed=seed)


def _on_store(look: Look) -> Callable[[Engine, Profile, int, Effort], None]:
    """A stage of one size."""

    def run(engine: Engine, profile: Profile, seed: int, effort: Effort) -> None:
        store = Store(engine)
        look(store, effort)
        stages.emptied(store)

    return run


def _injection(engine: Engine, profile: Profile, seed: int, effort: Effort) -> None:
    injection.inject(engine, effort, injection.every(profile.stride, seed))
    network.cut(engine, effort, verbs=VERBS[seed % profile.stride :: profile.stride])


STAGES: Final = [
    Stage("jobs", "random verbs, clocks and leases against the oracle", _jobs, lambda p: p.examples),
    Stage("backwards", "the same with a clock that goes back", _backwards, lambda p: p.examples // 4),
    Stage("leases", "leases on a host's own table against the oracle", _leases, lambda p: p.examples // 2),
    Stage("inbox", "messages and fences of a receiver against the oracle", _inbox, lambda p: p.examples // 2),
    Stage("queue", "the five verbs of any queue", _queue, lambda p: p.examples // 4),
    Stage(
        "outbox",
        "events, relays that die, inbox against the oracle",
        _outbox,
        lambda p: p.examples,
        "examples",
    ),
    Stage(
        "histories",
        "calls of many clients at once, of which some order must fit the contract",
        _histories,
        lambda p: p.histories[0],
        "histories",
    ),
    Stage("races", "threads that start together", _races, lambda p: 2 * p.rounds),
    Stage(
        "transactions",
        "handlers whose transaction breaks",
        _on_store(stages.transactions),
        lambda p: 8,
        "handlers",
    ),
    Stage("guards", "higher, equal and lower fences", _on_store(event_stages.guards), lambda p: 50),
    Stage("conflicts", "other payloads under the same id", _on_store(event_stages.conflicts), lambda p: 3),
    Stage("mended", "an event that is mended while it is sent", _on_store(event_stages.mended), lambda p: 3),
    Stage("clocks", "verbs late in a transaction", _on_store(event_stages.clocks), lambda p: 3),
    Stage("plans", "claims while the planner is misled", _on_store(event_stages.plans), lambda p: 12),
    Stage(
        "injection",
        "every verb with a statement refused, or its line cut",
        _injection,
        lambda p: 180 + 700 // p.stride,
        f"points of failure in {len(VERBS)} verbs",
    ),
]


# --- planted faults -------------------------------------------------------------------------------


def _hunts(store: Store, profile: Profile, seed: int, watch: Watch) -> list[Result]:
    watch("planted faults", progress := Effort(), len(FAULTS))
    results = []
    for fault in FAULTS.values():
        results.append(_hunted(fault, store, profile, seed))
        progress.examples += 1
    return results


def _hunted(fault: Fault, store: Store, profile: Profile, seed: int) -> Result:
    """A planted fault must be caught where it can occur; a kit that catches nothing has failed."""
    result = Result(f"fault: {fault.name}", fault.told, seed=seed)
    began, occurs = time.monotonic(), fault.occurs_on(store)
    examples = profile.hunt if occurs else min(profile.hunt, _IN_VAIN)
    caught = hunt(fault.name, store, **options(fault, examples, seed, known=profile.known))
    result.seconds = time.monotonic() - began
    result.passed = (caught is not None) == occurs
    result.tried = f"caught by {fault.stage} after {caught.effort}" if caught else "cannot occur here"
    if not result.passed:
        result.tried = f"NOT caught by {fault.stage}" if occurs else result.tried
    return result
