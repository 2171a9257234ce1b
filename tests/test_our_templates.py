"""The form of replies follows from a chat template, and our own templates do what their table says."""

from __future__ import annotations

import pytest

from call_writers import write_calls
from calling import BRACKETS, SCHEMA, WEATHER, call
from templates_of_ours import TEMPLATES, OurTemplate, our_tokenizer
from whet.data.calls import (
    ReplyForm,
    Thinking,
    opens_thought,
    read_reply,
    recognised_form,
)
from whet.data.templates import rendered
from whet.types import Message, ToolCall


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_the_form_of_a_template_is_recognised(template: OurTemplate) -> None:
    assert recognised_form(template.text, template.special) == template.form


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        (None, (), ReplyForm()),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ("<tool_call>", "[TOOL_CALLS]"), ReplyForm()),
        ("{{ tools }}[TOOL_CALLS]", ("[ARGS]",), ReplyForm("mistral_v11")),
        ("{{ tools }}[TOOL_CALLS][THINK][/THINK]", (), ReplyForm("mistral", BRACKETS)),
        (
            r"<｜tool▁sep｜>{{ '```json' }}{{ content.split('</think>')[-1] }}<think>\n",
            (),
            ReplyForm("deepseek_v3", Thinking("<think>", "</think>", "\n", "")),
        ),
        ('{{ tools }} {"name": a name, "arguments": an object}', (), ReplyForm("json")),
        ('{{ tools }} <|tool_call|>{"name": a name, "arguments": an object}', (), ReplyForm()),
        (
            '{{ tools }} functools[{"name": [name], "arguments": [an object]}, ...]',
            (),
            ReplyForm("functools"),
        ),
        ('{{ tools }} <|function_call|>{"name": a name, "arguments": an object}', (), ReplyForm()),
        (
            '{{ tools }} function call<|role_sep|>\n{"name": a name, "arguments": an object}',
            (),
            ReplyForm(),
        ),
        ("{{ tools }} <|python_tag|> as <function=name>{}</function>", (), ReplyForm()),
        ("{{ tools }}<|tool_calls_section_begin|>", (), ReplyForm("kimi")),
        ("{{ tools }}<minimax:tool_call>", (), ReplyForm()),
        ('{{ tools }}<minimax:tool_call><invoke name="', (), ReplyForm("minimax")),
        ("{{ tools }}{% set t = '｜DSML｜' %}{{ t + 'function_calls>' }}", (), ReplyForm("deepseek_v32")),
        ("{{ tools }}{% set t = '｜DSML｜' %}{{ t + 'tool_calls>' }}", (), ReplyForm("deepseek_v4")),
        ('{{ tools }}<tool_calls>[{"name": 1, "arguments": 2}]', (), ReplyForm("hunyuan")),
        ('{{ tools }}<TOOLCALL>[{"name": 1, "arguments": 2}]', (), ReplyForm("nemotron")),
        ("{{ tools }}<|tool_call|> followed by a JSON list of tools", (), ReplyForm("granite")),
        ('{{ tools }}<|START_ACTION|>[{"tool_name": 1}]', (), ReplyForm("cohere")),
        ("{{ tools }}<seed:tool_call><function=f><parameter=a>", (), ReplyForm("seed")),
        ('{{ tools }} {"name": a name, "description": "", "parameters": {}}', (), ReplyForm()),
        ('no t.o.o.l.s {"name": a name, "arguments": an object}', (), ReplyForm()),
    ],
)
def test_forms_are_recognised_by_the_markers_of_the_template(
    template: str | None, special: tuple[str, ...], expected: ReplyForm
) -> None:
    assert recognised_form(template, special) == expected


def _render(template: OurTemplate, *messages: Message, prompt: bool = True) -> str:
    return rendered(
        template.text,
        messages=[m.to_json() for m in messages],
        tools=[t.to_json() for t in SCHEMA],
        add_generation_prompt=prompt,
        bos_token=template.bos,
        eos_token=template.ends[0],
        strftime_now=lambda form: "2026-01-02",
    )


QUESTION, AGAIN = Message("user", "Weather?"), Message("user", "And now?")


def _turn(
    template: OurTemplate, *, calls: int, says: bool = True, thinks: bool = True
) -> tuple[Message, str]:
    """A reply as a message, and what the policy samples for it, without an end token."""
    marked = template.form.thinking or template.form.channels
    reasoning = "be\n cause" if marked and thinks else "" if template.opens else None
    content = " I look. " if says else ""
    called = (WEATHER, call("now"))[:calls]
    text = write_calls(template.form, called, content, reasoning, opened=template.opens)
    with_ids = tuple(ToolCall(c.name, c.arguments, f"id{i}") for i, c in enumerate(called))
    return Message("assistant", content, reasoning, with_ids), text


TURNS = [(calls, says, thinks) for calls in (0, 1, 2) for says in (True, False) for thinks in (True, False)]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_our_templates_do_to_a_history_what_their_table_says(template: OurTemplate) -> None:
    can = [t for t in TURNS if (template.parallel or t[0] < 2) and (template.beside or not (t[0] and t[1]))]
    assert len(can) >= 6
    for calls, says, thinks in can:
        message, text = _turn(template, calls=calls, says=says, thinks=thinks)
        lead = _render(template, QUESTION)
        results = [Message("tool", f"21{c.id}", tool_call_id=c.id, name=c.name) for c in message.tool_calls]
        full = _render(template, QUESTION, message, *(results or [AGAIN]))
        end = template.end_in_history if template.end_in_history is not None else template.ends[0]
        end = "<|call|>" if template.form.channels and calls else end
        thought = bool(message.reasoning) or template.opens
        kept = template.keeps_on_tool if calls else template.keeps_on_user or not thought
        assert full.startswith(lead + text + end) == kept, (full, lead + text + end)
        assert all((m.content in full) == (template.name != "drops_results") for m in results)
        assert (
            opens_thought(template.form, lead[len(_render(template, QUESTION, prompt=False)) :])
            == template.opens
        )
        if template.name == "next_opener":
            assert any(full[len(lead + text) :].startswith(opener) for opener in template.ends[1:])


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_our_tokenizers_give_replies_back(template: OurTemplate) -> None:
    tokenizer = our_tokenizer(template)
    message, text = _turn(template, calls=1, says=template.beside)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) < len(text.encode())
    told = read_reply(text, template.form, SCHEMA, opened=template.opens)
    assert (told.content, told.reasoning, told.tool_calls) == (message.content, message.reasoning, (WEATHER,))
    for token in (*template.ends, *template.special, *template.markers):
        assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1
    assert tokenizer.eos_token == template.ends[0]


def test_the_other_rewritings() -> None:
    by_name = {t.name: t for t in TEMPLATES}
    switch = by_name["keep_switch"]
    message, text = _turn(switch, calls=0)
    told = {"messages": [m.to_json() for m in (QUESTION, message, AGAIN)], "preserve_thinking": True}
    assert text in rendered(switch.text, **told)
    assert text not in rendered(switch.text, **{**told, "preserve_thinking": False})
    assert "Today is 2026-01-02." in _render(by_name["date"], QUESTION)
    with pytest.raises(Exception, match="no system role"):
        _render(by_name["inst"], Message("system", "x"), QUESTION)
    with pytest.raises(Exception, match="One call a turn"):
        _render(by_name["tools_in_user"], QUESTION, Message("assistant", "", None, (WEATHER, WEATHER)))
    twice = [
        Message("assistant", "", None, (ToolCall("f", {}, "id1"),)), Message("tool", "21", tool_call_id="id1"),
        Message("assistant", "", None, (ToolCall("g", {}, "id1"),)),
    ]  # fmt: skip
    assert "]f: 21" in _render(by_name["renames_results"], QUESTION, *twice[:2])
    assert "]g: 21" in _render(by_name["renames_results"], QUESTION, *twice)
    harmony = by_name["harmony"]
    last = _render(harmony, QUESTION, Message("assistant", "4", "because"), prompt=False)
    assert last.endswith("because<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>")
