"""What every sender does: one deadline over all of a send, one kind of error, one connection that is kept.

A sender is written once, for asyncio. Its sync form runs the same code on a loop in a thread of its own:
only there a deadline can end whatever is waited for, be it a name, a handshake or a byte.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, Generic, Self, TypeVar
from urllib.parse import unquote, urlsplit

from fencedjobs import payload as edge
from fencedjobs.errors import FencedJobsError, InvalidValue, NotAcknowledged
from fencedjobs.senders.thread import LoopThread
from fencedjobs.values import Event

Link = TypeVar("Link")

_GRACE: Final = 0.4  # seconds for a loop that was late to notice its deadline
_PARTING: Final = 2.0  # seconds that `aclose` waits for connections to say goodbye
_SHORTEST_SECRET: Final = 4  # replacing shorter ones would garble every text


class AsyncSender(ABC):
    """An awaitable sender: ``await sender(event)`` is ``True``, or raises.

    ``timeout`` is the most seconds that a send takes, everything included.
    """

    def __init__(self, timeout: float, secrets: Iterable[str | None] = ()) -> None:
        self.timeout = edge.duration("timeout", timeout)
        if not self.timeout:
            raise InvalidValue("timeout", "must be above 0")
        found = {secret for secret in secrets if secret and len(secret) >= _SHORTEST_SECRET}
        self._secrets = sorted(found, key=len, reverse=True)  # one may be a part of another
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, event: Event) -> bool:
        """Send; ``True`` when it is proven that the receiver has the event, else `NotAcknowledged`.

        `InvalidValue` if the event has a topic, id or header that this transport cannot carry.
        """
        self._settle()
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                return await self._deliver(event)
        except FencedJobsError:
            raise
        except Exception as error:
            raise self.late(event) if deadline.expired() else self._refused(event, _told(error)) from error

    def late(self, event: Event) -> NotAcknowledged:
        """The error of a send whose time was up."""
        return NotAcknowledged(event.id, f"no acknowledgement within {self.timeout:g} seconds")

    async def aclose(self) -> None:
        """Close the connection; a later send opens a new one."""
        if self._loop is asyncio.get_running_loop():
            await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    @abstractmethod
    async def _deliver(self, event: Event) -> bool:
        """``True`` if the answer proves the delivery, else an error."""

    @abstractmethod
    def _forget(self) -> None:
        """Start without a connection: a former one belongs to another loop."""

    @abstractmethod
    async def _close(self) -> None: ...

    def _refused(self, event: Event, reason: str) -> NotAcknowledged:
        for secret in self._secrets:
            reason = reason.replace(secret, "***")
        return NotAcknowledged(event.id, reason)

    def _settle(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._forget()


class LinkedSender(AsyncSender, Generic[Link]):
    """A sender over a connection that is kept: made when it is needed, let go when a send failed on it.

    What was sent on it is unknown then, and its late answers are nobody's.
    """

    _link: Link | None

    @abstractmethod
    async def _connect(self) -> Link: ...

    @abstractmethod
    def _is_open(self, link: Link) -> bool: ...

    @abstractmethod
    async def _publish(self, link: Link, event: Event) -> bool: ...

    @abstractmethod
    async def _disconnect(self, link: Link) -> None: ...

    def _forget(self) -> None:
        self._link = None
        self._linking = asyncio.Lock()
        self._parting: set[asyncio.Task[None]] = set()

    async def _deliver(self, event: Event) -> bool:
        link = await self._linked()
        try:
            return await self._publish(link, event)
        except FencedJobsError:  # an answer came, or nothing was sent: the connection is in order
            raise
        except BaseException:
            self._let_go(link)
            raise

    async def _linked(self) -> Link:
        async with self._linking:
            if self._link is not None and not self._is_open(self._link):
                self._let_go(self._link)
            if self._link is None:
                self._link = await self._connect()
            return self._link

    def _let_go(self, link: Link) -> None:
        """Disconnect without waiting: a server that is gone may not cost the next send its time."""
        if self._link is link:
            self._link = None
        task = asyncio.create_task(self._part(link))
        self._parting.add(task)
        task.add_done_callback(self._parting.discard)

    async def _part(self, link: Link) -> None:
        with suppress(Exception):  # there is nothing left to lose on it
            await self._disconnect(link)

    async def _close(self) -> None:
        if self._link is not None:
            self._let_go(self._link)
        if self._parting:
            await asyncio.wait(self._parting, timeout=_PARTING)


class Sender:
    """A sender without asyncio: ``sender(event)`` is ``True``, or raises; may be called from any thread.

    ``timeout`` is the most seconds that a send takes, everything included.
    """

    def __init__(self, sender: AsyncSender) -> None:
        self._sender = sender
        self._thread = LoopThread(type(self).__name__)

    @property
    def timeout(self) -> float:
        return self._sender.timeout

    def __call__(self, event: Event) -> bool:
        """Send; ``True`` when it is proven that the receiver has the event, else `NotAcknowledged`.

        `InvalidValue` if the event has a topic, id or header that this transport cannot carry.
        """
        try:
            return self._thread.run(self._sender(event), within=self.timeout + _GRACE)
        except TimeoutError as error:
            raise self._sender.late(event) from error

    def close(self) -> None:
        """Close the connection and end the thread; a later send starts anew."""
        if self._thread.is_running:
            with suppress(TimeoutError):
                self._thread.run(self._sender.aclose(), within=_PARTING + _GRACE)
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def credentials(url: Any) -> list[str | None]:
    """User and password of a URL, as they stand there and decoded, to be kept out of texts."""
    parts = urlsplit(url)
    found = [parts.password, parts.username if parts.password is None else None]
    return [*found, *(unquote(secret) for secret in found if secret)]


def _told(error: BaseException) -> str:
    kind, text = edge.described(error)
    return f"{kind}: {text}" if text else kind
