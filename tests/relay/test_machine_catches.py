"""Whether the machine would notice: outbox, relay and inbox broken on purpose, one way after the other.

Default: what it finds within a second or so. All of them: ``-m nightly``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import Engine, and_, bindparam, func, select
from sqlalchemy import event as listen

from fencedjobs import InboxConflict, NotAcknowledged, batch, lanes, outbox, relay
from fencedjobs.batch import Batch
from fencedjobs.errors import LeaseLost
from fencedjobs.inbox import JoinedInbox
from fencedjobs.lanes import Lanes
from fencedjobs.outbox import PENDING, JoinedOutbox
from fencedjobs.testing.outbox_machines import outbox_machine

Break = Callable[[pytest.MonkeyPatch], None]

#: Stops at the first example that fails, and does not look for a shorter one.
SEARCH = settings(
    max_examples=200, stateful_step_count=40, derandomize=True, deadline=None, database=None,
    phases=[Phase.generate], report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
)  # fmt: skip


def marked_before_the_send(patch: pytest.MonkeyPatch) -> None:
    copy = Batch.copy

    def marking(self: Batch) -> Any:
        event, lease = self._waiting[0], self._lease
        assert lease is not None
        self._store.run(lambda tx: Lanes(tx)._mark(lease, [event]))
        return copy(self)

    patch.setattr(Batch, "copy", marking)


def marked_without_the_lease(patch: pytest.MonkeyPatch) -> None:
    keep = Lanes._keep

    def keeping(self: Lanes, lease: Any, ttl: float) -> Any:
        try:
            return keep(self, lease, ttl)
        except LeaseLost:
            return lease

    patch.setattr(Lanes, "_keep", keeping)


def a_truthy_answer_is_an_ack(patch: pytest.MonkeyPatch) -> None:
    def acknowledge(id: str, answer: Any) -> None:
        if not answer:
            raise NotAcknowledged(id, answer)

    patch.setattr(relay, "acknowledge", acknowledge)


def next_after_the_last_one(patch: pytest.MonkeyPatch) -> None:
    def reading(table: Any) -> Any:
        c, gone = table.c, table.alias().c
        last = select(func.coalesce(func.max(gone.seq), 0)).where(
            gone.lane == bindparam("in_lane"), gone.state == "sent"
        )
        waits = and_(c.lane == bindparam("in_lane"), c.state == PENDING, c.seq > last.scalar_subquery())
        return select(*c).where(waits).order_by(c.seq).limit(bindparam("limit"))

    patch.setattr(outbox, "_next", reading)


def in_the_order_of_ids(patch: pytest.MonkeyPatch) -> None:
    reading = outbox._next
    patch.setattr(outbox, "_next", lambda table: reading(table).order_by(None).order_by(table.c.id))


def sends_the_original(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch, "deepcopy", lambda event: event)


def attempts_are_not_counted_beforehand(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lanes, "_count", lambda self, event: True)


def goes_on_after_a_rival_was_on_the_lane(patch: pytest.MonkeyPatch) -> None:
    settle = Lanes.settle

    def settling(self: Lanes, lease: Any, sent: Any, failure: Any, then: Any, *, ttl: float) -> Any:
        kept, goes_on = settle(self, lease, sent, failure, then, ttl=ttl)
        return kept, goes_on or then is not None

    patch.setattr(Lanes, "settle", settling)


def the_ack_of_an_old_payload_counts_for_the_mended(patch: pytest.MonkeyPatch) -> None:
    def marking(table: Any, given: bool) -> Any:
        c = table.c
        sent = {"state": "sent", "sent_at": bindparam("now"), "last_error": None, "attempts": c.attempts}
        these = and_(c.seq.in_(bindparam("seqs", expanding=True)), c.state == PENDING)
        return table.update().where(these).values(**sent, fence=bindparam("by_fence"))

    patch.setattr(lanes, "_mark", marking)


def the_lane_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lanes, "give_back", lambda *_, **__: None)


def a_dead_relay_hides_the_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lanes, "last_words", lambda *_: None)


def another_event_under_the_id_is_nothing_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JoinedOutbox, "_insert", lambda self, new, now, insert=JoinedOutbox._insert: (
        known if (known := insert(self, new, now)) is None else new["digest"]
    ))  # fmt: skip


def a_conflict_is_a_duplicate(patch: pytest.MonkeyPatch) -> None:
    accept = JoinedInbox.accept

    def accepting(self: JoinedInbox, *args: Any, **how: Any) -> bool:
        try:
            return accept(self, *args, **how)
        except InboxConflict:
            return False

    patch.setattr(JoinedInbox, "accept", accepting)


def a_duplicate_is_new(patch: pytest.MonkeyPatch) -> None:
    accept = JoinedInbox.accept
    patch.setattr(JoinedInbox, "accept", lambda *args, **how: accept(*args, **how) or True)


def a_conflict_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JoinedInbox, "record_conflict", lambda *_: None)


QUICK: list[Break] = [
    marked_before_the_send, marked_without_the_lease, a_truthy_answer_is_an_ack, next_after_the_last_one,
    in_the_order_of_ids, sends_the_original, attempts_are_not_counted_beforehand,
    the_ack_of_an_old_payload_counts_for_the_mended, the_lane_is_not_given_back, a_conflict_is_a_duplicate,
    a_duplicate_is_new,
]  # fmt: skip
SLOW: list[Break] = [
    goes_on_after_a_rival_was_on_the_lane, a_dead_relay_hides_the_error, a_conflict_is_not_counted,
    another_event_under_the_id_is_nothing_new,
]  # fmt: skip


@pytest.fixture(autouse=True)
def bounded() -> None:
    """Here the machine knows when a relay must end."""


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "mistake",
    [*QUICK, *(pytest.param(slow, marks=pytest.mark.nightly) for slow in SLOW)],
    ids=lambda mistake: mistake.__name__,
)
def test_it_is_caught(engine: Engine, mistake: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    listen.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = OFF"))
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(outbox_machine(engine), settings=SEARCH)
