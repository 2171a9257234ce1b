"""What a foreign value means in its own system, and what a row's `type` accepts.

A type is alternatives split by `|`: a name of `KINDS`, `int>=1`, `number>0`, `one_of:a,b,c`, or `equal:other.key`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence

from whet.config.faults import shown
from whet.config.keys import lookup
from whet.config.scalars import scalar
from whet.config.urls import is_remote
from whet.dialects.row import READ, Row
from whet.types import Json

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "": False}
"""YAML 1.1, which these systems read; an empty text is false to Python."""

_FUNCTION = re.compile(r"[^:]+:[A-Za-z_]\w*")
_BOUND = re.compile(r"(int|number)(>=|>)(-?[\d.]+)")


def _is_int(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Json) -> bool:
    return isinstance(value, str)


def _list_of(each: Callable[[Json], bool]) -> Callable[[Json], bool]:
    return lambda value: isinstance(value, list) and all(map(each, value))


def _is_layer(value: Json) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w+DecoderLayer", value) is not None


def _is_layers(value: Json) -> bool:
    """FSDP's classes to wrap: decoder layers, each of which is wrapped by itself here."""
    return all(map(_is_layer, value)) if isinstance(value, list) else _is_layer(value)


KINDS: dict[str, tuple[Callable[[Json], bool], str]] = {
    "any": (lambda value: True, "anything"),
    "null": (lambda value: value is None, "null"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (_is_int, "a whole number"),
    "number": (_is_number, "a number"),
    "share": (lambda value: _is_number(value) and 0 < value <= 1, "a share above 0 and at most 1"),
    "list": (lambda value: isinstance(value, list), "a list"),
    "text": (_is_text, "a text"),
    "texts": (_list_of(_is_text), "a list of texts"),
    "section": (lambda value: isinstance(value, dict), "a section of keys"),
    "numbers": (_list_of(_is_number), "a list of numbers"),
    "ints": (_list_of(_is_int), "a list of whole numbers"),
    "path": (
        lambda value: isinstance(value, str) and value != "" and not is_remote(value),
        "a path on this machine",
    ),
    "function": (
        lambda value: isinstance(value, str) and _FUNCTION.fullmatch(value) is not None,
        "a function of yours as path/to/file.py:name (a name that your own code registers is not known here)",
    ),
    "decoder_layers": (_is_layers, "decoder layers (...DecoderLayer): each is wrapped by itself"),
}
"""Name -> (whether a value is of the kind, what is expected, for people)."""


def accepts(kind: str, value: Json) -> bool:
    """Whether a value is of one of the alternatives of a type; `equal:` says nothing yet."""
    return any(_is_a(each, value) for each in kind.split("|"))


def _is_a(kind: str, value: Json) -> bool:
    if kind.startswith("one_of:"):
        return value in kind.removeprefix("one_of:").split(",")
    bound = _BOUND.fullmatch(kind)
    if bound is None:
        return kind.startswith("equal:") or KINDS[kind][0](value)
    least = float(bound[3])
    return KINDS[bound[1]][0](value) and (value >= least if bound[2] == ">=" else value > least)


def expected(kind: str) -> str:
    """What a type accepts, for people."""
    return " or ".join(map(_expected, kind.split("|")))


def _expected(kind: str) -> str:
    if kind.startswith("one_of:"):
        return f"one of {', '.join(kind.removeprefix('one_of:').split(','))}"
    if kind.startswith("equal:"):
        return f"the value of {kind.removeprefix('equal:')}"
    bound = _BOUND.fullmatch(kind)
    return f"{KINDS[bound[1]][1]} {bound[2]} {bound[3]}" if bound else KINDS[kind][1]


def same(a: Json, b: Json) -> bool:
    """Equal, true and 1 told apart."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def understood(value: Json, row: Row, *, default: Json, nulls: Sequence[str]) -> tuple[Json, str]:
    """(the value as that system reads it, what is wrong with it or '').

    Only rows that do something with the value are strict about its kind; the others compare it.
    """
    if isinstance(value, str) and value in nulls and default is None:
        return None, ""
    if isinstance(value, dict) and holds_one(row, default):
        return value, f"got {shown(value)}, expected one value, like {shown(default)}"
    if row.type and row.status in READ:
        return _typed(value, row.type)
    is_section = isinstance(default, dict) and not row.key.endswith("*")  # else the value of an open name
    if is_section and row.status in READ and value is None:
        return default, ""  # as null in the place of several keys keeps their defaults
    if is_section and row.status in READ and not isinstance(value, dict):
        return value, f"got {shown(value)}, expected a section of keys"
    if isinstance(default, bool):
        return _flag(value, row)
    if isinstance(default, int | float):
        return _number(value, row)
    if _is_numbers(default) and isinstance(value, str):
        return _numbers(value), ""
    return value, ""


def holds_one(row: Row, default: Json) -> bool:
    """Whether it is the key of a text or number, which no section can be given for."""
    return isinstance(default, str | int | float) and "section" not in row.type.split("|")


def _is_numbers(value: Json) -> bool:
    return value != [] and KINDS["numbers"][0](value)


def _numbers(text: str) -> Json:
    """The list that a quoted `[0.9,0.95]` is meant to be; another text as it is."""
    inside = re.fullmatch(r"\s*[\[(](.*)[\])]\s*", text)
    with contextlib.suppress(ValueError):
        found = [scalar(one.strip()) for one in inside[1].split(",")] if inside else None
        return found if _is_numbers(found) else text
    return text


def _typed(value: Json, kind: str) -> tuple[Json, str]:
    """Texts are tried as they are, then as what YAML 1.1 makes of them."""
    tried = [value, *([0] if value is False else [])]  # as Python counts it
    if isinstance(value, str):
        tried += [_BOOLS[value.lower()]] if value.lower() in _BOOLS else []
        with contextlib.suppress(ValueError):
            tried.append(scalar(value.strip()))
    for each in tried:
        if accepts(kind, each):
            return each, ""
    return value, f"got {shown(value)}, expected {expected(kind)}"


def _flag(value: Json, row: Row) -> tuple[Json, str]:
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()], ""
    if value is None or isinstance(value, bool) or row.status not in READ or _takes_more(row):
        return value, ""
    return value, f"got {shown(value)}, expected true or false"


def _number(value: Json, row: Row) -> tuple[Json, str]:
    try:
        read = scalar(value.strip()) if isinstance(value, str) else value
    except ValueError as e:
        return value, str(e)
    if _is_number(read) or read is False or (row.status not in READ and isinstance(read, float)):
        return (0 if read is False else read), ""  # as Python counts it
    if value is None or row.status not in READ or isinstance(value, list):
        return value, ""
    return value, f"got {shown(value)}, expected a number"


def _takes_more(row: Row) -> bool:
    """Whether it feeds a native key that takes text or a number: `resume: true | path`."""
    keys = [lookup(tuple(native.split("."))) for native in row.native]
    return any(
        key is not None and key.words not in ("true or false", "true or false or null") for key in keys
    )
