"""A verdict as a page: self-contained, nothing is loaded."""

from __future__ import annotations

from html import escape
from typing import Any, Final

from fencedjobs.testing.verify import Result, Verdict

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fencedjobs verify: {verdict}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }}
body {{ color: #1c1c1c; background: #fff }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.15rem; margin-top: 2rem }}
.passed {{ color: #17692f }} .failed {{ color: #a4161a }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #d8d8d8 }}
td.number {{ text-align: right; white-space: nowrap }}
pre {{ background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: .85rem }}
dl {{ display: grid; grid-template-columns: max-content auto; gap: .1rem 1rem }}
dt {{ color: #5a5a5a }} dd {{ margin: 0 }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #161616; color: #e6e6e6 }} pre {{ background: #242424 }}
  th, td {{ border-color: #3a3a3a }}
  .passed {{ color: #6fcf87 }} .failed {{ color: #ff8087 }} dt {{ color: #a8a8a8 }}
}}
</style>
</head>
<body>
<h1>fencedjobs verify: <span class="{verdict}">{verdict}</span></h1>
<dl>{facts}</dl>
<h2>Stages</h2>
<table>
<thead><tr><th>stage</th><th>what it does</th><th>tried</th><th>seconds</th><th>result</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
{stories}
</body>
</html>
"""


def page(verdict: Verdict) -> str:
    """The verdict as HTML."""
    facts = {**verdict.database, "profile": verdict.profile, "seed": verdict.seed}
    return _PAGE.format(
        verdict=_word(verdict.passed),
        facts="".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items()),
        rows="\n".join(map(_row, verdict.results)),
        stories="\n".join(_story(result) for result in verdict.results if result.story),
    )


def _row(result: Result) -> str:
    word = _word(result.passed)
    return (
        f"<tr><td>{_text(result.stage)}</td><td>{_text(result.about)}</td><td>{_text(result.tried)}</td>"
        f'<td class="number">{result.seconds:.1f}</td><td class="{word}">{word}</td></tr>'
    )


def _story(result: Result) -> str:
    return f"<h2>{_text(result.stage)}: how it failed</h2>\n<pre>{_text(result.story)}</pre>"


def _word(passed: bool) -> str:
    return "passed" if passed else "failed"


def _text(value: Any) -> str:
    return escape(str(value))
