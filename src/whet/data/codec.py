"""The messages of an episode as tokens, and the policy's tokens as messages.

Tokens are only appended. What follows a reply is found by difference: the conversation is rendered with a mark in the
place of the reply, once as it ends and once with the new messages; what stands after the mark is what the template
writes after any reply of that shape. Where the two do not agree, nothing is appended: the conversation is rendered as a
whole and begins another strand (`Codec` in rollout/episode.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from whet.data.call_formats import CALL_FORMATS
from whet.data.calls import ReplyForm, opens_thought, read_reply, recognised_form
from whet.data.chat import (
    control_tokens,
    encode_rendered,
    lead,
    neutral,
    parted,
    render,
    rest_of,
    template_of,
    with_kwargs,
)
from whet.data.templates import MARK
from whet.data.timed import decoded
from whet.types import ConfigError, DataError, Json, Message, ReplyRefused, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

History = Literal["append", "template", "inline"]

_QUESTION = Message("user", "q")
_REPLY, _THOUGHT, _TOOL, _RESULT = "reply7x", "thought7x", "tool7x", "result7x"
"""Words to be found again."""


class MessageCodec:
    """By the tokenizer's chat template. `ends`: tokens that end a reply, the tokenizer's own is always one of them.

    history: append keeps every token; template renders the whole conversation for each reply as it would be in
    deployment, and appends where that changes nothing; inline keeps every token, and what is new continues the reply as
    plain text. calls: the format of tool calls, a key of CALL_FORMATS; None: as the template tells.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        ends: Collection[int] = (),
        history: History = "append",
        calls: str | None = None,
    ) -> None:
        self.tokenizer, self.history, self._calls = tokenizer, history, calls
        self._of = lru_cache(64)(self._with)
        self.ends = frozenset(ends) | ({tokenizer.eos_token_id} - {None})
        self._end_texts = [str(tokenizer.convert_ids_to_tokens(end)) for end in sorted(self.ends)]
        control = control_tokens(tokenizer)
        self._special, self._special_ids = set(control), frozenset(control.values())
        longest = sorted(self._special, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        template = template_of(tokenizer, tools=True)
        self.form = recognised_form(template, [*self._special, *tokenizer.get_added_vocab()])
        if calls is not None:
            self.form = ReplyForm(calls, None if CALL_FORMATS[calls].channels else self.form.thinking)

    def of(self, kwargs: Mapping[str, Json]) -> MessageCodec:
        """The codec of a task with variables of the chat template. DataError for one that the template lacks."""
        if not kwargs:
            return self
        return self._of(json.dumps(kwargs))

    def _with(self, kwargs: str) -> MessageCodec:
        tokenizer = with_kwargs(self.tokenizer, json.loads(kwargs))
        return MessageCodec(tokenizer, ends=self.ends, history=self.history, calls=self._calls)

    # -- to tokens

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """A whole conversation, up to where the policy speaks. A last message of the assistant is the beginning of its
        reply. ConfigError for tools whose calls could not be read."""
        if tools and self.form.calls is None:
            raise ConfigError(
                "There are tools, but the chat template uses no call format that whet knows: set "
                f"rollout.env.tool_format to one of {', '.join(CALL_FORMATS)}, or use a template with a known format "
                "(tokenizer.chat_template)."
            )
        return encode_rendered(self.tokenizer, [self._rendered(messages, tools)])[0]

    def encode_observation(
        self,
        existing: Sequence[int],
        conversation: Sequence[Message],
        count: int,
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """What follows `existing`, which ends with a reply, up to where the policy speaks again.

        conversation: all messages; the last `count` of them are new and follow the reply. None: what the template makes
        of the conversation does not begin with `existing`. ReplyRefused for a reply that the template does not render
        (one without text, for some); DataError for a template that joins a reply with the text after it.
        """
        if count < 1:
            raise DataError("A turn needs at least one new message.")
        try:
            return self._observed(existing, conversation, count, tools)
        except DataError as error:
            *before, reply = conversation[:-count]
            if self._renders(before, tools) and not self._renders([*before, reply], tools):
                raise ReplyRefused(str(error)) from error
            raise

    def _observed(
        self, existing: Sequence[int], conversation: Sequence[Message], count: int, tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        if self.history == "inline":
            said = "".join(message.content for message in neutral(self._special, conversation[-count:]))
            return encode_rendered(self.tokenizer, [said])[0]
        if self.history == "append":
            before, new = conversation[:-count], conversation[-count:]
            return self._after_reply(existing, before, new, tools)
        rest = rest_of(self._rendered(conversation, tools), self._text(existing))
        return None if rest is None else self._joined(existing, rest)

    def _after_reply(
        self,
        existing: Sequence[int],
        before: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """By difference. before: the conversation with the reply; a template may count its calls, or put the system
        message into the last message of the user."""
        *earlier, reply = before
        safe, tools = [*map(self._inline, neutral(self._special, [*before, *new]))], self._safe(tools)
        safe[len(earlier)] = _marked(safe[len(earlier)])
        base = render(self.tokenizer, safe[: len(before)], tools=tools, header=False)
        full = lead(self.tokenizer, safe, tools=tools)
        marks = base.count(MARK)
        if not marks or full.count(MARK) < marks:
            return None
        alone, after = base.split(MARK)[-1], full.split(MARK, marks)[-1]
        close, end = min(
            ((at, text) for text in self._end_texts if (at := alone.find(text)) >= 0),
            default=(len(alone), ""),
        )
        if not after.startswith(alone[: close + len(end)]):
            return None
        ended = bool(existing) and existing[-1] in self.ends
        begin = close if ended or reply.tool_calls else 0
        told = self._joined(existing, after[begin:])
        if told is None:
            raise DataError(
                "The chat template joins a reply with the text after it (its last token would change): "
                "add an end token after the reply in tokenizer.chat_template."
            )
        if not ended:
            return told
        return told[1:] if told[:1] == [existing[-1]] else None

    def _joined(self, existing: Sequence[int], text: str) -> list[int] | None:
        """The tokens of text that follows tokens, by difference. None where the tokenizer would take both for one."""
        closed = bool(existing) and existing[-1] in self._special_ids
        last = self._text(existing[-1:] if closed else existing[-4:])
        before = last if closed else parted(self._special, last) or "r"
        both, alone = encode_rendered(self.tokenizer, [before + text, before])
        if both[: len(alone)] != alone:
            token_ids = encode_rendered(self.tokenizer, [text])[0]
            return token_ids if token_ids and token_ids[0] in self._special_ids else None
        return both[len(alone) :]

    def _inline(self, reply: Message) -> Message:
        """A reply for a template that knows no field for thoughts: they stand in its text. The markers around them may
        be control tokens, so the reply is neutral already."""
        if reply.reasoning is None or self.form.thinking is None or self._writes_thoughts:
            return reply
        t = self.form.thinking
        said = f"{t.begin}{t.inside}{reply.reasoning}{t.inside}{t.end}{t.after}{reply.content}"
        return replace(reply, content=said, reasoning=None)

    @cached_property
    def _writes_thoughts(self) -> bool:
        """Whether the template writes the field for thoughts, of a reply or of one with a call."""
        tool = ToolSpec(_TOOL)
        call = ToolCall(_TOOL, {}, "c00010001")
        said = [Message("assistant", _REPLY, _THOUGHT), Message("assistant", "", _THOUGHT, (call,))]
        return any(
            _THOUGHT in self._tried([_QUESTION, reply], [tool] * bool(reply.tool_calls)) for reply in said
        )

    def _rendered(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """The text that the reply follows."""
        safe = [*map(self._inline, neutral(self._special, messages))]
        return lead(self.tokenizer, safe, tools=self._safe(tools))

    def _renders(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> bool:
        safe = [*map(self._inline, neutral(self._special, messages))]
        try:
            render(self.tokenizer, safe, tools=self._safe(tools), header=False)
        except DataError:
            return False
        return True

    def _safe(self, tools: Sequence[ToolSpec]) -> list[ToolSpec]:
        """Descriptions come from servers, too: they become no control tokens either."""
        return [ToolSpec.from_json(parted(self._special, tool.to_json())) for tool in tools]

    # -- and back

    def parse_reply(
        self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = (), begun: str = ""
    ) -> Message:
        """A sampled reply, without its end token. Its calls are read if there are tools. begun: what the prompt has of
        it."""
        form = self.form if tools or self.form.channels else replace(self.form, calls=None)
        if form == ReplyForm():
            said = decoded(self.tokenizer, token_ids, skip_special_tokens=True)
            return Message("assistant", begun + said)
        opened = opens_thought(form, self._header)
        reply = read_reply(begun + self._text(token_ids), form, tools, opened=opened)
        thought = None if reply.reasoning is None else self._control.sub("", reply.reasoning)
        return replace(reply, content=self._control.sub("", reply.content), reasoning=thought)

    @cached_property
    def _header(self) -> str:
        """What the template writes before a reply. Nothing in the conversation is part of it."""
        without, whole = (render(self.tokenizer, [_QUESTION], header=header) for header in (False, True))
        return whole.removeprefix(without)

    def _text(self, token_ids: Sequence[int]) -> str:
        return decoded(self.tokenizer, token_ids)

    # -- at the start

    def check_template(self) -> Findings:
        """What the template does to a conversation. ConfigError for a tokenizer without a template; DataError for one
        that refuses a second turn, or joins a reply with the text after it."""
        reply = self._inline(Message("assistant", _REPLY, reasoning=_THOUGHT))
        first, later = [_QUESTION, reply], Message("user", "q")
        alone = self._plain(first, header=False)
        whole = self._plain([*first, later])
        existing = self.encode_prompt([_QUESTION])
        appended = self._after_reply(existing, first, [later], ())
        tool = ToolSpec(_TOOL, "d", {"type": "object", "properties": {"x": {"type": "string"}}})
        return Findings(
            appends=appended is not None,
            replies=_REPLY in whole,
            thoughts=None if _THOUGHT not in alone else _THOUGHT in whole,
            ends=any(end in alone.split(_REPLY)[-1] for end in self._end_texts),
            tools=_TOOL in self._tried([_QUESTION], [tool]),
            results=_RESULT in self._tried([*self._called(tool)], [tool]),
            calls=self.form.calls,
        )

    def _called(self, tool: ToolSpec) -> list[Message]:
        """A conversation with a call and its result."""
        call = ToolCall(tool.name, {"x": "y"}, "c00010001")
        result = Message("tool", _RESULT, tool_call_id=call.id, name=tool.name)
        return [_QUESTION, Message("assistant", "", tool_calls=(call,)), result]

    def _plain(self, messages: Sequence[Message], *, header: bool = True) -> str:
        return render(self.tokenizer, messages, header=header)

    def _tried(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """What the template makes of tools; nothing if it refuses them."""
        try:
            return render(self.tokenizer, messages, tools=tools, header=messages[-1].role != "assistant")
        except DataError:
            return ""


@dataclass(frozen=True)
class Findings:
    """What a chat template does to a conversation of several turns."""

    appends: bool
    """What follows a reply can be told without rendering the history again."""
    replies: bool
    """A reply stands in the history."""
    thoughts: bool | None
    """So does what was thought before it. None: the template writes no thoughts."""
    ends: bool
    """An end token closes a reply; else the next message's first token does."""
    tools: bool
    """The policy is told of its tools."""
    results: bool
    """And of what they answer."""
    calls: str | None
    """Format of the calls."""

    def said(self, history: History) -> list[str]:
        """For people, one sentence each."""
        out = []
        if history == "inline":
            out.append("it renders only the prompt; what follows a reply is appended as plain text")
        elif not self.appends:
            out.append("it rewrites earlier turns, so every turn begins a new strand (rollout.env.history)")
        elif self.thoughts is False and history == "append":
            out.append(
                "it drops earlier thoughts, and rollout.env.history=append keeps them: a server with this template "
                "would show the policy a different history than the one it is trained with "
                "(rollout.env.history=template trains with the server's)"
            )
        elif history == "append":
            out.append("later turns are appended; earlier turns do not change")
        if not self.replies:
            out.append("it leaves earlier replies out of the history")
        if not self.ends:
            out.append("a reply has no end token; it ends at the first token of the next message")
        if self.tools and self.calls is None:
            out.append(
                "it lists tools, in a call format that whet does not know: set rollout.env.tool_format"
            )
        if not self.tools:
            out.append("it does not show tools to the policy")
        elif not self.results:
            out.append("it rejects or drops tool results")
        return out


def _marked(reply: Message) -> Message:
    """A reply of the same shape whose last text is the mark."""
    if not reply.tool_calls:
        return Message("assistant", MARK)
    calls = [ToolCall(c.name, {"x": "y"}, c.id) for c in reply.tool_calls[:-1]]
    last = reply.tool_calls[-1]
    return Message("assistant", "", tool_calls=(*calls, ToolCall(last.name, {"x": MARK}, last.id)))
