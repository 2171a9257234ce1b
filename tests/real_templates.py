"""Chat templates that a user gives (`make sweep TEMPLATES=folder`), each with a tokenizer that is made up for it.

A template alone does not say which of its markers are tokens of their own: here all are that look like it, and what
ends a reply is found by rendering one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from talks import DAY, Subject
from templates_of_ours import KINDS
from whet.data.calls import THINKING, opens_thought, recognised_form
from whet.data.chat import render, set_day
from whet.types import DataError, Json, Message, ToolCall, ToolSpec

_TOKEN = re.compile(
    r"<[|｜][^<>\s'\"|｜{}]{1,40}[|｜]>|<\|[a-zA-Z_:/]{1,40}>|<[a-zA-Z_:/]{1,40}\|>|\[/?[A-Z]{3}[A-Z_]{0,30}\]"
    r"|</?(?:s|bos|eos|sep|seed:[a-z_]+)>|<(?:start|end)_of_[a-z_]+>|\]~!?b[\]\[]|\[e~\["
)
_MARKER = re.compile(r"</?(?:think|tool_call|minimax:tool_call)>")
QUESTION, SAID = Message("user", "q7x"), "said7x"
TOOL = ToolSpec("tool7x", "d", {"type": "object", "properties": {"x": {"type": "string"}}})


@dataclass(frozen=True)
class Found:
    """A template in the folder."""

    name: str
    text: str
    special: dict[str, str]
    """Its bos_token and eos_token, where they are known."""


def templates_in(folder: Path) -> Iterator[Found]:
    """Of *.jinja and tokenizer_config.json."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".jinja":
            yield Found(str(path.relative_to(folder)), path.read_text(), {})
        elif path.name == "tokenizer_config.json":
            config = json.loads(path.read_text())
            name, jinja = path.parent.relative_to(folder), config.get("chat_template")
            named = {"default": jinja} if isinstance(jinja, str) else {}
            named |= {t["name"]: t["template"] for t in jinja} if isinstance(jinja, list) else {}
            tokens = {key: _content(config.get(key)) for key in ("bos_token", "eos_token")}
            special = {key: token for key, token in tokens.items() if token}
            yield from (Found(f"{name}, {key}", text, special) for key, text in named.items())


def _content(token: Json) -> str:
    return str(token["content"] if isinstance(token, dict) else token or "")


def subject_of(found: Found, kind: str = "byte pairs") -> Subject:
    """DataError for a template that refuses a question and its answer."""
    bos = found.special.get("bos_token", "<|bos7x|>")
    eos = found.special.get("eos_token", "<|eos7x|>")
    special = list(dict.fromkeys([bos, eos, *_TOKEN.findall(found.text)]))
    core = KINDS[kind](["<pad>", *special])
    markers = sorted(set(_MARKER.findall(found.text)) - set(special))
    core.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token=eos,
        bos_token=bos,
        extra_special_tokens=[t for t in special if t not in (bos, eos)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = found.text
    set_day(tokenizer, DAY.date())
    form = recognised_form(found.text, special)
    plain, calling = (_end(tokenizer, called=called) for called in (False, True))
    if "eos_token" not in found.special:
        tokenizer.eos_token = plain
    header = _header(tokenizer)
    thinking = form.thinking or THINKING["<think>"]
    call = ToolCall(TOOL.name, {"x": "y"}, "c00010001")
    return Subject(
        name=f"{found.name}, {kind}",
        tokenizer=tokenizer,
        form=form,
        ends=tuple(dict.fromkeys([plain, calling])),
        end_of=lambda reply: calling if reply.tool_calls else plain,
        opens=opens_thought(form, header),
        system=_says(tokenizer, [Message("system", SAID), QUESTION], SAID),
        parallel=_says(tokenizer, _called(call, ToolCall("tool8x", {}, "c00010002")), "tool8x"),
        beside=_says(tokenizer, _called(call, content=SAID), SAID) and form.calls != "json",
        appends=False,
        exact=kind != "spaced",
        tools=form.calls is not None and _says(tokenizer, _called(call), "tool7x"),
        thinks=thinking.end not in header,
        writes_thoughts=any(_thought(tokenizer, calls) for calls in ((), (call,))),
    )


def _thought(tokenizer: PreTrainedTokenizerFast, calls: tuple[ToolCall, ...]) -> bool:
    """Whether the template writes the field of thoughts of a last reply."""
    reply = Message("assistant", "" if calls else "a", SAID, calls).to_json()
    tools = [TOOL.to_json()] if calls else None
    try:
        told = tokenizer.apply_chat_template([QUESTION.to_json(), reply], tools=tools, tokenize=False)
    except Exception:  # a template is foreign code
        return False
    return SAID in str(told)


def _called(*calls: ToolCall, content: str = "") -> list[Message]:
    results = [Message("tool", "r7x", tool_call_id=c.id, name=c.name) for c in calls]
    return [QUESTION, Message("assistant", content, tool_calls=calls), *results]


def _says(tokenizer: PreTrainedTokenizerFast, messages: list[Message], text: str) -> bool:
    """Whether the template takes these messages and writes this of them."""
    try:
        return text in render(tokenizer, messages, tools=[TOOL])
    except DataError:
        return False


def _header(tokenizer: PreTrainedTokenizerFast) -> str:
    without, whole = (render(tokenizer, [QUESTION], header=header) for header in (False, True))
    return whole.removeprefix(without)


def _end(tokenizer: PreTrainedTokenizerFast, *, called: bool) -> str:
    """What ends a reply that is the last message; where nothing does, what begins the next one."""
    call = ToolCall(TOOL.name, {"x": SAID}, "c00010001")
    reply = Message("assistant", "", tool_calls=(call,)) if called else Message("assistant", SAID)
    result = Message("tool", "r", tool_call_id=call.id, name=call.name) if called else QUESTION
    for messages in ([QUESTION, reply], [QUESTION, reply, result]):
        try:
            rendered = render(tokenizer, messages, tools=[TOOL] if called else (), header=False)
        except DataError:
            if not called:
                raise
            continue
        after = rendered.rpartition(SAID)[2] if SAID in rendered else ""
        tokens = [t for t in tokenizer.all_special_tokens if t in after and t not in _NO_END]
        if tokens:
            return min(tokens, key=after.index)
    return str(tokenizer.eos_token) if not called else _end(tokenizer, called=False)


_NO_END = (
    "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|END_RESPONSE|>", "<|END_ACTION|>", "<tool_call|>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tools_suffix|>", "<|\"|>", "<|tool_call:end|>", "<|content|>",
)  # fmt: skip
"""Ends of calls and of parts of a reply, which goes on after them."""
