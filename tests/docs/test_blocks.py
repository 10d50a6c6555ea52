"""Every block of code in README.md and the docs: Python and our commands are run, others can be called."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

import click
import pytest

from fencedjobs.cli.app import cli
from tests.docs.blocks import Block, blocks, name_of, pages
from tests.docs.commands import check_fencedjobs, commands, names_of, run_command
from tests.docs.scenes import SCENES, Scene, shop

#: Each has a test of its own.
ELSEWHERE = {"docs/tutorial.md", "docs/replace_your_queue.md"}

#: No code: output, pictures, configuration.
PROSE = {"", "text", "ini"}

_COMMAND = re.compile(r"`(fencedjobs [a-z-][^`]*)`")

PAGES = {name_of(page): page for page in pages() if name_of(page) not in ELSEWHERE}


@pytest.fixture(scope="module")
def empty_shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shop") / "shop.db"
    shop(path)
    return path


def play(block: Block, scene: Scene) -> None:
    match block.language:
        case "python":
            scene.play(block)
        case "sh":
            for words in commands(block.text):
                answer = run_command(words)
                assert answer is None or answer.code == scene.code_of(words), f"{words}: {answer}"
        case "json":
            json.loads(block.text)
        case "sql":
            assert block.page == "docs/security.md", "which test_grants.py runs, and no other"
        case other:
            raise AssertionError(f"{block}: nobody knows how to run {other!r}")


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks(page)])
def test_the_blocks_of_a_page_run_in_their_order(
    name: str, empty_shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(empty_shop, tmp_path / "shop.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FENCEDJOBS_URL", "sqlite:///shop.db")
    with ExitStack() as stack:
        scene = SCENES.get(name, Scene)(tmp_path, stack)
        for block in blocks(PAGES[name]):
            if block.language not in PROSE and not block.not_run:
                play(block, scene)
        scene.afterwards()


@pytest.mark.parametrize("name", PAGES)
def test_commands_in_the_text_of_a_page_can_be_called(name: str, tmp_path: Path) -> None:
    """They may leave values out, or show them as …; what stands in square brackets may be left out."""
    for text in _COMMAND.findall(PAGES[name].read_text()):
        for words in commands(text.replace("[", "").replace("]", "")):
            with suppress(click.BadParameter):
                check_fencedjobs(words[1:])


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    page = PAGES["docs/cli.md"].read_text()
    assert [
        name for name in names_of(cli) if f"`{name}" not in page and f"fencedjobs {name}" not in page
    ] == []


def test_few_blocks_are_marked_as_not_run_and_each_says_why() -> None:
    marked = [block for page in PAGES.values() for block in blocks(page) if block.not_run]
    assert len(marked) <= 5, marked
    assert all(len(str(block.not_run)) > 10 for block in marked)


def test_every_prepared_page_is_there() -> None:
    assert {*SCENES} <= {*PAGES}
