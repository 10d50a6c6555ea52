"""A job is done if and only if its effects are there; anything else is told. FAULTS 30 and 33."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from fencedjobs import FencedJobsError, JobState, LeaseLost, TransactionLost
from tests.databases import BACKENDS
from tests.hosts import Handler, Host, Order, on, told
from tests.transactions import handlers
from tests.transactions.handlers import add

DONE = ("", "done", "a", "b")
LOST = ("TransactionLost", "leased")


def named(cases: Sequence[Handler]) -> dict[str, Handler]:
    return {handler.__name__: handler for handler in cases}


def test_a_proper_handler_is_done_with_its_effects(host: Host) -> None:
    cases = named(handlers.PROPER)
    assert {name: host.verdict(case) for name, case in cases.items()} == dict.fromkeys(cases, DONE)


def test_a_proper_block_is_committed(host: Host) -> None:
    for name, case in named(handlers.PROPER).items():
        host.begin(case)
        assert host.notes() == ["a", "b"], name
        host.clear()


def test_many_rows_are_no_sign_of_an_error(host: Host) -> None:
    lease = host.leased()
    host.completing(lease, handlers.many_rows_in_several_statements)
    assert (host.state(lease), len(host.notes())) == (JobState.DONE, 5000)


def test_a_swallowed_error_completes_nothing_and_keeps_no_effects(host: Host) -> None:
    cases = named(handlers.SWALLOWED)
    assert {name: host.verdict(case) for name, case in cases.items()} == dict.fromkeys(cases, LOST)


def test_a_handler_that_ends_the_transaction_completes_nothing_and_keeps_no_effects(host: Host) -> None:
    cases = named(handlers.ENDED)
    assert {name: host.verdict(case) for name, case in cases.items()} == dict.fromkeys(cases, LOST)


def test_a_job_whose_handler_failed_that_way_can_still_be_done(host: Host) -> None:
    lease = host.leased()
    for case in (handlers.a_swallowed_flush, handlers.rolls_back, handlers.commits, handlers.core_statements):
        seen = host.verdict(case, lease)
    assert seen == DONE


def test_a_block_that_is_not_whole_is_told(host: Host) -> None:
    for name, case in named([*handlers.SWALLOWED, *handlers.ENDED]).items():
        assert isinstance(told(host.begin, case), TransactionLost), name
        assert host.notes() == [], name


def test_a_commit_by_the_drivers_own_method_cannot_be_undone_but_is_told(host: Host) -> None:
    assert host.verdict(handlers.commits_by_the_driver) == (*LOST, "a")


def test_a_refused_commit_does_no_harm(host: Host) -> None:
    assert host.verdict(handlers.commits_and_swallows_the_refusal) == DONE


def test_an_error_that_only_the_driver_saw_is_never_done_without_effects(host: Host) -> None:
    seen = host.verdict(handlers.a_swallowed_error_of_the_drivers_own_cursor)
    # PostgreSQL has aborted the transaction; the others have kept what came before.
    assert seen == (LOST if host.database.backend == "postgresql" else ("", "done", "a"))


def test_a_table_made_by_the_handler_is_told_where_that_commits(host: Host) -> None:
    def handler(session: Session) -> None:
        add(session, "a", "b")
        session.execute(text("CREATE TABLE made_by_the_handler (id INTEGER)"))

    seen = host.verdict(handler)
    assert seen == ((*LOST, "a", "b") if host.database.backend == "mariadb" else DONE)


def test_a_late_flush_that_fails_says_so_itself(host: Host) -> None:
    def handler(session: Session) -> None:
        session.autoflush = False
        add(session, "a")
        session.add(Order(id=2, note="a"))

    assert host.verdict(handler) == ("IntegrityError", "leased")


def test_a_hook_of_the_host_that_swallows_an_error_before_the_commit_is_told(host: Host) -> None:
    def handler(session: Session) -> None:
        event.listen(session, "before_commit", handlers.a_swallowed_duplicate_at_the_very_end)

    assert host.verdict(handler) == LOST


class Mishap(Exception):
    pass


def test_the_handlers_own_error_comes_out_unchanged_whatever_it_did_before(host: Host) -> None:
    for name, before in named([*handlers.PROPER, *handlers.SWALLOWED, *handlers.ENDED]).items():
        lease, mishap = host.leased(), Mishap(name)

        def handler(session: Session, before: Handler = before, mishap: Mishap = mishap) -> None:
            with handlers.swallowing():
                before(session)
            raise mishap

        assert told(host.completing, lease, handler) is mishap
        assert told(host.begin, handler) is mishap
        assert (host.state(lease), host.notes()) == (JobState.LEASED, []), name


@on(*BACKENDS, drivers=(None,))
def test_even_an_interrupt_leaves_nothing_behind(host: Host) -> None:
    for ending in (KeyboardInterrupt(), SystemExit(3)):

        def handler(session: Session, ending: BaseException = ending) -> None:
            add(session, "a")
            raise ending

        lease = host.leased()
        assert told(host.completing, lease, handler) is ending
        assert (host.state(lease), host.notes()) == (JobState.LEASED, [])


def test_a_lost_lease_rolls_the_business_rows_back(host: Host) -> None:
    lease = host.leased()
    host.store.release(lease)
    other = host.store.claim("other", ttl=600, id=lease.id)
    assert other is not None
    error = told(host.completing, lease, handlers.core_statements)
    assert isinstance(error, LeaseLost)
    assert error.held == lease
    assert error.current is not None
    assert error.current.fence == other.fence
    assert (host.state(lease), host.notes()) == (JobState.LEASED, [])
    assert host.verdict(handlers.core_statements, other) == DONE


def test_a_job_is_completed_once(host: Host) -> None:
    lease = host.leased()
    assert host.verdict(handlers.core_statements, lease) == DONE
    error = told(host.completing, lease, handlers.core_statements)
    assert isinstance(error, LeaseLost)
    assert error.completed, "it was this very lease that completed it before"
    assert host.notes() == []


def test_a_lease_that_runs_out_in_the_block_is_lost(host: Host) -> None:
    lease = host.leased()
    error = told(host.completing, lease, handlers.core_statements, now=lease.until)
    assert isinstance(error, LeaseLost)
    assert (host.state(lease), host.notes()) == (JobState.LEASED, [])


def test_a_result_that_cannot_be_stored_is_refused_before_the_block(host: Host) -> None:
    lease = host.leased()
    error = told(host.completing, lease, lambda session: pytest.fail("too late"), result={1, 2})
    assert isinstance(error, FencedJobsError)
    assert host.state(lease) is JobState.LEASED


def test_the_unit_of_works_own_verbs_commit_with_the_completion(host: Host) -> None:
    first, second, third = host.leased(), host.leased(), host.leased()
    with host.store.completing(first) as uow:
        uow.jobs.complete(second)
        uow.jobs.enqueue("next")
        uow.jobs.enqueue(third.id)  # a duplicate is no error, although MariaDB says so by one
        uow.jobs.enqueue_many([{"id": "more"}, {"id": third.id}, {"id": "much more"}])
    assert [host.state(lease) for lease in (first, second, third)] == ["done", "done", "leased"]
    assert all(host.store.get(id) for id in ("next", "more", "much more"))


def test_the_unit_of_works_own_verbs_roll_back_with_the_completion(host: Host) -> None:
    first, second = host.leased(), host.leased()

    def attempt() -> None:
        with host.store.completing(first) as uow:
            uow.jobs.complete(second)
            uow.jobs.enqueue("next")
            raise Mishap

    assert isinstance(told(attempt), Mishap)
    assert [host.state(lease) for lease in (first, second)] == ["leased", "leased"]
    assert host.store.get("next") is None


def test_an_integrity_error_of_the_handler_comes_out_unchanged(host: Host) -> None:
    def handler(session: Session) -> None:
        add(session, "a", "a")

    error = told(host.completing, host.leased(), handler)
    assert isinstance(error, IntegrityError)
