"""Which line an error of a user's code is told to come from: one of the user's, whatever the code has called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from whet.config.schema import SourceConfig
from whet.data.rows import read_rows
from whet.guard.foreign import describe
from whet.guard.imports import import_all
from whet.tables import load_object
from whet.types import ConfigError, DataError

CODE = """\
from dataclasses import dataclass
from pathlib import Path
import yaml

@dataclass(frozen=True)
class Task:
    answer: str

def frozen():
    Task("a").answer = "b"

def library():
    Path("/no/such").read_text()

def package():
    yaml.safe_load("a: [")

def rows():
    package()
    yield {}
"""
LINES = {"frozen": 10, "library": 13, "package": 16}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return file


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_the_user_s_raised_it(place: Path, name: str) -> None:
    with pytest.raises(Exception, match=r".") as raised:
        load_object(f"{place}:{name}", what="reward")()
    assert describe(raised.value).endswith(f"(mine.py:{LINES[name]})")


@pytest.mark.parametrize(("name", "line"), [("frozen", 21), ("library", 21), ("package", 21)])
def test_where_an_import_raised(tmp_path: Path, name: str, line: int) -> None:
    file = tmp_path / f"{name}.py"
    body = {"frozen": 'Task("a").answer = "b"', "library": 'Path("/no/such").read_text()'}
    file.write_text(CODE + body.get(name, 'yaml.safe_load("a: [")') + "\n")
    with pytest.raises(ConfigError, match=re.escape(f"{file}:{line})")):
        load_object(f"{file}:f", what="reward")
    (tmp_path / "needs.py").write_text("import yaml\nimport no_such_package\n")
    with pytest.raises(ConfigError, match=r"No module named 'no_such_package' \(.*needs\.py:2\)"):
        load_object(f"{tmp_path}/needs.py:f", what="reward")
    with pytest.raises(ConfigError, match=re.escape(f"{file}, line {line})")):
        import_all([str(file)])


def test_where_a_function_of_rows_raised(place: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"{place}:16)")):
        read_rows(SourceConfig(function=f"{place}:rows"))


def test_without_a_line_of_the_user_s_the_innermost_of_a_package_is_told() -> None:
    with pytest.raises(Exception, match=r".") as raised:
        load_object("yaml:safe_load", what="reward")("a: [")
    raised.value.__traceback__ = raised.value.__traceback__.tb_next if raised.value.__traceback__ else None
    assert re.search(r"\(parser\.py:\d+\)$", describe(raised.value))
