"""A queue as many apps have one. All is well until a worker stalls."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import JSON, String, Text, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from business import Base, Shipment, engine

MAX_ATTEMPTS = 5
PATIENCE = timedelta(minutes=5)  # without a heartbeat, and a running job is taken from its worker


def now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)


class Job(Base):
    __tablename__ = "jobs"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(20), default="pending")  # running, done, failed
    payload: Mapped[Any] = mapped_column(JSON)
    run_at: Mapped[datetime] = mapped_column(default=now)
    attempts: Mapped[int] = mapped_column(default=0)
    locked_by: Mapped[str | None] = mapped_column(String(64))
    locked_at: Mapped[datetime | None]
    result: Mapped[Any | None] = mapped_column(JSON)
    error: Mapped[str | None] = mapped_column(Text)


def claim_next_job(worker: str) -> Job | None:
    waits = (Job.status == "pending") & (Job.run_at <= now())
    stalled = (Job.status == "running") & (Job.locked_at < now() - PATIENCE)
    next_one = select(Job).where(waits | stalled).order_by(Job.run_at, Job.id).limit(1)
    with Session(engine, expire_on_commit=False) as session, session.begin():
        job = session.scalars(next_one.with_for_update(skip_locked=True)).first()
        if job is not None:
            job.status, job.locked_by, job.locked_at = "running", worker, now()
            job.attempts += 1
        return job


def heartbeat(job_id: int) -> None:
    with Session(engine) as session, session.begin():
        session.execute(update(Job).where(Job.id == job_id).values(locked_at=now()))


def complete(session: Session, job_id: int, result: Any) -> None:
    session.execute(update(Job).where(Job.id == job_id).values(status="done", result=result))


def fail(job: Job, error: str) -> None:
    status = "pending" if job.attempts < MAX_ATTEMPTS else "failed"
    values = {"status": status, "error": error, "run_at": now() + timedelta(seconds=2**job.attempts)}
    with Session(engine) as session, session.begin():
        session.execute(update(Job).where(Job.id == job.id).values(values))


def pack(job: Job) -> None:
    with Session(engine) as session, session.begin():
        session.add(Shipment(order_id=job.payload["order"], qty=job.payload["qty"]))
        complete(session, job.id, {"packed": job.payload["qty"]})


def work(worker: str) -> None:
    """All jobs that there are; the real one waits and looks again."""
    while (job := claim_next_job(worker)) is not None:
        try:
            pack(job)
        except Exception as error:
            fail(job, repr(error))
