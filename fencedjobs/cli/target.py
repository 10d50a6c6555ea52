"""From ``--to`` to a sender: which one, whether its package is there, and what of it may be printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from fencedjobs.cli.trouble import Misuse, Trouble
from fencedjobs.errors import InvalidValue
from fencedjobs.senders.base import Sender

_OPTIONS: Final = {"url": "--to", "servers": "--to", "headers": "--header", "timeout": "--timeout"}
_SHORTEST: Final = 4  # characters of a secret; replacing shorter ones would garble every text


@dataclass(frozen=True)
class Target:
    """Where to send, and how; ``headers`` and ``ack`` are for HTTP alone."""

    url: str
    timeout: float
    headers: Mapping[str, str]
    ack: Literal["id", "status"] | None

    def sender(self) -> Sender:
        """The sender that the scheme stands for."""
        make = _MAKERS.get(self._parts().scheme)
        if make is None:
            raise Misuse("--to must be an http://, https://, nats://, amqp:// or amqps:// URL with a host")
        if make is not _http and (self.headers or self.ack):
            raise Misuse("--header and --ack are for http:// and https:// only")
        try:
            return make(self)
        except ModuleNotFoundError as error:  # the senders name what is missing, and the extra that has it
            raise Trouble(str(error)) from None
        except InvalidValue as error:
            raise Misuse(f"{_OPTIONS.get(error.field, error.field)}: {error.problem}") from None

    def shown(self) -> str:
        """Scheme, host and port: user, password, path and query may all be secrets."""
        parts = self._parts()
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def without_secrets(self, text: str) -> str:
        """``text`` without what `shown` leaves out, and without the values of the headers."""
        parts = self._parts()
        secrets = [parts.password, parts.username, parts.path, parts.query, *self.headers.values()]
        secrets += [value.rpartition(" ")[2] for value in self.headers.values()]  # Bearer x: x alone, too
        for secret in sorted(
            {*secrets, *(unquote(one or "") for one in secrets)}, key=lambda s: -len(s or "")
        ):
            if secret and len(secret) >= _SHORTEST:
                text = text.replace(secret, "***")
        return text

    def _parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.url)
            _ = parts.hostname, parts.port
        except ValueError:
            raise Misuse("--to cannot be read as a URL") from None
        return parts


def _http(target: Target) -> Sender:
    from fencedjobs.senders.http import HttpSender

    return HttpSender(target.url, headers=target.headers, timeout=target.timeout, ack=target.ack or "id")


def _nats(target: Target) -> Sender:
    from fencedjobs.senders.nats import JetStreamSender

    return JetStreamSender(target.url, timeout=target.timeout)


def _amqp(target: Target) -> Sender:
    from fencedjobs.senders.rabbitmq import RabbitSender

    return RabbitSender(target.url, timeout=target.timeout)


_MAKERS: Final[dict[str, Callable[[Target], Sender]]] = {
    "http": _http, "https": _http, "nats": _nats, "amqp": _amqp, "amqps": _amqp,
}  # fmt: skip
