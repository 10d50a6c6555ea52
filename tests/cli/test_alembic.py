"""``fencedjobs alembic new``: a revision of the host's own, which makes our tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencedjobs import schema
from tests.cli.helpers import Answer, run
from tests.databases import Database
from tests.schema.project import IGNORE, Project

pytestmark = pytest.mark.parametrize("empty", ["sqlite"], indirect=True)


@pytest.fixture
def project(empty: Database, tmp_path: Path) -> Project:
    return Project(empty, tmp_path, "generic", IGNORE)


def new(project: Project, *more: str) -> Answer:
    return run("alembic", "new", "-c", project.ini, *more)


def written(project: Project) -> str:
    """The one file in the host's history that calls us."""
    (found,) = [text for path in project.versions.glob("*.py") if "schema.up(" in (text := path.read_text())]
    return found


def test_it_comes_after_the_head_and_names_the_revision(project: Project) -> None:
    project.autogenerate()
    answer = new(project, "-m", "queue tables")
    assert answer.code == 0, answer.err
    assert answer.out.strip().endswith(f"queue_tables.py: base -> {schema.HEAD}")
    text = written(project)
    for line in (
        "from fencedjobs import schema",
        'schema.up("fj0001")',
        'schema.down("fj0001")',
        "queue tables",
    ):
        assert line in text
    project.upgrade()
    project.downgrade()


def test_as_json(project: Project) -> None:
    made = new(project, "--json").json()
    assert {*made} == {"revision", "path", "from", "to"}
    assert (made["from"], made["to"]) == ("base", schema.HEAD)
    assert Path(made["path"]).exists()


def test_a_history_that_has_the_newest_needs_nothing_new(project: Project) -> None:
    assert new(project).code == 0
    again = new(project)
    assert (again.code, "makes revision fj0001 already" in again.err) == (1, True)
    assert written(project)


def test_it_goes_on_from_what_the_history_has(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    assert new(project).code == 0
    monkeypatch.setattr(schema, "REVISIONS", ("fj0001", "fj0002"))
    monkeypatch.setattr(schema, "HEAD", "fj0002")
    answer = new(project)
    assert answer.out.strip().endswith("fj0001 -> fj0002"), answer.err
    texts = [path.read_text() for path in project.versions.glob("*.py")]
    assert sum('schema.up("fj0002", since="fj0001")' in text for text in texts) == 1
    assert sum('schema.down("fj0002", since="fj0001")' in text for text in texts) == 1


def test_another_schema_has_its_own_way(project: Project) -> None:
    assert new(project).code == 0
    assert new(project, "--schema", "tenant").code == 0
    texts = [path.read_text() for path in project.versions.glob("*.py")]
    assert sum('schema.up("fj0001", schema="tenant")' in text for text in texts) == 1
    assert new(project, "--schema", "tenant").code == 1


def test_a_call_that_names_no_revision_is_asked_about(project: Project) -> None:
    assert new(project).code == 0
    (path,) = project.versions.glob("*.py")
    path.write_text(path.read_text().replace('schema.up("fj0001")', "schema.up()"))
    answer = new(project)
    assert answer.code == 1
    assert "calls schema.up() without a revision" in answer.err
    assert "--since" in answer.err
    assert new(project, "--since", "base").code == 0


def test_several_heads_must_be_told_apart(project: Project) -> None:
    project.autogenerate()
    (first,) = project.versions.glob("*.py")
    text, name = first.read_text(), first.stem.split("_")[0]
    down = "None" if "= None" in text else ""
    assert down
    for other in ("aaaa", "bbbb"):
        body = text.replace(f"'{name}'", f"'{other}'").replace(
            "down_revision: Union[str, Sequence[str], None] = None", f"down_revision = '{name}'"
        )
        (project.versions / f"{other}_more.py").write_text(body)
    answer = new(project)
    assert (answer.code, "Alembic said:" in answer.err, "heads" in answer.err) == (2, True, True)
    assert new(project, "--head", "aaaa").code == 0


def test_a_template_without_a_place_for_it_is_refused_and_nothing_is_left(project: Project) -> None:
    template = project.directory / "history" / "script.py.mako"
    template.write_text(template.read_text().replace('${downgrades if downgrades else "pass"}', "pass"))
    answer = new(project)
    assert (answer.code, "has no ${upgrades} and ${downgrades}" in answer.err) == (1, True)
    assert list(project.versions.glob("*.py")) == []


def test_without_a_configuration_it_says_where_to_look(project: Project, tmp_path: Path) -> None:
    answer = run("alembic", "new", "-c", tmp_path / "nowhere.ini")
    assert (answer.code, "there is no file" in answer.err) == (2, True)
