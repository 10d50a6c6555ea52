"""What each page finds prepared: a folder with the database of an invented shop, and the names it uses."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from alembic import command
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import Phase, settings
from prometheus_client import REGISTRY
from sqlalchemy import NullPool, create_engine, delete, inspect, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencedjobs import Event, JobState, Store, UnsupportedDatabase, dialects, schema
from fencedjobs.models import Job
from fencedjobs.testing.queue import StoreQueue
from tests.cli.helpers import environment
from tests.docs.blocks import Block, run_python
from tests.senders.receiver import Receiver, acknowledges, answer


class Base(DeclarativeBase):
    """The shop's own tables."""


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    qty: Mapped[int]


class Shipment(Base):
    __tablename__ = "shipments"
    order: Mapped[str] = mapped_column(primary_key=True)
    qty: Mapped[int | None]


class StockMove(Base):
    __tablename__ = "stock_moves"
    id: Mapped[int] = mapped_column(primary_key=True)
    qty: Mapped[int]


class Stock(Base):
    __tablename__ = "stock"
    name: Mapped[str] = mapped_column(primary_key=True)
    qty: Mapped[int]


class Document(Base):
    __tablename__ = "documents"
    path: Mapped[str] = mapped_column(primary_key=True)
    body: Mapped[bytes]


MODELS = {model.__name__: model for model in (Order, Shipment, StockMove, Stock, Document)}


class Scene:
    """One page in a folder of its own. A page with more needs has a subclass below."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.url = "sqlite:///shop.db"
        engine = create_engine(self.url, pool_size=50)
        dialects.hurry(engine)  # no test cuts the power, and waiting for its disk is noise
        stack.callback(engine.dispose)
        self.engine = engine
        self.store = Store(engine)
        async_engine = create_async_engine("sqlite+aiosqlite:///shop.db", poolclass=NullPool)
        self.names: dict[str, Any] = {
            "__name__": "page", "url": self.url, "engine": engine, "async_engine": async_engine,
            "store": self.store, "create_engine": create_engine, "select": select, "update": update,
            "asyncio": asyncio, "Session": Session, "Mapped": Mapped, "mapped_column": mapped_column,
            "Base": Base, "order": Order(id="order-7", qty=7), **MODELS,
        }  # fmt: skip
        self.prepare(stack)

    def prepare(self, stack: ExitStack) -> None:
        """More than that, where a page needs it."""

    def before(self, block: Block) -> None:
        """Just before a block of Python is run."""

    def afterwards(self) -> None:
        """What the page has defined is called, and what it has done is looked at."""

    def play(self, block: Block) -> None:
        """Run a block of Python; whatever runs until it is told to stop is told so when nothing is left."""
        self.before(block)
        if ".run()" in block.text and "__main__" not in block.text:
            with told_to_stop(self.is_idle):
                run_python(block, self.names)
        else:
            run_python(block, self.names)

    def code_of(self, words: list[str]) -> int:
        """The exit code that the page expects of a command."""
        return 0

    def is_idle(self) -> bool:
        open = {JobState.READY, JobState.LEASED}
        jobs = any(open & {*states} for states in self.store.counts().values())
        return not jobs and not any(lane.pending for lane in self.store.outbox.stats().values())

    def rows(self, model: type[Any]) -> list[Any]:
        with Session(self.engine) as session:
            return [*session.scalars(select(model))]

    def state(self, id: str) -> str | None:
        job = self.store.get(id)
        return None if job is None else str(job.state)


class Readme(Scene):
    def prepare(self, stack: ExitStack) -> None:
        self.sent: list[Event] = []
        add = update(Stock).where(Stock.name == "parcels").values(qty=Stock.qty + 7)
        self.names |= {"send": self.send, "message_id": "m-1", "payload": {"qty": 7}, "add_to_stock": add}
        with Session(self.engine) as session, session.begin():
            session.add(Stock(name="parcels", qty=0))

    def send(self, event: Event) -> bool:
        self.sent.append(event)
        return True

    def afterwards(self) -> None:
        assert self.state("order-7") == "done"
        assert [shipment.qty for shipment in self.rows(Shipment)] == [7]
        assert [event.topic for event in self.sent] == ["warehouse"]
        assert [stock.qty for stock in self.rows(Stock)] == [7]
        assert self.names["worker"].handlers.kinds == ["pack"]


class Guards(Scene):
    def prepare(self, stack: ExitStack) -> None:
        server = stack.enter_context(Receiver(lambda line, _: line.say(answer("204 No Content"))))
        self.server = server
        httpx = pytest.importorskip("httpx")
        self.store.enqueue("j")
        self.names |= {
            "fence": 1, "Stale": RuntimeError, "write_the_file": lambda: None, "folder": self.folder,
            "httpx": httpx, "url": server.url, "data": b"body", "lease": self.store.claim("w", ttl=60),
            "Response": SimpleNamespace,
        }  # fmt: skip

    def afterwards(self) -> None:
        assert [request.headers["fence"] for request in self.server.requests] == ["1"]
        put, handle = self.names["put"], self.names["handle"]
        put("page.txt", b"new", 2)
        with pytest.raises(PermissionError, match="fence 1 is behind 2"):
            put("page.txt", b"old", 1)
        assert (self.folder / "page.txt").read_bytes() == b"new"
        answers = [
            handle(SimpleNamespace(path="/a", headers={"Fence": str(fence)}, body=b"%d" % fence)).status
            for fence in (2, 1)
        ]
        assert answers == [204, 409]
        assert [document.body for document in self.rows(Document)] == [b"2"]


class Outbox(Scene):
    def prepare(self, stack: ExitStack) -> None:
        self.names |= {"event_id": "order-7", "payload": {"qty": 7}}

    def afterwards(self) -> None:
        assert [event.id for event in self.store.outbox.pending()] == ["order-7"]
        assert [move.qty for move in self.rows(StockMove)] == [7]


class Senders(Scene):
    def prepare(self, stack: ExitStack) -> None:
        server = stack.enter_context(Receiver(acknowledges))
        self.server = server
        self.store.outbox.add("order-7", {"qty": 7}, topic="warehouse")
        from fencedjobs.senders.nats import JetStreamSender
        from fencedjobs.senders.rabbitmq import RabbitSender

        self.posted: list[str] = []
        ledger = SimpleNamespace(post=lambda payload, **given: self.posted.append(given["idempotency_key"]))
        self.names |= {
            "url": server.url, "token": "s3cret", "Event": Event, "ledger": ledger,
            "JetStreamSender": JetStreamSender, "RabbitSender": RabbitSender, "servers": "nats://127.0.0.1",
        }  # fmt: skip

    def before(self, block: Block) -> None:
        if "RabbitSender(" in block.text:
            self.names["url"] = "amqp://127.0.0.1/"

    def afterwards(self) -> None:
        assert [request.headers["authorization"] for request in self.server.requests] == ["Bearer s3cret"]
        assert self.names["send"](self.store.outbox.get("order-7")) is True
        assert self.posted == ["order-7"]


SHOP = """
from fencedjobs import Snooze, Store, Worker
from sqlalchemy import create_engine

worker = Worker(Store(create_engine("sqlite:///never-opened.db")))

def place_order(uow, id, *, qty):
    uow.jobs.enqueue(id, {"qty": qty}, kind="pack")

@worker.handler("pack")
def pack(ctx):
    with ctx.transaction() as uow:
        uow.outbox.add(ctx.id, ctx.payload, topic="warehouse")

seen = []

@worker.handler("snoozes")
def snoozes(ctx):
    if ctx.id not in seen:
        seen.append(ctx.id)
        raise Snooze(60)
"""


class Testing(Scene):
    def prepare(self, stack: ExitStack) -> None:
        (self.folder / "shop").mkdir()
        (self.folder / "shop" / "jobs.py").write_text(SHOP)

    def play(self, block: Block) -> None:
        if "from shop.jobs" not in block.text:
            super().play(block)
            return
        (self.folder / "test_shop.py").write_text(block.text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "fencedjobs.testing.plugin", "test_shop.py"]
        ran = subprocess.run(
            command, cwd=self.folder, env=environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"), timeout=60,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "2 passed" in ran.stdout, ran.stdout

    def afterwards(self) -> None:
        run_briefly(self.names["TestJobs"])


class Verification(Scene):
    def prepare(self, stack: ExitStack) -> None:
        self.names["MyQueue"] = lambda engine: StoreQueue(Store(engine))

    def afterwards(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(delete(Job))
        run_briefly(self.names["TestJobs"])
        run_briefly(self.names["TestOutbox"])


class YourQueue(Scene):
    def prepare(self, stack: ExitStack) -> None:
        class Own(DeclarativeBase):
            pass

        self.names["Base"] = Own

    def play(self, block: Block) -> None:
        if "trial" in block.text:
            self.names["Task"].metadata.create_all(self.engine)
            with suppress(
                IntegrityError
            ):  # clients that enqueue one job at once: not the mistake of the page
                super().play(block)
        else:
            super().play(block)

    def afterwards(self) -> None:
        """The queue has the mistake that the page shows, and so has the better one."""
        for complete in (self.names["HandRolled"].complete, self.names["complete"]):
            self.names["HandRolled"].complete = complete
            with self.engine.begin() as connection:
                connection.execute(delete(self.names["Task"].__table__))
            with pytest.raises(Exception, match="was accepted"):
                run_briefly(self.names["TestTasks"], max_examples=200)


class Migrations(Scene):
    def prepare(self, stack: ExitStack) -> None:
        command.init(Config("alembic.ini"), "history")
        script = ScriptDirectory("history")
        connection = stack.enter_context(self.engine.connect())
        context = stack.enter_context(EnvironmentContext(Config("alembic.ini"), script, fn=lambda *_: []))
        self.names |= {"context": context, "connection": connection, "target_metadata": Base.metadata}

    def afterwards(self) -> None:
        with create_engine("sqlite://").connect() as connection:
            with Operations.context(MigrationContext.configure(connection)):
                self.names["upgrade"]()
                made = {*inspect(connection).get_table_names()}
                self.names["downgrade"]()
            assert "fenced_jobs" in made
            assert inspect(connection).get_table_names() == []
        assert "fenced_jobs" in Base.metadata.tables
        for name in [name for name in Base.metadata.tables if name.startswith("fenced_")]:
            Base.metadata.remove(Base.metadata.tables[name])


class Leases(Migrations):
    """Invoices that are due, and who charges them."""

    def prepare(self, stack: ExitStack) -> None:
        super().prepare(stack)

        class Own(DeclarativeBase):
            pass

        class Payment(Own):
            __tablename__ = "payments"
            invoice: Mapped[int] = mapped_column(primary_key=True)

        self.charged: list[int] = []
        self.names |= {
            "Base": Own, "Payment": Payment, "schema": schema, "date": date, "today": date(2026, 11, 29),
            "charge": self.charged.append,
        }  # fmt: skip

    def before(self, block: Block) -> None:
        if "claim_where" in block.text:
            self.names["Base"].metadata.create_all(self.engine)
            due = [date(2026, 11, day) for day in (28, 27, 30)]
            with Session(self.engine) as session, session.begin():
                session.add_all([self.names["Invoice"](id=n, due=day) for n, day in enumerate(due, 1)])

    def afterwards(self) -> None:
        assert self.charged == [2, 1], "in the order of their days, and not the one that is not due"
        assert {invoice.id for invoice in self.rows(self.names["Invoice"]) if invoice.paid} == {1, 2}
        assert {payment.invoice for payment in self.rows(self.names["Payment"])} == {1, 2}


class Sessions(Scene):
    def prepare(self, stack: ExitStack) -> None:
        self.names["AsyncSession"] = AsyncSession

    def before(self, block: Block) -> None:
        if "lease" in block.text:
            self.names["lease"] = self.store.claim("w", ttl=60, id="order-7")

    def afterwards(self) -> None:
        assert (self.state("order-7"), self.state("order-8")) == ("done", "ready")
        assert [event.id for event in self.store.outbox.pending()] == ["order-7"]
        assert [order.id for order in self.rows(Order)] == ["order-7", "order-8"]
        assert [shipment.order for shipment in self.rows(Shipment)] == ["order-7"]


class Poolers(Scene):
    def prepare(self, stack: ExitStack) -> None:
        self.names |= {"create_async_engine": create_async_engine, "uuid4": uuid4}


class Index(Scene):
    def afterwards(self) -> None:
        assert self.state("order-7") == "done"


class Concepts(Scene):
    def afterwards(self) -> None:
        job = self.store.get("job-7")
        assert job is not None
        assert (job.result, job.fence) == ("B's result", 2)


class ChoosingTtl(Scene):
    def afterwards(self) -> None:
        assert self.state("report-1") == "done"
        assert self.names["worker"].handlers.of("report").max_runtime == 3600


class IdempotentHandlers(Scene):
    """Each outside system does as it was asked the first time, and its answer is lost: a second attempt."""

    def prepare(self, stack: ExitStack) -> None:
        self.charged: list[str] = []
        self.put: list[tuple[str, int]] = []
        self.posted: list[str] = []
        self.names |= {
            "payments": SimpleNamespace(charge=self.charge),
            "files": SimpleNamespace(put=self.store_file),
            "draw": str, "post": self.letter,
        }  # fmt: skip

    def charge(self, amount: int, *, idempotency_key: str) -> str:
        self.charged.append(idempotency_key)
        return self.lost(self.charged, 1) or "receipt"

    def store_file(self, name: str, data: str, *, fence: int) -> None:
        self.put.append((name, fence))
        self.lost(self.put, 1)

    def letter(self, address: str) -> None:
        self.posted.append(address)
        self.lost(self.posted, 2)

    def lost(self, done: list[Any], number: int) -> str:
        if len(done) == number:
            raise ConnectionError("no answer")
        return ""

    def afterwards(self) -> None:
        worker, payload = self.names["worker"], {"qty": 7, "amount": 70, "to": ["a", "b"]}
        kinds = worker.handlers.kinds
        for kind in kinds:
            self.store.enqueue(kind, payload, kind=kind)
        self.work_off(worker, len(kinds))
        assert kinds == ["pack", "announce", "charge", "render", "letters"]
        assert [shipment.qty for shipment in self.rows(Shipment)] == [7]
        assert [event.id for event in self.store.outbox.pending()] == ["packed-announce"]
        assert self.charged == ["charge-charge"] * 2, "one key in both attempts"
        assert self.put == [("render.pdf", 1), ("render.pdf", 2)], "the fence tells them apart"
        assert self.posted == ["a", "b", "b"], "it went on from the checkpoint"

    def work_off(self, worker: Any, jobs: int) -> None:
        """Retries wait for a second at most."""
        end = time.monotonic() + 20
        while self.store.counts() != {"default": {JobState.DONE: jobs}}:
            assert time.monotonic() < end, self.store.counts()
            worker.run(until_empty=True)
            time.sleep(0.05)


class Quarantine(Scene):
    """Jobs and events as the page talks of them."""

    def prepare(self, stack: ExitStack) -> None:
        for id, error in (("order-7", "out of paper"), ("a", "no route to host"), ("b", "no route to host")):
            self.store.enqueue(id, {"qty": 7})
            lease = self.store.claim("w", ttl=60, id=id)
            assert lease is not None
            self.store.fail(lease, error, retry=None)
        self.store.enqueue("order-8", {})
        self.store.quarantine("order-8", "no quantity")
        self.store.enqueue("order-9")
        self.store.enqueue("order-10")
        for id in ("packed-7", "packed-8"):
            self.store.outbox.add(id, {"qty": 7}, topic="warehouse")
        self.store.outbox.quarantine("packed-7", "refused")

    def afterwards(self) -> None:
        states = {id: self.state(id) for id in ("order-7", "order-8", "order-9", "order-10", "a", "b")}
        assert states == {
            "order-7": "ready", "order-8": "ready", "order-9": "cancelled", "order-10": "quarantined",
            "a": "ready", "b": "ready",
        }  # fmt: skip
        mended = self.store.get("order-8")
        assert mended is not None
        assert mended.payload == {"qty": 8}
        assert [event.id for event in self.store.outbox.pending()] == ["packed-7"]


class Backups(Scene):
    def prepare(self, stack: ExitStack) -> None:
        self.store.enqueue("order-7")


class Isolation(Scene):
    def afterwards(self) -> None:
        assert self.state("order-7") == "ready"
        assert isinstance(self.refusals[0], UnsupportedDatabase)

    def prepare(self, stack: ExitStack) -> None:
        self.refusals: list[object] = []
        self.names["print"] = self.refusals.append


class Security(Scene):
    def afterwards(self) -> None:
        self.store.enqueue("good", {"qty": 7}, kind="pack")
        self.store.enqueue("bad", {"qty": "7; DROP TABLE"}, kind="pack")
        self.names["worker"].run(until_empty=True)
        assert (self.state("good"), self.state("bad")) == ("done", "quarantined")


class Workers(Scene):
    def prepare(self, stack: ExitStack) -> None:
        self.names |= {"open_now": lambda: True}
        stack.callback(self.unregister, {*REGISTRY._collector_to_names})

    def before(self, block: Block) -> None:
        if ".run()" in block.text:
            self.store.enqueue(kind="pack")

    @staticmethod
    def unregister(former: set[Any]) -> None:
        for collector in {*REGISTRY._collector_to_names} - former:
            REGISTRY.unregister(collector)

    def afterwards(self) -> None:
        assert len(self.rows(Shipment)) == 2
        assert self.store.counts() == {"default": {JobState.DONE: 2}}


SCENES: dict[str, type[Scene]] = {
    "README.md": Readme,
    "docs/backups.md": Backups,
    "docs/choosing_ttl.md": ChoosingTtl,
    "docs/concepts.md": Concepts,
    "docs/guards.md": Guards,
    "docs/idempotent_handlers.md": IdempotentHandlers,
    "docs/index.md": Index,
    "docs/isolation.md": Isolation,
    "docs/leases.md": Leases,
    "docs/migrations.md": Migrations,
    "docs/outbox.md": Outbox,
    "docs/poolers.md": Poolers,
    "docs/quarantine.md": Quarantine,
    "docs/security.md": Security,
    "docs/senders.md": Senders,
    "docs/sessions.md": Sessions,
    "docs/testing.md": Testing,
    "docs/verification.md": Verification,
    "docs/worker.md": Workers,
    "docs/your_queue.md": YourQueue,
}


def shop(path: Path) -> None:
    """Make the database: our tables and the shop's, and no rows."""
    engine = create_engine(f"sqlite:///{path}")
    schema.upgrade(engine)
    Base.metadata.create_all(engine)
    engine.dispose()


def run_briefly(case: Any, max_examples: int = 2) -> None:
    """A test case of a state machine, with few and always the same examples."""
    case.settings = settings(
        case.settings, max_examples=max_examples, stateful_step_count=10, derandomize=True, database=None,
        deadline=None, phases=[Phase.generate],
    )  # fmt: skip
    case("runTest").runTest()


@contextmanager
def told_to_stop(idle: Callable[[], bool], patience: float = 20.0) -> Iterator[None]:
    """Send this process SIGTERM when something in the block waits for that, and nothing is left to do."""

    def too_early(number: int, frame: FrameType | None) -> None:
        raise AssertionError("SIGTERM came when nothing waited for it")

    over = threading.Event()
    late: list[str] = []

    def watch() -> None:
        end = time.monotonic() + patience
        while not over.wait(0.02):
            waits = signal.getsignal(signal.SIGTERM) is not too_early
            if not waits:
                continue
            late[:] = ["something was left to do"] * (time.monotonic() > end)
            if late or idle():
                os.kill(os.getpid(), signal.SIGTERM)
                over.wait(5)

    former = signal.signal(signal.SIGTERM, too_early)
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        signal.signal(signal.SIGTERM, former)
    assert not late, late[0]
