"""The orders of the demo: the user's file, or the invented ones that ship with the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from fencedjobs import payload
from fencedjobs.cli.lines import numbered, parsed
from fencedjobs.cli.trouble import Misuse
from fencedjobs.errors import InvalidValue

_LONGEST_ID = 200  # leaves room for the prefix of a run in somebody's database


@dataclass(frozen=True)
class Order:
    """An order: its id, how many pieces, and the whole object as it stands in the file."""

    id: str
    qty: int
    body: dict[str, Any]


def read_orders(path: Path | None) -> list[Order]:
    """The orders of a JSON-lines file; the first line that is none ends the demo before it begins."""
    with _opened(path) as stream:
        orders = [_order(number, line) for number, line in numbered(stream) if line.strip()]
    if not orders:
        raise Misuse(f"there are no orders in {path}")
    return orders


@contextmanager
def _opened(path: Path | None) -> Iterator[IO[bytes]]:
    source = path or files(__package__).joinpath("invented_orders.jsonl")
    try:
        stream = source.open("rb")
    except OSError as error:
        raise Misuse(f"the orders cannot be read: {path}: {error.strerror}") from None
    with stream:
        yield stream


def _order(number: int, line: bytes) -> Order:
    try:
        body = parsed(line, first=number == 1)
        missing = [name for name in ("id", "qty") if name not in body]
        if missing:
            raise ValueError(f"has no {' and no '.join(map(repr, missing))}")
        payload.encode("order", body)
        order_id = payload.key("id", body["id"])
        if len(order_id) > _LONGEST_ID:
            raise ValueError(f"id: must have at most {_LONGEST_ID} characters here")
        return Order(order_id, payload.whole("qty", body["qty"], least=0), body)
    except (InvalidValue, ValueError) as error:
        raise Misuse(f"orders, line {number}: {error}") from None
