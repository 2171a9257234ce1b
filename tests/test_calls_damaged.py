"""What is written is read back; what is damaged or hostile is a message or malformed, in time that is linear."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from call_writers import WRITERS, write_calls
from calling import SCHEMA, call, form, tool
from swept import except_for
from whet.data.call_formats import CALL_FORMATS
from whet.data.call_reader import LEAST_MARKER
from whet.data.calls import (
    ReplyForm,
    read_reply,
)
from whet.types import Message, ToolCall, ToolSpec

BARE = ("llama3", "json")
THOUGHT_END = ("</think>", "<|end|>")
FEW = ("hermes", "llama3", "mistral_v11", "deepseek_v4", "kimi", "json")
"""One of each way to mark a call."""
TAGGED = ("qwen3_coder", "glm", "seed", "minimax", "deepseek_v32", "deepseek_v4")

# ---- what is written is read back ----

MARKERS = [m for entry in CALL_FORMATS.values() for m in (*entry.markers, *entry.strays)] + [
    "<think>",
    "</think>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|constrain|>",
    "[ARGS]",
    "```",
]
PIECES = [
    *"ab01 \n\t\"'\\{}[]<>=/:;,",
    "é",
    "ß",
    "漢",
    "😀",
    "\u2028",
    "\x00",
    "\u200d",
    "ﬁ",
    "\r\n",
    "null",
    "None",
    "True",
    "\\n",
    "\\u0041",
    "</parameter",
    "<|",
    '{"name": "f"',
    "'''",
    *MARKERS,
]
PLAIN = [*"ab01 .,!", "é", "漢", "😀", "\n", "'", '"', "{", "}", "<", ">", "\\"]


def _string(rng: random.Random, pieces: list[str], most: int = 8) -> str:
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(most)))


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {_string(rng, PIECES): _value(rng, depth + 1) for _ in range(rng.randrange(4))}
    plain: list[Callable[[], Any]] = [
        lambda: _string(rng, PIECES),
        lambda: rng.choice([True, False, None]),
        lambda: rng.choice([0, -1, 10**18, rng.getrandbits(200)]),
        lambda: rng.choice([0.0, -0.0, 1.0, 1e-300, 1e300, rng.gauss(0, 1)]),
        lambda: _string(rng, PLAIN, 30),
    ]
    return plain[kind]()


def _calls(rng: random.Random, most: int) -> list[ToolCall]:
    def one() -> ToolCall:
        name = rng.choice("fgh_") + "".join(rng.choice("abz09_-.") for _ in range(rng.randrange(12)))
        keys = {rng.choice("abcdef") + rng.choice(["", "_1", "é"]) for _ in range(rng.randrange(4))}
        return ToolCall(name, {key: _value(rng) for key in sorted(keys, key=lambda _: rng.random())})

    made = [one() for _ in range(rng.randrange(1, most + 1))]
    return list({c.name: c for c in made}.values())  # one schema for each name


def _schemas(calls: list[ToolCall]) -> list[ToolSpec]:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return [tool(c.name, **{k: names.get(type(v), "null") for k, v in c.arguments.items()}) for c in calls]


def _reply(rng: random.Random, name: str) -> tuple[list[ToolCall], str, str | None]:
    calls = _calls(rng, 1 if name == "json" else 3)
    content = "" if name == "json" or rng.random() < 0.4 else "I " + _string(rng, PLAIN) + "."
    return calls, content, "so " + _string(rng, PLAIN) + "!" if rng.random() < 0.5 else None


@pytest.mark.parametrize("count", [250, pytest.param(2000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_what_is_written_is_read_back(name: str, count: int) -> None:
    """Replies with odd texts: in JSON all can be said; tagged text has no way to say its own end."""
    rng, refused = random.Random(name), 0
    for _ in range(count):
        calls, content, reasoning = _reply(rng, name)
        try:
            text = write_calls(form(name), calls, content, reasoning)
        except ValueError:
            values = [
                v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
                for c in calls
                for v in c.arguments.values()
            ]
            assert any(
                end in value for value in values for end in ("</parameter", "</arg_value>", "</｜DSML｜")
            ), calls
            refused += 1
            continue
        told = read_reply(text, form(name), _schemas(calls))
        assert told.malformed is None, text
        assert (told.content, told.reasoning) == (content, reasoning), text
        assert [(c.name, json.dumps(c.arguments)) for c in told.tool_calls] == [
            (c.name, json.dumps(c.arguments)) for c in calls
        ], text
        assert read_reply(text, form(name), _schemas(calls)) == told
    assert refused == 0 if name not in TAGGED else refused < count / 20, refused


# ---- damaged replies ----


@pytest.mark.parametrize("name", except_for(FEW.__contains__, CALL_FORMATS))
def test_a_cut_call_or_thought_is_malformed_wherever_it_is_cut(name: str) -> None:
    rng = random.Random(name)
    for _ in range(25):
        calls, _, _ = _reply(rng, name)
        called = WRITERS[name](calls[:1])
        for reasoning in (None, "because"):
            text = write_calls(form(name), calls[:1], "", reasoning)
            start = len(text) - len(called)
            thought = text.index(THOUGHT_END[name == "gpt_oss"]) + 7 if reasoning else 0
            # the first characters of a marker are text; a JSON object is one from its first character on
            inside = {
                *range(LEAST_MARKER, thought),
                *range(start + (1 if name in BARE else LEAST_MARKER), len(text)),
            }
            for cut in range(len(text)):
                told = read_reply(text[:cut], form(name))
                assert told.tool_calls == ()
                assert told.malformed is not None or cut not in inside, (text[:cut], told)
                assert told.content == text[:cut] or told.malformed is None


@pytest.mark.parametrize("count", [400, pytest.param(3000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", [*CALL_FORMATS, None])
def test_any_damage_gives_a_message_and_no_marker_is_silently_text(name: str | None, count: int) -> None:
    rng, read = random.Random(str(name)), 0
    entry = CALL_FORMATS[name] if name else None
    for i in range(count):
        if i % 3 and name:
            calls, content, reasoning = _reply(rng, name)
            parts = list(WRITERS[name](calls)) + list(content) + list(reasoning or "")
        else:
            parts = [
                rng.choice([*PIECES, '{"name": "f", "arguments": {}}', "f", "<function=f>", "to=functions.f"])
                for _ in range(rng.randrange(12))
            ]
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(parts) + 1)
            parts[at : at + rng.randrange(2)] = [rng.choice(PIECES)] if rng.random() < 0.5 else []
        text, opened = "".join(parts), rng.random() < 0.1
        told = read_reply(text, form(name), opened=opened)
        assert told.role == "assistant"
        assert Message.from_json(json.loads(json.dumps(told.to_json()))) == told
        if told.malformed is not None:
            assert (told.content, told.tool_calls, told.reasoning) == (text, (), None)
            continue
        read += 1
        for marker in (
            *(entry.markers if entry else ()),
            *(() if name == "gpt_oss" else ("<think>", "</think>")),
        ):
            assert marker not in told.content, (text, told)
        assert all(isinstance(c.arguments, dict) and c.name.strip() for c in told.tool_calls)
    assert read > count / 10


MEGABYTE = 2**20
HOSTILE: list[str] = [
    "<",
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"name": "f"}</tool_call>',
    "<tool_call>[",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_call><function=f>",
    "<parameter=a>1</parameter>",
    "<parameter=",
    "</parameter>",
    "</parameter>" + " " * 50,
    " ",
    "\n",
    "<function=f></function>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "</arg_value>",
    "{",
    '{"name"',
    '{"name": 1} ',
    '{ "a": "b"} ',
    '{"name": "f", "parameters": {}}; ',
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]f{}",
    "[TOOL_CALLS][",
    "[ARGS]",
    "[CALL_ID]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "<｜DSML｜",
    '<｜DSML｜invoke name="',
    '<｜DSML｜parameter name="',
    "</｜DSML｜parameter>",
    '<minimax:tool_call><invoke name="f">',
    '<invoke name="f"></invoke>',
    '<parameter name="',
    '<parameter name="a">1</parameter>',
    "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "<|tool_call_begin|>",
    "functions.",
    "functools[",
    '[{"name": "f"}, ',
    "<|START_ACTION|>",
    "<|channel|>",
    "<|start|>assistant",
    "<|channel|>final<|message|>",
    "<|channel|>final<|message|>x<|end|><|start|>assistant",
    "to=",
    '"',
    "\\",
    '\\"',
    "9",
    "a",
    "\ufeff",
]


def _heads(name: str) -> list[str]:
    """Beginnings of replies: nothing, a marker, the inside of an argument, a whole call."""
    text = write_calls(form(name), [call("f", x="HERE")])
    return ["", *CALL_FORMATS[name].markers[:1], text[: text.index("HERE")], text]


def _ratio(head: str, piece: str, entry: ReplyForm, length: int) -> float:
    """How much longer sixteen times the text takes."""
    long = head + piece * (length // len(piece))
    seconds = []
    for text in (long[: length // 16], long):
        start = time.process_time()
        read_reply(text, entry, SCHEMA)
        seconds.append(max(time.process_time() - start, 0.002))
    return seconds[1] / seconds[0]


@pytest.mark.parametrize("length", [MEGABYTE // 4, pytest.param(MEGABYTE, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", except_for(FEW.__contains__, CALL_FORMATS))
def test_a_hostile_text_takes_time_in_proportion_to_its_length(name: str, length: int) -> None:
    """Sixteen times the text: about sixteen times the time, not 256. A busy machine may try again."""
    for head in _heads(name):
        for piece in HOSTILE:
            ratios = (_ratio(head, piece, form(name), length) for _ in range(3))
            assert any(ratio < 40 for ratio in ratios), (head, piece)
