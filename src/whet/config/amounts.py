"""Amounts: a number of steps, or a text with another unit (`2 epochs`, `30 s`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Amount = float | str


def amounts(given: Amount | Sequence[Amount]) -> Iterator[tuple[float, str]]:
    """(number, unit) of one or several amounts; the unit is `step`, `epoch` or `s`."""
    for each in (given,) if isinstance(given, float | int | str) else given:
        number, _, unit = each.partition(" ") if isinstance(each, str) else (each, "", "step")
        yield float(number), unit if unit == "s" else unit.removesuffix("s")
