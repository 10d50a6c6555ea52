"""The site builds without a warning, its navigation is whole, and no page asks another host for anything."""

from __future__ import annotations

import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import fencedjobs
from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"

#: What a page loads by itself; links are followed by readers.
LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
#: Kinds of ``link`` that are for readers and machines to follow.
FOLLOWED = {"canonical", "prev", "next", "alternate"}
_ELSEWHERE = re.compile(r"(https?:)?//")
_IN_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)")


class Loads(HTMLParser):
    """What a page loads, wherever from."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        loaded = given.get(LOADING.get(tag, ""), "")
        if loaded and given.get("rel") not in FOLLOWED:
            self.found.append(loaded)


def _in_navigation(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in _in_navigation(part)]


def test_the_navigation_has_every_page_once() -> None:
    named = _in_navigation(load_config(str(ROOT / "mkdocs.yml")).nav)
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(named) == len({*named})
    assert {*named} <= written, "there is no such page"
    assert written <= {*named}, "a page that nobody is led to"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built pages."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)
    config.plugins.run_event("shutdown")
    return tmp_path / "site"


def test_it_builds_without_a_warning_and_loads_nothing_from_elsewhere(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = [record for record in caplog.get_records("setup") if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings if record.name.startswith("mkdocs")] == []
    pages = [*site.glob("*.html")]
    assert len(pages) > 20
    loaded = {what for page in pages for what in Loads(page.read_text()).found}
    assert any(what.endswith(".css") for what in loaded), "nothing was looked at"
    styles = {what for css in site.rglob("*.css") for what in _IN_STYLE.findall(css.read_text())}
    inline = {what for page in pages for what in _IN_STYLE.findall(page.read_text())}
    assert {what for what in loaded if _ELSEWHERE.match(what)} | styles | inline == set()
    assert not any('class="mermaid"' in page.read_text() for page in pages), "its script is elsewhere"
    _has_every_public_name((site / "reference.html").read_text())


def _has_every_public_name(reference: str) -> None:
    """And a name in single backticks leads to it."""
    missing = {name for name in fencedjobs.__all__ if f'id="fencedjobs.{name}"' not in reference}
    assert missing == set()
    assert re.search(r'href="#fencedjobs\.\w*\.?LeaseLost"[^>]*><code>LeaseLost</code>', reference)
