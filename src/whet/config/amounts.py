"""Amounts: a number of steps, or a text with another unit (`2 epochs`, `30 s`) or a first step (`4 steps from 3`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Amount = float | str


class Every(NamedTuple):
    """What an amount says."""

    number: float
    unit: str
    """`step`, `epoch` or `s`."""
    first: int = 0
    """Nothing is due before this step."""


def amounts(given: Amount | Sequence[Amount]) -> Iterator[Every]:
    """The parts of one or several amounts."""
    for each in (given,) if isinstance(given, float | int | str) else given:
        if isinstance(each, str):
            number, _, rest = each.partition(" ")
            unit, _, first = rest.partition(" from ")
            yield Every(float(number), unit if unit == "s" else unit.removesuffix("s"), int(first or 0))
        else:
            yield Every(each, "step")
