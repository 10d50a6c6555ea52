"""``relay``: against a real HTTP server, once or until it is told to stop, and what it never prints."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aio_pika
import nats
import pytest
from nats.js.api import StreamConfig
from sqlalchemy import URL, Engine, text

from fencedjobs import Store
from fencedjobs.locks import LANE
from tests.cli.helpers import COMMAND, EACH_DATABASE, ISO, environment, run, text_of
from tests.senders.conftest import name as name
from tests.senders.receiver import Connection, Receiver, Request, acknowledges, answer

REFUSED = "FAILED order-2 (attempt 1): 'status 503: no shelf'"

FULL = """
    CREATE TRIGGER full BEFORE UPDATE ON fenced_outbox BEGIN SELECT RAISE(ABORT, 'the shelf is full'); END
"""


@pytest.fixture
def store(engine: Engine) -> Store:
    """With three events of one lane, and one of another."""
    store = Store(engine)
    for number in (1, 2, 3):
        store.outbox.add(f"order-{number}", {"qty": number}, topic="warehouse")
    store.outbox.add("mail-1", "hello", topic="mail", lane="mail")
    return store


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(acknowledges) as receiver:
        yield receiver


def refuses(id: str) -> Any:
    """A script that refuses one event."""

    def script(connection: Connection, request: Request) -> None:
        if request.json["id"] == id:
            connection.say(answer("503 Busy", b"no shelf"))
        else:
            acknowledges(connection, request)

    return script


def received(receiver: Receiver) -> list[str]:
    return [request.json["id"] for request in receiver.requests]


def states(store: Store) -> list[str]:
    found = [store.outbox.get(id) for id in ("order-1", "order-2", "order-3", "mail-1")]
    return [event.state.value for event in found if event]


# --- once -----------------------------------------------------------------------------------------


@EACH_DATABASE
def test_once_sends_what_is_there_and_ends(store: Store, url: URL, receiver: Receiver) -> None:
    done = run("relay", "--to", receiver.url, "--once", url=url)
    assert (done.code, done.out, done.err) == (0, "3 sent\n", "")
    assert received(receiver) == ["order-1", "order-2", "order-3"]
    assert states(store) == ["sent", "sent", "sent", "pending"]
    both = run("relay", "--to", receiver.url, "--once", "--lane", "default", "--lane", "mail", url=url)
    assert (both.code, both.out) == (0, "1 sent\n")
    assert states(store)[-1] == "sent"


def test_each_sent_event_is_a_line_if_somebody_looks(store: Store, url: URL, receiver: Receiver) -> None:
    done = run("relay", "--to", receiver.url, "--once", "-v", url=url)
    stamp, *lines = done.out.splitlines()[0].split("  "), *done.out.splitlines()[1:]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", stamp[0])
    assert stamp[1:] == ["default", "sent order-1 (fence 1)"]
    assert lines[-1] == "3 sent"


def test_as_json_each_event_is_an_object_on_a_line(store: Store, url: URL) -> None:
    with Receiver(refuses("order-2")) as receiver:
        done = run("relay", "--to", receiver.url, "--once", "--json", url=url)
    assert (done.code, done.err) == (1, "")
    sent, failed, ended = [json.loads(line) for line in done.out.splitlines()]
    assert all(ISO.fullmatch(line.pop("at")) for line in (sent, failed, ended))
    assert sent == {"event": "relay.sent", "lane": "default", "id": "order-1", "attempt": 1, "fence": 1}
    assert failed.pop("error").endswith("was not acknowledged: 'status 503: no shelf'")
    assert failed == {"event": "relay.failed", "lane": "default", "id": "order-2", "attempt": 1}
    assert ended == {"event": "relay.ended", "sent": 1, "still_pending": ["default"]}


def test_once_ends_a_lane_at_its_first_failure_and_goes_on_with_the_others(store: Store, url: URL) -> None:
    with Receiver(refuses("order-2")) as receiver:
        done = run("relay", "--to", receiver.url, "--once", "--lane", "default", "--lane", "mail", url=url)
        assert received(receiver) == ["order-1", "order-2", "mail-1"]
    assert (done.code, done.out) == (1, "2 sent\n")
    failed, still = done.err.splitlines()
    assert failed.endswith(f"  default  {REFUSED}")
    assert still == "Still pending: default."
    assert states(store) == ["sent", "pending", "pending", "sent"]


def test_once_with_max_attempts_sets_aside_and_goes_on(store: Store, url: URL) -> None:
    with Receiver(refuses("order-2")) as receiver:
        done = run("relay", "--to", receiver.url, "--once", "--max-attempts", "2", url=url)
        assert received(receiver) == ["order-1", "order-2", "order-2", "order-3"]
    assert (done.code, done.out) == (1, "2 sent\n")
    failed, aside = done.err.splitlines()
    assert failed.endswith(REFUSED)
    assert aside.endswith("QUARANTINED order-2 after 2 attempts: 'status 503: no shelf'")
    assert states(store)[:3] == ["sent", "quarantined", "sent"]


def test_once_leaves_a_lane_that_another_relay_holds(store: Store, url: URL, receiver: Receiver) -> None:
    assert store.locks.claim(LANE + "default", "another", ttl=60)
    done = run("relay", "--to", receiver.url, "--once", url=url)
    assert (done.code, done.out, done.err) == (0, "0 sent\n", "Still pending: default.\n")


@pytest.mark.parametrize("options", [[], ["--max-attempts", "5"]])
def test_once_ends_when_the_database_gives_trouble(
    store: Store, engine: Engine, url: URL, receiver: Receiver, options: list[str]
) -> None:
    with engine.begin() as connection:
        connection.execute(text(FULL))
    done = run("relay", "--to", receiver.url, "--once", *options, url=url)
    assert (done.code, done.out) == (1, "0 sent\n")
    trouble, still = done.err.splitlines()
    assert trouble.endswith("TROUBLE: IntegrityError('(sqlite3.IntegrityError) the shelf is full')")
    assert still == "Still pending: default."


def test_headers_and_ack_go_to_the_sender(store: Store, url: URL) -> None:
    with Receiver(lambda connection, request: connection.say(answer("204 No Content"))) as receiver:
        options = ["--header", "Authorization=Bearer a=b", "--header", "X-Shop=1"]
        doubted = run("relay", "--to", receiver.url, "--once", *options, url=url)
        assert (doubted.code, "its body is empty" in doubted.err) == (1, True)
        assert run("relay", "--to", receiver.url, "--once", "--ack", "status", url=url).code == 0
        first = receiver.requests[0].headers
    assert (first["authorization"], first["x-shop"]) == ("Bearer a=b", "1")


def test_where_to_comes_from_the_environment_as_well(
    store: Store, url: URL, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FENCEDJOBS_TO", receiver.url)
    assert run("relay", "--once", "--mark-every", "3", url=url).out == "3 sent\n"


# --- to brokers -----------------------------------------------------------------------------------


def test_to_a_stream_of_nats(engine: Engine, url: URL, nats_url: str, name: str) -> None:
    async def relayed() -> int:
        async with await nats.connect(nats_url) as client:
            streams = client.jetstream()
            await streams.add_stream(StreamConfig(name=name, subjects=[name]))
            try:
                done = await asyncio.to_thread(run, "relay", "--to", nats_url, "--once", url=url)
                assert (done.code, done.out) == (0, "1 sent\n")
                return (await streams.stream_info(name)).state.messages
            finally:
                await streams.delete_stream(name)

    Store(engine).outbox.add("order-1", {"qty": 7}, topic=name)
    assert asyncio.run(relayed()) == 1


def test_to_a_queue_of_rabbitmq(engine: Engine, url: URL, rabbitmq_url: str, name: str) -> None:
    async def relayed() -> bytes | None:
        async with await aio_pika.connect(rabbitmq_url) as connection:
            queue = await (await connection.channel()).declare_queue(name)
            try:
                done = await asyncio.to_thread(run, "relay", "--to", rabbitmq_url, "--once", url=url)
                assert (done.code, done.out) == (0, "1 sent\n")
                message = await queue.get(no_ack=True)
                return message.body if message else None
            finally:
                await queue.delete()

    Store(engine).outbox.add("order-1", {"qty": 7}, topic=name)
    assert asyncio.run(relayed()) == b'{"qty":7}'


# --- until it is told to stop ---------------------------------------------------------------------


@contextmanager
def relaying(url: URL, to: str, cwd: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [*COMMAND, "relay", "--to", to, "--url", text_of(url), "--verbose", *options], cwd=cwd,
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_runs_until_it_is_told_to_stop(
    store: Store, url: URL, receiver: Receiver, tmp_path: Path, number: signal.Signals
) -> None:
    with relaying(
        url, receiver.url + "?token=geheim", tmp_path, "--lane", "mail", "--lane", "default"
    ) as child:
        assert child.stdout
        assert [child.stdout.readline().split()[-3] for _ in range(4)] == [
            "mail-1", "order-1", "order-2", "order-3"
        ]  # fmt: skip
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "Stopped: 4 sent\n")
    where = f"http://127.0.0.1:{receiver.port}"
    assert err == f"Relaying mail, default to {where} until Ctrl-C or SIGTERM.\n"
    assert store.locks.claim(LANE + "default", "another", ttl=60)  # it was given back


def stop() -> None:
    """SIGTERM for this process, in which a relay runs and handles it."""
    assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


def test_told_to_stop_it_finishes_the_event_that_is_being_sent(store: Store, url: URL) -> None:
    def stops_first(connection: Connection, request: Request) -> None:
        stop()
        acknowledges(connection, request)

    with Receiver(stops_first) as receiver:
        done = run("relay", "--to", receiver.url, url=url)
    assert (done.code, done.out) == (0, "Stopped: 1 sent\n")
    assert states(store)[:2] == ["sent", "pending"]


def test_it_tries_again_what_failed(store: Store, url: URL) -> None:
    def busy_at_first(connection: Connection, request: Request) -> None:
        if len(busy.requests) == 1:
            connection.say(answer("503 Busy"))
        else:
            stop()
            acknowledges(connection, request)

    with Receiver(busy_at_first) as busy:
        done = run("relay", "--to", busy.url, "--verbose", url=url)
    assert done.code == 0
    assert "sent order-1 (fence 2, attempt 2)\nStopped: 1 sent\n" in done.out
    assert "FAILED order-1 (attempt 1): 'status 503: '\n" in done.err


def test_it_ends_when_nobody_reads_its_lines_and_marks_what_was_sent(
    store: Store, url: URL, receiver: Receiver, tmp_path: Path
) -> None:
    with relaying(url, receiver.url, tmp_path, "--once") as child:
        assert child.stdout
        child.stdout.close()
        assert child.wait(60) == 1
        assert child.stderr
        assert "Traceback" not in child.stderr.read()
        child.stdout = None
    assert states(store)[: len(receiver.requests)] == ["sent"] * len(receiver.requests)


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing option '--to'"),
        (["--to", ""], "--to"),
        (["--to", "geheim"], "must be an http://, https://, nats://, amqp:// or amqps:// URL"),
        (["--to", "ftp://u:geheim@h/"], "must be an http://"),
        (["--to", "http://"], "--to: must be http:// or https:// with a host"),
        (["--to", "http://u:geheim@h/"], "--to: must not have a user or password"),
        (["--to", "http://geheim:port/"], "--to cannot be read as a URL"),
        (["--to", "http://[geheim/"], "--to cannot be read as a URL"),
        (["--to", "http://h/", "--header", "geheim"], "must be NAME=VALUE"),
        (["--to", "http://h/", "--header", "=geheim"], "must be NAME=VALUE"),
        (["--to", "http://h/", "--header", "Host=geheim"], "--header: 'Host' is set by the sender"),
        (["--to", "http://h/", "--header", "X=geheim\n"], "--header: the value of 'X'"),
        (["--to", "http://h/", "--ack", "maybe"], "'--ack'"),
        (["--to", "http://h/", "--timeout", "0"], "--timeout: must be above 0"),
        (["--to", "http://h/", "--timeout", "60"], "must be longer than the sender's timeout"),
        (["--to", "http://h/", "--ttl", "nan"], "ttl: must be finite"),
        (["--to", "http://h/", "--lane", ""], "must have 1 to 255 characters"),
        (["--to", "http://h/", "--mark-every", "101"], "'--mark-every'"),
        (["--to", "http://h/", "--max-attempts", "0"], "'--max-attempts'"),
        (["--to", "http://h/", "--max-attempts", "1", "--mark-every", "2"], "mark_every: must be 1"),
        (["--to", "nats://u:geheim@h", "--header", "a=b"], "for http:// and https:// only"),
        (["--to", "amqp://u:geheim@h", "--ack", "status"], "for http:// and https:// only"),
    ],
)
def test_a_bad_argument_ends_it_before_it_begins(url: URL, arguments: list[str], words: str) -> None:
    for once in ([], ["--once"]):
        refused = run("relay", *arguments, *once, url=url)
        assert (refused.code, refused.out) == (2, "")
        assert words in refused.err
        assert "geheim" not in refused.err


def test_without_tables_it_says_so(url: URL, empty: Any) -> None:
    empty.engine().connect().close()  # SQLite's file is there
    refused = run("relay", "--to", "http://127.0.0.1:1/", "--once", url=empty.url)
    assert (refused.code, "fencedjobs upgrade" in refused.err) == (3, True)


@pytest.mark.parametrize(
    ("to", "package", "advice"),
    [
        ("http://h/", "httpx", "HttpSender needs httpx: pip install 'fencedjobs[http]'"),
        ("nats://h/", "nats", "JetStreamSender needs nats-py: pip install 'fencedjobs[nats]'"),
        ("amqp://h/", "aio_pika", "RabbitSender needs aio-pika: pip install 'fencedjobs[rabbitmq]'"),
    ],
)
def test_a_missing_package_is_one_line_of_advice(
    url: URL, monkeypatch: pytest.MonkeyPatch, to: str, package: str, advice: str
) -> None:
    loaded = [one for one in sys.modules if one.startswith(f"{package}.")]
    for module in [*loaded, *(f"fencedjobs.senders.{one}" for one in ("http", "nats", "rabbitmq"))]:
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    refused = run("relay", "--to", to, url=url)
    assert (refused.code, refused.out, refused.err) == (3, "", f"Error: {advice}\n")


@pytest.mark.parametrize("scheme", ["http", "nats", "amqp"])
def test_secrets_are_never_printed(store: Store, url: URL, scheme: str, tmp_path: Path) -> None:
    """A receiver that nobody runs: the connection fails, and is told without the secrets of --to."""
    who = "" if scheme == "http" else "ann:geh%2Feim@"
    to = f"{scheme}://{who}127.0.0.1:1/hook-geheim?token=geheim"
    header = ["--header", "Authorization=Bearer geheim"] if scheme == "http" else []
    for form in ([], ["--json"]):
        failed = run("relay", "--to", to, "--once", *header, *form, url=url)
        assert failed.code == 1
        assert "order-1" in failed.out + failed.err
        assert "Traceback" not in failed.err
        for secret in ("geheim", "geh%2Feim", "geh/eim"):
            assert secret not in failed.out + failed.err
