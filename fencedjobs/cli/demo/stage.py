"""What one run of the demo calls its own in the shop's database (a queue, a lane of the outbox, a table of
shipments, ids), and the tables of the warehouse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import BigInteger, Column, Integer, MetaData, Table

from fencedjobs.models import Job, Lock, OutboxEvent, tables
from fencedjobs.types import Key

DIES_WITH: Final = 73  # the exit code of the relay that dies

_WAREHOUSE: Final = MetaData()
STOCK: Final = Table("stock", _WAREHOUSE, Column("pieces", BigInteger, nullable=False))
DELIVERIES: Final = Table(
    "deliveries", _WAREHOUSE,
    Column("number", Integer, primary_key=True),
    Column("order_id", Key(), nullable=False),
    Column("fence", BigInteger, nullable=False),
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """Where a run takes place. The couriers get it as JSON over a pipe, since it has the password."""

    url: str
    queue: str
    table: str
    prefix: str = ""
    schema: str | None = None

    @property
    def lane(self) -> str:
        """The lane of the events of this run: as the queue is called."""
        return self.queue

    def job_id(self, order_id: str) -> str:
        """The id of the job that carries this order, and of the event that tells of it."""
        return self.prefix + order_id

    def order_id(self, job_id: str) -> str:
        """The order that this job carries."""
        return job_id.removeprefix(self.prefix)

    def shipments(self) -> Table:
        """The business table. No constraint forbids a second shipment: the fence has to."""
        return Table(
            self.table,
            MetaData(),
            Column("number", Integer, primary_key=True),
            Column("order_id", Key(), nullable=False),
            Column("qty", Integer, nullable=False),
            Column("courier", Key(), nullable=False),
            Column("fence", BigInteger, nullable=False),
        )

    def jobs(self) -> Table:
        """The table of jobs, of this run and of all others."""
        return tables(self.schema)[Job.__tablename__]

    def events(self) -> Table:
        """The outbox, of this run and of all others."""
        return tables(self.schema)[OutboxEvent.__tablename__]

    def locks(self) -> Table:
        """The locks, the lease of the lane among them."""
        return tables(self.schema)[Lock.__tablename__]
