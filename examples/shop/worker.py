"""The shop's worker: `fencedjobs work worker:worker`."""

import asyncio
import os

from db import engine
from fencedjobs import AsyncStore, AsyncWorker
from fencedjobs.context import AsyncContext
from models import Shipment

worker = AsyncWorker(AsyncStore(engine), queues=["shop"], ttl=float(os.environ.get("LEASE_SECONDS", "30")))


@worker.handler("pack")
async def pack(ctx: AsyncContext) -> None:
    await asyncio.sleep(float(os.environ.get("PACKING_SECONDS", "0")))  # stands for the work itself
    async with ctx.transaction({"packed": ctx.payload["qty"]}) as uow:  # shipment and completion, or neither
        uow.session.add(Shipment(order_id=ctx.id, qty=ctx.payload["qty"]))
