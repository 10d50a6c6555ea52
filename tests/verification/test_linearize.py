"""The checker of histories: what fits, what does not, and that it agrees with the oracle."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from fencedjobs import LeaseLost
from fencedjobs.testing import linearize
from fencedjobs.testing.linearize import Undecided, check, fits, partition
from fencedjobs.testing.model import JobModel
from fencedjobs.testing.sequential import Answer, Call, Granted, Job, Seen
from fencedjobs.testing.timeline import told
from fencedjobs.values import JobLease, JobRecord, JobState, Outcome

OK, LOST, UNKNOWN = Answer.OK, Answer.LOST, Answer.UNKNOWN
DONE, READY, LEASED = JobState.DONE, JobState.READY, JobState.LEASED


def call(client: str, verb: str, begin: int, end: int | None, answer: Any = UNKNOWN, /, **given: Any) -> Call:
    """A call from ``begin`` to ``end``; now is the begin, unless given."""
    return Call(client, verb, {"now": float(begin), **given}, begin, end, answer)


def enqueue(begin: int = 0, end: int | None = 1, answer: Any = True, **job: Any) -> Call:
    return call("op", "enqueue", begin, end, answer, id="j", **job)


def claim(
    who: str, begin: int, end: int | None, fence: int | None, *, ttl: float = 10.0, **more: Any
) -> Call:
    """A claim of the next job that got it with this fence, at its own begin; ``None``: it got nothing."""
    now = more.setdefault("now", float(begin))
    attempt = more.pop("attempt", fence)
    lease = () if fence is None else (Granted("j", (who, fence), fence, now + ttl, attempt),)
    given = {"id": None, "limit": 1, "owner": who, "ttl": ttl, **more}
    return call(who, "claim", begin, end, UNKNOWN if end is None else lease, **given)


def use(who: str, verb: str, fence: int, begin: int, end: int | None, answer: Any, **given: Any) -> Call:
    """What a client does with the lease of this fence; without an end its answer is unknown."""
    told = UNKNOWN if end is None else (answer,)
    return call(who, verb, begin, end, told, leases=[("j", (who, fence))], ttl=10.0, **given)


def purge(begin: int, end: int, purged: int) -> Call:
    return call("op", "purge", begin, end, purged, before=9.0)


def of_another(who: str, begin: int, end: int) -> Call:
    """A claim of the next job that got another one."""
    lease = (Granted("k", (who, 1), 1, begin + 10.0, 1),)
    return call(who, "claim", begin, end, lease, id=None, limit=1, owner=who, ttl=10.0)


def get(
    begin: int, end: int, state: JobState, owner: str | None, until: float, fence: int, attempts: int
) -> Call:
    seen = Seen(state, owner, until, fence, attempts, None, None, None)
    return call("reader", "get", begin, end, seen, id="j")


GOOD: dict[str, list[Call]] = {
    "a claim, a renewal, a completion": [
        enqueue(), claim("A", 2, 3, 1), use("A", "renew", 1, 4, 5, 14.0), use("A", "complete", 1, 13, 14, OK),
    ],
    "of two claims at once one gets it": [enqueue(), claim("A", 2, 5, 1), claim("B", 3, 6, None)],
    "the claim that returned first was second": [enqueue(), claim("A", 2, 9, 1), claim("B", 3, 4, None)],
    "a claim overlaps the enqueue": [enqueue(0, 5), claim("A", 1, 2, 1)],
    "the next one claims at the very end": [
        enqueue(), claim("A", 2, 3, 1), claim("B", 12, 13, 2), use("A", "complete", 1, 14, 15, LOST),
    ],
    "two leases live at once by the clock, but the first was released": [
        enqueue(), claim("A", 2, 3, 1), use("A", "release", 1, 4, 8, OK), claim("B", 5, 6, 2),
    ],
    "an unknown completion that happened": [
        enqueue(), claim("A", 2, 3, 1), use("A", "complete", 1, 4, None, OK), claim("B", 20, 21, None),
        use("A", "outcome", 1, 22, 23, Outcome.COMPLETED),
    ],
    "an unknown completion that did not happen": [
        enqueue(), claim("A", 2, 3, 1), use("A", "complete", 1, 4, None, OK), claim("B", 20, 21, 2),
    ],
    "an unknown completion that happened long after": [
        enqueue(), claim("A", 2, 3, 1), use("A", "complete", 1, 4, None, OK),
        get(5, 6, LEASED, "A", 12.0, 1, 1), get(7, 8, DONE, None, 0.0, 1, 1),
    ],
    "an unknown claim that happened": [
        enqueue(), claim("A", 2, None, 1), claim("B", 3, 4, None), claim("B", 12, 13, 2),
    ],
    "a read during a claim sees it or not": [
        enqueue(), claim("A", 2, 9, 1), get(3, 4, READY, None, 0.0, 0, 0),
        get(5, 6, LEASED, "A", 12.0, 1, 1),
    ],
    "a claim of another job promotes it, and a late release is refused": [
        enqueue(), claim("A", 2, 3, 1),
        of_another("B", 12, 13),
        use("A", "release", 1, 14, 15, LOST),
    ],
    "or does not, and it is accepted": [
        enqueue(), claim("A", 2, 3, 1),
        of_another("B", 12, 13),
        use("A", "release", 1, 14, 15, OK),
    ],
    "a claim sets a job aside, finds nothing, looks again, and gets it after it was requeued": [
        enqueue(max_attempts=1), claim("A", 2, 3, 1), claim("B", 12, 30, 2, attempt=1),
        call("op", "requeue", 14, 15, True, id="j"),
    ],
    "a purged id comes back with its fence": [
        enqueue(), claim("A", 2, 3, 1), use("A", "complete", 1, 4, 5, OK), purge(6, 7, 1),
        enqueue(8, 9), claim("B", 10, 11, 2, attempt=1),
    ],
}  # fmt: skip

BAD: dict[str, list[Call]] = {
    "a live lease is claimed again": [enqueue(), claim("A", 2, 3, 1), claim("B", 5, 6, 2)],
    "two claims at once got the same fence": [enqueue(), claim("A", 2, 5, 1), claim("B", 3, 6, 1)],
    "a completion is accepted after somebody took over": [
        enqueue(), claim("A", 2, 3, 1), claim("B", 12, 13, 2), use("A", "complete", 1, 14, 15, OK),
    ],
    "a completion is accepted at now == until": [
        enqueue(), claim("A", 2, 3, 1), use("A", "complete", 1, 12, 13, OK),
    ],
    "a renewal revives a lease": [enqueue(), claim("A", 2, 3, 1), use("A", "renew", 1, 13, 14, 23.0)],
    "a live lease cannot be completed": [enqueue(), claim("A", 2, 3, 1), use("A", "complete", 1, 4, 5, LOST)],
    "a free job is not found": [enqueue(), claim("A", 2, 3, None)],
    "a job is not free at the very end": [enqueue(), claim("A", 2, 3, 1), claim("B", 12, 13, None)],
    "the fence starts again": [
        enqueue(), claim("A", 2, 3, 1), use("A", "release", 1, 4, 5, OK), claim("B", 6, 7, 1, attempt=2),
    ],
    "a read is stale": [enqueue(), claim("A", 2, 3, 1), get(4, 5, READY, None, 0.0, 0, 0)],
    "a read goes back": [
        enqueue(), claim("A", 2, 9, 1), get(3, 4, LEASED, "A", 12.0, 1, 1),
        get(5, 6, READY, None, 0.0, 0, 0),
    ],
    "a done job is claimed": [
        enqueue(), claim("A", 2, 3, 1), use("A", "complete", 1, 4, 5, OK), claim("B", 20, 21, 2),
    ],
    "an unknown completion happened, and was undone": [
        enqueue(), claim("A", 2, 3, 1), use("A", "complete", 1, 4, None, OK),
        get(5, 6, DONE, None, 0.0, 1, 1), claim("B", 20, 21, 2),
    ],
    "an unknown completion happened after the end of its lease": [
        enqueue(), claim("A", 2, 3, 1), use("A", "complete", 1, 12, None, OK),
        get(14, 15, DONE, None, 0.0, 1, 1),
    ],
    "an unknown claim cannot have happened twice": [
        enqueue(), claim("A", 2, None, 1), claim("B", 22, 23, 3),
    ],
    "an attempt is not counted": [enqueue(), claim("A", 2, 3, 1, attempt=0)],
    "one attempt too many": [enqueue(max_attempts=1), claim("A", 2, 3, 1), claim("B", 12, 13, 2)],
    "an existing job is enqueued again": [enqueue(), claim("A", 2, 3, 1), enqueue(4, 5)],
    "a cancelled job can be completed": [
        enqueue(), claim("A", 2, 3, 1), call("op", "cancel", 4, 5, True, id="j"),
        use("A", "complete", 1, 6, 7, OK),
    ],
    "a purged id comes back without its fence": [
        enqueue(), claim("A", 2, 3, 1), use("A", "complete", 1, 4, 5, OK), purge(6, 7, 1),
        enqueue(8, 9), claim("B", 10, 11, 1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_history_that_some_order_explains_fits(name: str) -> None:
    assert [told(story) for story in check(GOOD[name], ["j"])] == []


@pytest.mark.parametrize("name", BAD)
def test_a_history_that_no_order_explains_is_told(name: str) -> None:
    (story,) = check(BAD[name], ["j"])
    lines = told(story).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(story.ops) <= 3


@pytest.mark.parametrize("name", BAD)
def test_what_is_left_of_a_history_does_not_fit_either(name: str) -> None:
    (story,) = check(BAD[name], ["j"])
    assert not fits(story.ops, story.before)


def test_a_claim_of_the_next_that_waited_long_may_have_given_up() -> None:
    second = 1_000_000_000
    calls = [enqueue(), claim("A", 2, 2 + second // 10, None, now=2.0)]
    assert check(calls, ["j"])
    assert not check([calls[0], claim("A", 2, 2 + second // 4, None, now=2.0)], ["j"])


def test_a_story_says_who_called_what_and_when() -> None:
    (story,) = check(BAD["a live lease is claimed again"], ["j"])
    assert told(story).splitlines() == [
        "no order of these calls on j fits the contract",
        "before: ready, fence 0, attempts 0",
        "A  |--A--|",
        "B              |--B--|",
        "A  A  claim(the next, now=2, ttl=10) -> attempt A/1, until 12, attempt 1",
        "B  B  claim(the next, now=5, ttl=10) -> attempt B/2, until 15, attempt 2",
    ]


def test_large_instants_are_told_from_a_nearer_zero() -> None:
    late = 1_764_000_000.25
    calls = [enqueue(now=late), claim("A", 2, 3, 1, now=late), claim("B", 5, 6, 2, now=late + 1)]
    (story,) = check(calls, ["j"])
    assert "(instants are less 1763999000.25)" in told(story)
    assert "claim(the next, now=1001, ttl=10) -> attempt B/2, until 1011" in told(story)


def test_a_search_without_end_is_given_up() -> None:
    calls = [enqueue(), *(claim(f"c{n}", 2, None, 1) for n in range(12)), claim("B", 500, 501, 9)]
    with pytest.raises(Undecided):
        check(calls, ["j"], budget=10)


# --- side by side with the oracle -----------------------------------------------------------------

NAMES = ("A", "B")


@dataclass
class Walk:
    """Random calls one after the other on the oracle, written down as a history."""

    chance: random.Random
    record: dict[str, JobRecord | None] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    leases: list[JobLease] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.model = JobModel(self.record.get)

    def step(self) -> None:
        pick = self.chance.choice
        self.now += pick((0.0, 0.0, 1.0, 2.0))
        verb = pick(("enqueue", "claim", "claim", "use", "use", "use", "operate", "get", "purge", "sweep"))
        begin = 10 * len(self.calls)
        given, answer, verb = getattr(self, f"_{verb}")(pick)
        self.calls.append(Call("A", verb, {"now": self.now, **given}, begin, begin + 5, answer))

    def _enqueue(self, pick: Any) -> Any:
        job = {"id": "j", "payload": len(self.calls), "max_attempts": pick((1, 2, 10**6))}
        job |= {"deadline": pick((None, None, self.now + 4.0)), "delay": pick((0.0, 2.0))}
        return job, self.model.enqueue(**job, now=self.now) is not None, "enqueue"

    def _claim(self, pick: Any) -> Any:
        owner, ttl = pick(NAMES), pick((1.0, 3.0))
        lease = self.model.claim(owner, ttl=ttl, id="j", now=self.now)
        given = {"id": "j", "limit": 1, "owner": owner, "ttl": ttl}
        if lease is None:
            return given, (), "claim"
        self.leases.append(lease)
        said = (lease.fence, lease.until, lease.attempt, lease.payload, lease.progress)
        return given, (Granted("j", (owner, lease.fence), *said),), "claim"

    def _use(self, pick: Any) -> Any:
        if not self.leases:
            return self._get(pick)
        lease = self.leases[-1] if pick((True, True, False)) else pick(self.leases)
        verb = pick(("renew", "complete", "fail", "release", "checkpoint", "set_aside", "outcome"))
        number, wait = len(self.calls), pick((None, 0.0, 2.0))
        given = {"leases": [("j", (lease.owner, lease.fence))], "ttl": 2.0, "wait": wait, "extras": [number]}
        given |= {"delay": 1.0, "refund": 1, "state": JobState.CANCELLED}
        arguments: Mapping[str, Any] = {
            "renew": {"ttl": 2.0}, "complete": {"result": number}, "checkpoint": {"data": number},
            "fail": {"error": "no", "retry": None if wait is None else Wait(wait)},
            "release": {"delay": 1.0, "refund": True},
            "set_aside": {"reason": "no", "state": JobState.CANCELLED}, "outcome": {},
        }  # fmt: skip
        timed = {} if verb == "outcome" else {"now": self.now}
        try:
            answer = getattr(self.model, verb)(lease, **arguments[verb], **timed)
        except LeaseLost:
            return given, (LOST,), verb
        told = answer.until if verb == "renew" else answer if verb in ("fail", "outcome") else OK
        return given, (told,), verb

    def _operate(self, pick: Any) -> Any:
        verb = pick(("cancel", "quarantine", "requeue"))
        more: dict[str, Any] = {"reason": "no"} if verb == "quarantine" else {}
        if verb == "requeue":
            more = {"by": "op", "reason": "no", **pick(({}, {"payload": len(self.calls)}))}
        return {"id": "j", **more}, getattr(self.model, verb)("j", **more, now=self.now), verb

    def _purge(self, pick: Any) -> Any:
        before, row = self.now + pick((0.0, 1.0)), self.model.rows.get("j")
        ended = (
            row is not None and row.state in (DONE, JobState.CANCELLED) and (row.finished_at or 0) < before
        )
        return {"before": before}, self._bounded("purge", ended, before=before), "purge"

    def _sweep(self, pick: Any) -> Any:
        row = self.model.rows.get("j")
        open_ = row is not None and row.state in (READY, JobState.SCHEDULED, JobState.LEASED)
        dead = open_ and row is not None and not row.live(self.now) and bool(row.spent(self.now))
        return {}, self._bounded("sweep", dead, now=self.now), "sweep"

    def _bounded(self, verb: str, takes: bool, **given: Any) -> int:
        """The oracle asks what the store did, and there is none: the row is gone from view, or as it was."""
        row = self.model.rows.get("j")
        self.model.look = lambda _: None if takes or row is None else row  # type: ignore[assignment,return-value]
        taken: int = getattr(self.model, verb)(**given)
        self.model.look = self.record.get
        return taken

    def _get(self, pick: Any) -> Any:
        row = self.model.rows.get("j")
        if row is None:
            return {"id": "j"}, None, "get"
        names = ("state", "owner", "until", "fence", "attempts", "payload", "progress", "result")
        return {"id": "j"}, Seen(*(getattr(row, name) for name in names)), "get"


@dataclass(frozen=True)
class Wait:
    """A retry that waits so long."""

    base: float
    factor: float = 1.0
    cap: float = 60.0
    jitter: bool = False


@pytest.mark.parametrize("seed", range(40))
def test_what_the_oracle_does_in_order_fits(seed: int) -> None:
    walk = Walk(random.Random(seed))
    for _ in range(120):
        walk.step()
    (ops,) = partition(walk.calls, ["j"]).values()
    assert fits(ops), told(linearize.smallest("j", ops))


@pytest.mark.parametrize("seed", range(40))
def test_a_wrong_answer_among_them_does_not(seed: int) -> None:
    walk = Walk(random.Random(seed))
    for _ in range(60):
        walk.step()
    chance = random.Random(seed)
    places = [place for place, one in enumerate(walk.calls) if _turned(one) is not None]
    place = chance.choice(places)
    wrong = [*walk.calls]
    turned = _turned(wrong[place])
    assert turned is not None
    wrong[place] = turned
    # the others follow: what the call would have changed, or did change, shows in what comes after
    (ops,) = partition(wrong, ["j"]).values()
    assert not fits(ops)


def _turned(one: Call) -> Call | None:
    """The same call with an answer that it cannot have had after these calls, one after the other."""
    turned: Any = None
    if one.verb in ("renew", "complete", "checkpoint", "set_aside", "release") and one.answer != (LOST,):
        turned = (LOST,)
    elif one.verb == "complete" and one.answer == (LOST,):
        turned = (OK,)
    elif one.verb in ("cancel", "quarantine", "requeue", "enqueue"):
        turned = not one.answer
    elif one.verb == "claim" and one.answer:
        (lease,) = one.answer
        turned = (lease._replace(fence=lease.fence + 1),)
    return (
        None if turned is None else Call(one.client, one.verb, one.given, one.invoked, one.returned, turned)
    )


def test_the_job_before_is_told_when_it_is_not_certain() -> None:
    kinds: set[Job] = set()
    for calls in BAD.values():
        for story in check(calls, ["j"]):
            kinds |= {*story.before}
    assert None in kinds
    assert len(kinds) > 3
