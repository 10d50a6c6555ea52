"""The catalogue of planted faults, part two: outbox, relay, inbox, guards, clocks, COMMIT and plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import bindparam, func, select, true, update

from fencedjobs import claims, facets, guards, lanes, leases, outbox, own, relay
from fencedjobs import payload as edge
from fencedjobs import store as stores
from fencedjobs.batch import Batch
from fencedjobs.dialects import Capabilities
from fencedjobs.errors import InboxConflict, LeaseLost, NotAcknowledged, OutcomeUnknown
from fencedjobs.facets import StoreGuards, StoreInbox, StoreOutbox
from fencedjobs.guards import JoinedGuards
from fencedjobs.inbox import JoinedInbox
from fencedjobs.lanes import Failure, Lanes
from fencedjobs.outbox import JoinedOutbox
from fencedjobs.own import Transactions
from fencedjobs.store import Store
from fencedjobs.testing import event_stages as stages
from fencedjobs.testing.planting import Patches, builder, changed, fault
from fencedjobs.transaction import Transaction
from fencedjobs.uow import UnitOfWork


def _verb(joined: Any, facet: Any, name: str, faulty: Callable[..., Any]) -> Patches:
    """A verb replaced in the caller's transaction, and in the store's own."""
    yield joined, name, faulty
    yield facet, name, facets.own(joined, faulty)


# --- relays ---------------------------------------------------------------------------------------


@fault(stages.outbox, "an event is marked before it is sent, so that a relay that dies loses it")
def _mark_before_send() -> Patches:
    copy = Batch.copy

    def marking(self: Batch) -> Any:
        event, lease = self._waiting[0], self._lease
        assert lease is not None
        self._store.run(lambda tx: Lanes(tx)._mark(lease, [event]))
        return copy(self)

    yield Batch, "copy", marking


@fault(stages.outbox, "an event is marked by its id alone, without the lane's lease")
def _mark_without_the_lease() -> Patches:
    keep = Lanes._keep

    def keeping(self: Lanes, lease: Any, ttl: float) -> Any:
        try:
            return keep(self, lease, ttl)
        except LeaseLost:
            return lease

    yield Lanes, "_keep", keeping


@fault(
    stages.outbox,
    "where one statement renews the lane and marks, it marks although the lease is lost",
    occurs=lambda capable: capable.arrays,
)
def _marked_beside_the_lease() -> Patches:
    yield lanes, "exists", lambda *_: true()
    yield lanes, "_settle", builder(lanes._settle)


@fault(stages.outbox, "whatever is true acknowledges an event")
def _truthy_ack() -> Patches:
    def acknowledge(id: str, answer: Any) -> None:
        if not answer:
            raise NotAcknowledged(id, answer)

    yield relay, "acknowledge", acknowledge


def _reading(change: Callable[..., Any]) -> Patches:
    """What a relay reads, and whoever looks."""
    for module in (outbox, lanes):
        yield changed(module, "next_events", change)
    yield lanes, "_settle", builder(lanes._settle)


@fault(stages.outbox, "events are read by seq > the last one, which skips what commits late")
def _seq_watermark() -> Patches:
    def behind(reading: Any, table: Any) -> Any:
        gone = table.alias().c
        last = select(func.coalesce(func.max(gone.seq), 0)).where(
            gone.lane == bindparam("in_lane"), gone.state == "sent"
        )
        return reading.where(table.c.seq > last.scalar_subquery())

    yield from _reading(behind)


@fault(stages.outbox, "events are sent in the order of their ids")
def _order_of_ids() -> Patches:
    yield from _reading(lambda reading, table: reading.order_by(None).order_by(table.c.id))


@fault(stages.outbox, "the sender gets the relay's own event, and its changes leak")
def _sends_the_original() -> Patches:
    yield lanes, "_copied", lambda value: value


@fault(stages.outbox, "an attempt is not counted before the send, so that an event that kills is not counted")
def _attempt_counted_afterwards() -> Patches:
    yield Lanes, "_count", lambda self, event: True
    yield Lanes, "_settle_at_once", lambda self, *_: self._tx.require_several()


@fault(stages.outbox, "the first failure does not stop the batch, and others overtake")
def _failure_does_not_stop() -> Patches:
    def failed(self: Batch, error: BaseException) -> bool:
        event = self._waiting.pop(0)
        kind, text = edge.described(error)
        aside = "attempts used up" if self._used_up(event.attempt) else None
        self._settle(Failure(event, edge.sanitised(f"{kind}: {text}"), aside, event.attempt))
        return True

    yield Batch, "failed", failed


@fault(stages.outbox, "a relay goes on with what it has read although a rival was on the lane")
def _goes_on_after_a_rival() -> Patches:
    settle = Lanes.settle

    def settling(self: Lanes, lease: Any, sent: Any, failure: Any, then: Any, **how: Any) -> Any:
        settled = settle(self, lease, sent, failure, then, **how)
        return replace(settled, goes_on=settled.goes_on or then is not None)

    yield Lanes, "settle", settling


@fault(stages.outbox, "the acknowledgement of an old payload counts for the mended one")
def _old_ack_for_the_mended() -> Patches:
    sound = Lanes._marking

    def marking(self: Lanes, lease: Any, sent: Any, instant: Any) -> Any:
        c = self._table.c
        reading = select(c.seq, c.digest).where(c.seq.in_([event.seq for event in sent]))
        now = {row.seq: row.digest for row in self._tx.execute(reading)}
        return sound(self, lease, [replace(one, digest=now.get(one.seq, "")) for one in sent], instant)

    yield Lanes, "_marking", marking


@fault(
    stages.mended,
    "where one statement marks and reads on, it reads on behind an event that was mended meanwhile",
    occurs=lambda capable: capable.arrays,
)
def _reads_on_behind_the_mended() -> Patches:
    yield lanes, "_is_all", lambda *_: true()
    yield lanes, "_settle", builder(lanes._settle)


@fault(stages.outbox, "a lane is not given back")
def _lane_is_kept() -> Patches:
    yield Lanes, "give_back", lambda *_, **__: None


@fault(stages.outbox, "a relay that died hides the error of the attempt before")
def _error_is_overwritten() -> Patches:
    yield Lanes, "last_words", lambda *_: None


# --- the outbox -----------------------------------------------------------------------------------


@fault(stages.outbox, "another event under an id that is there is taken for the same one")
def _conflicting_event_is_known() -> Patches:
    insert = JoinedOutbox._insert

    def inserting(self: JoinedOutbox, new: Any, now: Any) -> Any:
        return None if (known := insert(self, new, now)) is None else known and new["digest"]

    yield JoinedOutbox, "_insert", inserting


def _requeued(change: Callable[[JoinedOutbox, str], None]) -> Patches:
    requeue = JoinedOutbox.requeue

    def requeuing(self: JoinedOutbox, id: str, **how: Any) -> Any:
        ahead = requeue(self, id, **how)
        if ahead is not None:
            change(self, id)
        return ahead

    yield from _verb(JoinedOutbox, StoreOutbox, "requeue", requeuing)


@fault(stages.outbox, "a requeued event comes back at the end of the order")
def _requeue_at_the_end() -> Patches:
    def move(self: JoinedOutbox, id: str) -> None:
        table = self._table
        last = self._tx.execute(select(func.max(table.c.seq))).scalar_one()
        self._tx.execute(update(table).where(table.c.id == id).values(seq=last + 1000))

    yield from _requeued(move)


@fault(stages.outbox, "a requeued event is sent under another id")
def _requeue_under_another_id() -> Patches:
    def rename(self: JoinedOutbox, id: str) -> None:
        table = self._table
        self._tx.execute(update(table).where(table.c.id == id).values(id=f"{id}-again"))

    yield from _requeued(rename)


@contextmanager
def _kept(self: Store, sound: Any, part: str, verb: str) -> Iterator[UnitOfWork]:
    """`Store.begin` where what this verb wrote stays, although the block breaks."""
    written: list[tuple[Any, Any]] = []
    try:
        with sound(self) as uow:
            call = getattr(getattr(uow, part), verb)

            def calling(*args: Any, **how: Any) -> Any:
                answer = call(*args, **how)
                if answer:
                    written.append((args, how))
                return answer

            setattr(getattr(uow, part), verb, calling)
            yield uow
    except BaseException:
        for args, how in written:
            getattr(getattr(self, part), verb)(*args, **how)
        raise


@fault(stages.outbox, "an event is added in a transaction of its own, and outlives a rollback")
def _event_outlives_the_rollback() -> Patches:
    sound = Store.begin
    yield Store, "begin", lambda self: _kept(self, sound, "outbox", "add")


# --- the inbox ------------------------------------------------------------------------------------


@fault(stages.outbox, "a message is accepted in a transaction of its own, and its effect may never come")
def _effect_outside_the_transaction() -> Patches:
    sound = Store.begin
    yield Store, "begin", lambda self: _kept(self, sound, "inbox", "accept")


@fault(stages.conflicts, "another payload under the same id is a duplicate")
def _conflict_is_a_duplicate() -> Patches:
    accept = JoinedInbox.accept

    def accepting(self: JoinedInbox, *args: Any, **how: Any) -> bool:
        try:
            return accept(self, *args, **how)
        except InboxConflict:
            return False

    yield JoinedInbox, "accept", accepting


@fault(stages.outbox, "a duplicate is new")
def _duplicate_is_new() -> Patches:
    accept = JoinedInbox.accept
    yield JoinedInbox, "accept", lambda *args, **how: accept(*args, **how) or True


@fault(stages.conflicts, "a conflict is not counted")
def _conflict_is_not_counted() -> Patches:
    def recording(self: JoinedInbox, conflict: InboxConflict) -> None:
        pass

    yield from _verb(JoinedInbox, StoreInbox, "record_conflict", recording)


@fault(stages.inbox_races, "the inbox looks for the id, and then inserts what it did not find")
def _check_then_insert() -> Patches:
    accept = JoinedInbox.accept

    def accepting(self: StoreInbox, id: str, payload: Any, *, source: str = "", **how: Any) -> bool:
        def known(tx: Transaction) -> bool:
            c = tx.tables["fenced_inbox"].c
            return tx.execute(select(c.id).where(c.id == id, c.source == source)).first() is not None

        if self._store.run(known, reading=True):
            return False
        self._store.run(lambda tx: accept(JoinedInbox(tx), id, payload, source=source, **how))
        return True

    yield StoreInbox, "accept", accepting


# --- guards ---------------------------------------------------------------------------------------


@fault(stages.guards, "a guard keeps the last fence instead of the highest, and admits a lower one")
def _guard_admits_a_lower_fence() -> Patches:
    def admitting(table: Any, given: bool, upsert: Any, returning: bool) -> Any:
        def last(_: Any, __: Any, changes: Any) -> Any:
            return upsert(table, [table.c.resource], lambda p: {**changes(p), "fence": p.fence})

        return sound(table, given, last, returning)

    sound = builder(guards._admit)
    yield guards, "_admit", admitting


@fault(stages.guards, "a guard refuses a fence that is equal, so that an attempt gets one write only")
def _guard_refuses_an_equal_fence() -> Patches:
    admit = JoinedGuards.admit

    def admitting(self: JoinedGuards, resource: str, fence: int, **how: Any) -> bool:
        return self.highest(resource) != fence and admit(self, resource, fence, **how)

    yield from _verb(JoinedGuards, StoreGuards, "admit", admitting)


# --- COMMIT, clocks, plans ------------------------------------------------------------------------


@fault(stages.unknown, "a transaction is repeated when the answer to its COMMIT was lost")
def _retry_after_unknown_commit() -> Patches:
    run = Transactions.run

    def running(self: Transactions, verb: Any, **how: Any) -> Any:
        try:
            return run(self, verb, **how)
        except OutcomeUnknown:
            return run(self, verb, **how)

    yield Transactions, "run", running


@fault(stages.unknown, "an error of COMMIT is taken for a no, although the answer was lost")
def _lost_answer_is_a_no() -> Patches:
    @contextmanager
    def answered(*_: Any) -> Iterator[None]:
        yield

    yield own, "answered", answered
    yield stores, "answered", answered


@fault(stages.clocks, "the clock of a verb is that of the start of its transaction")
def _now_is_the_start() -> Patches:
    start, now = UnitOfWork.__init__, Transaction.now

    def starting(self: UnitOfWork, *args: Any, **how: Any) -> None:
        start(self, *args, **how)
        vars(self._tx)["start"] = self._tx.clock()

    def reading(self: Transaction, given: float | None) -> float | None:
        return vars(self).get("start", now(self, given)) if given is None else now(self, given)

    yield UnitOfWork, "__init__", starting
    yield Transaction, "now", reading


def _plans_sub_selects_anew(can: Capabilities) -> bool:
    """Only its planner runs a sub-select with LIMIT again for each row."""
    return can.arrays


@fault(stages.plans, "a claim takes what a plain sub-select finds, several times", _plans_sub_selects_anew)
def _plain_sub_select() -> Patches:
    at_once = builder(leases._at_once)
    yield leases, "_at_once", lambda transition, row_locks, arrays: at_once(transition, row_locks, False)
    yield claims, "make", leases._made  # which does not count what came of it
