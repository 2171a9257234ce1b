"""Values of a foreign file, read with their kind: a wrong one is refused by its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from whet.config.faults import shown
from whet.dialects.row import NotSupportedYet, Values
from whet.types import ConfigError

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
