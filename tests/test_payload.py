"""The edge: what is accepted reads back equal, what is not is refused with its place."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencedjobs import InvalidValue, payload

texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=30,
)


@settings(deadline=None, max_examples=100)
@given(values)
def test_what_is_accepted_reads_back_equal_and_is_ascii(value: Any) -> None:
    text = payload.encode("payload", value)
    assert text.isascii()
    assert same(payload.decode(text), value), text


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same kinds, down to the sign of zero."""
    return repr(one) == repr(other)


def test_whole_numbers_of_any_size_keep_every_digit() -> None:
    """FAULTS 62."""
    for number in (2**53 + 1, 2**63, 2**70, -(2**200), 10**4000):
        assert payload.decode(payload.encode("payload", {"n": number})) == {"n": number}
    with pytest.raises(InvalidValue, match="payload"):
        payload.encode("payload", 10**5000)


def test_floats_keep_every_bit() -> None:
    for number in (0.1, 1e308, 5e-324, -0.0, 1764000000.123456, math.pi, 1e22, 123456789012345680.0):
        assert same(payload.decode(payload.encode("payload", number)), number)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (math.nan, "payload"),
        ({"a": [1, math.inf]}, "payload.a[1]"),
        ([-math.inf], "payload[0]"),
        ({"a": "x\x00"}, "payload.a"),
        ({"a\x00": 1}, "payload key"),
        ({"\ud800": 1}, "payload key"),
        (["\udfff"], "payload[0]"),
        ({1: 2}, "payload"),
        ({None: 2}, "payload"),
        ({"a": (1, 2)}, "payload.a"),
        ({"a": {1}}, "payload.a"),
        (b"bytes", "payload"),
        (object, "payload"),
        (1j, "payload"),
    ],
    ids=repr,
)
def test_what_is_no_json_is_refused_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(InvalidValue) as refusal:
        payload.encode("payload", value)
    assert refusal.value.field == place
    assert isinstance(refusal.value, ValueError)


def test_the_limit_is_in_bytes_of_json() -> None:
    fits = "x" * (payload.MAX_BYTES - 2)
    assert len(payload.encode("payload", fits)) == payload.MAX_BYTES
    for too_long in (fits + "x", "é" * (payload.MAX_BYTES // 6 + 1)):
        with pytest.raises(InvalidValue, match="limit"):
            payload.encode("payload", too_long)
    with pytest.raises(InvalidValue, match="limit"):
        payload.encode("payload", [0] * 50, limit=100)
    assert payload.encode("payload", "xx", limit=4) == '"xx"'


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_the_depth_is_limited_before_the_interpreter_s_own() -> None:
    assert payload.decode(payload.encode("payload", nested(200))) == nested(200)
    for depth in (201, 300, 100_000):
        with pytest.raises(InvalidValue, match="deep"):
            payload.encode("payload", nested(depth))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidValue, match="deep"):
        payload.encode("payload", endless)


def test_a_small_value_that_would_be_endless_as_json_is_refused_soon() -> None:
    """Sixty lists, each twice in the next: 2**60 of them as JSON."""
    value: Any = "x"
    for _ in range(60):
        value = [value, value]
    with pytest.raises(InvalidValue, match="limit"):
        payload.encode("payload", value, limit=10_000)


class Colour(enum.StrEnum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 7


def test_relatives_of_the_json_types_are_what_they_equal() -> None:
    value = OrderedDict(a=Colour.RED, b=Size.BIG, **{Colour.RED: True})
    read = payload.decode(payload.encode("payload", value))
    assert read == value == {"a": "red", "b": 7, "red": True}
    assert json.loads('{"a":"red","b":7,"red":true}') == read


def test_a_key_has_one_to_255_characters() -> None:
    for good in ("a", " ", "x" * 255, "\U0001f600" * 255, "a\n\t\x7f\u200b\uffff"):
        assert payload.key("id", good) == good
    for bad in ("", "x" * 256, "a\x00", "\ud800", None, 7, b"a", ["a"]):
        with pytest.raises(InvalidValue, match="id"):
            payload.key("id", bad)


def test_a_text_made_storable_is_short_and_clean() -> None:
    assert payload.sanitised("plain") == "plain"
    assert payload.sanitised("a\x00b\ud800c") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c"
    assert len(payload.sanitised("x" * 10**6)) == payload.MAX_TEXT
