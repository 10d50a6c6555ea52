"""Events by NATS JetStream: published with a message id, and acknowledged by the stream that stored them.

Needs the extra ``nats``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, TypedDict, TypeVar, Unpack

try:
    from nats.aio.client import Client
    from nats.errors import Error, NoServersError
    from nats.js.api import PubAck
    from nats.js.errors import APIError, NoStreamResponseError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "JetStreamSender needs nats-py: pip install 'fencedjobs[nats]'", name="nats"
    ) from error

from fencedjobs.errors import InvalidValue
from fencedjobs.senders import wire
from fencedjobs.senders.base import LinkedSender, Sender, credentials
from fencedjobs.values import Event

T = TypeVar("T")

_SUBJECT: Final = re.compile(r"[^\s\x00-\x1f\x7f.*>]+(\.[^\s\x00-\x1f\x7f.*>]+)*")
_LOOK: Final = 0.1  # seconds between two looks at a connection while an answer is awaited


class AsyncJetStreamSender(LinkedSender[Client]):
    """Publishes each event to a JetStream subject, for `AsyncRelay`.

    ``servers`` is a URL, or several of one cluster. ``subject`` is a format of ``{topic}`` and ``{lane}``,
    or a function of the event. The body is the payload as JSON. ``Nats-Msg-Id`` is the id, so that the
    stream drops what is sent again within its ``duplicate_window`` (2 minutes unless set). The event's own
    headers go along, and ``Fenced-Seq``, ``-Fence``, ``-Topic``, ``-Lane`` and ``-Created``. Ids, topics
    and lanes are percent-encoded there where they are not visible ASCII.

    An ack is that of a stream, of ``stream`` if one is named. No stream on the subject, a stream that
    refuses or drops the event for another payload of its id, and ``timeout`` seconds without an answer are
    `NotAcknowledged`. A lost connection is opened
    anew by the next send, never in between: nothing is sent late from a buffer. ``options`` go to
    ``nats.connect`` (TLS, credentials).
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        subject: wire.Address = "{topic}",
        stream: str | None = None,
        timeout: float = 10.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        urls = [servers] if isinstance(servers, str) else [*servers]
        if not urls:
            raise InvalidValue("servers", "must name one at least")
        given = dict(options or {})
        secrets = [secret for url in urls for secret in credentials(url)]
        super().__init__(timeout, [*secrets, given.get("password"), given.get("token")])
        self._subject = wire.address("subject", subject)
        self._stream = stream
        self._options = given | {
            "servers": urls,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,  # so each server is tried twice; 0 would be for ever
            "reconnect_time_wait": 0,
            "connect_timeout": self.timeout / (2 * len(urls)),
        }

    async def _connect(self) -> Client:
        client, trouble = Client(), [""]

        async def note(error: Exception) -> None:
            trouble.append(f"{type(error).__name__}: {error}")

        try:
            await client.connect(**self._options | {"error_cb": note})
        except BaseException as error:
            self._let_go(client)
            if isinstance(error, NoServersError):
                raise ConnectionError(f"no server can be reached: {trouble[-1]}") from error
            raise
        return client

    def _is_open(self, link: Client) -> bool:
        return link.is_connected

    async def _publish(self, link: Client, event: Event) -> bool:
        subject = _plain(self._subject(event))
        headers = wire.headers(event, reserved="nats-", encoded=wire.quoted)
        headers["Nats-Msg-Id"] = wire.quoted(event.id)
        body = wire.body(event)
        publishing = link.jetstream().publish(
            subject, body, timeout=self.timeout, stream=self._stream, headers=headers
        )
        try:
            ack = await _answer(link, publishing)
        except NoStreamResponseError as error:
            raise self._refused(event, f"no stream has the subject {subject!r}") from error
        except APIError as error:
            raise self._refused(event, f"the stream refused it: {error.description}") from error
        if not ack.stream or not ack.seq or self._stream not in (None, ack.stream):
            raise self._refused(event, f"the answer is no ack of the stream: {ack}")
        if ack.duplicate and await self._has_another(link, ack, body):
            raise self._refused(
                event, f"the stream has another payload under this id, as its message {ack.seq}"
            )
        return True

    async def _has_another(self, link: Client, ack: PubAck, body: bytes) -> bool:
        """Whether the stream dropped this as the repetition of something else: its id was mended or reused.

        What is gone from the stream, or not for us to read, is taken for the same.
        """
        reading = link.jetstream(timeout=self.timeout / 4).get_msg(ack.stream, ack.seq)
        try:
            stored = await _answer(link, reading)
        except (Error, TimeoutError):
            return False
        return stored.data != body

    async def _disconnect(self, link: Client) -> None:
        await link.close()


class JetStreamOptions(TypedDict, total=False):
    """The options of `AsyncJetStreamSender`, where their defaults are."""

    subject: wire.Address
    stream: str | None
    timeout: float
    options: Mapping[str, Any] | None


class JetStreamSender(Sender):
    """`AsyncJetStreamSender` for `dispatch` and `Relay`; arguments and errors are the same."""

    def __init__(self, servers: str | Sequence[str], **options: Unpack[JetStreamOptions]) -> None:
        super().__init__(AsyncJetStreamSender(servers, **options))


async def _answer(client: Client, request: Coroutine[Any, Any, T]) -> T:
    """The answer to a request, or `ConnectionError` soon after the connection broke.

    By itself a request waits on, and not every version calls back when a connection ends.
    """
    answer = asyncio.ensure_future(request)
    try:
        while not answer.done():
            if not client.is_connected:
                raise ConnectionError(f"the connection was lost: {client.last_error}")
            await asyncio.wait({answer}, timeout=_LOOK)
        return answer.result()
    finally:
        answer.cancel()


def _plain(subject: str) -> str:
    """A subject to publish to: no empty tokens, wildcards or spaces, which would end it on the wire."""
    if not _SUBJECT.fullmatch(subject):
        raise InvalidValue("subject", f"{subject!r} is no subject to publish to")
    return subject
