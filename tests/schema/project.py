"""A host's project as ``alembic init`` makes it, sync or async, and our lines in its ``env.py``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine

from fencedjobs import schema
from tests.databases import ASYNC_DRIVER, Database

IGNORE = "include_name=schema.include_name"
INI = """
[alembic]
script_location = %(here)s/history
path_separator = space
"""


class Project:
    """``template`` is that of ``alembic init``; ``options`` stand in its calls of ``context.configure``."""

    def __init__(self, database: Database, directory: Path, template: str, options: str) -> None:
        self.directory = directory / f"project-{template}"
        self.versions = self.directory / "history" / "versions"
        self.versions.mkdir(parents=True)
        (self.directory / "alembic.ini").write_text(INI)
        source = Path(Config().get_template_directory()) / template
        shutil.copy(source / "script.py.mako", self.directory / "history")
        env = (source / "env.py").read_text()
        (self.directory / "history" / "env.py").write_text(_edited(env, options))
        self.more_locations = ""
        self.metadata = MetaData()
        Table("orders", self.metadata, Column("id", Integer, primary_key=True))
        self.backend = database.backend
        self.url = database.url
        if template == "async":
            self.url = database.async_url(ASYNC_DRIVER[database.backend])

    @property
    def ini(self) -> Path:
        return self.directory / "alembic.ini"

    def config(self, output: StringIO | None = None) -> Config:
        config = Config(output_buffer=output) if output is not None else Config()
        config.set_main_option("script_location", str(self.directory / "history"))
        config.set_main_option("path_separator", "space")
        config.set_main_option("version_locations", f"{self.versions} {self.more_locations}".strip())
        config.set_main_option("sqlalchemy.url", self.url.render_as_string(False).replace("%", "%%"))
        config.attributes["metadata"] = self.metadata
        return config

    def autogenerate(self, message: str = "of the host's own") -> str:
        """Have the host's Alembic write a revision, and return it."""
        script = command.revision(self.config(), message, autogenerate=True)
        assert script is not None
        assert not isinstance(script, list)
        return Path(script.path).read_text()

    def upgrade(self, revision: str = "heads") -> None:
        command.upgrade(self.config(), revision)

    def downgrade(self, revision: str = "base") -> None:
        command.downgrade(self.config(), revision)

    def check(self) -> None:
        """``alembic check``: autogenerate would write nothing."""
        command.check(self.config())

    def script(self, *, down: bool = False) -> str:
        """What ``--sql`` prints. (Nobody can see in a URL of MySQL's that the server is MariaDB.)"""
        output = StringIO()
        config = self.config(output)
        if self.backend == "mariadb":
            config.set_main_option("sqlalchemy.url", "mariadb+pymysql://")
        move, where = (command.downgrade, "head:base") if down else (command.upgrade, "heads")
        move(config, where, sql=True)
        return output.getvalue()


def _edited(env: str, options: str) -> str:
    """The edits of a person who adds us."""
    assert env.count("target_metadata=target_metadata") == 2
    env = env.replace(
        "from alembic import context", "from alembic import context\n\nfrom fencedjobs import schema"
    )
    env = env.replace("fileConfig(config.config_file_name)", "pass  # the logging is that of the tests")
    env = env.replace("target_metadata = None", 'target_metadata = config.attributes["metadata"]')
    return env.replace("target_metadata=target_metadata", f"target_metadata=target_metadata, {options}")


@contextmanager
def engine_of(database: Database) -> Iterator[Engine]:
    engine = create_engine(database.url)
    try:
        yield engine
    finally:
        engine.dispose()


def is_used(engine: Engine) -> bool:
    """Whether a store would work on what is there."""
    with engine.connect() as connection:
        schema.require(connection)
    return True
