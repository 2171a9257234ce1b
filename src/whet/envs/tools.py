"""Tools: functions that the policy may call, what it is told of them, and how their results become texts."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from whet.envs import schemas
from whet.guard.foreign import said
from whet.secrets import redact
from whet.tables import load_object
from whet.types import ConfigError, Json, ToolSpec

Side = Literal["left", "middle", "right"]
"""Where a text that is too long is cut: at its beginning, in its middle, at its end."""

MOST_RESULT = 2**22
"""Characters of a result that are looked at; what a cut leaves in the middle beyond it is not searched for secrets."""
MOST_ERROR = 300
"""Characters of an exception's text that the policy is told."""
MOST_TOOLS = 64
"""Of one environment: each has a number of its own in the records."""

LIFECYCLE = ("reset", "reward", "close")
"""Public methods of a class of tools that are no tools."""


class ToolError(Exception):
    """Raised by a tool that has failed: the policy gets its text alone."""


@dataclass(frozen=True)
class Priced:
    """What a tool may return: a result, and what the call has cost, in the unit of `rollout.env.max_cost`."""

    value: Any
    """The result: what the tool would return without a cost."""
    cost: float
    """Of this call; the part `cost` of the rollout is the sum over its calls."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    spec: ToolSpec
    function: Callable[..., Any]
    """Async or plain; called with the arguments by name. Its result is a text, a list of texts, or a JSON value."""
    owner: object = None
    """Calls of tools with the same owner run one after the other, in the order of the calls: they share what it holds.
    None: calls run at the same time."""
    before: Callable[[], Awaitable[object]] | None = None
    """Awaited before each call, such as the start of a server; its time is not the call's."""
    converters: Mapping[str, Callable[[Json], Any]] = field(default_factory=dict)
    """Of arguments whose Python type JSON does not have, by name."""

    def wrong(self, arguments: Mapping[str, Json]) -> str | None:
        """What is wrong with the arguments of a call, in one line."""
        return "; ".join(schemas.wrong_arguments(self.spec.parameters, arguments)) or None

    def call(self, arguments: Mapping[str, Json]) -> Any:
        """Call the function with checked arguments: its value, or its awaitable."""
        convert = self.converters
        return self.function(**{k: convert[k](v) if k in convert else v for k, v in arguments.items()})

    @property
    def is_async(self) -> bool:
        inner = getattr(self.function, "__call__", None)  # noqa: B004  of an object, whose method may be async
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(inner)


def tool_from_function(
    function: Callable[..., Any], name: str | None = None, *, owner: object = None
) -> Tool:
    """A tool of a function, with the schema of its signature, type hints and docstring.

    ConfigError for a parameter that cannot be passed by name or whose type has no JSON schema.
    """
    spec = schemas.spec_of(function, name)
    hints = schemas.hints(function)
    found = {key: schemas.converter(hints.get(key, Any)) for key in spec.parameters["properties"]}
    converters = {key: value for key, value in found.items() if value is not None}
    return Tool(spec, function, owner, converters=converters)


def tools_from_object(thing: object) -> dict[str, Tool]:
    """The public methods of an object as tools, by name, in the order of their definition; `reset`, `reward` and
    `close` are none. ConfigError if there are none."""
    names = _methods(type(thing))
    return {name: tool_from_function(getattr(thing, name), name, owner=thing) for name in names}


def specs_of_class(cls: type) -> list[ToolSpec]:
    """What `tools_from_object` finds in an object of the class, which is not made."""
    return [
        schemas.spec_of(getattr(cls, name), name, bound=not needs_self)
        for name, needs_self in _methods(cls).items()
    ]


def _methods(cls: type) -> dict[str, bool]:
    """Public methods by name, those of base classes first; whether the function's first parameter is the object."""
    found: dict[str, bool] = {}
    for base in reversed(cls.__mro__[:-1]):
        for name, value in vars(base).items():
            public = not name.startswith("_") and name not in LIFECYCLE
            if public and callable(getattr(cls, name, None)) and not isinstance(value, type):
                found[name] = not isinstance(value, staticmethod | classmethod)
    if not found:
        raise ConfigError(f"{cls.__name__} has no public method that could be a tool; expected at least one")
    return found


@cache
def load_function(spec: str) -> Tool:
    """The tool of 'package.module:name' or 'path/to/file.py:name'."""
    return tool_from_function(load_object(spec, what="rollout.env.arguments.functions"))


def by_name(tools: list[Tool]) -> dict[str, Tool]:
    """Tools by their names. ConfigError where two have the same name, or where there are too many."""
    check_distinct([tool.spec.name for tool in tools])
    if len(tools) > MOST_TOOLS:
        raise ConfigError(f"an environment has {len(tools)} tools; at most {MOST_TOOLS} are allowed")
    return {tool.spec.name: tool for tool in tools}


def check_distinct(names: Sequence[str]) -> None:
    """ConfigError where two tools have the same name."""
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise ConfigError(
            f"tools have the same name: {', '.join(twice)}; expected a name of its own for each"
        )


# ---------------------------------------------------------------- results


def render(value: object) -> str:
    """The result of a tool as text: a text is itself, a list of texts one text with line breaks between them, anything
    else its JSON. ValueError says what else it was."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list | tuple) and value and all(isinstance(entry, str) for entry in value):
        return "\n".join(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"it returned {type(value).__name__}: {said(error)}; expected a text, a list of texts or a JSON value"
        ) from None


def _plain(value: Any) -> Json:
    """A number or array of numpy or torch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def fit(text: str, most: int, side: Side) -> tuple[str, bool]:
    """Valid Unicode without secrets, and whether it was cut: of a longer text, `most` characters are kept, and a mark
    in place of the others has their number."""
    beyond = max(0, len(text) - MOST_RESULT)
    text = redact(_cut(text, MOST_RESULT, side, "").encode("utf-8", "backslashreplace").decode())
    beyond += max(0, len(text) - most)
    return _cut(text, most, side, f"[... {beyond} characters cut ...]"), beyond > 0


def _cut(text: str, most: int, side: Side, mark: str) -> str:
    if len(text) <= most:
        return text
    head = {"left": 0, "middle": (most + 1) // 2, "right": most}[side]
    return f"{text[:head]}{mark}{text[len(text) - (most - head) :]}"


def error_text(error: BaseException) -> str:
    """What the policy is told of an exception: its type, and the first line of its text."""
    if isinstance(error, ToolError):
        return f"Error: {said(error)}"
    first = said(error).strip().split("\n", 1)[0]
    return f"Error: {type(error).__name__}: {first[:MOST_ERROR]}".rstrip(": ")
