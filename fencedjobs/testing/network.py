"""Every verb that commits, over a real line through a proxy that is cut, late, or silent at its COMMIT."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

from sqlalchemy import Engine, create_engine, event

from fencedjobs import dialects, direct
from fencedjobs.errors import OutcomeUnknown
from fencedjobs.testing.failing import ALONE, COMMIT, Counting, Way
from fencedjobs.testing.injection import Trials, Wanted, cleared, is_cut_commit
from fencedjobs.testing.machines import Effort
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.proxy import Cut, Proxy, proxy
from fencedjobs.testing.scene import TTL, VERBS, Verb, host_tables, lost
from fencedjobs.values import Outcome

_CUTS: Final = {Way.BEFORE: Cut.REQUEST, Way.AFTER: Cut.ANSWER}
_COMPLETING: Final = next(verb for verb in VERBS if verb.name == "completing")
_CLAIMING: Final = next(verb for verb in VERBS if verb.name == "claim by id")
_PATIENCE: Final = 30.0


class Proxied(Counting[Callable[[], None]]):
    """An engine whose line goes through a proxy; its operations are the COMMITs."""

    def __init__(self, engine: Engine, between: Proxy) -> None:
        self.proxy = between
        super().__init__(create_engine(engine.url.set(host="127.0.0.1", port=between.port)))
        if place := engine.dialect.default_schema_name:
            dialects.move_into(self.engine, place)
        direct.tell(self.engine)
        event.listen(self.engine, "commit", self._commits)

    def at(self, number: int | None, way: Way = Way.BEFORE) -> AbstractContextManager[None]:
        """Within: cut the line at COMMIT ``number``, counted from 0; ``None``: only count."""
        return self.doing(number, lambda: self.proxy.arm(_CUTS[way]))

    def _commits(self, connection: Any) -> None:
        if (what := self.come(ALONE if dialects.is_single(connection) else COMMIT)) is not None:
            what()


@contextmanager
def proxied(engine: Engine) -> Iterator[Trials | None]:
    """Trials on a line through a proxy; ``None`` where the database is no server with an address."""
    place = dialects.address(engine.url)
    if place is None:
        yield None
        return
    with engine.connect():  # so that the dialect knows where it is
        pass
    with ExitStack() as stack:
        line = Proxied(engine, stack.enter_context(proxy(*place)))
        stack.callback(line.close)
        stack.enter_context(host_tables(engine))
        yield from cleared(Trials(line, engine))


def cut(
    engine: Engine, effort: Effort, wanted: Wanted = is_cut_commit, verbs: Iterable[Verb] = VERBS
) -> dict[str, int]:
    """Both cuts at each COMMIT of each verb, a COMMIT that comes late, and a silent line; see `inject`.

    How many points were tried, by verb: none of a verb that only reads, and none at all without a server.
    """
    tried: Counter[str] = Counter()
    with proxied(engine) as trial:
        if trial is None:
            return {}
        for verb in verbs:
            for number, operation, way in trial.points(verb):
                if way is not Way.REFUSED and wanted(number, operation, way):
                    tried[verb.name] += 1
                    effort.examples += 1
                    trial.fails_at(verb, number, way)
            if not (tried[verb.name] or verb.reads):
                raise Disagreement(f"{verb.name}: there was nothing that could be cut")
        for one in (late, late_claim, silent):
            one(trial)
            tried[one.__name__] += 1
            effort.examples += 1
    return dict(tried)


def _line(trial: Trials) -> Proxied:
    assert isinstance(trial.failing, Proxied)
    return trial.failing


def late(trial: Trials) -> None:
    """The COMMIT of a completion arrives when its lease has run out, and another worker wants the job."""
    scene, line = trial.scene, _line(trial)
    trial.points(_COMPLETING)
    scene.clear()
    lease = scene.leased()
    with line.doing(0, lambda: line.proxy.arm(Cut.DELAYED)):
        error = lost(_COMPLETING.call, scene)
    _unknown(error)
    scene.now = lease.until
    with _another(lambda: scene.handed(scene.direct.claim("v", ttl=TTL, id="a"))) as claimed:
        line.proxy.deliver()
    rows = trial.rows()
    trial.require_safe(_COMPLETING, rows)
    outcome = scene.direct.outcome(lease)
    if (claimed() is None) is not (outcome is Outcome.COMPLETED):
        raise Disagreement(f"late: the rival got {claimed()}, and the outcome is {outcome}")


def late_claim(trial: Trials) -> None:
    """The COMMIT of a claim arrives when nobody waits for it any more: its lease runs out by itself."""
    scene, line = trial.scene, _line(trial)
    scene.clear()
    _CLAIMING.scene(scene)
    with line.doing(0, lambda: line.proxy.arm(Cut.DELAYED)):
        error = lost(_CLAIMING.call, scene)
    _unknown(error)
    with _another(lambda: scene.handed(scene.direct.claim("v", ttl=TTL, id="b"))) as claimed:
        line.proxy.deliver()
    scene.now += TTL
    after = scene.handed(scene.direct.claim("u", ttl=TTL, id="b"))
    trial.require_safe(_CLAIMING, trial.rows())
    if after is None or after.fence != 2:
        raise Disagreement(f"late claim: the rival got {claimed()}, and the next one {after}")


def silent(trial: Trials) -> None:
    """The line is silent at COMMIT: others go on with what is not locked, and the end is as ever."""
    scene, line = trial.scene, _line(trial)
    trial.points(_COMPLETING)
    scene.clear()
    _COMPLETING.scene(scene)
    scene.direct.enqueue("z")
    reached = threading.Event()

    def silence() -> None:
        line.proxy.silence()
        reached.set()

    with line.doing(0, silence), _another(lambda: lost(_COMPLETING.call, scene)) as said:
        if not reached.wait(_PATIENCE):
            raise Disagreement("silent: COMMIT was never reached")
        scene.now += TTL
        others = scene.direct.claim_many("v", ttl=TTL, limit=5)
        line.proxy.down()
        line.proxy.speak()
    line.proxy.up()
    _unknown(said())
    if [lease.id for lease in others] != ["z"]:
        raise Disagreement(f"silent: the others got {others}")
    trial.require_safe(_COMPLETING, trial.rows())


def _unknown(error: BaseException | None) -> None:
    if not isinstance(error, OutcomeUnknown):
        raise Disagreement(f"a COMMIT without an answer: it said {error!r}")


@contextmanager
def _another(work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """A thread that does this, and is over at the end of the block; what gives its answer then."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    try:
        yield lambda: answers[0]
    finally:
        thread.join(_PATIENCE)
        if not answers:
            raise Disagreement("the other one did not come back")
