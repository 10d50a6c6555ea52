"""Events by RabbitMQ: published persistently, and acknowledged by the broker's publisher confirm.

Needs the extra ``rabbitmq``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, TypedDict, Unpack

try:
    import aio_pika
    from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange
    from aio_pika.exceptions import DeliveryError, PublishError
    from pamqp.commands import Basic
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "RabbitSender needs aio-pika: pip install 'fencedjobs[rabbitmq]'", name="aio_pika"
    ) from error

from fencedjobs.errors import InvalidValue
from fencedjobs.senders import wire
from fencedjobs.senders.base import LinkedSender, Sender, credentials
from fencedjobs.values import Event

_SHORT: Final = 255  # bytes of a short string of AMQP


@dataclass(frozen=True)
class Link:
    """A connection with a channel in confirm mode. One publication at a time: see `turn`."""

    connection: AbstractConnection
    channel: AbstractChannel
    exchange: AbstractExchange
    #: The library tells returned messages apart by their message id alone. Of two with the same id at the
    #: same time, the return of the one would be noted on the other, and the first be taken for routed.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class AsyncRabbitSender(LinkedSender[Link]):
    """Publishes each event to an exchange of RabbitMQ, for `AsyncRelay`.

    ``url`` is ``amqp://`` or ``amqps://`` with user, password and virtual host. ``exchange`` must exist; the
    default one takes the routing key for the name of a queue. ``routing_key`` is a format of ``{topic}`` and
    ``{lane}``, or a function of the event. The message is persistent, its body the payload as JSON, its
    ``message_id`` the id; the event's own headers go along, and ``Fenced-Seq``, ``-Fence``, ``-Topic``,
    ``-Lane`` and ``-Created``.

    An ack is the broker's confirm of a message that it routed to a queue. A message that no queue takes, a
    negative confirm, and ``timeout`` seconds without an answer are `NotAcknowledged`. A lost connection is
    opened anew by the next send. `InvalidValue` for an id or routing key of more than 255 bytes (UTF-8).
    """

    def __init__(
        self, url: str, *, exchange: str = "", routing_key: wire.Address = "{topic}", timeout: float = 10.0
    ) -> None:
        if not url.startswith(("amqp://", "amqps://")):
            raise InvalidValue("url", "must be amqp:// or amqps://")
        super().__init__(timeout, credentials(url))
        self._url = url
        self._exchange = _short("exchange", exchange)
        self._routing_key = wire.address("routing_key", routing_key)

    async def _connect(self) -> Link:
        connection = await aio_pika.connect(self._url)
        try:
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            exchange = channel.default_exchange
            if self._exchange:
                exchange = await channel.get_exchange(self._exchange, ensure=False)
        except BaseException:
            await connection.close()
            raise
        return Link(connection, channel, exchange)

    def _is_open(self, link: Link) -> bool:
        return not link.connection.is_closed and not link.channel.is_closed

    async def _publish(self, link: Link, event: Event) -> bool:
        message = aio_pika.Message(
            wire.body(event),
            message_id=_short("id", event.id),
            content_type="application/json",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            headers={**wire.headers(event, reserved="x-")},
        )
        routing_key = _short("routing_key", self._routing_key(event))
        try:
            async with link.turn:
                confirm = await link.exchange.publish(message, routing_key, mandatory=True)
        except PublishError as error:
            raise self._refused(event, f"no queue takes the routing key {routing_key!r}") from error
        except DeliveryError as error:
            raise self._refused(event, "the broker refused it (nack)") from error
        if not isinstance(confirm, Basic.Ack):
            raise self._refused(event, f"the broker did not confirm it: {confirm!r}")
        return True

    async def _disconnect(self, link: Link) -> None:
        await link.connection.close()


class RabbitOptions(TypedDict, total=False):
    """The options of `AsyncRabbitSender`, where their defaults are."""

    exchange: str
    routing_key: wire.Address
    timeout: float


class RabbitSender(Sender):
    """`AsyncRabbitSender` for `dispatch` and `Relay`; arguments and errors are the same."""

    def __init__(self, url: str, **options: Unpack[RabbitOptions]) -> None:
        super().__init__(AsyncRabbitSender(url, **options))


def _short(argument: str, text: str) -> str:
    if len(text.encode()) > _SHORT:
        raise InvalidValue(argument, f"takes more than {_SHORT} bytes in UTF-8, which AMQP cannot carry")
    return text
