"""The same jobs on fencedjobs. Run it as `fencedjobs work after:worker`."""

from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from business import Shipment, engine
from fencedjobs import Store, UnitOfWork, Worker
from fencedjobs.context import Context

worker = Worker(Store(engine))


def enqueue(session: Session, payload: dict[str, Any], run_at: datetime | None = None) -> None:
    """In the transaction of the request; ``run_at`` is an instant with a time zone."""
    at = None if run_at is None else run_at.timestamp()
    UnitOfWork(session).jobs.enqueue(None, payload, kind="pack", run_at=at, max_attempts=5)


@worker.handler("pack")
def pack(ctx: Context) -> None:
    with ctx.transaction({"packed": ctx.payload["qty"]}) as uow:
        uow.session.add(Shipment(order_id=ctx.payload["order"], qty=ctx.payload["qty"]))
