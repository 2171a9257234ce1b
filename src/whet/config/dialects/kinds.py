"""What a foreign value means in its own system: texts that are numbers, booleans or null there."""

from __future__ import annotations

from collections.abc import Sequence

from whet.config.dialects.key import Key
from whet.config.faults import shown
from whet.config.keys import lookup
from whet.config.parse import scalar
from whet.types import Json

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""YAML 1.1, which these systems read."""


def same(a: Json, b: Json) -> bool:
    """Equal, true and 1 told apart."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def understood(value: Json, row: Key, *, default: Json, nulls: Sequence[str]) -> tuple[Json, str]:
    """(the value as that system reads it, what is wrong with it or '').

    Only rows that do something with the value are strict about its kind; the others compare it.
    """
    if isinstance(value, str) and value in nulls and default is None:
        return None, ""
    if isinstance(value, dict) and isinstance(default, str | int | float):
        return value, f"got {shown(value)}, expected one value, like {shown(default)}"
    is_section = isinstance(default, dict) and not row.name.endswith("*")  # else the value of an open name
    if is_section and _strict(row) and not isinstance(value, dict | None):
        return value, f"got {shown(value)}, expected a section of keys"
    if isinstance(default, bool):
        return _flag(value, row)
    if isinstance(default, int | float):
        return _number(value, row)
    return value, ""


def _flag(value: Json, row: Key) -> tuple[Json, str]:
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()], ""
    if value is None or isinstance(value, bool) or not _strict(row) or _takes_more(row):
        return value, ""
    return value, f"got {shown(value)}, expected true or false"


def _number(value: Json, row: Key) -> tuple[Json, str]:
    try:
        read = scalar(value.strip()) if isinstance(value, str) else value
    except ValueError as e:
        return value, str(e)
    if isinstance(read, int | float) and not isinstance(read, bool):
        return read, ""
    if value is None or not _strict(row) or isinstance(value, list):
        return value, ""
    return value, f"got {shown(value)}, expected a number"


def _strict(row: Key) -> bool:
    return row.status in ("mapped", "translated", "derived")


def _takes_more(row: Key) -> bool:
    """Whether it feeds a native key that takes text or a number: `resume: true | path`."""
    keys = [lookup(tuple(native.split("."))) for native in row.native]
    return any(
        key is not None and key.words not in ("true or false", "true or false or null") for key in keys
    )
