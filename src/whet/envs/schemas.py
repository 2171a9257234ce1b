"""JSON schemas of functions, from signature, type hints and docstring; and the check of arguments against a schema.

A schema is the one that transformers' `get_json_schema` (5.20) gives for a function that it takes; chat templates
expect that form. That function itself is not used: it imports torch, refuses a function that does not describe every
argument, and reads Google's docstrings alone.
"""

from __future__ import annotations

import inspect
import json
import operator
import re
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from whet.tables import near
from whet.types import ConfigError, Json, ToolSpec

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Of a tool: what all chat templates and servers take."""
MOST_DEPTH = 32
"""Of a schema that came from elsewhere."""
MOST_SHOWN = 60
"""Characters of a wrong value in an error."""

_TYPES: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
    list: "array", tuple: "array", dict: "object",
}  # fmt: skip
_SCALARS = (str, int, float, bool, type(None))
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


# ---------------------------------------------------------------- of a function


def spec_of(function: Callable[..., Any], name: str | None = None, *, bound: bool = True) -> ToolSpec:
    """How the policy is told of a function.

    bound: False for a method of a class, whose first parameter is the object. A parameter without a default is
    required, one without a type hint takes any value. ConfigError for a function that cannot be called by names, or
    for a type hint that has no schema.
    """
    name = str(name or getattr(function, "__name__", ""))
    check_name(name)
    parameters = list(inspect.signature(function).parameters.values())[0 if bound else 1 :]
    types_of = hints(function)
    description, told = parse_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Json] = {}
    for parameter in parameters:
        if parameter.kind not in _KINDS:
            raise ConfigError(
                f"tool {name!r}: its parameter {parameter} cannot be passed by name; expected parameters with names"
            )
        hint = types_of.get(parameter.name, Any)
        text = next((x for x in get_args(hint)[1:] if isinstance(x, str)), None) if _annotated(hint) else None
        try:
            schema = schema_of(hint)
        except ConfigError as error:
            raise ConfigError(f"tool {name!r}, parameter {parameter.name!r}: {error}") from None
        described = text or told.get(parameter.name)
        properties[parameter.name] = schema | ({"description": described} if described else {})
    required = [p.name for p in parameters if p.default is p.empty]
    whole: dict[str, Json] = {"type": "object", "properties": properties}
    return ToolSpec(name, description, whole | ({"required": required} if required else {}))


def hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The type hints of a function. ConfigError for one that cannot be resolved."""
    try:
        return get_type_hints(inspect.unwrap(function), include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        name = getattr(function, "__name__", function)
        raise ConfigError(f"tool {name!r}: its type hints cannot be resolved: {error}") from None


def check_name(name: str) -> None:
    """ConfigError for a name that a tool cannot have."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"tool {name[:80]!r}: expected a name of 1 to 64 letters, digits, '_', '-' or '.'")


def _annotated(hint: Any) -> bool:
    return get_origin(hint) is Annotated


def schema_of(hint: Any) -> dict[str, Json]:
    """The JSON schema of a type hint. ConfigError for one that has none."""
    if _annotated(hint):
        return schema_of(get_args(hint)[0])
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    origin, inner = get_origin(hint), get_args(hint)
    if origin in _TYPES and not inner:  # typing.List and the like
        return {"type": _TYPES[origin]}
    if origin is Literal:
        return _enum(list(inner), hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum([member.value for member in hint], hint)
    if origin in (Union, types.UnionType):
        return _union(inner)
    if origin is list:
        return {"type": "array", "items": schema_of(inner[0])}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": schema_of(inner[1])}
    if origin is tuple and inner[1:] == (...,):
        return {"type": "array", "items": schema_of(inner[0])}
    if origin is tuple and inner:
        return {"type": "array", "prefixItems": [schema_of(t) for t in inner]}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    raise ConfigError(
        f"its type {getattr(hint, '__name__', hint)} has no JSON schema; expected str, int, float, bool, list, tuple, "
        "dict[str, ...], Literal, an Enum, Any, or a union of them"
    )


def _enum(values: list[Json], hint: Any) -> dict[str, Json]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise ConfigError(f"the values of {hint} are not JSON values; expected texts, numbers, bool or None")
    names = list(dict.fromkeys(_TYPES[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _union(inner: tuple[Any, ...]) -> dict[str, Json]:
    parts = [schema_of(t) for t in inner if t is not type(None)]
    if len(parts) == 1:
        schema = parts[0]
    elif all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts):
        names = sorted({part["type"] for part in parts})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": parts}
    return schema | ({"nullable": True} if type(None) in inner else {})


# ---------------------------------------------------------------- docstrings

_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?|see also|attributes|warnings?)"
    r":?\s*",
    re.IGNORECASE,
)
_ARGUMENTS = ("args", "arguments", "parameters", "params")
_GOOGLE = re.compile(r"(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY = re.compile(r"()(\w+)\s*(?::.*)?()")
_FIELD = re.compile(
    r":(param|parameter|arg|argument|type|returns?|rtype|raises?|yields?|ytype)\b\s*([^:]*):\s*(.*)"
)


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description of a function, and those of its arguments, from a docstring in Google's, numpy's or Sphinx's
    form. What belongs to neither (returns, raises, examples ...) is left out."""
    lines = inspect.cleandoc(text).splitlines()
    head: list[str] = []
    told: dict[str, list[str]] = {}
    section, numpy, indent, current = "", False, "", None
    for n, line in enumerate(lines):
        bare = line.strip()
        underlined = n + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[n + 1].strip()) is not None
        if line == bare and _SECTION.fullmatch(bare) and (underlined or bare.endswith(":")):
            section, numpy, indent, current = bare.rstrip(":").lower(), underlined, "", None
        elif field := _FIELD.fullmatch(bare):
            section = "fields"
            words = field[2].split()
            current = words[-1] if field[1] in ("param", "parameter", "arg", "argument") and words else None
            if current:
                told[current] = [field[3]]
        elif section and section != "fields" and not numpy and bare and line == bare:
            section, current = "", None  # text goes on after a section
            head.append(line)
        elif section in _ARGUMENTS and not re.fullmatch(r"-{3,}", bare):
            entry = (_NUMPY if numpy else _GOOGLE).fullmatch(line)
            if entry and (not indent or entry[1] == indent):
                indent, current = entry[1], entry[2]
                told[current] = [entry[3]]
            elif current and bare:
                told[current].append(bare)
        elif section == "fields" and current and line != bare:
            told[current].append(bare)
        elif not section:
            head.append(line)
    return "\n".join(head).strip(), {name: " ".join(parts).strip() for name, parts in told.items()}


# ---------------------------------------------------------------- the check


def wrong_arguments(schema: Mapping[str, Json], arguments: Mapping[str, Json]) -> list[str]:
    """What is wrong with the arguments of a call, in words; [] for nothing.

    The schema is the one of a tool, an object; an argument that it does not name is wrong, unless
    `additionalProperties` says otherwise. Keywords that are not known here (`$ref`, `pattern`, `format` ...) allow
    everything.
    """
    strict = {**schema, "additionalProperties": schema.get("additionalProperties", False)}
    return list(wrong(strict, dict(arguments)))


def wrong(schema: Json, value: Json, where: str = "") -> Iterator[str]:
    """What is wrong with a value, in words; nothing where the schema allows it."""
    if not isinstance(schema, dict) or (value is None and schema.get("nullable") is True):
        return
    shown = f"{where or 'the value'} is {_shown(value)}; expected {expected(schema)}"
    names = schema.get("type")
    names = [names] if isinstance(names, str) else names
    if isinstance(names, list) and not any(_is(name, value) for name in names):
        yield shown
        return
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(allowed, list) and not any(_same(value, one) for one in allowed):
        yield shown
        return
    choices = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(choices, list) and all(any(wrong(choice, value)) for choice in choices):
        yield shown
        return
    yield from _wrong_size(schema, value, where)
    yield from _wrong_inside(schema, value, where)


_BOUNDS = {
    str: ("minLength", "maxLength", " characters"),
    list: ("minItems", "maxItems", " entries"),
    int: ("minimum", "maximum", ""),
    float: ("minimum", "maximum", ""),
}
"""Of values of a type: the keywords, and what they count."""


def _wrong_size(schema: dict[str, Json], value: Json, where: str) -> Iterator[str]:
    """A number or a length beyond its bounds."""
    if type(value) not in _BOUNDS:
        return
    lowest, highest, what = _BOUNDS[type(value)]
    size = len(value) if isinstance(value, str | list) else value
    # compared, for a difference of an int and a float may overflow
    for key, word, beyond in ((lowest, "at least", operator.lt), (highest, "at most", operator.gt)):
        bound = schema.get(key)
        if isinstance(bound, int | float) and beyond(size, bound):
            yield f"{where or 'the value'} is {_shown(value)}; expected {word} {bound:g}{what}"


def _wrong_inside(schema: dict[str, Json], value: Json, where: str) -> Iterator[str]:
    """Entries of an array or an object."""
    if isinstance(value, list):
        first = _given(schema, "prefixItems", list)
        if first and "items" not in schema and len(value) != len(first):
            yield f"{where or 'the value'} has {len(value)} entries; expected {len(first)}"
        for n, entry in enumerate(value):
            of = first[n] if n < len(first) else schema.get("items", {})
            yield from wrong(of, entry, f"{where}[{n}]")
    elif isinstance(value, dict):
        properties, other = _given(schema, "properties", dict), schema.get("additionalProperties", True)
        for name in _given(schema, "required", list):
            if isinstance(name, str) and name not in value:
                yield f"{_inside(where, name)} is missing; expected {expected(properties.get(name, {}))}"
        for name, entry in value.items():
            if name in properties or other is not False:
                yield from wrong(properties.get(name, other), entry, _inside(where, name))
            else:
                there = ", ".join(map(repr, properties)) or "none"
                yield f"{_inside(where, name)} is not known{near(name, properties)}; there are: {there}"


def _given(schema: dict[str, Json], keyword: str, kind: type[T]) -> T:
    """What a schema, which may come from elsewhere, says by a keyword; nothing, if it is of another form."""
    value = schema.get(keyword)
    return value if isinstance(value, kind) else kind()


def _inside(where: str, name: str) -> str:
    return f"{where}[{name!r}]" if where else f"argument {name!r}"


def _is(name: Json, value: Json) -> bool:
    """The value is of the JSON type of that name. A type that is not known allows everything."""
    kinds = [kind for kind, word in _TYPES.items() if word == name and kind is not tuple]
    if isinstance(value, bool):
        return name == "boolean" or not kinds
    return not kinds or isinstance(value, kinds[0]) or (name == "number" and isinstance(value, int))


def _same(a: Json, b: Json) -> bool:
    """Equal as JSON, where 1 is not true."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def expected(schema: Json) -> str:
    """A schema in words."""
    if not isinstance(schema, dict):
        return "any value"
    null = " or null" if schema.get("nullable") is True else ""
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return (
            "one of " + ", ".join(_shown(value) for value in values) + null
            if isinstance(values, list)
            else "any"
        )
    choices = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(choices, list):
        return " or ".join(expected(choice) for choice in choices) + null
    names = schema.get("type")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names:
        return "any value"
    words = [f"{'an' if str(name)[:1] in 'aio' else 'a'} {name}" for name in names]
    inside = schema.get("items")
    of = f" of which each entry is {expected(inside)}" if names == ["array"] and inside else ""
    return " or ".join(words) + of + null


def _shown(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ... ({len(text)} characters)"


def check_schema(spec: ToolSpec) -> ToolSpec:
    """The spec of a tool that came from elsewhere, checked. ConfigError says what is wrong with it."""
    check_name(spec.name)
    if not isinstance(spec.parameters, dict) or spec.parameters.get("type", "object") != "object":
        raise ConfigError(f"tool {spec.name!r}: its parameters are not a JSON schema of an object")
    if not isinstance(spec.parameters.get("properties") or {}, dict):
        raise ConfigError(f"tool {spec.name!r}: the `properties` of its parameters are not an object")
    level: list[Json] = [spec.parameters]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for value in level
            for inner in (
                value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            )
        ]
    if level:
        raise ConfigError(f"tool {spec.name!r}: its parameters are nested deeper than {MOST_DEPTH} levels")
    return spec


def converter(hint: Any) -> Callable[[Json], Any] | None:
    """What makes the value that a function expects of a checked JSON value: members of an Enum, tuples. None: the
    value itself."""
    if _annotated(hint):
        return converter(get_args(hint)[0])
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if hint is tuple or origin is tuple:
        each = [converter(t) or _same_value for t in inner if t is not ...] or [_same_value]
        repeats = not inner or inner[1:] == (...,)
        return lambda value: tuple(f(x) for f, x in zip(each * len(value) if repeats else each, value))
    of = converter(inner[-1]) if inner and origin in (list, dict) else None
    if of is not None and origin is list:
        return lambda values: [of(value) for value in values]
    if of is not None:
        return lambda values: {key: of(value) for key, value in values.items()}
    if origin in (Union, types.UnionType):
        return _of_union([(schema_of(t), converter(t)) for t in inner])
    return None


def _same_value(value: Json) -> Json:
    return value


def _of_union(parts: list[tuple[Json, Callable[[Json], Any] | None]]) -> Callable[[Json], Any] | None:
    """The converter of the first type that allows a value."""
    if all(convert is None for _, convert in parts):
        return None

    def converted(value: Json) -> Any:
        convert = next((convert for schema, convert in parts if not any(wrong(schema, value))), None)
        return value if convert is None else convert(value)

    return converted
