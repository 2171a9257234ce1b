"""Values in tool calls as a policy wrote them: JSON within limits, and plain text by the type that a schema names.

The text is hostile. Reading it takes time in proportion to its length, evaluates nothing, and ends with a value that
can be written as JSON and as UTF-8 again, or with `Malformed`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Literal

from whet.types import Json, ToolSpec

MOST_DEPTH = 64
"""Objects and lists inside each other in one value."""
MOST_DIGITS = 1000
"""Characters of one number. More is no number for any tool, and int() takes the square of their count."""
MOST_SCHEMA = 1000
"""Parts of a schema that are looked at for one argument; a schema may refer to itself."""

_EXCERPT = 40


class Malformed(ValueError):
    """A reply, or a part of it, cannot be read. The message says what was expected, for a person and for a policy."""


def shown(text: str, at: int) -> str:
    """What stands at a place of a text, for a message."""
    piece = text[at : at + _EXCERPT]
    return repr(piece) + ("..." if at + _EXCERPT < len(text) else "") if piece else "the end of the reply"


def read_json(text: str, at: int = 0) -> tuple[Json, int]:
    """The JSON value that begins at `at`, and the place after it. Types, order of keys and white space are kept.

    Malformed for what is not valid JSON, for NaN and infinities, a key given twice, half a surrogate pair, and for
    values over MOST_DEPTH or MOST_DIGITS.
    """
    try:
        value, end = _DECODER.raw_decode(text, at)
        _check(value)
    except json.JSONDecodeError as e:
        raise Malformed(f"its JSON is not valid: {e.msg} at {shown(text, e.pos)}") from None
    except RecursionError:
        raise _too_deep() from None
    except UnicodeEncodeError:
        raise Malformed(
            "its JSON has half a surrogate pair (\\ud800 to \\udfff), which is not valid text"
        ) from None
    return value, end


def _check(value: Json) -> None:
    """Bound the depth of a value, and encode its texts."""
    level, depth = [value], 0
    while level:
        if depth > MOST_DEPTH:
            raise _too_deep()
        for text in level:
            if isinstance(text, str) and not text.isascii():
                text.encode()
        level = [entry for parent in level for entry in _inside(parent)]
        depth += 1


def _inside(value: Json) -> Iterator[Json]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _too_deep() -> Malformed:
    return Malformed(f"its JSON is nested deeper than {MOST_DEPTH} levels")


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made: dict[str, Json] = {}
    for key, value in pairs:
        if key in made:
            raise Malformed(f"its JSON has the key {key[:_EXCERPT]!r} twice")
        made[key] = value
    return made


def _whole(digits: str) -> int:
    return int(_number(digits))


def _real(digits: str) -> float:
    value = float(_number(digits))
    if math.isinf(value):
        raise Malformed(f"its JSON has a number that is too large ({digits[:_EXCERPT]})")
    return value


def _number(digits: str) -> str:
    if len(digits) > MOST_DIGITS:
        raise Malformed(f"its JSON has a number of more than {MOST_DIGITS} digits")
    return digits


def _constant(name: str) -> Json:
    raise Malformed(f"its JSON has {name}, which is not a JSON value")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_whole, parse_float=_real, parse_constant=_constant
)

Untyped = Literal["text", "json"]
"""How an argument is read whose type nobody names: as it stands, or as JSON where it is valid JSON."""

_NAMES = {"True": True, "False": False, "None": None}
"""What chat templates write that use Jinja's `string` on a value (Qwen3.5's), so policies write it, too."""


def read_by_schema(text: str, tool: ToolSpec | None, key: str, untyped: Untyped) -> Json:
    """An argument that was written as plain text, by the type that the tool's JSON schema gives it.

    A text that may be a string stays as it is, white space included; but `null` and `None` are null where the schema
    has that, too. Other types are read as JSON. A text that is not of its type stays text, as in transformers 5.23 and
    vLLM: the tool's own check tells the policy what is wrong with it.
    """
    types = _types(tool, key)
    if "string" in types:
        return None if "null" in types and text.strip() in ("null", "None") else text
    if not types and untyped == "text":
        return text
    bare = text.strip()
    try:
        value, end = (_NAMES[bare], len(bare)) if types and bare in _NAMES else read_json(bare)
    except Malformed:
        return text
    if end < len(bare):
        return text
    return _fitted(value, types) if _fits(value, types) else text


def _fits(value: Json, types: frozenset[str]) -> bool:
    whole = isinstance(value, float) and value.is_integer() and "integer" in types
    kinds = {"integer", "number"} if _kind(value) == "integer" else {_kind(value)}
    return not types or whole or bool(kinds & types)


def _fitted(value: Json, types: frozenset[str]) -> Json:
    """JSON schema calls 3.0 an integer."""
    return int(value) if isinstance(value, float) and "integer" in types and "number" not in types else value


_KINDS: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"
}  # fmt: skip


def _kind(value: Json) -> str:
    return _KINDS[type(value)]


def kind(value: Json) -> str:
    """The value's type in words."""
    name = _kind(value)
    return name if name == "null" else f"{'an' if name[0] in 'aio' else 'a'} {name}"


def _types(tool: ToolSpec | None, key: str) -> frozenset[str]:
    """JSON types that a tool's schema allows for an argument; none: it does not say. A schema may be from outside."""
    root: Any = tool.parameters if tool is not None else None
    properties = root.get("properties") if isinstance(root, dict) else None
    found: set[str] = set()
    rest: list[Json] = [properties.get(key)] if isinstance(properties, dict) else []
    for _ in range(MOST_SCHEMA):
        if not rest:
            break
        schema = rest.pop()
        if isinstance(schema, dict):
            found |= _named(schema)
            for union in ("anyOf", "oneOf", "allOf"):
                rest += schema[union] if isinstance(schema.get(union), list) else []
            rest += [_referred(root, schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
    return frozenset(found)


def _named(schema: dict[str, Json]) -> set[str]:
    """Types that one schema names itself, or shows by its values."""
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    types |= {t for t in declared if isinstance(t, str)} if isinstance(declared, list) else set()
    if not types:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = [*values, *([schema["const"]] if "const" in schema else [])]
        types = {_kind(value) for value in values if type(value) in _KINDS}
    return types | ({"null"} if schema.get("nullable") is True else set())


def _referred(root: Json, path: str) -> Json:
    """What `#/$defs/Name` means."""
    here = root
    for name in path.removeprefix("#/").split("/"):
        here = here.get(name) if isinstance(here, dict) else None
    return here
