"""What a verb needs of the transaction it runs in, and the proof that the transaction is whole."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, CursorResult, Executable, Select, Table, event, inspect, select
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session

from fencedjobs import dialects, payload
from fencedjobs.dialects import Capabilities, Notify
from fencedjobs.errors import OutcomeUnknown, TransactionLost, UnsupportedDatabase
from fencedjobs.models import Job, tables

Clock = Callable[[], float]

JOB: Final = inspect(Job)
_BEGUN: Final = "fencedjobs.begun"
_MAY_FAIL: Final = "fencedjobs_may_fail"


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


class SeveralStatements(Exception):
    """A verb that was to be one statement needs more of them, and has changed nothing yet."""


class Transaction:
    """A transaction that somebody else begins and ends; verbs only write in it.

    ``subject`` is what it is about, for the message when the outcome of its COMMIT is unknown.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
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
        self._written = False

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
        return self._connect()

    @property
    def capabilities(self) -> Capabilities:
        return dialects.capabilities(self.connection.dialect)

    @property
    def notify(self) -> Notify | None:
        """What tells who listens that a queue has work, where that is possible and wanted."""
        return self.capabilities.notify if self._notify else None

    def execute(
        self,
        statement: Executable,
        parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
        *,
        may_fail: bool = False,
        writing: bool = False,
    ) -> CursorResult[*tuple[Any, ...]]:
        """Execute; ``may_fail``: an error is an answer that the verb deals with.

        ``writing``: it is a SELECT that writes all the same.
        """
        options = {_MAY_FAIL: True} if may_fail else {}
        connection, given = self.connection, parameters or None
        if not self.single or (isinstance(statement, Select) and not writing):
            return connection.execute(statement, given, execution_options=options)
        if self._written:
            raise TransactionLost("a verb of one statement sent another, outside of any transaction")
        self._written = True
        if not self.is_committed:
            return connection.execute(statement, given, execution_options=options)
        with answered(lambda: self.subject):  # it is its own COMMIT, and who listens is to know it before
            dialects.announce_commit(connection)
            return connection.execute(statement, given, execution_options=options)

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


def listen(connection: Connection, name: str, listener: Callable[..., None]) -> None:
    """Listen to one connection alone."""
    try:
        event.listen(connection, name, listener)
    except InvalidRequestError as error:  # SQLAlchemy before 2.0.38
        raise UnsupportedDatabase(
            "this version of SQLAlchemy cannot watch one connection of an engine.execution_options(…): take "
            "2.0.38 or later, or give the options to create_engine"
        ) from error


class Token:
    """A savepoint that is still there at the end only if the transaction is the one it was set in.

    "The guard comes last" is not enough: after a swallowed deadlock (MariaDB), a full disk (SQLite)
    or a ``rollback()`` of the handler, the guard's UPDATE runs in a *new* transaction, matches, and
    commits a completion without effects. Those all take the savepoint with them. A statement that
    failed outside a savepoint of the handler's own is remembered as well: PostgreSQL aborts the
    transaction then, and the others would keep what came before.
    """

    def __init__(self, session: Session, connection: Connection) -> None:
        self._session = session
        self._connection = connection
        self._root = session.get_transaction()
        self._inner = connection.get_transaction()
        self._name = f"fj_{secrets.token_hex(8)}"
        connection.exec_driver_sql(f"SAVEPOINT {self._name}")
        self._watch = _Watch(connection)
        self._handler = (
            (session, "before_commit", self._refuse_commit),
            (session, "after_begin", self._refuse_another),
        )
        for target, name, listener in self._handler:
            event.listen(target, name, listener)

    def redeem(self) -> None:
        """Flush, and raise `TransactionLost` unless everything since the start is still there.

        Errors are watched for until COMMIT: hooks of the host may run statements before it.
        """
        self._require_whole()
        self._session.flush()
        self._require_whole()
        try:
            self._connection.exec_driver_sql(f"RELEASE SAVEPOINT {self._name}")
        except DBAPIError as error:
            raise TransactionLost(
                f"the database has ended or aborted the transaction: {error.orig}"
            ) from error
        self._let_go()
        self._watch.released = True

    def close(self) -> None:
        """Stop watching; may be called again."""
        self._let_go()
        self._watch.close()

    def _let_go(self) -> None:
        for target, name, listener in self._handler:
            if event.contains(target, name, listener):
                event.remove(target, name, listener)

    def _require_whole(self) -> None:
        self._watch.require_no_failure()
        same = self._session.get_transaction() is self._root
        if not same or self._connection.closed or self._connection.get_transaction() is not self._inner:
            raise TransactionLost("the handler ended the transaction that is not its own")
        if self._session.in_nested_transaction():
            raise TransactionLost("the handler left a begin_nested() open")

    def _refuse_commit(self, session: Session) -> None:
        if not session.in_nested_transaction():
            raise TransactionLost(_NOT_YOURS)

    def _refuse_another(self, session: Session, transaction: Any, connection: Connection) -> None:
        """Before anything is written in a transaction that would not be rolled back with this one."""
        if session.get_transaction() is not self._root:
            raise TransactionLost("the handler ended the transaction that is not its own, and goes on")
        if connection is not self._connection:
            raise TransactionLost(
                f"this session also uses {connection.engine.url!r}; what is written there cannot be "
                "committed together with the completion"
            )


_NOT_YOURS: Final = "this transaction is committed with the completion, not by the handler"
_ENDS: Final = re.compile(
    r"\s*(commit|end|abort|begin(?!\s+not)|start\s+transaction|rollback(?!\s+(work\s+|transaction\s+)?to\b))\b",
    re.IGNORECASE,
)


class _Watch:
    """Statements on one connection that began and did not end: they failed. Counted by savepoint.

    What fails inside ``begin_nested()`` is forgiven when that savepoint is rolled back.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unended = [0]
        self.released = False  #: whether the transaction may be committed now
        self._events = (
            ("before_cursor_execute", self._begins),
            ("after_cursor_execute", self._ended),
            ("savepoint", self._deeper),
            ("rollback_savepoint", self._forgiven),
            ("release_savepoint", self._kept),
            ("commit", self._committing),
        )
        for name, listener in self._events:
            listen(connection, name, listener)

    def require_no_failure(self) -> None:
        if any(self._unended):
            raise TransactionLost("a statement failed and the error was swallowed")

    def close(self) -> None:
        for name, listener in self._events:
            if event.contains(self._connection, name, listener):
                event.remove(self._connection, name, listener)

    def _begins(self, *event: Any) -> None:
        if not self.released and _ENDS.match(event[2]):
            raise TransactionLost(_NOT_YOURS)
        self._unended[-1] += self._counts(*event)

    def _ended(self, *event: Any) -> None:
        self._unended[-1] -= self._counts(*event)

    @staticmethod
    def _counts(
        connection: Any, cursor: Any, statement: Any, parameters: Any, context: Any, many: Any
    ) -> bool:
        return context is None or not context.execution_options.get(_MAY_FAIL)

    def _deeper(self, *_: Any) -> None:
        self._unended.append(0)

    def _forgiven(self, *_: Any) -> None:
        self._leave()

    def _kept(self, *_: Any) -> None:
        inside = self._leave()
        self._unended[-1] += inside

    def _leave(self) -> int:
        return self._unended.pop() if len(self._unended) > 1 else 0

    def _committing(self, connection: Any) -> None:
        if not self.released:
            raise TransactionLost(_NOT_YOURS)
        self.require_no_failure()
