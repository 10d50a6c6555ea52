"""Every verb with its line cut or a statement refused at every operation, and the judge of it judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, event

from fencedjobs import Outcome, OutcomeUnknown, Store
from fencedjobs.testing import injection, network
from fencedjobs.testing.failing import COMMIT, Failing, Way
from fencedjobs.testing.faults import planted
from fencedjobs.testing.injection import Trials, trials
from fencedjobs.testing.machines import Effort
from fencedjobs.testing.model import Disagreement
from fencedjobs.testing.scene import VERBS, Verb, lost
from tests.databases import Database

#: of the verbs one of each kind, for those databases where a new connection takes its time
SOME = {"claim", "completing", "all in one", "accept with its effect", "dispatch", "requeue an event", "fail"}
NAMED = {verb.name: verb for verb in VERBS}


@pytest.fixture
def unhurried(database: Database) -> Iterator[Engine]:
    """An engine that does not wait for the disk, nor for TLS: these are many commits and connections."""
    url = database.url
    if database.backend == "mariadb":
        url = url.update_query_dict({"ssl_disabled": "true"})
    engine = create_engine(url)
    statement = {"sqlite": "PRAGMA synchronous = OFF", "postgresql": "SET synchronous_commit = off"}

    @event.listens_for(engine, "connect")
    def hurry(connection: object, record: object) -> None:
        if database.backend in statement:
            connection.cursor().execute(statement[database.backend])  # type: ignore[attr-defined]
            connection.commit()  # type: ignore[attr-defined]

    yield engine
    engine.dispose()


@pytest.fixture
def trial(unhurried: Engine) -> Iterator[Trials]:
    with trials(unhurried) as trial:
        yield trial


def chosen(database: Database) -> list[Verb]:
    return [verb for verb in VERBS if database.backend == "sqlite" or verb.name in SOME]


def test_a_verb_that_fails_at_any_operation_has_happened_or_not_and_says_which(
    unhurried: Engine, database: Database
) -> None:
    effort, verbs = Effort(), chosen(database)
    tried = injection.inject(unhurried, effort, injection.every(6), verbs)
    assert tried.keys() == {verb.name for verb in verbs}
    assert min(tried.values()) > 0
    assert effort.examples == sum(tried.values())


@pytest.mark.nightly
def test_every_verb_at_every_operation_in_every_way(unhurried: Engine) -> None:
    tried = injection.inject(unhurried, Effort())
    assert min(tried[verb.name] for verb in VERBS) >= len(Way)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_line_that_is_cut_late_or_silent_at_commit(unhurried: Engine) -> None:
    tried = network.cut(unhurried, Effort(), verbs=[NAMED[name] for name in sorted(SOME)])
    assert tried.keys() == SOME | {"late", "late_claim", "silent"}


@pytest.mark.nightly
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_every_verb_that_commits_over_a_line_that_is_cut(unhurried: Engine) -> None:
    tried = network.cut(unhurried, Effort())
    assert all(tried[verb.name] >= 2 for verb in injection.COMMITTING)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_file_has_no_line_to_cut(unhurried: Engine) -> None:
    assert network.cut(unhurried, Effort()) == {}


# --- what fails -----------------------------------------------------------------------------------


def test_the_chosen_operation_fails_in_the_chosen_way_and_no_other(trial: Trials) -> None:
    verb = NAMED["complete"]
    points = trial.points(verb)
    assert [operation for _, operation, _ in points].count(COMMIT) == len(Way)
    for number, operation, way in points:
        trial.scene.clear()
        verb.scene(trial.scene)
        with trial.failing.at(number, way):
            error = lost(verb.call, trial.scene)
        assert injection.operation(str(trial.failing.hit)) == operation
        happened = trial.scene.direct.outcome(trial.scene.lease) is Outcome.COMPLETED
        said = "unknown" if isinstance(error, OutcomeUnknown) else "no" if error else "yes"
        if way is Way.REFUSED:
            assert (happened, said) == (False, "no"), operation
        elif operation == COMMIT:
            assert (happened, said) == (way is Way.AFTER, "unknown")
        else:
            assert (happened, said) == (True, "yes"), operation


def test_nothing_fails_unless_it_is_told_to(unhurried: Engine) -> None:
    failing = Failing(unhurried)
    store = Store(failing.engine)
    store.enqueue("a")
    with failing.at(None):
        assert store.claim("w", ttl=9.0) is not None
    assert Counter(map(injection.operation, failing.operations))[COMMIT] == 1
    failing.close()


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "verb"),
    [
        ("retry_after_unknown_commit", "claim"),
        ("lost_answer_is_a_no", "completing"),
        ("completion_apart", "completing"),
        ("effect_outside_the_transaction", "accept with its effect"),
        ("mark_before_send", "dispatch"),
    ],
)
def test_a_planted_fault_shows_where_a_line_is_cut(fault: str, verb: str, unhurried: Engine) -> None:
    def inject() -> None:
        injection.inject(unhurried, Effort(), verbs=[NAMED[verb]])

    inject()
    with planted(fault), pytest.raises(Disagreement):
        inject()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_connection_that_is_not_given_back_is_noticed(trial: Trials) -> None:
    trial.points(NAMED["enqueue"])
    with trial.failing.engine.connect(), pytest.raises(Disagreement, match="checked out"):
        trial.rows()


def test_a_transaction_that_is_left_open_is_noticed(
    trial: Trials, unhurried: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injection, "_PATIENCE", 0.0)
    if unhurried.dialect.name == "mysql":
        pytest.skip("it waits for ten seconds before it says so")
    trial.points(NAMED["complete"])
    with unhurried.connect() as left:
        left.exec_driver_sql("UPDATE fenced_jobs SET priority = 1")
        if unhurried.dialect.name == "sqlite":
            trial.scene.direct.transactions.patience = lambda *_: lambda: False  # type: ignore[method-assign]
        with pytest.raises(Disagreement, match="open"):
            trial.rows()


# --- what it found --------------------------------------------------------------------------------


def test_asking_for_the_outcome_never_has_an_unknown_outcome(trial: Trials) -> None:
    """On SQLite it ended with a COMMIT, whose answer could be lost in its turn."""
    for number, operation, way in trial.points(NAMED["outcome"]):
        assert operation != COMMIT
        if way is not Way.REFUSED:
            trial.fails_at(NAMED["outcome"], number, way)
