"""A reply that is being read, from left to right, and the places in it where calls begin."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from whet.data.call_values import Malformed, kind, read_json, shown
from whet.types import Json, ToolCall, ToolSpec

LEAST_MARKER = 5
"""So many characters of a marker at the end of a reply are a marker that was cut off; fewer are text."""
MOST_NAME = 200
"""Characters of a tool's name, or of the header of a message."""

_WHITE = re.compile(r"\s*")
_NAME = re.compile(r"[^\s<>{}\[\]\"'|]+")
"""A name that is written without quotes."""
_BESIDE = ("type", "id", "tool_call_id")
"""What a call as an object may have beside its name and its arguments."""


class ReplyReader:
    """A reply that is being read: what was found so far, and the place that comes next."""

    def __init__(self, text: str, tools: Sequence[ToolSpec], *, opened: bool = False) -> None:
        self.text = text
        self.tools = {tool.name: tool for tool in tools}
        self.opened = opened
        self.at = 0
        self.calls: list[ToolCall] = []
        self.content: list[str] = []
        self.thoughts: list[str] = []

    def white(self) -> None:
        """Go past white space."""
        found = _WHITE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def take(self, marker: str) -> bool:
        """Go past a marker if it stands here."""
        here = self.text.startswith(marker, self.at)
        self.at += len(marker) * here
        return here

    def take_after_white(self, marker: str) -> bool:
        """Go past white space and a marker if it stands there."""
        start = self.at
        self.white()
        found = self.take(marker)
        self.at = self.at if found else start
        return found

    def need(self, *markers: str, after: str) -> None:
        """Go past white space and one of the markers."""
        self.white()
        if not any(self.take(marker) for marker in markers):
            expected = " or ".join(markers)
            raise Malformed(f"expected {expected} after {after}, found {shown(self.text, self.at)}")

    def until(self, marker: str, *, what: str) -> str:
        """The text up to a marker; go past both."""
        end = self.text.find(marker, self.at)
        if end < 0:
            raise Malformed(f"{what} has no end: expected {marker!r} after {shown(self.text, self.at)}")
        piece = self.text[self.at : end]
        self.at = end + len(marker)
        return piece

    def json(self) -> Json:
        """The JSON value that comes next."""
        self.white()
        value, self.at = read_json(self.text, self.at)
        return value

    def arguments(self, name: str) -> dict[str, Json]:
        """The JSON object that comes next."""
        value = self.json()
        if not isinstance(value, dict):
            raise Malformed(f"the arguments of {name!r} are {kind(value)}; expected a JSON object")
        return value

    def call(self, name: str, arguments: dict[str, Json], id: str = "") -> None:
        """One call more, which is read to its end. id: where the policy writes it; else the tool loop gives it one."""
        if not name.strip() or len(name) > MOST_NAME:
            raise Malformed(f"the tool's name has {len(name)} characters; expected 1 to {MOST_NAME}")
        self.calls.append(ToolCall(name, arguments, id))

    def name(self, what: str) -> str:
        """The unquoted name that comes next."""
        self.white()
        found = _NAME.match(self.text, self.at, self.at + MOST_NAME + 1)
        if found is None:
            raise Malformed(f"expected the tool's name after {what}, found {shown(self.text, self.at)}")
        self.at = found.end()
        return found.group()

    def object(self, value: Json, keys: tuple[str, ...], named: str = "name") -> tuple[str, dict[str, Json]]:
        """Name and arguments of a call as an object; the arguments may be left out."""
        if not isinstance(value, dict):
            raise Malformed(f'it is {kind(value)}; expected an object with "{named}" and "{keys[0]}"')
        unknown = [key for key in value if key not in (named, *_BESIDE, *keys)]
        if unknown:
            raise Malformed(f'it has the key {unknown[0][:40]!r}; expected "{named}" and "{keys[0]}" alone')
        name, given = value.get(named), [key for key in keys if key in value]
        if not isinstance(name, str):
            raise Malformed(f'its "{named}" is {kind(name)}; expected the tool\'s name as a string')
        if len(given) > 1:
            raise Malformed(f"it has {' and '.join(given)}; expected one of them")
        arguments = value[given[0]] if given else {}
        if not isinstance(arguments, dict):
            raise Malformed(f'its "{given[0]}" is {kind(arguments)}; expected an object')
        return name, arguments


ReadCall = Callable[[ReplyReader], None]


def read_each(reading: ReplyReader, read_call: ReadCall) -> None:
    try:
        read_call(reading)
    except Malformed as e:
        raise Malformed(f"call {len(reading.calls) + 1}: {e}") from None


def scan(
    begins: re.Pattern[str], read_call: ReadCall, reading: ReplyReader, first: re.Pattern[str] | None = None
) -> None:
    """Read the calls, which begin where `begins` is found, or `first` at the very beginning; the text around them is
    content. A reader that finds text instead of a call goes past it."""
    start = reading.at
    found = (first and first.match(reading.text, start)) or begins.search(reading.text, start)
    while found:
        reading.at, before = found.start(), len(reading.calls)
        read_each(reading, read_call)
        if len(reading.calls) > before:
            reading.content.append(reading.text[start : found.start()])
            start = reading.at
        found = begins.search(reading.text, reading.at)
    reading.content.append(reading.text[start:])


def any_of(*markers: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
