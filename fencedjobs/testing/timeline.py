"""A history that does not fit as text: one line for each client, and what each call said."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from fencedjobs.testing.linearize import Story
from fencedjobs.testing.sequential import Answer, Granted, Job, Op, Seen

WIDTH: Final = 100
_SHOWN: Final = 24  # calls; of more the latest
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_INSTANTS: Final = ("now", "deadline", "before")
_SPANS: Final = ("ttl", "wait", "delay")


def told(story: Story) -> str:
    """The story in lines of at most 100 characters.

    From left to right is the order in which calls began and ended, not how long they took.
    """
    return "\n".join(line[:WIDTH] for line in _Teller(story).lines())


class _Teller:
    def __init__(self, story: Story) -> None:
        self._story = story
        self._ops = sorted(story.ops, key=lambda op: op.first)[-_SHOWN:]
        self._names = dict(zip(map(id, self._ops), _LETTERS, strict=False))
        instants = [
            op.call.given[name] for op in self._ops for name in ("now", "before") if name in op.call.given
        ]
        least = min(instants, default=0.0)
        self._zero = least - 1000 if least > 1e6 else 0.0  # large numbers would hide what differs

    def lines(self) -> Iterable[str]:
        story, hidden = self._story, len(self._story.ops) - len(self._ops)
        yield f"no order of these calls on {story.id} fits the contract"
        if self._zero:
            yield f"(instants are less {self._zero!r})"
        yield f"before: {self._before(story.before)}"
        if hidden:
            yield f"({hidden} earlier calls are not shown)"
        yield from self._drawn()
        for op in self._ops:
            yield f"{self._names[id(op)]}  {op.call.client}  {self._said(op)}"
        if story.perhaps:
            yield f"(what {story.perhaps} more may have done to it meanwhile does not explain it)"

    def _before(self, jobs: Iterable[Job]) -> str:
        kinds = list(dict.fromkeys(map(self._job, jobs)))
        more = f"; or {len(kinds) - 2} more" if len(kinds) > 2 else ""
        return "; or ".join(kinds[:2]) + more

    def _job(self, job: Job) -> str:
        if job is None:
            return "no such job"
        held = f" by {_key(job.holder)} until {self._instant(job.until)}" if job.holder else ""
        return f"{job.state}{held}, fence {job.fence}, attempts {job.attempts}"

    def _drawn(self) -> Iterable[str]:
        """A line for each client: where its calls begin and end among those of the others."""
        instants = sorted({op.first for op in self._ops} | {op.last for op in self._ops})
        clients = sorted({op.call.client for op in self._ops})
        margin = max(len(client) for client in clients) + 2
        gap = max(1, min(6, (WIDTH - margin - 1) // max(1, len(instants))))
        place = {instant: number * gap for number, instant in enumerate(instants)}
        for client in clients:
            row = [" "] * (len(instants) * gap + 1)
            for op in (op for op in self._ops if op.call.client == client):
                begin, end = place[op.first], place[op.last]
                row[begin : end + 1] = ["|", *"-" * (end - begin - 1), "|"]
                row[(begin + end) // 2] = self._names[id(op)]
            yield client.ljust(margin) + "".join(row).rstrip()

    # --- words ------------------------------------------------------------------------------------

    def _said(self, op: Op) -> str:
        """The call with what it was given, and its answer for this job."""
        given = op.call.given
        verb = "claim" if op.kind in ("take", "refused", "empty") else op.kind
        words = ["this job"] if given.get("id") is not None else []
        if verb == "claim" and not words:
            words.append("the next")
        if op.key is not None and op.kind != "take":
            words.append(_key(op.key))
        words += [f"{name}={self._instant(given[name])}" for name in _INSTANTS if given.get(name) is not None]
        words += [f"{name}={given[name]:g}" for name in _SPANS if given.get(name) is not None]
        if given.get("max_attempts", math.inf) < 1000:
            words.append(f"max_attempts={given['max_attempts']}")
        return f"{verb}({', '.join(words)}) -> {self._answered(op)}"

    def _answered(self, op: Op) -> str:
        answer = op.answer
        if op.kind in ("refused", "empty"):
            return "None"
        if isinstance(answer, Granted):
            parts = [_key(answer.key)]
            parts += [] if answer.until is None else [f"until {self._instant(answer.until)}"]
            parts += [] if answer.attempt is None else [f"attempt {answer.attempt}"]
            return ", ".join(parts)
        if isinstance(answer, Seen):
            held = f" by {answer.owner} until {self._instant(answer.until)}" if answer.owner else ""
            return f"{answer.state}{held}, fence {answer.fence}, attempts {answer.attempts}"
        if op.kind == "renew" and isinstance(answer, float):
            return f"until {self._instant(answer)}"
        return answer.value if isinstance(answer, Answer) else str(answer)

    def _moved(self, instant: float) -> float:
        return instant - self._zero if instant else instant

    def _instant(self, instant: float) -> str:
        return f"{self._moved(instant):.12g}"


def _key(key: Any) -> str:
    """The name of an attempt: its owner, and its fence or another number."""
    return f"attempt {key[0]}/{key[1]}" if isinstance(key, tuple) and len(key) == 2 else f"attempt {key}"
