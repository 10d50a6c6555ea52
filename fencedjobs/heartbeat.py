"""The heartbeat: renews every lease in hand, on a thread and a connection of its own."""

from __future__ import annotations

from contextlib import suppress
from threading import Event
from typing import Final

from fencedjobs.attempt import Attempt, InHand, clock
from fencedjobs.line import Line
from fencedjobs.metrics import Observed, Observer

BEATS: Final = 3  # in the time of one lease
MARGIN: Final = 10  # the part of a lease in which it counts as lost if it could not be renewed


class Heartbeat:
    """Renews the leases in one statement, three times in ``ttl`` seconds.

    A renewal that the database refuses is the end of that lease. One that fails is tried again; what
    then comes close to its end without an answer is given up by `overlooked`, which any thread may
    call, since this one may be waiting for the database.
    """

    def __init__(self, in_hand: InHand, ttl: float, observe: Observer) -> None:
        self._in_hand = in_hand
        self._ttl = ttl
        self._observe = observe
        self._stopped = Event()
        self._failures = 0

    def stop(self) -> None:
        """Return from `run`."""
        self._stopped.set()

    def run(self, line: Line) -> None:
        """Renew until `stop`."""
        with suppress(Exception):  # what keeps it from connecting will be told with the first beat
            line.call(
                lambda store: store.run(lambda tx: None, reading=True)
            )  # the first beat need not connect
        pause = self._ttl / BEATS
        while not self._stopped.wait(pause):
            pause = self._beat(line)

    def _beat(self, line: Line) -> float:
        """Renew what is in hand; the seconds until the next time."""
        attempts = [attempt for attempt in self._in_hand.all() if attempt.is_renewed]
        sent = clock()
        if attempts:
            try:
                self._renew(line, attempts, sent)
            except Exception as error:  # noqa: BLE001 - whatever the database raises: beat again, sooner
                self._failures += 1
                self._observe(Observed.WORKER_TROUBLE, part="heartbeat", error=repr(error))
                return min(self._ttl / BEATS, self._ttl / 30 * self._failures)
            self._failures = 0
        return max(0.0, sent + self._ttl / BEATS - clock())

    def _renew(self, line: Line, attempts: list[Attempt], sent: float) -> None:
        leases = [attempt.lease for attempt in attempts]
        renewed = line.call(lambda store: store.renew_many(leases, ttl=self._ttl, wait=False))
        for attempt, before, lease in zip(attempts, leases, renewed, strict=True):
            if lease is before:
                continue  # somebody has locked its row; the others do not wait for that
            if lease is not None:
                attempt.renewed(lease, sent + self._ttl)
            elif not attempt.committing:  # else the answer to the completion tells
                self.give_up(attempt, "its renewal was refused")

    def overlooked(self) -> float:
        """Give up what was not renewed in time; when the next one will be, by the local clock."""
        soonest = float("inf")
        for attempt in self._in_hand.all():
            if not attempt.is_renewed:
                continue
            last = attempt.ends - self._ttl / MARGIN
            if last > clock():
                soonest = min(soonest, last)
            elif not attempt.committing:
                self.give_up(attempt, "it was not renewed in time")
        return soonest

    def give_up(self, attempt: Attempt, why: str) -> None:
        """Tell the handler that its lease is lost."""
        if attempt.lose():
            self._observe(Observed.LOST, **attempt.facts(), seconds=attempt.seconds, why=why)
