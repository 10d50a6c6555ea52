from __future__ import annotations

import pytest

from tests.forms import driver as driver
from tests.forms import parametrize_forms
from tests.forms import servers_stores as servers_stores
from tests.forms import store as store
from tests.forms import sync_store as sync_store


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_forms(metafunc)
