"""The raw limit: the least SQL that a fenced queue, a relay and an inbox can do with, by the bare driver.

No validation, no deadlines, no retries, no heartbeat: what is left is what the database and the driver
cost. Each statement is a transaction of its own (AUTOCOMMIT) where one is enough.
"""

from __future__ import annotations

import os
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import URL

from benchmarks.bases import prepare_sqlite

PAYLOAD: Final = '{"x": 1}'
READY, LEASED, DONE = 0, 2, 3
OWNER: Final = f"raw{os.getpid()}"
Row = tuple[Any, ...]


class Limit(ABC):
    """One connection, and the statements on it."""

    def __init__(self, url: URL) -> None:
        self._url = url

    # --- what each database does in its own way ---

    @abstractmethod
    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Execute one statement; how many rows it changed."""

    @abstractmethod
    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """The rows that a statement returns."""

    @abstractmethod
    def make(self) -> None:
        """Create the tables."""

    @abstractmethod
    def enqueue(self) -> None: ...

    @abstractmethod
    def enqueue_many(self, number: int) -> None: ...

    @abstractmethod
    def claim(self, limit: int) -> list[Row]:
        """Jobs as (id, fence)."""

    @abstractmethod
    def complete_many(self, jobs: Sequence[Row]) -> int: ...

    @abstractmethod
    def accept(self, id: str) -> bool:
        """Whether the message is new."""

    @abstractmethod
    def mark_many(self, ids: Sequence[int]) -> int: ...

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def commit(self) -> None: ...

    @property
    @abstractmethod
    def complete_sql(self) -> str: ...

    @property
    @abstractmethod
    def mark_sql(self) -> str: ...

    @property
    @abstractmethod
    def business_sql(self) -> str: ...

    @abstractmethod
    def close(self) -> None: ...

    # --- what is the same ---

    def clear(self) -> None:
        """Empty the tables."""
        for table in ("raw_jobs", "raw_business", "raw_outbox", "raw_inbox"):
            self.execute(self._empty.format(table))

    _empty = "TRUNCATE TABLE {}"

    def enqueue_each(self, number: int) -> None:
        for _ in range(number):
            self.enqueue()

    def fill_outbox(self, number: int) -> None:
        self.execute(self._fill_outbox.replace("NUMBER", str(number)))

    _fill_outbox = ""

    def drain(self, number: int, batch: int) -> None:
        """Claim and complete in batches."""
        while number > 0:
            jobs = self.claim(batch)
            assert jobs
            assert self.complete_many(jobs) == len(jobs)
            number -= len(jobs)

    def drain_singly(self, number: int) -> None:
        """A claim and a completion for each job."""
        for _ in range(number):
            ((id, fence),) = self.claim(1)
            assert self.execute(self.complete_sql, (id, OWNER, fence, time.time())) == 1

    def drain_with_business(self, batch: int) -> int:
        """A batch of jobs, each with a row of the application's in the transaction of its completion."""
        jobs = self.claim(batch)
        for id, fence in jobs:
            self.begin()
            self.execute(self.business_sql, (id,))
            assert self.execute(self.complete_sql, (id, OWNER, fence, time.time())) == 1
            self.commit()
        return len(jobs)

    def relay(self, send: Callable[[Any], bool], *, batch: int, each: bool) -> None:
        """Read pending events, send them, mark them: each after its acknowledgement, or all together."""
        while events := self.rows(self._pending, (batch,)):
            for event in events:
                assert send(event)
                if each:
                    now = time.time()
                    assert self.execute(self.mark_sql, (now, event[0], now)) == 1
            if not each:
                assert self.mark_many([event[0] for event in events]) == len(events)

    _pending = "SELECT id, topic, payload FROM raw_outbox WHERE sent_at IS NULL ORDER BY id LIMIT %s"

    def accept_all(self, ids: Sequence[str]) -> int:
        return sum(map(self.accept, ids))


_LANE = "EXISTS (SELECT 1 FROM raw_lanes WHERE name = 'lane' AND owner = 'me' AND fence = 7 AND until > {})"


class PostgreSQLLimit(Limit):
    """psycopg, prepared statements."""

    _fill_outbox = (
        f"INSERT INTO raw_outbox (topic, payload) SELECT 't', '{PAYLOAD}' FROM generate_series(1, NUMBER)"
    )
    complete_sql = (
        "UPDATE raw_jobs SET state = 3, owner = NULL"
        " WHERE id = %s AND owner = %s AND fence = %s AND until > %s AND state = 2"
    )
    mark_sql = (
        f"UPDATE raw_outbox SET sent_at = %s WHERE id = %s AND sent_at IS NULL AND {_LANE.format('%s')}"
    )
    business_sql = "INSERT INTO raw_business (job) VALUES (%s)"

    def __init__(self, url: URL) -> None:
        import psycopg

        super().__init__(url)
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.prepare_threshold = 0
        self._cursor = self._connection.cursor()

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        return self._cursor.execute(sql.encode(), parameters or None).rowcount

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return self._cursor.execute(sql.encode(), parameters or None).fetchall()

    def make(self) -> None:
        for statement in (
            "CREATE TABLE raw_jobs (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, queue text NOT NULL,"
            " state smallint NOT NULL DEFAULT 0, priority smallint NOT NULL DEFAULT 0, until double precision"
            " NOT NULL DEFAULT 0, owner text, fence bigint NOT NULL DEFAULT 0, attempts int NOT NULL DEFAULT 0,"
            " payload jsonb, result jsonb)",
            "CREATE INDEX raw_jobs_ready ON raw_jobs (queue, priority, id) WHERE state = 0",
            "CREATE INDEX raw_jobs_waiting ON raw_jobs (queue, until) WHERE state IN (1, 2)",
            "CREATE TABLE raw_business (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, job bigint)",
            "CREATE TABLE raw_outbox (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, topic text NOT NULL,"
            " payload jsonb NOT NULL, sent_at double precision)",
            "CREATE INDEX raw_outbox_pending ON raw_outbox (id) WHERE sent_at IS NULL",
            "CREATE TABLE raw_lanes (name text PRIMARY KEY, owner text, fence bigint, until double precision)",
            "INSERT INTO raw_lanes VALUES ('lane', 'me', 7, 4e9)",
            "CREATE TABLE raw_inbox (consumer text, message text, received_at double precision,"
            " PRIMARY KEY (consumer, message))",
        ):
            self.execute(statement)

    def enqueue(self) -> None:
        self.rows("INSERT INTO raw_jobs (queue, payload) VALUES (%s, %s) RETURNING id", ("q", PAYLOAD))

    def enqueue_many(self, number: int) -> None:
        self.rows(
            "INSERT INTO raw_jobs (queue, payload) SELECT 'q', p::jsonb FROM unnest(%s::text[]) p RETURNING id",
            ([PAYLOAD] * number,),
        )

    def claim(self, limit: int) -> list[Row]:
        now = time.time()
        jobs = self.rows(
            "UPDATE raw_jobs j SET state = 2, until = %s, owner = %s, fence = fence + 1, attempts = attempts + 1"
            " WHERE id = ANY(ARRAY(SELECT id FROM raw_jobs WHERE queue = 'q' AND state = 0"
            " ORDER BY priority, id LIMIT %s FOR UPDATE SKIP LOCKED)) RETURNING id, fence, payload, attempts",
            (now + 60, OWNER, limit),
        )
        return [job[:2] for job in jobs]

    def complete_many(self, jobs: Sequence[Row]) -> int:
        return self.execute(
            "UPDATE raw_jobs j SET state = 3, owner = NULL"
            " FROM unnest(%s::bigint[], %s::bigint[]) u(id, fence)"
            " WHERE j.id = u.id AND j.fence = u.fence AND j.owner = %s AND j.until > %s AND j.state = 2",
            ([job[0] for job in jobs], [job[1] for job in jobs], OWNER, time.time()),
        )

    def accept(self, id: str) -> bool:
        return bool(
            self.rows(
                "INSERT INTO raw_inbox VALUES ('c', %s, %s) ON CONFLICT DO NOTHING RETURNING 1",
                (id, time.time()),
            )
        )

    def mark_many(self, ids: Sequence[int]) -> int:
        now = time.time()
        return self.execute(
            f"UPDATE raw_outbox SET sent_at = %s WHERE id = ANY(%s) AND sent_at IS NULL AND {_LANE.format('%s')}",
            (now, list(ids), now),
        )

    def begin(self) -> None:
        self.execute("BEGIN")

    def commit(self) -> None:
        self.execute("COMMIT")

    def close(self) -> None:
        self._connection.close()


class MariaDBLimit(Limit):
    """PyMySQL, READ COMMITTED."""

    _fill_outbox = f"INSERT INTO raw_outbox (topic, payload) SELECT 't', '{PAYLOAD}' FROM seq_1_to_NUMBER"
    complete_sql = PostgreSQLLimit.complete_sql
    mark_sql = PostgreSQLLimit.mark_sql
    business_sql = PostgreSQLLimit.business_sql

    def __init__(self, url: URL) -> None:
        import pymysql

        super().__init__(url)
        self._connection = pymysql.connect(
            host=url.host,
            port=url.port or 3306,
            user=url.username,
            password=url.password or "",
            database=url.database,
            autocommit=True,
            ssl_disabled=True,
        )
        self._cursor = self._connection.cursor()
        self.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        return int(self._cursor.execute(sql, parameters or None))

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        self._cursor.execute(sql, parameters or None)
        return list(self._cursor.fetchall())

    def make(self) -> None:
        for statement in (
            "CREATE TABLE raw_jobs (id bigint AUTO_INCREMENT PRIMARY KEY, queue varchar(64) NOT NULL, state tinyint"
            " NOT NULL DEFAULT 0, priority smallint NOT NULL DEFAULT 0, until double NOT NULL DEFAULT 0, owner"
            " varchar(64), fence bigint NOT NULL DEFAULT 0, attempts int NOT NULL DEFAULT 0, payload json,"
            " result json, KEY ready (queue, state, priority, id), KEY waiting (queue, state, until)) ENGINE=InnoDB",
            "CREATE TABLE raw_business (id bigint AUTO_INCREMENT PRIMARY KEY, job bigint) ENGINE=InnoDB",
            "CREATE TABLE raw_outbox (id bigint AUTO_INCREMENT PRIMARY KEY, topic varchar(64) NOT NULL, payload json"
            " NOT NULL, sent_at double, KEY pending (sent_at, id)) ENGINE=InnoDB",
            "CREATE TABLE raw_lanes (name varchar(64) PRIMARY KEY, owner varchar(64), fence bigint, until double)",
            "INSERT INTO raw_lanes VALUES ('lane', 'me', 7, 4e9)",
            "CREATE TABLE raw_inbox (consumer varchar(64), message varchar(64), received_at double,"
            " PRIMARY KEY (consumer, message)) ENGINE=InnoDB",
        ):
            self.execute(statement)

    def enqueue(self) -> None:
        self.rows("INSERT INTO raw_jobs (queue, payload) VALUES (%s, %s) RETURNING id", ("q", PAYLOAD))

    def enqueue_many(self, number: int) -> None:
        self.begin()
        self._cursor.executemany(
            "INSERT INTO raw_jobs (queue, payload) VALUES (%s, %s)", [("q", PAYLOAD)] * number
        )
        self.commit()

    def claim(self, limit: int) -> list[Row]:
        now = time.time()
        self.begin()
        jobs = self.rows(
            "SELECT id, fence, payload, attempts FROM raw_jobs WHERE queue = 'q' AND state = 0"
            " ORDER BY priority, id LIMIT %s FOR UPDATE SKIP LOCKED",
            (limit,),
        )
        if jobs:
            self.execute(
                "UPDATE raw_jobs SET state = 2, until = %s, owner = %s, fence = fence + 1, attempts = attempts + 1"
                " WHERE id IN %s",
                (now + 60, OWNER, [job[0] for job in jobs]),
            )
        self.commit()
        return [(job[0], job[1] + 1) for job in jobs]

    def complete_many(self, jobs: Sequence[Row]) -> int:
        return self.execute(
            "UPDATE raw_jobs SET state = 3, owner = NULL WHERE id IN %s AND (id, fence) IN %s AND owner = %s"
            " AND until > %s AND state = 2",
            ([job[0] for job in jobs], [job[:2] for job in jobs], OWNER, time.time()),
        )

    def accept(self, id: str) -> bool:
        return self.execute("INSERT IGNORE INTO raw_inbox VALUES ('c', %s, %s)", (id, time.time())) == 1

    def mark_many(self, ids: Sequence[int]) -> int:
        now = time.time()
        return self.execute(
            f"UPDATE raw_outbox SET sent_at = %s WHERE id IN %s AND sent_at IS NULL AND {_LANE.format('%s')}",
            (now, list(ids), now),
        )

    def begin(self) -> None:
        self._connection.begin()

    def commit(self) -> None:
        self._connection.commit()

    def close(self) -> None:
        self._connection.close()


class SQLiteLimit(Limit):
    """sqlite3, WAL, synchronous=NORMAL."""

    _empty = "DELETE FROM {}"
    _fill_outbox = (
        f"INSERT INTO raw_outbox (topic, payload) WITH RECURSIVE s(g) AS (SELECT 1 UNION ALL SELECT g + 1 FROM s"
        f" LIMIT NUMBER) SELECT 't', '{PAYLOAD}' FROM s"
    )
    _pending = Limit._pending.replace("%s", "?")
    complete_sql = PostgreSQLLimit.complete_sql.replace("%s", "?")
    mark_sql = PostgreSQLLimit.mark_sql.replace("%s", "?")
    business_sql = PostgreSQLLimit.business_sql.replace("%s", "?")

    def __init__(self, url: URL) -> None:
        super().__init__(url)
        self._connection = sqlite3.connect(str(url.database), isolation_level=None, timeout=30)
        prepare_sqlite(self._connection)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        return self._connection.execute(sql, parameters).rowcount

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return self._connection.execute(sql, parameters).fetchall()

    def make(self) -> None:
        for statement in (
            "CREATE TABLE raw_jobs (id integer PRIMARY KEY, queue text NOT NULL, state integer NOT NULL DEFAULT 0,"
            " priority integer NOT NULL DEFAULT 0, until real NOT NULL DEFAULT 0, owner text, fence integer NOT"
            " NULL DEFAULT 0, attempts integer NOT NULL DEFAULT 0, payload text, result text)",
            "CREATE INDEX raw_jobs_ready ON raw_jobs (queue, priority, id) WHERE state = 0",
            "CREATE INDEX raw_jobs_waiting ON raw_jobs (queue, until) WHERE state IN (1, 2)",
            "CREATE TABLE raw_business (id integer PRIMARY KEY, job integer)",
            "CREATE TABLE raw_outbox (id integer PRIMARY KEY, topic text NOT NULL, payload text NOT NULL, sent_at real)",
            "CREATE INDEX raw_outbox_pending ON raw_outbox (id) WHERE sent_at IS NULL",
            "CREATE TABLE raw_lanes (name text PRIMARY KEY, owner text, fence integer, until real)",
            "INSERT INTO raw_lanes VALUES ('lane', 'me', 7, 4e9)",
            "CREATE TABLE raw_inbox (consumer text, message text, received_at real, PRIMARY KEY (consumer, message))",
        ):
            self.execute(statement)

    def enqueue(self) -> None:
        self.execute("INSERT INTO raw_jobs (queue, payload) VALUES (?, ?)", ("q", PAYLOAD))

    def enqueue_many(self, number: int) -> None:
        self.begin()
        self._connection.executemany(
            "INSERT INTO raw_jobs (queue, payload) VALUES (?, ?)", [("q", PAYLOAD)] * number
        )
        self.commit()

    def claim(self, limit: int) -> list[Row]:
        jobs = self.rows(
            "UPDATE raw_jobs SET state = 2, until = ?, owner = ?, fence = fence + 1, attempts = attempts + 1"
            " WHERE id IN (SELECT id FROM raw_jobs WHERE queue = 'q' AND state = 0 ORDER BY priority, id LIMIT ?)"
            " RETURNING id, fence, payload, attempts",
            (time.time() + 60, OWNER, limit),
        )
        return [job[:2] for job in jobs]

    def complete_many(self, jobs: Sequence[Row]) -> int:
        now = time.time()
        self.begin()
        done = self._connection.executemany(
            self.complete_sql, [(id, OWNER, fence, now) for id, fence in jobs]
        ).rowcount
        self.commit()
        return done

    def accept(self, id: str) -> bool:
        return (
            self.execute("INSERT INTO raw_inbox VALUES ('c', ?, ?) ON CONFLICT DO NOTHING", (id, time.time()))
            == 1
        )

    def mark_many(self, ids: Sequence[int]) -> int:
        now = time.time()
        self.begin()
        marked = self._connection.executemany(self.mark_sql, [(now, id, now) for id in ids]).rowcount
        self.commit()
        return marked

    def begin(self) -> None:
        self.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.execute("COMMIT")

    def close(self) -> None:
        self._connection.close()


LIMITS: Final[dict[str, Callable[[URL], Limit]]] = {
    "postgresql": PostgreSQLLimit,
    "mysql": MariaDBLimit,
    "sqlite": SQLiteLimit,
}


def limit_of(url: URL) -> Limit:
    """The limit on this database; it has a connection of its own."""
    return LIMITS[url.get_backend_name()](url)
