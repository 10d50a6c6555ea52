"""Many rows as parameters of one statement: as arrays, or as one JSON text.

The SQL is the same for any number of rows, so that it is compiled once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    Column,
    FromClause,
    String,
    Text,
    bindparam,
    func,
    literal_column,
    select,
    type_coerce,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import ColumnElement, FunctionElement

from fencedjobs.types import Instant

Columns = Mapping[str, Column[Any]]
Values = Mapping[str, Sequence[Any]]

_JSON: Final = "given_rows"
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode


def alike(values: Values) -> set[str]:
    """The columns that have the same value in all rows, of which there is one at least."""
    return {name for name, these in values.items() if these.count(these[0]) == len(these)}


class ManyRows(ABC):
    """How a database gets the rows that a statement is about."""

    @abstractmethod
    def table(self, columns: Columns) -> FromClause:
        """The rows as something to select from: columns of these names, typed like these, and ``place``."""

    @abstractmethod
    def parameters(self, values: Values) -> dict[str, Any]:
        """The parameters of a statement with `table`: the values of each column."""


class Arrays(ManyRows):
    """An array for each column, and ``unnest``."""

    def table(self, columns: Columns) -> FromClause:
        arrays = [
            bindparam(name, type_=ARRAY(Text() if isinstance(column.type, String) else column.type))
            for name, column in columns.items()
        ]
        rows = func.unnest(*arrays).table_valued(*columns, with_ordinality="place", name="given")
        return rows.render_derived()

    def parameters(self, values: Values) -> dict[str, Any]:
        return dict(values)


class _Json(ManyRows):
    """One JSON text (ASCII): an array of rows, each an array of texts, numbers and nulls.

    Of columns whose values the driver is given as they are; nobody would convert others.
    """

    def parameters(self, values: Values) -> dict[str, Any]:
        return {_JSON: _encode([*zip(*values.values(), strict=True)])}


class JsonEach(_Json):
    """``json_each`` of SQLite."""

    def table(self, columns: Columns) -> FromClause:
        each = func.json_each(bindparam(_JSON, type_=Text())).table_valued("key", "value", name="each")

        def at(path: str) -> ColumnElement[Any]:
            return func.json_extract(each.c.value, literal_column(f"'$[{path}]'"))

        def part(place: int, column: Column[Any]) -> ColumnElement[Any]:
            whole = at(f"{place}")
            if isinstance(column.type, Instant):
                quotient = literal_column("1.0") * at(f"{place}][0") / at(f"{place}][1")
                whole = func.coalesce(quotient, whole)
            return type_coerce(whole, column.type)

        parts = (part(place, column).label(name) for place, (name, column) in enumerate(columns.items()))
        return select(*parts, each.c.key.label("place")).subquery("given")

    def parameters(self, values: Values) -> dict[str, Any]:
        return super().parameters({name: [*map(_exactly, these)] for name, these in values.items()})


def _exactly(value: Any) -> Any:
    """A double as a quotient of whole numbers of 64 bits: of decimals SQLite may read 15 digits only.

    (Not where it is so large or so small that there is none.)
    """
    if not isinstance(value, float):
        return value
    over, under = value.as_integer_ratio()
    return (over, under) if max(abs(over), under) < 2**63 else value


class JsonTable(_Json):
    """``JSON_TABLE`` of MariaDB and MySQL."""

    def table(self, columns: Columns) -> FromClause:
        parts = (literal_column(name, column.type) for name, column in columns.items())
        given = _json_table(bindparam(_JSON, type_=Text()), *parts)
        return given.table_valued(*columns, "place", name="given")


class _json_table(FunctionElement[Any]):
    """The text, and for each column one of its name and type."""

    inherit_cache = True
    name = "json_table"


@compiles(_json_table, "mysql", "mariadb")
def _compiled(element: _json_table, compiler: Any, **options: Any) -> str:
    text, *parts = element.clauses
    types = compiler.dialect.type_compiler_instance
    columns = (
        f"{compiler.preparer.quote(part.name)} {types.process(part.type)} "
        f"PATH '$[{place}]' ERROR ON EMPTY ERROR ON ERROR"
        for place, part in enumerate(parts)
    )
    listed = ", ".join(("place FOR ORDINALITY", *columns))
    return f"JSON_TABLE({compiler.process(text, **options)}, '$[*]' COLUMNS ({listed}))"
