"""Rows that go into the database as parameters of one statement arrive as they were given."""

from __future__ import annotations

import json
import math
from itertools import count
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fencedjobs import Store
from fencedjobs.enqueue import BULK, new_id, portions
from fencedjobs.payload import MAX_BYTES
from fencedjobs.rows import JsonEach
from tests.jobs.helpers import T

words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
instants = st.floats(allow_nan=False, allow_infinity=False)
items = st.fixed_dictionaries(
    {
        "payload": values,
        "kind": words,
        "key": st.none() | words.filter(bool),
        "priority": st.integers(-(2**31), 2**31 - 1),
        "max_attempts": st.integers(1, 2**63 - 1),
        "deadline": st.none() | instants,
    },
    optional={"run_at": instants},
)
odd = ["😀", "\\u0041", "q\"u'o", "\t\r\n", "é\u2028", " a ", "%s %(x)s", "\x7f\x01", "\\", "null", "1"]
_numbers = count()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([{"run_at": T}, {"run_at": math.nextafter(T, 0)}, {"deadline": 5e-324}, {"deadline": None}])
@example([{"payload": word, "kind": word, "key": word} for word in odd])
@example([{"deadline": edge} for edge in (2.0**63, math.nextafter(2.0**63, 0), -(2.0**63), 2.0**-62, 1e308)])
@given(st.lists(items, min_size=1, max_size=5))
def test_every_value_reads_back_equal(sync_store: Store, rows: list[dict[str, Any]]) -> None:
    named = [{"id": f"{next(_numbers)} {row.get('kind', '')}", **row} for row in rows]
    assert sync_store.enqueue_many(named, now=T) == [row["id"] for row in named]
    for row in named:
        record = sync_store.get(row["id"])
        assert record is not None
        for name in ("payload", "kind", "key", "priority", "max_attempts", "deadline"):
            assert getattr(record, name) == row.get(name, getattr(record, name)), name
        assert record.until == row.get("run_at", 0.0)


def test_results_of_many_arrive_each_at_its_job(sync_store: Store) -> None:
    ids = sync_store.enqueue_many([{} for _ in odd], now=T)
    leases = sync_store.claim_many("w", ttl=9, limit=len(odd), now=T)
    results: list[Any] = [word if n % 3 else None for n, word in enumerate(odd)]
    assert sync_store.complete_many(leases, results, now=T) == []
    assert [lease.id for lease in leases] == ids
    records = [sync_store.get(id) for id in ids]
    assert [record and record.result for record in records] == results


def test_more_text_than_a_packet_holds_is_added_all_the_same(sync_store: Store) -> None:
    """A packet of MariaDB has 16 MiB, and each of these quotes takes eight bytes in a statement."""
    payload = '"' * (MAX_BYTES // 2 - 9)
    ids = sync_store.enqueue_many([{"payload": f"{payload}{n}"} for n in range(9)], now=T)
    assert len(ids) == 9
    record = sync_store.get(ids[-1])
    assert record is not None
    assert record.payload == f"{payload}8"


def test_a_statement_takes_so_many_rows_and_so_much_text() -> None:
    def sizes(*lengths: int) -> list[int]:
        return [len(some) for some in portions([{"new_payload": "x" * length} for length in lengths])]

    assert sizes() == []
    assert sizes(*[9] * (2 * BULK + 1)) == [BULK, BULK, 1]
    assert sizes(MAX_BYTES, 1, MAX_BYTES - 1, 1) == [1, 2, 1]


def test_made_ids_are_uuid7_of_this_moment_and_all_different() -> None:
    made = [new_id() for _ in range(10_000)]
    assert len(set(made)) == len(made)
    assert {id[14] for id in made} == {"7"}
    assert {id[19] for id in made} == set("89ab")
    assert [id[:13] for id in made] == sorted(id[:13] for id in made)


def test_sqlite_is_given_doubles_as_quotients() -> None:
    """Not every version reads more than 15 digits of a decimal text."""
    (text,) = JsonEach().parameters({"until": [T + 0.1, None, 1e300]}).values()
    (quotient,), (nothing,), (decimal,) = json.loads(text)
    assert quotient[0] / quotient[1] == T + 0.1
    assert (nothing, decimal) == (None, 1e300)
