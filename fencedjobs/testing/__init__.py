"""The verification kit: an oracle, machines that compare a store with it, and faults they must catch.

For unit tests of an app: a pytest plugin with stores of their own (`plugin`), and assertions.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fencedjobs.testing.asserts import assert_enqueued, assert_sent

__all__ = ["assert_enqueued", "assert_sent"]


def __getattr__(name: str) -> Any:
    """A public name when it is asked for: pytest imports the plugin in every project, and nothing else."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.asserts"), name)
    return found
