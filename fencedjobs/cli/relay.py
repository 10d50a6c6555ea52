"""``relay``: send what is in the outbox, until it is told to stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import click

from fencedjobs.cli.database import looking, open_engine
from fencedjobs.cli.settings import Settings, common, pass_settings
from fencedjobs.cli.target import Target
from fencedjobs.cli.trouble import REFUSED, hush
from fencedjobs.cli.watch import Watch
from fencedjobs.metrics import Observed
from fencedjobs.relay import Relay, RelayOptions
from fencedjobs.senders.base import Sender
from fencedjobs.store import Store

_TO: Final = "FENCEDJOBS_TO"


def _header(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """The headers by name; what does not fit is not repeated, since it may be a secret."""
    pairs = [value.partition("=") for value in values]
    if not all(name and equals for name, equals, _ in pairs):
        raise click.BadParameter("must be NAME=VALUE", ctx, param)
    return {name: value for name, _, value in pairs}


@click.command()
@click.option("--to", metavar="URL", required=True, envvar=_TO, show_envvar=True,
              help="http://…, https://…, nats://… or amqp://…; only its host is printed.")  # fmt: skip
@click.option("--lane", "lanes", multiple=True, default=["default"], show_default=True,
              help="A lane to send; may be repeated.")  # fmt: skip
@click.option("--once", is_flag=True, help="End when nothing is left to send, or at a failure: with 1.")
@click.option("--max-attempts", type=click.IntRange(1), metavar="N",
              help="Quarantine an event that failed N times; without it the lane waits for it.")  # fmt: skip
@click.option("--mark-every", type=click.IntRange(1, 100), default=1, show_default=True, metavar="N",
              help="Mark N acknowledged events at once; a crash then sends up to N again.")  # fmt: skip
@click.option("--ttl", type=float, default=60.0, show_default=True, metavar="SECONDS",
              help="The lane's lease: after a crash another relay takes over within it.")  # fmt: skip
@click.option("--timeout", type=float, default=10.0, show_default=True, metavar="SECONDS",
              help="The most that one send may take; less than --ttl.")  # fmt: skip
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", callback=_header,
              help="A header of each HTTP request; may be repeated.")  # fmt: skip
@click.option("--ack", type=click.Choice(["id", "status"]),
              help="Proof of an HTTP delivery: id in the answer, or 2xx alone.  [default: id]")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="A line per sent event also when this is no terminal.")
@common
@pass_settings
def relay(
    settings: Settings, to: str, lanes: Sequence[str], once: bool, max_attempts: int | None, mark_every: int,
    ttl: float, timeout: float, headers: dict[str, str], ack: Literal["id", "status"] | None, verbose: bool,
) -> None:  # fmt: skip
    """Send the events of the outbox, in order.

    Each is marked after its acknowledgement; what fails is tried again, after pauses that grow to a
    minute. Runs until Ctrl-C or SIGTERM, which let it finish the event that is being sent; then the
    exit code is 0. Any number of relays may run, one at a time holds a lane.

    Events that were sent go to stdout (on a terminal, or with --verbose), failures to stderr; with
    --json everything goes to stdout, an object per line.
    """
    hush()
    target = Target(to, timeout, headers, ack)
    sender = target.sender()
    click.get_current_context().call_on_close(sender.close)
    engine = open_engine(settings)
    with looking(engine, settings):
        pass  # a relay that is started without tables should say so, and not wait for them
    store, watch = Store(engine, schema=settings.schema), Watch(settings, target, verbose=verbose)
    options: RelayOptions = {
        "lanes": lanes, "max_attempts": max_attempts, "mark_every": mark_every, "ttl": ttl, "observe": watch,
    }  # fmt: skip
    (_once if once else _until_told)(store, sender, watch, options)


def _until_told(store: Store, sender: Sender, watch: Watch, options: RelayOptions) -> None:
    running = Relay(store, sender, **options)
    watch.stop = running.stop
    watch.say(f"Relaying {', '.join(options['lanes'])} to {watch.target.shown()} until Ctrl-C or SIGTERM.")
    watch.conclude(running.run(), how="Stopped: ")


def _once(store: Store, sender: Sender, watch: Watch, options: RelayOptions) -> None:
    """Lane by lane, so that one that is blocked does not keep the others from being sent."""
    lanes = list(options["lanes"])
    relays = [_Finite(store, sender, watch, {**options, "lanes": [lane]}) for lane in lanes]
    sent = 0
    for one in relays:
        sent += one.run(until_empty=True)
        if one.was_told:
            break
    watch.conclude(sent, still=[lane for lane in lanes if store.outbox.pending(1, lane)])
    if any(one.failed for one in relays):
        raise click.exceptions.Exit(REFUSED)


class _Finite(Relay):
    """Ends when its lanes are empty, or at a failure that is not to be tried again."""

    def __init__(self, store: Store, sender: Sender, watch: Watch, options: RelayOptions) -> None:
        observed: RelayOptions = {**options, "observe": self._observed}
        super().__init__(store, sender, **observed)
        self.was_told = False
        self.failed = False
        self._watch = watch
        self._ends = {Observed.TROUBLE} | (set() if options["max_attempts"] else {Observed.FAILED})

    def stop(self) -> None:
        """By a signal, or because nobody reads the output."""
        self.was_told = True
        super().stop()

    def _observed(self, what: Observed, /, **facts: Any) -> None:
        self._watch.stop = self.stop
        self._watch(what, **facts)
        if what in self._ends:
            super().stop()
        self.failed = self.failed or what in self._ends or what is Observed.QUARANTINED
