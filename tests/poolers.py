"""A PgBouncer in transaction mode: the real program, in front of the tests' PostgreSQL."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL

from tests.servers import Server, answers, free_port, home_and_user, program, run_as


@contextmanager
def pgbouncer(url: URL, *, mode: str = "transaction", turns: bool = True) -> Iterator[int]:
    """The port of one; `Missing` if there is no such program. It ends with the block.

    ``turns``: each transaction is on another connection, so what outlives one turns up in somebody else's.
    """
    binary = program("pgbouncer")
    home, user = home_and_user()
    port = free_port()
    (home / "ini").write_text(_configured(url, home, port, mode, turns))
    with (home / "log").open("wb") as log:
        process = subprocess.Popen([binary, home / "ini"], stdout=log, stderr=log, cwd=home, **run_as(user))
    server = Server(url.set(host="127.0.0.1", port=port), process, home)
    try:
        end = time.monotonic() + 30
        while not answers(server.url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"pgbouncer did not start:\n{(home / 'log').read_text()}")
            time.sleep(0.02)
        yield port
    finally:
        server.stop()


def _configured(url: URL, home: Path, port: int, mode: str, turns: bool) -> str:
    password = f" password={url.password}" if url.password else ""
    return f"""
[databases]
* = host={url.host} port={url.port or 5432} user={url.username or "postgres"}{password}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = 6
server_round_robin = {int(turns)}
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
"""
