"""The verbs together, on the caller's session and in its transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement
from sqlalchemy.orm import Session, scoped_session

from fencedjobs.guards import JoinedGuards
from fencedjobs.inbox import JoinedInbox
from fencedjobs.jobs import JoinedJobs
from fencedjobs.outbox import JoinedOutbox
from fencedjobs.row_leases import JoinedLeases, of_model
from fencedjobs.transaction import Clock, Transaction


class UnitOfWork:
    """fencedjobs inside a transaction of the caller.

    The caller begins, commits and rolls back; this only writes. A connection in AUTOCOMMIT mode is
    refused with `UnsupportedDatabase`. Under an isolation level stricter than READ COMMITTED the
    database's serialisation errors come out unchanged, for the caller to retry the whole
    transaction. On SQLite it takes the write lock at once (BEGIN IMMEDIATE).

    ``session`` may be a ``scoped_session`` (as Flask-SQLAlchemy's ``db.session``): the one it holds now.
    ``schema`` is where the tables are, ``clock`` a function of the seconds now, instead of the
    database's clock. ``notify=False`` leaves waiting workers to their polling; see `Store`. (So does a
    session with ``twophase``, since PostgreSQL prepares no transaction that has notified.)
    """

    def __init__(
        self,
        session: Session | scoped_session[Any],
        *,
        schema: str | None = None,
        clock: Clock | None = None,
        notify: bool = True,
    ) -> None:
        self.session: Session = session() if isinstance(session, scoped_session) else session
        self._tx = Transaction.of_session(self.session, schema=schema, clock=clock, notify=notify)
        self._tx.connection  # noqa: B018 - joins now, while no savepoint is in the way
        self.jobs = JoinedJobs(self._tx)
        self.outbox = JoinedOutbox(self._tx)
        self.inbox = JoinedInbox(self._tx)
        self.guards = JoinedGuards(self._tx)

    def leases(self, model: type[Any], open: ColumnElement[bool] | None = None) -> JoinedLeases:
        """The leases of a mapped class of the host with `LeaseMixin`.

        ``open`` is the condition under which a row can still be worked on.
        """
        self.session.flush()
        return JoinedLeases(self._tx, of_model(model, open))
