"""Pages of the documentation as those follow them who read them: their code, files, changes and commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import ROOT
from tests.docs.blocks import blocks as parsed

_NAME = re.compile(r"# ([\w./-]+)\n")
_CHANGES = re.compile(r"--- (\S+)\n\+\+\+ \1\n")
_HUNK = re.compile(r"^@@.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Fenced code of a page: its language, and what stands in it."""

    language: str
    text: str

    @property
    def file(self) -> tuple[str, str] | None:
        """The file that it is, if its first line is a comment with a name, and the rest of it."""
        named = _NAME.match(self.text)
        return (named[1], self.text[named.end() :]) if named else None

    def changed(self, folder: Path) -> None:
        """Apply it as a change of a file: what is removed or stays must be there, and only once."""
        header = _CHANGES.match(self.text)
        assert header, f"whose change is this?\n{self.text}"
        path = folder / header[1]
        text = path.read_text()
        for hunk in _HUNK.split(self.text[header.end() :])[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] or line for line in lines if line[0] in " -\n")
            new = "".join(line[1:] or line for line in lines if line[0] in " +\n")
            assert text.count(old) == 1, f"{path} has this {text.count(old)} times:\n{old}"
            text = text.replace(old, new)
        path.write_text(text)


def blocks(page: str) -> list[Block]:
    """The fenced code of a page in ``docs``, in order."""
    return [Block(block.language, f"{block.text}\n") for block in parsed(ROOT / "docs" / page)]
