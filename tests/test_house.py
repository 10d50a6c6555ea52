"""The house rules, kept by reading the code: who imports whom, who knows a database, how long things get."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fencedjobs"

#: A file imports only from files above it. A new file gets its place here, with the change that adds it.
ORDER = """
    errors values retry payload types rows direct dialects models metrics autogenerate alembic_plugin schema
    transaction leases row_leases job_sql enqueue jobs claims locks outbox lanes inbox guards
    own facets uow proof store aio batch relay aio_relay
    handlers attempt line threads settling heartbeat maintenance context room worker aio_worker prometheus
    senders service cli testing
""".split()

#: An oracle that shares the rules shares the mistakes.
ORACLES = {
    "testing/model.py": {"errors", "values"},
    "testing/outbox_model.py": {"errors", "values"},
    "testing/sequential.py": {"values"},
    "testing/linearize.py": {"testing"},
    "testing/lease_model.py": {"errors", "values", "testing"},
    "testing/queue_model.py": {"testing"},
}

#: The CLI loads the checker only when ``verify`` is called, and a sender only when ``relay`` needs it.
LAZY = {("cli/verify.py", "testing"), ("cli/target.py", "senders")}

#: pytest and Alembic import them in every project where the package is installed.
ALL_LATE = {"testing/plugin.py", "alembic_plugin.py"}

MAY_KNOW_DATABASES = {"types.py", "rows.py", "dialects.py", "models.py"}
NAMES = {"postgresql", "postgres", "mysql", "mariadb", "sqlite", "psycopg", "asyncpg", "pymysql", "pysqlite"}
#: Said, not asked: a path is a file of SQLite's; a person names the dialect of a script.
SAID = {("service.py", "sqlite"), ("cli/migrate.py", "*")}

MAY_END_TRANSACTIONS = {
    "dialects", "schema", "own", "store", "aio", "relay", "aio_relay", "worker", "aio_worker",
    "service", "cli", "testing",
}  # fmt: skip

LONGEST = 70  # lines of a function

FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
ALL = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "migrations").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])


def _tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


def _part(file: str) -> str:
    """The name of the file, or of its folder, in the order."""
    return file.partition("/")[0].removesuffix(".py")


def _imports(node: ast.AST) -> Iterator[str]:
    """The parts of the package that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fencedjobs."))
    elif isinstance(node, ast.ImportFrom) and node.level:
        yield "(relative)"
    elif isinstance(node, ast.ImportFrom) and node.module == "fencedjobs":
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fencedjobs."):
        yield str(node.module).split(".")[1]


def _imported(tree: ast.AST) -> set[str]:
    return {part for node in ast.walk(tree) for part in _imports(node)}


def _imported_late(tree: ast.Module) -> set[str]:
    """What is imported inside of functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {part for function in functions for part in _imported(function)}


def test_every_file_has_a_place_in_the_order() -> None:
    unplaced = {_part(file) for file in FILES} - {*ORDER, "__init__"}
    assert not unplaced, f"give {unplaced} a place in ORDER"


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_a_file_imports_only_from_files_above_it(file: str) -> None:
    own = _part(file)
    above = {*ORDER[: ORDER.index(own)]} | ({own} if "/" in file else set())
    allowed = above | {part for place, part in LAZY if place == file}
    assert _imported(_tree(file)) <= allowed


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_no_file_imports_its_neighbours_late(file: str) -> None:
    late = {(file, part) for part in _imported_late(_tree(file)) if part != _part(file)}
    assert late <= LAZY or file in ALL_LATE


@pytest.mark.parametrize(("file", "parts"), ORACLES.items())
def test_an_oracle_knows_only_the_errors_and_the_values(file: str, parts: set[str]) -> None:
    assert _imported(_tree(file)) <= parts


def test_the_package_gathers_names_and_does_nothing_else() -> None:
    kinds = {type(node) for node in _tree("__init__.py").body}
    assert kinds <= {ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.FunctionDef}


# --- databases ------------------------------------------------------------------------------------


def _docstrings(tree: ast.AST) -> set[int]:
    """Texts that stand as statements of their own."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _known_databases(file: str) -> Iterator[str]:
    tree = _tree(file)
    prose = _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in NAMES and id(node) not in prose:
            if not {(file, node.value), (file, "*")} & SAID:
                yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Attribute) and node.attr in ("is_mariadb", "server_version_info"):
            yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node).endswith("dialect.name"):
            yield f"line {node.lineno}: .dialect.name"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sqlalchemy.dialects"):
            yield f"line {node.lineno}: import from {node.module}"


@pytest.mark.parametrize("file", [file for file in FILES if file not in MAY_KNOW_DATABASES])
def test_only_the_dialects_know_which_database_this_is(file: str) -> None:
    assert list(_known_databases(file)) == []


@pytest.mark.parametrize("file", [file for file in FILES if _part(file) not in MAY_END_TRANSACTIONS])
def test_verbs_never_begin_or_end_a_transaction(file: str) -> None:
    """A savepoint of the verb's own is not the transaction."""
    ends = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("begin", "commit", "rollback")
        and ast.unparse(node.func.value) != "savepoint"
    ]
    assert ends == []


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL, ids=[str(path.relative_to(ROOT)) for path in ALL])
def test_functions_stay_short(path: Path) -> None:
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: length for name, length in lengths.items() if length >= LONGEST} == {}
