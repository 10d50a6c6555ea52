"""Events by HTTP: one POST, and an answer that has to prove that the receiver has this very event.

httpx's transport is used without its client: there is nothing that follows redirects, reads proxies or
passwords from the environment, keeps cookies or unpacks a body. Needs the extra ``http``.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from typing import Any, Final, Literal, TypedDict, Unpack

try:
    import httpx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "HttpSender needs httpx: pip install 'fencedjobs[http]'", name="httpx"
    ) from error

from fencedjobs import payload as edge
from fencedjobs.errors import InvalidValue
from fencedjobs.senders import wire
from fencedjobs.senders.base import AsyncSender, Sender
from fencedjobs.values import Event

Ack = Literal["id", "status"]

_OURS: Final = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Encoding": "identity",
}
_RESERVED: Final = {
    *(name.lower() for name in _OURS),
    *"host content-length content-encoding transfer-encoding idempotency-key".split(),
    *"connection keep-alive te trailer upgrade expect".split(),
}
_EXCERPT: Final = 200  # characters of a refusal that are kept with the event


class AsyncHttpSender(AsyncSender):
    """Sends each event to ``url`` as a JSON object, for `AsyncRelay`.

    The object has ``id``, ``seq``, ``fence``, ``topic``, ``lane``, ``payload``, ``headers`` and ``created``;
    the header ``Idempotency-Key`` is the id, percent-encoded where it is not visible ASCII.

    An ack needs a status 2xx and, with ``ack="id"``, a JSON object in the body whose ``id`` is the event's;
    ``ack="status"`` believes the status alone. All else is `NotAcknowledged` with the reason: another
    status, a redirect (never followed), a body of more than ``max_bytes`` or a compressed one, a connection
    that ends early, or ``timeout`` seconds gone by, counted over the whole exchange.

    ``headers`` go with every request; credentials belong there, not in the URL. ``allow_hosts`` are the only
    hosts that ``url`` may name. ``tls`` replaces the default trust in public authorities. `InvalidValue`
    for arguments that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 10.0,
        ack: Ack = "id",
        max_bytes: int = 64 * 1024,
        allow_hosts: Iterable[str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._url = _checked(url, allow_hosts)
        self._headers = _own(headers or {}) | _OURS
        if ack not in ("id", "status"):
            raise InvalidValue("ack", f"must be 'id' or 'status', got {ack!r}")
        self._ack = ack
        self._max_bytes = edge.whole("max_bytes", max_bytes, least=1)
        self._tls = tls or (
            httpx.create_ssl_context(trust_env=False) if self._url.scheme == "https" else None
        )
        self._transport: httpx.AsyncHTTPTransport | None = None
        super().__init__(timeout, _secrets(headers or {}, self._url))

    async def _deliver(self, event: Event) -> bool:
        status, body = await self._exchange(event)
        if not 200 <= status <= 299:
            raise self._refused(event, f"status {status}: {body[:_EXCERPT].decode('utf-8', 'replace')}")
        doubt = missing_proof(event.id, body) if self._ack == "id" else ""
        if doubt:
            raise self._refused(event, f"status {status}, but {doubt}")
        return True

    async def _exchange(self, event: Event) -> tuple[int, bytes]:
        headers = self._headers | {"Idempotency-Key": wire.quoted(event.id)}
        request = httpx.Request("POST", self._url, headers=headers, content=wire.envelope(event))
        response = await self._opened().handle_async_request(request)
        async with aclosing(response):
            return response.status_code, await self._body(event, response)

    async def _body(self, event: Event, response: httpx.Response) -> bytes:
        """The body, read no further than it can still be part of an ack."""
        told = f"status {response.status_code}"
        if 300 <= response.status_code <= 399:
            to = response.headers.get("Location", "")[:_EXCERPT]
            raise self._refused(event, f"{told}, a redirect to {to!r}, which is not followed")
        if (packed := response.headers.get("Content-Encoding", "identity")).lower() != "identity":
            raise self._refused(event, f"{told}, but its body is packed as {packed[:_EXCERPT]!r}")
        too_long = f"{told}, but its body has more than {self._max_bytes} bytes"
        if int(response.headers.get("Content-Length", 0)) > self._max_bytes:
            raise self._refused(event, too_long)
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._max_bytes:
                raise self._refused(event, too_long)
        return bytes(body)

    def _opened(self) -> httpx.AsyncHTTPTransport:
        if self._transport is None:
            # A body that goes on after its end would be taken for the answer to the next event, which
            # only the id tells; without it a connection serves one event.
            limits = httpx.Limits(max_keepalive_connections=None if self._ack == "id" else 0)
            verify = self._tls or False  # none is used then, and loading the authorities would take time
            self._transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, limits=limits)
        return self._transport

    def _forget(self) -> None:
        self._transport = None

    async def _close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()


class HttpOptions(TypedDict, total=False):
    """The options of `AsyncHttpSender`, where their defaults are."""

    headers: Mapping[str, str] | None
    timeout: float
    ack: Ack
    max_bytes: int
    allow_hosts: Iterable[str] | None
    tls: ssl.SSLContext | None


class HttpSender(Sender):
    """`AsyncHttpSender` for `dispatch` and `Relay`; arguments and errors are the same."""

    def __init__(self, url: str, **options: Unpack[HttpOptions]) -> None:
        super().__init__(AsyncHttpSender(url, **options))


def missing_proof(id: str, body: bytes) -> str:
    """Why this body does not say that the receiver has the event ``id``; empty if it does."""
    if not body:
        return "its body is empty"
    try:
        answer = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return f"its body is not JSON: {body[:_EXCERPT].decode('utf-8', 'replace')}"
    if not isinstance(answer, dict) or "id" not in answer:
        return "its body is no JSON object with an id"
    if answer["id"] != id:
        return f"its body acknowledges the id {str(answer['id'])[:_EXCERPT]!r}"
    return ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice, and readers differ in which one counts")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _checked(url: str, allow_hosts: Iterable[str] | None) -> httpx.URL:
    """The URL, if it can be sent to; errors do not show it, since it may hold credentials."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError, UnicodeError):
        raise InvalidValue("url", "is not a URL") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidValue("url", "must be http:// or https:// with a host")
    if parsed.userinfo:
        raise InvalidValue("url", "must not have a user or password: give them as a header")
    host = parsed.raw_host.decode("ascii")
    if allow_hosts is not None and host not in {allowed.lower() for allowed in allow_hosts}:
        raise InvalidValue("url", f"its host {host!r} is not among those allowed")
    return parsed


def _own(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        wire.field("headers", name, value)
        if name.lower() in _RESERVED:
            raise InvalidValue("headers", f"{name!r} is set by the sender")
        if not value.isascii():
            raise InvalidValue("headers", f"the value of {name!r} is not ASCII")
    return dict(headers)


def _secrets(headers: Mapping[str, str], url: httpx.URL) -> list[str]:
    """What a receiver that echoes a request may not bring into error texts: ``Bearer x``, ``?key=x``."""
    return [
        *(text for value in headers.values() for text in (value, value.rpartition(" ")[2])),
        *(value for _, value in url.params.multi_items()),
    ]
