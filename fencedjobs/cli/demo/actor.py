"""A child process, in which one part after the other is played: see `courier`, `relay` and `warehouse`."""

from __future__ import annotations

import importlib

from fencedjobs.cli.demo.child import commands_from_parent


def main() -> None:
    """Play the part of each brief. The parent ends this process, unless a part does."""
    commands = commands_from_parent()
    while True:
        brief = commands.get()
        importlib.import_module(f"{__package__}.{brief.pop('part')}").play(commands, **brief)


if __name__ == "__main__":
    main()
