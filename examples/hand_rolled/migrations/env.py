"""Alembic as an app has it, and one line for fencedjobs: autogenerate leaves its tables alone."""

from alembic import context

from business import Base, engine
from fencedjobs import schema

with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=Base.metadata, include_name=schema.include_name)
    with context.begin_transaction():
        context.run_migrations()
