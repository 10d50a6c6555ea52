"""Real child processes that begin at the same moment."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from typing import Any

#: each child is forked from a clean process that has imported everything and opened nothing
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(
    ["fencedjobs", "fencedjobs.service", "fencedjobs.cli.app", "psycopg", "pymysql", "pytest"]
)


def together(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call ``function`` in one fresh process for each of ``calls``, released together.

    The answers come in order; of a process that was killed its negative exit code. What one of them raises
    is raised here.
    """
    gate = FRESH.Barrier(len(calls))
    pipes = [FRESH.Pipe(duplex=False) for _ in calls]
    children = [
        FRESH.Process(target=_child, args=(function, arguments, gate, answer))
        for arguments, (_, answer) in zip(calls, pipes, strict=True)
    ]
    for child, (_, answer) in zip(children, pipes, strict=True):
        child.start()
        answer.close()
    return [_answer(child, question) for child, (question, _) in zip(children, pipes, strict=True)]


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], gate: Any, answer: Any) -> None:
    gate.wait(30)
    try:
        answer.send((function(*arguments), None))
    except Exception:  # noqa: BLE001 - it is raised again in the parent
        answer.send((None, traceback.format_exc()))


def _answer(child: Any, question: Any) -> Any:
    try:
        value, error = question.recv() if question.poll(60) else (None, "no answer in time")
    except EOFError:
        child.join(10)
        return child.exitcode
    child.join(10)
    if error is not None:
        child.kill()
        raise AssertionError(f"a child process failed:\n{error}")
    return value
