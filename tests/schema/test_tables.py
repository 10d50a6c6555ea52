"""What an upgrade makes is what the models say, by every way that leads there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import make_url
from sqlalchemy.schema import Constraint

from fencedjobs import schema
from fencedjobs.errors import InvalidValue, SchemaMismatch, UnsupportedDatabase
from fencedjobs.models import Base
from tests.databases import Database, empty_database
from tests.schema.catalog import TABLES, described, load

ROOT = Path(__file__).parents[2]


def test_an_upgrade_makes_the_tables_that_create_all_makes(empty: Database, tmp_path: Path) -> None:
    with empty_database(empty.backend, tmp_path) as other:
        upgraded, created = empty.engine(), other.engine()
        schema.upgrade(upgraded)
        Base.metadata.create_all(created)
        assert described(upgraded) == described(created)
        upgraded.dispose()
        created.dispose()


def test_autogenerate_finds_no_difference_after_an_upgrade(engine: Engine) -> None:
    with engine.connect() as connection:
        options = {"include_name": _ours, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, schema.metadata(engine.dialect)) == []


def _ours(name: str | None, type_: str, parents: object) -> bool:
    return type_ != "table" or name in TABLES


def test_the_offline_script_makes_the_same_tables(empty: Database, tmp_path: Path) -> None:
    with empty_database(empty.backend, tmp_path) as other:
        online, offline = empty.engine(), other.engine()
        schema.upgrade(online)
        load(offline, schema.sql(empty.backend))
        assert described(offline) == described(online)
        assert schema.current(offline) == schema.HEAD
        schema.upgrade(offline)
        online.dispose()
        offline.dispose()


def test_alembics_own_sql_option_prints_the_script() -> None:
    printed = _alembic({}, "-x", "dialect=postgresql", "upgrade", "head", "--sql")
    assert printed.strip() == schema.sql("postgresql").strip()


def test_the_script_for_mysql_has_its_own_collation_and_no_syntax_of_mariadb() -> None:
    script = schema.sql("mysql")
    assert "utf8mb4_0900_bin" in script
    assert "nopad" not in script
    assert "INDEX IF NOT EXISTS" not in script


def test_there_is_no_script_for_an_unknown_database_or_revision() -> None:
    with pytest.raises(UnsupportedDatabase, match="oracle"):
        schema.sql("oracle")
    with pytest.raises(InvalidValue, match="fj9999"):
        schema.sql("sqlite", "fj9999")


def test_the_script_for_sqlite_is_one_transaction() -> None:
    lines = schema.sql("sqlite").strip().splitlines()
    assert (lines[0], lines[-1]) == ("BEGIN;", "COMMIT;")


def test_alembics_own_commands_work_in_this_repository(
    empty: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FENCEDJOBS_URL", empty.url.render_as_string(hide_password=False))
    config, engine = Config(str(ROOT / "alembic.ini")), empty.engine()
    command.upgrade(config, "head")
    command.check(config)
    with engine.connect() as connection:
        schema.require(connection)
    command.downgrade(config, "base")
    assert not {*TABLES} & {*inspect(engine).get_table_names()}
    command.upgrade(config, "fencedjobs@head")
    assert schema.current(engine) == schema.HEAD
    engine.dispose()


def test_alembics_own_commands_work_in_a_shell(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shell.db'}"
    _alembic({"FENCEDJOBS_URL": url}, "upgrade", "head")
    assert schema.HEAD in _alembic({}, "-x", f"url={url}", "current")


def test_alembics_own_commands_say_when_no_database_is_named() -> None:
    assert "FENCEDJOBS_URL" in _alembic({}, "upgrade", "head", fails=True)


def _alembic(environment: dict[str, str], *arguments: str, fails: bool = False) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "FENCEDJOBS_URL"}
    done = subprocess.run(
        [sys.executable, "-m", "alembic", "-c", str(ROOT / "alembic.ini"), *arguments],
        env=inherited | environment,
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert bool(done.returncode) is fails, done.stdout + done.stderr
    return done.stdout + (done.stderr if fails else "")


@pytest.mark.parametrize("empty", ["postgresql"], indirect=True)
def test_a_schema_of_its_own_keeps_everything_in_it(empty: Database, tmp_path: Path) -> None:
    engine = empty.engine()
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA other"))
    schema.upgrade(engine, schema="other")
    assert inspect(engine).get_table_names() == []
    assert {*inspect(engine).get_table_names("other")} == {*TABLES, schema.VERSION_TABLE}
    assert (schema.current(engine), schema.current(engine, schema="other")) == (None, schema.HEAD)
    with engine.connect() as connection:
        schema.require(connection, "other")
        with pytest.raises(SchemaMismatch, match="no table"):
            schema.require(connection)
        options = {"include_schemas": True, "include_name": _in_other}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, schema.metadata(engine.dialect, "other")) == []
    elsewhere = described(engine, "other")
    schema.upgrade(engine)
    assert described(engine) == elsewhere
    schema.downgrade(engine, schema="other")
    assert inspect(engine).get_table_names("other") == [schema.VERSION_TABLE]
    assert described(engine) == elsewhere
    engine.dispose()


def _in_other(name: str | None, type_: str, parents: object) -> bool:
    return name == "other" if type_ == "schema" else _ours(name, type_, parents)


# --- names ----------------------------------------------------------------------------------------


def test_every_constraint_and_index_has_a_name_that_fits_everywhere() -> None:
    items: list[Constraint] = [c for table in Base.metadata.tables.values() for c in table.constraints]
    names = [str(item.name or "") for item in items]
    names += [str(index.name or "") for table in Base.metadata.tables.values() for index in table.indexes]
    assert all(1 <= len(name.encode()) <= 63 for name in [*names, *TABLES, schema.VERSION_TABLE]), names
    assert len(names) == len({*names})


def test_the_database_has_no_names_of_its_own_making(engine: Engine) -> None:
    seen = inspect(engine)
    for table in TABLES:
        names = [seen.get_pk_constraint(table)["name"], *(i["name"] for i in seen.get_indexes(table))]
        names += [unique["name"] for unique in seen.get_unique_constraints(table)]
        for name in filter(None, names):
            assert table in name or name == "PRIMARY", name  # MySQL calls every primary key that


def test_revision_ids_fit_and_are_all_known() -> None:
    scripts = [*ScriptDirectory(str(ROOT / "migrations")).walk_revisions()]
    assert tuple(script.revision for script in reversed(scripts)) == schema.REVISIONS
    assert all(script.revision.startswith("fj") and len(script.revision) <= 32 for script in scripts)
    assert all(len(label) <= 32 for script in scripts for label in script.branch_labels)
    assert {*scripts[-1].branch_labels} == {"fencedjobs"}


def test_mysql_is_told_from_mariadb_by_the_dialect() -> None:
    assert not mysql.dialect().is_mariadb
    assert make_url("mariadb+pymysql://").get_dialect()().is_mariadb  # type: ignore[attr-defined]
