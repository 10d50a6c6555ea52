"""What of an event goes over the wire, the same for every sender."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from string import punctuation
from typing import Any, Final
from urllib.parse import quote

from fencedjobs.errors import InvalidValue
from fencedjobs.values import Event

Address = str | Callable[[Event], str]

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")
_PLAIN: Final = punctuation.replace("%", "")


def envelope(event: Event) -> bytes:
    """The whole event as one JSON object, in ASCII."""
    return _json(
        {
            "id": event.id,
            "seq": event.seq,
            "fence": event.fence,
            "topic": event.topic,
            "lane": event.lane,
            "payload": event.payload,
            "headers": dict(event.headers),
            "created": event.created,
        }
    )


def body(event: Event) -> bytes:
    """The payload alone as JSON, in ASCII; the rest goes along as `headers`."""
    return _json(event.payload)


def headers(event: Event, *, reserved: str, encoded: Callable[[str], str] = str) -> dict[str, str]:
    """The event's own headers, and, ``encoded``, what a receiver needs to tell an old relay.

    ``InvalidValue`` for a header of the event that cannot be one, or whose name begins like those of the
    broker (``reserved``) or ours: it could change what the broker does with the message.
    """
    for name, value in event.headers.items():
        if name.lower().startswith((reserved, "fenced-")):
            raise InvalidValue("headers", f"the name {name!r} is reserved")
        field("headers", name, value)
    ours = {
        "Fenced-Seq": str(event.seq),
        "Fenced-Fence": str(event.fence),
        "Fenced-Topic": event.topic,
        "Fenced-Lane": event.lane,
        "Fenced-Created": repr(event.created),
    }
    return {**event.headers, **{name: encoded(value) for name, value in ours.items()}}


def field(argument: str, name: str, value: str) -> None:
    """`InvalidValue`, which does not show the value, unless this can stand in a header of a message.

    A line break in it would be the end of the header, and what follows the sender's next words.
    """
    if not isinstance(name, str) or not _TOKEN.fullmatch(name):
        raise InvalidValue(argument, f"{name!r} is no name of a header")
    if not isinstance(value, str) or value != value.strip() or _CONTROL.search(value):
        raise InvalidValue(argument, f"the value of {name!r} has control characters or spaces at its ends")


def quoted(text: str) -> str:
    """Text for a header: visible ASCII as it is, everything else and ``%`` percent-encoded (UTF-8).

    Different texts stay different.
    """
    return quote(text, safe=_PLAIN)


def address(argument: str, given: Address) -> Callable[[Event], str]:
    """A function of the event, from one or from a format of ``{topic}`` and ``{lane}``."""
    if callable(given):
        return given
    try:
        given.format(topic="", lane="")
    except (AttributeError, IndexError, KeyError, ValueError) as error:
        raise InvalidValue(argument, f"must be a format of {{topic}} and {{lane}}, got {given!r}") from error
    return lambda event: given.format(topic=event.topic, lane=event.lane)


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
