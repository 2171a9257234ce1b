"""The form of replies follows from a chat template, and our own templates do what their table says."""

from __future__ import annotations

import pytest

from calling import BRACKETS, SCHEMA, WEATHER
from templates_of_ours import TEMPLATES, OurTemplate, our_tokenizer
from whet.data.calls import (
    ReplyForm,
    Thinking,
    opens_thought,
    read_reply,
    recognised_form,
    write_calls,
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
        ('{{ tools }} functools[{"name": [name], "arguments": [an object]}, ...]', (), ReplyForm()),
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


def _turn(template: OurTemplate, *, called: bool) -> tuple[Message, str]:
    """A reply as a message, and what the policy samples for it, without an end token."""
    content = "I look." if template.beside or not called else ""
    reasoning = "because" if template.form.thinking or template.form.channels else None
    calls = (WEATHER,) if called else ()
    text = write_calls(template.form, calls, content, reasoning, opened=template.opens)
    return Message(
        "assistant", content, reasoning, tuple(ToolCall(c.name, c.arguments, "id1") for c in calls)
    ), text


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
@pytest.mark.parametrize("called", [False, True])
def test_our_templates_do_to_a_history_what_their_table_says(template: OurTemplate, called: bool) -> None:
    message, text = _turn(template, called=called)
    lead = _render(template, QUESTION)
    later = Message("tool", "21", tool_call_id="id1", name="get_weather") if called else AGAIN
    full = _render(template, QUESTION, message, later)
    kept = template.keeps_on_tool if called else template.keeps_on_user
    end = template.ends[-1] if template.form.channels and called else template.ends[0]
    if template.end_in_history is not None and not (template.form.channels and called):
        end = template.end_in_history
    assert full.startswith(lead + text + end) == kept
    assert ("21" in full[len(lead) :]) == (called and template.name != "drops_results")
    assert (
        opens_thought(template.form, lead[len(_render(template, QUESTION, prompt=False)) :]) == template.opens
    )
    if template.name == "next_opener":
        assert any(full[len(lead + text) :].startswith(opener) for opener in template.ends[1:])


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_our_tokenizers_give_replies_back(template: OurTemplate) -> None:
    tokenizer = our_tokenizer(template)
    message, text = _turn(template, called=True)
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
    message, text = _turn(switch, called=False)
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
