"""Links in the reference: `Name` in a docstring leads to the public name, where there is one."""

from __future__ import annotations

import re
from typing import Any

import griffe

import fencedjobs

_NAME = re.compile(r"(?<![`\[])`(\w+)`(?!`)")


class CrossReferences(griffe.Extension):
    """Turns names in single backticks into references; what is not a public name stays as it is."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _NAME.sub(_linked, obj.docstring.value)


def _linked(match: re.Match[str]) -> str:
    name = match[1]
    return f"[`{name}`][fencedjobs.{name}]" if name in fencedjobs.__all__ else match[0]
