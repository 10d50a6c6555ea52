"""An async store with blocking verbs, so that the same checks run on both forms."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy.util import greenlet_spawn

from fencedjobs.aio import AsyncJoinedLeases, AsyncStoreLeases

_PARTS: Final = (AsyncStoreLeases, AsyncJoinedLeases)  # what a verb gives that has verbs itself


class Blocking:
    """An async store, or what belongs to it: each verb runs to its end on the loop of ``runner``."""

    def __init__(self, inner: Any, runner: asyncio.Runner) -> None:
        self._inner = inner
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if callable(value):
            return lambda *args, **kwargs: self._resolved(value(*args, **kwargs))
        plain = value is None or isinstance(value, str | int | float)
        return value if plain else Blocking(value, self._runner)

    def sync(self, work: Callable[[Any], Any]) -> Any:
        """What ``work`` answers for the sync core of the store."""
        store = self._inner.sync_store
        return self._runner.run(greenlet_spawn(lambda: work(store)))

    def _resolved(self, answer: Any) -> Any:
        if hasattr(answer, "__aenter__"):
            return self._entered(answer)
        if inspect.isawaitable(answer):
            return self._runner.run(_awaited(answer))
        return Blocking(answer, self._runner) if isinstance(answer, _PARTS) else answer

    @contextmanager
    def _entered(self, manager: Any) -> Iterator[Any]:
        inner = self._runner.run(_awaited(manager.__aenter__()))
        try:
            yield Blocking(inner, self._runner)
        except BaseException as error:
            leave = manager.__aexit__(type(error), error, error.__traceback__)
            if not self._runner.run(_awaited(leave)):
                raise
        else:
            self._runner.run(_awaited(manager.__aexit__(None, None, None)))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable  # a Runner takes coroutines only
