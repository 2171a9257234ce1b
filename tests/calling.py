"""Short words for the tests of tool calls."""

from __future__ import annotations

from typing import Any

from whet.data.calls import THINKING, ReplyForm, Thinking
from whet.types import ToolCall, ToolSpec

THINK, BRACKETS = THINKING["<think>"], THINKING["[THINK]"]


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def tool(name: str, **types: Any) -> ToolSpec:
    """With the schemas of its arguments; a word is a type."""
    properties = {key: {"type": t} if isinstance(t, str) else t for key, t in types.items()}
    return ToolSpec(name, "", {"type": "object", "properties": properties})


def form(name: str | None, thinking: Thinking | None = THINK) -> ReplyForm:
    return ReplyForm(name, None if name == "gpt_oss" else thinking)


WEATHER = call("get_weather", city="Paris", days=2)
SCHEMA = (tool("get_weather", city="string", days="integer"),)
