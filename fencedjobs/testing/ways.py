"""The shortest way to each fault that the machine must find: a few steps of it, known beforehand.

A random search finds them too, but some only after many examples; see `stages.machine`.
"""

from __future__ import annotations

from typing import Any, Final

from fencedjobs.retry import Retry
from fencedjobs.testing.machines import Past, Step

Way = tuple[dict[str, Any], list[Step]]

_LATEST, _BEFORE = Past(0, None), Past(1, None)


def _step(verb: str, /, **arguments: Any) -> Step:
    return Step(verb, arguments)


def _claim(ttl: float = 10.0) -> Step:
    return _step("claim_by_id", name="a", owner="A", ttl=ttl)


def _attempt(
    end: str, *, wait: int | None = None, forged: str | None = None, retry: Retry | None = None
) -> Step:
    way = {"nth": 0, "owner": "A", "ttl": 10.0, "wait": wait, "forged": forged}
    return _step("attempt", **way, end=end, retry=retry, result=None)


#: the jobs "a" (with these arguments) and "b", and the steps that lead to the fault
SHORTEST: Final[dict[str, Way]] = {
    "complete_by_id": ({}, [_claim(1.0), _step("creep", by=1.0), _claim(), _step(
        "end", past=_BEFORE, end="complete", retry=None, result=None
    )]),
    "complete_by_owner": ({}, [_attempt("complete", forged="older")]),
    "complete_by_fence": ({}, [_attempt("complete", forged="owner")]),
    "complete_many_by_id": ({}, [_claim(), _step("complete_many", pasts=[Past(0, "older")], results=False)]),
    "complete_many_says_yes": (
        {}, [_claim(), _step("complete_many", pasts=[Past(0, "older")], results=False)]
    ),
    "complete_late": ({}, [_attempt("complete", wait=1)]),
    "release_by_owner": ({}, [_attempt("release", forged="older")]),
    "checkpoint_late": ({}, [_attempt("checkpoint", wait=1)]),
    "set_aside_by_id": ({}, [_attempt("set_aside", forged="older")]),
    "waits_since_the_last_attempt": ({}, [_claim(1.0), _step("creep", by=3.0), _step(
        "claim_next", owner="A", ttl=1.0, queue="default"
    )]),
    "checkpoint_of_another_payload": ({}, [
        _claim(), _step("end", past=_LATEST, end="checkpoint", retry=None, result=1),
        _step("operate", verb="quarantine", name="a", payload=None),
        _step("operate", verb="requeue", name="a", payload={"qty": 7}),
    ]),
    "renew_revives": ({}, [_attempt("renew", wait=1)]),
    "valid_at_the_end": ({}, [_attempt("complete", wait=0)]),
    "free_after_the_end": ({}, [_claim(1.0), _step("creep", by=1.0), _claim()]),
    "fence_reset_on_release": ({}, [_attempt("release")]),
    "fence_reset_on_quarantine": ({}, [
        _claim(), _step("operate", verb="quarantine", name="a", payload=None)
    ]),
    "fence_reset_on_requeue": ({}, [_claim(), _step("set_aside_and_requeue", name="a", verb="cancel")]),
    "fence_lost_by_purge": ({}, [_claim(), _step("cancel_and_purge", name="a", ago=-1.0)]),
    "fence_reset_on_revival": ({}, [_claim(), _step("cancel_and_purge", name="a", ago=-1.0)]),
    "attempts_counted_at_failure": ({}, [_claim()]),
    "poison_is_not_capped": ({"max_attempts": 1}, [_claim(1.0), _step("creep", by=1.0), _claim()]),
    "lease_outlives_the_deadline": ({"deadline": 2.5}, [_claim()]),
    "promotion_keeps_the_owner": ({}, [_claim(1.0), _step("creep", by=1.0), _step(
        "claim_many", owner="A", ttl=1.0, limit=1, queue="default", kinds=("mail",)
    )]),
    "cancel_keeps_the_lease": ({}, [_claim(), _step("operate", verb="cancel", name="a", payload=None)]),
    "priority_is_ignored": ({"priority": -1}, [_step("claim_next", owner="A", ttl=1.0, queue="default")]),
    "one_too_many": ({}, [_step("claim_next", owner="A", ttl=1.0, queue="default")]),
    "latest_due_first": ({"delay": 1.0}, [
        _step("enqueue", job={"id": "A", "delay": 2.0}, named=True), _step("creep", by=3.0),
        _step("claim_next", owner="A", ttl=1.0, queue="default"),
    ]),
    "sweep_kills_the_living": ({"max_attempts": 1}, [_claim(), _step("sweep", limit=1)]),
    "retry_beyond_its_bound": ({}, [_attempt("fail", retry=Retry(jitter=False))]),
    "lock_without_a_fence": ({}, [_step("lock", name="cron", owner="A", ttl=1.0)]),
    "enqueue_overwrites": ({}, [_claim(), _step("enqueue", job={"id": "a"}, named=True)]),
}  # fmt: skip
