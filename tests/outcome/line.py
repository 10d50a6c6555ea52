"""An application whose line to the database is cut at chosen moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fencedjobs import Store
from tests.hosts import Host, told
from tests.proxy import Cut, Proxy


@dataclass
class Line:
    """An application whose line to the database can be cut, and a store on a line of its own."""

    host: Host
    proxy: Proxy
    direct: Store
    cut: Cut | None = None
    statement: str = ""
    commits: int = 0

    def losing(
        self, cut: Cut, verb: Callable[..., object], *args: Any, **kwargs: Any
    ) -> BaseException | None:
        """What the verb says when this happens to its COMMIT."""
        self.cut, self.commits = cut, 0
        try:
            return told(verb, *args, **kwargs)
        finally:
            self.cut = None

    def on_commit(self, _: Any) -> None:
        self.commits += 1
        if self.cut is not None:
            self.proxy.arm(self.cut)

    def on_statement(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if self.statement and self.statement in statement:
            self.statement = ""
            self.proxy.arm(Cut.REQUEST)
