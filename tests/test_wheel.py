"""The wheel and the source distribution have every file of the package. Built without network, by setuptools."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = {
    path.relative_to(ROOT / "src").as_posix()
    for path in (ROOT / "src/whet").rglob("*")
    if path.is_file() and path.suffix not in (".pyc", ".so") and "__pycache__" not in path.parts
}
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools changes sys.argv
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from a copy of the checkout: a build writes beside its sources."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    left_out = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", "*.egg-info")
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=left_out)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, copy)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    own = {name for name in names if ".dist-info/" not in name}
    assert own == PACKAGE
    assert {"whet/py.typed", "whet/models/kernels.c", "whet/models/vectors.h", "whet/config/rules.tsv"} <= own


def test_the_wheel_names_its_licence_command_and_requirements(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "whet = whet.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert any(line.startswith("torch==") for line in metadata.get_all("Requires-Dist"))


def test_the_source_distribution_can_be_built_and_tried(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in PACKAGE} <= names
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "examples/first_run.yaml",
        "examples/spelling.py",
    } <= names
    assert not any(name.endswith((".pyc", ".so")) for name in names)
