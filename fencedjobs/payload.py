"""The edge: what may enter the database, checked before anything is written.

Values are stored as JSON text (RFC 8259) in ASCII, so that they read back equal on every database
and through every connection character set. What JSON or one of the databases cannot hold is refused
with the place where it stands.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any, Final

from fencedjobs.errors import InvalidValue

MAX_BYTES: Final = 1024 * 1024
MAX_DEPTH: Final = 200
MAX_KEY: Final = 255
MAX_TEXT: Final = 2000

_encode: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_decode: Final = json.JSONDecoder().decode
_BAD: Final = re.compile("[\x00\ud800-\udfff]")
_STRING: Final = frozenset([str])
_PLAIN: Final = frozenset([str, int, bool, float, type(None)])
_MAX_INT = 2**31 - 1


def encode(field: str, value: Any, *, limit: int = MAX_BYTES) -> str:
    """The JSON text of ``value``; `InvalidValue` names ``field`` and the place inside it."""
    text = _flat(value)
    if text is None or "\\u" in text:  # which may be NUL or a lone surrogate
        _check(field, value, limit)
        text = _encoded(field, value)
    if len(text) > limit:
        raise InvalidValue(field, f"takes {len(text)} bytes as JSON, the limit is {limit}")
    return text


def _flat(value: Any) -> str | None:
    """The text of a dict of nothing but plain values, as most are: it needs no walk. ``None`` for others."""
    if type(value) is not dict:
        return None
    if not (_STRING.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values()))):
        return None
    try:
        return _encode(value)
    except ValueError:
        return None


def _encoded(field: str, value: Any) -> str:
    try:
        return _encode(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValue(field, f"cannot be stored as JSON: {error}") from error


def decode(text: str | None) -> Any:
    """The value of a stored JSON text; ``None`` for none."""
    return None if text is None else _decode(text)


def digest(*parts: Any) -> str:
    """A fingerprint of JSON values that does not depend on the order of keys (SHA-256, in hex)."""
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def headers(field: str, value: Any) -> str | None:
    """The JSON text of a mapping of strings to strings, ``None`` for none."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise InvalidValue(field, f"must be a dict of strings to strings, got {value!r}")
    return encode(field, value)


def key(field: str, value: Any) -> str:
    """An id, queue or owner: a string of 1 to 255 characters, without NUL or lone surrogates."""
    if not isinstance(value, str):
        raise InvalidValue(field, f"must be a string, got {type(value).__name__}")
    if not 1 <= len(value) <= MAX_KEY:
        raise InvalidValue(field, f"must have 1 to {MAX_KEY} characters, got {len(value)}")
    return _clean(field, value)


def label(field: str, value: Any) -> str:
    """Like `key`, but may be empty."""
    return value if value == "" and isinstance(value, str) else key(field, value)


def text(field: str, value: Any) -> str:
    """A string without NUL or lone surrogates, of at most 1 MiB."""
    if not isinstance(value, str):
        raise InvalidValue(field, f"must be a string, got {type(value).__name__}")
    if len(value) > MAX_BYTES:
        raise InvalidValue(field, f"has {len(value)} characters, the limit is {MAX_BYTES}")
    return _clean(field, value)


def whole(field: str, value: Any, *, least: int, most: int = _MAX_INT) -> int:
    """A whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValue(field, f"must be a whole number, got {value!r}")
    if not least <= value <= most:
        raise InvalidValue(field, f"must be from {least} to {most}, got {value}")
    return int(value)


def instant(field: str, value: Any) -> float:
    """A finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidValue(field, f"must be a number of seconds, got {value!r}")
    try:
        number = float(value)
    except OverflowError as error:
        raise InvalidValue(field, "is too large for a double") from error
    if not math.isfinite(number):
        raise InvalidValue(field, f"must be finite, got {value!r}")
    return number


def duration(field: str, value: Any) -> float:
    """A finite number of seconds, 0 or more."""
    number = instant(field, value)
    if number < 0:
        raise InvalidValue(field, f"must not be negative, got {value!r}")
    return number


def ttl(value: Any, now: float | None = None) -> float:
    """A finite number of seconds above 0 that, added to ``now``, gives a later finite instant."""
    number = instant("ttl", value)
    if number <= 0:
        raise InvalidValue("ttl", f"must be above 0, got {value!r}")
    if now is not None and not now < now + number < math.inf:
        raise InvalidValue("ttl", f"{value!r} after now={now!r} is no later finite instant")
    return number


def reason(field: str, value: Any) -> str:
    """A reason in words: any text but none, made storable."""
    if not isinstance(value, str) or not value:
        raise InvalidValue(field, f"must be a text that says why, got {value!r}")
    return sanitised(value)


def sanitised(text: str, limit: int = MAX_TEXT) -> str:
    """Any text made storable and cut to ``limit`` characters, so that recording a failure cannot fail."""
    return _BAD.sub("\N{REPLACEMENT CHARACTER}", text[:limit])


def described(error: BaseException | str) -> tuple[str, str]:
    """The kind and the text of an error, sanitised; survives an error whose ``str`` raises."""
    if isinstance(error, str):
        return "", sanitised(error)
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not keep the failure from being recorded
        text = "(its text cannot be read)"
    return sanitised(type(error).__name__, MAX_KEY), sanitised(text)


def _clean(field: str, text: str) -> str:
    bad = _BAD.search(text)
    if bad:
        what = "NUL" if bad.group() == "\x00" else "a lone surrogate"
        raise InvalidValue(field, f"has {what} at character {bad.start()}")
    return text


def _check(field: str, value: Any, limit: int) -> None:
    """Walk without recursion, so that a deep value meets our limit and not the interpreter's."""
    todo, seen = [(field, value, 0)], 0
    while todo:
        place, item, depth = todo.pop()
        seen += 1
        if seen > limit:  # each takes a byte at least; parts that are shared could be met without end
            raise InvalidValue(field, f"takes more than {limit} bytes as JSON, which is the limit")
        if isinstance(item, str):
            _clean(place, item)
        elif item is None or isinstance(item, (bool, int)):
            continue
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise InvalidValue(place, f"{item!r} is not JSON")
        elif depth >= MAX_DEPTH:
            raise InvalidValue(field, f"is nested deeper than {MAX_DEPTH} levels")
        elif isinstance(item, dict):
            for name, inner in item.items():
                if not isinstance(name, str):
                    raise InvalidValue(place, f"has the key {name!r}, but JSON keys are strings")
                _clean(f"{place} key", name)
                todo.append((f"{place}.{name}", inner, depth + 1))
        elif isinstance(item, list):
            todo.extend((f"{place}[{n}]", inner, depth + 1) for n, inner in enumerate(item))
        else:
            raise InvalidValue(place, f"{type(item).__name__} is not a JSON value")
