"""What the values of a foreign choice are here, and the settings of what is chosen: `choices.tsv`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from whet.tables import lines


@functools.cache
def choices(system: str, choice: str) -> dict[str, str | None]:
    """By value: what it is here; None for what is not built yet."""
    return {line["value"]: line["native"] or None for line in _lines(system, choice) if not line["key"]}


def settings(system: str, choice: str, value: str) -> dict[str, str]:
    """By native setting of what is chosen: the foreign key, below the section of the choice."""
    told = (line for line in _lines(system, choice) if line["key"] and line["value"] == value)
    return {line["native"]: line["key"] for line in told}


def _lines(system: str, choice: str) -> Iterator[dict[str, str]]:
    table = lines(__package__, "choices.tsv")
    return (line for line in table if (line["system"], line["choice"]) == (system, choice))
