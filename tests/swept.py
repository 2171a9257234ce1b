"""Cases of which `make test` runs some, and `make sweep` the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


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
