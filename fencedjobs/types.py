"""The column types of our tables, and how each database spells them.

A host's own revisions name them, so they stay here under these names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import BigInteger, Dialect, Double, Integer, String, Text
from sqlalchemy.ext.compiler import compiles


class Key(String):
    """Text compared byte for byte: 'a', 'A', 'a ' and both forms of 'á' are different keys."""

    cache_ok = True

    def __init__(self, length: int = 255) -> None:
        super().__init__(length)


class LongText(Text):
    """Text without a practical limit; the limits are ours."""

    cache_ok = True


class Instant(Double[float]):
    """Seconds as a double. SQL's REAL has 4 bytes on PostgreSQL, where a live lease was then taken over."""

    cache_ok = True

    def __init__(self) -> None:
        super().__init__()

    def result_processor(self, dialect: Dialect, coltype: Any) -> Callable[[Any], float | None]:
        return lambda value: None if value is None else float(value)  # SQLite's RETURNING gives 30 for 30.0


Counter = BigInteger().with_variant(Integer(), "sqlite")  # SQLite numbers only an INTEGER key itself


def _exact(is_mariadb: bool) -> str:
    # utf8mb4_bin still pads: 'a' = 'a '. The exact collation has another name on either server.
    return f"CHARACTER SET utf8mb4 COLLATE {'utf8mb4_nopad_bin' if is_mariadb else 'utf8mb4_0900_bin'}"


@compiles(Key, "mysql", "mariadb")
def _mysql_key(type_: Key, compiler: Any, **_: Any) -> str:
    return f"VARCHAR({type_.length}) {_exact(compiler.dialect.is_mariadb)}"


@compiles(Key, "postgresql")
def _postgresql_key(type_: Key, compiler: Any, **_: Any) -> str:
    return f'VARCHAR({type_.length}) COLLATE "C"'


@compiles(Key, "sqlite")
def _sqlite_key(type_: Key, compiler: Any, **_: Any) -> str:
    return "TEXT"


@compiles(LongText, "mysql", "mariadb")
def _mysql_text(type_: LongText, compiler: Any, **_: Any) -> str:
    return f"LONGTEXT {_exact(compiler.dialect.is_mariadb)}"


@compiles(Instant, "sqlite")
def _sqlite_instant(type_: Instant, compiler: Any, **_: Any) -> str:
    return "REAL"
