"""Every way that two workers and two jobs can go, as far as wanted: the oracle itself is checked.

    python -m fencedjobs.testing.explore --depth 12

From two jobs on, each state is followed by every step: any worker claims, or uses any lease that it
has ever had; an operator acts; the clock goes on; a worker dies and forgets. States that differ only
in the names of the workers or the jobs, or in instants and fences that are all shifted, are one. So
the states come to an end, and then no longer run can show anything new.

What is checked is not the oracle's rules but the promises, kept by a bookkeeper that sees answers
only: one live holder at most; every claim raises the fence, and nothing lowers it; no write of a lease
that is over is accepted, and none of a live one refused; attempts are counted and capped; done is
final; a free job can be claimed. `BROKEN` are oracles with one mistake each, of which it must find all.
(That the guard asks for the owner too cannot be missed here: no fence is given twice, as it could be
after a failover that lost a commit.)
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fencedjobs.errors import LeaseLost
from fencedjobs.testing.model import OPEN, Disagreement, JobModel, Row
from fencedjobs.values import JobLease, JobState, Lease

WORKERS: Final = ("w1", "w2")
JOBS: Final = ("a", "b")
TTL: Final = 2.0
WAIT: Final = 1.0
ATTEMPTS: Final = 2


class Broken(AssertionError):
    """A promise does not hold."""


@dataclass(frozen=True)
class _Pause:
    """How long a failed job waits: no chance in it, so that states stay few."""

    base: float = WAIT
    factor: float = 1.0
    cap: float = WAIT
    jitter: bool = False


# --- the bookkeeper -------------------------------------------------------------------------------


@dataclass(slots=True)
class Book:
    """What the answers so far have said about one job."""

    open: bool = False
    done: bool = False
    fence: int = 0  #: the highest that was given
    attempts: int = 0
    holder: tuple[str, int] | None = None
    until: float = 0.0
    free_from: float = 0.0

    def live(self, now: float) -> bool:
        """Whether somebody has the right to end the attempt."""
        return self.holder is not None and now < self.until

    def free(self, now: float) -> bool:
        """Whether a claim must get it."""
        rested = self.until <= now if self.holder else self.free_from <= now
        return self.open and rested and self.attempts < ATTEMPTS

    def claimed(self, lease: JobLease, now: float) -> None:
        """Somebody has got it."""
        _promise(not self.live(now), f"{lease.id} has two live holders: {self.holder} and {_name(lease)}")
        _promise(self.open, f"{lease.id} was claimed though it is done or set aside")
        _promise(lease.fence > self.fence, f"the fence of {lease.id} goes from {self.fence} to {lease.fence}")
        _promise(lease.attempt == self.attempts + 1, f"attempt {lease.attempt} follows {self.attempts}")
        _promise(lease.attempt <= ATTEMPTS, f"attempt {lease.attempt} of {ATTEMPTS} was given")
        self.fence, self.attempts = lease.fence, lease.attempt
        self.holder, self.until = _name(lease), lease.until

    def used(self, verb: str, lease: Lease, accepted: bool, now: float) -> None:
        """A lease was presented."""
        mine = self.holder == _name(lease)
        if accepted:
            told = f"{verb} of {_name(lease)} was accepted at {now:g}, but the holder is {self.holder}"
            _promise(mine and (verb == "release" or self.live(now)), f"{told} until {self.until:g}")
        else:
            _promise(not (mine and self.live(now)), f"{verb} of {_name(lease)} was refused, but it is live")

    def left(self, now: float, wait: float = 0.0) -> None:
        """The attempt is over, and the job waits for the next one."""
        self.holder, self.free_from = None, now + wait

    def closed(self, *, done: bool) -> None:
        """No further attempt."""
        self.holder, self.open, self.done = None, False, done


def _name(lease: Lease) -> tuple[str, int]:
    return lease.owner, lease.fence


def _promise(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


# --- states and steps -----------------------------------------------------------------------------


@dataclass
class World:
    """One state: the oracle's rows, what workers remember, what the bookkeeper knows."""

    model: JobModel
    now: float = 0.0
    memory: dict[tuple[str, str], tuple[JobLease, ...]] = field(default_factory=dict)
    books: dict[str, Book] = field(default_factory=dict)

    def fork(self, moved: Sequence[str] = ()) -> World:
        """The same state, to be changed; ``moved`` are the rows that the store is said to have chosen."""
        model = type(self.model)(lambda _: None)
        model.rows, model._places = (
            {id: _twin(row) for id, row in self.model.rows.items()},
            self.model._places,
        )
        model.look = lambda id: None if id in moved else model.rows.get(id)  # type: ignore[assignment,return-value]
        return World(model, self.now, dict(self.memory), {id: _twin(book) for id, book in self.books.items()})

    def key(self) -> Any:
        """The same for all states that go on in the same way."""
        return min(self._seen_as(WORKERS), self._seen_as(WORKERS[::-1]))

    def _seen_as(self, workers: Sequence[str]) -> tuple[Any, ...]:
        names: dict[str | None, int] = {None: 0, workers[0]: 1, workers[1]: 2}
        rows, now = self.model.rows.values(), self.now
        ends = sorted({row.until for row in rows if row.due(now)})
        jobs = []
        for row in rows:
            until = 100.0 if not row.until else row.until - now  # the rank of those that are due is enough
            if row.due(now):
                until = float(ends.index(row.until) - len(ends))
            before = sum(other.place < row.place for other in rows)
            past = [self._remembered(worker, row) for worker in workers]
            state = (row.state.value, until, names[row.owner], row.attempts, before, *past)
            jobs.append((*state, *self._known(self.books[row.id], names)))
        return tuple(sorted(jobs))

    def _remembered(self, worker: str, row: Row) -> int:
        """Whether a worker has a lease of the fence that the row has now, or one that is older, or both."""
        leases = self.memory.get((worker, row.id), ())
        return sum({1 if lease.fence == row.fence else 2 for lease in leases})

    def _known(self, book: Book, names: Mapping[str | None, int]) -> tuple[Any, ...]:
        if book.holder is None:
            return (book.open, book.done, book.attempts, 0, 0, max(0.0, book.free_from - self.now))
        owner, fence = book.holder
        ahead = max(0.0, book.until - self.now)
        return (book.open, book.done, book.attempts, names[owner], book.fence - fence, ahead)


def _twin(thing: Any) -> Any:
    """A shallow copy, quicker than that of `copy`: lists in it are replaced, never changed."""
    made = object.__new__(type(thing))
    for name in thing.__slots__:
        setattr(made, name, getattr(thing, name))
    return made


Step = tuple[str, ...]


def steps(world: World) -> Iterator[Step]:
    """Everything that can come next."""
    yield ("tick",)
    for worker in WORKERS:
        yield from (("claim", worker, id) for id in JOBS)
        yield ("claim next", worker)
        for (who, id), leases in world.memory.items():
            if who == worker and leases:
                for nth in range(len(leases)):
                    yield from ((verb, worker, id, str(nth)) for verb in _USES)
        if any(leases for (who, _), leases in world.memory.items() if who == worker):
            yield ("crash", worker)
    for id in JOBS:
        yield from ((verb, id) for verb in ("enqueue", "cancel", "quarantine", "requeue"))
    yield from (("sweep",), ("purge",))


_USES: Final = ("renew", "complete", "fail", "give up", "release")
_CHOOSES: Final = ("claim", "claim next", "sweep", "purge")


def taken(world: World, step: Step) -> Iterator[World]:
    """Where a step can lead to: one world for each choice that the contract leaves."""
    moves: Sequence[Sequence[str]] = [()]
    if step[0] in _CHOOSES:
        some = [row.id for row in world.model.rows.values() if _may_move(row, world.now)]
        moves = [moved for size in range(3) for moved in itertools.combinations(some, size)]
    for moved in moves:
        after = world.fork(moved)
        try:
            _ACTS[step[0]](after, *step[1:])
        except Disagreement:  # not a choice that a store has
            continue
        _hold(after)
        yield after


def _may_move(row: Row, now: float) -> bool:
    """Whether a verb of many may choose it."""
    return row.due(now) or row.state in _ENDED or (row.state in OPEN and bool(row.spent(now)))


_ENDED: Final = (JobState.DONE, JobState.CANCELLED)


def _hold(world: World) -> None:
    """What must be so in every state."""
    for id, book in world.books.items():
        row = world.model.rows.get(id)
        _promise(row is not None and row.fence >= book.fence, f"the fence of {id} fell under {book.fence}")
        if book.done and row is not None:
            _promise(row.state in (JobState.DONE, JobState.PURGED), f"{id} was done, and is {row.state}")
        if book.live(world.now) and row is not None:
            _promise(
                (row.owner, row.fence) == book.holder, f"{id} was taken from its live holder {book.holder}"
            )


def _tick(world: World) -> None:
    world.now += 1.0


def _crash(world: World, worker: str) -> None:
    world.memory = {key: leases for key, leases in world.memory.items() if key[0] != worker}


def _claim(world: World, worker: str, id: str | None = None) -> None:
    free = [one for one in JOBS if id in (None, one) and world.books[one].free(world.now)]
    lease = world.model.claim(worker, ttl=TTL, id=id, now=world.now)
    if lease is None:
        _promise(not free, f"{free} can be claimed, but was not")
        _gather_set_aside(world)
        return
    world.books[lease.id].claimed(lease, world.now)
    _gather_set_aside(world)
    past = world.memory.get((worker, lease.id), ())
    world.memory[worker, lease.id] = (*past, lease)[-2:]


def _gather_set_aside(world: World) -> None:
    """Rows that a claim, a sweep or a purge has put out of reach: none that is free or held may be."""
    for id, book in world.books.items():
        row = world.model.rows[id]
        if row.state is JobState.QUARANTINED and book.open:
            told = f"{id} was set aside with {book.attempts} of {ATTEMPTS} attempts, held by {book.holder}"
            _promise(not book.live(world.now) and book.attempts >= ATTEMPTS, told)
            book.closed(done=False)


def _use(verb: str) -> Callable[[World, str, str, str], None]:
    def act(world: World, worker: str, id: str, nth: str) -> None:
        lease, book, now = world.memory[worker, id][int(nth)], world.books[id], world.now
        try:
            until = _CALLS[verb](world.model, lease, now)
        except LeaseLost:
            book.used(verb, lease, False, now)
            return
        book.used(verb, lease, True, now)
        if verb == "renew":
            book.until = until
        elif verb in ("complete", "give up"):
            book.closed(done=verb == "complete")
        else:
            aside = world.model.rows[id].state is JobState.QUARANTINED
            book.closed(done=False) if aside else book.left(now, WAIT if verb == "fail" else 0.0)

    return act


_CALLS: Final[Mapping[str, Callable[[JobModel, JobLease, float], Any]]] = {
    "renew": lambda model, lease, now: model.renew(lease, ttl=TTL, now=now).until,
    "complete": lambda model, lease, now: model.complete(lease, now=now),
    "fail": lambda model, lease, now: model.fail(lease, "no", retry=_Pause(), now=now),
    "give up": lambda model, lease, now: model.fail(lease, "no", retry=None, now=now),
    "release": lambda model, lease, now: model.release(lease, now=now),
}


def _enqueue(world: World, id: str) -> None:
    book, gone = world.books.setdefault(id, Book()), world.model.rows.get(id)
    new = gone is None or gone.state is JobState.PURGED
    if world.model.enqueue(id, max_attempts=ATTEMPTS, now=world.now) is not None:
        _promise(new, f"{id} was enqueued though it exists")
        book.open, book.done, book.attempts, book.holder, book.free_from = True, False, 0, None, world.now


def _operate(verb: str) -> Callable[[World, str], None]:
    def act(world: World, id: str) -> None:
        book, now = world.books[id], world.now
        said: dict[str, Any] = {"reason": "odd"} if verb == "quarantine" else {}
        said |= {"by": "op", "reason": "mended"} if verb == "requeue" else {}
        if not getattr(world.model, verb)(id, **said, now=now):
            return
        _promise(not book.done, f"{verb} of {id}, which was done")
        if verb == "requeue":
            _promise(not book.open, f"{id} was requeued, but it had not been set aside")
            book.open, book.attempts, book.holder, book.free_from = True, 0, None, now
        else:
            book.closed(done=False)

    return act


def _sweep(world: World) -> None:
    world.model.sweep(limit=1, now=world.now)
    _gather_set_aside(world)


def _purge(world: World) -> None:
    world.model.purge(before=world.now + 1.0, limit=1)
    for id, book in world.books.items():
        purged = world.model.rows[id].state is JobState.PURGED
        _promise(not (purged and book.open), f"{id} was purged before its end")


_ACTS: Final[Mapping[str, Callable[..., None]]] = {
    "tick": _tick, "crash": _crash, "claim": _claim, "claim next": _claim, "enqueue": _enqueue,
    "sweep": _sweep, "purge": _purge,
    **{verb: _use(verb) for verb in _USES},
    **{verb: _operate(verb) for verb in ("cancel", "quarantine", "requeue")},
}  # fmt: skip


# --- the search -----------------------------------------------------------------------------------


@dataclass
class Explored:
    """What was seen; ``story`` are the steps to a promise that does not hold, the fewest there are."""

    states: int = 0
    taken: int = 0
    depth: int = 0
    closed: bool = False  #: no state is left that has not been followed: no longer run shows more
    seconds: float = 0.0
    broken: str | None = None
    story: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        end = "all there are" if self.closed else "there are more"
        seen = f"{self.states} states ({end}), {self.taken} steps, depth {self.depth}, {self.seconds:.1f} s"
        return seen if self.broken is None else f"{seen}: {self.broken}, after {'; '.join(self.story)}"


def explore(model: type[JobModel] = JobModel, *, depth: int = 12) -> Explored:
    """Go every way up to so many steps, breadth first; stops at the first broken promise."""
    began, seen, result = time.monotonic(), dict[Any, tuple[Any, Step | None]](), Explored()
    first = World(model(lambda _: None))
    for id in JOBS:
        _enqueue(first, id)
    edge = [(first.key(), first)]
    seen[edge[0][0]] = (None, None)
    try:
        for result.depth in range(1, depth + 1):
            edge = list(_further(edge, seen, result))
            if not edge:
                result.closed = True
                break
    except _Found as found:
        result.broken, result.story = str(found.__cause__), [*_way(found.key, seen), " ".join(found.step)]
    result.states, result.seconds = len(seen), time.monotonic() - began
    return result


class _Found(Exception):
    def __init__(self, key: Any, step: Step) -> None:
        super().__init__(key, step)
        self.key = key
        self.step = step


def _further(
    edge: Sequence[tuple[Any, World]], seen: dict[Any, tuple[Any, Step | None]], result: Explored
) -> Iterator[tuple[Any, World]]:
    for key, world in edge:
        for step in steps(world):
            try:
                for after in taken(world, step):
                    result.taken += 1
                    there = after.key()
                    if there not in seen:
                        seen[there] = (key, step)
                        yield there, after
            except Broken as broken:
                raise _Found(key, step) from broken


def _way(key: Any, seen: Mapping[Any, tuple[Any, Step | None]]) -> list[str]:
    way = []
    while (come := seen[key])[1] is not None:
        way.append(" ".join(come[1]))
        key = come[0]
    return way[::-1]


# --- oracles with one mistake each ----------------------------------------------------------------


class _CompleteById(JobModel):
    def complete(self, lease: Lease, result: Any = None, *, now: float) -> None:
        row = self.rows[lease.id]
        row.leave(JobState.DONE)
        row.finished_at = now


class _Guard(JobModel):
    """The guard with something left out."""

    fence = time = True
    slack = False

    def _held(self, lease: Lease, now: float | None) -> Row:
        row = self.rows.get(lease.id)
        if row is None or row.state is not JobState.LEASED:
            raise LeaseLost(lease, row)
        same = row.owner == lease.owner and (not self.fence or row.fence == lease.fence)
        in_time = now is None or not self.time or row.live(now) or (self.slack and row.until == now)
        if not (same and in_time):
            raise LeaseLost(lease, row)
        return row


class _ByOwner(_Guard):
    fence = False


class _WithoutTime(_Guard):
    time = False


class _ValidAtTheEnd(_Guard):
    slack = True


class _ClaimsTheLiving(JobModel):
    def claim(self, *args: Any, id: str | None = None, **more: Any) -> JobLease | None:
        row = self.rows.get(id or "")
        if row is not None and row.state is JobState.LEASED:
            row.until = min(row.until, more["now"])
        return super().claim(*args, id=id, **more)


class _FreeAfterTheEnd(JobModel):
    def claim(self, *args: Any, id: str | None = None, **more: Any) -> JobLease | None:
        row = self.rows.get(id or "")
        if row is not None and row.state is JobState.LEASED and row.until == more["now"]:
            return None
        return super().claim(*args, id=id, **more)


class _SameFence(JobModel):
    def claim(self, *args: Any, **more: Any) -> JobLease | None:
        lease = super().claim(*args, **more)
        if lease is None or lease.fence == 1:
            return lease
        self.rows[lease.id].fence -= 1
        return replace(lease, fence=lease.fence - 1)


class _FenceResetOnRelease(JobModel):
    def release(self, lease: Lease, **more: Any) -> None:
        super().release(lease, **more)
        self.rows[lease.id].fence = 0


class _FenceResetOnRequeue(JobModel):
    def requeue(self, id: str, **more: Any) -> bool:
        requeued = super().requeue(id, **more)
        if requeued:
            self.rows[id].fence = 0
        return requeued


class _FenceLostByPurge(JobModel):
    def purge(self, **more: Any) -> int:
        purged = super().purge(**more)
        for row in self.rows.values():
            row.fence *= row.state is not JobState.PURGED
        return purged


class _AttemptsCountedAtFailure(JobModel):
    def claim(self, *args: Any, **more: Any) -> JobLease | None:
        lease = super().claim(*args, **more)
        if lease is None:
            return None
        self.rows[lease.id].attempts -= 1
        return replace(lease, attempt=lease.attempt - 1)


class _PoisonIsNotCapped(JobModel):
    def claim(self, *args: Any, id: str | None = None, **more: Any) -> JobLease | None:
        if id in self.rows:
            self.rows[id].max_attempts = 1000
        return super().claim(*args, id=id, **more)


class _CancelKeepsTheLease(JobModel):
    def cancel(self, id: str, **more: Any) -> bool:
        row = self.rows[id]
        owner, until, state = row.owner, row.until, row.state
        cancelled = super().cancel(id, **more)
        if cancelled and owner:
            row.owner, row.until, row.state = owner, until, state
        return cancelled


class _DoneIsRequeued(JobModel):
    def requeue(self, id: str, **more: Any) -> bool:
        row = self.rows[id]
        if row.state is JobState.DONE:
            row.state = JobState.CANCELLED
        return super().requeue(id, **more)


class _EnqueueOverwrites(JobModel):
    def enqueue(self, id: str | None = None, *args: Any, **more: Any) -> str | None:
        self.rows.pop(str(id), None)
        return super().enqueue(id, *args, **more)


class _SweepKillsTheLiving(JobModel):
    def sweep(self, **more: Any) -> int:
        for row in self.rows.values():
            if row.state in OPEN and row.attempts >= row.max_attempts:
                row.set_aside(None)
        return super().sweep(**more)


BROKEN: Final[Mapping[str, type[JobModel]]] = {
    "completion asks for the id alone": _CompleteById,
    "the guard asks for the owner, not for the fence": _ByOwner,
    "the guard does not ask for the time": _WithoutTime,
    "a lease is still valid at its very end": _ValidAtTheEnd,
    "a live lease can be claimed": _ClaimsTheLiving,
    "a lease can be claimed only after its very end": _FreeAfterTheEnd,
    "the second claim has the fence of the first": _SameFence,
    "the fence starts again when a job is released": _FenceResetOnRelease,
    "the fence starts again when a job is requeued": _FenceResetOnRequeue,
    "the fence is lost by a purge": _FenceLostByPurge,
    "attempts are counted when they fail": _AttemptsCountedAtFailure,
    "a job whose attempts are used up is claimed": _PoisonIsNotCapped,
    "a cancelled job keeps its lease": _CancelKeepsTheLease,
    "a done job can be requeued": _DoneIsRequeued,
    "enqueue overwrites": _EnqueueOverwrites,
    "a sweep takes a live lease": _SweepKillsTheLiving,
}


def main(arguments: list[str] | None = None) -> int:
    """Explore the oracle to a depth, and the broken ones until their mistake shows."""
    parser = argparse.ArgumentParser(prog="python -m fencedjobs.testing.explore", description=main.__doc__)
    parser.add_argument("--depth", type=int, default=12)
    asked = parser.parse_args(arguments)
    sound = explore(depth=asked.depth)
    sys.stdout.write(f"the oracle: {sound}\n")
    missed = 0
    for name, model in BROKEN.items():
        found = explore(model, depth=asked.depth)
        missed += found.broken is None
        sys.stdout.write(f"{name}: {found}\n")
    return 1 if sound.broken or missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
