"""Most of the command line does not depend on the database: a test runs on SQLite, or says on which."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in ("database", "empty"):
        own = any(name in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
        if name in metafunc.fixturenames and not own:
            metafunc.definition.add_marker(pytest.mark.parametrize(name, ["sqlite"], indirect=True))
