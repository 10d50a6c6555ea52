"""The caller's transaction is the caller's: joined or refused, never begun anew, committed or rolled back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from fencedjobs import JobState, LeaseLost, Store, UnitOfWork, UnsupportedDatabase
from tests.databases import ASYNC_DRIVERS, BACKENDS, Database
from tests.host.engines import MADE
from tests.hosts import Host, Order, hosted, on, told
from tests.transactions.handlers import add

EVERYWHERE = on(*BACKENDS, drivers=(None, *ASYNC_DRIVERS))


@pytest.fixture
def host(database: Database, driver: str | None) -> Iterator[Host]:
    with hosted(database, driver) as host:
        yield host


def in_session(host: Host, work: Callable[[Session], object]) -> BaseException | None:
    """Work on a session of the host's, which the host closes without a commit."""

    def run() -> None:
        with host.sessions()() as session:
            work(session)

    return told(host.run, run)


@EVERYWHERE
def test_what_it_writes_is_there_when_the_host_commits_and_not_before(host: Host) -> None:
    """FAULTS 55."""
    lease = host.leased()
    seen: list[object] = []

    def work(session: Session) -> None:
        uow = UnitOfWork(session)
        add(session, "a")
        uow.jobs.enqueue("j")
        uow.jobs.complete(lease)
        with host.observer.connect() as connection:
            seen.append(connection.scalar(text("SELECT count(*) FROM fenced_jobs WHERE id = 'j'")))
        session.commit()

    assert in_session(host, work) is None
    assert seen == [0]
    assert (host.state(lease), host.notes()) == (JobState.DONE, ["a"])
    assert host.store.claim("w", ttl=60, id="j") is not None


@EVERYWHERE
def test_what_it_writes_is_gone_when_the_host_rolls_back(host: Host) -> None:
    lease = host.leased()

    def work(session: Session) -> None:
        uow = UnitOfWork(session)
        add(session, "a")
        uow.jobs.enqueue("j")
        uow.jobs.complete(lease)
        session.rollback()
        uow.jobs.enqueue("k")  # the next transaction of the session
        session.commit()

    assert in_session(host, work) is None
    assert (host.state(lease), host.notes(), host.store.get("j")) == (JobState.LEASED, [], None)
    assert host.store.get("k") is not None


@EVERYWHERE
def test_a_savepoint_rolled_back_takes_the_job_with_it(host: Host) -> None:
    def work(session: Session) -> None:
        uow = UnitOfWork(session)
        uow.jobs.enqueue("kept")
        nested = session.begin_nested()
        uow.jobs.enqueue("lost")
        nested.rollback()
        with session.begin_nested():
            UnitOfWork(session).jobs.enqueue("kept, too")
        session.commit()

    assert in_session(host, work) is None
    jobs = [host.store.get(id) is not None for id in ("kept", "lost", "kept, too")]
    assert jobs == [True, False, True]


@EVERYWHERE
def test_a_savepoint_released_does_not_survive_the_rollback(host: Host) -> None:
    """FAULTS 70: with SQLite's driver as it is, the outermost savepoint's release was a commit."""

    def work(session: Session) -> None:
        uow = UnitOfWork(session)
        with session.begin_nested():
            uow.jobs.enqueue("j")
            add(session, "a")
        session.rollback()

    assert in_session(host, work) is None
    assert (host.store.get("j"), host.notes()) == (None, [])


@on("sqlite")
def test_a_savepoint_that_may_be_the_outermost_is_refused(host: Host) -> None:
    def first_thing(session: Session) -> None:
        with session.begin_nested():
            UnitOfWork(session).jobs.enqueue("j")

    error = in_session(host, first_thing)
    assert isinstance(error, UnsupportedDatabase)
    assert "begin_nested()" in str(error)

    def in_a_test_suite(session: Session) -> None:
        """The recipe for tests: everything in one transaction that is rolled back."""
        session.close()
        with host.engine.connect() as connection:
            connection.begin()
            with Session(connection, join_transaction_mode="create_savepoint") as joined:
                UnitOfWork(joined).jobs.enqueue("j")

    assert isinstance(in_session(host, in_a_test_suite), UnsupportedDatabase)
    assert host.store.get("j") is None


@pytest.mark.parametrize("name", ["BEGIN by an event", "BEGIN IMMEDIATE by an event"])
@on("sqlite")
def test_where_the_engine_begins_a_savepoint_is_right(
    database: Database, driver: str | None, name: str
) -> None:
    made = next(made for made in MADE["sqlite"] if made.name == name)
    with hosted(database, driver, adapt=made.adapt, **made.options) as host:

        def work(session: Session) -> None:
            with session.begin_nested():
                UnitOfWork(session).jobs.enqueue("j")
            session.rollback()
            with session.begin_nested():
                UnitOfWork(session).jobs.enqueue("k")
            session.commit()

        assert in_session(host, work) is None
        assert (host.store.get("j"), host.store.get("k") is not None) == (None, True)


@EVERYWHERE
def test_an_autocommit_session_is_refused_and_nothing_is_written(host: Host) -> None:
    def asked_of_the_connection(session: Session) -> None:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        UnitOfWork(session).jobs.enqueue("j")

    def asked_of_the_engine(session: Session) -> None:
        session.bind = host.engine.execution_options(isolation_level="AUTOCOMMIT")
        UnitOfWork(session).jobs.enqueue("j")

    def in_a_savepoint(session: Session) -> None:
        session.bind = host.engine.execution_options(isolation_level="AUTOCOMMIT")
        session.begin_nested()
        UnitOfWork(session).jobs.enqueue("j")

    for work in (asked_of_the_connection, asked_of_the_engine):
        assert isinstance(in_session(host, work), UnsupportedDatabase)
    if host.database.backend == "sqlite":  # the others give no savepoint there
        assert isinstance(in_session(host, in_a_savepoint), UnsupportedDatabase)
    assert host.store.get("j") is None


@on(*BACKENDS, drivers=(None, "asyncpg", "aiomysql", "aiosqlite"))
def test_an_autocommit_engine_is_refused_however_it_came_about(
    database: Database, driver: str | None
) -> None:
    for made in MADE[database.backend]:
        if "autocommit" not in made.name.lower() or made.name.startswith("execution_options"):
            continue
        with hosted(database, driver, adapt=made.adapt, **made.options) as host:
            error = in_session(host, lambda session: UnitOfWork(session).jobs.enqueue("j"))
            assert isinstance(error, UnsupportedDatabase), f"{made.name}: {error!r}"
            assert "AUTOCOMMIT" in str(error)
            with host.observer.connect() as connection:
                assert connection.scalar(text("SELECT count(*) FROM fenced_jobs")) == 0


@EVERYWHERE
def test_it_never_commits_or_rolls_back(host: Host) -> None:
    leases = [host.leased() for _ in range(4)]
    ended: list[str] = []
    for name in ("commit", "rollback"):
        event.listen(host.engine, name, lambda *_, name=name: ended.append(name))

    def work(session: Session) -> None:
        uow = UnitOfWork(session)
        uow.jobs.enqueue("j")
        uow.jobs.enqueue("j")
        uow.jobs.enqueue_many([{"id": "j"}, {"id": "k"}])
        uow.jobs.complete(leases[0])
        uow.jobs.fail(leases[1], "why")
        uow.jobs.release(leases[2])
        uow.jobs.cancel(leases[3].id)
        assert isinstance(told(uow.jobs.complete, leases[0]), LeaseLost)
        assert uow.jobs.counts()
        assert ended == []
        session.commit()

    assert in_session(host, work) is None
    assert ended[:1] == ["commit"]


@EVERYWHERE
def test_a_lost_lease_leaves_the_hosts_transaction_to_the_host(host: Host) -> None:
    lease = host.leased()
    host.store.release(lease)

    def work(session: Session) -> None:
        add(session, "a")
        assert isinstance(told(UnitOfWork(session).jobs.complete, lease), LeaseLost)
        session.commit()

    assert in_session(host, work) is None
    assert host.notes() == ["a"]


STRICT = {"postgresql": ["REPEATABLE READ", "SERIALIZABLE"], "mariadb": ["REPEATABLE READ"]}


@on("postgresql", "mariadb")
def test_under_a_stricter_level_the_databases_own_error_comes_out(
    database: Database, driver: str | None
) -> None:
    direct = Store(database.engine())
    for level in STRICT[database.backend]:
        with hosted(database, driver, isolation_level=level) as host:
            lease = host.leased()

            def work(session: Session, lease: Any = lease) -> None:
                if database.backend == "mariadb":  # the default of newer servers
                    session.execute(text("SET innodb_snapshot_isolation = ON"))
                session.execute(select(Order)).all()
                session.execute(text("SELECT count(*) FROM fenced_jobs")).all()
                direct.renew(lease, ttl=900)
                add(session, "a")
                try:
                    UnitOfWork(session).jobs.complete(lease)
                finally:
                    assert session.in_transaction(), "it is the host's to roll back"

            error = in_session(host, work)
            assert isinstance(error, DBAPIError), f"{level}: {error!r}"
            codes = {getattr(error.orig, "sqlstate", None), *getattr(error.orig, "args", ())}
            assert codes & {"40001", 1020}, repr(error)
            assert (host.state(lease), host.notes()) == (JobState.LEASED, [])
    direct.transactions.engine.dispose()


@on("sqlite", drivers=(None,))
def test_the_hosts_own_lock_wait_comes_out_as_busy(database: Database, driver: str | None) -> None:
    with hosted(database, connect_args={"timeout": 0}) as host, host.observer.connect() as writer:
        writer.exec_driver_sql("BEGIN IMMEDIATE")
        error = in_session(host, lambda session: UnitOfWork(session).jobs.enqueue("j"))
        writer.exec_driver_sql("ROLLBACK")
        assert isinstance(error, OperationalError)
        assert "locked" in str(error)
        sessions = sessionmaker(host.engine)
        with sessions() as session:
            UnitOfWork(session).jobs.enqueue("j")
            session.commit()
        assert host.store.get("j") is not None
