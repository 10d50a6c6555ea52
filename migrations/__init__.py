"""The Alembic environment; imported as ``fencedjobs.migrations``."""
