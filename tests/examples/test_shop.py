"""The shop runs as people run it: a real server, worker and relay, on each database."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine, text

from fencedjobs import JobState, Store
from fencedjobs.values import InboxStats
from tests.cli.helpers import text_of
from tests.databases import ASYNC_DRIVER, Database
from tests.hosts import open_transactions
from tests.programs import Programs, eventually, imported
from tests.servers import free_port

SHOP = Path(__file__).parents[2] / "examples" / "shop"
#: long enough to be killed in; the lease of a worker that is not killed is renewed meanwhile
SLOW = {"LEASE_SECONDS": "1", "PACKING_SECONDS": "2"}


@pytest.fixture
def engine(empty: Database) -> Iterator[Engine]:
    engine = empty.engine()
    yield engine
    engine.dispose()


@pytest.fixture
def shop(empty: Database, tmp_path: Path) -> Iterator[Programs]:
    variables = {
        "DATABASE_URL": text_of(empty.async_url(ASYNC_DRIVER[empty.backend])),
        "FENCEDJOBS_URL": text_of(empty.url),
    }
    with Programs(SHOP, tmp_path, **variables) as shop:
        yield shop


def rows(engine: Engine, table: str) -> list[tuple[str, int]]:
    """Which orders, and how many pieces of each."""
    column = "id" if table == "orders" else "order_id"
    with engine.connect() as connection:
        return sorted((id, qty) for id, qty in connection.execute(text(f"SELECT {column}, qty FROM {table}")))


def test_an_order_is_packed_and_its_event_applied_once(shop: Programs, engine: Engine) -> None:
    store = Store(engine)
    server = shop.start("uvicorn", "app:app", "--port", "0")
    shop.run("alembic", "upgrade", "head")
    url = server.says(r"running on (http\S+)")[1]
    relay = shop.start("fencedjobs", "relay", "--to", f"{url}/events", "--lane", "shop", "-v")
    killed = shop.start("fencedjobs", "work", "worker:worker", **SLOW)
    with httpx.Client(base_url=url) as client:
        refused_mistakes(client)
        orders = [(f"order-{n}", n) for n in (1, 2, 3)]
        assert [placed(client, *order) for order in orders[1:]] == [201, 201]
        assert placed_by_many(client, *orders[0]) == [200, 200, 200, 201]
        assert placed(client, "order-1", 9) == 409
        eventually(lambda: len(rows(engine, "shipments")) >= 3 and len(rows(engine, "stock_moves")) >= 3)

        assert placed(client, "order-4", 4) == 201
        eventually(lambda: state(store, "order-4") == JobState.LEASED)
        assert killed.told(signal.SIGKILL) == -signal.SIGKILL
        assert ("order-4", 4) not in rows(engine, "shipments")
        worker = shop.start("fencedjobs", "work", "worker:worker")
        eventually(lambda: state(store, "order-4") == JobState.DONE)
        eventually(lambda: len(rows(engine, "stock_moves")) >= 4)
        repeated_deliveries(client)
    assert worker.told(signal.SIGTERM) == 0, worker.said
    assert relay.told(signal.SIGTERM) == 0, relay.said
    server.told(signal.SIGTERM)
    assert "Application shutdown complete" in server.said
    everybody = server.said + relay.said + worker.said + killed.said
    assert "Traceback" not in everybody
    assert "non-checked-in" not in everybody, "a connection was left to the garbage collector"

    everything = [*orders, ("order-4", 4)]
    assert rows(engine, "orders") == everything
    assert rows(engine, "shipments") == everything
    assert rows(engine, "stock_moves") == [(id, -qty) for id, qty in everything]
    assert open_transactions(engine) == []
    assert store.inbox.stats() == InboxStats(messages=4, duplicates=1, conflicts=1)
    assert store.counts() == {"shop": {JobState.DONE: 4}}
    assert [(lane.pending, lane.sent) for lane in store.outbox.stats().values()] == [(0, 4)]
    job = store.get("order-4")
    assert job is not None
    assert job.fence >= job.attempts >= 2


@pytest.mark.parametrize("driver", ["postgresql+asyncpg", "mysql+aiomysql"])
async def test_while_the_database_is_away_the_answer_is_to_try_again(
    monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", f"{driver}://nobody@127.0.0.1:{free_port()}/nowhere")
    with imported(SHOP, "limit", "models", "db", "app") as shop:
        transport = httpx.ASGITransport(shop["app"].app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            answer = await client.post("/orders", json={"id": "order-1", "qty": 1})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")


def placed(client: httpx.Client, id: str, qty: int) -> int:
    return client.post("/orders", json={"id": id, "qty": qty}).status_code


def placed_by_many(client: httpx.Client, id: str, qty: int) -> list[int]:
    """What clients are told who all send the same order at the same time."""
    with ThreadPoolExecutor(4) as clients:
        return sorted(clients.map(lambda _: placed(client, id, qty), range(4)))


def refused_mistakes(client: httpx.Client) -> None:
    for mistake in ({"id": "Order 1", "qty": 1}, {"id": "order-1", "qty": "1"}, {"id": "order-1"}, []):
        assert client.post("/orders", json=mistake).status_code == 422
    large = b'{"id": "order-1", "qty": 1' + 65536 * b" " + b"}"
    for body in (large, iter([large])):  # with a Content-Length, and without
        assert client.post("/orders", content=body).status_code == 413


def repeated_deliveries(client: httpx.Client) -> None:
    """The same event again is acknowledged, and another one under its id is not."""
    event = {"id": "order-1", "fence": 1, "payload": {"id": "order-1", "qty": 1}}
    again = client.post("/events", json=event)
    assert (again.status_code, again.json()) == (200, {"id": "order-1"})
    assert client.post("/events", json={**event, "payload": {"id": "order-1", "qty": 2}}).status_code == 409


def state(store: Store, id: str) -> JobState:
    job = store.get(id)
    assert job is not None
    return job.state
