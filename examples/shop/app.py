"""The shop's web app: takes orders, and (for another service, in real life) applies their events once."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy.exc import IntegrityError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

import db
from fencedjobs import AsyncUnitOfWork, InboxConflict
from limit import Limited
from models import Order, StockMove


class NewOrder(BaseModel, extra="forbid", strict=True):
    id: str = Field(pattern="^[a-z0-9-]{1,64}$")  # the client's: the same request again is the same order
    qty: int = Field(ge=1, le=1000)


class Event(BaseModel):
    """What `HttpSender` posts; see docs/senders.md."""

    id: str = Field(min_length=1, max_length=255)
    fence: int
    payload: NewOrder


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await db.engine.dispose()


app = FastAPI(title="shop", lifespan=lifespan)
app.add_middleware(Limited, most=64 * 1024)  # bytes: far more than any order or event of the shop has
Session = Annotated[AsyncSession, Depends(db.session)]


@app.exception_handler(OperationalError)
@app.exception_handler(InterfaceError)
@app.exception_handler(OSError)
async def unavailable(request: Request, error: Exception) -> Response:
    """The database is away, or busy. Under the same id nothing is written twice, so try again."""
    logging.getLogger("shop").error("%s: the database is not available", request.url.path, exc_info=error)
    return JSONResponse({"detail": "try again"}, 503, {"Retry-After": "1"})


@app.post("/orders", status_code=201)
async def place(new: NewOrder, session: Session, response: Response) -> NewOrder:
    """201 for a new order, 200 for one that is there already, 409 if that one is another."""
    try:
        async with session.begin():  # the order, its job and its event, or nothing
            session.add(Order(**new.model_dump()))
            await session.flush()
            uow = AsyncUnitOfWork(session)
            await uow.jobs.enqueue(new.id, new.model_dump(), kind="pack", queue="shop")
            await uow.outbox.add(new.id, new.model_dump(), topic="orders", lane="shop")
    except IntegrityError:
        there = await session.get(Order, new.id)
        if there is None:
            raise
        if there.qty != new.qty:
            raise HTTPException(409, f"{new.id} is another order") from None
        response.status_code = 200
    return new


@app.post("/events")
async def receive(event: Event, session: Session) -> dict[str, str]:
    """The answer names the event's id once its effect is committed, also for a duplicate."""
    inbox = AsyncUnitOfWork(session).inbox
    order = event.payload
    try:
        async with session.begin():
            if await inbox.accept(event.id, order.model_dump(), source="shop", fence=event.fence):
                session.add(StockMove(order_id=order.id, qty=-order.qty))
    except InboxConflict as conflict:
        async with session.begin():
            await inbox.record_conflict(conflict)
        raise HTTPException(409, str(conflict)) from None
    return {"id": event.id}
