from __future__ import annotations

from tests.forms import driver as driver
