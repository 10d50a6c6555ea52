"""What the tests of all senders share; the brokers are those of ``tests.brokers``."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def name() -> str:
    """For a stream, queue or exchange of this test alone."""
    return f"fj_test_{secrets.token_hex(6)}"


@pytest.fixture
def runner() -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Waits for what is awaitable, in a test that is not async."""
    with asyncio.Runner() as running:

        async def awaited(what: Awaitable[Any]) -> Any:
            return await what

        yield lambda what: running.run(awaited(what))
