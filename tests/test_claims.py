"""claims.tsv: what whet claims, by number, and the tests that hold it (`payloads::*`: all of test_payloads.py). Numbers
of `R` are what README.md and docs/guarantees.md promise."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = [line.split("\t") for line in (HERE / "claims.tsv").read_text(encoding="utf-8").splitlines()[1:]]


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((HERE / f"test_{file}.py").read_text(encoding="utf-8"))
    return {f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[number for number, *_ in ROWS])
def test_a_claim_is_a_sentence_and_its_tests_are_there(row: list[str]) -> None:
    _, claim, tests = row
    assert claim.endswith(".")
    for test in tests.split():
        file, name = test.split("::")
        assert name == "*" or name in names_in(file), test


def test_each_number_stands_once() -> None:
    numbers = [number for number, *_ in ROWS]
    assert len(set(numbers)) == len(numbers) > 100
