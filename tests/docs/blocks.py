"""The fenced blocks of a page of Markdown, and how one of Python is run."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).parents[2]

_OPEN = re.compile(r"^( *)(`{3,}|~{3,}) *(\S*)")
_MARK = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, in which language, and why it is not run if the page says so."""

    page: str
    line: int  #: of its first line of text, from 1
    language: str
    text: str
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """README.md and the pages of the docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in its order."""
    return [*_blocks(name_of(page), page.read_text())]


def _blocks(page: str, text: str) -> Iterator[Block]:
    lines = iter(enumerate(text.splitlines(), 1))
    above = ""
    for _, line in lines:
        if opened := _OPEN.match(line):
            yield _rest(lines, page, opened, _MARK.search(above))
        above = line if line.strip() else above


def _rest(
    lines: Iterator[tuple[int, str]], page: str, opened: re.Match[str], mark: re.Match[str] | None
) -> Block:
    text: list[str] = []
    first = 0
    for number, line in lines:
        first = first or number
        if line.strip() == opened[2]:
            return Block(page, first, opened[3], "\n".join(text), mark[1] if mark else None)
        text.append(line)
    raise ValueError(f"{page}: the block at line {first} is never closed")


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block in this namespace; ``await`` may stand at its top level. Tracebacks name the page."""
    source = "\n" * (block.line - 1) + dedent(block.text)
    code = compile(source, str(ROOT / block.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, namespace))
    else:
        exec(code, namespace)
