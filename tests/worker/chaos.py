"""Workers that are killed, stopped past their leases and restarted at random while they work, and the audit.

The audit believes three witnesses: the jobs, the business rows, and the books, which every process keeps
outside of the database (see `children`).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from fencedjobs import Store, UnitOfWork
from fencedjobs.models import Base
from tests.worker.children import Book, Child, Staff, children, effects

GRACE: Final = 1.0  # seconds in which a worker that is asked to end lets its handlers finish
PAST: Final = 0.4  # seconds beyond its lease for which a worker is stopped at least
JOBS: Final = Base.metadata.tables["fenced_jobs"]

#: what is noted about an attempt that has ended, or whose end is known to the worker
ENDS: Final = ("job.completed", "job.refused", "job.lost", "job.given_back", "job.retried")


@dataclass(frozen=True)
class Plan:
    """How much, how long, how rough."""

    jobs: int
    seconds: float  #: of chaos; jobs are enqueued throughout
    ttl: float
    workers: tuple[bool, ...]  #: one for each: whether it is async
    pause: float  #: seconds between two blows, on average
    seed: int
    patience: float  #: seconds for what is left when the chaos is over


# --- enqueuing, in a process of its own -----------------------------------------------------------


def job(n: int, chance: random.Random, ttl: float) -> dict[str, Any]:
    """Mostly short ones; one in fifty takes 0.2 to 1.5 leases; some fail at first, some only report."""
    long = chance.random() < 0.02
    payload: dict[str, Any] = {"sleeps": chance.uniform(0.2, 1.5) * ttl if long else chance.uniform(0, 0.01)}
    payload["always"] = True
    if chance.random() < 0.01:
        payload["fails"] = True
    kind = "report" if chance.random() < 0.1 else "effect"
    return {"id": f"{n:06}", "kind": kind, "payload": payload, "max_attempts": 10_000}


def enqueuing(url: str, path: str, plan: Plan) -> None:
    """Jobs in the host's own transactions, of which some are rolled back."""
    chance, book = random.Random(plan.seed), Book(path)
    patience = {"timeout": 60} if url.startswith("sqlite") else {}
    engine = create_engine(url, connect_args=patience)
    items = [job(n, chance, plan.ttl) for n in range(plan.jobs)]
    begun, size = time.monotonic(), max(1, plan.jobs // max(1, int(plan.seconds * 8)))
    for first in range(0, plan.jobs, size):
        due = begun + plan.seconds * first / plan.jobs
        time.sleep(max(0.0, due - time.monotonic()))
        batch = items[first : first + size]
        if chance.random() < 0.1:
            _in_the_hosts_transaction(
                engine, [{**item, "id": f"never {item['id']}"} for item in batch], False
            )
        _in_the_hosts_transaction(engine, batch, True)
    book("enqueued", count=plan.jobs, seconds=time.monotonic() - begun)


def _in_the_hosts_transaction(engine: Engine, batch: list[dict[str, Any]], commits: bool) -> None:
    while True:
        try:
            with Session(engine) as session:
                UnitOfWork(session).jobs.enqueue_many(batch)
                if commits:
                    session.commit()
                return
        except OperationalError:  # a deadlock: the host does it again
            time.sleep(0.01)


# --- the blows ------------------------------------------------------------------------------------


@dataclass
class Slot:
    """A place for a worker, and who has it now."""

    is_async: bool
    child: Child
    since: float
    wakes_at: float | None = None  #: it is stopped until then
    ends_by: float | None = None  #: it was killed or asked to end, and must have by then


@dataclass
class Blow:
    """What was done to a worker, and when."""

    kind: str
    pid: int
    at: float
    until: float = 0.0  #: when a stopped one was woken


@dataclass
class Chaos:
    """The workers on one database, and what strikes them."""

    plan: Plan
    staff: Staff
    store: Store
    blows: list[Blow] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    began: float = 0.0
    drained: float = 0.0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.plan.seed + 1)

    def run(self) -> None:
        """Work under blows for as long as planned, then work off what is left, and go home."""
        plan = self.plan
        self.began = time.monotonic()
        book = self.staff.directory / "enqueued.jsonl"
        enqueuer = children().Process(target=enqueuing, args=(self.staff.url, str(book), plan), daemon=True)
        enqueuer.start()
        self.staff.processes.append(enqueuer)
        self.slots = [self._hired(is_async) for is_async in plan.workers]
        self._strike_until(self.began + plan.seconds)
        for slot in self.slots:
            self._wake(slot)
        self._await(lambda: not enqueuer.is_alive(), "the enqueuing has ended")
        assert enqueuer.exitcode == 0
        self._await(lambda: not self.open_jobs(), "all jobs have ended")
        self.drained = time.monotonic()
        self._send_home()

    def open_jobs(self) -> int:
        with self.store.transactions.engine.connect() as connection:
            open = select(func.count()).where(JOBS.c.state.in_(["ready", "scheduled", "leased"]))
            return int(connection.execute(open).scalar_one())

    def _hired(self, is_async: bool) -> Slot:
        child = self.staff.start(is_async=is_async, ttl=self.plan.ttl, grace=GRACE, concurrency=8)
        return Slot(is_async, child, time.monotonic())

    def _strike_until(self, end: float) -> None:
        next_blow, kinds = time.monotonic() + self.plan.pause, self._kinds()
        while time.monotonic() < end or len(self.blows) < 3:  # one of each kind at least
            self._look_after()
            able = [slot for slot in self.slots if self._is_at_work(slot)]
            if time.monotonic() >= next_blow and able:
                self._strike(self.chance.choice(able), next(kinds))
                next_blow = time.monotonic() + self.chance.uniform(0.5, 1.5) * self.plan.pause
            time.sleep(0.01)

    def _kinds(self) -> Any:
        """Each kind again and again, in a random order."""
        while True:
            yield from self.chance.sample(["kill", "stop", "term"], 3)

    def _is_at_work(self, slot: Slot) -> bool:
        free = slot.wakes_at is None and slot.ends_by is None and slot.child.process.is_alive()
        if not free or time.monotonic() < slot.since + 0.3 or not slot.child.path.exists():
            return False
        with slot.child.path.open("rb") as book:
            return b"job.claimed" in book.read(2000)

    def _strike(self, slot: Slot, kind: str) -> None:
        now, child = time.monotonic(), slot.child
        self.blows.append(Blow(kind, child.pid, now))
        if kind == "kill":
            child.signal(signal.SIGKILL)
            slot.ends_by = now + 15
        elif kind == "stop":
            child.signal(signal.SIGSTOP)
            slot.wakes_at = now + self.plan.ttl + self.chance.uniform(PAST, self.plan.ttl)
        else:
            child.signal(signal.SIGTERM)
            slot.ends_by = now + GRACE + 15

    def _look_after(self) -> None:
        """Wake who has slept enough, and put somebody in the place of who has ended."""
        for n, slot in enumerate(self.slots):
            if slot.wakes_at is not None and time.monotonic() >= slot.wakes_at:
                self._end_of_sleep(slot)
            if not slot.child.process.is_alive():
                self._gone(slot)
                self.slots[n] = self._hired(slot.is_async)
            elif slot.ends_by is not None and time.monotonic() > slot.ends_by:
                self.troubles.append(f"{slot.child.pid} did not end in time")
                slot.child.signal(signal.SIGKILL)
                slot.ends_by = None

    def _end_of_sleep(self, slot: Slot) -> None:
        """Most wake; one in eight never does."""
        if self.chance.random() < 1 / 8:
            slot.wakes_at = None
            self._strike(slot, "kill")
        else:
            self._wake(slot)

    def _wake(self, slot: Slot) -> None:
        if slot.wakes_at is None:
            return
        slot.wakes_at, slot.since = None, time.monotonic()  # it has a little time to say what it finds
        slot.child.signal(signal.SIGCONT)
        for blow in self.blows:
            if (blow.kind, blow.pid, blow.until) == ("stop", slot.child.pid, 0.0):
                blow.until = time.monotonic()

    def _gone(self, slot: Slot) -> None:
        """How it ended was what it was told; one that was asked to end has left no lease behind."""
        pid, code = slot.child.pid, slot.child.ended()
        told = next((blow.kind for blow in reversed(self.blows) if blow.pid == pid), None)
        if code != {"kill": -signal.SIGKILL, "term": 0}.get(told or ""):
            self.troubles.append(f"{pid} has ended with {code} after {told}: {slot.child.lines[-3:]}")
        if told == "term":
            self._require_nothing_left(slot.child)

    def _require_nothing_left(self, child: Child) -> None:
        """But leases that were over, or that it took for lost and said so: they end by themselves."""
        owner, now = child.of("worker.started")[0]["owner"], self.store.now()
        lost = {(line["id"], line["fence"]) for line in child.of("job.lost")}
        with self.store.transactions.engine.connect() as connection:
            live = select(JOBS.c.id, JOBS.c.fence).where(JOBS.c.owner == owner, JOBS.c.until > now)
            for id, fence in connection.execute(live):
                if (id, fence) not in lost:
                    said = [line for line in child.lines if line.get("id") == id]
                    self.troubles.append(f"{child.pid} has ended and left {id!r}, {fence}, leased: {said}")

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self.plan.patience
        while not condition():
            assert time.monotonic() < end, f"not in time: {what}; {self.store.counts()}; {self.troubles}"
            self._look_after()
            time.sleep(0.1)

    def _send_home(self) -> None:
        for slot in self.slots:
            self._strike(slot, "term")
        for slot in self.slots:
            slot.child.ended()
            self._gone(slot)


# --- the audit ------------------------------------------------------------------------------------


Claim = tuple[str, int]  #: a job's id and a fence


@dataclass
class Audit:
    """Whether the three witnesses agree, and on what figures."""

    chaos: Chaos
    engine: Engine

    def __post_init__(self) -> None:
        self.lines = self.chaos.staff.lines
        self.killed = {blow.pid for blow in self.chaos.blows if blow.kind == "kill"}
        self.starts: dict[Claim, list[dict[str, Any]]] = defaultdict(list)
        self.ends: dict[Claim, list[dict[str, Any]]] = defaultdict(list)
        self.ready: dict[Claim, float] = {}
        self.claimed: dict[Claim, dict[str, Any]] = {}
        for line in self.lines:
            claim = (line.get("id", ""), line.get("fence", 0))
            if line["event"] == "start":
                self.starts[claim].append(line)
            elif line["event"] == "ready":
                self.ready[claim] = line["at"]
            elif line["event"] == "job.claimed":
                self.claimed[claim] = line
            elif line["event"] in ENDS:
                self.ends[claim].append(line)
        self.jobs = self._jobs()
        self.rows = effects(self.engine)

    def _jobs(self) -> dict[str, Any]:
        columns = [JOBS.c[name] for name in "id kind state fence attempts owner result".split()]
        with self.engine.connect() as connection:
            return {row.id: row for row in connection.execute(select(*columns))}

    def told(self, claim: Claim, *events: str) -> bool:
        return any(line["event"] in events for line in self.ends[claim])

    # --- what must hold

    def require(self) -> None:
        """Fail with all that is wrong."""
        wrong = [*self.chaos.troubles]
        for check in (self._done, self._once, self._fences, self._attempts, self._endings, self._stopped):
            wrong += check()
        assert not wrong, f"{len(wrong)} things are wrong, seed {self.chaos.plan.seed}:\n" + "\n".join(
            wrong[:30]
        )

    def _done(self) -> list[str]:
        """Every job that was committed is done, and there are no others."""
        planned = {f"{n:06}" for n in range(self.chaos.plan.jobs)}
        wrong = [f"job {id} is missing or was rolled back" for id in planned ^ set(self.jobs)]
        return wrong + [f"job {id} is {row.state}" for id, row in self.jobs.items() if row.state != "done"]

    def _once(self) -> list[str]:
        """One row for each job that writes one, none for the others, by the attempt that ended the job."""
        found = Counter(id for id, _ in self.rows)
        wrong = [
            f"job {id} ({row.kind}) has {found[id]} rows"
            for id, row in self.jobs.items()
            if found[id] != (row.kind == "effect")
        ]
        for id, fence in self.rows:
            if self.jobs[id].fence != fence:
                wrong.append(f"the row of {id} is of fence {fence}, the job of {self.jobs[id].fence}")
        for id, row in self.jobs.items():
            if row.result != f'{{"fence":{row.fence}}}':
                wrong.append(f"the result of {id} is {row.result}, its fence {row.fence}")
        return wrong

    def _fences(self) -> list[str]:
        """No claim was executed twice; none is later than the one that ended the job."""
        wrong = [f"{claim} was started {len(of)} times" for claim, of in self.starts.items() if len(of) > 1]
        for id, fence in {*self.starts, *self.claimed}:
            if fence > self.jobs[id].fence:
                wrong.append(f"{id} was claimed under {fence} after it had ended under {self.jobs[id].fence}")
        wrong += [
            f"{id} ended under {row.fence}, and nobody had started that"
            for id, row in self.jobs.items()
            if (id, row.fence) not in self.starts
        ]
        return wrong

    def _attempts(self) -> list[str]:
        """Every claim was charged, but those that were given back."""
        back = Counter(id for (id, fence) in self.ends if self.told((id, fence), "job.given_back"))
        unsaid = Counter(id for id, fence in self.unsaid())
        wrong = []
        for id, row in self.jobs.items():
            refunds = row.fence - row.attempts
            if not back[id] <= refunds <= back[id] + unsaid[id]:
                wrong.append(f"{id}: {refunds} attempts refunded, {back[id]} given back, {unsaid[id]} unsaid")
        return wrong

    def unsaid(self) -> list[Claim]:
        """The claims of which nobody lived to tell the end."""
        claims = [(id, fence) for id, row in self.jobs.items() for fence in range(1, row.fence + 1)]
        return [claim for claim in claims if not self.ends[claim]]

    def _endings(self) -> list[str]:
        """Who was not killed has told the end of everything that it began; what it told is true."""
        wrong = []
        for claim in self.unsaid():
            if claim in self.claimed and self.claimed[claim]["pid"] not in self.killed:
                wrong.append(
                    f"{claim} was claimed by one that was not killed, and it does not say what became"
                )
        for claim in self.ends:
            id, fence = claim
            last = self.jobs[id].fence == fence
            if self.told(claim, "job.completed") and not last:
                wrong.append(
                    f"{claim} was said to be completed, but the job ended under {self.jobs[id].fence}"
                )
            if self.told(claim, "job.refused", "job.given_back", "job.retried") and last:
                wrong.append(f"{claim} ended the job, and was said not to have: {self.ends[claim]}")
        return wrong

    def past_their_leases(self) -> list[Claim]:
        """The claims whose handler was stopped in the middle of its work until the lease was surely over."""
        found = []
        for blow in self.chaos.blows:
            if blow.kind == "stop" and blow.until - blow.at > self.chaos.plan.ttl + PAST / 2:
                found += [
                    claim
                    for claim, (line, *_) in self.starts.items()
                    if line["pid"] == blow.pid
                    and line["at"] < blow.at
                    and self.ready.get(claim, blow.until) >= blow.until
                    and not any(end["at"] < blow.at for end in self.ends[claim])
                ]
        return found

    def _stopped(self) -> list[str]:
        """Who was stopped past the lease in its handler has been refused, or told that the lease is lost."""
        wrong = []
        for claim in self.past_their_leases():
            id, fence = claim
            if self.jobs[id].fence == fence:
                wrong.append(f"{claim} was stopped past its lease, and ended the job all the same")
            untold = self.starts[claim][0]["pid"] in self.killed and not self.ends[claim]
            if not untold and not self.told(claim, "job.refused", "job.lost"):
                wrong.append(f"{claim} was stopped past its lease, and then: {self.ends[claim]}")
        return wrong

    # --- the figures

    def figures(self) -> dict[str, Any]:
        """What is published."""
        chaos, counts = self.chaos, Counter(blow.kind for blow in self.chaos.blows)
        said = {event: sum(self.told(claim, event) for claim in self.ends) for event in ENDS}
        troubles = Counter(line["part"] for line in self.lines if line["event"] == "worker.trouble")
        return {
            "seed": chaos.plan.seed,
            "commit": commit(),
            "jobs": len(self.jobs),
            "kills": counts["kill"],
            "stops": counts["stop"],
            "terms": counts["term"] - len(chaos.slots),
            "workers": len(chaos.staff.processes) - 1,
            "executions": len(self.starts),
            "effects": len(self.rows),
            "redeliveries": sum(row.fence - 1 for row in self.jobs.values()),
            "completed, and said so": said["job.completed"],
            "refused": said["job.refused"],
            "lost": said["job.lost"],
            "refused or lost": sum(self.told(claim, "job.refused", "job.lost") for claim in self.ends),
            "given back": said["job.given_back"],
            "retried": said["job.retried"],
            "stopped past the lease in a handler": len(self.past_their_leases()),
            "ends nobody lived to tell": len(self.unsaid()),
            "troubles": dict(troubles),
            "longest wait": round(max(line["waited"] for line in self.claimed.values()), 2),
            "seconds": round(chaos.drained - chaos.began, 1),
            "jobs/s": round(len(self.jobs) / (chaos.drained - chaos.began), 1),
        }


def commit() -> str:
    """Of the working copy."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or "?"


def from_environment(name: str, otherwise: float) -> float:
    """A parameter of a run by hand."""
    return float(os.environ.get(f"FENCEDJOBS_CHAOS_{name}", otherwise))
