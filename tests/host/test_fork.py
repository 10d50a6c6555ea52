"""A process that forks: the child has connections of its own, and the parent keeps its. FAULTS 86."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from fencedjobs import Store
from tests.databases import BACKENDS, Database

CHILDREN, ROUNDS = 4, 5


def in_child(work: Callable[[], None]) -> int:
    """The process id of a child that does this and ends."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - a child must not go on as a second test run
        traceback.print_exc()
    finally:
        os._exit(code)


def work_off(store: Store, name: str) -> None:
    for number in range(ROUNDS):
        id = f"{name}-{number}"
        assert store.enqueue(id) == id
        lease = store.claim(name, ttl=60, id=id)
        assert lease is not None
        with store.completing(lease) as uow:
            uow.jobs.enqueue(f"{id} followed")
        record = store.get(id)
        assert record is not None
        assert (record.state, record.last_owner) == ("done", name)


@pytest.mark.parametrize("disposes", [False, True], ids=["as it is", "disposed of by the host"])
@pytest.mark.parametrize("by_sessions", [False, True], ids=["engine", "sessionmaker"])
@pytest.mark.parametrize("database", BACKENDS, indirect=True)
def test_children_and_parent_work_at_the_same_time(
    database: Database, engine: Engine, disposes: bool, by_sessions: bool
) -> None:
    store = Store(sessionmaker(engine) if by_sessions else engine)
    with engine.connect(), engine.connect():
        store.enqueue("before")  # three connections in the pool

    def child(number: int) -> None:
        if disposes:
            engine.dispose(close=False)
        work_off(store, f"child {number}")

    pids = [in_child(lambda number=number: child(number)) for number in range(CHILDREN)]  # type: ignore[misc]
    work_off(store, "parent")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * CHILDREN
    done = (CHILDREN + 1) * ROUNDS
    assert store.counts() == {"default": {"done": done, "ready": done + 1}}


def test_the_default_owner_is_another_in_the_child(engine: Engine) -> None:
    store = Store(engine)
    parent = store.owner

    def child() -> None:
        assert store.owner != parent

    assert os.waitstatus_to_exitcode(os.waitpid(in_child(child), 0)[1]) == 0
    assert store.owner == parent
