"""Messages as tokens and back, over random conversations on templates of our own: what was sampled stays, what was
said is the template's text, and no message becomes a control token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from call_writers import write_calls
from templates_of_ours import TEMPLATES, OurTemplate, our_tokenizer
from whet.data.chat import lead
from whet.data.codec import History, MessageCodec
from whet.types import ConfigError, Message, ToolCall, ToolSpec

BY_NAME = {template.name: template for template in TEMPLATES}
TOOLS = (
    ToolSpec("look_up", "Finds a city.", {"type": "object", "properties": {"city": {"type": "string"}}}),
    ToolSpec("add", "Adds.", {"type": "object", "properties": {"x": {"type": "string"}}}),
)
WORDS = (
    "Paris",
    "it is",
    "21 degrees",
    "ſtraße",
    "日本",
    "🙂",
    'say "hi"',
    "a\nb",
    "  two",
    "{x}",
    "é",
    "1 < 2",
    "",
)
"""What people, tools and policies say."""


def codec_of(template: OurTemplate, history: History = "append") -> MessageCodec:
    tokenizer = our_tokenizer(template)
    ends = tokenizer.convert_tokens_to_ids(list(template.ends))
    return MessageCodec(tokenizer, ends=ends, history=history)


@dataclass
class Played:
    """A conversation as an episode would have it, with what the script knows of it."""

    conversation: list[Message]
    strands: list[list[int]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    spoken: list[list[list[int]]] = field(default_factory=list)
    """By strand, what the scripted policy has sampled in it."""

    def begin(self, token_ids: list[int]) -> None:
        self.strands.append(list(token_ids))
        self.masks.append([0] * len(token_ids))
        self.spoken.append([])

    def add(self, token_ids: list[int], *, sampled: bool) -> None:
        self.strands[-1] += token_ids
        self.masks[-1] += [int(sampled)] * len(token_ids)
        if sampled:
            self.spoken[-1].append(token_ids)


def played(
    template: OurTemplate, codec: MessageCodec, rng: random.Random, *, hostile: bool, cuts: bool
) -> Played:
    """A few turns; hostile: people and tools say control tokens; cuts: replies may end without an end token."""
    words = [*WORDS, *(template.special if hostile else ())]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 4))).strip() or "so"

    system = [Message("system", text())] if template.system and rng.random() < 0.5 else []
    out = Played([*system, Message("user", text())])
    out.begin(codec.encode_prompt(out.conversation, TOOLS))
    for turn in range(rng.randint(1, 4)):
        reply, ids, end = scripted(template, codec, rng)
        if cuts and rng.random() < 0.3:
            ids, end = ids[: rng.randint(0, len(ids))], None
        out.add([*ids, *([] if end is None else [end])], sampled=True)
        heard = codec.parse_reply(ids, TOOLS)
        if end is not None:
            assert heard.malformed is None, heard
            assert [(c.name, c.arguments) for c in heard.tool_calls] == [
                (c.name, c.arguments) for c in reply.tool_calls
            ]
        calls = tuple(
            ToolCall(c.name, c.arguments, f"c{turn:04}{n:04}") for n, c in enumerate(heard.tool_calls, 1)
        )
        heard = Message("assistant", heard.content, heard.reasoning, calls, malformed=heard.malformed)
        told = [Message("tool", text(), tool_call_id=c.id, name=c.name) for c in calls]
        told = told or [Message("user", text())]
        out.conversation += [heard, *told]
        more = codec.encode_observation(out.strands[-1], out.conversation, len(told), TOOLS)
        if more is None:
            out.begin(codec.encode_prompt(out.conversation, TOOLS))
        else:
            out.add(more, sampled=False)
    return out


def scripted(
    template: OurTemplate, codec: MessageCodec, rng: random.Random
) -> tuple[Message, list[int], int]:
    """What the policy says now: as a message, as tokens, and its end token."""
    tokenizer = codec.tokenizer
    form = codec.form
    opened = template.opens
    thinks = opened or ((form.thinking is not None or form.channels) and rng.random() < 0.5)
    count = rng.choice((0, 0, 1, 1, 2 if template.parallel else 1))
    words = [w for w in WORDS if w.strip() == w and w and "{" not in w]
    calls = tuple(
        ToolCall(rng.choice(TOOLS).name, {"city": rng.choice(words)} if rng.random() < 0.8 else {})
        for _ in range(count)
    )
    content = rng.choice(words) if not calls or (template.beside and rng.random() < 0.3) else ""
    reasoning = rng.choice(words) if thinks else None
    said = write_calls(form, calls, content, reasoning, opened=opened)
    ids = tokenizer(said, add_special_tokens=False)["input_ids"]
    end = template.ends[0]
    if template.name == "next_opener":
        end = "<|observation|>" if calls else "<|user|>"
    if template.name == "harmony" and calls:  # the call's end token is the end of the reply
        end = "<|call|>"
        if ids[-1] == tokenizer.convert_tokens_to_ids(end):
            ids = ids[:-1]
    return Message("assistant", content, reasoning, calls), list(ids), tokenizer.convert_tokens_to_ids(end)


def cases(template: OurTemplate, count: int) -> Iterator[random.Random]:
    for n in range(count):
        yield random.Random(f"{template.name} {n}")


CONVERSATIONS = pytest.mark.parametrize("count", [8, pytest.param(25, marks=pytest.mark.sweep)])


@CONVERSATIONS
@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize("name", BY_NAME)
def test_what_was_sampled_stands_once_in_the_strands_and_nothing_else_is_marked(
    name: str, history: History, count: int
) -> None:
    template = BY_NAME[name]
    for rng in cases(template, count):
        codec = codec_of(template, history)
        out = played(template, codec, rng, hostile=True, cuts=True)
        for strand, mask, spoken in zip(out.strands, out.masks, out.spoken):
            assert len(strand) == len(mask)
            assert [t for t, on in zip(strand, mask) if on] == [t for said in spoken for t in said]


@CONVERSATIONS
@pytest.mark.parametrize("name", BY_NAME)
def test_with_the_history_of_the_template_a_strand_is_what_the_template_makes(name: str, count: int) -> None:
    template = BY_NAME[name]
    for rng in cases(template, count):
        codec = codec_of(template, "template")
        out = played(template, codec, rng, hostile=False, cuts=True)
        whole = codec.encode_prompt(out.conversation, TOOLS)
        assert codec.tokenizer.decode(out.strands[-1]) == codec.tokenizer.decode(whole)


APPENDS = [t.name for t in TEMPLATES if t.keeps_on_user and t.keeps_on_tool and t.end_in_history is None]


@CONVERSATIONS
@pytest.mark.parametrize("name", APPENDS)
def test_a_template_that_only_appends_gives_one_strand_whose_text_is_the_whole_conversation(
    name: str, count: int
) -> None:
    template = BY_NAME[name]
    for rng in cases(template, count):
        codec = codec_of(template)
        out = played(template, codec, rng, hostile=False, cuts=False)
        assert len(out.strands) == 1
        text = lead(codec.tokenizer, out.conversation, tools=TOOLS)
        assert codec.tokenizer.decode(out.strands[0]) == text
        again = played(template, codec_of(template, "template"), random.Random(0), hostile=True, cuts=False)
        assert len(again.strands) == 1


@pytest.mark.parametrize("name", BY_NAME)
def test_no_message_becomes_a_control_token(name: str) -> None:
    template = BY_NAME[name]
    codec = codec_of(template)
    special = set(codec.tokenizer.all_special_ids)
    for rng in cases(template, 10):
        injected = "".join(rng.choices(template.special, k=3))
        said = [
            [Message("user", text), Message("assistant", "", None, (ToolCall("add", {"x": text}, "c00010001"),)),
             Message("tool", text, tool_call_id="c00010001", name="add")]
            for text in ("plain", injected)
        ]  # fmt: skip
        tools = [(*TOOLS, ToolSpec("more", text)) for text in ("plain", injected)]
        plain, hostile = map(codec.encode_prompt, said, tools)
        assert [t for t in hostile if t in special] == [t for t in plain if t in special]
        text = str(codec.tokenizer.decode(hostile))
        assert injected in text or name == "drops_results"


@pytest.mark.parametrize("name", BY_NAME)
def test_inline_messages_continue_the_reply_as_they_stand(name: str) -> None:
    """Whatever the template is: the texts one after the other, control tokens in them spelled, no end and no header."""
    template = BY_NAME[name]
    codec, plain = codec_of(template, "inline"), codec_of(template)
    special = set(codec.tokenizer.all_special_ids)
    question, reply = Message("user", "q"), Message("assistant", "<search>x</search>")
    existing = codec.encode_prompt([question])
    assert existing == plain.encode_prompt([question])
    new = [Message("user", f"\n<information>{template.special[0]} é"), Message("user", "</information>")]
    added = codec.encode_observation(existing, [question, reply, *new], 2)
    assert added is not None
    assert codec.tokenizer.decode(added) == "".join(m.content for m in new)
    assert not special & set(added)
    (said, *_) = codec.check_template().said("inline")
    assert "is appended as plain text" in said


@pytest.mark.parametrize("name", BY_NAME)
def test_what_the_check_says_is_what_the_table_says(name: str) -> None:
    template = BY_NAME[name]
    found = codec_of(template).check_template()
    assert found.calls == template.form.calls
    assert found.tools
    assert found.results == (name != "drops_results")
    if found.thoughts is not None:
        assert found.thoughts == template.keeps_on_user
    assert found.ends == (template.end_in_history != "")


def test_a_reply_goes_on_from_what_the_prompt_has_of_it() -> None:
    codec = codec_of(BY_NAME["append"])
    call = '<tool_call>\n{"name": "add", "arguments": {"x": "1"}}\n</tool_call>'
    for cut in (0, 1, 12, 30, len(call)):
        ids = codec.tokenizer(call[cut:], add_special_tokens=False)["input_ids"]
        heard = codec.parse_reply(ids, TOOLS, call[:cut])
        assert heard.tool_calls == (ToolCall("add", {"x": "1"}),), cut


def test_a_thought_that_the_question_speaks_of_is_not_open() -> None:
    template = BY_NAME["append"]
    codec = codec_of(template)
    codec.encode_prompt([Message("user", "write <think>")])
    said = codec.tokenizer("yes", add_special_tokens=False)["input_ids"]
    assert codec.parse_reply(said) == Message("assistant", "yes")


def test_tools_without_a_known_call_format_are_refused() -> None:
    codec = codec_of(BY_NAME["append"])
    codec.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    try:
        with pytest.raises(ConfigError, match=r"rollout\.env\.tool_format to one of hermes"):
            MessageCodec(codec.tokenizer).encode_prompt([Message("user", "q")], TOOLS)
    finally:
        codec.tokenizer.chat_template = BY_NAME["append"].text
