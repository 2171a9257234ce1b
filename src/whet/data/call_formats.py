"""The call formats: how the families of models write a tool call, one reader and one writer for each.

Semantics are those of vLLM's tool parsers (main, 2026) and of the models' own chat templates, with one difference: what
they give back as plain text because it does not parse is `Malformed` here. A reader goes from left to right and stops
at the first thing that it does not understand, so a reply is read in one pass, however hostile it is. JSON is read
where it stands, not cut out first, so a marker inside one of its strings is a part of that string.

transformers 5.23 has readers too (`parse_response` with a `response_template` that a tokenizer may bring along). They
know more families and stream. They are not used: a call that has no end is read as a whole one, and half a marker as
text; an end marker inside a string ends the call; a key given twice, infinities and half surrogate pairs pass; deep
nesting is a RecursionError; text loses its outer white space by default; and a template's own regular expressions,
which may take exponential time, run over the model's text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from whet.data.call_values import Malformed, Untyped, kind, read_by_schema, read_json, shown, write_json
from whet.types import Json, ToolCall, ToolSpec

LEAST_MARKER = 5
"""So many characters of a marker at the end of a reply are a marker that was cut off; fewer are text."""
MOST_NAME = 200
"""Characters of a tool's name, or of the header of a message."""

_WHITE = re.compile(r"\s*")
_NAME = re.compile(r"[^\s<>{}\[\]\"'|]+")
"""A name that is written without quotes."""


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

    def call(self, name: str, arguments: dict[str, Json]) -> None:
        """One call more, which is read to its end. The tool loop gives it its id."""
        if not name.strip() or len(name) > MOST_NAME:
            raise Malformed(f"the tool's name has {len(name)} characters; expected 1 to {MOST_NAME}")
        self.calls.append(ToolCall(name, arguments))

    def name(self, what: str) -> str:
        """The unquoted name that comes next."""
        self.white()
        found = _NAME.match(self.text, self.at, self.at + MOST_NAME + 1)
        if found is None:
            raise Malformed(f"expected the tool's name after {what}, found {shown(self.text, self.at)}")
        self.at = found.end()
        return found.group()

    def object(self, value: Json, keys: tuple[str, ...]) -> tuple[str, dict[str, Json]]:
        """Name and arguments of a call as an object; the arguments may be left out."""
        if not isinstance(value, dict):
            raise Malformed(f'it is {kind(value)}; expected an object with "name" and "{keys[0]}"')
        unknown = [key for key in value if key not in ("name", "type", "id", *keys)]
        if unknown:
            raise Malformed(f'it has the key {unknown[0][:40]!r}; expected "name" and "{keys[0]}" alone')
        name, given = value.get("name"), [key for key in keys if key in value]
        if not isinstance(name, str):
            raise Malformed(f'its "name" is {kind(name)}; expected the tool\'s name as a string')
        if len(given) > 1:
            raise Malformed(f"it has {' and '.join(given)}; expected one of them")
        arguments = value[given[0]] if given else {}
        if not isinstance(arguments, dict):
            raise Malformed(f'its "{given[0]}" is {kind(arguments)}; expected an object')
        return name, arguments


# ---- formats with markers ----

ReadCall = Callable[[ReplyReader], None]


def _read_call(reading: ReplyReader, read_call: ReadCall) -> None:
    try:
        read_call(reading)
    except Malformed as e:
        raise Malformed(f"call {len(reading.calls) + 1}: {e}") from None


def _scan(
    begins: re.Pattern[str], read_call: ReadCall, reading: ReplyReader, first: re.Pattern[str] | None = None
) -> None:
    """Read the calls, which begin where `begins` is found, or `first` at the very beginning; the text around them is
    content. A reader that finds text instead of a call goes past it."""
    start = reading.at
    found = (first and first.match(reading.text, start)) or begins.search(reading.text, start)
    while found:
        reading.at, before = found.start(), len(reading.calls)
        _read_call(reading, read_call)
        if len(reading.calls) > before:
            reading.content.append(reading.text[start : found.start()])
            start = reading.at
        found = begins.search(reading.text, reading.at)
    reading.content.append(reading.text[start:])


def _marked(*markers: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


CALL, CALL_END = "<tool_call>", "</tool_call>"


def _read_hermes(reading: ReplyReader) -> None:
    reading.take(CALL)
    call = reading.object(reading.json(), ("arguments",))
    reading.need(CALL_END, after="the JSON object")
    reading.call(*call)


def _write_hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{CALL}\n{_as_object(call, 'arguments')}\n{CALL_END}" for call in calls)


def _as_object(call: ToolCall, key: str) -> str:
    return f'{{"name": {write_json(call.name)}, "{key}": {write_json(call.arguments)}}}'


FUNCTION, FUNCTION_END, PARAMETER = "<function=", "</function>", "<parameter="
_VALUE_END = re.compile(rf"</parameter>(?=\s*+(?:{PARAMETER}|{FUNCTION_END}))")


def _read_xml(reading: ReplyReader) -> None:
    """Qwen3-coder at times leaves out the outer tags, so they are not needed."""
    wrapped = reading.take(CALL)
    reading.need(FUNCTION, after=CALL)
    name = reading.name(FUNCTION)
    reading.need(">", after=f"{FUNCTION}{name}")
    arguments = _read_tagged(reading, name, _XML)
    if wrapped:
        reading.need(CALL_END, after=FUNCTION_END)
    else:
        reading.take_after_white(CALL_END)
    reading.call(name, arguments)


def _write_xml(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        f"{CALL}\n{FUNCTION}{c.name}>\n{_tagged(c, _XML)}{FUNCTION_END}\n{CALL_END}" for c in calls
    )


ARGUMENT = "<arg_key>"
_ARGUMENT_END = re.compile(rf"</arg_value>(?=\s*+(?:{ARGUMENT}|{CALL_END}))")


def _read_glm(reading: ReplyReader) -> None:
    reading.take(CALL)
    name = reading.name(CALL)
    reading.call(name, _read_tagged(reading, name, _GLM))


def _write_glm(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{CALL}{call.name}\n{_tagged(call, _GLM)}{CALL_END}" for call in calls)


@dataclass(frozen=True, slots=True)
class _Tags:
    """How arguments are written as tagged text."""

    key: tuple[str, str]
    """Around a key."""
    value: tuple[str, str]
    """Around a value, line ends included; a reader needs no line ends."""
    value_end: re.Pattern[str]
    """The tag that ends a value is the one that something of the call follows: others are a part of the value."""
    end: str
    """After the last argument."""
    untyped: Untyped
    """As vLLM's parser of the family has it."""


_XML = _Tags((PARAMETER, ">"), ("\n", "\n</parameter>"), _VALUE_END, FUNCTION_END, "text")
_GLM = _Tags((ARGUMENT, "</arg_key>"), ("\n<arg_value>", "</arg_value>"), _ARGUMENT_END, CALL_END, "json")


def _read_tagged(reading: ReplyReader, name: str, tags: _Tags) -> dict[str, Json]:
    arguments: dict[str, Json] = {}
    reading.white()
    while not reading.take(tags.end):
        reading.need(tags.key[0], tags.end, after=f"an argument of {name!r}" if arguments else f"{name!r}")
        key = reading.until(tags.key[1], what=f"a key of {name!r}").strip()
        if not key or len(key) > MOST_NAME:
            raise Malformed(f"a key of {name!r} has {len(key)} characters; expected 1 to {MOST_NAME}")
        if key in arguments:
            raise Malformed(f"{name!r} has the argument {key[:40]!r} twice")
        text = _tagged_text(reading, key, tags)
        arguments[key] = read_by_schema(text, reading.tools.get(name), key, tags.untyped)
        reading.white()
    return arguments


def _tagged_text(reading: ReplyReader, key: str, tags: _Tags) -> str:
    """A value as text: nothing is taken from it but the line end that the format puts at either side."""
    before, after = tags.value
    if before.strip():
        reading.need(before.strip(), after=f"the key {key[:40]!r}")
    else:
        reading.take(before)
    found = tags.value_end.search(reading.text, reading.at)
    if found is None:
        tag = after.strip()
        raise Malformed(
            f"the value of {key[:40]!r} has no end: expected {tag} and then {tags.key[0]} or {tags.end}"
        )
    text = reading.text[reading.at : found.start()]
    reading.at = found.end()
    return text.removesuffix("\n") if after.startswith("\n") else text


def _tagged(call: ToolCall, tags: _Tags) -> str:
    (key, key_end), (value, value_end) = tags.key, tags.value
    return "".join(
        f"{key}{name}{key_end}{value}{as_text(given)}{value_end}\n" for name, given in call.arguments.items()
    )


def as_text(value: Json) -> str:
    """An argument in the formats without quotes: a text as it stands, everything else as JSON."""
    return value if isinstance(value, str) else write_json(value)


MISTRAL, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read_mistral(reading: ReplyReader) -> None:
    """A list of objects (tokenizers before v11) or a name and its arguments."""
    reading.take(MISTRAL)
    reading.white()
    if not reading.text.startswith("[", reading.at):
        name = reading.name(MISTRAL)
        if reading.take(MISTRAL_ID):
            reading.name(MISTRAL_ID)
        reading.take(MISTRAL_ARGS)
        return reading.call(name, reading.arguments(name))
    calls = reading.json()
    if not calls:
        raise Malformed(f"the list after {MISTRAL} is empty; expected at least one call")
    for value in calls:
        reading.call(*reading.object(value, ("arguments",)))
    return None


def _write_mistral(calls: Sequence[ToolCall]) -> str:
    return f"{MISTRAL}[{', '.join(_as_object(call, 'arguments') for call in calls)}]"


def _write_mistral_v11(calls: Sequence[ToolCall]) -> str:
    return "".join(f"{MISTRAL}{c.name}{MISTRAL_ARGS}{write_json(c.arguments)}" for c in calls)


SEEK_ALL, SEEK_ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
SEEK, SEEK_SEP, SEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _read_deepseek(reading: ReplyReader) -> None:
    """V3.1 has the name before the separator; V3 a type there, and after it the name and a block of JSON."""
    reading.take(SEEK_ALL)
    reading.need(SEEK, after=SEEK_ALL)
    while True:
        name = reading.until(SEEK_SEP, what="the tool's name").strip()
        reading.white()
        fenced = not reading.text.startswith("{", reading.at)
        if fenced:
            if name != "function":
                raise Malformed(f"expected 'function' or JSON at {SEEK_SEP}, found {name[:40]!r}")
            name = reading.until("\n", what="the tool's name").strip()
            reading.need("```json", after=f"the name {name[:40]!r}")
        arguments = reading.arguments(name[:40])
        if fenced:
            reading.need("```", after="the arguments")
        reading.need(SEEK_END, after="the arguments")
        reading.call(name, arguments)
        reading.white()
        if reading.take(SEEK_ALL_END):
            return
        reading.need(SEEK, SEEK_ALL_END, after=SEEK_END)


def _write_deepseek_v3(calls: Sequence[ToolCall]) -> str:
    each = (
        f"{SEEK}function{SEEK_SEP}{c.name}\n```json\n{write_json(c.arguments)}\n```{SEEK_END}" for c in calls
    )
    return SEEK_ALL + "\n".join(each) + SEEK_ALL_END


def _write_deepseek(calls: Sequence[ToolCall]) -> str:
    each = (f"{SEEK}{c.name}{SEEK_SEP}{write_json(c.arguments)}{SEEK_END}" for c in calls)
    return SEEK_ALL + "".join(each) + SEEK_ALL_END


# ---- formats without a marker: an object is a call if it looks like one, and text otherwise ----

PYTHON = "<|python_tag|>"
_BARE_KEYS = ("parameters", "arguments")
_OBJECT = re.compile(r'\s*+\{\s*+(?:"|\Z)')
"""A reply that begins as a JSON object. (`{x : x > 0}` is mathematics.)"""
_LLAMA = re.compile(rf'{re.escape(PYTHON)}|\{{\s*+"name"')
_NOWHERE = re.compile(r"(?!)")


def _calls_something(reading: ReplyReader, value: Json) -> bool:
    named = isinstance(value, dict) and isinstance(value.get("name"), str)
    return named and (any(key in value for key in _BARE_KEYS) or value["name"] in reading.tools)


def _read_llama(reading: ReplyReader) -> None:
    """Anywhere in the text, as in vLLM; one or more objects with semicolons between."""
    sure = reading.take(PYTHON)
    while True:
        value = reading.json()
        if not sure and not _calls_something(reading, value):
            return
        reading.call(*reading.object(value, _BARE_KEYS))
        if not reading.take_after_white(";"):
            return
        sure = True


def _write_llama(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_as_object(call, "parameters") for call in calls)


def _read_json(reading: ReplyReader) -> None:
    """One object, alone in the reply. An object that calls nothing is an answer."""
    value = reading.json()
    if _calls_something(reading, value):
        call = reading.object(value, _BARE_KEYS)
        reading.white()
        if reading.at < len(reading.text):
            raise Malformed(
                f"expected nothing after the JSON object, found {shown(reading.text, reading.at)}"
            )
        reading.call(*call)


def _write_json(calls: Sequence[ToolCall]) -> str:
    return "\n".join(_as_object(call, "arguments") for call in calls)


# ---- harmony: every message of a reply says what it is ----

CHANNEL, MESSAGE, CONSTRAIN, BEGIN = "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>assistant"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADER = re.compile(
    r"\s*+(?:to=(?P<first>[^\s<]+)\s*+)?<\|channel\|>(?P<channel>analysis|commentary|final)"
    r"(?:\s++to=(?P<second>[^\s<]+))?\s*+(?:(?:<\|constrain\|>)?\w+)?\s*"
)
_STOP = _marked(*ENDS, "<|start|>", CHANNEL, MESSAGE, CONSTRAIN)


def _read_harmony(reading: ReplyReader) -> None:
    """gpt-oss. The reply follows `<|start|>assistant`; the end token of its last message is not in the text."""
    marked = _STOP.search(reading.text) or reading.text.lstrip().startswith("to=")
    if not marked and not reading.opened:
        return reading.content.append(reading.text)
    channel, name = ("analysis", None) if reading.opened else _read_header(reading)
    while True:
        if name is not None:
            _read_call(reading, partial(_read_commentary, name=name))
        else:
            _read_body(reading, channel)
        if reading.at == len(reading.text):
            return None
        reading.need(BEGIN, after="a message")
        channel, name = _read_header(reading)


def _read_header(reading: ReplyReader) -> tuple[str, str | None]:
    """A message's channel, and the tool that it calls."""
    end = reading.text.find(MESSAGE, reading.at, reading.at + MOST_NAME + len(MESSAGE))
    header = _HEADER.fullmatch(reading.text, reading.at, end) if end >= 0 else None
    if header is None:
        found = shown(reading.text, reading.at)
        raise Malformed(
            f"expected {CHANNEL}analysis, {CHANNEL}commentary or {CHANNEL}final and {MESSAGE}, found {found}"
        )
    reading.at = end + len(MESSAGE)
    tool = header["second"] or header["first"]
    return header["channel"], tool and tool.removeprefix("functions.")


def _read_body(reading: ReplyReader, channel: str) -> None:
    """A message's text. Only the last message of a reply may have no end, unless it is a thought."""
    found = _STOP.search(reading.text, reading.at)
    end = found.start() if found else len(reading.text)
    into = reading.thoughts if channel == "analysis" else reading.content
    into.append(reading.text[reading.at : end])
    reading.at = found.end() if found else end
    if found is not None and found.group() not in ENDS:
        raise Malformed(f"expected <|end|> after the message in {channel}, found {shown(reading.text, end)}")
    if found is None and channel == "analysis":
        raise Malformed("the reasoning in the analysis channel has no end: expected <|end|>")


def _read_commentary(reading: ReplyReader, name: str) -> None:
    arguments = reading.arguments(name[:40])
    reading.white()
    if reading.at < len(reading.text):
        reading.need("<|call|>", "<|end|>", after=f"the arguments of {name[:40]!r}")
    reading.call(name, arguments)


def _write_harmony(calls: Sequence[ToolCall]) -> str:
    return f"<|call|>{BEGIN}".join(
        f"{CHANNEL}commentary to=functions.{c.name} {CONSTRAIN}json{MESSAGE}{write_json(c.arguments)}"
        for c in calls
    )


def write_harmony(calls: str, content: str, reasoning: str | None) -> str:
    """A whole reply of gpt-oss: what is said beside calls goes into commentary."""
    parts = [] if reasoning is None else [f"{CHANNEL}analysis{MESSAGE}{reasoning}<|end|>"]
    if calls:
        parts += [f"{CHANNEL}commentary{MESSAGE}{content}<|end|>"] if content else []
        return BEGIN.join([*parts, calls])
    return BEGIN.join([*parts, f"{CHANNEL}final{MESSAGE}{content}"])


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are read and written."""

    read: Callable[[ReplyReader], None]
    """Reads what follows the thought, to its end."""
    write: Callable[[Sequence[ToolCall]], str]
    markers: tuple[str, ...] = ()
    """What begins a call; the rest of a reply must not end inside one."""
    strays: tuple[str, ...] = ()
    """What means a lost call if it stands outside of calls."""
    gap: str = ""
    """Between content and calls."""
    channels: bool = False
    """The format marks reasoning and content, too (`write_harmony`)."""


def _format(
    read: ReadCall, write: Callable[[Sequence[ToolCall]], str], *markers: str, **more: Json
) -> CallFormat:
    return CallFormat(partial(_scan, _marked(*markers), read), write, markers, **more)


_SEEK_REST = (SEEK_ALL_END, SEEK, SEEK_SEP, SEEK_END)
_XML_REST = (CALL_END, PARAMETER)  # </function> and </parameter> are in other XML, too
_GLM_REST = (CALL_END, ARGUMENT, "</arg_key>", "<arg_value>", "</arg_value>")

CALL_FORMATS: dict[str, CallFormat] = {
    # Hermes 2 Pro, Qwen2.5, Qwen3
    "hermes": _format(_read_hermes, _write_hermes, CALL, strays=(CALL_END,), gap="\n"),
    # Qwen3-Coder, Qwen3.5, Nemotron 3
    "qwen3_coder": _format(_read_xml, _write_xml, CALL, FUNCTION, strays=_XML_REST, gap="\n\n"),
    # Llama 3.1 to 3.3
    "llama3": CallFormat(
        partial(_scan, _LLAMA, _read_llama, first=_OBJECT), _write_llama, (PYTHON,), gap=PYTHON
    ),
    # Mistral with a tokenizer before v11, and from v11 on; each is read by either name
    "mistral": _format(_read_mistral, _write_mistral, MISTRAL, strays=(MISTRAL_ARGS, MISTRAL_ID)),
    "mistral_v11": _format(_read_mistral, _write_mistral_v11, MISTRAL, strays=(MISTRAL_ARGS, MISTRAL_ID)),
    # gpt-oss
    "gpt_oss": CallFormat(_read_harmony, _write_harmony, (CHANNEL, "<|start|>"), channels=True),
    # GLM-4.5 to 5
    "glm": _format(_read_glm, _write_glm, CALL, strays=_GLM_REST, gap="\n"),
    # DeepSeek V3 and R1, and from V3.1 on; each is read by either name
    "deepseek_v3": _format(_read_deepseek, _write_deepseek_v3, SEEK_ALL, strays=_SEEK_REST),
    "deepseek": _format(_read_deepseek, _write_deepseek, SEEK_ALL, strays=_SEEK_REST),
    # any model that is told so in its prompt
    "json": CallFormat(partial(_scan, _NOWHERE, _read_json, first=_OBJECT), _write_json),
}
