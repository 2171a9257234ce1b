"""What a policy wrote, as a message: its reasoning, its tool calls and the rest.

A marker that opens and cannot be read makes a reply `malformed`, with the reason; it is never silently text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from whet.data.call_formats import (
    ARGUMENT,
    CALL,
    CALL_FORMATS,
    CHANNEL,
    DSML,
    FUNCTION,
    INVOKE,
    KIMI_ALL,
    MESSAGE,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    PARAMETER,
    PYTHON,
    SEED,
    SEEK_SEP,
)
from whet.data.call_reader import LEAST_MARKER, ReplyReader
from whet.data.call_values import Malformed
from whet.tables import near
from whet.types import ConfigError, Message, ToolSpec


@dataclass(frozen=True, slots=True)
class Thinking:
    """The markers around a reply's reasoning, which comes before everything else."""

    begin: str
    end: str
    inside: str = "\n"
    """Line ends that a policy writes inside the markers. A reader needs none."""
    after: str = "\n\n"
    """Line ends after the last marker, likewise."""


THINKING: dict[str, Thinking] = {
    # Qwen3, DeepSeek R1 and V3.1, GLM-4.5, Nemotron 3
    "<think>": Thinking("<think>", "</think>"),
    # Magistral, Mistral Small 4
    "[THINK]": Thinking("[THINK]", "[/THINK]", "", ""),
    # Seed-OSS
    "<seed:think>": Thinking("<seed:think>", "</seed:think>"),
    # Command R7B
    "<|START_THINKING|>": Thinking("<|START_THINKING|>", "<|END_THINKING|>", "", ""),
}


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How a policy writes its replies. Errors: ConfigError for an unknown call format."""

    calls: str | None = None
    """A key of CALL_FORMATS; None: replies have no calls. `gpt_oss` marks reasoning and content, too."""
    thinking: Thinking | None = None
    """None: replies have no marked reasoning, or the call format marks it."""

    def __post_init__(self) -> None:
        if self.calls is not None and self.calls not in CALL_FORMATS:
            raise ConfigError(
                f"No call format {self.calls!r}{near(self.calls, CALL_FORMATS)}; known: {', '.join(CALL_FORMATS)}."
            )
        if self.channels and self.thinking is not None:
            raise ConfigError(
                f"The call format {self.calls!r} marks reasoning itself; leave out the markers."
            )

    @property
    def channels(self) -> bool:
        """The call format marks reasoning and content, too."""
        return self.calls is not None and CALL_FORMATS[self.calls].channels


def read_reply(
    text: str, form: ReplyForm, tools: Sequence[ToolSpec] = (), *, opened: bool = False
) -> Message:
    """What a reply says: its reasoning, its calls in their order, and the content around them.

    text: the reply with its special tokens, without the end token that ended it. opened: it begins inside a thought
    (`opens_thought`). tools: their schemas give arguments their types in the formats that write them as plain text; a
    call of an unknown tool is a call. Calls have no ids.

    Content of a reply without thought and calls is the text as it stands. Otherwise the line ends next to a thought or
    a call are the template's, and go. A reply that cannot be read has `malformed`, and the whole text as its content.

    Takes time in proportion to the text. Errors: ValueError for `opened` where the form has no reasoning.
    """
    if opened and not has_thoughts(form):
        raise ValueError("A reply can begin inside a thought only if its form marks reasoning.")
    reading = ReplyReader(text, tools, opened=opened)
    try:
        _read_thought(reading, form)
        _read_rest(reading, form)
        _check_rest(reading, form)
    except Malformed as e:
        return Message("assistant", text, malformed=str(e))
    return Message("assistant", _content(reading, form), _reasoning(reading), tuple(reading.calls))


def has_thoughts(form: ReplyForm) -> bool:
    """Whether a reply of this form can have a marked thought."""
    return form.thinking is not None or form.channels


def _read_thought(reading: ReplyReader, form: ReplyForm) -> None:
    if form.thinking is None:
        return
    begin, end = form.thinking.begin, form.thinking.end
    if not reading.opened and not reading.take_after_white(begin):
        return
    thought = reading.until(end, what=f"the thought that {'the prompt' if reading.opened else begin} opened")
    reading.thoughts.append(thought.strip("\n"))


def _read_rest(reading: ReplyReader, form: ReplyForm) -> None:
    if form.calls is None:
        reading.content.append(reading.text[reading.at :])
    else:
        CALL_FORMATS[form.calls].read(reading)


def _check_rest(reading: ReplyReader, form: ReplyForm) -> None:
    """What is left as content must not have a part of a call or of a thought."""
    entry = CALL_FORMATS[form.calls] if form.calls is not None else None
    thinking = (form.thinking.begin, form.thinking.end) if form.thinking is not None else ()
    for marker in (*((*entry.markers, *entry.strays) if entry else ()), *thinking):
        if any(marker in piece for piece in reading.content):
            raise Malformed(f"{marker} stands outside of a {'thought' if marker in thinking else 'call'}")
    last = reading.content[-1] if reading.content else ""
    for marker in (*(entry.markers if entry else ()), *thinking[:1]):
        if any(last.endswith(marker[:n]) for n in range(LEAST_MARKER, len(marker))):
            raise Malformed(f"the reply ends inside {marker}")


def _content(reading: ReplyReader, form: ReplyForm) -> str:
    if form.channels:
        return "\n".join(reading.content)
    if not reading.calls:
        text = "".join(reading.content)
        return text.lstrip("\n") if reading.thoughts else text
    return "\n".join(piece.strip("\n") for piece in reading.content if piece.strip())


def _reasoning(reading: ReplyReader) -> str | None:
    return "\n".join(reading.thoughts) if reading.thoughts else None


# ---- what a chat template asks for ----

ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"


def opens_thought(form: ReplyForm, lead: str) -> bool:
    """Whether a reply begins inside a thought. lead: what its own turn has before it: the header that the template
    writes, and the reply prefix."""
    if form.channels:
        return lead.rfind(ANALYSIS) > lead.rfind("<|end|>")
    return form.thinking is not None and lead.rfind(form.thinking.begin) > lead.rfind(form.thinking.end)


_TELLTALE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", (CHANNEL, MESSAGE)),
    ("deepseek_v3", (SEEK_SEP, "```json")),
    ("deepseek", (SEEK_SEP,)),
    ("mistral_v11", (MISTRAL, MISTRAL_ARGS)),
    ("mistral", (MISTRAL,)),
    ("kimi", (KIMI_ALL,)),
    ("minimax", (MINIMAX, INVOKE)),
    ("deepseek_v4", (DSML, "tool_calls>")),
    ("deepseek_v32", (DSML,)),
    ("seed", (SEED, PARAMETER)),
    ("qwen3_coder", (FUNCTION, PARAMETER)),
    ("glm", (CALL, ARGUMENT)),
    ("hermes", (CALL, "arguments")),
    ("hunyuan", ("<tool_calls>[", "arguments")),
    ("nemotron", ("<TOOLCALL>[", "arguments")),
    ("granite", ("<|tool_call|> followed by a JSON list",)),
    ("functools", ("functools[", "arguments")),
    ("cohere", ("<|START_ACTION|>", "tool_name")),
    ("llama3", (PYTHON, '"parameters"')),
)
"""What the templates of a format have in their text; the first that fits is it."""
_BARE = re.compile(r'(?<!\[)\{\s*\\?"name\\?"\s*:[^{}:]{0,80}\\?"(parameters|arguments)\\?"\s*:')
"""A call as a plain object, in the instructions of a template; one in a list has a marker of its own (Phi-4)."""
_OTHER_MARKER = re.compile(
    r"[<\[][^<>\[\]\s]{0,20}(?:tool|function)_?calls?[^<>\[\]\s]{0,20}[>\]]|<\|role_sep\|>",
    re.IGNORECASE,
)
"""Of a format that is not in CALL_FORMATS. GigaChat 3 writes a call as a message of the role 'function call', and ends
the name of a role by `<|role_sep|>` (vLLM 0.14's gigachat3 parser)."""


def recognised_form(template: str | None, special_tokens: Collection[str] = ()) -> ReplyForm:
    """How replies to a chat template are written, by the markers in its text.

    special_tokens: the tokenizer's, with the added ones: a format whose markers are tokens may have them only there.
    `calls` is None for a template that knows no tools, and for one whose call format is none of CALL_FORMATS.
    """
    if template is None:
        return ReplyForm()
    calls = _recognised_calls(template, special_tokens)
    if calls == "gpt_oss":
        return ReplyForm(calls)
    return ReplyForm(
        calls, next((_laid_out(t, template) for t in THINKING.values() if t.end in template), None)
    )


def _laid_out(thinking: Thinking, template: str) -> Thinking:
    """The markers with the line ends that the template writes at them (as `\\n` in a string, or as they are)."""
    inside = re.search(rf"{re.escape(thinking.begin)}(?:\\n|\n)", template)
    after = re.findall(rf"{re.escape(thinking.end)}((?:\\n|\n)*)", template)
    most = max(len(run.replace("\\n", "\n")) for run in after)
    return replace(thinking, inside="\n" if inside else "", after="\n" * most)


def _recognised_calls(template: str, special_tokens: Collection[str]) -> str | None:
    for name, markers in _TELLTALE:
        known = (m in template or (m == MISTRAL_ARGS and m in special_tokens) for m in markers)
        if all(known):
            return name
    bare = _BARE.search(template)
    if bare is None or _OTHER_MARKER.search(template) or not re.search(r"\btools\b", template):
        return None
    return "llama3" if bare[1] == "parameters" else "json"
