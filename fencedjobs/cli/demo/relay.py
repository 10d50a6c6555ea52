"""A relay, which sends the outbox to the warehouse by HTTP.

Told so, it dies right after an acknowledgement, by the system's exit: no cleaning up, no mark.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import create_engine

from fencedjobs.cli.demo.child import Commands, tell
from fencedjobs.cli.demo.stage import DIES_WITH, Stage
from fencedjobs.errors import NotAcknowledged
from fencedjobs.relay import dispatch
from fencedjobs.senders.http import HttpSender
from fencedjobs.store import Store
from fencedjobs.values import Event

_TIMEOUT: Final = 25.0  # seconds; below the patience of the parent, however busy the machine is


class Carrier:
    """Sends what is pending, and tells each step."""

    def __init__(self, stage: Stage, to: str, ttl: float) -> None:
        self.lane = stage.lane
        self.store = Store(create_engine(stage.url), schema=stage.schema)
        self._sender = HttpSender(to, timeout=_TIMEOUT)
        self._ttl = ttl

    def send(self, event: Event) -> bool:
        """`HttpSender`, with a line before and after.

        The demo waits for the end of a lease that is shorter than the sender's time-out, which a relay
        would refuse; a send that outlasts it makes it claim the lane again.
        """
        about = {"order": event.payload["order"], "fence": event.fence, "attempt": event.attempt}
        tell("sending", **about)
        try:
            acknowledged = self._sender(event)
        except NotAcknowledged as error:
            tell("failed", **about, why=str(error.answer))
            raise
        tell("acknowledged", **about)
        return acknowledged

    def send_all(self, after_delivery: Callable[[Event], Any] | None, commands: Commands) -> None:
        """Batch after batch, until nothing is pending; after a failure it waits to be told."""
        waits = False
        while self.store.outbox.pending(1, self.lane):
            try:
                sent = dispatch(
                    self.store, self.send, lane=self.lane, ttl=self._ttl, after_delivery=after_delivery
                )
            except NotAcknowledged:
                commands.get()
                continue
            if not sent:  # another relay has the lane
                if not waits:
                    tell("nothing")
                waits = True
                time.sleep(0.02)


def die(event: Event) -> None:
    """The hook after a delivery, of a relay that shall not live to mark it."""
    os._exit(DIES_WITH)


def play(commands: Commands, *, stage: dict[str, Any], to: str, ttl: float, dies: bool) -> None:
    """Get ready, send when told to, tell that it is over."""
    carrier = Carrier(Stage(**stage), to, ttl)
    carrier.store.outbox.pending(1, carrier.lane)  # connects, before any lease is counted
    tell("ready")
    commands.get()
    carrier.send_all(die if dies else None, commands)
    tell("finished")
