"""The sync form: one thread of its own, for callers in any thread, with or without a loop of theirs."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fencedjobs import FencedJobsError
from fencedjobs.senders.http import HttpSender
from fencedjobs.senders.thread import LoopThread
from tests.senders.helpers import EVENT, awaited, event
from tests.senders.receiver import Receiver, acknowledges


@pytest.fixture
def warehouse() -> Iterator[Receiver]:
    with Receiver(acknowledges) as receiver:
        yield receiver


def test_a_sender_without_a_send_has_no_thread() -> None:
    before = threading.active_count()
    with HttpSender("http://127.0.0.1:1"):
        assert threading.active_count() == before


def test_closing_ends_the_thread_and_a_later_send_starts_another(warehouse: Receiver) -> None:
    send = HttpSender(warehouse.url)
    before = {*threading.enumerate()}
    for _ in range(2):
        assert send(EVENT) is True
        own = [thread for thread in threading.enumerate() if thread.name == "HttpSender"]
        assert len(own) == 1
        send.close()
        assert not own[0].is_alive()
    send.close()
    awaited(
        lambda: not [thread for thread in {*threading.enumerate()} - before if thread.name == "HttpSender"]
    )
    assert warehouse.accepted == 2


def test_many_threads_share_one_sender(warehouse: Receiver) -> None:
    with HttpSender(warehouse.url) as send, ThreadPoolExecutor(8) as pool:
        assert [*pool.map(send, [event(id=f"order-{n}") for n in range(64)])] == [True] * 64
    assert len(warehouse.requests) == 64


async def test_it_may_be_called_where_a_loop_runs(warehouse: Receiver) -> None:
    with HttpSender(warehouse.url) as send:
        assert send(EVENT) is True
        assert await asyncio.to_thread(send, EVENT) is True


def test_what_nobody_waits_for_any_more_is_cancelled() -> None:
    thread, seen = LoopThread("test"), []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        thread.run(slow(), within=0.05)
    awaited(lambda: seen == ["cancelled"])
    thread.stop()
    assert not thread.is_running


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own(warehouse: Receiver) -> None:
    with HttpSender(warehouse.url) as send:
        assert send(EVENT) is True
        if not (child := os.fork()):
            os._exit(_code_of(send))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 73
        assert send(EVENT) is True


def _code_of(send: Any) -> int:
    try:
        send(EVENT)
    except FencedJobsError as error:
        send.close()
        return 73 if "make one per process" in str(error) else 1
    return 2


def test_importing_loads_no_transport_and_a_process_ends_though_its_sender_is_open(
    warehouse: Receiver,
) -> None:
    program = (
        "import sys, fencedjobs.senders\n"
        "print({'httpx', 'nats', 'aio_pika'} & {*sys.modules})\n"
        "from fencedjobs import Event; from fencedjobs.senders.http import HttpSender\n"
        f"send = HttpSender({warehouse.url!r})\n"
        "print(send(Event('a', 1, 1, 't', 'default', None, {}, 0.0, 1)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True
    )
    assert (done.stdout, done.stderr) == ("set()\nTrue\n", "")


@pytest.mark.parametrize(
    ("module", "library"), [("http", "httpx"), ("nats", "nats"), ("rabbitmq", "aio_pika")]
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str, library: str) -> None:
    for loaded in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"fencedjobs.senders.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'fencedjobs\[{module}\]'"):
        importlib.import_module(f"fencedjobs.senders.{module}")
