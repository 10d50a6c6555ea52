"""What a verb returns is plain: usable after the engine is gone, in another thread. FAULTS 84."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fencedjobs import JobLease
from tests.databases import ASYNC_DRIVERS, BACKENDS, Database
from tests.hosts import Host, hosted, on

pytestmark = on(*BACKENDS, drivers=(None, *ASYNC_DRIVERS))


@pytest.fixture
def host(database: Database, driver: str | None) -> Iterator[Host]:
    with hosted(database, driver) as host:
        yield host


def test_values_outlive_their_session_and_engine(host: Host) -> None:
    store = host.store
    store.enqueue("j", {"deep": [1, {"er": "é"}]}, deadline=4e9)
    leases = store.claim_many("w", ttl=60, limit=5)
    renewed = store.renew(leases[0], ttl=90)
    lock = store.locks.claim("l", ttl=60)
    with store.completing(renewed, {"ok": True}) as uow:
        inside = uow.jobs.get("j")
    record, counts = store.get("j"), store.counts()
    if host.async_engine is None:
        host.engine.dispose()
    else:
        assert host.runner is not None
        host.runner.run(host.async_engine.dispose())
    values = [leases, renewed, lock, inside, record, counts]
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(lambda: [repr(values), pickle.loads(pickle.dumps(values)) == values]).result()
    assert told == [repr(values), True]
    assert isinstance(renewed, JobLease)
    assert renewed.payload == {"deep": [1, {"er": "é"}]}
    assert hash(renewed) == hash(renewed)
