"""Connections: the worker has its own, whatever handlers do to the pool of the application."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import NullPool, text

from fencedjobs import InvalidValue
from tests.worker.helpers import Workers, transaction


@pytest.mark.realtime
def test_leases_are_renewed_while_a_handler_has_the_only_connection(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")

    async def holds(ctx: Any) -> None:
        async with transaction(ctx) as execute:
            await execute(text("SELECT 1"))
            time.sleep(4.0)

    if workers.database.backend == "sqlite":
        pytest.skip("a transaction must fit into the lease there")
    pool = {"pool_size": 1, "max_overflow": 0}
    assert workers.run({"k": holds}, ttl=0.8, concurrency=1, pool=pool) == 1
    assert workers.records()["a"].fence == 1
    assert "job.lost" not in workers.seen.names


def test_a_pool_that_is_too_small_is_refused_at_the_start(workers: Workers) -> None:
    workers.store.enqueue("a", kind="k")
    with pytest.raises(InvalidValue, match=r"5 handlers .* gives 4: give it a larger pool_size"):
        workers.run({"k": lambda ctx: None}, concurrency=5, pool={"pool_size": 3, "max_overflow": 1})
    assert workers.states() == {"a": "ready"}
    assert workers.run({"k": lambda ctx: None}, concurrency=4, pool={"pool_size": 3, "max_overflow": 1}) == 1


@pytest.mark.parametrize(
    "pool", [{"poolclass": NullPool}, {"pool_size": 0}, {"max_overflow": -1}], ids=["null", "endless", "open"]
)
def test_a_pool_without_a_limit_is_large_enough(workers: Workers, pool: dict[str, Any]) -> None:
    for n in range(4):
        workers.store.enqueue(f"{n}", kind="k")

    async def works(ctx: Any) -> None:
        async with transaction(ctx):
            pass

    assert workers.run({"k": works}, concurrency=40, pool=pool) == 4
