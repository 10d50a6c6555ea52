"""An engine whose n-th operation fails: refused by the server, or cut off before it or after it.

The operations are the statements and the commits. The errors are the driver's own: a refusal is a statement
that no server takes, and what is cut off is told by the driver that finds its connection closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Final

from sqlalchemy import Engine

from fencedjobs.line import apart

COMMIT: Final = "COMMIT"
Call = Callable[[], Any]

_NONSENSE: Final = "FAIL AS ASKED FOR"


class Way(Enum):
    """How an operation fails."""

    REFUSED = "the server says no"
    BEFORE = "the line is cut before it"
    AFTER = "the line is cut after it, and the answer is lost"


class Failing:
    """An engine of its own beside the given one, which counts its operations and fails one of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = apart(engine)
        self.operations: list[str] = []  #: since the last `at`, in their order
        self._wanted: tuple[int, Way] | None = None
        self.hit: str | None = None  #: the operation that failed
        dialect = self.engine.dialect
        for name in ("do_execute", "do_executemany"):
            setattr(dialect, name, self._executing(getattr(dialect, name)))
        dialect.do_execute_no_params = self._executing(dialect.do_execute_no_params)  # type: ignore[method-assign]
        for name in ("do_close", "do_terminate"):
            setattr(dialect, name, _quietly(getattr(dialect, name)))
        dialect.do_commit = self._committing(dialect.do_commit)  # type: ignore[method-assign]

    @contextmanager
    def at(self, number: int | None, way: Way = Way.REFUSED) -> Iterator[None]:
        """Within: fail operation ``number``, counted from 0, and no other; ``None``: only count."""
        self.operations, self.hit = [], None
        self._wanted = None if number is None else (number, way)
        try:
            yield
        finally:
            self._wanted = None

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()

    def _executing(self, sound: Callable[..., Any]) -> Callable[..., Any]:
        def execute(cursor: Any, statement: str, *rest: Any, **more: Any) -> Any:
            def answered() -> None:
                sound(cursor, statement, *rest, **more)
                if cursor.description:
                    cursor.fetchall()  # a file stays open as long as an answer waits to be read

            return self._do(
                statement,
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
        self.operations.append(operation)
        if self._wanted is None or len(self.operations) - 1 != self._wanted[0]:
            return sound()
        way, self.hit = self._wanted[1], operation
        if way is Way.REFUSED:
            refuse()
            raise AssertionError(f"the server took {_NONSENSE!r}")
        if way is Way.AFTER:
            answered()
        driver.rollback()  # as a server does for a client that is gone
        driver.close()
        sound()  # says in the driver's own words that the connection is gone
        raise AssertionError(f"the driver worked on a closed connection: {operation}")


def _quietly(close: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Some drivers refuse to close what is closed."""

    def closing(connection: Any) -> None:
        with suppress(Exception):
            close(connection)

    return closing
