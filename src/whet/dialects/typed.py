"""Values of a foreign file, read with their kind: a wrong one is refused by its key. `choices.tsv` says what the values
of a choice are here, and the settings of what is chosen."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from whet.config.faults import shown
from whet.config.urls import is_remote
from whet.dialects.row import NotSupportedYet, Values
from whet.tables import lines
from whet.types import ConfigError, Json

T = TypeVar("T")


def number(v: Values, key: str) -> float:
    """Any number."""
    value = v[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}: got {shown(value)}, expected a number")
    return value


def share_of_steps(value: float, key: str) -> float:
    """The share of all steps that a warm-up takes: a native number from 1 on counts steps."""
    if value >= 1:
        raise NotSupportedYet(
            f"{key}={shown(value)}: a warm-up over all steps is coming, not built yet; give a share below 1, or their "
            "number"
        )
    return value


def choose(v: Values, key: str, known: Mapping[str, T | None]) -> T:
    """What a choice stands for. A name that is known but not built yet stands for None, and raises NotSupportedYet."""
    value = v[key]
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{key}: got {shown(value)}, expected one of {', '.join(known)}")
    meaning = known[value]
    if meaning is None:
        built = ", ".join(name for name, there in known.items() if there is not None)
        raise NotSupportedYet(f"{key}={value} is coming, not built yet; today: {built}")
    return meaning


@functools.cache
def choices(system: str, choice: str) -> dict[str, str | None]:
    """By value: what it is here; None for what is not built yet."""
    return {line["value"]: line["native"] or None for line in lines_of(system, choice) if not line["key"]}


def settings(system: str, choice: str, value: str) -> dict[str, str]:
    """By native setting of what is chosen: the foreign key, below the section of the choice."""
    told = (line for line in lines_of(system, choice) if line["key"] and line["value"] == value)
    return {line["native"]: line["key"] for line in told}


def lines_of(system: str, choice: str) -> Iterator[dict[str, str]]:
    """What choices.tsv has of one choice."""
    table = lines(__package__, "choices.tsv")
    return (line for line in table if (line["system"], line["choice"]) == (system, choice))


def place(path: str) -> str:
    """A place as a URL: what is one already as it is, a folder of this machine as file://. One below a home folder that
    is not known here stays as it is, and is refused as such."""
    path = path if is_remote(path) else os.path.expanduser(path)
    return path if is_remote(path) or path.startswith("~") else Path(path).absolute().as_uri()


SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+|)(%?):(-?\d+|)(%?)\])?")
SUM = re.compile(r"[\w.-]+( *\+ *[\w.-]+)+")


def rows_of_split(text: str, key: str) -> dict[str, Json]:
    """A split as the datasets library names it, and what to skip and to take of it. Percentages are boundaries
    natively, too; a negative number counts from the end."""
    if SUM.fullmatch(text):
        return {"split": [name.strip() for name in text.split("+")]}
    found = SPLIT.fullmatch(text)
    name, low, percent_low, high, percent_high = found.groups() if found else ("",) * 5
    first, last = int(low or 0), int(high) if high else None
    is_share = bool(percent_low or percent_high)
    mixed = is_share and low and high and percent_low != percent_high
    if is_share:  # the last fifth begins at 80%
        first += 100 * (first < 0)
        last = 100 if last is None else last + 100 * (last < 0)
    from_end = min(first, last or 0) < 0
    if found is None or mixed or (from_end and (is_share or (first < 0 <= (last or 0) and high))):
        raise NotSupportedYet(
            f"{key}: {shown(text)} is coming, not built yet; today: NAME, NAME[:100], NAME[5%:10%], NAME[-20%:], "
            "NAME[-100:], A+B"
        )
    backwards = last is not None and last <= first and (first < 0) == (last < 0)
    if backwards or (is_share and max(first, last or 0) > 100):
        raise ConfigError(
            f"{key}: {shown(text)} takes no rows, or more than there are; give the lower end first"
        )
    if not is_share:
        limit = last if last is None or last < 0 else last - first
        return {"split": name, **({"skip": first} if first else {}), **({"limit": limit} if limit else {})}
    skip = {"skip": f"{int(low)}%"} if first else {}
    taken = int(high) if high.startswith("-") else (last or 0) - first
    return {"split": name, **skip, **({} if last == 100 else {"limit": f"{taken}%"})}
