"""The project as a whole: packaging, the direction of imports, the README's commands."""

from __future__ import annotations

import ast
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import umbra

ROOT = Path(umbra.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("configs", "kernels", "cache", "model", "serving", "scripts")
RANK = {"configs": 0, "kernels": 1, "cache": 2, "model": 2, "serving": 3, "scripts": 4}
TOP_LEVEL = {*FOLDERS, "tests", "README.md", "LICENSE", "pyproject.toml", "__init__.py"}
LEFTOVERS = {"build", "dist", "__pycache__"}

needs_checkout = pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="the checkout's files are not in a wheel")


def sources() -> list[Path]:
    return sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    folders = {p.parent.relative_to(ROOT) for p in sources()}
    expected = {"umbra", *(".".join(("umbra", *folder.parts)) for folder in folders)}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == expected


def test_every_data_file_is_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    packaged = [
        f"{package.removeprefix('umbra.').replace('.', '/')}/{p}" for package, ps in patterns.items() for p in ps
    ]
    data = [
        p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")
    ]
    left_out = [p.relative_to(ROOT).as_posix() for p in data]
    assert [name for name in left_out if not any(fnmatch(name, pattern) for pattern in packaged)] == []


@needs_checkout
def test_top_level() -> None:
    found = {p.name for p in ROOT.iterdir() if not p.name.startswith(".") and not p.name.endswith(".egg-info")}
    assert found - LEFTOVERS == TOP_LEVEL


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    """scripts -> serving -> {cache, model} -> kernels -> configs; relative inside the package, except in scripts."""
    here = path.relative_to(ROOT).with_suffix("").parts
    wrong = []
    for target in imported(path, here):
        if target and target[0] in RANK and target[0] != here[0] and RANK[target[0]] >= RANK[here[0]]:
            wrong.append(".".join(target))
    assert wrong == []


def imported(path: Path, here: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What a file imports from this project, as paths below the root."""
    targets: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level <= len(here), f"{path}: an import that leaves the package"
            base = (*here[: len(here) - node.level], *(node.module or "").split("."))
            targets += [tuple(part for part in (*base, alias.name) if part) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "umbra":
            base = tuple((node.module or "").split(".")[1:])
            targets += [(*base, alias.name) for alias in node.names]
            # A script is run as a file, outside the package; everything else is inside and says so.
            assert here[0] == "scripts", f"{path}: import {node.module} relatively"
        elif isinstance(node, ast.Import):
            targets += [tuple(a.name.split(".")[1:]) for a in node.names if a.name.split(".")[0] == "umbra"]
    return targets


@needs_checkout
@pytest.mark.parametrize("name", ["chat", "tests"])
def test_ci_runs_the_commands_of_the_readme(name: str) -> None:
    """`.ci/run` takes them from the README by these marks, so they cannot differ."""
    mark = re.escape(f"<!-- command: {name} -->")
    blocks = re.findall(rf"^{mark}\n+```\w*\n(.+?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    assert blocks[0].startswith("python3 -m venv .venv")
    assert f'run "$(readme_command {name})' in (ROOT / ".ci" / "run").read_text()


@needs_checkout
def test_files_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?<![\w./])(?:configs|kernels|cache|model|serving|scripts|tests)/[\w./-]*\w", text))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
    assert named >= {p.relative_to(ROOT).as_posix() for p in (ROOT / "scripts").glob("*.py") if runs_alone(p)}


def runs_alone(script: Path) -> bool:
    return '__name__ == "__main__"' in script.read_text()


def test_licence() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_a_pinned_jax_everywhere() -> None:
    """The extras ask for the same JAX as the project itself: another version would be installed over it."""
    extras = PROJECT["project"]["optional-dependencies"]
    (base,) = (d for d in PROJECT["project"]["dependencies"] if d.startswith("jax>"))
    assert extras["tpu"] == [base.replace("jax", "jax[tpu]", 1)]
