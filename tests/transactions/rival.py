"""Somebody else on the same rows, in a thread of their own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, delete, insert, select
from sqlalchemy.orm import Session

from tests.hosts import Order


def locking(row: str, **options: Any) -> Any:
    return select(Order.id).where(Order.note == row).with_for_update(**options)


class Rival:
    """Holds ``row 2``, and on request reaches for ``row 1``."""

    def __init__(self, connection: Connection, thread: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._thread = thread

    def holds_row_2(self) -> None:
        rows = [{"id": 1000 + n, "note": f"rival {n}"} for n in range(50)]
        self._connection.execute(insert(Order), rows)
        self._connection.execute(locking("row 2"))

    def deadlock(self, other: Session | Connection) -> None:
        """Raise the database's own deadlock error in the other's transaction."""
        other.execute(locking("row 1"))
        # Whoever closes the circle, the database gives up the one that has written less: the other.
        reaching = self._thread.submit(lambda: self._connection.execute(locking("row 1")).all())
        try:
            other.execute(locking("row 2"))
        finally:
            reaching.result(timeout=20)
            self._connection.rollback()


@contextmanager
def rival(engine: Engine) -> Iterator[Rival]:
    """A rival who has begun; ``engine`` commits each statement."""
    with engine.connect() as connection:
        connection.execute(insert(Order), [{"id": n, "note": f"row {n}"} for n in (1, 2)])
    own = engine.execution_options(isolation_level="READ COMMITTED")
    with own.connect() as connection, ThreadPoolExecutor(1) as thread:
        one = Rival(connection, thread)
        one.holds_row_2()
        yield one
        connection.rollback()
    with engine.connect() as connection:
        connection.execute(delete(Order).where(Order.note.in_(["row 1", "row 2"])))
