"""``python -m fencedjobs.cli``."""

from fencedjobs.cli import main

main()
