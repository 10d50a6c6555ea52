"""The proxy of `fencedjobs.testing`, under the name that the tests know."""

from __future__ import annotations

from fencedjobs.testing.proxy import Cut, Proxy, proxy

__all__ = ["Cut", "Proxy", "proxy"]
