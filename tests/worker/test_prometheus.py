"""What a worker and a relay do, as Prometheus metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import Engine

from fencedjobs import Maintenance, Quarantine, Store
from fencedjobs.prometheus import PrometheusObserver
from fencedjobs.relay import Relay
from fencedjobs.worker import Worker
from tests.worker.helpers import AT_ONCE, Workers

ON_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def of_job(event: str) -> dict[str, str]:
    return {"event": event, "queue": "default", "kind": "k", "lane": ""}


def test_jobs_are_counted_and_timed(workers: Workers) -> None:
    registry = CollectorRegistry()
    workers.store.enqueue_many([{"id": f"j{n}", "kind": "k"} for n in range(3)])

    async def sometimes(ctx: Any) -> None:
        if ctx.id == "j1" and ctx.attempt == 1:
            raise ValueError("once")
        if ctx.id == "j2":
            raise Quarantine("never")

    workers.run({"k": sometimes}, observe=PrometheusObserver(registry, log=False))
    counted = {
        name: value(registry, "fencedjobs_events_total", **of_job(name))
        for name in ("job.claimed", "job.completed", "job.retried", "job.quarantined", "job.lost")
    }
    assert counted == {
        "job.claimed": 4, "job.completed": 2, "job.retried": 1, "job.quarantined": 1, "job.lost": None,
    }  # fmt: skip
    labels = {"queue": "default", "kind": "k"}
    assert value(registry, "fencedjobs_handler_seconds_count", **labels) == 4
    assert value(registry, "fencedjobs_waited_seconds_count", **labels) == 4
    assert value(registry, "fencedjobs_lease_remaining_seconds_count", **labels) == 2


@ON_SQLITE
def test_the_oldest_waiting_job_is_a_gauge(engine: Engine) -> None:
    registry, store = CollectorRegistry(), Store(engine)
    store.enqueue("old", kind="nobody's", now=store.now() - 100)
    observe = PrometheusObserver(registry, log=False)
    worker = Worker(store, observe=observe, maintenance=Maintenance(), poll=0.05)

    @worker.handler("k")
    def stops(ctx: Any) -> None:
        while value(registry, "fencedjobs_oldest_waiting_seconds", queue="default") is None:
            ctx.lost.wait(0.01)

    store.enqueue("a", kind="k")
    worker.run(until_empty=True)
    waited = value(registry, "fencedjobs_oldest_waiting_seconds", queue="default")
    assert waited == pytest.approx(100, abs=30)


@ON_SQLITE
def test_a_relay_is_counted_too(engine: Engine) -> None:
    registry, store = CollectorRegistry(), Store(engine)
    store.outbox.add("e1", 1, topic="t")
    store.outbox.add("e2", 2, topic="t")
    observe = PrometheusObserver(registry)
    relay = Relay(store, lambda event: event.id == "e1", observe=observe, max_attempts=1, retry=AT_ONCE)
    relay.run(until_empty=True)
    lane = {"queue": "", "kind": "", "lane": "default"}
    assert value(registry, "fencedjobs_events_total", event="relay.sent", **lane) == 1
    assert value(registry, "fencedjobs_events_total", event="relay.quarantined", **lane) == 1
    assert b"fencedjobs_handler_seconds" in generate_latest(registry)
