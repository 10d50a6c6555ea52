"""Alembic's autogenerate for a host's model with `LeaseMixin`: three columns, right on each database."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import MetaData, String, inspect, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencedjobs import LeaseMixin, Store, schema
from tests.databases import Database
from tests.jobs.helpers import T


class Base(DeclarativeBase):
    metadata = MetaData()


class Bill(LeaseMixin, Base):
    __tablename__ = "bills"

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str | None] = mapped_column(String(50))


#: the host's history has made the table, with a row in it, before the model gets the mixin
FIRST = """
    import sqlalchemy as sa
    from alembic import op

    revision, down_revision, branch_labels, depends_on = "0001", None, None, None

    def upgrade():
        note = sa.Column("note", sa.String(50))
        op.create_table("bills", sa.Column("id", sa.Integer, primary_key=True), note)
        op.execute("INSERT INTO bills (id) VALUES (1)")

    def downgrade():
        op.drop_table("bills")
"""
ENV = """
    from alembic import context
    from sqlalchemy import create_engine

    from fencedjobs import schema

    given = context.config.attributes
    with create_engine(given["url"]).begin() as connection:
        context.configure(
            connection=connection, target_metadata=given["metadata"], include_name=schema.include_name,
            render_item=schema.render_item,
            compare_type=True, compare_server_default=True, render_as_batch=True,
        )
        with context.begin_transaction():
            context.run_migrations()
"""
MAKO = """
    ${imports if imports else ""}
    import sqlalchemy as sa
    from alembic import op

    revision, down_revision = ${repr(up_revision)}, ${repr(down_revision)}
    branch_labels, depends_on = None, None

    def upgrade():
        ${upgrades if upgrades else "pass"}

    def downgrade():
        ${downgrades if downgrades else "pass"}
"""


@pytest.fixture
def config(empty: Database, tmp_path: Path) -> Config:
    home = tmp_path / "host"
    (home / "versions").mkdir(parents=True)
    (home / "env.py").write_text(dedent(ENV))
    (home / "script.py.mako").write_text(dedent(MAKO))
    (home / "versions" / "0001.py").write_text(dedent(FIRST))
    config = Config()
    config.set_main_option("script_location", str(home))
    config.set_main_option("path_separator", "space")
    config.attributes.update(url=empty.url, metadata=Base.metadata)
    return config


def test_the_columns_are_proposed_made_and_then_as_they_should_be(empty: Database, config: Config) -> None:
    command.upgrade(config, "0001")
    script = command.revision(config, "leases on bills", autogenerate=True, rev_id="0002")
    written = Path(script.path).read_text()  # type: ignore[union-attr]
    for name in ("owner", "until", "fence"):
        assert f"add_column(sa.Column('{name}'" in written, written
    assert written.count("server_default=sa.text('0')") == 2
    command.upgrade(config, "head")
    command.check(config)
    engine = empty.engine()
    columns = {one["name"]: one for one in inspect(engine).get_columns("bills")}
    nullable = [columns[name]["nullable"] for name in ("owner", "until", "fence")]
    assert nullable == [True, False, False]
    schema.upgrade(engine)
    command.check(config)
    lease = Store(engine).leases(Bill).claim(1, "a" * 255, ttl=0.125, now=T)
    assert lease is not None
    assert (lease.fence, lease.until) == (1, T + 0.125), "a row from before is free, and its end is exact"
    with Session(engine) as session:
        session.execute(text("UPDATE bills SET owner = 'É ', fence = 9007199254740993"))
        session.commit()
        bill = session.get_one(Bill, 1)
        assert (bill.owner, bill.fence) == ("É ", 2**53 + 1)
        found = session.scalars(text("SELECT count(*) FROM bills WHERE owner = 'é'")).one()
        assert found == 0, "owners are compared byte for byte"
    engine.dispose()
    command.downgrade(config, "0001")
