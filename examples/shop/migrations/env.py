"""Alembic's template for asyncio, and one line for fencedjobs: autogenerate leaves its tables alone."""

import asyncio
from typing import Any

from alembic import context

from db import engine
from fencedjobs import schema
from models import Base


def configured(**how: Any) -> None:
    context.configure(target_metadata=Base.metadata, include_name=schema.include_name, **how)
    with context.begin_transaction():
        context.run_migrations()


async def online() -> None:
    async with engine.connect() as connection:
        await connection.run_sync(lambda sync: configured(connection=sync))
    await engine.dispose()


if context.is_offline_mode():
    configured(url=engine.url, literal_binds=True)
else:
    asyncio.run(online())
