"""An engine whose n-th operation fails: refused by the server, or cut off before it or after it.

The operations are the statements and the commits. The errors are the driver's own: a refusal is a statement
that no server takes, and what is cut off is told by the driver that finds its connection closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import Engine

from fencedjobs.line import apart

COMMIT: Final = "COMMIT"
ALONE: Final = "AUTOCOMMIT: "  #: before a statement that is its own COMMIT
Call = Callable[[], Any]

_NONSENSE: Final = "FAIL AS ASKED FOR"


W = TypeVar("W")


class Way(Enum):
    """How an operation fails."""

    REFUSED = "the server says no"
    BEFORE = "the line is cut before it"
    AFTER = "the line is cut after it, and the answer is lost"


class Counting(Generic[W]):
    """An engine whose operations are counted, so that something is done at one of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.operations: list[str] = []  #: since the counting began, in their order
        self.hit: str | None = None  #: the operation at which it was done
        self._wanted: tuple[int, W] | None = None

    @contextmanager
    def doing(self, number: int | None, what: W) -> Iterator[None]:
        """Within: do this at operation ``number``, counted from 0, and at no other; ``None``: only count."""
        self.operations, self.hit = [], None
        self._wanted = None if number is None else (number, what)
        try:
            yield
        finally:
            self._wanted = None

    def come(self, operation: str) -> W | None:
        """Count an operation; what is to be done at it."""
        self.operations.append(operation)
        if self._wanted is None or len(self.operations) - 1 != self._wanted[0]:
            return None
        self.hit = operation
        return self._wanted[1]

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()


class Failing(Counting[Way]):
    """An engine of its own beside the given one, which counts its operations and fails one of them."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(apart(engine))
        dialect = self.engine.dialect
        for name in ("do_execute", "do_executemany"):
            setattr(dialect, name, self._executing(getattr(dialect, name)))
        dialect.do_execute_no_params = self._executing(dialect.do_execute_no_params)  # type: ignore[method-assign]
        for name in ("do_close", "do_terminate"):
            setattr(dialect, name, _quietly(getattr(dialect, name)))
        dialect.do_commit = self._committing(dialect.do_commit)  # type: ignore[method-assign]

    def at(self, number: int | None, way: Way = Way.REFUSED) -> AbstractContextManager[None]:
        """Within: fail operation ``number``, counted from 0, and no other; ``None``: only count."""
        return self.doing(number, way)

    def _executing(self, sound: Callable[..., Any]) -> Callable[..., Any]:
        def execute(cursor: Any, statement: str, *rest: Any, **more: Any) -> Any:
            def answered() -> None:
                sound(cursor, statement, *rest, **more)
                if cursor.description:
                    cursor.fetchall()  # a file stays open as long as an answer waits to be read

            return self._do(
                _told(cursor.connection, statement),
                lambda: sound(cursor, statement, *rest, **more),
                answered,
                lambda: cursor.execute(_NONSENSE),
                cursor.connection,
            )

        return execute

    def _committing(self, sound: Callable[..., Any]) -> Callable[..., Any]:
        def commit(connection: Any) -> Any:
            driver = getattr(connection, "dbapi_connection", connection)
            if not getattr(driver, "in_transaction", True):  # it was sent as a statement
                return sound(connection)
            whole: Call = lambda: sound(connection)  # noqa: E731
            return self._do(COMMIT, whole, whole, lambda: driver.cursor().execute(_NONSENSE), driver)

        return commit

    def _do(self, operation: str, sound: Call, answered: Call, refuse: Call, driver: Any) -> Any:
        way = self.come(operation)
        if way is None:
            return sound()
        if way is Way.REFUSED:
            refuse()
            raise AssertionError(f"the server took {_NONSENSE!r}")
        if way is Way.AFTER:
            answered()
        driver.rollback()  # as a server does for a client that is gone
        driver.close()
        sound()  # says in the driver's own words that the connection is gone
        raise AssertionError(f"the driver worked on a closed connection: {operation}")


def _told(driver: Any, statement: str) -> str:
    alone = getattr(driver, "autocommit", None) is True and not statement.lstrip().startswith("SELECT")
    return ALONE + statement if alone else statement


def _quietly(close: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Some drivers refuse to close what is closed."""

    def closing(connection: Any) -> None:
        with suppress(Exception):
            close(connection)

    return closing
