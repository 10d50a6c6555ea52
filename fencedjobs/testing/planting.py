"""What a planted fault is, and how one is switched on: attributes of modules and classes replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fencedjobs.dialects import Capabilities, capabilities
from fencedjobs.store import Store

Patch = tuple[Any, str, Any]
Patches = Iterator[Patch]
Look = Callable[..., None]  # a stage: gets a store and an `Effort`, and raises if the contract is broken


@dataclass(frozen=True)
class Fault:
    """A mistake: what it does, the stage that must catch it, and where it can occur."""

    name: str
    told: str
    look: Look  #: the stage
    patches: Callable[[], Patches]
    occurs: Callable[[Capabilities], bool]

    @property
    def stage(self) -> str:
        """The name of the stage."""
        return self.look.__name__

    def occurs_on(self, store: Store) -> bool:
        """Whether this store's database lets it do harm."""
        return self.occurs(capabilities(store.transactions.engine.dialect))


FAULTS: dict[str, Fault] = {}


def fault(
    look: Look, told: str, occurs: Callable[[Capabilities], bool] = lambda _: True
) -> Callable[[Callable[[], Patches]], None]:
    """Register a fault under the name of the function that makes its patches."""

    def register(patches: Callable[[], Patches]) -> None:
        name = patches.__name__.lstrip("_")
        FAULTS[name] = Fault(name, told, look, patches, occurs)

    return register


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Attributes of modules and classes replaced, and put back."""
    undo: list[Patch] = []
    try:
        for owner, attribute, faulty in patches:
            undo.append((owner, attribute, vars(owner)[attribute]))
            setattr(owner, attribute, faulty)
        yield
    finally:
        for owner, attribute, sound in reversed(undo):
            setattr(owner, attribute, sound)


def builder(build: Any) -> Callable[..., Any]:
    """The builder of a statement behind its memory, or as it is."""
    return getattr(build, "__wrapped__", build)  # type: ignore[no-any-return]


def changed(module: ModuleType, name: str, change: Callable[..., Any]) -> Patch:
    """A builder whose result is changed; ``change`` gets it, and the builder's arguments."""
    build = builder(getattr(module, name))
    return module, name, lambda *args: change(build(*args), *args)
