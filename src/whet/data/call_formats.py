"""The call formats: how the families of models write a tool call, one reader for each.

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
from functools import cached_property, partial

from whet.data.call_reader import MOST_NAME, ReadCall, ReplyReader, any_of, read_each, scan
from whet.data.call_values import Malformed, Untyped, kind, read_by_schema, read_json, shown
from whet.types import Json

# ---- formats with markers ----

CALL, CALL_END = "<tool_call>", "</tool_call>"


def _read_hermes(reading: ReplyReader) -> None:
    reading.take(CALL)
    call = reading.object(reading.json(), ("arguments",))
    reading.need(CALL_END, after="the JSON object")
    reading.call(*call)


FUNCTION, FUNCTION_END, PARAMETER = "<function=", "</function>", "<parameter="
SEED, SEED_END = "<seed:tool_call>", "</seed:tool_call>"


def _read_xml(reading: ReplyReader, tags: ArgumentTags, around: tuple[str, str]) -> None:
    """Qwen3-coder at times leaves out the outer tags, so they are not needed."""
    begin, end = around
    wrapped = reading.take(begin)
    reading.need(FUNCTION, after=begin)
    name = reading.name(FUNCTION)
    reading.need(">", after=f"{FUNCTION}{name}")
    arguments = _read_tagged(reading, name, tags)
    if wrapped:
        reading.need(end, after=FUNCTION_END)
    else:
        reading.take_after_white(end)
    reading.call(name, arguments)


ARGUMENT = "<arg_key>"


def _read_glm(reading: ReplyReader) -> None:
    reading.take(CALL)
    name = reading.name(CALL)
    reading.call(name, _read_tagged(reading, name, GLM_TAGS))


MINIMAX, MINIMAX_END, INVOKE = "<minimax:tool_call>", "</minimax:tool_call>", "<invoke name="
DSML = "｜DSML｜"
DSML_BLOCKS = [(f"<{DSML}{name}>", f"</{DSML}{name}>") for name in ("function_calls", "tool_calls")]
"""Of DeepSeek V3.2, and of V4."""


def _read_invokes(reading: ReplyReader, tags: ArgumentTags, blocks: Sequence[tuple[str, str]]) -> None:
    """A block of calls, each an element with its name as an attribute."""
    begin, end = next(block for block in blocks if reading.take(block[0]))
    invoke = invoke_of(tags)
    reading.need(invoke, after=begin)
    while True:
        name = reading.until('">', what="the tool's name")
        reading.call(name, _read_tagged(reading, name[:40], tags))
        reading.need(invoke, end, after=tags.end)
        if reading.text.endswith(end, 0, reading.at):
            return


def invoke_of(tags: ArgumentTags) -> str:
    """The beginning of a call, up to its name."""
    return tags.end.replace("</", "<").replace(">", ' name="')


@dataclass(frozen=True)
class ArgumentTags:
    """How arguments are written as tagged text."""

    key: tuple[str, str]
    """Around a key."""
    value: tuple[str, str]
    """Around a value, line ends included; a reader needs no line ends."""
    end: str
    """After the last argument."""
    untyped: Untyped
    """As vLLM's parser of the family has it."""
    typed: bool = False
    """A key says itself whether its value is a text or JSON."""

    @cached_property
    def value_end(self) -> re.Pattern[str]:
        """The tag that ends a value is the one that something of the call follows: others are a part of the value."""
        return re.compile(rf"{self.value[1].strip()}(?=\s*+(?:{re.escape(self.key[0])}|{self.end}))")


XML_TAGS = ArgumentTags((PARAMETER, ">"), ("\n", "\n</parameter>"), FUNCTION_END, "text")
SEED_TAGS = ArgumentTags((PARAMETER, ">"), ("", "</parameter>"), FUNCTION_END, "text")
GLM_TAGS = ArgumentTags((ARGUMENT, "</arg_key>"), ("\n<arg_value>", "</arg_value>"), CALL_END, "json")
MINIMAX_TAGS = ArgumentTags(('<parameter name="', '">'), ("", "</parameter>"), "</invoke>", "json")
DSML_TAGS = ArgumentTags(
    (f'<{DSML}parameter name="', ">"), ("", f"</{DSML}parameter>"), f"</{DSML}invoke>", "text", typed=True
)
_TYPED = re.compile(r'(.*)" string="(true|false)"', re.DOTALL)


def _read_tagged(reading: ReplyReader, name: str, tags: ArgumentTags) -> dict[str, Json]:
    arguments: dict[str, Json] = {}
    reading.white()
    while not reading.take(tags.end):
        reading.need(tags.key[0], tags.end, after=f"an argument of {name!r}" if arguments else f"{name!r}")
        key = reading.until(tags.key[1], what=f"a key of {name!r}").strip()
        key, textual = _declared(key) if tags.typed else (key, None)
        if not key or len(key) > MOST_NAME:
            raise Malformed(f"a key of {name!r} has {len(key)} characters; expected 1 to {MOST_NAME}")
        if key in arguments:
            raise Malformed(f"{name!r} has the argument {key[:40]!r} twice")
        text = _tagged_text(reading, key, tags)
        if textual is None:
            arguments[key] = read_by_schema(text, reading.tools.get(name), key, tags.untyped)
        else:
            arguments[key] = text if textual else _whole_json(text, key)
        reading.white()
    return arguments


def _declared(text: str) -> tuple[str, bool]:
    """A key, and whether its value is a text."""
    found = _TYPED.fullmatch(text)
    if found is None:
        raise Malformed(f'expected string="true" or string="false" after a key, found {text[:60]!r}')
    return found[1], found[2] == "true"


def _whole_json(text: str, key: str) -> Json:
    bare = text.strip()
    value, end = read_json(bare)
    if end < len(bare):
        raise Malformed(f"the value of {key[:40]!r} has text after its JSON: {shown(bare, end)}")
    return value


def _tagged_text(reading: ReplyReader, key: str, tags: ArgumentTags) -> str:
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


MISTRAL, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


@dataclass(frozen=True, slots=True)
class ListedCalls:
    """Calls as one JSON list of objects."""

    begin: str
    end: str = ""
    name: str = "name"
    arguments: str = "arguments"


MISTRAL_LIST = ListedCalls(MISTRAL)
HUNYUAN_LIST = ListedCalls("<tool_calls>", "</tool_calls>")
NEMOTRON_LIST = ListedCalls("<TOOLCALL>", "</TOOLCALL>")
GRANITE_LIST = ListedCalls("<|tool_call|>")
FUNCTOOLS_LIST = ListedCalls("functools")
COHERE_LIST = ListedCalls("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters")


def _read_list(reading: ReplyReader, listed: ListedCalls) -> None:
    reading.take(listed.begin)
    calls = reading.json()
    if not isinstance(calls, list) or not calls:
        found = "empty" if calls == [] else kind(calls)
        raise Malformed(f"the list after {listed.begin} is {found}; expected at least one call")
    for value in calls:
        reading.call(*reading.object(value, (listed.arguments,), listed.name))
    if listed.end:
        reading.need(listed.end, after="the list of calls")


def _read_mistral(reading: ReplyReader) -> None:
    """A list of objects (tokenizers before v11) or a name and its arguments."""
    start = reading.at
    reading.take(MISTRAL)
    reading.white()
    if reading.text.startswith("[", reading.at):
        reading.at = start
        return _read_list(reading, MISTRAL_LIST)
    name = reading.name(MISTRAL)
    if reading.take(MISTRAL_ID):
        reading.name(MISTRAL_ID)
    reading.take(MISTRAL_ARGS)
    return reading.call(name, reading.arguments(name))


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


KIMI_ALL, KIMI_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI, KIMI_ARGS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_ID = re.compile(r"(?:functions\.)?(\S+):[0-9]{1,9}")


def _read_kimi(reading: ReplyReader) -> None:
    """A call's id is written by the policy, and its result is told under it: it has the tool's name in it."""
    reading.take(KIMI_ALL)
    reading.need(KIMI, after=KIMI_ALL)
    while True:
        id = reading.until(KIMI_ARGS, what="the call's id").strip()
        found = KIMI_ID.fullmatch(id) if len(id) <= MOST_NAME + 20 else None
        if found is None:
            raise Malformed(f"expected functions.NAME:NUMBER after {KIMI}, found {id[:40]!r}")
        arguments = reading.arguments(found[1][:40])
        reading.need(KIMI_END, after="the arguments")
        reading.call(found[1], arguments, id)
        reading.need(KIMI, KIMI_ALL_END, after=KIMI_END)
        if reading.text.endswith(KIMI_ALL_END, 0, reading.at):
            return


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


# ---- harmony: every message of a reply says what it is ----

CHANNEL, MESSAGE, CONSTRAIN, BEGIN = "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>assistant"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADER = re.compile(
    r"\s*+(?:to=(?P<first>[^\s<]+)\s*+)?<\|channel\|>(?P<channel>analysis|commentary|final)"
    r"(?:\s++to=(?P<second>[^\s<]+))?\s*+(?:(?:<\|constrain\|>)?\w+)?\s*"
)
_STOP = any_of(*ENDS, "<|start|>", CHANNEL, MESSAGE, CONSTRAIN)


def _read_harmony(reading: ReplyReader) -> None:
    """gpt-oss. The reply follows `<|start|>assistant`; the end token of its last message is not in the text."""
    marked = _STOP.search(reading.text) or reading.text.lstrip().startswith("to=")
    if not marked and not reading.opened:
        return reading.content.append(reading.text)
    channel, name = ("analysis", None) if reading.opened else _read_header(reading)
    while True:
        if name is not None:
            read_each(reading, partial(_read_commentary, name=name))
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


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are read."""

    read: Callable[[ReplyReader], None]
    """Reads what follows the thought, to its end."""
    markers: tuple[str, ...] = ()
    """What begins a call; the rest of a reply must not end inside one."""
    strays: tuple[str, ...] = ()
    """What means a lost call if it stands outside of calls."""
    channels: bool = False
    """The format marks reasoning and content, too."""


def _format(read: ReadCall, *markers: str, strays: tuple[str, ...] = ()) -> CallFormat:
    return CallFormat(partial(scan, any_of(*markers), read), markers, strays)


def _xml(tags: ArgumentTags, around: tuple[str, str]) -> CallFormat:
    strays = (around[1], PARAMETER)  # </function> and </parameter> are in other XML, too
    return _format(partial(_read_xml, tags=tags, around=around), around[0], FUNCTION, strays=strays)


def _invokes(tags: ArgumentTags, *blocks: tuple[str, str]) -> CallFormat:
    read = partial(_read_invokes, tags=tags, blocks=blocks)
    return _format(read, *(begin for begin, _ in blocks), strays=tuple(e for _, e in blocks))


def _list(listed: ListedCalls, marker: str = "") -> CallFormat:
    read = partial(_read_list, listed=listed)
    return _format(read, marker or listed.begin, strays=(listed.end,) if listed.end else ())


_SEEK_REST = (SEEK_ALL_END, SEEK, SEEK_SEP, SEEK_END)
_KIMI_REST = (KIMI_ALL_END, KIMI, KIMI_ARGS, KIMI_END)
_GLM_REST = (CALL_END, ARGUMENT, "</arg_key>", "<arg_value>", "</arg_value>")

CALL_FORMATS: dict[str, CallFormat] = {
    # Hermes 2 Pro, Qwen2.5, Qwen3, Granite 4
    "hermes": _format(_read_hermes, CALL, strays=(CALL_END,)),
    # Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5
    "qwen3_coder": _xml(XML_TAGS, (CALL, CALL_END)),
    # Seed-OSS
    "seed": _xml(SEED_TAGS, (SEED, SEED_END)),
    # Llama 3.1 to 3.3
    "llama3": CallFormat(partial(scan, _LLAMA, _read_llama, first=_OBJECT), (PYTHON,)),
    # Mistral with a tokenizer before v11, and from v11 on; each is read by either name
    "mistral": _format(_read_mistral, MISTRAL, strays=(MISTRAL_ARGS, MISTRAL_ID)),
    "mistral_v11": _format(_read_mistral, MISTRAL, strays=(MISTRAL_ARGS, MISTRAL_ID)),
    # gpt-oss
    "gpt_oss": CallFormat(_read_harmony, (CHANNEL, "<|start|>"), channels=True),
    # GLM-4.5 to 5
    "glm": _format(_read_glm, CALL, strays=_GLM_REST),
    # DeepSeek V3 and R1, and from V3.1 on; each is read by either name
    "deepseek_v3": _format(_read_deepseek, SEEK_ALL, strays=_SEEK_REST),
    "deepseek": _format(_read_deepseek, SEEK_ALL, strays=_SEEK_REST),
    # Kimi K2
    "kimi": _format(_read_kimi, KIMI_ALL, strays=_KIMI_REST),
    # MiniMax M2
    "minimax": _invokes(MINIMAX_TAGS, (MINIMAX, MINIMAX_END)),
    # DeepSeek V3.2, and V4; each is read by either name
    "deepseek_v32": _invokes(DSML_TAGS, *DSML_BLOCKS),
    "deepseek_v4": _invokes(DSML_TAGS, *DSML_BLOCKS),
    # Hunyuan A13B, Apriel
    "hunyuan": _list(HUNYUAN_LIST),
    # Nemotron Nano v2, Llama Nemotron
    "nemotron": _list(NEMOTRON_LIST),
    # Granite 3
    "granite": _list(GRANITE_LIST),
    # Phi-4-mini, FireFunction v2
    "functools": _list(FUNCTOOLS_LIST, "functools["),
    # Command R7B
    "cohere": _list(COHERE_LIST),
    # any model that is told so in its prompt
    "json": CallFormat(partial(scan, _NOWHERE, _read_json, first=_OBJECT)),
}
