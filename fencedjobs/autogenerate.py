"""What a host's Alembic sees of our tables: nothing, or exactly what its database has of them.

All of it can be reached as ``schema.…``. In the host's ``env.py``::

    context.configure(..., include_object=schema.include_object, render_item=schema.render_item)
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakSet

from sqlalchemy import Dialect, MetaData, Table

from fencedjobs import models, types
from fencedjobs.errors import InvalidValue

if TYPE_CHECKING:  # Alembic takes longer to import than all the rest
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps

_OURS: Final = frozenset({models.VERSION_TABLE, *models.Base.metadata.tables})
_MODULE: Final = types.__name__
_PLACED: Final[WeakSet[Table]] = WeakSet()  # our tables in a metadata of the host's


def attach(metadata: MetaData, *, schema: str | None = None) -> dict[str, Table]:
    """Put our tables into the host's metadata, and return them by name; again, and nothing happens.

    For foreign keys to them, ``metadata.create_all()`` and a history that the host's autogenerate
    writes. ``schema`` is where they are, as told to the `Store` too; without it they are where the
    metadata's other tables are. Raises `InvalidValue` if the host has a table of that name.
    """
    attached, place = {}, schema or metadata.schema
    for table in models.Base.metadata.sorted_tables:
        there = metadata.tables.get(f"{place}.{table.name}" if place else table.name)
        if there is not None and there not in _PLACED:
            raise InvalidValue("metadata", f"has a table {there.key!r} already that is not ours")
        attached[table.name] = _placed(table, metadata, schema) if there is None else there
    return attached


def metadata(dialect: Dialect, schema: str | None = None) -> MetaData:
    """A metadata of our tables with just the indexes that this dialect's database gets.

    For ``target_metadata=[Base.metadata, schema.metadata(connection.dialect)]``.
    """
    placed = MetaData(schema=schema)
    for table in models.Base.metadata.sorted_tables:
        copy = _placed(table, placed, schema)
        copy.indexes -= {index for index in copy.indexes if not models.index_fits(index, dialect)}
    return placed


def _placed(table: Table, metadata: MetaData, schema: str | None) -> Table:
    copy = table.to_metadata(metadata, schema=schema or metadata.schema)  # type: ignore[arg-type]  # or None
    _PLACED.add(copy)
    models.choose_indexes(copy)  # a copied index has forgotten its condition
    return copy


def include_name(name: str | None, type_: str, parent_names: MutableMapping[Any, Any]) -> bool:
    """For ``context.configure(include_name=…)``: autogenerate does not see our tables in the database.

    Without it Alembic proposes to drop them, because the host's models do not have them. A host that has an
    ``include_name`` of its own asks both.
    """
    return type_ != "table" or name not in _OURS


def include_object(item: Any, name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
    """For ``context.configure(include_object=…)``: like `include_name`, also where the host has our tables.

    Of what `attach` has put into its metadata autogenerate sees the indexes that the database gets.
    """
    if type_ == "table" and reflected and compare_to is None:
        return name not in _OURS
    if type_ == "index" and not reflected and item.table in _PLACED:
        dialect = _current_dialect()
        return dialect is None or models.index_fits(item, dialect)
    return True


def render_item(type_: str, item: Any, autogen_context: AutogenContext) -> str | Literal[False]:
    """For ``context.configure(render_item=…)``: our column types, and their import, in a revision."""
    if type_ != "type" or type(item).__module__ != _MODULE:
        return False
    autogen_context.imports.add(f"import {_MODULE}")
    return f"{_MODULE}.{item!r}"


def _current_dialect() -> Dialect | None:
    """That of the ``env.py`` which runs now; ``None`` outside of one, as in ``compare_metadata()``."""
    from alembic import context

    try:
        return context.get_context().dialect
    except NameError:
        return None


# --- the plugin -----------------------------------------------------------------------------------


def amend(context: AutogenContext, proposed: UpgradeOps) -> None:
    """Take out of what autogenerate proposes what the filters above would have kept away from it."""
    assert context.dialect is not None
    unknown = _OURS - {table.name for table in context.sorted_tables}
    strange = _strange_indexes(context.sorted_tables, context.dialect)
    proposed.ops[:] = [op for op in proposed.ops if getattr(op, "table_name", None) not in unknown]
    for op in proposed.ops:
        inner = getattr(op, "ops", [])
        inner[:] = [one for one in inner if getattr(one, "index_name", None) not in strange]
    proposed.ops[:] = [op for op in proposed.ops if getattr(op, "ops", True)]
    theirs = context.opts.get("render_item") or (lambda *_: False)
    context.opts["render_item"] = lambda *item: theirs(*item) or render_item(*item)


def _strange_indexes(tables: Sequence[Table], dialect: Dialect) -> set[str]:
    ours = [index for table in tables if table in _PLACED for index in table.indexes]
    return {str(index.name) for index in ours if not models.index_fits(index, dialect)}
