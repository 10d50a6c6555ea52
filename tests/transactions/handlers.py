"""What handlers do with the session they are given: properly, or not."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sqlalchemy import insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from fencedjobs import FencedJobsError
from tests.hosts import Order


def add(session: Session, *notes: str) -> None:
    """Business rows, one by one."""
    for note in notes:
        session.execute(insert(Order), {"id": abs(hash(note)) % 2**31, "note": note})


# --- proper ---------------------------------------------------------------------------------------


def core_statements(session: Session) -> None:
    add(session, "a", "b")


def flushed_rows(session: Session) -> None:
    session.add_all([Order(id=1, note="a"), Order(id=2, note="b")])
    session.flush()


def rows_that_are_flushed_late(session: Session) -> None:
    session.autoflush = False
    add(session, "a")
    session.add(Order(id=2, note="b"))


def many_rows_in_several_statements(session: Session) -> None:
    session.execute(insert(Order), [{"id": n, "note": f"{n}"} for n in range(2500)])
    session.execute(insert(Order).returning(Order.id), [{"id": n, "note": f"{n}"} for n in range(2500, 5000)])


def a_duplicate_in_a_savepoint(session: Session) -> None:
    """The documented way to insert what may be there."""
    add(session, "a")
    for _ in range(2):
        try:
            with session.begin_nested():
                session.add(Order(id=2, note="b"))
        except IntegrityError:
            pass


def a_duplicate_in_a_savepoint_in_a_savepoint(session: Session) -> None:
    with session.begin_nested():
        add(session, "a")
        try:
            with session.begin_nested():
                add(session, "lost", "a")
        except IntegrityError:
            add(session, "b")


def a_savepoint_rolled_back(session: Session) -> None:
    add(session, "a")
    nested = session.begin_nested()
    add(session, "lost")
    nested.rollback()
    add(session, "b")


def a_savepoint_of_the_connection(session: Session) -> None:
    add(session, "a")
    try:
        with session.connection().begin_nested():
            add(session, "a")
    except IntegrityError:
        add(session, "b")


def an_outer_savepoint_rolled_back_over_an_inner_one(session: Session) -> None:
    add(session, "a")
    outer = session.begin_nested()
    add(session, "lost")
    session.begin_nested()
    try:
        add(session, "a")
    except IntegrityError:
        outer.rollback()
    add(session, "b")


def a_result_that_is_not_read_to_its_end(session: Session) -> None:
    add(session, "a", "b")
    session.execute(select(Order.note)).first()
    session.execute(select(Order.note).execution_options(yield_per=1)).fetchone()


PROPER = [
    core_statements, flushed_rows, rows_that_are_flushed_late, a_duplicate_in_a_savepoint,
    a_duplicate_in_a_savepoint_in_a_savepoint, a_savepoint_rolled_back, a_savepoint_of_the_connection,
    an_outer_savepoint_rolled_back_over_an_inner_one, a_result_that_is_not_read_to_its_end,
]  # fmt: skip


# --- errors that are swallowed --------------------------------------------------------------------


def a_swallowed_duplicate(session: Session) -> None:
    add(session, "a")
    try:
        add(session, "a")
    except IntegrityError:
        add_if_possible(session, "b")


def a_swallowed_duplicate_at_the_very_end(session: Session) -> None:
    add(session, "a")
    with suppress(IntegrityError):
        add(session, "a")


def a_swallowed_flush(session: Session) -> None:
    add(session, "a")
    session.add(Order(id=2, note="a"))
    with suppress(IntegrityError):
        session.flush()


def a_swallowed_flush_and_a_rollback(session: Session) -> None:
    a_swallowed_flush(session)
    session.rollback()
    session.add(Order(id=3, note="c"))


def an_error_in_a_savepoint_that_is_kept(session: Session) -> None:
    with swallowing(), session.begin_nested():
        add(session, "a")
        with swallowing():
            add(session, "a")


def an_error_in_a_savepoint_of_a_savepoint_that_is_kept(session: Session) -> None:
    with swallowing(), session.begin_nested():
        a_swallowed_duplicate_at_the_very_end(session)
        with session.begin_nested():
            add(session, "b")


def a_swallowed_error_of_the_drivers_own_cursor(session: Session) -> None:
    add(session, "a")
    cursor: Any = session.connection().connection.cursor()
    with suppress(Exception):  # each driver has its own
        cursor.execute("SELECT nonsense FROM nowhere")
    cursor.close()


SWALLOWED = [
    a_swallowed_duplicate, a_swallowed_duplicate_at_the_very_end, a_swallowed_flush,
    a_swallowed_flush_and_a_rollback, an_error_in_a_savepoint_that_is_kept,
    an_error_in_a_savepoint_of_a_savepoint_that_is_kept,
]  # fmt: skip


# --- transactions that are not the handler's to end -----------------------------------------------


def commits(session: Session) -> None:
    add(session, "a")
    session.commit()


def commits_and_swallows_the_refusal(session: Session) -> None:
    add(session, "a")
    with swallowing():
        session.commit()
    add(session, "b")


def commits_from_inside_a_savepoint(session: Session) -> None:
    session.begin_nested()
    add(session, "a")
    session.commit()


def rolls_back(session: Session) -> None:
    add(session, "a")
    session.rollback()


def rolls_back_and_goes_on(session: Session) -> None:
    add(session, "a")
    session.rollback()
    add(session, "b")
    session.add(Order(id=3, note="c"))


def rolls_back_and_swallows_what_follows(session: Session) -> None:
    add(session, "a")
    session.rollback()
    with swallowing():
        add(session, "b")


def closes(session: Session) -> None:
    add(session, "a")
    session.close()


def closes_and_goes_on(session: Session) -> None:
    closes(session)
    session.add(Order(id=2, note="b"))


def invalidates(session: Session) -> None:
    add(session, "a")
    session.invalidate()


def rolls_back_the_connection(session: Session) -> None:
    add(session, "a")
    session.connection().rollback()


def rolls_back_the_connection_and_goes_on(session: Session) -> None:
    add(session, "a")
    session.connection().rollback()
    add(session, "b")


def closes_the_connection(session: Session) -> None:
    add(session, "a")
    session.connection().close()


def rolls_back_by_the_driver(session: Session) -> None:
    add(session, "a")
    session.connection().connection.rollback()
    add(session, "b")


def says_rollback(session: Session) -> None:
    add(session, "a")
    session.execute(text(" rollback"))
    add(session, "b")


def leaves_a_savepoint_open(session: Session) -> None:
    add(session, "a")
    session.begin_nested()
    add(session, "b")


def says_commit(session: Session) -> None:
    add(session, "a")
    session.execute(text("COMMIT"))


def says_commit_and_goes_on(session: Session) -> None:
    says_commit(session)
    add(session, "b")


def commits_the_connection(session: Session) -> None:
    add(session, "a")
    session.connection().commit()


def commits_by_the_driver(session: Session) -> None:
    add(session, "a")
    session.connection().connection.commit()


ENDED = [
    commits, commits_from_inside_a_savepoint, rolls_back, rolls_back_and_goes_on,
    rolls_back_and_swallows_what_follows, closes, closes_and_goes_on, invalidates, rolls_back_the_connection,
    rolls_back_the_connection_and_goes_on, closes_the_connection, rolls_back_by_the_driver, says_rollback,
    leaves_a_savepoint_open, says_commit, says_commit_and_goes_on, commits_the_connection,
]  # fmt: skip


class swallowing:
    """``except`` with nothing in it, as it is found in handlers."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        return isinstance(error, (SQLAlchemyError, FencedJobsError))


def add_if_possible(session: Session, note: str) -> None:
    """PostgreSQL refuses it in an aborted transaction, the others do not."""
    with suppress(DBAPIError):
        add(session, note)
