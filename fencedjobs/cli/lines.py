"""JSON lines from a file that may hold anything: each line is an object or a reason why it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import IO, Any, Final, NoReturn

LONGEST: Final = 8 * 1024 * 1024  # bytes; the longest payload takes a part of it
_INSTANTS: Final = ("run_at", "deadline")


def numbered(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers from 1. Of a line that is too long only the start is kept."""
    number = 0
    while line := stream.readline(LONGEST + 1):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and (rest := stream.readline(LONGEST)):
            pass
        yield number, line


def parsed(line: bytes, *, first: bool = False) -> dict[str, Any]:
    """The object of a line; `ValueError` says what is wrong with it."""
    if len(line) > LONGEST:
        raise ValueError(f"is longer than {LONGEST} bytes")
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
        value = json.loads(text, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"is not an object but {_kind(value)}")
    return value


def as_job(value: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The arguments of ``enqueue``, with ISO 8601 instants as seconds; unknown names are refused."""
    unknown = sorted(value.keys() - known)
    if unknown:
        raise ValueError(f"has unknown {', '.join(map(repr, unknown))}; known are {', '.join(sorted(known))}")
    return {name: _instant(name, item) if name in _INSTANTS else item for name, item in value.items()}


def seconds(text: str) -> float:
    """The instant of an ISO 8601 text as Unix seconds; `ValueError` says what is wrong with it."""
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither seconds nor an ISO 8601 time") from None
    if instant.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; add Z for UTC")
    return instant.timestamp()


def _instant(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return seconds(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


_KINDS: Final = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a number")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"has {constant}, which is not JSON")
