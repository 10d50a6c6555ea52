"""Tables filled in one statement: many finished rows, and some that wait."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

_NUMBERS: Final = {
    "postgresql": "SELECT generate_series(1, {count}) AS n",
    "mariadb": "SELECT seq AS n FROM seq_1_to_{count}",
    "sqlite": """WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count})
                 SELECT n FROM s""",
}
_ROWS: Final = """
    INSERT INTO fenced_jobs
        (id, queue, kind, state, owner, until, fence, created_at, finished_at, due_at, payload)
    SELECT {id}, 'default', '', '{state}', {owner}, {until}, {fence}, 0, {finished}, 0, 'null'
    FROM ({numbers}) AS numbers
"""


def fill(
    connection: Connection, backend: str, count: int, state: str, *, name: str = "", until: str = "0"
) -> None:
    """``count`` jobs in this state; their ids are ``name`` (or the state) and a number."""
    label = name or state
    id = f"'{label}' || n" if backend != "mariadb" else f"CONCAT('{label}', n)"
    leased, over = state == "leased", state == "done"
    statement = _ROWS.format(
        id=id, state=state, owner="'x'" if leased else "NULL", until=until, fence=int(leased or over),
        finished="1" if over else "NULL", numbers=_NUMBERS[backend].format(count=count),
    )  # fmt: skip
    connection.execute(text(statement))


def analyze(connection: Connection, backend: str) -> None:
    connection.execute(text("ANALYZE TABLE fenced_jobs" if backend == "mariadb" else "ANALYZE fenced_jobs"))
