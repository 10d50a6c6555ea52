"""Links in the reference: `Name` in a docstring leads to where that name is explained, if it is."""

from __future__ import annotations

import re
from typing import Any

import griffe

import fencedjobs

#: Names that docstrings use, beside those that the package exports.
_HOMES = {
    "AsyncRelay": "aio_relay.AsyncRelay",
    "JoinedGuards": "guards.JoinedGuards",
    "JoinedInbox": "inbox.JoinedInbox",
    "JoinedJobs": "jobs.JoinedJobs",
    "JoinedOutbox": "outbox.JoinedOutbox",
    "Relay": "relay.Relay",
    "RelayBase": "relay.RelayBase",
    "WorkerBase": "worker.WorkerBase",
    "dispatch": "relay.dispatch",
    **{name: name for name in fencedjobs.__all__},
}
_NAME = re.compile(r"(?<![`\[])`(\w+)`(?!`)")


class CrossReferences(griffe.Extension):
    """Turns names in single backticks into references; other names stay as they are."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _NAME.sub(_linked, obj.docstring.value)


def _linked(match: re.Match[str]) -> str:
    home = _HOMES.get(match[1])
    return match[0] if home is None else f"[`{match[1]}`][fencedjobs.{home}]"
