"""Several processes upgrade at once, and processes die in the middle of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, inspect
from sqlalchemy.pool import NullPool

from fencedjobs import schema
from fencedjobs.models import Base
from tests.databases import Database, empty_database
from tests.schema.catalog import TABLES, described

PROCESSES = 8
_fork = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def _by_engine(engine: Engine) -> None:
    schema.upgrade(engine)


def _by_connection(engine: Engine) -> None:
    with engine.begin() as connection:
        schema.upgrade(connection)


def _up(database: Database, barrier: Barrier, way: Callable[[Engine], None]) -> None:
    engine = database.engine(poolclass=NullPool)
    barrier.wait(30)
    way(engine)


def _race(database: Database, way: Callable[[Engine], None]) -> list[int | None]:
    barrier = _fork.Barrier(PROCESSES)
    racing = [_fork.Process(target=_up, args=(database, barrier, way)) for _ in range(PROCESSES)]
    for process in racing:
        process.start()
    for process in racing:
        process.join(60)
    return [process.exitcode for process in racing]


def _rounds(backend: str, directory: Path, way: Callable[[Engine], None], rounds: int) -> None:
    for _ in range(rounds):
        with empty_database(backend, directory) as database:
            assert _race(database, way) == [0] * PROCESSES
            engine = database.engine(poolclass=NullPool)
            assert {*inspect(engine).get_table_names()} == {*TABLES, schema.VERSION_TABLE}
            assert schema.current(engine) == schema.HEAD


@pytest.mark.parametrize("way", [_by_engine, _by_connection])
def test_eight_processes_upgrade_at_once_and_all_succeed(
    empty: Database, tmp_path: Path, way: Callable[[Engine], None]
) -> None:
    _rounds(empty.backend, tmp_path, way, rounds=4)


@pytest.mark.nightly
@pytest.mark.parametrize("way", [_by_engine, _by_connection])
def test_eight_processes_upgrade_at_once_fifty_times(
    empty: Database, tmp_path: Path, way: Callable[[Engine], None]
) -> None:
    _rounds(empty.backend, tmp_path, way, rounds=50)


def _until_killed(database: Database, after: int, move: Callable[[Engine], None]) -> None:
    """Run to the ``after``th statement that changes something, and die before anything is tidied up."""
    engine, left = database.engine(poolclass=NullPool), after

    def die(_c: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal left
        if statement.split()[0] in ("CREATE", "DROP", "INSERT", "DELETE"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    event.listen(engine, "after_cursor_execute", die)
    move(engine)


def _killed(database: Database, after: int, move: Callable[[Engine], None]) -> bool:
    process = _fork.Process(target=_until_killed, args=(database, after, move))
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def test_killed_after_any_statement_the_next_upgrade_completes_it(empty: Database, tmp_path: Path) -> None:
    with empty_database(empty.backend, tmp_path) as other:
        whole = other.engine(poolclass=NullPool)
        Base.metadata.create_all(whole)
        wanted = described(whole)
    engine = empty.engine(poolclass=NullPool)
    after = 1
    while _killed(empty, after, schema.upgrade):
        schema.upgrade(engine)  # at once: the dead process holds no lock
        assert described(engine) == wanted
        schema.downgrade(engine)
        after += 1
    assert after > len(TABLES) + 3, "it died nowhere"


def test_killed_after_any_statement_the_next_downgrade_completes_it(empty: Database) -> None:
    engine = empty.engine(poolclass=NullPool)
    after = 1
    schema.upgrade(engine)
    while _killed(empty, after, schema.downgrade):
        schema.downgrade(engine)
        assert inspect(engine).get_table_names() == [schema.VERSION_TABLE]
        schema.upgrade(engine)
        after += 1
    assert after > len(TABLES), "it died nowhere"
