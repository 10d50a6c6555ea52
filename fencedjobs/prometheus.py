"""What is observed, as Prometheus metrics (extra ``prometheus``)."""

from __future__ import annotations

from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from fencedjobs.metrics import Observed, logged

_JOB: Final = ("queue", "kind")
_SECONDS: Final = (0.005, 0.025, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, float("inf"))


class PrometheusObserver:
    """An observer that counts, for ``Worker(…, observe=PrometheusObserver())`` and for relays.

    One is enough for a process: names are registered once in a ``registry``. What it counts is logged
    as well, unless ``log`` is false. How metrics are served is the app's matter, as with
    ``prometheus_client.start_http_server``.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, log: bool = True) -> None:
        self._log = log
        self._events = Counter(
            "fencedjobs_events",
            "What happened, by its stable name.",
            ("event", *_JOB, "lane"),
            registry=registry,
        )
        self._trouble = Counter(
            "fencedjobs_trouble", "Failures of a worker's part, or of a lane.", ("part",), registry=registry
        )
        self._histograms = {
            "seconds": self._histogram("handler_seconds", "How long handlers ran.", registry),
            "waited": self._histogram(
                "waited_seconds", "From when a job could be claimed to its claim.", registry
            ),
            "remaining": self._histogram(
                "lease_remaining_seconds", "What was left of the lease at the completion.", registry
            ),
        }
        self._oldest = Gauge(
            "fencedjobs_oldest_waiting_seconds",
            "The longest wait for a claim now.",
            ("queue",),
            registry=registry,
        )

    @staticmethod
    def _histogram(name: str, about: str, registry: CollectorRegistry) -> Histogram:
        return Histogram(f"fencedjobs_{name}", about, _JOB, buckets=_SECONDS, registry=registry)

    def __call__(self, what: Observed, /, **facts: Any) -> None:
        """Count it, and log it."""
        if what is Observed.OLDEST:
            self._oldest.labels(facts["queue"]).set(facts["waited"])
        elif what in (Observed.WORKER_TROUBLE, Observed.TROUBLE):
            self._trouble.labels(facts.get("part", "relay")).inc()
        else:
            job = [str(facts.get(name, "")) for name in _JOB]
            self._events.labels(what.value, *job, str(facts.get("lane", ""))).inc()
            for name, histogram in self._histograms.items():
                if name in facts and (name != "seconds" or "remaining" in facts or "error" in facts):
                    histogram.labels(*job).observe(facts[name])
        if self._log:
            logged(what, **facts)
