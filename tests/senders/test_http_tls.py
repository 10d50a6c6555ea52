"""Over TLS: the same deadline, and no ack from one whose certificate nobody vouches for."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from fencedjobs.senders.http import HttpSender
from tests.senders.helpers import EVENT, GRACE, at_most, refusal
from tests.senders.receiver import Connection, Receiver, Request, acknowledges

TIMEOUT = 0.5


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that is its own authority, with its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    directory = tmp_path_factory.mktemp("tls")
    key, made, both = (directory / name for name in ("key.pem", "cert.pem", "both.pem"))
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    )
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + made.read_bytes())
    return both


@pytest.fixture
def served(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_certificate_that_is_trusted_is_needed(certificate: Path, served: ssl.SSLContext) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate))
    with Receiver(acknowledges, tls=served) as receiver:
        with HttpSender(receiver.url, tls=trusting) as send:
            assert send(EVENT) is True
        with HttpSender(receiver.url) as send:
            assert "CERTIFICATE_VERIFY_FAILED" in refusal(send)
        with HttpSender(receiver.url.replace("127.0.0.1", "localhost"), tls=trusting) as send:
            assert "CERTIFICATE_VERIFY_FAILED" in refusal(send)
        assert len(receiver.requests) == 1


def test_authorities_of_the_environment_are_not_trusted(
    certificate: Path, served: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Receiver(acknowledges, tls=served) as receiver, HttpSender(receiver.url) as send:
        assert "CERTIFICATE_VERIFY_FAILED" in refusal(send)


def test_a_body_that_drips_cannot_outlast_the_deadline(certificate: Path, served: ssl.SSLContext) -> None:
    def drip(connection: Connection, request: Request) -> None:
        connection.say(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
        connection.drip(b"x" * 10_000)

    trusting = ssl.create_default_context(cafile=str(certificate))
    with (
        Receiver(drip, tls=served) as receiver,
        HttpSender(receiver.url, timeout=TIMEOUT, tls=trusting) as send,
    ):
        with at_most(TIMEOUT + GRACE):
            assert "no acknowledgement" in refusal(send)
        assert len(receiver.requests) == 1
