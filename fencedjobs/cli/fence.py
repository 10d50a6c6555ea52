"""``fence advance``: after a restore or a lossy failover, no fence that is outside may fit again."""

from __future__ import annotations

import click
from sqlalchemy import update

from fencedjobs.cli.database import open_store
from fencedjobs.cli.output import emit
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.trouble import Refusal
from fencedjobs.models import Job, Lock, tables

_MOST = 2**40  # room for 8 million such steps in 64 bits


@click.group()
def fence() -> None:
    """Raise all fences, after a restore or a lossy failover."""


@fence.command()
@click.option("--by", type=click.IntRange(1, _MOST), required=True, metavar="N",
              help="More than the number of claims of any one job that may have been lost.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Confirm that running leases end.")
@common
@pass_settings
def advance(settings: Settings, by: int, yes: bool) -> None:
    """Raise the fence of every job and every lock by N.

    For a database that forgot its last commits (restored from a backup, or a failover to a replica
    that lagged): it would give out again fences that old workers still hold. Every running lease
    is refused from now on, and can be claimed when its time is over. Tables of your own with
    LeaseMixin, and guards at receivers, are not touched.
    """
    if not yes:
        raise Refusal("this ends every running lease; add --yes if that is what you want")
    with open_store(settings).begin() as uow:
        raised = {}
        for name, model in (("jobs", Job), ("locks", Lock)):
            table = tables(settings.schema)[model.__tablename__]
            raising = update(table).values(fence=table.c.fence + by)
            raised[name] = uow.session.connection().execute(raising).rowcount
    said = f"raised by {by}: the fences of {raised['jobs']} jobs and {raised['locks']} locks"
    emit(settings, {"by": by, **raised}, lambda: click.echo(said))
