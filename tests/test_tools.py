"""Tools: the schema of a function, the check of arguments against it, and what becomes of results."""

from __future__ import annotations

import enum
import functools
import json
import random
import string
from typing import Annotated, Any, Dict, List, Literal, Optional, Tuple  # noqa: UP035

import numpy as np
import pytest

from whet import secrets
from whet.envs.schemas import check_schema, parse_docstring, schema_of, spec_of, wrong, wrong_arguments
from whet.envs.tools import (
    MOST_RESULT,
    Tool,
    ToolError,
    by_name,
    error_text,
    fit,
    render,
    specs_of_class,
    tool_from_function,
    tools_from_object,
)
from whet.types import ConfigError, ToolSpec


class Unit(enum.Enum):
    celsius = "C"
    fahrenheit = "F"


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: the first
        b: the second,
            as large as you like

    Returns:
        their sum
    """
    return a + b


def scale(values: list[float], factor: float = 2.0) -> list[float]:
    """Multiply a list.

    Parameters
    ----------
    values : list of float
        What is multiplied.
    factor : float, optional
        By what,
        2 if not given.

    Returns
    -------
    list
        The products.
    """
    return [value * factor for value in values]


def look_up(key: str, where: Literal["en", "de"] = "en", most: Optional[int] = None) -> str:  # noqa: UP045
    """Look a word up.

    It takes a while.

    :param key: the word
    :param str where: the language
    :param most: how many,
        at most
    :returns: what it means
    """
    return f"{key} {where} {most}"


def bare():
    return None


def anything(x, *, y=1):
    """No hints."""
    return x, y


def weather(city: Annotated[str, "a city"], unit: Unit = Unit.celsius) -> str:
    return f"{city} {unit!r}"


def table(rows: dict[str, list[int]], point: tuple[int, str] = (0, "")) -> Any:
    return [rows, point]


def mixed(x: int | str, y: list[int] | dict[str, int] | None = None) -> Any:
    return x, y


def level(n: Literal[1, 2, "high"], on: bool, thing: Any, data: dict, many: list) -> None: ...


async def later(seconds: float) -> None:
    """Waits.

    Arguments:
        seconds (float): how long
    """


TEN: list[tuple[Any, str, dict[str, Any], list[str]]] = [
    (add, "Add two integers.", {
        "a": {"type": "integer", "description": "the first"},
        "b": {"type": "integer", "description": "the second, as large as you like"},
    }, ["a", "b"]),
    (scale, "Multiply a list.", {
        "values": {"type": "array", "items": {"type": "number"}, "description": "What is multiplied."},
        "factor": {"type": "number", "description": "By what, 2 if not given."},
    }, ["values"]),
    (look_up, "Look a word up.\n\nIt takes a while.", {
        "key": {"type": "string", "description": "the word"},
        "where": {"type": "string", "enum": ["en", "de"], "description": "the language"},
        "most": {"type": "integer", "nullable": True, "description": "how many, at most"},
    }, ["key"]),
    (bare, "", {}, []),
    (anything, "No hints.", {"x": {}, "y": {}}, ["x"]),
    (weather, "", {
        "city": {"type": "string", "description": "a city"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    }, ["city"]),
    (table, "", {
        "rows": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}},
        "point": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    }, ["rows"]),
    (mixed, "", {
        "x": {"type": ["integer", "string"]},
        "y": {
            "anyOf": [
                {"type": "array", "items": {"type": "integer"}},
                {"type": "object", "additionalProperties": {"type": "integer"}},
            ],
            "nullable": True,
        },
    }, ["x"]),
    (level, "", {
        "n": {"type": ["integer", "string"], "enum": [1, 2, "high"]},
        "on": {"type": "boolean"}, "thing": {}, "data": {"type": "object"}, "many": {"type": "array"},
    }, ["n", "on", "thing", "data", "many"]),
    (later, "Waits.", {"seconds": {"type": "number", "description": "how long"}}, ["seconds"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "said", "properties", "required"), TEN, ids=lambda x: getattr(x, "__name__", "")
)
def test_the_schema_of_a_function(function: Any, said: str, properties: Any, required: list[str]) -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    assert spec_of(function) == ToolSpec(function.__name__, said, parameters)
    json.dumps(spec_of(function).to_json(), allow_nan=False)


def described_a(n: int, names: list[str], on: bool = True) -> str:
    """Does it.

    Args:
        n: a number
        names: some
            names
        on: or off
    """
    return ""


def described_b(kind: Literal["x", "y"], size: float | None = None, table: dict[str, int] = {}) -> None:  # noqa: B006
    """Does it.

    And more.

    Args:
        kind: which: one of two
        size: how large
        table: numbers by name
    """


def described_c(
    either: int | str, pair: tuple[int, str], unit: Unit, anything: Any, lots: list[int] | dict
) -> None:
    """Does it.

    Args:
        either: one
        pair: two
        unit: three
        anything: four
        lots: five
    """


@pytest.mark.parametrize("function", [described_a, described_b, described_c])
def test_a_schema_is_that_of_transformers_where_it_has_one(function: Any) -> None:
    from transformers.utils import get_json_schema

    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)
    assert spec_of(function).to_json() == theirs


def test_hints_of_typing_without_a_type_inside_are_those_of_python() -> None:
    def bare(a: List, b: Dict, c: Tuple) -> None: ...  # type: ignore[type-arg]  # noqa: UP006
    def plain(a: list, b: dict, c: tuple) -> None: ...  # type: ignore[type-arg]

    assert spec_of(bare).parameters == spec_of(plain).parameters
    made = tool_from_function(bare)
    assert made.wrong({"a": [1], "b": {"x": 1}, "c": [2]}) is None
    assert [*made.converters] == ["c"]


def test_what_cannot_be_called_by_name_or_has_no_schema_is_refused() -> None:
    def starred(*values: int) -> None: ...
    def twice_starred(**values: int) -> None: ...
    def positional(x: int, /) -> None: ...
    def unknown(x: np.ndarray) -> None: ...
    def keyed(x: dict[int, str]) -> None: ...
    def nowhere(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function, said in [
        (starred, r"parameter \*values: 'int' cannot be passed by name"),
        (twice_starred, "cannot be passed by name"),
        (positional, "parameter x: 'int' cannot be passed by name"),
        (unknown, "parameter 'x': its type ndarray has no JSON schema; expected str, int"),
        (keyed, "has no JSON schema"),
        (nowhere, "type hints cannot be resolved: name 'Nowhere' is not defined"),
    ]:
        with pytest.raises(ConfigError, match=said):
            spec_of(function)
    with pytest.raises(ConfigError, match="expected a name of 1 to 64"):
        spec_of(add, "not a name")
    with pytest.raises(ConfigError, match="expected a name of 1 to 64"):
        spec_of(functools.partial(add, 1))


def test_docstrings_of_other_shapes_lose_nothing_that_is_said() -> None:
    assert parse_docstring("") == ("", {})
    assert parse_docstring("A.\n\n:class:`B`: is one.") == ("A.\n\n:class:`B`: is one.", {})
    assert parse_docstring("Only a line: with a colon.") == ("Only a line: with a colon.", {})
    assert parse_docstring("A.\n\nArgs:\n    x: y\n\nB: not a section") == (
        "A.\n\nB: not a section", {"x": "y"},
    )  # fmt: skip
    assert parse_docstring("A.\n\nRaises:\n    ValueError: x\nArgs:\n  *x (int): y\n  z: ") == (
        "A.",
        {"x": "y", "z": ""},
    )


# ---------------------------------------------------------------- arguments


def test_arguments_are_checked_in_words() -> None:
    def problems(function: Any, **arguments: Any) -> list[str]:
        return wrong_arguments(spec_of(function).parameters, arguments)

    assert problems(add, a=1, b=2) == []
    assert problems(add, a=1) == ["argument 'b' is missing; expected an integer"]
    assert problems(add, a=1, b="2") == ["argument 'b' is \"2\"; expected an integer"]
    assert problems(add, a=True, b=2.0) == [
        "argument 'a' is true; expected an integer", "argument 'b' is 2.0; expected an integer",
    ]  # fmt: skip
    assert problems(add, a=1, b=2, bb=3) == [
        "argument 'bb' is not known; did you mean 'b'?; there are: 'a', 'b'"
    ]
    assert problems(scale, values=[1, 2.5, "x"]) == ["argument 'values'[2] is \"x\"; expected a number"]
    assert problems(look_up, key="a", where="fr", most=None) == [
        'argument \'where\' is "fr"; expected one of "en", "de"'
    ]
    assert problems(look_up, key=None) == ["argument 'key' is null; expected a string"]
    assert problems(level, n=True, on=1, thing=None, data=[], many={}) == [
        "argument 'n' is true; expected one of 1, 2, \"high\"", "argument 'on' is 1; expected a boolean",
        "argument 'data' is []; expected an object", "argument 'many' is {}; expected an array",
    ]  # fmt: skip
    assert problems(table, rows={"a": [1], "b": [1, None]}, point=[1]) == [
        "argument 'rows'['b'][1] is null; expected an integer", "argument 'point' has 1 entries; expected 2",
    ]  # fmt: skip
    assert problems(mixed, x=1.5, y=["1"]) == [
        "argument 'x' is 1.5; expected an integer or a string",
        "argument 'y' is [\"1\"]; expected an array of which each entry is an integer or an object or null",
    ]
    long = problems(add, a="x" * 1000, b=1)[0]
    assert long == f"argument 'a' is \"{'x' * 59} ... (1002 characters); expected an integer"


def test_a_schema_from_elsewhere_is_read_as_far_as_it_is_known() -> None:
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 1, "maximum": 3},
            "s": {"type": "string", "minLength": 2},
            "o": {
                "type": "object",
                "properties": {"a": {"const": 1}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "u": {"oneOf": [{"type": "null"}, {"type": "array", "maxItems": 1}]},
            "r": {"$ref": "#/elsewhere"},
            "t": {"type": "strange"},
        },
        "additionalProperties": {"type": "number"},
    }
    assert (
        wrong_arguments(schema, {"n": 2, "s": "ab", "o": {"a": 1}, "u": None, "r": 7, "t": [], "else": 1.5})
        == []
    )
    assert wrong_arguments(schema, {"n": 4, "s": "a", "o": {"b": 1}, "u": [1, 2], "else": "x"}) == [
        "argument 'n' is 4; expected at most 3",
        "argument 's' is \"a\"; expected at least 2 characters",
        "argument 'o'['a'] is missing; expected one of 1",
        "argument 'o'['b'] is not known; there are: 'a'",
        "argument 'u' is [1, 2]; expected a null or an array",
        "argument 'else' is \"x\"; expected a number",
    ]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_beyond_all_floats_is_beyond_a_bound_that_is_one(sign: int) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number", "minimum": 0.5, "maximum": 1.5}}}
    (said,) = wrong_arguments(schema, {"n": sign * 10**1000})
    assert said.endswith("expected at most 1.5" if sign > 0 else "expected at least 0.5")


def test_keywords_of_another_form_than_that_of_a_schema_allow_everything() -> None:
    """As a server may tell them."""
    properties = {
        "list": {"type": "array", "prefixItems": 5, "items": 5, "maxItems": "x"},
        "object": {"type": "object", "properties": 3, "required": 7},
        "any": {"type": {"a": 1}, "enum": 1, "anyOf": 2, "minimum": [3]},
    }
    schema = {"type": "object", "properties": properties, "required": [["x"], 3, "any"]}
    assert wrong_arguments(schema, {"list": [1, 2], "object": {"a": 1}, "any": 4}) == []
    assert wrong_arguments(schema, {}) == ["argument 'any' is missing; expected any"]


def test_the_check_agrees_with_a_naive_one_on_random_types_and_values() -> None:
    """A type is drawn with its oracle, a Python predicate; the schema comes from the type hint."""
    rng = random.Random(0)

    def kind(depth: int) -> tuple[Any, Any]:
        simple: list[tuple[Any, Any]] = [
            (int, lambda v: type(v) is int), (float, lambda v: type(v) in (int, float)),
            (str, lambda v: type(v) is str), (bool, lambda v: type(v) is bool),
            (Literal["a", 2], lambda v: v == "a" or (v == 2 and type(v) is int)),
        ]  # fmt: skip
        drawn = rng.randrange(8 if depth else 5)
        if drawn < 5:
            return simple[drawn]
        inner, holds = kind(depth - 1)
        if drawn == 5:
            return list[inner], lambda v: type(v) is list and all(map(holds, v))
        if drawn == 6:
            return dict[str, inner], lambda v: type(v) is dict and all(map(holds, v.values()))
        other, holds_too = kind(depth - 1)
        return inner | other | None, lambda v: v is None or holds(v) or holds_too(v)

    def value(depth: int) -> Any:
        flat = [0, 2, -1.5, "a", "b", True, None]
        drawn = rng.randrange(9 if depth else 7)
        if drawn < 7:
            return flat[drawn]
        entries = [value(depth - 1) for _ in range(rng.randrange(3))]
        return entries if drawn == 7 else dict(zip("ab", entries))

    seen = [0, 0]
    for _ in range(4000):
        hint, holds = kind(2)
        schema, drawn = schema_of(hint), value(2)
        allowed = not any(wrong(schema, drawn))
        assert allowed == holds(drawn), (hint, schema, drawn)
        seen[allowed] += 1
    assert min(seen) > 500


def test_a_schema_of_elsewhere_has_bounds() -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"anyOf": [deep]}
    for parameters, said in [
        ({"type": "array"}, "not a JSON schema of an object"),
        ([], "not a JSON schema of an object"),
        ({"type": "object", "properties": []}, None),
        ({"type": "object", "properties": [1]}, "`properties` of its parameters"),
        ({"type": "object", "properties": {"x": deep}}, "nested deeper than 32 levels"),
    ]:
        spec = ToolSpec("t", "", parameters)
        if said is None:
            assert check_schema(spec) == spec
        else:
            with pytest.raises(ConfigError, match=said):
                check_schema(spec)


def test_a_function_gets_the_types_that_it_asked_for() -> None:
    assert tool_from_function(weather).call({"city": "Bonn", "unit": "F"}) == "Bonn <Unit.fahrenheit: 'F'>"
    assert tool_from_function(table).call({"rows": {}, "point": [1, "a"]}) == [{}, (1, "a")]

    def nested(units: list[Unit] | None, by: dict[str, tuple[Unit, ...]]) -> Any:
        return units, by

    tool = tool_from_function(nested)
    assert tool.call({"units": ["C"], "by": {"x": ["F", "C"]}}) == (
        [Unit.celsius], {"x": (Unit.fahrenheit, Unit.celsius)},
    )  # fmt: skip
    assert tool.call({"units": None, "by": {}}) == (None, {})


# ---------------------------------------------------------------- classes


class Base:
    def first_of_all(self) -> int:
        """Of the base."""
        return 1


class Counter(Base):
    kinds = int

    def __init__(self) -> None:
        self.n = 0

    def reset(self, **row: Any) -> None: ...

    def zebra(self, by: int = 1) -> int:
        """Count."""
        self.n += by
        return self.n

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x

    @classmethod
    def named(cls, y: int) -> str:
        return cls.__name__

    async def apple(self) -> int:
        return self.n

    def _hidden(self) -> None: ...

    @property
    def reward(self) -> float:
        return float(self.n)


def test_public_methods_are_tools_in_their_order() -> None:
    counter = Counter()
    tools = tools_from_object(counter)
    assert list(tools) == ["first_of_all", "zebra", "twice", "named", "apple"]
    assert [tool.spec for tool in tools.values()] == specs_of_class(Counter)
    assert tools["zebra"].spec.parameters == {"type": "object", "properties": {"by": {"type": "integer"}}}
    assert (tools["zebra"].call({"by": 3}), tools["zebra"].call({})) == (3, 4)
    assert (tools["twice"].call({"x": 3}), tools["named"].call({"y": 1})) == (6, "Counter")
    assert [tool.is_async for tool in tools.values()] == [False, False, False, False, True]
    assert {id(tool.owner) for tool in tools.values()} == {id(counter)}
    with pytest.raises(ConfigError, match="object has no public method"):
        tools_from_object(object())


def test_names_are_unique_and_bounded() -> None:
    one = tool_from_function(add)
    assert list(by_name([one, tool_from_function(scale)])) == ["add", "scale"]
    with pytest.raises(ConfigError, match="same name: add; expected a name of its own"):
        by_name([one, one])
    with pytest.raises(ConfigError, match="65 tools; at most 64"):
        by_name([tool_from_function(add, f"t{n}") for n in range(65)])


# ---------------------------------------------------------------- results


def test_results_become_texts() -> None:
    assert render("é\n") == "é\n"
    assert render(["a", "b"]) == "a\nb"
    assert render(("a",)) == "a"
    assert render([]) == "[]"
    assert render(["a", 1]) == '["a", 1]'
    assert render({"ü": [1, 2.5, None, True]}) == '{"ü": [1, 2.5, null, true]}'
    assert render(None) == "null"
    assert render(np.arange(3)) == "[0, 1, 2]"
    assert render({"x": np.float32(0.5)}) == '{"x": 0.5}'


def test_what_is_no_result_is_named() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value, said in [
        (float("nan"), "it returned float: "),
        ({"x": float("inf")}, "it returned dict: "),
        (b"bytes", "it returned bytes: bytes is not JSON; expected a text, a list of texts or a JSON value"),
        ((x for x in "ab"), "it returned generator: generator is not JSON"),
        (loop, "it returned list: Circular reference"),
        (deep, "it returned list: "),
        (object(), "it returned object: object is not JSON"),
        ({1, 2}, "it returned set: set is not JSON"),
    ]:
        with pytest.raises(ValueError, match=said):
            render(value)


def test_a_long_result_is_cut_where_it_is_asked_to_be() -> None:
    text = string.digits
    assert fit(text, 10, "middle") == (text, False)
    assert fit(text, 5, "right") == ("01234[... 5 characters cut ...]", True)
    assert fit(text, 5, "left") == ("[... 5 characters cut ...]56789", True)
    assert fit(text, 5, "middle") == ("012[... 5 characters cut ...]89", True)
    assert fit(text, 1, "middle") == ("0[... 9 characters cut ...]", True)
    beyond = "a" * MOST_RESULT + "b" * MOST_RESULT + "c"
    assert fit(beyond, 4, "right") == (f"aaaa[... {2 * MOST_RESULT - 3} characters cut ...]", True)
    assert fit(beyond, 4, "left") == (f"[... {2 * MOST_RESULT - 3} characters cut ...]bbbc", True)
    assert fit(beyond, 4, "middle") == (f"aa[... {2 * MOST_RESULT - 3} characters cut ...]bc", True)
    assert fit("a\ud800b", 20, "middle") == ("a\\ud800b", False)


def test_a_result_holds_no_secret() -> None:
    secrets.learn_all({"hunter2-hunter2-hunter2": "API_KEY"})
    assert fit("the key is hunter2-hunter2-hunter2.", 100, "right") == (
        "the key is <redacted:API_KEY>.",
        False,
    )
    assert "hunter2" not in fit("x" * 20 + "hunter2-hunter2-hunter2", 30, "right")[0]


def test_errors_are_one_bounded_line() -> None:
    assert error_text(ValueError("no\nmore")) == "Error: ValueError: no"
    assert error_text(KeyError()) == "Error: KeyError"
    assert error_text(SystemExit(3)) == "Error: SystemExit: 3"
    assert error_text(ToolError("the site says no")) == "Error: the site says no"
    assert len(error_text(ValueError("x" * 10**6))) < 400

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert error_text(Mute()) == "Error: Mute: (its text cannot be read)"


def test_a_tool_says_what_is_wrong_in_one_line() -> None:
    tool: Tool = tool_from_function(add)
    assert tool.wrong({"a": 1, "b": 1}) is None
    assert tool.wrong({"c": 1}) == (
        "argument 'a' is missing; expected an integer; argument 'b' is missing; expected an integer; "
        "argument 'c' is not known; there are: 'a', 'b'"
    )
