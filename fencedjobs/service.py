"""The smallest form: one table, eight functions, and a clock that the caller passes in.

Each function takes a SQLite path, a database URL or an `Engine`, and runs in a transaction of its
own. It is the lease core on another table; jobs here are open while ``done = 0``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    URL,
    Engine,
    Integer,
    MetaData,
    NullPool,
    Table,
    create_engine,
    insert,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencedjobs import dialects
from fencedjobs import payload as edge
from fencedjobs.errors import InvalidValue, LeaseLost
from fencedjobs.leases import Leased
from fencedjobs.own import Transactions
from fencedjobs.row_leases import Leases
from fencedjobs.transaction import Transaction
from fencedjobs.types import Counter, Instant, Key, LongText
from fencedjobs.values import Lease

Where: TypeAlias = "str | os.PathLike[str] | URL | Engine"


class _Base(DeclarativeBase):
    metadata = MetaData()


class _Job(_Base):
    """Its columns are exactly these, in this order."""

    __tablename__ = "jobs"
    __table_args__ = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}  # noqa: RUF012

    id: Mapped[str] = mapped_column(Key(), primary_key=True, nullable=True)  # without a NOT NULL of its own
    owner: Mapped[str | None] = mapped_column(Key())
    until: Mapped[float] = mapped_column(Instant(), server_default=text("0"))
    fence: Mapped[int] = mapped_column(Counter, server_default=text("0"))
    result: Mapped[str | None] = mapped_column(LongText())
    done: Mapped[int] = mapped_column(Integer, server_default=text("0"))


_TABLE: Final[Table] = _Job.__table__  # type: ignore[assignment]
_LEASED: Final = Leased(table=_TABLE, key=_TABLE.c.id, open=_TABLE.c.done == 0)


def init_db(path: Where) -> None:
    """Create the table ``jobs`` if it is not there."""
    _transactions(path).run(_create, direct=False)


def enqueue(path: Where, job_id: str) -> bool:
    """Register a job; false if it is registered already, which changes nothing, least of all a lease."""
    id = edge.key("job_id", job_id)
    return _transactions(path).run(lambda tx: _register(tx, id))


def state(path: Where, job_id: str) -> dict[str, Any] | None:
    """The row as it is in the database: id, owner, until, fence, result, done; ``None`` if there is none."""
    reading = select(_TABLE).where(_TABLE.c.id == edge.key("job_id", job_id))
    row = _transactions(path).run(lambda tx: tx.execute(reading).first(), reading=True)
    return None if row is None else dict(row._mapping)


def claim(path: Where, job_id: str, owner: str, now: float, ttl: float) -> int | None:
    """Take the lease for ``ttl`` after ``now``; its fence, or ``None`` if it is held, done or unknown."""
    id = edge.key("job_id", job_id)
    lease = _transactions(path).run(lambda tx: Leases(tx, _LEASED).claim(id, owner, ttl=ttl, now=_given(now)))
    return None if lease is None else lease.fence


def renew(path: Where, job_id: str, owner: str, fence: int, now: float, ttl: float) -> bool:
    """Move the lease's end to ``ttl`` after ``now``; false, and no change, if it is lost or has run out."""
    lease = _lease(job_id, owner, fence)
    return _kept(path, lambda verbs: verbs.renew(lease, ttl=ttl, now=_given(now)))


def complete(path: Where, job_id: str, owner: str, fence: int, now: float, result: str | None) -> bool:
    """Store the result and mark the job done; false, and no change, if the lease is lost or has run out."""
    lease, written = _lease(job_id, owner, fence), {"result": _result(result), "done": 1}
    return _kept(path, lambda verbs: verbs.write(lease, written, now=_given(now)))


def release(path: Where, job_id: str, owner: str, fence: int) -> bool:
    """Give the lease back, also after its end; false, and no change, if it is not held. The fence stays."""
    lease = _lease(job_id, owner, fence)
    return _kept(path, lambda verbs: verbs.release(lease))


def claim_many(path: Where, job_id: str, owners: Sequence[str], now: float, ttl: float) -> list[int | None]:
    """Claim for all owners at the same time, one thread each; the answers in their order.

    Of a fresh job exactly one gets the fence.
    """
    id, names = edge.key("job_id", job_id), [edge.key("owners", owner) for owner in owners]
    edge.ttl(ttl, _given(now))
    if not names:
        return []
    together = Barrier(len(names))

    def one(owner: str) -> int | None:
        together.wait()
        return claim(path, id, owner, now, ttl)

    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(one, names))


def _kept(path: Where, verb: Any) -> bool:
    try:
        _transactions(path).run(lambda tx: verb(Leases(tx, _LEASED)))
    except LeaseLost:
        return False
    return True


def _create(tx: Transaction) -> None:
    with dialects.one_upgrade(tx.connection, None):  # looking and creating are two steps
        _Base.metadata.create_all(tx.connection)


def _register(tx: Transaction, id: str) -> bool:
    absent = tx.capabilities.insert_absent
    if absent is not None:
        return bool(tx.execute(absent(_TABLE, _TABLE.c.id).values(id=id).returning(_TABLE.c.id)).all())
    try:
        tx.execute(insert(_TABLE).values(id=id))
    except IntegrityError as error:
        if not dialects.is_duplicate(error):
            raise
        return False
    return True


def _lease(job_id: str, owner: str, fence: int) -> Lease:
    number = edge.whole("fence", fence, least=-(2**63), most=2**63 - 1)
    return Lease(edge.key("job_id", job_id), edge.key("owner", owner), number, 0.0)


def _given(now: float) -> float:
    return edge.instant("now", now)


def _result(result: str | None) -> str | None:
    return None if result is None else edge.text("result", result)


def _transactions(path: Where) -> Transactions:
    if isinstance(path, Engine):
        return Transactions(path)
    url = path if isinstance(path, URL) else _url(os.fspath(path))
    return _of_url(url, os.getpid(), _directory())


def _url(path: str) -> URL:
    if "://" in path:
        return make_url(path)
    if path in ("", ":memory:"):
        raise InvalidValue("path", f"{path!r} is no file, and would be gone after each call")
    return URL.create("sqlite", database=path)


def _directory() -> str:
    """What a relative path starts from."""
    try:
        return os.getcwd()
    except FileNotFoundError:  # an absolute one does not need it
        return ""


@lru_cache(maxsize=64)
def _of_url(url: URL, pid: int, directory: str) -> Transactions:
    """One engine for each database and process; no pool, so that each call opens what is there now."""
    return Transactions(create_engine(url, poolclass=NullPool))
