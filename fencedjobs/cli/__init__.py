"""The command line. It needs the extra ``cli``; without it, `main` says so in one line."""

from __future__ import annotations

import sys

__all__ = ["main"]

_HINT = "fencedjobs: the command line needs click and rich: pip install 'fencedjobs[cli]'"


def main() -> None:
    """Run ``fencedjobs``."""
    try:
        from fencedjobs.cli.app import cli

        cli(prog_name="fencedjobs")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("click", "rich"):
            raise
        print(_HINT, file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:  # while it is still being imported
        sys.exit(130)
