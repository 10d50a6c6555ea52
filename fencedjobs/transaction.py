"""What a verb needs of the transaction it runs in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Dialect, Executable, Select, Table, inspect, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fencedjobs import dialects, payload
from fencedjobs.dialects import Capabilities, Channel, Notify
from fencedjobs.direct import Answer, Direct
from fencedjobs.errors import OutcomeUnknown, TransactionLost
from fencedjobs.models import Job, tables

Clock = Callable[[], float]

JOB: Final = inspect(Job)
_BEGUN: Final = "fencedjobs.begun"
MAY_FAIL: Final = "fencedjobs_may_fail"  #: a statement whose error its verb deals with


def saw_begin(session: Session) -> None:
    """Remember that the session's present transaction has really begun in the database."""
    session.info[_BEGUN] = session.get_transaction()


def connected(session: Session, **options: Any) -> Connection:
    """The session's connection to the database that has our tables, whichever others it is bound to."""
    return session.connection(bind_arguments={"mapper": JOB}, execution_options=options)


@contextmanager
def answered(subject: Callable[[], Any], sent: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Around a commit: `OutcomeUnknown` for an error that is not the database's own answer to COMMIT.

    ``sent``: whether COMMIT was sent at all, where the commit does something else before.
    """
    try:
        yield
    except (DBAPIError, OSError) as error:
        if sent() and not dialects.says_no(error):
            raise OutcomeUnknown(subject()) from error
        raise


def _send(
    connection: Channel, statement: Executable, parameters: Mapping[str, Any] | None, may_fail: bool
) -> Answer:
    if isinstance(connection, Direct):
        return connection.execute(statement, parameters)
    options = {MAY_FAIL: True} if may_fail else {}
    return connection.execute(statement, parameters, execution_options=options)


class SeveralStatements(Exception):
    """A verb that was to be one statement needs more of them; what it has changed is to be undone."""


class Transaction:
    """A transaction that somebody else begins and ends; verbs only write in it.

    ``subject`` is what it is about, for the message when the outcome of its COMMIT is unknown.
    """

    def __init__(
        self,
        connect: Callable[[], Channel],
        *,
        schema: str | None = None,
        clock: Clock | None = None,
        session: Session | None = None,
        notify: bool = True,
    ) -> None:
        self._connect = connect
        self.tables: dict[str, Table] = tables(schema)
        self._clock = clock
        self._notify = notify
        self.session = session
        self.subject: Any = None
        self.waits = True  #: whether its locking reads wait for rows that others have locked
        self.single = False  #: whether it is for one statement alone, which no BEGIN went before
        self.may_start_over = False  #: whether the verb runs again after `SeveralStatements`
        self._written = False
        self._capabilities: Capabilities | None = None

    @classmethod
    def of_session(
        cls, session: Session, *, schema: str | None = None, clock: Clock | None = None, notify: bool = True
    ) -> Transaction:
        """The transaction that the caller's session is in; begun if it is not yet."""

        def connect() -> Connection:
            connection = connected(session)
            seen = session.info.get(_BEGUN) is session.get_transaction()
            if dialects.join(connection, seen=seen):
                saw_begin(session)
            return connection

        # PostgreSQL prepares no transaction that has notified.
        return cls(
            connect, schema=schema, clock=clock, session=session, notify=notify and not session.twophase
        )

    @property
    def connection(self) -> Connection:
        """SQLAlchemy's own, in a transaction that may not be `Direct`."""
        connection = self._connect()
        assert isinstance(connection, Connection)
        return connection

    @property
    def dialect(self) -> Dialect:
        return self._connect().dialect

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            self._capabilities = dialects.capabilities(self.dialect)
        return self._capabilities

    @property
    def upsert_returning(self) -> bool:
        """Whether an upsert tells how the row is afterwards; MariaDB's does, MySQL's does not."""
        return bool(self.dialect.insert_returning)

    @property
    def notify(self) -> Notify | None:
        """What tells who listens that a queue has work, where that is possible and wanted."""
        return self.capabilities.notify if self._notify else None

    def execute(
        self,
        statement: Executable,
        parameters: Mapping[str, Any] | None = None,
        *,
        may_fail: bool = False,
        writing: bool = False,
    ) -> Answer:
        """Execute; ``may_fail``: an error is an answer that the verb deals with.

        ``writing``: it is a SELECT that writes all the same.
        """
        connection = self._connect()
        send = partial(_send, connection, statement, parameters, may_fail)
        if not self.single or (isinstance(statement, Select) and not writing):
            return send()
        if self._written:
            raise TransactionLost("a verb of one statement sent another, outside of any transaction")
        self._written = True
        if not self.is_committed:
            return send()
        with answered(lambda: self.subject):  # it is its own COMMIT, and who listens is to know it before
            dialects.announce_commit(connection)
            return send()

    @property
    def is_committed(self) -> bool:
        """Whether there is nothing to commit, since its one statement is its own COMMIT."""
        return self.single and self.capabilities.autocommit

    def require_several(self) -> None:
        """Before anything is changed: have the verb run again, in a transaction of several statements."""
        if self.single:
            raise SeveralStatements

    def now(self, given: float | None) -> float | None:
        """The caller's instant: as given, or by the store's clock; ``None`` for the database's own."""
        if given is not None:
            return payload.instant("now", given)
        if self._clock is not None:
            return payload.instant("clock", self._clock())
        return None if self.capabilities.sql_clock else dialects.process_clock()

    def clock(self) -> float:
        """The instant that a verb without ``now`` would compare with at this moment."""
        own = self.now(None)
        return float(self.execute(select(dialects.statement_now())).scalar_one()) if own is None else own

    def expire(self, model: type[Any] | None, key: Any, names: Sequence[str]) -> None:
        """Have the session read the fenced attributes again, if it holds this instance."""
        if self.session is None or model is None:
            return
        held = self.session.identity_map.get(self.session.identity_key(model, key))
        if held is not None:
            self.session.expire(held, names)
