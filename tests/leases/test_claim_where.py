"""``store.leases(Model).claim_where``: several rows of the host's own, by its own condition and order."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, and_, event, func, select, text, true
from sqlalchemy.orm import Session, aliased

from fencedjobs import Lease, Store
from fencedjobs import store as store_module
from fencedjobs.values import LeaseRecord
from tests.databases import Database
from tests.jobs.helpers import T, just_before, on, refused
from tests.jobs.test_races import by_eight
from tests.leases.host import Invoice, Line, Order, Parcel, host_tables

OPEN = Invoice.paid == 0
EVERY = true()


def key(number: int) -> UUID:
    """The key of the invoice of this number; keys and numbers are not in one order."""
    return UUID(int=(number * 7) % 101 + 1)


def numbers(leases: list[Lease]) -> list[int]:
    known = {key(number): number for number in range(60)}
    return [known[lease.id] for lease in leases]


def fill(engine: Engine, count: int, *, start: int = 0) -> None:
    """Invoices whose ``due`` comes in pairs, the later numbers first."""
    with Session(engine) as session:
        session.add_all(
            Invoice(id=key(n), number=n, due=(count - 1 - n) // 2, paid=0)
            for n in range(start, start + count)
        )
        session.commit()


@pytest.fixture
def invoices(engine: Engine) -> Iterator[Engine]:
    with host_tables(engine):
        fill(engine, 6)
        yield engine
        engine.dispose()


def test_it_takes_the_first_of_what_matches_in_the_order_that_is_asked_for(
    invoices: Engine, store: Store
) -> None:
    leases = store.leases(Invoice, open=OPEN)
    taken = leases.claim_where(Invoice.number != 4, owner="a", order_by=Invoice.due, limit=3, ttl=30, now=T)
    by_key = sorted((2, 3), key=lambda number: key(number).hex)
    assert numbers(taken) == [5, *by_key]
    assert [(one.owner, one.fence, one.until) for one in taken] == [("a", 1, T + 30)] * 3
    assert [leases.get(one.id) for one in taken] == [LeaseRecord(one.id, "a", 1, T + 30) for one in taken]
    order = [Invoice.due.desc(), Invoice.number.desc()]
    taken = leases.claim_where(EVERY, owner="b", order_by=order, limit=9, ttl=30, now=T)
    assert numbers(taken) == [1, 0, 4], "what is left, and no lease that is live"
    assert leases.claim_where(EVERY, owner="b", limit=9, ttl=30, now=T) == []


def test_without_an_order_it_is_that_of_the_key(invoices: Engine, store: Store) -> None:
    taken = store.leases(Invoice).claim_where(Invoice.due >= 0, limit=9, ttl=30, now=T)
    assert [lease.id for lease in taken] == sorted(map(key, range(6)), key=lambda one: one.hex)
    assert {lease.owner for lease in taken} == {store.owner}


def test_a_lease_is_free_at_its_very_end_and_its_fence_rises(invoices: Engine, store: Store) -> None:
    leases = store.leases(Invoice)
    first = leases.claim_where(Invoice.number < 3, order_by=Invoice.number, limit=9, ttl=30, now=T)
    assert leases.claim_where(Invoice.number < 3, limit=9, ttl=30, now=just_before(T + 30)) == []
    leases.release(first[0])
    again = leases.claim_where(EVERY, order_by=Invoice.number, limit=4, ttl=30, now=T + 30)
    assert [(n, one.fence) for n, one in zip(numbers(again), again, strict=True)] == [
        (0, 2), (1, 2), (2, 2), (3, 1)
    ]  # fmt: skip
    assert leases.check(first[1], now=T) is False


def test_the_order_may_be_that_of_the_lease_itself(invoices: Engine, sync_store: Store) -> None:
    """What is written must not change the order of what is returned."""
    leases = sync_store.leases(Invoice)
    for turn, number in enumerate((3, 0, 5)):
        leases.claim_where(Invoice.number == number, limit=1, ttl=1 + turn, now=T)
    taken = leases.claim_where(
        Invoice.owner.is_not(None), order_by=Invoice.until.desc(), limit=9, ttl=30, now=T + 9
    )
    assert numbers(taken) == [5, 0, 3]


def test_what_is_not_open_is_not_taken(invoices: Engine, store: Store) -> None:
    leases = store.leases(Invoice, open=OPEN)
    one = leases.claim_where(EVERY, order_by=Invoice.number, limit=1, ttl=30, now=T)[0]
    leases.settle(one, now=T, paid=1)
    assert numbers(leases.claim_where(EVERY, order_by=Invoice.number, limit=2, ttl=30, now=T)) == [1, 2]


def test_conditions_of_several_kinds(invoices: Engine, sync_store: Store) -> None:
    leases = sync_store.leases(Invoice)
    conditions: list[tuple[Any, list[int]]] = [
        (and_(Invoice.number > 0, Invoice.number < 2), [1]),
        (Invoice.id.in_([key(2), key(3)]), [2, 3]),
        (Invoice.id == select(func.max(Invoice.id)).scalar_subquery(), []),
        (Invoice.id.in_(select(Line.invoice)), [4]),
        (text("number = 5"), [5]),
        (Invoice.__table__.c.number == 0, [0]),
    ]
    with Session(invoices) as session:
        session.add(Line(id=1, invoice=key(4)))
        session.commit()
    for condition, expected in conditions:
        if expected:
            taken = leases.claim_where(condition, order_by=Invoice.number, limit=9, ttl=30, now=T)
            assert numbers(taken) == expected, str(condition)


def test_a_text_may_be_the_key(invoices: Engine, store: Store) -> None:
    with Session(invoices) as session:
        session.add_all([Parcel(code=code) for code in ("b", "a", "c")])
        session.commit()
    taken = store.leases(Parcel).claim_where(Parcel.code != "b", limit=9, ttl=30, now=T)
    assert [lease.id for lease in taken] == ["a", "c"]


def test_by_the_clock_of_the_database(invoices: Engine, store: Store) -> None:
    leases = store.leases(Invoice)
    taken = leases.claim_where(EVERY, owner="a", limit=4, ttl=600)
    assert len(taken) == 4
    assert [leases.renew(lease, ttl=900).fence for lease in taken] == [1] * 4
    assert len(leases.claim_where(EVERY, owner="b", limit=1000, ttl=600)) == 2


def test_bad_input_is_refused_before_anything_is_written(invoices: Engine, sync_store: Store) -> None:
    leases = sync_store.leases(Invoice)
    good: dict[str, Any] = {"limit": 1, "ttl": 1, "now": T}
    for limit in (0, -1, 1001, 1.0, True, "1", None):
        refused("limit", leases.claim_where, EVERY, **good | {"limit": limit})
    for ttl in (0, -1, math.nan, math.inf):
        refused("ttl", leases.claim_where, EVERY, **good | {"ttl": ttl})
    for condition in (None, True, False, "number = 1", 7, Invoice, Order.id == 1, aliased(Invoice).due == 1):
        refused("condition", leases.claim_where, condition, **good)
    for order in ("due", Order.id, [Invoice.due, Order.id], [None], aliased(Invoice).due):
        refused("order_by", leases.claim_where, EVERY, **good | {"order_by": order})
    refused("owner", leases.claim_where, EVERY, owner="x" * 256, **good)
    refused("now", leases.claim_where, EVERY, **good | {"now": math.nan})
    refused("open", sync_store.leases, Invoice, open=True)
    refused("open", sync_store.leases, Invoice, open=Order.done == 0)
    assert [leases.get(key(n)) for n in range(6)] == [LeaseRecord(key(n), None, 0, 0.0) for n in range(6)]


def test_it_is_not_offered_in_the_caller_s_transaction(invoices: Engine, sync_store: Store) -> None:
    with sync_store.begin() as uow:
        assert not hasattr(uow.leases(Invoice), "claim_where")


# --- others at the same time ----------------------------------------------------------------------


@pytest.fixture
def crowd(database: Database) -> Iterator[Store]:
    """A store with a connection for each of eight threads."""
    engine = database.engine(pool_size=8)
    with host_tables(engine):
        store = Store(engine)
        store.counts()
        yield store
    engine.dispose()


def engine_of(store: Store) -> Engine:
    return store.transactions.engine


def test_eight_claimers_of_forty_rows_get_each_row_once(crowd: Store) -> None:
    fill(engine_of(crowd), 40)
    leases = crowd.leases(Invoice, open=OPEN)
    for turn, limit in enumerate((3, 7)):

        def until_empty(n: int, limit: int = limit, turn: int = turn) -> list[Lease]:
            taken: list[Lease] = []
            order = Invoice.due if n % 2 else Invoice.number.desc()
            while some := leases.claim_where(
                Invoice.number >= 0, owner=f"w{n}", order_by=order, limit=limit, ttl=9, now=T + 9 * turn
            ):
                assert len(some) <= limit
                taken += some
            return taken

        taken = list(chain.from_iterable(by_eight(until_empty)))
        assert Counter(numbers(taken)) == Counter(range(40)), "each exactly once, and none left"
        assert {lease.fence for lease in taken} == {turn + 1}
        for lease in taken:
            assert leases.get(lease.id) == LeaseRecord(lease.id, lease.owner, turn + 1, T + 9 * turn + 9)


def test_an_empty_answer_is_not_somebody_in_the_way(crowd: Store) -> None:
    """As many rows as claimers: each gets one, whoever has locked what at that moment."""
    fill(engine_of(crowd), 8)
    leases = crowd.leases(Invoice)
    for turn in range(3):
        answers = by_eight(
            lambda n, turn=turn: leases.claim_where(
                EVERY, owner=f"w{n}", order_by=Invoice.due, limit=1, ttl=9, now=T + 9 * turn
            )
        )
        assert sorted(numbers(list(chain.from_iterable(answers)))) == list(range(8)), answers


def test_one_row_is_claimed_by_its_key_and_by_a_condition_at_once(crowd: Store) -> None:
    fill(engine_of(crowd), 1)
    leases = crowd.leases(Invoice)
    for turn in range(6):
        now = T + 9 * turn

        def claim(n: int, now: float = now) -> list[Lease]:
            if n % 2:
                return leases.claim_where(Invoice.number == 0, owner=f"w{n}", limit=5, ttl=9, now=now)
            lease = leases.claim(key(0), f"w{n}", ttl=9, now=now)
            return [] if lease is None else [lease]

        won = list(chain.from_iterable(by_eight(claim)))
        assert [lease.fence for lease in won] == [turn + 1], won


@on("postgresql", "mariadb")
def test_a_row_that_somebody_has_locked_is_passed_by(crowd: Store) -> None:
    fill(engine_of(crowd), 6)
    leases = crowd.leases(Invoice)
    with Session(engine_of(crowd)) as other:
        other.execute(select(Invoice).where(Invoice.id.in_([key(4), key(5)])).with_for_update())
        taken = leases.claim_where(Invoice.due == 0, limit=9, ttl=30, now=T)
        assert numbers(taken) == [], "both are locked, which it has waited a moment for"
        taken = leases.claim_where(Invoice.due <= 1, order_by=Invoice.due, limit=1, ttl=30, now=T)
        assert numbers(taken)[0] in (2, 3)
    assert sorted(numbers(leases.claim_where(Invoice.due == 0, limit=9, ttl=30, now=T))) == [4, 5]


@on("postgresql", "mariadb")
def test_it_looks_again_for_what_others_hold_at_this_moment(
    crowd: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_CLAIM_PATIENCE", 10.0)
    fill(engine_of(crowd), 2)
    with Session(engine_of(crowd)) as other, ThreadPoolExecutor(1) as thread:
        other.execute(select(Invoice).with_for_update()).all()
        taking = thread.submit(crowd.leases(Invoice).claim_where, EVERY, limit=9, ttl=30, now=T)
        time.sleep(0.1)
        other.rollback()
        assert len(taking.result(20)) == 2


@on("postgresql")
def test_who_refers_to_a_row_is_not_in_the_way(crowd: Store) -> None:
    """A foreign key to a row locks its key alone, and a claim changes no key."""
    fill(engine_of(crowd), 2)
    with Session(engine_of(crowd)) as other:
        other.add(Line(id=1, invoice=key(0)))
        other.flush()
        taken = crowd.leases(Invoice).claim_where(EVERY, order_by=Invoice.number, limit=9, ttl=30, now=T)
        assert numbers(taken) == [0, 1]


def test_the_limit_holds_whatever_the_planner_does(crowd: Store) -> None:
    """A plain sub-select with LIMIT was run again for each row, and took more than the limit."""
    engine = engine_of(crowd)
    fill(engine, 40)
    statements: list[str] = []
    leases = crowd.leases(Invoice)

    def harder(connection: Any) -> None:
        for name in ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_indexscan"):
            connection.exec_driver_sql(f"SET LOCAL {name} = off")

    if engine.dialect.name == "postgresql":
        event.listen(engine, "begin", harder)
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    seen: list[Callable[[], Any]] = [
        lambda: Invoice.number >= 0,
        lambda: Invoice.id.in_(select(Invoice.id).where(Invoice.paid == 0)),
        lambda: Invoice.id.not_in(select(Line.invoice)),
    ]
    got = [
        len(leases.claim_where(condition(), order_by=Invoice.due, limit=5, ttl=30, now=T))
        for condition in seen
    ]
    assert got == [5, 5, 5]
    picks = [one for one in statements if "LIMIT" in one and "UPDATE" in one.upper()]
    assert all(one.lstrip().startswith("SELECT") for one in picks), "it is never a part of the UPDATE"


def test_a_store_remembers_no_statement_of_a_caller_s_condition(invoices: Engine, sync_store: Store) -> None:
    from fencedjobs import leases as core

    claims = sync_store.leases(Invoice)
    claims.claim_where(Invoice.number == 0, limit=1, ttl=1, now=T)
    before = (core._steps.cache_info(), core._at_once.cache_info())  # type: ignore[attr-defined]
    for number in range(5):
        claims.claim_where(Invoice.number == number, limit=1, ttl=1, now=T)
    assert (core._steps.cache_info(), core._at_once.cache_info()) == before  # type: ignore[attr-defined]
