"""Random conversations, played as an episode would, and the laws that their tokens obey.

The oracle is independent of what is tested: a script knows which tokens its policy said, and transformers renders the
whole conversation at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from random import Random
from typing import Any
from unittest.mock import patch

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from call_writers import write_calls
from whet.data.calls import ReplyForm
from whet.data.codec import History, MessageCodec
from whet.data.templates import CUT, MARK
from whet.types import DataError, Json, Message, ToolCall, ToolSpec

DAY = datetime(2026, 1, 2)


@dataclass(frozen=True)
class Subject:
    """A chat template with its tokenizer, and what a scripted policy must know of them."""

    name: str
    tokenizer: PreTrainedTokenizerFast
    form: ReplyForm
    ends: tuple[str, ...]
    """Texts of the tokens that end a reply."""
    end_of: Callable[[Message], str]
    """The one after a reply."""
    opens: bool = False
    """The header of a reply opens a thought."""
    system: bool = True
    parallel: bool = True
    beside: bool = True
    appends: bool = True
    """A reply is rendered as it was sampled, whatever follows it."""
    exact: bool = True
    """A part of a text has the same tokens alone."""
    tools: bool = True
    """It tells of tools, in a known format."""
    writes_thoughts: bool = True
    """It knows a field for them."""
    thinks: bool = True
    """A reply may begin with a thought, if its form has them."""

    @property
    def control(self) -> tuple[str, ...]:
        return tuple(t for t in self.tokenizer.all_special_tokens if len(t) > 1)


# ---------------------------------------------------------------- scripts


@dataclass(frozen=True)
class Line:
    """What the policy says in a turn, how, and what it is told then."""

    reply: Message
    told: tuple[str, ...] = ("and then?",)
    """Results, in the order of the calls; a user's message where it called nothing."""
    more: str | None = None
    """What the user says after the results."""
    cut: int | None = None
    """So many tokens, and no end token."""
    ended: bool = True
    """It ends with an end token; else a text stopped it."""
    seed: int | None = None
    """How the text is split into tokens; None: as the tokenizer does."""
    noise: str = ""
    """A control token that the policy samples in the middle of its reply."""


@dataclass(frozen=True)
class Script:
    question: str
    system: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    begun: int = 0
    """So many characters of the first reply are in the prompt."""
    lines: tuple[Line, ...] = ()


WORDS = (
    "Paris", "it is", "21 degrees", "so", "no", "1 < 2", 'say "hi"', "a\nb", "{x}", "{{ x }}", "{% y %}", "a\\b", "'",
    "&amp;", "</b>", "\t", "\r\n", "  ", "", "null", "<0x41>", "▁", "Ġ", "Ċ", "```json", "functions.f:0",
)  # fmt: skip
ODD = (
    "e\u0301", "n\u0303\u0323", "👩‍👩‍👧‍👦", "🙂", "🇫🇷", "שלום\u202e", "مرحبا", "日本", "ſtraße", "ﬁ", "\x00", "\x1b[0m",
    "\ufeff", "\u2028", "\u200d", "\u00a0", "\ud7ff", "\ue000", "\ufffd", "\ufdd0", CUT, MARK, MARK[1], "\U00010000",
    "\U0010ffff", "é",
)  # fmt: skip
"""Combining marks, joiners, right to left, what stands beside the surrogates, and what the codec uses for marks."""
MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "</parameter>",
)
NAMES = ("look_up", "add", "a.b-c", "get_2", "naïve", "x")
VALUES: dict[str, Callable[[Random], Json]] = {
    "string": lambda rng: text_of(rng, [*WORDS, *ODD]),
    "integer": lambda rng: rng.choice((0, -1, 10**18)),
    "number": lambda rng: rng.choice((0.5, -1e-7, 1e300)),
    "boolean": lambda rng: rng.random() < 0.5,
    "array": lambda rng: [rng.choice((1, None, True, "a", [])) for _ in range(rng.randrange(3))],
    "object": lambda rng: {rng.choice(("k", "é", "a b")): rng.choice((1, "x", {"y": []}))},
}


def text_of(rng: Random, words: list[str], most: int = 4) -> str:
    return rng.choice((" ", " ", "")).join(rng.choices(words, k=rng.randint(0, most)))


def tools_of(rng: Random, words: list[str]) -> tuple[ToolSpec, ...]:
    """Tools with odd schemas; now and then none."""
    made = []
    for name in rng.sample(NAMES, rng.choice((0, 1, 2, 2, 3))):
        keys = {
            rng.choice(("city", "x", "n_1", "q")): rng.choice(list(VALUES)) for _ in range(rng.randrange(4))
        }
        properties: dict[str, Json] = {key: {"type": kind} for key, kind in keys.items()}
        for each in properties.values():
            each |= rng.choice(
                ({}, {}, {"description": text_of(rng, words)}, {"default": None}, {"enum": [1]})
            )
            if "enum" in each:
                each.pop("enum")
                each["x-odd"] = [{"$ref": "#"}, text_of(rng, words)]
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        made.append(ToolSpec(name, text_of(rng, words), schema if rng.random() < 0.9 else {"type": "object"}))
    return tuple(made)


def script_of(subject: Subject, rng: Random) -> Script:
    """A random one. Some have control tokens and odd letters in every text, some replies without ends."""
    hostile = rng.random() < 0.5
    words = [*WORDS, *ODD, *MARKERS, *(subject.control if hostile else ())]
    unclean, split = rng.random() < 0.4, rng.random() < 0.3
    tools = tools_of(rng, words) if subject.tools else ()
    lines = tuple(
        _line(subject, rng, tools, words, unclean=unclean, split=split) for _ in range(rng.randint(1, 4))
    )
    return Script(
        question=text_of(rng, words) or "so",
        system=text_of(rng, words) if subject.system and rng.random() < 0.4 else None,
        tools=tools,
        begun=rng.randrange(1, 12) if rng.random() < 0.1 else 0,
        lines=lines,
    )


def _line(
    subject: Subject,
    rng: Random,
    tools: tuple[ToolSpec, ...],
    words: list[str],
    *,
    unclean: bool,
    split: bool,
) -> Line:
    most = (2 if subject.parallel else 1) if tools else 0
    calls = tuple(_call(rng, rng.choice(tools)) for _ in range(min(most, rng.choice((0, 0, 1, 1, 2)))))
    speech = [w for w in (*WORDS, *ODD) if "\ufffd" not in w]
    content = text_of(rng, speech) if not calls or (subject.beside and rng.random() < 0.3) else ""
    marked = subject.thinks and (subject.form.thinking or subject.form.channels)
    thinks = subject.opens or (marked and rng.random() < 0.5)
    reply = Message("assistant", content, text_of(rng, speech) if thinks else None, calls)
    how = rng.random() if unclean else 1.0
    return Line(
        reply,
        told=tuple(text_of(rng, words) or "so" for _ in range(max(1, len(calls)))),
        more=text_of(rng, words) or "so" if calls and rng.random() < 0.1 else None,
        cut=rng.randrange(40) if how < 0.3 else None,
        ended=how > 0.6,
        seed=rng.randrange(1000) if split else None,
        noise=rng.choice(subject.control) if 0.6 < how < 0.7 else "",
    )


def _call(rng: Random, tool: ToolSpec) -> ToolCall:
    properties = tool.parameters.get("properties", {})
    given = {key: VALUES[each["type"]](rng) for key, each in properties.items() if rng.random() < 0.8}
    return ToolCall(tool.name, given)


# ---------------------------------------------------------------- playing


@dataclass
class Told:
    """A place where the policy speaks next: what it is given there."""

    conversation: list[Message]
    tools: tuple[ToolSpec, ...]
    token_ids: list[int]
    """All of the strand."""
    added: list[int]
    """What was added to it since the policy has spoken; all in a new strand."""
    strand: int
    clean: bool
    """Every reply in the strand was read as what it was said to be."""
    canonical: bool
    """And was split into tokens as the tokenizer does."""
    words: bool = True
    """No control token was sampled in it but those that end a reply."""


@dataclass
class Talk:
    """What came of a script."""

    strands: list[list[int]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)
    """By strand, the tokens that the policy has said in it."""
    places: list[Told] = field(default_factory=list)

    def begin(self, token_ids: list[int]) -> None:
        self.strands.append(list(token_ids))
        self.masks.append([0] * len(token_ids))
        self.said.append([])

    def add(self, token_ids: list[int], *, sampled: bool) -> None:
        self.strands[-1] += token_ids
        self.masks[-1] += [int(sampled)] * len(token_ids)
        self.said[-1] += token_ids if sampled else []


class Wrong(AssertionError):
    """A law is broken."""


def check(right: bool, law: str, *found: object) -> None:
    if not right:
        raise Wrong(law + "".join(f"\n      {each!r}" for each in found))


def codec_of(subject: Subject, history: History) -> MessageCodec:
    ends = subject.tokenizer.convert_tokens_to_ids(list(subject.ends))
    return MessageCodec(subject.tokenizer, ends=ends, history=history, calls=subject.form.calls)


def play(subject: Subject, script: Script, codec: MessageCodec) -> Talk:
    """As `rollout.episode` does."""
    tools, talk = script.tools, Talk()
    system = [Message("system", script.system)] if script.system is not None else []
    conversation = [*system, Message("user", script.question)]
    clean = canonical = words = True
    special = set(subject.tokenizer.all_special_ids)
    for turn, line in enumerate(script.lines, 1):
        text, reply = spoken(subject, line, tools)
        begun = text[: script.begun] if turn == 1 and not subject.opens else ""
        if turn == 1:
            asked = [*conversation, *([Message("assistant", begun)] if begun else [])]
            talk.begin(codec.encode_prompt(asked, tools))
            talk.places.append(
                Told(
                    asked, tools, list(talk.strands[0]), list(talk.strands[0]), 0, clean=True, canonical=True
                )
            )
            canonical = not begun
        ids = tokens_of(subject, text[len(begun) :], line)
        whole = line.cut is None or line.cut >= len(ids)
        ids = ids if whole else ids[: line.cut]
        end = [subject.tokenizer.convert_tokens_to_ids(subject.end_of(reply))] if line.ended and whole else []
        talk.add([*ids, *end], sampled=True)
        heard = codec.parse_reply(ids, tools, begun)
        exact = whole and not line.noise and faithful(subject, text)
        if exact:
            check_heard(subject, heard, reply, text, begun)
        same = (heard.content, heard.reasoning) == (reply.content, reply.reasoning)
        clean = clean and exact and bool(end) and same
        canonical = canonical and line.seed is None and not begun
        words = words and canonical and not special & {*ids}
        calls = tuple(replace(c, id=c.id or f"c{turn:04}{n:04}") for n, c in enumerate(heard.tool_calls, 1))
        heard = replace(heard, tool_calls=calls)
        told = [
            Message("tool", line.told[n % len(line.told)], tool_call_id=c.id, name=c.name)
            for n, c in enumerate(calls)
        ]
        more = line.more if told else line.told[0]
        new = [*told, *([Message("user", more)] if more is not None else [])]
        conversation = [*conversation, heard, *new]
        added = codec.encode_observation(talk.strands[-1], conversation, len(new), tools)
        if added is None:
            talk.begin(codec.encode_prompt(conversation, tools))
            clean = canonical = words = True
        else:
            talk.add(added, sampled=False)
        strand = talk.strands[-1]
        fresh = list(strand) if added is None else added
        number = len(talk.strands) - 1
        talk.places.append(Told(conversation, tools, list(strand), fresh, number, clean, canonical, words))
    return talk


def spoken(subject: Subject, line: Line, tools: tuple[ToolSpec, ...]) -> tuple[str, Message]:
    """The text of a reply; plain words where the form cannot say what the script wants."""
    thought = "so" if subject.opens else None
    for reply in (line.reply, Message("assistant", "it is so", thought)):
        try:
            form = subject.form if tools or subject.form.channels else replace(subject.form, calls=None)
            calls, content, reasoning = reply.tool_calls, reply.content, reply.reasoning
            return write_calls(form, calls, content, reasoning, opened=subject.opens), reply
        except ValueError:
            continue
    raise AssertionError(f"{subject.name}: cannot say plain words")


def tokens_of(subject: Subject, text: str, line: Line) -> list[int]:
    """The text as the policy samples it, now and then in other tokens than the tokenizer would use."""

    def encode(piece: str) -> list[int]:
        after = str(subject.tokenizer.eos_token)
        return list(subject.tokenizer(after + piece, add_special_tokens=False)["input_ids"][1:])

    rng = Random(f"{line.seed} {text}")
    if line.seed is None or not subject.exact:
        ids = encode(text)
    else:
        at = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        ids = [token for a, b in zip([0, *at], [*at, len(text)]) for token in encode(text[a:b])]
    if line.noise:
        place = rng.randrange(len(ids) + 1)
        ids[place:place] = [subject.tokenizer.convert_tokens_to_ids(line.noise)]
    return ids


def decoded(subject: Subject, token_ids: list[int]) -> str:
    return str(subject.tokenizer.decode(token_ids))


def faithful(subject: Subject, text: str) -> bool:
    """Whether the tokenizer itself keeps the text."""
    return decoded(subject, subject.tokenizer(text, add_special_tokens=False)["input_ids"]) == text


# ---------------------------------------------------------------- laws


def check_heard(subject: Subject, heard: Message, said: Message, text: str, begun: str) -> None:
    check(heard.malformed is None, f"a reply is read ({heard.malformed})", text)
    named = [(c.name, c.arguments, repr(c.arguments)) for c in heard.tool_calls]
    check(
        named == [(c.name, c.arguments, repr(c.arguments)) for c in said.tool_calls], "its calls", heard, said
    )
    control = [c for c in subject.control if c in said.content or c in (said.reasoning or "")]
    if not control and not begun:
        check(heard.content.strip("\n") == said.content.strip("\n"), "its content", heard, said)
        thoughts = [None if m.reasoning is None else m.reasoning.strip("\n") for m in (heard, said)]
        check(thoughts[0] == thoughts[1], "its thoughts", heard, said)


def check_mask(talk: Talk) -> None:
    for strand, mask, said in zip(talk.strands, talk.masks, talk.said, strict=True):
        check(len(strand) == len(mask), "one mask for each token")
        check([t for t, on in zip(strand, mask) if on] == said, "the mask has what was said and nothing else")


def oracle(subject: Subject, conversation: list[Message], tools: tuple[ToolSpec, ...]) -> str:
    """The conversation as transformers renders it, up to where the policy speaks. Raises what a template raises."""
    begun = conversation[-1].role == "assistant"
    before = conversation[-1].content if begun else ""
    messages = conversation[:-1] if begun else conversation
    if not subject.writes_thoughts:  # they stand in the text
        messages = [inline(subject, m) for m in messages]
    with patch.object(chat_template_utils, "datetime", _Day):
        rendered = subject.tokenizer.apply_chat_template(
            copy.deepcopy([m.to_json() for m in messages]),
            tools=copy.deepcopy([t.to_json() for t in tools]) or None,
            tokenize=False,
            add_generation_prompt=True,
        )
    return str(rendered) + before


def inline(subject: Subject, message: Message) -> Message:
    if message.reasoning is None or subject.form.thinking is None:
        return message
    said = write_calls(replace(subject.form, calls=None), (), message.content, message.reasoning)
    return replace(message, content=said, reasoning=None)


class _Day:
    now = staticmethod(lambda: DAY)


def check_places(subject: Subject, talk: Talk, codec: MessageCodec) -> None:
    special = set(subject.tokenizer.all_special_ids)
    for place in talk.places:
        try:
            whole = oracle(subject, place.conversation, place.tools)
        except TemplateError:  # of an empty reply, say
            continue
        fresh = place.added == place.token_ids
        if not faithful(subject, whole) or "\ufffd" in decoded(subject, place.token_ids):
            continue
        text, added = decoded(subject, place.token_ids), decoded(subject, place.added)
        same = fresh or codec.history == "template" or (subject.appends and place.clean)
        if same:
            check(text == whole, "a strand is the text that the template makes", text, whole)
        elif place.conversation[-1].role != "assistant" and subject.exact:
            begin = next((n for n, t in enumerate(place.added) if t not in special), len(place.added))
            rest = decoded(subject, place.added[begin:])
            check(
                whole.endswith(rest), "what is appended ends the text that the template makes", added, whole
            )
        spelled = any(c in said(m) for m in place.conversation for c in subject.control)
        spelled = spelled or any(c in str(t.to_json()) for t in place.tools for c in subject.control)
        if spelled or not (same or subject.appends):
            continue
        ids = subject.tokenizer(whole, add_special_tokens=False)["input_ids"]
        if same and place.canonical:
            check(place.token_ids == ids, "a strand has the tokens of that text", place.token_ids, ids)
        elif place.words:
            marks = [[t for t in each if t in special] for each in (place.token_ids, ids)]
            check(marks[0] == marks[1], "a strand has the control tokens of the template", text, whole)


def said(message: Message) -> str:
    return f"{message.content}{message.reasoning}{message.name}{[c.to_json() for c in message.tool_calls]}"


def check_control(subject: Subject, script: Script, codec: MessageCodec) -> None:
    """What people and tools say becomes no control token."""
    special = set(subject.tokenizer.all_special_ids)

    def plain(text: str) -> str:
        for control in sorted(subject.control, key=len, reverse=True):
            text = text.replace(control, "x")
        return text

    system = [Message("system", script.system)] if script.system is not None else []
    messages = [*system, Message("user", script.question)]
    harmless = [replace(m, content=plain(m.content)) for m in messages]
    tools = tuple(
        replace(t, description=plain(t.description), parameters=_each(t.parameters, plain))
        for t in script.tools
    )
    found, expected = codec.encode_prompt(messages, script.tools), codec.encode_prompt(harmless, tools)
    marks = [[t for t in ids if t in special] for ids in (found, expected)]
    check(marks[0] == marks[1], "control tokens are the template's alone", *marks)


def _each(value: Json, change: Callable[[str], str]) -> Json:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _each(entry, change) for key, entry in value.items()}
    return [_each(entry, change) for entry in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- trying


def fault(subject: Subject, script: Script, history: History) -> str | None:
    """What is wrong with a script's tokens; None: nothing. Refused: raises DataError."""
    codec = codec_of(subject, history)
    try:
        talk = play(subject, script, codec)
        check_mask(talk)
        check_places(subject, talk, codec)
        check_control(subject, script, codec)
    except Wrong as wrong:
        return str(wrong)
    except DataError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def tried(subject: Subject, script: Script, history: History) -> str | None:
    """The same; a conversation that the template refuses is no fault."""
    try:
        return fault(subject, script, history)
    except DataError as refused:
        return None if "refuses" in str(refused) else f"DataError: {refused}"


def smallest(subject: Subject, script: Script, history: History) -> Script:
    """A script with the same kind of fault and less in it."""
    what = _law(tried(subject, script, history))
    shrunk = True
    while shrunk:
        shrunk = False
        for less in _smaller(script):
            if _law(tried(subject, less, history)) == what:
                script, shrunk = less, True
                break
    return script


def _law(fault: str | None) -> str | None:
    return fault and fault.split("\n")[0].split("(")[0]


def _smaller(script: Script) -> Iterator[Script]:
    for n in range(len(script.lines)):
        yield replace(script, lines=script.lines[:n] + script.lines[n + 1 :])
    for n in range(len(script.tools)):
        yield replace(script, tools=script.tools[:n] + script.tools[n + 1 :])
        tool = script.tools[n]
        for less in (
            replace(tool, description=""),
            replace(tool, parameters={"type": "object", "properties": {}}),
        ):
            if less != tool:
                yield replace(script, tools=(*script.tools[:n], less, *script.tools[n + 1 :]))
    if script.begun:
        yield replace(script, begun=0)
    if script.system is not None:
        yield replace(script, system=None)
        yield from (replace(script, system=text) for text in _shorter(script.system))
    yield from (replace(script, question=text) for text in _shorter(script.question) if text)
    for n, line in enumerate(script.lines):
        for less in _less(line):
            yield replace(script, lines=(*script.lines[:n], less, *script.lines[n + 1 :]))


def _less(line: Line) -> Iterator[Line]:
    plain: dict[str, Any] = {"more": None, "cut": None, "ended": True, "seed": None, "noise": ""}
    yield from (replace(line, **{k: v}) for k, v in plain.items() if getattr(line, k) != v)
    reply = line.reply
    for n in range(len(reply.tool_calls)):
        yield replace(line, reply=replace(reply, tool_calls=reply.tool_calls[:n] + reply.tool_calls[n + 1 :]))
        call = reply.tool_calls[n]
        for key in call.arguments:
            less = replace(call, arguments={k: v for k, v in call.arguments.items() if k != key})
            calls = (*reply.tool_calls[:n], less, *reply.tool_calls[n + 1 :])
            yield replace(line, reply=replace(reply, tool_calls=calls))
    for text in _shorter(reply.content):
        yield replace(line, reply=replace(reply, content=text))
    if reply.reasoning is not None:
        yield from (
            replace(line, reply=replace(reply, reasoning=t)) for t in (None, *_shorter(reply.reasoning))
        )
    for n, told in enumerate(line.told):
        for text in _shorter(told):
            if text:
                yield replace(line, told=(*line.told[:n], text, *line.told[n + 1 :]))


def _shorter(text: str) -> Iterator[str]:
    if len(text) > 1:
        half = len(text) // 2
        yield from (text[:half], text[half:], text[1:], text[:-1])
    if text:
        yield ""


def search(subject: Subject, history: History, numbers: range) -> str | None:
    """The first fault among the scripts with these numbers, made small, in words; None: there is none."""
    for number in numbers:
        script = script_of(subject, Random(f"{subject.name} {history} {number}"))
        if tried(subject, script, history) is not None:
            least = smallest(subject, script, history)
            what = tried(subject, least, history)
            return f"{subject.name}, history={history}, script {number}: {what}\n  {least!r}"
    return None
