"""What the child processes of the relay's tests do; imported by them, so without pytest.

The receiver is another SQLite database: its inbox and its stock, in one transaction. Children die for
real, by SIGKILL or by the system's exit, and clean up nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final

from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    insert,
    select,
)
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from fencedjobs import AsyncStore, Store, schema
from fencedjobs.aio_relay import AsyncRelay
from fencedjobs.relay import Relay, dispatch
from fencedjobs.values import Event

EXITED: Final = 73

#: where in the loop a relay dies
POINTS: Final = ("before send", "after send", "after ack", "before commit", "after mark")
#: where the receiver has the event already, and the outbox does not know
SENT_IN_VAIN: Final = ("after send", "after ack", "before commit")

STOCK = Table(
    "stock",
    MetaData(),
    Column("n", Integer, primary_key=True),
    Column("id", String(255)),
    Column("qty", Integer),
)


@dataclass(frozen=True)
class Death:
    """When a relay dies: at this point of the ``nth`` event it sends."""

    point: str
    nth: int
    by_signal: bool

    def now(self) -> None:
        if self.by_signal:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(EXITED)

    @property
    def exit_code(self) -> int:
        return -signal.SIGKILL if self.by_signal else EXITED


class Warehouse:
    """The receiver: accepts each message once, and adds to its stock in the same transaction."""

    def __init__(self, url: str) -> None:
        self.engine = create_engine(url, poolclass=NullPool)
        self.store = Store(self.engine)

    def open(self) -> None:
        schema.upgrade(self.engine)
        STOCK.create(self.engine)

    def receive(self, sent: Event) -> None:
        with self.store.begin() as uow:
            if uow.inbox.accept(sent.id, sent.payload, fence=sent.fence):
                uow.session.execute(insert(STOCK).values(id=sent.id, qty=sent.payload["qty"]))

    def stock(self) -> list[tuple[str, int]]:
        with self.engine.connect() as connection:
            rows = connection.execute(select(STOCK.c.id, STOCK.c.qty).order_by(STOCK.c.n))
            return [(id, qty) for id, qty in rows]


# --- a relay that dies at a given point -----------------------------------------------------------


class Mortal:
    """The sender of a relay, and the hooks around it, that die as they are told."""

    def __init__(self, warehouse: Warehouse, death: Death | None) -> None:
        self._warehouse = warehouse
        self._death = death
        self.begun = 0
        self.delivered = 0

    def __call__(self, sent: Event) -> bool:
        self.begun += 1
        self.at("before send", self.begun)
        self._warehouse.receive(sent)
        self.delivered += 1
        self.at("after send", self.delivered)
        return True

    def after(self, sent: Event) -> None:
        self.at("after ack", self.delivered)

    def watch(self, engine: Engine) -> None:
        """Die before the COMMIT of the mark, or when it is over and its connection goes back."""
        event.listen(engine, "commit", lambda _: self.at("before commit", self.delivered))
        event.listen(engine, "before_cursor_execute", self._says_commit)
        event.listen(engine, "checkin", lambda *_: self.at("after mark", self.delivered))

    def at(self, point: str, nth: int) -> None:
        if self._death is not None and (self._death.point, self._death.nth) == (point, nth):
            self._death.now()

    def _says_commit(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement == "COMMIT":  # the store's own, on SQLite
            self.at("before commit", self.delivered)


def dispatching(url: str, warehouse: str, death: Death | None, now: float) -> None:
    """Batches by `dispatch` until nothing is left, or death comes."""
    engine = create_engine(url)
    store = Store(engine, clock=lambda: now)
    mortal = Mortal(Warehouse(warehouse), death)
    mortal.watch(engine)
    while dispatch(store, mortal, after_delivery=mortal.after):
        pass


def relaying(url: str, warehouse: str, death: Death | None, now: float, mark_every: int) -> None:
    """The same by a `Relay` that gathers its marks."""
    engine = create_engine(url)
    store = Store(engine, clock=lambda: now)
    mortal = Mortal(Warehouse(warehouse), death)
    mortal.watch(engine)
    Relay(store, mortal, mark_every=mark_every).run(until_empty=True)


def killed_by_its_event(url: str, now: float, max_attempts: int) -> None:
    """A relay whose sender takes the process down with it when it meets the poison."""
    store = Store(create_engine(url), clock=lambda: now)

    def send(sent: Event) -> bool:
        if sent.id == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    Relay(store, send, max_attempts=max_attempts).run(until_empty=True)


# --- relays that talk with their test -------------------------------------------------------------


def talking(url: str, async_url: str | None, talk: Connection, options: dict[str, Any]) -> None:
    """A relay, sync or async, that says what it is about to send and waits to be told to go on."""

    def send(sent: Event) -> bool:
        talk.send(sent.id)
        assert talk.poll(60), "nobody says go on"
        talk.recv()
        return True

    if async_url is None:
        engine = create_engine(url)
        Relay(Store(engine), send, **{"poll": 0.02, **options}).run()
        return

    async def send_async(sent: Event) -> bool:
        return await asyncio.to_thread(send, sent)

    async def run() -> None:
        engine = create_async_engine(async_url)
        await AsyncRelay(AsyncStore(engine), send_async, **{"poll": 0.02, **options}).run()
        await engine.dispose()

    asyncio.run(run())


def stopping_all_the_time(url: str) -> None:
    """A signal that stops the relay comes all the time, and most of all while it is about to wait."""
    relay = Relay(Store(create_engine(url)), lambda _: True)
    signal.signal(signal.SIGALRM, lambda *_: relay.stop())
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    for _ in range(30_000):
        relay._wait(0.00001)
    signal.setitimer(signal.ITIMER_REAL, 0)


# --- starting them --------------------------------------------------------------------------------


def children() -> ForkServerContext:
    """Children are forked from a fresh process that has imported this module, not from the tests'."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def spawned(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    process = children().Process(target=target, args=args, daemon=True)
    process.start()
    return process


@contextmanager
def ended(process: ForkServerProcess) -> Any:
    """Whatever the test finds: its child does not outlive it."""
    try:
        yield process
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def exit_code(process: ForkServerProcess, within: float = 60) -> int | None:
    """How it ended; ``None`` if it did not, and is killed."""
    process.join(within)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code
