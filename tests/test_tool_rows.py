"""Rows of conversations with tools, calls and reasoning: read from columns, and encoded as a rollout would be."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import whet
from templates_of_ours import our_tokenizer
from test_codec import APPENDS, BY_NAME, TOOLS, cases, codec_of, played
from tiny import RUN
from whet.config.schema import DataConfig, SourceConfig, TokenizerConfig
from whet.data.chat import encode_history, encode_reply
from whet.data.codec import MessageCodec
from whet.data.columns import parse
from whet.data.prepare import prepare
from whet.data.tokenizer import load_tokenizer
from whet.types import DataError, Message, Task, ToolCall, ToolSpec

ADD = {"type": "function", "function": {"name": "add", "arguments": '{"x": "1"}'}}
ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "1+1"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**ADD, "id": "c1"}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "2"},
    ],
    "tools": json.dumps([TOOLS[1].to_json()]),
}


def read(row: dict[str, Any], **source: Any) -> Any:
    given = {"path": "x.jsonl", "messages": "messages", **source}
    return parse(row, SourceConfig(**given), name="s", chat=None, where="row 1")


def test_a_conversation_with_calls_is_read() -> None:
    f = read(ROW)
    call = ToolCall("add", {"x": "1"}, "c1")
    assert f.prompt == (
        Message("user", "1+1"),
        Message("assistant", "", "hm", (call,)),
        Message("tool", "2", tool_call_id="c1", name="add"),
    )
    assert (f.response, f.tools) == ("2", (TOOLS[1],))
    ends_with_call = read({**ROW, "messages": ROW["messages"][:2]})
    assert ends_with_call.response == Message("assistant", "", "hm", (call,))
    task = Task(uid=1, source="s", prompt=f.prompt, response=ends_with_call.response, tools=f.tools)
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task


def test_nulls_that_parquet_fills_in_are_absent() -> None:
    call = {
        "type": "function",
        "function": {"name": "add", "arguments": {"x": "1", "other": None}},
        "id": "c1",
    }
    message = {**ROW["messages"][1], "tool_calls": [call], "name": None, "audio": None}
    tools = [
        {"function": {"name": "add", "description": None, "parameters": {"x": {"type": "string"}, "y": None}}}
    ]
    f = read({"messages": [ROW["messages"][0], message], "tools": tools})
    assert f.response == Message("assistant", "", "hm", (ToolCall("add", {"x": "1"}, "c1"),))
    assert f.tools == (ToolSpec("add", "", {"x": {"type": "string"}}),)
    kept = {**call, "function": {"name": "add", "arguments": '{"x": null}'}}
    f = read({"messages": [ROW["messages"][0], {**message, "tool_calls": [kept]}]})
    assert f.response == Message("assistant", "", "hm", (ToolCall("add", {"x": None}, "c1"),))


STRANGE = {
    '{"a": ' + "[" * 9999 + "]" * 9999 + "}": "more than 50 levels",
    '{"a": NaN}': "NaN is not a JSON value",
    '{"a": 1, "a": 2}': "the key 'a' is given twice",
    '{"a": "\\ud800"}': "half of a surrogate pair",
}
"""Texts that Python's own reader takes, or ends with an error of its own."""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tool_calls": [{"function": {"name": "add", "arguments": "{1"}}]}, "expected tool_calls as"),
        *(
            (
                {"tool_calls": [{"function": {"name": "add", "arguments": text}}]},
                rf"expected tool_calls as .*{said}",
            )
            for text, said in STRANGE.items()
        ),
        ({"tool_calls": [{"function": {"arguments": {}}}]}, "expected tool_calls as"),
        ({"tool_calls": "add"}, "expected tool_calls as"),
        ({"role": "user", "tool_calls": [ADD]}, "has calls or reasoning of an assistant"),
        ({"audio": "x"}, "a message has audio; expected role, content, tool_calls"),
        ({"thinking": "a", "reasoning": "b"}, "reasoning under one name"),
    ],
)
def test_a_message_that_is_none_is_refused(changed: dict[str, Any], said: str) -> None:
    messages = [ROW["messages"][0], {"role": "assistant", "content": "x", **changed}]
    with pytest.raises(DataError, match=said):
        read({**ROW, "messages": messages})


@pytest.mark.parametrize("tools", ["[", "{}", [{"function": {}}], [{"name": 3}], [3], *STRANGE])
def test_tools_that_are_none_are_refused(tools: Any) -> None:
    with pytest.raises(DataError, match=r"column 'tools' .*expected a list of tools"):
        read({**ROW, "tools": tools})


@pytest.mark.parametrize("name", APPENDS)
def test_tokens_and_mask_of_a_conversation_are_those_of_the_rollout_that_it_was(name: str) -> None:
    template = BY_NAME[name]
    for rng in cases(template, 25):
        codec = codec_of(template)
        out = played(template, codec, rng, hostile=False, cuts=False)
        token_ids, mask = encode_history(codec.tokenizer, out.conversation, TOOLS)
        assert codec.tokenizer.decode(token_ids) == codec.tokenizer.decode(out.strands[0])
        assert token_ids == out.strands[0]
        assert mask == out.masks[0]


@pytest.mark.parametrize("name", APPENDS)
def test_a_last_reply_with_calls_is_what_the_policy_would_have_sampled(name: str) -> None:
    template = BY_NAME[name]
    tokenizer = our_tokenizer(template)
    rng = random.Random(0)
    for _ in range(10):
        out = played(template, codec_of(template), rng, hostile=False, cuts=False)
        at = max(n for n, m in enumerate(out.conversation) if m.role == "assistant")
        reply = encode_reply(tokenizer, tuple(out.conversation[:at]), out.conversation[at], TOOLS)
        assert reply == out.spoken[0][-1]


ASKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if not think %}-{% endif %}{% endif %}"
)


def prepared(source: SourceConfig, data: DataConfig, tokenizer: Any) -> Any:
    given: dict[str, Any] = {"exclude": (), "max_response_tokens": None, "counts": Counter()}
    return prepare([source], data, tokenizer=tokenizer, **given)[0]


def said_with(kwargs: Any, **source: Any) -> str:
    """The prompt of a row with variables of the chat template, in a run whose own say think=true."""
    cfg = TokenizerConfig(build="chars", chat_template=ASKS, chat_template_kwargs={"think": True})
    tokenizer = load_tokenizer(cfg, model_path=None, texts=["ab<>-"])
    given = SourceConfig(rows=({"prompt": "a", "answer": "b", "extra": 1, **kwargs},), **source)
    task = prepared(given, DataConfig(chat=True), tokenizer).task(0, 0)
    return str(tokenizer.decode(task.token_ids))


def test_variables_of_a_row_count_before_those_of_the_run() -> None:
    on, off = "<user>a<eos><assistant>", "<user>a<eos><assistant>-"
    assert said_with({}) == on
    assert said_with({"chat_template_kwargs": {"think": False}}) == off
    assert said_with({"chat_template_kwargs": {"think": None}}) == on  # as parquet fills in
    assert said_with({"think": False}) == on
    assert said_with({"think": False}, chat_template_kwargs="think") == off
    assert said_with({"chat_template_kwargs": {"think": False}}, chat_template_kwargs=None) == on


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"chat_template_kwargs": {"thinks": True}},
            "thinks: the chat template has no variable of this name",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "messages is set by the run itself"),
        ({"tools": [{"name": "add"}]}, "The row has tools, but the chat template does not render tools"),
    ],
)
def test_what_the_template_does_not_tell_is_refused(row: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"row 1: .*{said}"):
        said_with(row)


def test_tools_of_a_conversation_that_the_template_does_not_tell_are_refused() -> None:
    cfg = TokenizerConfig(build="chars")
    tokenizer = load_tokenizer(cfg, model_path=None, texts=["ab<>-"])
    talk = [Message("user", "a"), Message("assistant", "b"), Message("user", "a")]
    assert encode_history(tokenizer, talk)
    with pytest.raises(DataError, match="The row has tools, but the chat template does not render tools"):
        encode_history(tokenizer, talk, TOOLS)


def test_tools_of_a_plain_text_are_refused() -> None:
    cfg = TokenizerConfig(build="chars")
    tokenizer = load_tokenizer(cfg, model_path=None, texts=["ab"])
    source = SourceConfig(rows=({"prompt": "a", "tools": [{"name": "add"}]},))
    with pytest.raises(DataError, match="row 1: The prompt is plain text, but the row has tools"):
        prepared(source, DataConfig(), tokenizer)


def test_every_turn_of_a_rollout_has_the_variables_of_its_row() -> None:
    cfg = TokenizerConfig(build="chars", chat_template=ASKS, chat_template_kwargs={"think": True})
    codec = MessageCodec(load_tokenizer(cfg, model_path=None, texts=["ab<>-"]))
    user, reply = Message("user", "a"), Message("assistant", "b")
    for kwargs, header in (({}, "<assistant>"), ({"think": False}, "<assistant>-")):
        own = codec.of(kwargs)
        prompt = own.encode_prompt([user])
        assert codec.tokenizer.decode(prompt) == f"<user>a<eos>{header}"
        there = [
            *prompt,
            *codec.tokenizer.encode("b", add_special_tokens=False),
            codec.tokenizer.eos_token_id,
        ]
        told = own.encode_observation(there, [user, reply, user], 1)
        assert told is not None
        assert codec.tokenizer.decode(told) == f"<user>a<eos>{header}"
    assert codec.of({"think": False}) is codec.of({"think": False})


@pytest.mark.parametrize(
    ("written", "reply", "lost"),
    [
        ("m.content", Message("assistant", "b", reasoning="r"), "reasoning"),
        (
            "m.content",
            Message("assistant", "b", tool_calls=(ToolCall("f", {"x": 1}, "c00010001"),)),
            "tool calls",
        ),
        ("(m.reasoning_content or '') + m.content", Message("assistant", "b", reasoning="r"), None),
        ("(m.reasoning_content or '') + m.content", Message("assistant", "b", reasoning=""), None),
        ("m.content", Message("assistant", "b"), None),
    ],
)
def test_a_reply_whose_template_leaves_a_part_of_it_out_is_refused(
    written: str, reply: Message, lost: str | None
) -> None:
    """A template without a field for thoughts, as Qwen2.5's: the reply was learned without them, unsaid."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ " + written + " }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    cfg = TokenizerConfig(build="chars", chat_template=template)
    tokenizer = load_tokenizer(cfg, model_path=None, texts=["abr"])
    if lost is None:
        said = (reply.reasoning or "") + "b<eos>"
        assert tokenizer.decode(encode_reply(tokenizer, (Message("user", "a"),), reply)) == said
    else:
        with pytest.raises(
            DataError, match=f"leaves out the {lost} of the reply, so it would not be learned"
        ):
            encode_reply(tokenizer, (Message("user", "a"),), reply)


def test_a_run_learns_calls_from_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(ROW) + "\n" for _ in range(8)))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.x }}{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tree = {
        **RUN,
        "run_dir": str(tmp_path / "run"),
        "algorithm": {"name": "sft"},
        "tokenizer": {"build": "chars", "chat_template": template},
        "data": {
            "train": [{"path": str(rows), "messages": "messages", "tools": None}],
            "max_prompt_tokens": 24,
        },
        "rewards": {},
        "rollout": {"sampling": {"max_tokens": 8}},
        "train": {"steps": 1, "tasks_per_step": 2},
    }
    whet.train(**tree)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    # "hm1" and its end, "2" and its end, in two rows
    assert line["rollout/tokens_sum"] == 2 * (4 + 2)
