"""Replies of a policy: calls in every format, damaged."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from call_writers import WRITERS, write_calls
from fuzz.case import Case
from fuzz.mutate import damaged
from whet.data.call_formats import CALL_FORMATS
from whet.data.calls import THINKING, ReplyForm, read_reply
from whet.types import DataError, Message, ToolCall, ToolSpec

QUERY = {"query": 'what is <tool_call> in "C:\\new"\n?', "most": 10, "deep": {"a": [1.5, None, True]}}
CALLS = (
    ToolCall("search", QUERY),
    ToolCall("now", {}),
    ToolCall("put_file", {"text": "  é漢😀 </parameter> </arg_value>\t\n", "force": False}),
)
TYPES = {
    "search": {"query": "string", "most": "integer", "deep": "object"},
    "put_file": {"text": "string", "force": "boolean"},
}
TOOLS = tuple(
    ToolSpec(name, "", {"properties": {key: {"type": kind} for key, kind in types.items()}})
    for name, types in TYPES.items()
)


def form(name: str) -> ReplyForm:
    return ReplyForm(name, None if CALL_FORMATS[name].channels else THINKING["<think>"])


def good(name: str, *, thinks: bool = True) -> str:
    alone = name == "json"
    return write_calls(
        form(name), CALLS[: 1 if alone else 3], "" if alone else "I look.", "so" if thinks else None
    )


def make_reply(random: Random) -> Case:
    """The name of the file is the format's. A reply that is cut inside its last call cannot be right."""
    name = random.choice(sorted(CALL_FORMATS))
    text = good(name, thinks=random.random() < 0.5)
    if random.random() < 0.2:
        last = len(WRITERS[name](CALLS[2:])) - 20
        return Case({name: text[: len(text) - random.randrange(1, last)].encode()}, name, wrong=True)
    return Case({name: damaged(random, text.encode())}, name)


def read(folder: Path) -> Message:
    """As a message whose calls and content can be written to a file and read again; malformed is refused."""
    (path,) = folder.iterdir()
    told = read_reply(path.read_bytes().decode(errors="replace"), form(path.name), TOOLS)
    if Message.from_json(json.loads(json.dumps(told.to_json(), ensure_ascii=False).encode())) != told:
        raise ValueError("another message was read back")
    if told.malformed is not None:
        raise DataError(told.malformed)
    return told
