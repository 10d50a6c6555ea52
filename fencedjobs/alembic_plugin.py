"""A plugin of Alembic 1.18 and later: a host's autogenerate leaves our tables alone without any filter.

It is found by its entry point, and used where ``env.py`` asks for it::

    context.configure(..., autogenerate_plugins=["alembic.autogenerate.*", "fencedjobs"])

``import alembic`` loads this file, so it imports nothing.
"""

from typing import Any


def setup(plugin: Any) -> None:
    """Have `autogenerate.amend` called when everything has been compared."""
    from alembic.util import DispatchPriority

    plugin.add_autogenerate_comparator(_amend, "autogenerate", priority=DispatchPriority.LAST)


def _amend(context: Any, proposed: Any) -> None:
    from fencedjobs.autogenerate import amend

    amend(context, proposed)
