"""Both chapters on one stage, and the judgement; of the stage nothing stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy import URL

from fencedjobs.cli.demo import delivery, evidence, invariants, story, world
from fencedjobs.cli.demo.invariants import Invariant
from fencedjobs.cli.demo.orders import Order
from fencedjobs.cli.demo.process import ChildFailed, ChildProcess
from fencedjobs.cli.demo.stage import Stage
from fencedjobs.cli.demo.timeline import Timeline
from fencedjobs.cli.trouble import Refusal, redacted


def play(
    url: URL | None,
    sql_schema: str | None,
    orders: list[Order],
    timeline: Timeline,
    between: Callable[[], None],
) -> list[Invariant]:
    """Play, call ``between`` the chapters, and judge what is in the databases then."""
    with world.one_signal_ends_it(), ExitStack() as place, ExitStack() as staff:
        couriers = story.hire(staff)  # they start while the tables are made; they go before the tables do
        staff.callback(world.ignore_signals)
        folder = world.folder(place)
        stage, shop = (
            world.borrowed(url, sql_schema, place) if url else world.temporary(folder / "shop.db", place)
        )
        with _told(stage):
            warehouse = world.opened(world.in_file(folder / "warehouse.db"), place)
            first = story.Story(stage, shop, orders, timeline)
            second = delivery.Delivery(stage, shop, warehouse, orders, timeline)

            def meanwhile() -> ChildProcess:
                third = ChildProcess("warehouse", staff)
                staff.callback(world.ignore_signals)
                second.open(third)
                return third

            third = first.play(*couriers, meanwhile)
            between()
            second.play(third, *couriers)  # now they are relays
        outcome = evidence.read(shop, warehouse, stage)
        return [
            *invariants.check(orders, invariants.read(shop, stage), first.seen_before, first.refused()),
            *evidence.check(orders, stage, outcome, second.sights, second.exit_code),
        ]


@contextmanager
def _told(stage: Stage) -> Iterator[None]:
    """A child process that failed, as a sentence without a password."""
    try:
        yield
    except ChildFailed as error:
        raise Refusal(redacted(str(error), stage.url)) from None
