"""Connections of a pool whose statements go straight to the driver: each is compiled once, and bound by hand.

SQLAlchemy's own way from `Connection.execute` to the driver costs several times what the driver takes for a
short statement. Our transactions need little of it: a few statements that are always the same, plain rows,
and its errors. So where nobody listens to an engine or logs it, they go this way, which uses only what
SQLAlchemy documents: the pool, the compiler, the types' processors, the dialect's ``do_…`` methods and
`DBAPIError`. Where somebody does, they go SQLAlchemy's, so that tracing and ``echo`` see every statement.
"""

from __future__ import annotations

import logging
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, Self
from weakref import WeakSet

from sqlalchemy import Engine, Executable
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.sql.compiler import SQLCompiler

#: errors (PEP 249) after which what the driver remembers of its statements may be of another schema
_OUTDATED: Final = {"NotSupportedError", "InternalError", "ProgrammingError"}

Process = Callable[[Any], Any]


class Answer(Protocol):
    """What the verbs want of a result: that of SQLAlchemy has it, and `Rows`."""

    @property
    def rowcount(self) -> int: ...
    @property
    def returns_rows(self) -> bool: ...
    def all(self) -> Sequence[Any]: ...
    def scalars(self) -> Iterable[Any]: ...
    def first(self) -> Any: ...
    def one(self) -> Any: ...
    def scalar(self) -> Any: ...
    def scalar_one(self) -> Any: ...
    def close(self) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...


class Rows:
    """All that a statement returned, fetched."""

    __slots__ = ("_rows", "returns_rows", "rowcount")

    def __init__(self, rows: list[Any] | None, rowcount: int) -> None:
        self.returns_rows = rows is not None
        self.rowcount = rowcount
        self._rows = rows or []

    def all(self) -> Sequence[Any]:
        return self._rows

    def scalars(self) -> Iterator[Any]:
        return (row[0] for row in self._rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def first(self) -> Any:
        return self._rows[0] if self._rows else None

    def one(self) -> Any:
        (row,) = self._rows
        return row

    def scalar(self) -> Any:
        return self._rows[0][0] if self._rows else None

    def scalar_one(self) -> Any:
        return self.one()[0]

    def close(self) -> None:
        pass


# --- statements -----------------------------------------------------------------------------------


class NotDirect(Exception):
    """A statement that only SQLAlchemy can execute; nothing has been sent of it."""


class Prepared:
    """A statement as one dialect says it: its text, how parameters are bound, what its rows are made of."""

    def __init__(self, statement: Any, dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect)
        assert isinstance(compiled, SQLCompiler)
        if compiled.prefetch:
            raise NotDirect("a column has a default that Python makes")
        self.text = compiled.string
        self._compiled = compiled
        self._dialect = dialect
        self._grows = bool(compiled.post_compile_params or compiled.literal_execute_params)
        binds = compiled.bind_names.items()
        self._defaults = {name: bind.effective_value for bind, name in binds if not bind.required}
        self._processors = [
            (name, process) for bind, name in binds if (process := _to_driver(bind.type, dialect)) is not None
        ]
        self._names = list(compiled.bind_names.values())
        self._positions = compiled.positiontup if compiled.positional else None
        copy = statement.execution_options()  # which remembers its columns, as what is made of it then would
        self._columns = [*getattr(copy, "exported_columns", ())]
        self._row: tuple[Callable[[Any], Any], list[tuple[int, Process]]] | None = None

    def bound(self, given: Mapping[str, Any]) -> tuple[str, Any]:
        """The text and the driver's parameters."""
        if self._grows:
            return self._expanded(given)
        values = {**self._defaults, **given}
        for name, process in self._processors:
            values[name] = process(values[name])
        if self._positions is not None:
            return self.text, tuple([values[name] for name in self._positions])
        return self.text, {name: values[name] for name in self._names}

    def _expanded(self, given: Mapping[str, Any]) -> tuple[str, Any]:
        state = self._compiled.construct_expanded_state(given)
        values = dict(state.parameters)
        for name, process in state.processors.items():
            if name in values:
                values[name] = process(values[name])
        if state.positiontup is not None:
            return state.statement, tuple([values[name] for name in state.positiontup])
        return state.statement, values

    def rows(self, cursor: Any) -> list[Any] | None:
        """What the cursor has, as rows of the statement; ``None`` if it returns nothing."""
        if not self._columns:
            return None
        if self._row is None:
            self._row = self._made(cursor.description)
        make, processors = self._row
        if not processors:
            return [make(row) for row in cursor.fetchall()]
        rows = [list(row) for row in cursor.fetchall()]
        for row in rows:
            for place, process in processors:
                row[place] = process(row[place])
        return [make(row) for row in rows]

    def _made(self, description: Sequence[Any]) -> tuple[Callable[[Any], Any], list[tuple[int, Process]]]:
        assert len(description) == len(self._columns), "these are not the columns of the statement"
        names = [str(column.key) for column in self._columns]
        row: Any = type("Row", (namedtuple("Row", names, rename=True), _Named), {"__slots__": ()})
        made = (
            (place, _from_driver(column.type, self._dialect, told[1]))
            for place, (column, told) in enumerate(zip(self._columns, description, strict=True))
        )
        processors = [(place, process) for place, process in made if process is not None]
        return partial(tuple.__new__, row), processors


class _Named:
    __slots__ = ()

    @property
    def _mapping(self) -> dict[str, Any]:
        return self._asdict()  # type: ignore[attr-defined,no-any-return]


def _to_driver(type_: Any, dialect: Dialect) -> Process | None:
    return type_.dialect_impl(dialect).bind_processor(dialect)  # type: ignore[no-any-return]


def _from_driver(type_: Any, dialect: Dialect, driver_type: Any) -> Process | None:
    return type_.dialect_impl(dialect).result_processor(dialect, driver_type)  # type: ignore[no-any-return]


_MOST: Final = 1000  # statements that a dialect remembers; ours are about a hundred


def _prepared(statement: Executable, dialect: Dialect) -> Prepared:
    # They hold their dialect, so that it has to hold them: a dictionary elsewhere would keep both for good.
    known: dict[Executable, Prepared] = vars(dialect).setdefault("fencedjobs_prepared", {})
    found = known.get(statement)
    if found is None:
        if len(known) >= _MOST:  # of those that are made for one call
            known.clear()
        found = known[statement] = Prepared(statement, dialect)
    return found


# --- connections ----------------------------------------------------------------------------------

_TOLD: Final[WeakSet[Engine]] = WeakSet()


def tell(engine: Engine) -> bool:
    """Have who will listen to this engine hear of statements that go straight to the driver, too.

    For listeners to begin, commit and cursors that put up with a `Direct` in place of a connection, and with
    no context. False, and nothing is changed, if somebody else listens already, or is told already.
    """
    if engine in _TOLD or not is_possible(engine):
        return False
    _TOLD.add(engine)
    return True


def tell_no_more(engine: Engine) -> None:
    """Undo `tell`."""
    _TOLD.discard(engine)


def is_possible(engine: Engine) -> bool:
    """Whether the engine's statements may go straight to the driver: nobody would miss them."""
    if engine.get_execution_options() or engine.logger.isEnabledFor(logging.INFO):
        return False
    return not _is_heard(engine) or engine in _TOLD


def _is_heard(engine: Engine) -> bool:
    """Whether somebody listens to what this engine sends; spelled out, since each transaction asks."""
    here, there = engine.dispatch, engine.dialect.dispatch
    return bool(
        here.before_cursor_execute or here.after_cursor_execute
        or here.before_execute or here.after_execute
        or here.begin or here.commit or here.rollback or here.engine_connect
        or there.do_execute or there.do_execute_no_params or there.handle_error
    )  # fmt: skip


class Direct:
    """A connection of the engine's pool, with as much of `sqlalchemy.Connection` as our transactions use."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.dialect = engine.dialect
        self.dispatch = engine.dispatch
        self.closed = False
        self._begun = False
        self._dbapi: Any = self.dialect.loaded_dbapi
        self.connection = self._from_pool()
        self.info: dict[Any, Any] = self.connection.info

    def _from_pool(self) -> PoolProxiedConnection:
        try:
            return self.engine.raw_connection()
        except self._dbapi.Error as error:
            raise self._translated(
                error, None, None, self.dialect.is_disconnect(error, None, None)
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True
        self.connection.close()

    # --- statements ---

    def execute(self, statement: Executable, given: Mapping[str, Any] | None) -> Rows:
        """Execute, and fetch all there is."""
        prepared, parameters = _prepared(statement, self.dialect), given or {}
        try:
            text, bound = prepared.bound(parameters)
        except Exception as error:
            raise self._translated(error, prepared.text, parameters, False) from error
        return self._run(text, bound, prepared.rows)

    def exec_driver_sql(self, text: str) -> None:
        """Execute a text without parameters that returns nothing."""
        self._run(text, self.dialect.execute_sequence_format(), _nothing)

    def _run(self, text: str, parameters: Any, fetch: Callable[[Any], list[Any] | None]) -> Rows:
        cursor: Any = None
        for listener in self.dispatch.before_cursor_execute:
            listener(self, cursor, text, parameters, None, False)
        try:
            cursor = self.connection.cursor()
            self.dialect.do_execute(cursor, text, parameters, None)
            for listener in self.dispatch.after_cursor_execute:
                listener(self, cursor, text, parameters, None, False)
            count = cursor.rowcount  # before the rows are fetched, for drivers that then know it no more
            return Rows(fetch(cursor), count)
        except BaseException as error:  # noqa: BLE001 - it is raised there, as what it means
            self._failed(error, text, parameters, cursor)
        finally:
            if cursor is not None:
                with suppress(Exception):  # on a connection that is gone
                    cursor.close()

    # --- transactions ---

    def begin(self) -> None:
        """Begin, as far as the driver does not do so by itself."""
        for listener in self.dispatch.begin:
            listener(self)
        self._begun = True
        self._do(self.dialect.do_begin)

    def commit(self) -> None:
        """COMMIT, by the driver."""
        for listener in self.dispatch.commit:
            listener(self)
        self._do(self.dialect.do_commit)
        self._begun = False

    def rollback(self) -> None:
        """ROLLBACK, by the driver, unless it is over."""
        if self._begun:
            self._begun = False
            self._do(self.dialect.do_rollback)

    def get_isolation_level(self) -> str:
        """As the database says it."""
        return self.dialect.get_isolation_level(self.connection.dbapi_connection)  # type: ignore[arg-type]

    def _do(self, work: Callable[[PoolProxiedConnection], None]) -> None:
        try:
            work(self.connection)
        except BaseException as error:  # noqa: BLE001 - it is raised there, as what it means
            self._failed(error, None, None, None)

    # --- errors ---

    @property
    def invalidated(self) -> bool:
        """Whether the driver's connection is gone."""
        return not self.connection.is_valid

    def invalidate(self, error: BaseException | None = None) -> None:
        """Have the pool make another connection in place of this one."""
        if not self.invalidated:
            self.connection.invalidate(error)

    def _failed(self, error: BaseException, text: str | None, parameters: Any, cursor: Any) -> NoReturn:
        """Raise what SQLAlchemy would raise."""
        if not isinstance(error, self._dbapi.Error):
            if not isinstance(error, Exception):  # it came from outside, in the middle of something
                self.invalidate(error)
            raise error
        driver = None if self.invalidated else self.connection.dbapi_connection
        lost = self.dialect.is_disconnect(error, driver, cursor)
        if lost or not _OUTDATED.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            self.invalidate(error)
        raise self._translated(error, text, parameters, lost) from error

    def _translated(self, error: Any, text: str | None, parameters: Any, lost: bool) -> BaseException:
        return DBAPIError.instance(  # type: ignore[no-any-return]
            text, parameters, error, self._dbapi.Error,
            hide_parameters=self.engine.hide_parameters, connection_invalidated=lost, dialect=self.dialect,
        )  # fmt: skip


def _nothing(cursor: Any) -> None:
    return None
