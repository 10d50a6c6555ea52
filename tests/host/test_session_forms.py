"""The host's session as people make it: the same day's work in each form, in the caller's transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fencedjobs import AsyncUnitOfWork, JobLease, JobState, LeaseLost, Store, UnitOfWork, schema
from tests.conftest import absent
from tests.databases import BACKENDS, Database, empty_database
from tests.forms import Blocking
from tests.host.engines import MADE
from tests.hosts import Base, Host, Order, hosted, on, told
from tests.servers import POSTGRESQL, Missing, start_postgresql

#: what a form gives: the session, and the unit of work on it; a context manager for one transaction
Opened = tuple[Any, Any]
Form = Callable[[Host], AbstractContextManager[Opened]]


@contextmanager
def _used(session: Any) -> Iterator[Opened]:
    with session:
        yield session, UnitOfWork(session)


def plain(host: Host) -> AbstractContextManager[Opened]:
    return _used(Session(host.engine))


def _made(**options: Any) -> Form:
    return lambda host: _used(sessionmaker(host.engine, **options)())


@contextmanager
def _scoped(host: Host) -> Iterator[Opened]:
    scoped = scoped_session(sessionmaker(host.engine))
    yield scoped, UnitOfWork(scoped)
    scoped.remove()


@contextmanager
def _begun(host: Host) -> Iterator[Opened]:
    with Session(host.engine, autobegin=False) as session:
        session.begin()
        yield session, UnitOfWork(session)


@contextmanager
def _nested(host: Host) -> Iterator[Opened]:
    """All of the work inside of two savepoints, which end before the transaction does."""
    with Session(host.engine) as session:
        uow = UnitOfWork(session)
        inner = [session.begin_nested(), session.begin_nested()]

        class Outer:
            def __getattr__(self, name: str) -> Any:
                return getattr(session, name)

            def commit(self) -> None:
                while inner:
                    inner.pop().commit()
                session.commit()

        yield Outer(), uow


def _joining(mode: Any) -> Form:
    @contextmanager
    def joined(host: Host) -> Iterator[Opened]:
        """A session on a connection that is in a transaction already, which goes the same way."""
        with host.engine.connect() as connection:
            outer = connection.begin()
            with Session(connection, join_transaction_mode=mode) as session:
                yield session, UnitOfWork(session)
            if outer.is_active:
                outer.commit()

    return joined


@contextmanager
def _flask(host: Host) -> Iterator[Opened]:
    flask = pytest.importorskip("flask")
    extension = pytest.importorskip("flask_sqlalchemy")
    app = flask.Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = host.engine.url
    db = extension.SQLAlchemy(app)
    with app.app_context():
        assert Store(db.session).counts() is not None, "a store takes it too"
        yield db.session, UnitOfWork(db.session)
        db.session.remove()
        db.engine.dispose()


def _sqlmodel(host: Host) -> AbstractContextManager[Opened]:
    return _used(pytest.importorskip("sqlmodel").Session(host.engine))


@contextmanager
def asynchronous(host: Host) -> Iterator[Opened]:
    assert host.runner is not None
    assert host.async_engine is not None
    session: AsyncSession = async_sessionmaker(host.async_engine)()
    with Blocking(session, host.runner) as blocking:
        yield blocking, Blocking(AsyncUnitOfWork(session), host.runner)


@contextmanager
def _async_scoped(host: Host) -> Iterator[Opened]:
    assert host.runner is not None
    assert host.async_engine is not None
    scoped = async_scoped_session(async_sessionmaker(host.async_engine), scopefunc=lambda: 1)
    yield Blocking(scoped, host.runner), Blocking(AsyncUnitOfWork(scoped), host.runner)
    host.runner.run(scoped.remove())


SYNC: dict[str, Form] = {
    "Session": plain,
    "sessionmaker": _made(),
    "expire_on_commit=False": _made(expire_on_commit=False),
    "scoped_session": _scoped,
    "autobegin=False": _begun,
    "nested savepoints": _nested,
    "conditional_savepoint": _joining("conditional_savepoint"),
    "rollback_only": _joining("rollback_only"),
    "control_fully": _joining("control_fully"),
    "create_savepoint": _joining("create_savepoint"),
    "Flask-SQLAlchemy": _flask,
    "SQLModel": _sqlmodel,
}

ASYNC: dict[str, Form] = {"AsyncSession": asynchronous, "async_scoped_session": _async_scoped}

# --- the day --------------------------------------------------------------------------------------


def order(session: Any, uow: Any) -> None:
    session.add(Order(id=1, note="ordered"))
    uow.jobs.enqueue("order-1", {"qty": 7})
    uow.outbox.add("order-1", {"qty": 7}, topic="warehouse")


def packing(lease: JobLease) -> Callable[[Any, Any], None]:
    def pack(session: Any, uow: Any) -> None:
        session.add(Order(id=2, note="packed"))
        uow.jobs.complete(lease, {"ok": 1})

    return pack


def seen(host: Host) -> tuple[Any, ...]:
    job, event = host.store.get("order-1"), host.store.outbox.get("order-1")
    return host.notes(), None if job is None else str(job.state), None if event is None else str(event.state)


def day(host: Host, form: Form) -> None:
    """Rolled back and committed, each in a transaction of its own; and a lease that was lost."""

    def within(work: Callable[[Any, Any], None], end: str) -> None:
        with form(host) as (session, uow):
            work(session, uow)
            getattr(session, end)()

    within(order, "rollback")
    assert seen(host) == ([], None, None)
    within(order, "commit")
    assert seen(host) == (["ordered"], "ready", "pending")
    lease = host.store.claim("w", ttl=600, id="order-1")
    assert lease is not None
    within(packing(lease), "rollback")
    assert seen(host) == (["ordered"], "leased", "pending")
    within(packing(lease), "commit")
    assert seen(host) == (["ordered", "packed"], "done", "pending")
    with form(host) as (session, uow):
        assert isinstance(told(uow.jobs.complete, lease), LeaseLost)
        session.rollback()


@pytest.mark.parametrize("form", SYNC)
@on(*BACKENDS, drivers=(None,))
def test_a_day_in_each_form_of_session(database: Database, driver: None, form: str) -> None:
    options: dict[str, Any] = {}
    if database.backend == "sqlite" and form == "create_savepoint":
        # By the driver's default the savepoint may be the outermost one, which is refused.
        options["adapt"] = next(made for made in MADE["sqlite"] if made.name == "BEGIN by an event").adapt
    with hosted(database, **options) as host:
        day(host, SYNC[form])


@pytest.mark.parametrize("form", ASYNC)
@on(*BACKENDS, drivers=("aiosqlite", "asyncpg", "aiomysql"))
def test_a_day_in_each_form_of_async_session(database: Database, driver: str, form: str) -> None:
    with hosted(database, driver) as host:
        day(host, ASYNC[form])


# --- two phases -----------------------------------------------------------------------------------


def prepared(engine: Engine) -> list[Any]:
    """Transactions that are prepared, and neither committed nor rolled back."""
    ask = "SELECT gid FROM pg_prepared_xacts" if engine.dialect.name == "postgresql" else "XA RECOVER"
    with engine.connect() as connection:
        return [*connection.execute(text(ask)).all()]


def two_phases(engine: Engine, observer: Engine) -> None:
    """The session prepares and commits, or rolls back after it has prepared; no transaction stays."""
    Base.metadata.create_all(observer)
    store, sessions = Store(observer), sessionmaker(engine, twophase=True)
    with sessions() as session:
        order(session, UnitOfWork(session))
        session.prepare()
        assert len(prepared(observer)) == 1
        session.rollback()
    assert (prepared(observer), store.get("order-1"), store.outbox.get("order-1")) == ([], None, None)
    with sessions() as session:
        order(session, UnitOfWork(session))
        session.commit()
    lease = store.claim("w", ttl=600)
    assert lease is not None
    with sessions() as session:
        packing(lease)(session, UnitOfWork(session))
        session.commit()
    record = store.get("order-1")
    assert record is not None
    assert (record.state, prepared(observer)) == (JobState.DONE, [])
    with observer.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM host_orders")) == 2


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_session_of_two_phases_on_mariadb(database: Database, engine: Engine) -> None:
    observer = database.engine()
    two_phases(engine, observer)
    observer.dispose()


def test_a_session_of_two_phases_on_postgresql(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """On a server of its own, since PostgreSQL prepares nothing by default."""
    try:
        server = start_postgresql("max_prepared_transactions=5")
    except Missing as error:
        absent(f"there is no postgresql here: {error}")
        raise
    try:
        monkeypatch.setenv(POSTGRESQL, server.url.render_as_string(hide_password=False))
        with empty_database("postgresql", tmp_path) as database:
            engine, observer = database.engine(), database.engine()
            schema.upgrade(observer)
            two_phases(engine, observer)
            engine.dispose()
            observer.dispose()
    finally:
        server.stop()


@pytest.mark.parametrize("database", ["postgresql", "sqlite"], indirect=True)
def test_where_nothing_can_be_prepared_nothing_is_written(database: Database, engine: Engine) -> None:
    """The database's own refusal comes out, and the host's rollback leaves nothing."""
    Base.metadata.create_all(engine)
    if database.backend == "postgresql":
        with engine.connect() as connection:
            if connection.scalar(text("SHOW max_prepared_transactions")) != "0":
                pytest.skip("this server prepares transactions")

    def commit() -> None:
        with Session(engine, twophase=True) as session:
            order(session, UnitOfWork(session))
            session.commit()

    assert told(commit) is not None
    store = Store(database.engine())
    assert (store.get("order-1"), store.outbox.get("order-1")) == (None, None)
    store.transactions.engine.dispose()
