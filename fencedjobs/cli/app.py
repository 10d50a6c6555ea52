"""The commands under one name, with one place where a mistake becomes a sentence and an exit code."""

from __future__ import annotations

import sys
from typing import Any

import click

from fencedjobs.cli.alembic import alembic
from fencedjobs.cli.demo.command import demo
from fencedjobs.cli.enqueue import enqueue
from fencedjobs.cli.fence import fence
from fencedjobs.cli.inbox import inbox
from fencedjobs.cli.jobs import jobs
from fencedjobs.cli.migrate import current, downgrade, upgrade
from fencedjobs.cli.outbox import outbox
from fencedjobs.cli.relay import relay
from fencedjobs.cli.settings import Settings, common
from fencedjobs.cli.status import status
from fencedjobs.cli.trouble import explained
from fencedjobs.cli.verify import verify
from fencedjobs.cli.work import work


class Commands(click.Group):
    """Commands whose expected errors end in a sentence instead of a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # A terminal that cannot show a character of somebody's payload must not end the command.
            getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
        with explained(ctx.ensure_object(Settings)):
            return super().invoke(ctx)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fencedjobs")
@common
def cli() -> None:
    """Leased jobs with fencing tokens, in your own database.

    The database is --url, else the environment's FENCEDJOBS_URL, else the file fencedjobs.db in the
    current folder. Instants are printed in UTC. Results go to stdout, everything else to stderr.

    \b
    Exit codes:
      0    done
      1    something was refused or not found, or an invariant does not hold
      2    the command line, a value or a file cannot be used
      3    no usable database (URL, driver, server, tables), or a package is missing
      130  interrupted (128 + the number of the signal)
    """


for _command in (
    demo, upgrade, downgrade, current, alembic, enqueue, work, status, jobs, outbox, relay, inbox, fence,
    verify,
):  # fmt: skip
    cli.add_command(_command)
