"""Every verb, each with a scene in which it is called, for those who cut its line.

A scene is a store whose line may fail, another one on a line that does not, and a clock that stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Engine, Integer, MetaData, delete, func, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencedjobs.errors import InboxConflict
from fencedjobs.models import Base, LeaseMixin
from fencedjobs.relay import Relay, dispatch
from fencedjobs.retry import Retry
from fencedjobs.store import Store
from fencedjobs.testing.model import Disagreement
from fencedjobs.types import Key
from fencedjobs.values import Event, JobLease, Outcome

T: Final = 1_764_000_000.25
TTL: Final = 60.0
_INNODB: Final = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}


class Host(DeclarativeBase):
    """The tables of an application, for as long as the check lasts."""

    metadata = MetaData()


class Room(LeaseMixin, Host):
    """A row of the host's that can be leased."""

    __tablename__ = "fj_verify_rooms"
    __table_args__ = (_INNODB,)

    id: Mapped[str] = mapped_column(Key(), primary_key=True)
    note: Mapped[str | None] = mapped_column(Key())


class Effect(Host):
    """A business write; nothing keeps it from being there twice."""

    __tablename__ = "fj_verify_effects"
    __table_args__ = (_INNODB,)

    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(Key())


_ROOMS, _EFFECTS = (Host.metadata.tables[model.__tablename__] for model in (Room, Effect))
TABLES: Final = (*Base.metadata.sorted_tables, *Host.metadata.sorted_tables)


@contextmanager
def host_tables(engine: Engine) -> Iterator[None]:
    """The host's tables, made and dropped."""
    Host.metadata.create_all(engine)
    try:
        yield
    finally:
        Host.metadata.drop_all(engine)


@dataclass
class Scene:
    """What one trial of a verb plays with."""

    store: Store  #: on the line that may fail
    direct: Store  #: on one that does not
    now: float = T
    leases: dict[str, Any] = field(default_factory=dict)
    given: list[Any] = field(default_factory=list)  #: leases that a verb has answered with
    received: list[Event] = field(default_factory=list)  #: events that were sent

    @classmethod
    def on(cls, failing: Engine, direct: Engine) -> Scene:
        """A scene on these two engines."""
        scene: Scene

        def clock() -> float:
            return scene.now

        scene = cls(Store(failing, clock=clock), Store(direct, clock=clock))
        return scene

    def clear(self) -> None:
        """Delete everything, and begin anew."""
        with self.direct.begin() as uow:
            for table in reversed(TABLES):
                uow.session.execute(delete(table))
        self.now = T
        self.leases, self.given, self.received = {}, [], []

    def leased(self, id: str = "a", **job: Any) -> JobLease:
        """The lease of a new job."""
        self.direct.enqueue(id, {"qty": 7}, **job)
        lease = self.direct.claim("w", ttl=TTL, id=id)
        assert lease is not None
        self.leases[id] = lease
        return lease

    @property
    def lease(self) -> Any:
        """The one that was made first."""
        return next(iter(self.leases.values()))

    @property
    def rooms(self) -> Any:
        return self.store.leases(Room)

    def with_room(self, *, leased: bool = True) -> None:
        with self.direct.begin() as uow:
            uow.session.execute(insert(_ROOMS).values(id="r"))
        if leased:
            self.leases["r"] = self.direct.leases(Room).claim("r", "w", ttl=TTL)

    def with_events(self, count: int = 3) -> None:
        for number in range(count):
            self.direct.outbox.add(f"e{number}", {"qty": number}, topic="t")

    def effects(self, name: str) -> int:
        """How often this effect was written."""
        with self.direct.begin() as uow:
            counting = select(func.count()).where(_EFFECTS.c.name == name)
            return int(uow.session.execute(counting).scalar_one())

    def send(self, event: Event) -> bool:
        """A receiver with an inbox, at the end of another line."""
        self.received.append(event)
        self.accept(self.direct, event.id, event.payload)
        return True

    def accept(self, store: Store, id: str, payload: Any) -> bool:
        """A message and its effect."""
        with store.begin() as uow:
            new = uow.inbox.accept(id, payload)
            if new:
                write(uow, f"effect of {id}")
        return new

    def handed(self, lease: Any) -> Any:
        """Keep what a claim has answered with."""
        self.given += [one for one in (lease if isinstance(lease, list) else [lease]) if one is not None]
        return lease


def write(uow: Any, name: str) -> None:
    """A business write."""
    uow.session.execute(insert(_EFFECTS).values(name=name))


# --- the verbs ------------------------------------------------------------------------------------

Call = Callable[[Scene], Any]


def _nothing(scene: Scene) -> None:
    """A scene without anything."""


def _always(scene: Scene) -> bool:
    return True


def _if_held(scene: Scene) -> bool:
    """What the contract says: ask for the outcome, and repeat what still holds its lease."""
    return scene.store.outcome(scene.lease) is Outcome.HELD


def _if_not_mine(*names: str) -> Callable[[Scene], bool]:
    """A claim that took effect shows in the row; else it may be repeated."""

    def look(scene: Scene) -> bool:
        owners = [record.owner for name in names if (record := scene.store.get(name)) is not None]
        return "w" not in owners

    return look


@dataclass(frozen=True)
class Verb:
    """A verb in its scene, and what its caller does when it is unknown whether it took effect."""

    name: str
    call: Call
    scene: Call = _nothing
    again: Callable[[Scene], bool] = _always  #: whether to call it again when its outcome was unknown
    block: bool = False  #: a block of the caller's, which is not repeated by the store
    whole: bool = True  #: one transaction, and nothing else
    reads: bool = False
    apart: frozenset[str] = frozenset()  #: columns that tell how often it was tried
    effect: str | None = None  #: which is there if, and only if, the job "a" is done


def _completing(scene: Scene) -> None:
    with scene.store.completing(scene.lease, {"ok": True}) as uow:
        write(uow, "work")


def _begin(scene: Scene) -> None:
    with scene.store.begin() as uow:
        write(uow, "work")
        uow.jobs.enqueue("next")
        uow.outbox.add("e", 1, topic="t")


def _many_verbs(scene: Scene) -> None:
    """Everything that may be done in a transaction, in one."""
    with scene.store.completing(scene.lease) as uow:
        write(uow, "work")
        uow.jobs.enqueue("next", {"of": "a"})
        uow.outbox.add("e", 1, topic="t")
        uow.inbox.accept("m", 1)
        uow.guards.admit("disk", scene.lease.fence)
        uow.leases(Room).settle(scene.leases["r"], note="tidy")


def _conflicting(scene: Scene) -> None:
    try:
        scene.store.inbox.accept("m", 2)
    except InboxConflict:
        return
    raise Disagreement("another payload under the same id was accepted")


def _again_if_checked(locks: Callable[[Scene], Any]) -> Callable[[Scene], bool]:
    return lambda scene: bool(locks(scene).check(scene.lease))


def _locked(scene: Scene) -> None:
    scene.leases["cron"] = scene.direct.locks.claim("cron", "w", ttl=TTL)


def _two(scene: Scene) -> None:
    scene.leased("a")
    scene.leased("b")


def _lock_over(scene: Scene) -> None:
    """Its lease has run out."""
    _locked(scene)
    scene.now += TTL


def _not_mine_yet(scene: Scene) -> bool:
    record = scene.store.locks.get("cron")
    return record is None or record.owner != "v"


def _with_room(scene: Scene) -> None:
    scene.leased()
    scene.with_room()


def _received(scene: Scene) -> None:
    scene.direct.inbox.accept("m", 1)
    scene.now += 1


def _aside(scene: Scene) -> None:
    scene.leased()
    scene.direct.quarantine("a", "it chokes")


def _old(scene: Scene) -> None:
    scene.direct.complete(scene.leased())
    scene.direct.enqueue_many([{"id": "b", "deadline": T + 1}, {"id": "c"}])
    scene.now += 10


def _events_aside(scene: Scene) -> None:
    scene.with_events()
    scene.direct.outbox.quarantine("e1", "it chokes")


def _events_sent(scene: Scene) -> None:
    scene.with_events(2)
    dispatch(scene.direct, scene.send, owner="w", ttl=TTL)
    scene.now += 10


def _waiting(scene: Scene) -> None:
    """One ready, one due, one whose lease has run out."""
    scene.leased("a")
    scene.direct.enqueue("b", delay=1.0)
    scene.direct.enqueue("c")
    scene.now += TTL


def _ready(scene: Scene) -> None:
    scene.direct.enqueue_many([{"id": id} for id in "abc"])


def _relaying(scene: Scene) -> int:
    relay = Relay(scene.store, scene.send, owner="w", ttl=TTL, poll=0.0, retry=Retry(base=0.0),
                  observe=lambda *_, **__: None)  # fmt: skip
    return relay.run(until_empty=True)


_TRIED: Final = frozenset(
    {"fence", "attempts", "until", "owner", "sent_at", "duplicates", "last_error", "received_at"}
)
_PLAIN: Final = Retry(jitter=False)

VERBS: Final = [
    # jobs
    Verb("enqueue", lambda s: s.store.enqueue("a", {"qty": 7})),
    Verb("enqueue_many", lambda s: s.store.enqueue_many([{"id": "a"}, {"id": "b", "delay": 5.0}])),
    Verb("claim", lambda s: s.handed(s.store.claim("w", ttl=TTL)), _ready, _if_not_mine("a", "b", "c")),
    Verb("claim by id", lambda s: s.handed(s.store.claim("w", ttl=TTL, id="b")), _ready, _if_not_mine("b")),
    Verb("claim_many", lambda s: s.handed(s.store.claim_many("v", ttl=TTL, limit=2)), _waiting,
         lambda s: all(r.owner != "v" for n in "abc" if (r := s.store.get(n)) is not None)),
    Verb("renew", lambda s: s.store.renew(s.lease, ttl=900), Scene.leased),
    Verb("renew_many", lambda s: s.store.renew_many([*s.leases.values()], ttl=900), _two),
    Verb("complete", lambda s: s.store.complete(s.lease, 1), Scene.leased, _if_held),
    Verb("complete_many", lambda s: s.store.complete_many([*s.leases.values()]), _two, _if_held),
    Verb("checkpoint", lambda s: s.store.checkpoint(s.lease, {"at": 3}), Scene.leased),
    Verb("set_aside", lambda s: s.store.set_aside(s.lease, "why"), Scene.leased, _if_held),
    Verb("fail", lambda s: s.store.fail(s.lease, "why", retry=_PLAIN), Scene.leased, _if_held),
    Verb("fail for good", lambda s: s.store.fail(s.lease, "why", retry=None), Scene.leased, _if_held),
    Verb("release", lambda s: s.store.release(s.lease, delay=1.0), Scene.leased, _if_held),
    Verb("cancel", lambda s: s.store.cancel("a"), Scene.leased),
    Verb("quarantine", lambda s: s.store.quarantine("a", "why"), Scene.leased),
    Verb("requeue", lambda s: s.store.requeue("a", payload=2, by="ann", reason="mended"), _aside),
    Verb("sweep", lambda s: s.store.sweep(), _old),
    Verb("purge", lambda s: s.store.purge(before=s.now), _old),
    Verb("purge and forget", lambda s: s.store.purge(before=s.now, forget=True), _old),
    Verb("get", lambda s: s.store.get("a"), Scene.leased, reads=True),
    Verb("counts", lambda s: s.store.counts(), _old, reads=True),
    Verb("oldest_waiting", lambda s: s.store.oldest_waiting(), _ready, reads=True),
    Verb("outcome", lambda s: s.store.outcome(s.lease), Scene.leased, reads=True),
    Verb("the first use", lambda s: Store(s.store.transactions.engine).get("a"), _ready, reads=True),
    # transactions with business rows
    Verb("completing", _completing, Scene.leased, _if_held, block=True, effect="work"),
    Verb("begin", _begin, again=lambda s: not s.effects("work"), block=True),
    Verb("all in one", _many_verbs, _with_room, _if_held, block=True, effect="work"),
    # locks, and leases on a table of the host
    Verb("lock", lambda s: s.handed(s.store.locks.claim("cron", "w", ttl=TTL)),
         again=lambda s: s.store.locks.get("cron") is None),
    Verb("lock again", lambda s: s.handed(s.store.locks.claim("cron", "v", ttl=TTL)), _lock_over,
         _not_mine_yet),
    Verb("renew a lock", lambda s: s.store.locks.renew(s.lease, ttl=900), _locked),
    Verb("release a lock", lambda s: s.store.locks.release(s.lease), _locked,
         _again_if_checked(lambda s: s.store.locks)),
    Verb("check a lock", lambda s: s.store.locks.check(s.lease), _locked, reads=True),
    Verb("lease", lambda s: s.handed(s.rooms.claim("r", "w", ttl=TTL)), lambda s: s.with_room(leased=False),
         lambda s: s.rooms.get("r").owner is None),
    Verb("renew a lease", lambda s: s.rooms.renew(s.lease, ttl=900), Scene.with_room),
    Verb("settle a lease", lambda s: s.rooms.settle(s.lease, note="tidy"), Scene.with_room,
         _again_if_checked(lambda s: s.rooms)),
    Verb("release a lease", lambda s: s.rooms.release(s.lease), Scene.with_room,
         _again_if_checked(lambda s: s.rooms)),
    Verb("get a lease", lambda s: s.rooms.get("r"), Scene.with_room, reads=True),
    # outbox
    Verb("add an event", lambda s: s.store.outbox.add("e", 1, topic="t")),
    Verb("quarantine an event", lambda s: s.store.outbox.quarantine("e1", "why"), Scene.with_events),
    Verb("requeue an event", lambda s: s.store.outbox.requeue("e1", payload=2, by="ann", reason="mended"),
         _events_aside),
    Verb("purge events", lambda s: s.store.outbox.purge(before=s.now), _events_sent),
    Verb("pending events", lambda s: s.store.outbox.pending(), Scene.with_events, reads=True),
    Verb("stats of the outbox", lambda s: s.store.outbox.stats(), Scene.with_events, reads=True),
    # inbox and guards
    Verb("accept", lambda s: s.store.inbox.accept("m", 1), apart=frozenset({"duplicates"})),
    Verb("accept with its effect", lambda s: s.accept(s.store, "m", 1), block=True,
         apart=frozenset({"duplicates"})),
    Verb("a conflict", _conflicting, lambda s: s.direct.inbox.accept("m", 1), whole=False,
         apart=frozenset({"conflicts"})),
    Verb("purge messages", lambda s: s.store.inbox.purge(0.0), _received),
    Verb("admit", lambda s: s.store.guards.admit("disk", 7), lambda s: s.direct.guards.admit("disk", 6)),
    Verb("highest", lambda s: s.store.guards.highest("disk"), lambda s: s.direct.guards.admit("disk", 6),
         reads=True),
    # relays
    Verb("dispatch", lambda s: dispatch(s.store, s.send, owner="w", ttl=TTL), Scene.with_events, whole=False,
         apart=_TRIED),
    Verb("relay", _relaying, Scene.with_events, whole=False, apart=_TRIED),
]  # fmt: skip

RELAYS: Final = frozenset({"dispatch", "relay"})


def relayed(scene: Scene) -> None:
    """What relays do after one that died: wait for its lease to end, and send the rest."""
    for _ in range(5):
        if not scene.direct.outbox.pending():
            return
        scene.now += TTL
        dispatch(scene.store, scene.send, owner="w", ttl=TTL)
    raise Disagreement("events are still pending")


def lost(call: Call, scene: Scene) -> BaseException | None:
    """What the call raises."""
    try:
        call(scene)
    except Exception as error:  # noqa: BLE001 - the trial says what it may be
        return error
    return None
