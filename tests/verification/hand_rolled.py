"""A queue as people write it: a claim that is atomic, and a completion that asks for the id alone."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, MetaData, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column


class Base(DeclarativeBase):
    metadata = MetaData()


class Task(Base):
    __tablename__ = "tasks"

    id: Mapped[str] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="queued")
    worker: Mapped[str | None]
    locked_until: Mapped[float] = mapped_column(default=0.0)
    result: Mapped[str | None]


class HandRolled:
    """``claim_next_job()`` and the rest."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def enqueue(self, id: str, now: float) -> None:
        with Session(self.engine) as session, session.begin():
            if session.get(Task, id) is None:
                session.add(Task(id=id))

    def claim(self, worker: str, now: float, ttl: float) -> tuple[str, Any] | None:
        free = (Task.status == "queued") | ((Task.status == "running") & (Task.locked_until <= now))
        with Session(self.engine) as session, session.begin():
            task = session.scalars(
                select(Task).where(free).order_by(Task.id).limit(1).with_for_update(skip_locked=True)
            ).first()
            if task is None:
                return None
            task.status, task.worker, task.locked_until = "running", worker, now + ttl
            return task.id, None

    def renew(self, id: str, worker: str, token: Any, now: float, ttl: float) -> bool:
        mine = (Task.id == id) & (Task.worker == worker) & (Task.status == "running")
        return self._changed(mine & (Task.locked_until > now), locked_until=now + ttl)

    def complete(self, id: str, worker: str, token: Any, now: float, result: Any) -> bool:
        return self._changed(Task.id == id, status="done", result=result)

    def release(self, id: str, worker: str, token: Any, now: float) -> bool:
        mine = (Task.id == id) & (Task.worker == worker) & (Task.status == "running")
        return self._changed(mine, status="queued", worker=None)

    def _changed(self, where: Any, **values: Any) -> bool:
        with Session(self.engine) as session, session.begin():
            changed: Any = session.execute(update(Task).where(where).values(values))
            return bool(changed.rowcount == 1)


class ByWorker(HandRolled):
    """Better: a completion asks for the worker, and whether its lock still runs. But not which attempt."""

    def complete(self, id: str, worker: str, token: Any, now: float, result: Any) -> bool:
        mine = (Task.id == id) & (Task.worker == worker) & (Task.status == "running")
        return self._changed(mine & (Task.locked_until > now), status="done", result=result)
