"""The layers of ARCHITECTURE.md: a row imports only rows below it, and packages of one row do not know each other."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = (  # lowest first
    ("mlora.types",),
    ("mlora.files", "mlora.names"),
    ("mlora.config",),
    ("mlora.ops", "mlora.pipeline.transport", "mlora.pipeline.schedule", "mlora.pipeline.graphs"),
    ("mlora.adapters",),
    ("mlora.pipeline.stage",),
    ("mlora.checkpoint", "mlora.data", "mlora.tasks", "mlora.models", "mlora.pipeline.executor"),
    ("mlora.engine",),
    ("mlora.cli",),
)
HEIGHT = {unit: height for height, row in enumerate(ROWS) for unit in row}
DOORS = ("mlora", "mlora.__main__", "mlora.pipeline")  # packages' own files: they say what a user imports
NO_TORCH = ("mlora.types", "mlora.files", "mlora.names", "mlora.config", "mlora.cli", "mlora.pipeline.schedule")
NO_ENVIRONMENT = (
    "mlora.ops",
    "mlora.adapters",
    "mlora.checkpoint",
    "mlora.data",
    "mlora.tasks",
    "mlora.pipeline.schedule",
)

MOST_LINES = 18_300


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


FILES = {_module(path): path for path in _files("mlora")}


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported; for ``from a import b`` that is a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _unit(name: str) -> str | None:
    return next((unit for unit in HEIGHT if name == unit or name.startswith(unit + ".")), None)


def test_every_module_has_a_row():
    assert [name for name in FILES if _unit(name) is None and name not in DOORS] == []


@pytest.mark.parametrize("name", FILES)
def test_a_row_imports_only_rows_below_it(name):
    own = _unit(name)
    wrong = []
    for line, imported in _imports(FILES[name]):
        unit = _unit(imported)
        if own and unit and unit != own and HEIGHT[unit] >= HEIGHT[own]:
            wrong.append(f"{FILES[name]}:{line} imports {imported}")
    assert wrong == []


@pytest.mark.parametrize("unit", NO_TORCH)
def test_what_never_imports_torch(unit):
    """At the top of a file; the commands of cli.py import it where they need it."""
    for name, path in FILES.items():
        if _unit(name) == unit:
            tops = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.stmt)]
            names = [alias.name for node in tops if isinstance(node, ast.Import) for alias in node.names]
            names += [node.module or "" for node in tops if isinstance(node, ast.ImportFrom)]
            assert not [found for found in names if found.split(".")[0] in ("torch", "transformers", "safetensors")], (
                path
            )
            if unit != "mlora.cli":
                assert not [found for _, found in _imports(path) if found.split(".")[0] == "torch"], path


def test_ruff_looks_at_every_module_but_those_that_it_is_told_to_leave_out():
    """A bare name such as ops would leave out mlora/ops, too."""
    ruff = [sys.executable, "-m", "ruff", "check", "--show-files", "mlora"]
    seen = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    unseen = {path.relative_to(ROOT).as_posix() for path in FILES.values()} - {
        Path(line).relative_to(ROOT).as_posix() for line in seen
    }
    left_out = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["extend-exclude"]
    assert [name for name in unseen if not name.startswith(tuple(left_out))] == []


def test_nobody_imports_through_the_links_at_the_root():
    """They would be a second copy of the same modules."""
    found = [
        f"{path}:{line}"
        for path in _files("mlora", "tests", "launch", "examples", "benchmarks")
        for line, name in _imports(path)
        if name.split(".")[0] in ("ops", "pipeline")
    ]
    assert found == []
    for link in ("ops", "pipeline"):
        assert (ROOT / link).readlink() == Path("mlora") / link


@pytest.mark.parametrize("unit", NO_ENVIRONMENT)
def test_no_environment_variable_is_read(unit):
    found = [
        f"{path}:{node.lineno}"
        for name, path in FILES.items()
        if _unit(name) == unit
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id) in ("environ", "getenv")
    ]
    assert found == []


def test_the_engine_does_not_grow_unseen():
    """A third of it is what training alone does not need: data in many forms, use of what was trained, reports."""
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES.values()) <= MOST_LINES


def test_the_check_sees_a_wrong_import(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("from mlora.engine import run\nimport torch\n")
    assert [name for _, name in _imports(path)] == ["mlora.engine.run", "torch"]
    assert _unit("mlora.engine.run") == "mlora.engine" and HEIGHT["mlora.engine"] > HEIGHT["mlora.ops"]
