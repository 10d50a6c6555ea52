"""The wheel holds what the repository holds."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import fencedjobs
from fencedjobs import schema

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def _folder(package: str) -> Path:
    mapped = SETUPTOOLS["package-dir"].get(".".join(package.split(".")[:2]))
    return ROOT / (Path(mapped, *package.split(".")[2:]) if mapped else Path(*package.split(".")))


def test_every_package_is_listed() -> None:
    listed = {_folder(package) for package in SETUPTOOLS["packages"]}
    found = {
        init.parent for place in ("fencedjobs", "migrations") for init in (ROOT / place).rglob("__init__.py")
    }
    assert listed == found


def test_every_file_that_is_no_module_is_package_data() -> None:
    for package in SETUPTOOLS["packages"]:
        patterns = SETUPTOOLS["package-data"].get(package, [])
        for path in _folder(package).iterdir():
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert any(fnmatch(path.name, pattern) for pattern in patterns), f"{package}: {path.name}"


def test_all_that_is_needed_to_run_is_sqlalchemy_and_alembic() -> None:
    names = {name.split(">")[0] for name in PROJECT["project"]["dependencies"]}
    assert names == {"sqlalchemy", "alembic"}


def test_the_revisions_are_found_in_the_installed_package() -> None:
    assert (Path(schema._directory()) / "versions").is_dir()


def test_the_public_names_are_there() -> None:
    assert all(getattr(fencedjobs, name) is not None for name in fencedjobs.__all__)
