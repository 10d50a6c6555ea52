"""What a relay does, as lines: for people, or as JSON for programs."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text

from fencedjobs.cli.output import brief, console, exact, iso, safe
from fencedjobs.cli.settings import Settings
from fencedjobs.cli.target import Target
from fencedjobs.cli.trouble import redacted
from fencedjobs.metrics import Observed

_STYLES: Final = {Observed.SENT: "green", Observed.QUARANTINED: "bold red"}


class Watch:
    """An observer of a relay. Sent events go to stdout, everything else to stderr; as JSON all to stdout."""

    def __init__(self, settings: Settings, target: Target, *, verbose: bool) -> None:
        self.target = target
        self.stop: Callable[[], None] = lambda: None  #: what to do when nobody reads any more
        self._settings = settings
        self._out, self._err = console(), console(stderr=True)
        self._tells_sent = verbose or self._out.is_terminal
        self._is_heard = True

    def __call__(self, what: Observed, /, **facts: Any) -> None:
        """One line, without a secret, and without anything that steers the terminal."""
        if "error" in facts:
            facts["error"] = self._clean(facts["error"])
        if self._settings.json:
            self._emit(what.value, facts)
        elif what is not Observed.SENT:
            self._print(self._err, _line(what, facts))
        elif self._tells_sent:
            self._print(self._out, _line(what, facts))

    def say(self, text: str) -> None:
        """A remark for people."""
        if not self._settings.json:
            self._err.print(safe(text), soft_wrap=True)

    def conclude(self, sent: int, *, how: str = "", still: Sequence[str] = ()) -> None:
        """How many were sent, and which lanes have events left. The end, if nobody reads it."""
        if self._is_heard and self._settings.json:
            self._emit("relay.ended", {"sent": sent, "still_pending": list(still)})
        elif self._is_heard:
            self._print(self._out, Text(f"{how}{sent} sent"))
        if still:
            self.say(f"Still pending: {', '.join(still)}.")
        if not self._is_heard:
            raise BrokenPipeError(errno.EPIPE, "nobody reads the output")  # click ends quietly, with 1

    def _clean(self, text: str) -> str:
        return redacted(self.target.without_secrets(text), self._settings.chosen_url())

    def _emit(self, event: str, facts: dict[str, Any]) -> None:
        line = json.dumps({"at": exact(time.time()), "event": event, **facts})
        self._heard(lambda: click.echo(line))

    def _print(self, to: Console, line: Text) -> None:
        self._heard(lambda: to.print(line, soft_wrap=True))

    def _heard(self, write: Callable[[], None]) -> None:
        """Write; a reader that is gone ends the relay, and not the batch in its midst."""
        try:
            if self._is_heard:
                write()
        except BrokenPipeError:
            self._is_heard = False
            self.stop()


def _line(what: Observed, facts: dict[str, Any]) -> Text:
    head = f"{iso(time.time())}  {safe(facts['lane'])}  "
    return Text(head + safe(_told(what, facts)), style=_STYLES.get(what, "yellow"))


def _told(what: Observed, facts: dict[str, Any]) -> str:
    match what:
        case Observed.SENT:
            again = f", attempt {facts['attempt']}" if facts["attempt"] > 1 else ""
            return f"sent {facts['id']} (fence {facts['fence']}{again})"
        case Observed.FAILED:
            return f"FAILED {facts['id']} (attempt {facts['attempt']}): {brief(facts['error'])}"
        case Observed.QUARANTINED:
            return f"QUARANTINED {facts['id']} after {facts['attempt']} attempts: {brief(facts['error'])}"
        case Observed.LANE_LOST:
            return "another relay has taken the lane"
        case Observed.TROUBLE:
            return f"TROUBLE: {_first_line(facts['error'])}"
        case _:
            return what.value


def _first_line(error: str) -> str:
    """Of an error as `repr` shows it. SQLAlchemy's have the statement and its parameters behind that."""
    return error.partition("\\n")[0]
