"""The rights that docs/security.md gives a role suffice for what it says, and for no more."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session

from fencedjobs import Store, UnitOfWork, schema
from tests.databases import Database
from tests.docs.blocks import ROOT, blocks

pytestmark = pytest.mark.parametrize("empty", ["postgresql"], indirect=True)


@pytest.fixture
def admin(empty: Database) -> Iterator[Engine]:
    engine = empty.engine()
    schema.upgrade(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def web(empty: Database, admin: Engine) -> Iterator[Engine]:
    """As the role of the page, under a name of this test's own: roles are the server's."""
    (grants,) = [block.text for block in blocks(ROOT / "docs" / "security.md") if block.language == "sql"]
    role, password = f"{empty.url.database}_web", secrets.token_hex(8)
    with admin.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD '{password}'"))
        connection.execute(text(grants.replace(" TO web", f" TO {role}")))
    engine = Database("postgresql", empty.url.set(username=role, password=password)).engine()
    yield engine
    engine.dispose()
    with admin.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


def test_a_role_that_enqueues_can_do_that_and_nothing_else(admin: Engine, web: Engine) -> None:
    store, ours = Store(web), Store(admin)
    assert store.enqueue("a", {"n": 1}) == "a"
    assert store.enqueue("a") is None
    assert len(store.enqueue_many([{"id": "b"}, {}])) == 2
    ours.cancel("a")
    ours.purge(before=9e9)
    assert store.enqueue("a") == "a", "a purged id comes again"
    with Session(web) as session, session.begin():
        uow = UnitOfWork(session)
        uow.jobs.enqueue("c")
        for _ in range(2):
            uow.outbox.add("c", {"n": 1}, topic="t")
    lease = ours.claim(ttl=60)
    assert lease is not None
    with pytest.raises(ProgrammingError, match="permission denied"):
        store.complete(lease)
    with pytest.raises(ProgrammingError, match="permission denied"):
        store.claim(ttl=60)
