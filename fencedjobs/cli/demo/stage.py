"""What one run of the demo calls its own in the database: a queue, a table of shipments, ids."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import BigInteger, Column, Integer, MetaData, Table

from fencedjobs.dialects import Key
from fencedjobs.models import Job, tables


@dataclass(frozen=True)
class Stage:
    """Where a run takes place. The couriers get it as JSON over a pipe, since it has the password."""

    url: str
    queue: str
    table: str
    prefix: str = ""
    schema: str | None = None

    def job_id(self, order_id: str) -> str:
        """The id of the job that carries this order."""
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
