"""An error of COMMIT that is the database's own answer: nothing was committed, and nothing is unknown."""

from __future__ import annotations

from sqlalchemy.orm import Session

from fencedjobs import Outcome
from tests.databases import ASYNC_DRIVERS
from tests.hosts import MORE_DRIVERS, on, told
from tests.outcome.line import Line
from tests.transactions.handlers import add


@on("postgresql", drivers=(None, *ASYNC_DRIVERS, *MORE_DRIVERS))
def test_a_refusal_of_the_database_is_no_unknown_outcome(line: Line) -> None:
    """A constraint that is checked at COMMIT."""
    with line.host.observer.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE deferred (id INT UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    lease = line.host.leased()

    def handler(session: Session) -> None:
        add(session, "a")
        session.connection().exec_driver_sql("INSERT INTO deferred VALUES (1), (1)")

    error = told(line.host.completing, lease, handler)
    assert type(error).__name__ == "IntegrityError"
    assert (line.direct.outcome(lease), line.host.notes()) == (Outcome.HELD, [])
