"""Sessions as applications make them: right, or refused; and a session in use is never touched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Delete, Engine, Update, create_engine, select
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fencedjobs import AsyncStore, InvalidValue, JobState, Store, TransactionLost, UnsupportedDatabase
from fencedjobs.models import Base as OurBase
from tests.databases import BACKENDS, Database
from tests.host.day import EXPECTED, day
from tests.hosts import Base, Host, Order, hosted, on, told
from tests.transactions.handlers import add, core_statements, flushed_rows

SYNC = (None,)


class Routed(Session):
    """By class, as the documentation shows it; here it is one database after all."""

    def get_bind(self, mapper: Any = None, **kwargs: Any) -> Any:
        assert self.bind is not None
        return self.bind if mapper is None or issubclass(mapper.class_, (OurBase, Base)) else None


VARIANTS: dict[str, dict[str, Any]] = {
    "expire_on_commit=False": {"expire_on_commit": False},
    "autoflush=False": {"autoflush": False},
    "autobegin=False": {"autobegin": False},
    "conditional_savepoint": {"join_transaction_mode": "conditional_savepoint"},
    "rollback_only": {"join_transaction_mode": "rollback_only"},
    "control_fully": {"join_transaction_mode": "control_fully"},
    "create_savepoint": {"join_transaction_mode": "create_savepoint"},
    "its own get_bind": {"sync_session_class": Routed},
    "info": {"info": {"host": "s own"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@on(*BACKENDS, drivers=(None, "aiosqlite", "asyncpg", "aiomysql"))
def test_the_hosts_own_sessions_get_the_same_answers(
    database: Database, driver: str | None, variant: str
) -> None:
    options = dict(VARIANTS[variant])
    if driver is None and "sync_session_class" in options:
        options["class_"] = options.pop("sync_session_class")
    expected = dict(EXPECTED)
    if not options.get("autobegin", True):  # the handler that goes on after its rollback is told so itself
        expected["rolled back"] = ("InvalidRequestError", ["a", "b"])
    with hosted(database, driver, sessions=options) as host:
        assert day(host) == expected


@pytest.fixture
def host(database: Database, driver: str | None) -> Iterator[Host]:
    with hosted(database, driver) as host:
        yield host


@on(*BACKENDS, drivers=SYNC)
def test_a_session_that_finds_its_engine_by_class_alone(host: Host) -> None:
    host.store = Store(sessionmaker(binds={Base: host.engine, OurBase: host.engine}))
    assert day(host) == EXPECTED


@on(*BACKENDS, drivers=SYNC)
def test_a_scoped_session_of_the_host_keeps_its_transaction(host: Host) -> None:
    scoped = scoped_session(sessionmaker(host.engine))
    host.store = Store(scoped)
    lease = host.leased()
    host.completing(lease, core_statements)
    scoped.add(Order(id=9, note="z"))
    if host.database.backend != "sqlite":  # has one writer at a time
        scoped.flush()
    host.store.enqueue("j")
    host.begin(lambda session: add(session, "c"))
    scoped.commit()
    assert host.notes() == ["a", "b", "c", "z"]


@on(*BACKENDS, drivers=SYNC)
def test_a_session_in_use_is_refused_and_left_alone(host: Host) -> None:
    used = Session(host.engine)
    used.add(Order(id=9, note="z"))
    used.flush()
    store = Store(lambda: used)
    verbs: list[Callable[[], object]] = [
        lambda: store.enqueue("j"), store.counts, lambda: store.begin().__enter__(),
    ]  # fmt: skip
    for verb in verbs:
        error = told(verb)
        assert isinstance(error, UnsupportedDatabase), repr(error)
        assert "in a transaction already" in str(error)
    used.commit()
    assert host.notes() == ["z"]


@on(*BACKENDS, drivers=("aiosqlite", "asyncpg", "aiomysql"))
def test_an_async_session_in_use_is_refused_and_left_alone(host: Host) -> None:
    assert host.runner is not None
    assert host.async_engine is not None
    sessions = async_sessionmaker(host.async_engine)
    scoped = async_scoped_session(sessions, scopefunc=lambda: 1)

    async def use() -> None:
        used = scoped()
        used.add(Order(id=9, note="z"))
        await used.flush()
        store = AsyncStore(lambda: used)
        for verb in (store.counts(), store.begin().__aenter__()):
            with pytest.raises(UnsupportedDatabase, match="in a transaction already"):
                await verb
        await used.commit()
        again = AsyncStore(scoped)
        await used.execute(select(Order))
        await again.enqueue("j")
        async with again.begin() as uow:
            uow.session.add(Order(id=8, note="y"))
            assert uow.session is not used
        await used.close()

    host.runner.run(use())
    assert host.notes() == ["y", "z"]


@on(*BACKENDS, drivers=SYNC)
def test_two_phase_sessions_are_refused(host: Host) -> None:
    host.store = Store(sessionmaker(host.engine, twophase=True))
    lease = host.leased()
    error = told(host.completing, lease, core_statements)
    assert isinstance(error, UnsupportedDatabase)
    assert "twophase" in str(error)
    assert (host.state(lease), host.notes()) == (JobState.LEASED, [])


@on(*BACKENDS, drivers=SYNC)
def test_sessions_on_one_connection_are_refused(host: Host) -> None:
    with host.engine.connect() as connection:
        connection.begin()
        store = Store(sessionmaker(connection))
        assert isinstance(told(store.enqueue, "j"), UnsupportedDatabase)
        assert isinstance(told(lambda: Store(connection)), InvalidValue)  # type: ignore[arg-type]
        assert connection.in_transaction()


@on(*BACKENDS, drivers=SYNC)
def test_a_session_that_writes_to_two_engines_is_refused_before_it_writes(host: Host) -> None:
    """Leader and followers, as the documentation shows it: their rows could not commit together."""
    leader = create_engine(host.database.url)
    engines: list[Engine] = [host.engine]

    class Routing(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None, **kwargs: Any) -> Any:
            writes = self._flushing or isinstance(clause, (Update, Delete))
            return leader if writes else random.choice(engines)

    lease = host.leased()
    host.store = Store(sessionmaker(class_=Routing))
    error = told(host.completing, lease, flushed_rows)
    assert isinstance(error, TransactionLost)
    assert "also uses" in str(error)
    assert (host.state(lease), host.notes()) == (JobState.LEASED, [])
    host.completing(lease, core_statements)
    assert host.notes() == ["a", "b"], "what stays on one connection is right"
    leader.dispose()


@on(*BACKENDS, drivers=SYNC)
def test_a_session_with_hooks_of_its_own(host: Host) -> None:
    """Row level security and audit trails: hooks that read and write at begin and before the commit."""
    from sqlalchemy import event, text

    sessions = sessionmaker(host.engine)
    event.listen(sessions, "after_begin", lambda session, _, connection: connection.execute(text("SELECT 1")))
    event.listen(sessions, "before_commit", lambda session: add(session, "audit"))
    host.store = Store(sessions)
    lease = host.leased()
    host.completing(lease, core_statements)
    assert (host.state(lease), host.notes()) == (JobState.DONE, ["a", "audit", "b"])


@on("mariadb", drivers=SYNC)
def test_a_hook_that_reads_before_the_level_can_be_set_is_told(host: Host) -> None:
    from sqlalchemy import event

    sessions = sessionmaker(host.engine)
    event.listen(sessions, "after_begin", lambda session, _, connection: connection.execute(select(Order)))
    host.store = Store(sessions)
    lease = host.leased()
    error = told(host.completing, lease, core_statements)
    assert isinstance(error, UnsupportedDatabase)
    assert "after_begin" in str(error)
    right = create_engine(host.database.url, isolation_level="READ COMMITTED")
    sessions.configure(bind=right)
    host.store = Store(sessions)
    host.completing(lease, core_statements)
    assert (host.state(lease), host.notes()) == (JobState.DONE, ["a", "b"])
    right.dispose()
