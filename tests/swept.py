"""Which tests `make test` runs, which `make test-long`, and of which cases `make sweep` the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

HERE = Path(__file__).parent
CASES = HERE / "cases.tsv"
"""File, test, how many of its cases are not left to the sweep, and whether those are for `make test-long`. It has the
tests that take long; `times.py` writes it."""


def sample(items: Sequence[pytest.Item]) -> None:
    """Mark what `cases.tsv` leaves to `make sweep` and to `make test-long`. Of a test's cases those stay whose names
    have the smallest checksums: the same ones everywhere, of every kind, and a new case moves few others."""
    table = {(file, test): (int(cases), bool(long)) for file, test, cases, long in rows()}
    found: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") is None:
            found[function_of(item)].append(item)
    for test in found.keys() & table.keys():
        cases, long = table[test]
        for place, item in enumerate(sorted(found[test], key=lambda item: crc32(item.name.encode()))):
            if place >= cases:
                item.add_marker(pytest.mark.sweep(CASES.name))
            elif long:
                item.add_marker(pytest.mark.long(CASES.name))


def rows() -> list[list[str]]:
    return [line.split("\t") for line in CASES.read_text().splitlines()[1:]]


def function_of(item: pytest.Item) -> tuple[str, str]:
    """Its file, below `tests`, and the function whose case it is."""
    return item.path.relative_to(HERE).as_posix(), getattr(item, "originalname", item.name)


def except_for(kept: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """The same cases for one argument of a test, with the mark `sweep` on all that are not kept."""
    return [case if kept(case) else pytest.param(case, marks=pytest.mark.sweep) for case in cases]


def one_each(cases: Iterable[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """The same, where the first case of each kind is kept."""
    seen: set[Any] = set()
    return except_for(lambda case: not (kind(case) in seen or seen.add(kind(case))), cases)


def in_turn(cases: Sequence[Any], values: Sequence[Any], *, name: Callable[[Any], str] = str) -> list[Any]:
    """Every case with every value, for two arguments of a test. Each case keeps one value; the values take turns."""
    return [
        pytest.param(
            case,
            value,
            id=f"{name(case)}-{n}-{value}",
            marks=() if value == values[n % len(values)] else pytest.mark.sweep,
        )
        for n, case in enumerate(cases)
        for value in values
    ]
