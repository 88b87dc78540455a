"""The wheel: what is in it, and that every module can be imported from it away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mlora").rglob("*.py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, which then has the build's own folders."""
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "mlora", copy / "mlora", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ops", "pipeline"):
        (copy / name).symlink_to(Path("mlora") / name)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run(command, cwd=copy, check=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    (path,) = (copy / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_every_module_and_nothing_at_the_top(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
        (entries,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert names == SOURCES
    assert wheel.name.startswith("mlora_engine-") and "\nName: mlora-engine\n" in metadata
    assert "mlora = mlora.cli:main" in entries


def test_every_module_imports_from_the_wheel(wheel, tmp_path):
    place = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", place, wheel]
    subprocess.run(command, check=True, cwd=tmp_path)
    modules = sorted(
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in SOURCES
        if not name.endswith("__main__.py")
    )
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(place)!r}), module.__file__\n"
        "assert 'ops' not in sys.modules and 'pipeline' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "mlora", "--version"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith("mlora ")
