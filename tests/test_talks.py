"""Whatever is said, in whatever tokens: a strand has what the policy sampled, marked, and what the template writes.

Four hundred random conversations, a hundred thousand in `make sweep` (half an hour of one core), on our own templates
with three kinds of tokenizers; and in the sweep on the real templates of a folder (TEMPLATES=folder), two hundred on
each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import talks
from real_templates import subject_of, templates_in
from talks import Line, Script, search, smallest, tried
from templates_of_ours import KINDS, TEMPLATES, OurTemplate, our_subject
from whet.data.chat import encode_texts, lead
from whet.data.codec import History, MessageCodec
from whet.types import ConfigError, DataError, Message, ToolCall, ToolSpec

FEW, MANY = 6, 700
REAL = 50


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_random_conversations(template: OurTemplate, kind: str, count: int) -> None:
    for history in ("append", "template"):
        found = search(our_subject(template, kind), history, range(count))
        assert found is None, found


@pytest.mark.parametrize(
    ("name", "kind", "script"),
    [
        ("harmony", "byte pairs", 94),
        ("harmony", "pieces", 349),
        ("keeps_thoughts", "byte pairs", 220),
        ("xml_calls", "byte pairs", 585),
    ],
)
def test_a_cut_reply_that_the_template_happens_to_continue_begins_a_strand(
    name: str, kind: str, script: int
) -> None:
    (template,) = (t for t in TEMPLATES if t.name == name)
    assert search(our_subject(template, kind), "template", [script]) is None


@pytest.mark.sweep
def test_random_conversations_on_real_templates() -> None:
    folder = os.environ.get("TEMPLATES")
    if not folder:
        pytest.skip("no real templates: give make sweep TEMPLATES=folder (*.jinja, tokenizer_config.json)")
    found, tried = [], 0
    for each in templates_in(Path(folder).expanduser()):
        try:
            subjects = [subject_of(each, kind) for kind in ("byte pairs", "spaced")]
        except (DataError, ConfigError):
            continue  # it refuses a question and its answer
        tried += 1
        histories: tuple[History, ...] = ("append", "template")
        found += [search(s, history, range(REAL)) for s in subjects for history in histories]
    assert tried, f"{folder} has no chat template that takes a question and its answer"
    assert not any(found), "\n\n".join(text for text in found if text)


# ---------------------------------------------------------------- what is wrong is found


class Short(MessageCodec):
    """Loses the last token of what it appends."""

    def encode_observation(self, *given: object, **named: object) -> list[int] | None:
        more = super().encode_observation(*given, **named)  # type: ignore[arg-type]
        return more[:-1] if more else more


class Closed(MessageCodec):
    """Does not close a reply that was cut."""

    def encode_observation(
        self,
        existing: Sequence[int],
        conversation: Sequence[Message],
        count: int,
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        more = super().encode_observation(existing, conversation, count, tools)
        return more[1:] if more and existing[-1] not in self.ends else more


class Open(MessageCodec):
    """Takes what is said for control tokens."""

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return encode_texts(self.tokenizer, [lead(self.tokenizer, messages, tools=tools)])[0]


class Trimming(MessageCodec):
    """Strips the arguments of calls (as vLLM 0.24 did)."""

    def parse_reply(self, *given: object, **named: object) -> Message:
        reply = super().parse_reply(*given, **named)  # type: ignore[arg-type]
        stripped = (
            {k: v.strip() if isinstance(v, str) else v for k, v in c.arguments.items()}
            for c in reply.tool_calls
        )
        calls = [replace(c, arguments=a) for c, a in zip(reply.tool_calls, stripped)]
        return replace(reply, tool_calls=tuple(calls))


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Short, "a strand is the text that the template makes"),
        (Closed, "a strand has the control tokens of the template"),
        (Open, "control tokens are the template's alone"),
        (Trimming, "its calls"),
    ],
)
def test_what_is_wrong_is_found_and_made_small(
    broken: type[MessageCodec], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = talks.codec_of

    def codec_of(subject: talks.Subject, history: History) -> MessageCodec:
        codec = right(subject, history)
        codec.__class__ = broken
        return codec

    monkeypatch.setattr(talks, "codec_of", codec_of)
    subject = our_subject(next(t for t in TEMPLATES if t.name == "append"), "byte pairs")
    found = search(subject, "append", range(200))
    assert found is not None
    assert law in found, found
    assert len(found) < 3000


def test_a_script_with_a_fault_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(subject: object, script: Script, history: object) -> str | None:
        return "law (x)" if any("bad" in text for line in script.lines for text in line.told) else None

    monkeypatch.setattr(talks, "tried", wrong)
    call = ToolCall("f", {"a": 1})
    lines = tuple(
        Line(Message("assistant", "so", None, (call,)), (text,), cut=3, seed=4) for text in ("good", "so bad")
    )
    subject = our_subject(TEMPLATES[0], "byte pairs")
    script = Script("what?", "system", (ToolSpec("f", "does"),), 3, lines)
    (line,) = smallest(subject, script, "append").lines
    assert line == Line(Message("assistant", ""), ("bad",))


def test_a_conversation_that_a_template_refuses_is_no_fault() -> None:
    subject = our_subject(next(t for t in TEMPLATES if t.name == "inst"), "byte pairs")
    assert tried(subject, Script("q", "no system role here"), "append") is None
