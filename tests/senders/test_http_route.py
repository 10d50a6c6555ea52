"""Where a request goes: to the URL it was given, over no proxy, to no redirect, with no one's password."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from sqlalchemy import Engine

from fencedjobs import InvalidValue, NotAcknowledged
from fencedjobs.relay import dispatch
from fencedjobs.senders.http import HttpSender
from tests.senders.helpers import EVENT, left_pending, refusal, with_event
from tests.senders.receiver import Connection, Receiver, Request, acknowledges, answer, says

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
SECRET = "swordfish"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize(
    ("status", "ack"), [(301, "id"), (302, "id"), (303, "id"), (307, "id"), (308, "id"), (302, "status")]
)
def test_a_redirect_is_not_followed_and_is_no_ack(engine: Engine, status: int, host: str, ack: str) -> None:
    with Receiver(acknowledges) as other:
        to = f"http://{host}:{other.port}/elsewhere"
        redirect = answer(f"{status} Moved", b'{"id": "order-7"}', f"Location: {to}")
        with Receiver(says(redirect)) as receiver:
            send = HttpSender(receiver.url, headers={"Authorization": "Bearer secret"}, ack=ack)  # type: ignore[arg-type]
            with send:
                reason = left_pending(with_event(engine), send)
            assert f"status {status}, a redirect to" in reason
            assert to in reason
            assert len(receiver.requests) == 1
        assert other.accepted == 0


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_proxies_and_passwords_of_the_environment_are_not_used(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text(
        "machine 127.0.0.1 login robber password swordfish\ndefault login robber password swordfish\n"
    )
    netrc.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("no_proxy", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    with Receiver(acknowledges) as proxy, Receiver(acknowledges) as receiver:
        for name in PROXIES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        with HttpSender(receiver.url) as send:
            assert dispatch(with_event(engine), send) == 1
        assert proxy.accepted == 0
        (request,) = receiver.requests
    assert request.line == "POST /events HTTP/1.1"
    assert not {"authorization", "proxy-authorization", "cookie"} & set(request.headers)


@pytest.mark.parametrize(
    "url",
    ["", "warehouse", "/events", "ftp://warehouse/", "file:///etc/passwd", "http://", "http:///events", "http://[::1",
     "http://ware\nhouse/", "http://warehouse/\r\nX: y", "http://warehouse:port/", None, 7],
)  # fmt: skip
def test_a_url_has_to_name_a_host(url: str) -> None:
    with pytest.raises(InvalidValue, match="url: "):
        HttpSender(url)


@pytest.mark.parametrize("host", ["[::1", "warehouse/"])
def test_a_url_with_a_password_is_refused_without_showing_it(host: str) -> None:
    with pytest.raises(InvalidValue, match="url: ") as caught:
        HttpSender(f"http://robber:{SECRET}@{host}")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://warehouse.example/", True),
        ("http://WAREHOUSE.Example:81/", True),
        ("https://warehouse.example.evil/", False),
        ("https://evil/warehouse.example", False),
        ("http://evil/#@warehouse.example", False),
        ("http://127.0.0.1/", False),
    ],
)
def test_only_allowed_hosts_can_be_named(url: str, allowed: bool) -> None:
    hosts = ["Warehouse.example", "other"]
    if allowed:
        HttpSender(url, allow_hosts=hosts)
    else:
        with pytest.raises(InvalidValue, match="not among those allowed"):
            HttpSender(url, allow_hosts=hosts)
    with pytest.raises(InvalidValue, match="not among those allowed"):
        HttpSender(url, allow_hosts=[])


@pytest.mark.parametrize(
    "headers",
    [
        *({"X-Key": value} for value in ("a\r\nX-Admin: yes", "a\nb", "a\0b", " a", "a\x7f", "é", 7)),
        *({name: "a"} for name in ("X Key", "X-Key:", "X-Key\r\n", "", "X-Kéy", 7)),
        *({name: "a"} for name in ("Host", "content-length", "Transfer-Encoding", "Idempotency-KEY")),
        *({name: "a"} for name in ("Accept-Encoding", "Content-Type", "Connection")),
    ],
)
def test_headers_cannot_smuggle(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidValue, match="headers: "):
        HttpSender("http://127.0.0.1:1", headers=headers)


@pytest.mark.parametrize("ack", ["ID", "body", "", None, True])
def test_an_unknown_mode_is_refused(ack: str) -> None:
    with pytest.raises(InvalidValue, match="ack: "):
        HttpSender("http://127.0.0.1:1", ack=ack)  # type: ignore[arg-type]


def test_a_receiver_that_echoes_our_credentials_does_not_bring_them_into_errors() -> None:
    def echo(connection: Connection, request: Request) -> None:
        connection.say(answer("401 No", f"who is {request.headers['authorization']}?".encode()))

    receiver = Receiver(echo)
    with receiver, HttpSender(receiver.url, headers={"Authorization": f"Bearer {SECRET}"}) as send:
        assert refusal(send) == "status 401: who is ***?"
        with pytest.raises(NotAcknowledged) as caught:
            send(EVENT)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_redirect_that_repeats_our_key_does_not_bring_it_into_errors() -> None:
    to = f"Location: /other/?key={SECRET}"
    with Receiver(says(answer("302 Found", b"", to))) as receiver:
        with HttpSender(f"{receiver.url}?key={SECRET}") as send:
            assert refusal(send) == "status 302, a redirect to '/other/?key=***', which is not followed"
        assert receiver.requests[0].line == f"POST /events?key={SECRET} HTTP/1.1"
