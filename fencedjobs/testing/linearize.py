"""Whether a history of overlapping calls fits the contract: some order of them explains every answer.

A call takes effect at one moment between its invocation and its return. Two calls that overlap may
have taken effect in either order, and a call without an answer at any later moment, or never. If no
order makes all answers right, the history contradicts the contract. This is the search of Wing and
Gong, with the memory of Lowe: each set of calls that have had their effect, with the job that they
left, is looked at once.

Each job is judged by itself, which is exact for calls of one job. Calls of many jobs fall into one
part for each; what only their sum could show is not looked at:

- a claim of the next job names the job it got; of each other job it is taken that the claim may have
  promoted it or set it aside, or not. Which job had to come first is not judged here.
- a claim of the next job that finds nothing but rows that are locked commits, and looks again: it may
  have set this one aside, and taken it in the end, after somebody had requeued it meanwhile.
- a claim of the next job that got nothing must, for each job, have had a moment when it could not
  have it. Such a claim that lasted as long as the patience of claims may have given up, and then
  shows nothing.
- a sweep or a purge that took some may have taken this one, or not; how many it took is not summed up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fencedjobs.testing.sequential import Answer, Call, Granted, Job, Op

BUDGET: Final = 1_000_000  #: how much is looked at for one job before it stays undecided
PATIENCE: Final = 0.2  #: seconds after which a claim that found every row locked gives up
FOREVER: Final = 10**6  #: so many attempts are never used up


class Undecided(Exception):
    """The search was given up: too many calls overlap."""


# --- from calls to what they did to one job -------------------------------------------------------

_MANY: Final = ("renew", "complete", "checkpoint", "set_aside", "fail", "release", "outcome")
_ONE: Final = ("enqueue", "cancel", "quarantine", "requeue", "get")
_PURE: Final = (Answer.LOST, False)


def partition(calls: Iterable[Call], ids: Sequence[str], patience: float = PATIENCE) -> dict[str, list[Op]]:
    """For each job the parts of all calls that concern it, by their beginning."""
    calls = sorted(calls, key=lambda call: call.invoked)
    mortal = {str(call.given["id"]) for call in calls if call.verb == "enqueue" and _mortal(call)}
    return {id: [op for call in calls for op in _parts(call, id, id in mortal, patience)] for id in ids}


def _mortal(call: Call) -> bool:
    return call.given.get("deadline") is not None or call.given.get("max_attempts", math.inf) < FOREVER


def _parts(call: Call, id: str, mortal: bool, patience: float) -> Iterator[Op]:
    given, verb = call.given, call.verb
    if verb == "claim":
        yield from _claimed(call, id, mortal, patience)
    elif verb in _ONE and given["id"] == id:
        yield _op(call, verb, call.answer, pure=verb == "get" or call.answer in _PURE)
    elif verb in _MANY:
        answers = call.answer if isinstance(call.answer, tuple) else [call.answer] * len(given["leases"])
        extras = given.get("extras") or [None] * len(answers)
        for (held, key), answer, extra in zip(given["leases"], answers, extras, strict=True):
            if held == id:
                pure = verb == "outcome" or answer in _PURE
                yield _op(call, verb, answer, pure=pure, key=key, extra=extra)
    elif verb in ("sweep", "purge") and call.answer != 0:
        yield _op(call, verb, call.answer, required=False)


def _claimed(call: Call, id: str, mortal: bool, patience: float) -> Iterator[Op]:
    named = call.given.get("id")
    if named not in (None, id):
        return
    if call.answer is Answer.UNKNOWN:
        yield _op(call, "take", Answer.UNKNOWN, key=(call.client, call.invoked))  # nobody knows the fence
        if named is None or mortal:
            yield _op(call, "passed" if named is None else "refused", Answer.UNKNOWN)
        return
    taken: list[Granted] = [granted for granted in call.answer if granted.id == id]
    for granted in taken:
        yield _op(call, "take", granted, key=granted.key)
    if taken and named is None and mortal:  # in a transaction before: see the head of this file
        yield _op(call, "sweep", None, required=False)
    if not taken and named is not None:
        yield _op(call, "refused", False, pure=not mortal)
    elif not taken:
        gave_up = ((call.returned or 0) - call.invoked) / 1e9 >= patience
        if call.answer or gave_up:
            yield _op(call, "passed", None, required=False)
        else:
            yield _op(call, "empty", False, pure=not mortal)


def _op(
    call: Call, kind: str, answer: object, *, required: bool = True, pure: bool = False,
    key: object = None, extra: object = None,
) -> Op:  # fmt: skip
    if call.returned is None:
        return Op(kind, call, Answer.UNKNOWN, call.invoked, math.inf, False, pure, key, extra)
    known = required and answer is not Answer.UNKNOWN
    return Op(kind, call, answer, call.invoked, call.returned, known, pure, key, extra)


# --- the search -----------------------------------------------------------------------------------

Point = tuple[int, int, Job]  #: which calls have had their effect, which of the unknown ones, and the job


class _Search:
    """The calls on one job. Those that never have to happen are ``ghosts``, and come at any time."""

    def __init__(self, ops: Iterable[Op], budget: int = BUDGET) -> None:
        ordered = sorted(ops, key=lambda op: op.first)
        self.ops = [op for op in ordered if op.required or op.last != math.inf]
        self.ghosts = [op for op in ordered if not op.required and op.last == math.inf]
        self.needed = sum(1 << place for place, op in enumerate(self.ops) if op.required)
        self.budget = budget

    def ends(self, starts: Iterable[Point], *, every: bool = False) -> set[Point]:
        """Where an order of all calls leads to: the first end that is found, or every one."""
        stack, seen, ends = list(starts), set[Point](), set[Point]()
        while stack:
            point = stack.pop()
            if point in seen:
                continue
            seen.add(point)
            if len(seen) > self.budget:
                raise Undecided
            if not self.needed & ~point[0]:
                ends.add(point)
                if not every:
                    break
            stack += self._after(point)
        return ends

    def _after(self, point: Point) -> list[Point]:
        """The points one call further, the most promising last."""
        mask, risen, job = point
        open_, limit = self._open(mask)
        soonest = min((self.ops[place].last for place in open_), default=math.inf)
        for place in open_:
            op = self.ops[place]
            if op.pure and op.first <= soonest and op.step(job):  # to have it now can close no way
                return [(mask | 1 << place, risen, job)]
        further = [
            (mask, risen | 1 << place, left)
            for place, ghost in enumerate(self.ghosts)
            if not risen >> place & 1 and ghost.first <= limit
            for left in ghost.step(job)
            if left is not job
        ]
        for place in sorted(open_, key=lambda place: -self.ops[place].last):
            op = self.ops[place]
            lefts = op.step(job)
            if lefts:
                gone = sum(1 << late for late in open_ if self.ops[late].last < op.first)
                further += [(mask | gone | 1 << place, risen, left) for left in lefts]
        return further

    def _open(self, mask: int) -> tuple[list[int], float]:
        """Which calls can be next: none that began after one that is still to come has returned."""
        place = (~mask & (mask + 1)).bit_length() - 1
        limit, found = math.inf, []
        while place < len(self.ops) and self.ops[place].first <= limit:
            if not mask >> place & 1:
                op = self.ops[place]
                found.append(place)
                if op.required and op.last < limit:
                    limit = op.last
            place += 1
        return found, limit


def fits(ops: Iterable[Op], before: Iterable[Job] = (None,), *, budget: int = BUDGET) -> bool:
    """Whether some order of what was done to one job explains every answer; `Undecided` if too long."""
    return bool(_Search(ops, budget).ends((0, 0, job) for job in before))


# --- the smallest part of it that does not fit ----------------------------------------------------


@dataclass(frozen=True)
class Story:
    """Calls on one job that no order explains, whichever of ``before`` the job was."""

    id: str
    before: tuple[Job, ...]
    ops: tuple[Op, ...]
    perhaps: int  #: calls that may have touched the job meanwhile; none of them explains it


def smallest(id: str, ops: Sequence[Op], *, budget: int = BUDGET) -> Story:
    """The shortest part of a history without an order that can be found with certainty.

    Nothing is left out that could have been an explanation: what came after the first contradiction
    goes; what came before the last effect ahead of it is told as the job that it may have left; and
    answers that only said no go one by one, as long as the rest still has no order.
    """
    shown = _up_to_the_contradiction(ops, budget)
    culprit = max((op for op in shown if op.required), key=lambda op: op.last)
    starts, kept = _shortened(shown, culprit, budget)
    for op in reversed([op for op in kept if op.answer is False or op.pure]):
        less = [] if op.pure else [replace(op, required=False)]
        fewer = [other for other in kept if other is not op] + less
        moved = _moved(starts, kept, fewer)
        if op is not culprit and not _Search(fewer, budget).ends(moved):
            starts, kept = moved, fewer
    told = tuple(op for op in kept if op.required)
    before = tuple(sorted({job for _, _, job in starts}, key=str))
    return Story(id, before, told, len(kept) - len(told))


def _up_to_the_contradiction(ops: Sequence[Op], budget: int) -> list[Op]:
    """The shortest beginning that does not fit; what was under way at its end may have happened or not."""
    ends = sorted({op.last for op in ops if op.required})
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(_until(ops, ends[middle]), budget=budget) else (low, middle)
    return list(_until(ops, ends[low]))


def _until(ops: Iterable[Op], end: float) -> Iterator[Op]:
    for op in ops:
        if op.first <= end < op.last:
            if not op.pure:
                yield _ghost(op, Answer.UNKNOWN)
        elif op.first <= end:
            yield op


def _ghost(op: Op, answer: object) -> Op:
    return replace(op, required=False, last=math.inf, answer=answer)


def _shortened(ops: list[Op], culprit: Op, budget: int) -> tuple[set[Point], list[Op]]:
    """Begin with the last effect before the contradiction, or with the one before it, and so on."""
    effects = [op for op in ops if op.required and not op.pure and op.last < culprit.last]
    for op in sorted(effects, key=lambda op: -op.first):
        try:
            starts, kept = _since(ops, op.first, budget)
        except Undecided:
            continue
        if starts:  # else what came before contradicts what was under way
            return starts, kept
    return {(0, 0, None)}, ops


def _since(ops: Sequence[Op], instant: int, budget: int) -> tuple[set[Point], list[Op]]:
    """The calls that were under way at an instant or came later, and all that may have been before.

    A call that was under way may have had its effect before; its place in the points says so.
    """
    later = [op for op in ops if op.last >= instant]
    early = [op for op in later if op.first < instant]
    prefix = _Search(
        [*(op for op in ops if op.last < instant), *(_ghost(op, op.answer) for op in early)], budget
    )
    suffix = _Search(later)
    # ghosts are copies in the order of their beginning, as the calls that they stand for
    stand_for = dict(enumerate(sorted(early, key=lambda op: op.first)))
    starts = set[Point]()
    for _, risen, job in prefix.ends([(0, 0, None)], every=True):
        had = {_name(op) for place, op in stand_for.items() if risen >> place & 1}
        starts.add(_point(suffix, had, job))
    return starts, later


def _name(op: Op) -> tuple[int, str]:
    """The same for an operation and for a copy of it that asks for less."""
    return id(op.call), op.kind


def _point(search: _Search, had: set[tuple[int, str]], job: Job) -> Point:
    mask = sum(1 << place for place, op in enumerate(search.ops) if _name(op) in had)
    return mask, sum(1 << place for place, op in enumerate(search.ghosts) if _name(op) in had), job


def _moved(starts: set[Point], old: list[Op], new: list[Op]) -> set[Point]:
    """The same points in a search of fewer calls."""
    before, after = _Search(old), _Search(new)
    moved = set[Point]()
    for mask, risen, job in starts:
        had = {_name(op) for place, op in enumerate(before.ops) if mask >> place & 1}
        had |= {_name(op) for place, op in enumerate(before.ghosts) if risen >> place & 1}
        moved.add(_point(after, had, job))
    return moved


def check(
    calls: Iterable[Call], ids: Sequence[str], *, patience: float = PATIENCE, budget: int = BUDGET
) -> list[Story]:
    """What in this history contradicts the contract: a story for each job, none if all fits.

    ``ids`` are all jobs that the calls may have touched. `Undecided` if too much overlaps to be sure
    within ``budget``.
    """
    parts = partition(calls, ids, patience)
    return [smallest(id, ops, budget=budget) for id, ops in parts.items() if not fits(ops, budget=budget)]
