"""Splits as the datasets library names them: whole ones, sums of them, and slices."""

from __future__ import annotations

import re

from whet.config.faults import shown
from whet.dialects.row import NotSupportedYet
from whet.types import ConfigError, Json

SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+|)(%?):(-?\d+|)(%?)\])?")
SUM = re.compile(r"[\w.-]+( *\+ *[\w.-]+)+")


def rows_of_split(text: str, key: str) -> dict[str, Json]:
    """The split, and what to skip and to take of it. Percentages are boundaries natively, too; a negative number counts
    from the end."""
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
