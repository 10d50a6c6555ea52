"""The proof that a transaction in which somebody else writes is whole, from its start to its COMMIT.

It listens to the session and its connection. Attaching listeners costs more than all the rest, so
that sessions of `Sessions` have them once and for all, on a class and an engine of our own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session, sessionmaker

from fencedjobs import dialects
from fencedjobs.errors import TransactionLost, UnsupportedDatabase
from fencedjobs.models import refuse_bulk_write
from fencedjobs.transaction import MAY_FAIL

_NOT_YOURS: Final = "this transaction is committed with the completion, not by the handler"
_ENDS: Final = re.compile(
    r"\s*(commit|end|abort|begin(?!\s+not)|start\s+transaction|rollback(?!\s+(work\s+|transaction\s+)?to\b))\b",
    re.IGNORECASE,
)
_TOKEN: Final = "fencedjobs.token"
_WATCH: Final = "fencedjobs_watch"
_HEARD: Final = "fencedjobs_heard"


class Watch:
    """Statements on one connection that began and did not end: they failed. Counted by savepoint.

    What fails inside ``begin_nested()`` is forgiven when that savepoint is rolled back. It also sends the
    COMMIT, once the session's commit has come to that: hooks of the host, and a flush, come before.
    """

    def __init__(self, patience: Callable[[], bool]) -> None:
        self._patience = patience
        self._unended: list[int] = []  # while it watches
        self.released = False  #: whether the transaction may be ended now
        self.sent = False  #: whether COMMIT has been sent

    @property
    def options(self) -> dict[str, Any]:
        """The execution options of the connection that is to be watched."""
        return {_WATCH: self}

    def start(self) -> None:
        self._unended = [0]

    def stop(self) -> None:
        self._unended, self.released = [], False

    def require_no_failure(self) -> None:
        if any(self._unended):
            raise TransactionLost("a statement failed and the error was swallowed")

    def begins(self, statement: str, context: Any) -> None:
        if not self._unended:
            return
        if not self.released and _ENDS.match(statement):
            raise TransactionLost(_NOT_YOURS)
        self._unended[-1] += _counts(context)

    def ended(self, context: Any) -> None:
        if self._unended:
            self._unended[-1] -= _counts(context)

    def deeper(self) -> None:
        if self._unended:
            self._unended.append(0)

    def leave(self, *, kept: bool) -> None:
        if len(self._unended) > 1:
            inside = self._unended.pop()
            self._unended[-1] += inside * kept

    def committing(self, connection: Connection) -> None:
        if not self.released:
            if self._unended:
                raise TransactionLost(_NOT_YOURS)
            return
        self.require_no_failure()
        self.sent = True
        dialects.send_commit(connection, self._patience)


def _counts(context: Any) -> bool:
    return context is None or not context.execution_options.get(MAY_FAIL)


class Token:
    """A savepoint that is still there at the end only if the transaction is the one it was set in.

    "The guard comes last" is not enough: after a swallowed deadlock (MariaDB), a full disk (SQLite)
    or a ``rollback()`` of the handler, the guard's UPDATE runs in a *new* transaction, matches, and
    commits a completion without effects. Those all take the savepoint with them. A statement that
    failed outside a savepoint of the handler's own is remembered as well: PostgreSQL aborts the
    transaction then, and the others would keep what came before.
    """

    def __init__(self, session: Session, connection: Connection, watch: Watch) -> None:
        self._session = session
        self._connection = connection
        self._watch = watch
        self._root = session.get_transaction()
        self._inner = connection.get_transaction()
        self._name = f"fj_{secrets.token_hex(8)}"
        connection.exec_driver_sql(f"SAVEPOINT {self._name}")
        _have_heard(session, connection)
        session.info[_TOKEN] = self
        watch.start()

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
        self._watch.stop()

    def _let_go(self) -> None:
        self._session.info.pop(_TOKEN, None)

    def _require_whole(self) -> None:
        self._watch.require_no_failure()
        same = self._session.get_transaction() is self._root
        if not same or self._connection.closed or self._connection.get_transaction() is not self._inner:
            raise TransactionLost("the handler ended the transaction that is not its own")
        if self._session.in_nested_transaction():
            raise TransactionLost("the handler left a begin_nested() open")

    def refuse_commit(self) -> None:
        if not self._session.in_nested_transaction():
            raise TransactionLost(_NOT_YOURS)

    def refuse_another(self, connection: Connection) -> None:
        """Before anything is written in a transaction that would not be rolled back with this one."""
        if self._session.get_transaction() is not self._root:
            raise TransactionLost("the handler ended the transaction that is not its own, and goes on")
        if connection is not self._connection:
            raise TransactionLost(
                f"this session also uses {connection.engine.url!r}; what is written there cannot be "
                "committed together with the completion"
            )


# --- listeners ------------------------------------------------------------------------------------


def _watching(connection: Connection) -> Watch | None:
    watch: Watch | None = connection.get_execution_options().get(_WATCH)
    return watch


def _begins(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> None:
    if watch := _watching(connection):
        watch.begins(statement, context)


def _ended(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> None:
    if watch := _watching(connection):
        watch.ended(context)


def _deeper(connection: Connection, name: str) -> None:
    if watch := _watching(connection):
        watch.deeper()


def _forgiven(connection: Connection, name: str, context: Any) -> None:
    if watch := _watching(connection):
        watch.leave(kept=False)


def _kept(connection: Connection, name: str, context: Any) -> None:
    if watch := _watching(connection):
        watch.leave(kept=True)


def _committing(connection: Connection) -> None:
    if watch := _watching(connection):
        watch.committing(connection)


def _refuse_commit(session: Session) -> None:
    if token := session.info.get(_TOKEN):
        token.refuse_commit()


def _refuse_another(session: Session, transaction: Any, connection: Connection) -> None:
    if token := session.info.get(_TOKEN):
        token.refuse_another(connection)


_OF_A_CONNECTION: Final[dict[str, Callable[..., None]]] = {
    "before_cursor_execute": _begins,
    "after_cursor_execute": _ended,
    "savepoint": _deeper,
    "rollback_savepoint": _forgiven,
    "release_savepoint": _kept,
    "commit": _committing,
}
_OF_A_SESSION: Final[dict[str, Callable[..., None]]] = {
    "before_commit": _refuse_commit,
    "after_begin": _refuse_another,
    "do_orm_execute": refuse_bulk_write,
}


def _hear(target: Any, listeners: dict[str, Callable[..., None]]) -> None:
    for name, listener in listeners.items():
        event.listen(target, name, listener)


def _have_heard(session: Session, connection: Connection) -> None:
    """Listen to these, if they are not of `Sessions`; without a token and a watch it changes nothing."""
    if not hasattr(session, _HEARD):
        _hear(session, _OF_A_SESSION)
    if _HEARD in connection.get_execution_options():
        return
    try:
        _hear(connection, _OF_A_CONNECTION)
    except InvalidRequestError as error:  # SQLAlchemy before 2.0.38
        raise UnsupportedDatabase(
            "this version of SQLAlchemy cannot watch one connection of an engine.execution_options(…): take "
            "2.0.38 or later, or give the options to create_engine"
        ) from error


class Hearing:
    """A class and an engine like the host's, with our listeners; nothing is attached to the host's own."""

    def __init__(self, session_class: type[Session]) -> None:
        self.of = session_class
        self.session_class = type(session_class.__name__, (session_class,), {_HEARD: True})
        _hear(self.session_class, _OF_A_SESSION)
        self._engines: tuple[Engine, Any, Engine] | None = None

    def engine(self, engine: Engine) -> Engine:
        """The same engine with the same pool, whose connections are listened to."""
        options = engine.get_execution_options()
        if self._engines is None or self._engines[0] is not engine or self._engines[1] is not options:
            ours = engine.execution_options(**{_HEARD: True})
            _hear(ours, _OF_A_CONNECTION)
            self._engines = engine, options, ours
        return self._engines[2]


class Sessions:
    """Makes sessions as a ``sessionmaker`` of the host's does, as it is configured at that moment."""

    def __init__(self, maker: sessionmaker[Any]) -> None:
        self._maker = maker
        self._hearing = Hearing(maker.class_)

    @classmethod
    def of(cls, maker: Callable[[], Session]) -> Callable[[], Session]:
        """The same for any way of making sessions: another one stays as it is."""
        return cls(maker) if type(maker) is sessionmaker else maker

    def __call__(self) -> Session:
        options = dict(self._maker.kw)
        if isinstance(options.get("bind"), Engine) and not options.get("binds"):
            options["bind"] = self._hearing.engine(options["bind"])
        session: Session = self._hearing.session_class(**options)
        return session
