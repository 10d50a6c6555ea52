"""A project of somebody else's: the installed wheel, its own models and history, and three lines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from textwrap import dedent

import pytest
from sqlalchemy import inspect

from tests.cli.helpers import text_of
from tests.databases import Database

ROOT = Path(__file__).parents[2]
SOURCES = ("fencedjobs", "migrations", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "alembic.ini")

FILES = {
    "models.py": """
        import os

        from sqlalchemy import create_engine
        from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

        from fencedjobs import Store


        class Base(DeclarativeBase):
            pass


        class Order(Base):
            __tablename__ = "orders"

            id: Mapped[int] = mapped_column(primary_key=True)


        engine = create_engine(os.environ["SHOP_URL"], pool_pre_ping=True)
        store = Store(engine)
    """,
    "alembic.ini": """
        [alembic]
        script_location = %(here)s/history
        path_separator = os
        prepend_sys_path = .
    """,
    "history/env.py": """
        from alembic import context

        from fencedjobs import schema
        from models import Base, engine

        with engine.begin() as connection:
            context.configure(
                connection=connection, target_metadata=Base.metadata, include_name=schema.include_name
            )
            with context.begin_transaction():
                context.run_migrations()
    """,
    "history/versions/0001_orders.py": """
        import sqlalchemy as sa
        from alembic import op

        revision, down_revision = "0001", None


        def upgrade():
            op.create_table("orders", sa.Column("id", sa.Integer, primary_key=True))
    """,
    "history/versions/0002_jobs.py": """
        from fencedjobs import schema

        revision, down_revision = "0002", "0001"


        def upgrade():
            schema.up("fj0001")
    """,
    "test_contract.py": """
        from fencedjobs.testing.machines import job_machine
        from models import store
        TestJobs = job_machine(store).TestCase
    """,
    "conftest.py": """
        import os

        import pytest
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "shop", max_examples=int(os.environ["EXAMPLES"]), stateful_step_count=int(os.environ["STEPS"]),
            deadline=None, database=None, suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("shop")


        @pytest.fixture(autouse=True, scope="session")
        def mistake():
            from fencedjobs.testing.faults import planted

            if name := os.environ.get("PLANTED"):
                with planted(name):
                    yield
            else:
                yield
    """,
}


def finished(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env={**kept, **environment}, timeout=300,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the built wheel; what it needs is lent by the one that runs the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, copied = ROOT / name, folder / "source" / name
        copied.parent.mkdir(exist_ok=True)
        shutil.copytree(source, copied) if source.is_dir() else shutil.copy(source, copied)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    built = finished(*pip, "wheel", "--no-deps", "-w", folder, folder / "source", cwd=folder)
    assert built.returncode == 0, built.stderr
    assert finished(sys.executable, "-m", "venv", folder / "venv", cwd=folder).returncode == 0
    interpreter = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    installed = finished(interpreter, "-m", "pip", "-q", "install", "--no-deps", wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return interpreter


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(content))
    return tmp_path


def checked(python: Path, project: Path, database: Database, **environment: str) -> tuple[int, str]:
    """Migrate by the project's own history, and run its tests."""
    url = text_of(database.url)
    options = {"SHOP_URL": url, "EXAMPLES": "8", "STEPS": "20", **environment}
    where = finished(python, "-c", "import fencedjobs; print(fencedjobs.__file__)", cwd=project)
    assert Path(where.stdout.strip()).is_relative_to(python.parents[1]), where
    migrated = finished(python, "-m", "alembic", "upgrade", "head", cwd=project, **options)
    assert migrated.returncode == 0, migrated.stderr
    ran = finished(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project, **options)
    return ran.returncode, ran.stdout


@pytest.mark.kit
def test_three_lines_check_the_contract_on_the_projects_own_database(
    python: Path, project: Path, empty: Database
) -> None:
    code, out = checked(python, project, empty)
    assert (code, "1 passed" in out) == (0, True), out
    engine = empty.engine()
    assert {"orders", "fenced_jobs", "alembic_version"} <= {*inspect(engine).get_table_names()}
    engine.dispose()


@pytest.mark.kit
@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_a_mistake_is_told_as_a_short_story(python: Path, project: Path, empty: Database) -> None:
    how = {"PLANTED": "attempts_counted_at_failure", "EXAMPLES": "50", "STEPS": "4"}
    code, out = checked(python, project, empty, **how)
    steps = [line for line in out.splitlines() if line.lstrip("E |").startswith("state.s")]
    assert code == 1, out
    assert "Disagreement" in out
    assert 1 <= len(steps) <= 10, out
