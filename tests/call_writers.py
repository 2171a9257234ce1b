"""Replies as policies write them, a writer for each call format: what the readers of `whet.data.calls` read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

from whet.data.call_formats import (
    BEGIN,
    CALL,
    CALL_END,
    CALL_FORMATS,
    CHANNEL,
    COHERE_LIST,
    CONSTRAIN,
    DSML_BLOCKS,
    DSML_TAGS,
    FUNCTION,
    FUNCTION_END,
    FUNCTOOLS_LIST,
    GLM_TAGS,
    GRANITE_LIST,
    HUNYUAN_LIST,
    KIMI,
    KIMI_ALL,
    KIMI_ALL_END,
    KIMI_ARGS,
    KIMI_END,
    KIMI_ID,
    MESSAGE,
    MINIMAX,
    MINIMAX_END,
    MINIMAX_TAGS,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_LIST,
    NEMOTRON_LIST,
    PYTHON,
    SEED,
    SEED_END,
    SEED_TAGS,
    SEEK,
    SEEK_ALL,
    SEEK_ALL_END,
    SEEK_END,
    SEEK_SEP,
    XML_TAGS,
    ArgumentTags,
    ListedCalls,
    invoke_of,
)
from whet.data.calls import ANALYSIS, ReplyForm, has_thoughts, read_reply
from whet.types import Json, Message, ToolCall, ToolSpec


def write_json(value: Json) -> str:
    """As chat templates write it (transformers' tojson). ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def write_calls(
    form: ReplyForm,
    calls: Sequence[ToolCall],
    content: str = "",
    reasoning: str | None = None,
    *,
    opened: bool = False,
) -> str:
    """The reply that a policy of this form would write, without its end token: what `read_reply` reads.

    Errors: ValueError for what the form cannot say: reasoning or calls that it has no markers for, a marker where it
    would be read as one, several calls or content beside them in a format that has one call alone.
    """
    text = _written(form, calls, content, reasoning)
    if opened:
        text = _after_opening(text, form, reasoning)
    told = read_reply(text, form, _all_texts(calls), opened=opened)
    given = Message("assistant", content, reasoning, tuple(calls))
    if told.malformed is not None or _comparable(told) != _comparable(given):
        why = told.malformed or "it would be parsed as something else"
        raise ValueError(f"The call format {form.calls!r} cannot express this reply ({why}): {text[:200]!r}")
    return text


def _written(form: ReplyForm, calls: Sequence[ToolCall], content: str, reasoning: str | None) -> str:
    if (calls and form.calls is None) or (reasoning is not None and not has_thoughts(form)):
        raise ValueError(f"The form {form} has no markers for {'calls' if calls else 'reasoning'}.")
    entry = CALL_FORMATS[form.calls] if form.calls is not None else None
    called = WRITERS[form.calls](calls) if form.calls and calls else ""
    if entry is not None and entry.channels:
        return write_harmony(called, content, reasoning)
    said = content + (GAPS.get(form.calls or "", "") if content and called else "") + called
    if reasoning is None or form.thinking is None:
        return said
    thinking = form.thinking
    return (
        f"{thinking.begin}{thinking.inside}{reasoning}{thinking.inside}{thinking.end}{thinking.after}{said}"
    )


def _after_opening(text: str, form: ReplyForm, reasoning: str | None) -> str:
    if reasoning is None:
        raise ValueError(
            "A reply that begins inside a thought has reasoning; give reasoning='' for an empty thought."
        )
    opening = ANALYSIS if form.thinking is None else form.thinking.begin + form.thinking.inside
    return text.removeprefix(opening)


def _all_texts(calls: Sequence[ToolCall]) -> list[ToolSpec]:
    """The tools, with arguments that may be any text: types are their real schemas' matter."""
    keys: dict[str, dict[str, Json]] = {call.name: {} for call in calls}
    for call in calls:
        keys[call.name] |= {key: {"type": "string"} for key in call.arguments}
    return [ToolSpec(name, "", {"properties": properties}) for name, properties in keys.items()]


def _comparable(message: Message) -> object:
    """All that a form must not lose."""
    calls = [
        (call.name, [(key, as_text(value)) for key, value in call.arguments.items()])
        for call in message.tool_calls
    ]
    reasoning = message.reasoning.strip("\n") if message.reasoning is not None else None
    return message.content.strip("\n"), reasoning, calls


def _as_object(call: ToolCall, key: str, named: str = "name") -> str:
    return f'{{"{named}": {write_json(call.name)}, "{key}": {write_json(call.arguments)}}}'


def _tagged(call: ToolCall, tags: ArgumentTags) -> str:
    (key, key_end), (value, value_end) = tags.key, tags.value
    said = {True: '" string="true"', False: '" string="false"'} if tags.typed else {True: "", False: ""}
    return "".join(
        f"{key}{name}{said[isinstance(given, str)]}{key_end}{value}{as_text(given)}{value_end}\n"
        for name, given in call.arguments.items()
    )


def as_text(value: Json) -> str:
    """An argument in the formats without quotes: a text as it stands, everything else as JSON."""
    return value if isinstance(value, str) else write_json(value)


def _write_hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{CALL}\n{_as_object(call, 'arguments')}\n{CALL_END}" for call in calls)


def _write_xml(calls: Sequence[ToolCall], tags: ArgumentTags, around: tuple[str, str]) -> str:
    begin, end = around
    return "\n".join(f"{begin}\n{FUNCTION}{c.name}>\n{_tagged(c, tags)}{FUNCTION_END}\n{end}" for c in calls)


def _write_glm(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{CALL}{call.name}\n{_tagged(call, GLM_TAGS)}{CALL_END}" for call in calls)


def _write_invokes(calls: Sequence[ToolCall], tags: ArgumentTags, block: tuple[str, str]) -> str:
    each = (f'{invoke_of(tags)}{c.name}">\n{_tagged(c, tags)}{tags.end}\n' for c in calls)
    return f"{block[0]}\n{''.join(each)}{block[1]}"


def _write_list(calls: Sequence[ToolCall], listed: ListedCalls) -> str:
    each = (_as_object(call, listed.arguments, listed.name) for call in calls)
    return f"{listed.begin}[{', '.join(each)}]{listed.end}"


def _write_mistral_v11(calls: Sequence[ToolCall]) -> str:
    return "".join(f"{MISTRAL}{c.name}{MISTRAL_ARGS}{write_json(c.arguments)}" for c in calls)


def _write_deepseek_v3(calls: Sequence[ToolCall]) -> str:
    each = (
        f"{SEEK}function{SEEK_SEP}{c.name}\n```json\n{write_json(c.arguments)}\n```{SEEK_END}" for c in calls
    )
    return SEEK_ALL + "\n".join(each) + SEEK_ALL_END


def _write_deepseek(calls: Sequence[ToolCall]) -> str:
    each = (f"{SEEK}{c.name}{SEEK_SEP}{write_json(c.arguments)}{SEEK_END}" for c in calls)
    return SEEK_ALL + "".join(each) + SEEK_ALL_END


def _write_kimi(calls: Sequence[ToolCall]) -> str:
    ids = (c.id if KIMI_ID.fullmatch(c.id) else f"functions.{c.name}:{n}" for n, c in enumerate(calls))
    each = (f"{KIMI}{id}{KIMI_ARGS}{write_json(c.arguments)}{KIMI_END}" for id, c in zip(ids, calls))
    return KIMI_ALL + "".join(each) + KIMI_ALL_END


def _write_llama(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_as_object(call, "parameters") for call in calls)


def _write_json(calls: Sequence[ToolCall]) -> str:
    return "\n".join(_as_object(call, "arguments") for call in calls)


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


Writer = Callable[[Sequence[ToolCall]], str]

WRITERS: dict[str, Writer] = {
    "hermes": _write_hermes,
    "qwen3_coder": partial(_write_xml, tags=XML_TAGS, around=(CALL, CALL_END)),
    "seed": partial(_write_xml, tags=SEED_TAGS, around=(SEED, SEED_END)),
    "llama3": _write_llama,
    "mistral": partial(_write_list, listed=MISTRAL_LIST),
    "mistral_v11": _write_mistral_v11,
    "gpt_oss": _write_harmony,
    "glm": _write_glm,
    "deepseek_v3": _write_deepseek_v3,
    "deepseek": _write_deepseek,
    "kimi": _write_kimi,
    "minimax": partial(_write_invokes, tags=MINIMAX_TAGS, block=(MINIMAX, MINIMAX_END)),
    "deepseek_v32": partial(_write_invokes, tags=DSML_TAGS, block=DSML_BLOCKS[0]),
    "deepseek_v4": partial(_write_invokes, tags=DSML_TAGS, block=DSML_BLOCKS[1]),
    "hunyuan": partial(_write_list, listed=HUNYUAN_LIST),
    "nemotron": partial(_write_list, listed=NEMOTRON_LIST),
    "granite": partial(_write_list, listed=GRANITE_LIST),
    "functools": partial(_write_list, listed=FUNCTOOLS_LIST),
    "cohere": partial(_write_list, listed=COHERE_LIST),
    "json": _write_json,
}

GAPS = {
    "hermes": "\n",
    "qwen3_coder": "\n\n",
    "seed": "\n",
    "llama3": PYTHON,
    "glm": "\n",
    "minimax": "\n",
    "deepseek_v32": "\n\n",
    "deepseek_v4": "\n\n",
}
"""Between content and calls, where there is something."""
