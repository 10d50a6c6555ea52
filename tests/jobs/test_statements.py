"""How many statements and round trips a verb takes, and what no statement may say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from fencedjobs import InvalidValue, JobLease, Retry, Store, direct, service
from tests.databases import Database
from tests.jobs.helpers import T, on


@dataclass
class Seen:
    """What was sent through an engine."""

    statements: list[str] = field(default_factory=list)
    transactions: int = 0

    def words(self) -> list[str]:
        """Each statement by its first word, without those that only begin and end the transaction."""
        firsts = [statement.split()[0] for statement in self.statements]
        return [first for first in firsts if first not in ("BEGIN", "COMMIT", "ROLLBACK", "SET")]


@contextmanager
def watched(engine: Engine) -> Iterator[Seen]:
    seen = Seen()

    def executed(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        seen.statements.append(statement)

    def begun(connection: Any) -> None:
        seen.transactions += 1

    event.listen(engine, "before_cursor_execute", executed)
    event.listen(engine, "begin", begun)
    yield seen
    event.remove(engine, "before_cursor_execute", executed)
    event.remove(engine, "begin", begun)


#: what each verb sends, beside BEGIN and COMMIT, on a connection that was used a moment ago
EXPECTED: dict[str, dict[str, list[str]]] = {
    "postgresql": {
        "enqueue": ["INSERT"],
        "enqueue an id that exists": ["INSERT", "INSERT", "DELETE"],
        "claim": ["UPDATE"],
        "claim by id": ["UPDATE"],
        "claim of nothing": ["UPDATE", "UPDATE", "UPDATE", "SELECT"],
        "renew": ["UPDATE"],
        "complete": ["UPDATE"],
        "release": ["UPDATE"],
        "fail": ["SELECT", "UPDATE"],
        "checkpoint": ["UPDATE"],
        "set aside": ["UPDATE"],
        "claim 100": ["UPDATE"],
        "renew 100": ["UPDATE"],
        "complete 100": ["UPDATE"],
        "complete 100 with results": ["UPDATE"],
        "enqueue 1000": ["INSERT"],
        "get": ["SELECT"],
        "lock": ["UPDATE"],
    },
    "mariadb": {
        "enqueue": ["SELECT", "INSERT"],
        "enqueue an id that exists": ["SELECT"],
        "claim": ["SELECT", "UPDATE"],
        "claim by id": ["SELECT", "UPDATE"],
        "claim of nothing": ["SELECT", "SELECT", "SELECT", "SELECT", "SELECT"],
        "renew": ["UPDATE", "SELECT"],
        "complete": ["UPDATE"],
        "release": ["UPDATE"],
        "fail": ["SELECT", "UPDATE"],
        "checkpoint": ["UPDATE"],
        "set aside": ["UPDATE"],
        "claim 100": ["SELECT", "UPDATE"],
        "renew 100": ["UPDATE", "SELECT"],
        "complete 100": ["UPDATE"],
        "complete 100 with results": ["UPDATE"],
        "enqueue 1000": ["INSERT"],
        "get": ["SELECT"],
        "lock": ["SELECT", "UPDATE"],
    },
    "sqlite": {
        "enqueue": ["INSERT"],
        "enqueue an id that exists": ["INSERT", "INSERT", "DELETE"],
        "claim": ["UPDATE"],
        "claim by id": ["UPDATE"],
        "claim of nothing": ["UPDATE", "UPDATE", "UPDATE"],
        "renew": ["UPDATE"],
        "complete": ["UPDATE"],
        "release": ["UPDATE"],
        "fail": ["SELECT", "UPDATE"],
        "checkpoint": ["UPDATE"],
        "set aside": ["UPDATE"],
        "claim 100": ["UPDATE"],
        "renew 100": ["UPDATE"],
        "complete 100": ["UPDATE"],
        "complete 100 with results": ["UPDATE"],
        "enqueue 1000": ["INSERT"],
        "get": ["SELECT"],
        "lock": ["UPDATE"],
    },
}


def all_verbs(store: Store) -> dict[str, Callable[[], Any]]:
    """One call of each verb, in an order in which each has something to do."""
    held: dict[str, Any] = {}

    def keep(name: str, answer: Any) -> Any:
        held[name] = answer
        return answer

    def lease(name: str = "lease") -> JobLease:
        found: JobLease = held[name]
        return found

    def half() -> list[JobLease]:
        return list(held["many"][1::2])

    store.locks.claim("l", "w", ttl=1, now=T)
    return {
        "claim of nothing": lambda: store.claim("w", ttl=9, now=T),
        "enqueue": lambda: store.enqueue("j", now=T),
        "enqueue an id that exists": lambda: store.enqueue("j", now=T),
        "claim": lambda: keep("lease", store.claim("w", ttl=9, now=T)),
        "renew": lambda: store.renew(lease(), ttl=9, now=T),
        "release": lambda: store.release(lease(), now=T),
        "claim by id": lambda: keep("lease", store.claim("w", ttl=9, id="j", now=T)),
        "complete": lambda: store.complete(lease(), now=T),
        "get": lambda: store.get("j"),
        "enqueue 1000": lambda: store.enqueue_many([{"payload": n} for n in range(1000)], now=T),
        "claim 100": lambda: keep("many", store.claim_many("w", ttl=9, limit=100, now=T)),
        "renew 100": lambda: store.renew_many(held["many"], ttl=9, now=T),
        "fail": lambda: store.fail(held["many"].pop(), "x", retry=Retry(base=0), now=T),
        "checkpoint": lambda: store.checkpoint(held["many"][-1], {"page": 1}, now=T),
        "set aside": lambda: store.set_aside(held["many"].pop(), "odd", now=T),
        "complete 100": lambda: store.complete_many(held["many"][::2], now=T),
        "complete 100 with results": lambda: store.complete_many(half(), [{"n": 1}] * len(half()), now=T),
        "lock": lambda: store.locks.claim("l", "w", ttl=1, now=T + 1),
    }


@pytest.mark.parametrize("straight", [True, False])
def test_each_verb_is_one_transaction_of_as_few_statements_as_it_needs(
    engine: Engine, straight: bool, request: pytest.FixtureRequest
) -> None:
    """Straight to the driver as by SQLAlchemy."""
    if straight:
        assert direct.tell(engine)
        request.addfinalizer(lambda: direct.tell_no_more(engine))
    store = Store(engine)
    backend = engine.dialect.name.replace("mysql", "mariadb")
    seen: dict[str, list[str]] = {}
    for name, verb in all_verbs(store).items():
        with watched(engine) as sent:
            answer = verb()
        twice = backend != "mariadb" and name in ("claim of nothing", "enqueue an id that exists")
        assert sent.transactions == 1 + twice, f"{name}: {sent}"
        assert name == "claim of nothing" or answer is not False, name
        seen[name] = sent.words()
    assert seen == EXPECTED[backend]


@on("sqlite")
def test_what_writes_on_sqlite_begins_immediate(engine: Engine) -> None:
    """FAULTS 68: a deferred transaction that reads and then writes is BUSY at once."""
    store = Store(engine)
    for name, verb in all_verbs(store).items():
        with watched(engine) as sent:
            verb()
        begins = {"BEGIN" if name == "get" else "BEGIN IMMEDIATE"}
        alone = len(sent.statements) == 1  # it takes its turn by itself
        assert alone or {each for each in sent.statements if each.startswith("BEGIN")} == begins, name
    with watched(engine) as sent, store.begin() as uow:
        uow.jobs.counts()
    assert sent.statements[0] == "BEGIN IMMEDIATE"


#: round trips to MariaDB: three around each transaction (its isolation level, its end, the pool's reset)
TRIPS = {
    "enqueue": 5, "enqueue an id that exists": 4, "claim": 5, "claim by id": 5, "claim of nothing": 8,
    "renew": 5, "complete": 4, "release": 4, "fail": 5, "claim 100": 5, "renew 100": 5, "complete 100": 4,
    "complete 100 with results": 4, "checkpoint": 4, "set aside": 4,
    "enqueue 1000": 5, "get": 4, "lock": 5,
}  # fmt: skip


@on("mariadb")
def test_round_trips_do_not_grow(database: Database) -> None:
    """An executemany is one statement to SQLAlchemy, but was a thousand to the server."""
    engine = database.engine(pool_size=1, max_overflow=0)
    store = Store(engine)

    def asked() -> int:
        with engine.connect() as connection:
            answer = connection.execute(text("SHOW SESSION STATUS LIKE 'Questions'")).one()
            return int(answer[1])

    verbs = all_verbs(store)
    itself = -asked() + asked()
    trips = {}
    for name, verb in verbs.items():
        before = asked()
        verb()
        trips[name] = asked() - before - itself
    engine.dispose()
    more = {name: f"{trips[name]}, expected {TRIPS[name]}" for name in TRIPS if trips[name] > TRIPS[name]}
    assert not more


def test_no_statement_hides_an_error(engine: Engine) -> None:
    """FAULTS 66: INSERT IGNORE stores a cut key and says that all is well."""
    store = Store(engine)
    with watched(engine) as sent:
        for verb in all_verbs(store).values():
            verb()
        store.enqueue_many([{"id": "j"}, {"id": "k"}], now=T)
        service.init_db(engine)
        service.enqueue(engine, "s")
        service.enqueue(engine, "s")
    hiding = [
        statement for statement in sent.statements if re.search(r"\bIGNORE\b|\bREPLACE\b", statement, re.I)
    ]
    assert hiding == []
    for verb in (
        lambda: store.enqueue("x" * 256, now=T),
        lambda: service.enqueue(engine, "x" * 256),
        lambda: store.locks.claim("x" * 256, "w", ttl=1, now=T),
    ):
        with pytest.raises(InvalidValue):
            verb()
    service._Base.metadata.drop_all(engine)


def test_every_value_is_a_parameter(engine: Engine) -> None:
    """No id, owner or payload stands in the text of a statement."""
    store = Store(engine)
    with watched(engine) as sent:
        store.enqueue("id';--", {"payload": "';--"}, queue="queue';--", kind="kind';--", now=T)
        lease = store.claim("owner';--", ttl=9, queue="queue';--", now=T)
        assert lease is not None
        store.fail(lease, "error';--", now=T)
        store.quarantine("id';--", "reason';--", now=T)
        store.requeue("id';--", by="by';--", reason="reason';--", now=T)
        store.locks.claim("lock';--", "owner';--", ttl=9, now=T)
    assert [statement for statement in sent.statements if "';--" in statement] == []
    assert store.get("id';--") is not None
