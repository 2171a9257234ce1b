"""Replies are read into reasoning, calls and content as their families write them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from call_writers import write_calls
from calling import BRACKETS, SCHEMA, THINK, WEATHER, call, form, tool
from whet.data.call_formats import CALL_FORMATS
from whet.data.call_values import MOST_DEPTH, MOST_DIGITS, Malformed, read_by_schema, read_json
from whet.data.calls import (
    ReplyForm,
    read_reply,
)
from whet.types import ConfigError, Message, ToolCall, ToolSpec

TAGGED = ("qwen3_coder", "glm", "seed", "minimax")
SEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

DOCUMENTED: list[tuple[str, str, Message]] = [
    # Qwen's function-calling guide: parallel calls after a thought
    (
        "hermes",
        "<think>\nTwo cities.\n</think>\n\n<tool_call>\n"
        '{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_temperature_date", "arguments": {"location": "SF", "date": "2024-10-01"}}\n'
        "</tool_call>",
        Message(
            "assistant",
            "",
            "Two cities.",
            (
                call("get_current_temperature", location="San Francisco, CA, USA"),
                call("get_temperature_date", location="SF", date="2024-10-01"),
            ),
        ),
    ),
    ("hermes", "21 degrees.", Message("assistant", "21 degrees.")),
    ("hermes", "\n <b>21</b>\n", Message("assistant", "\n <b>21</b>\n")),
    ("hermes", "<think>\n\n</think>\n\n21", Message("assistant", "21", "")),
    ("hermes", "<think>\n  a \n\t\n</think>\n\n  21 \n", Message("assistant", "  21 \n", "  a \n\t")),
    (
        "hermes",
        'I look.\n<tool_call>{"name":"f"}</tool_call>\n',
        Message("assistant", "I look.", None, (call("f"),)),
    ),
    (
        "hermes",
        'One\n<tool_call>{"arguments":{},"name":"f"}</tool_call>\ntwo <tool_call>{"name":"g"}</tool_call> three',
        Message("assistant", "One\ntwo \n three", None, (call("f"), call("g"))),
    ),
    # Qwen3-Coder's chat template
    (
        "qwen3_coder",
        "I will look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n"
        "2\n"
        "</parameter>\n</function>\n</tool_call>",
        Message("assistant", "I will look.", None, (WEATHER,)),
    ),
    (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=days>2</parameter>\n</function>\n</tool_call>",
        Message("assistant", "", None, (call("get_weather", days=2),)),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        Message("assistant", "", None, (call("now"),)),
    ),
    # XML of others
    (
        "qwen3_coder",
        "Write <parameter name='a'>1</parameter> in </function>.",
        Message("assistant", "Write <parameter name='a'>1</parameter> in </function>."),
    ),
    # Llama 3.1's model card and prompt formats
    (
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        Message("assistant", "", None, (WEATHER,)),
    ),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": null}}',
        Message("assistant", "", None, (call("f"), call("g", x=None))),
    ),
    ("llama3", 'So: {"name": "f", "arguments": {}}', Message("assistant", "So: ", None, (call("f"),))),
    ("llama3", '{"name": "Ada", "born": 1815}', Message("assistant", '{"name": "Ada", "born": 1815}')),
    ("llama3", "{x : x > 0} and {y}", Message("assistant", "{x : x > 0} and {y}")),
    # Mistral's cookbook on function calling, and mistral-common's tokenizers from v11 on
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}, "id": "VvvODy9mT"}]',
        Message("assistant", "", None, (WEATHER,)),
    ),
    (
        "mistral_v11",
        'Hm.[TOOL_CALLS]f{"a": 1.0}[TOOL_CALLS]g[ARGS]{}',
        Message("assistant", "Hm.", None, (call("f", a=1.0), call("g"))),
    ),
    ("mistral_v11", "[TOOL_CALLS]g[CALL_ID]VvvODy9mT[ARGS]{}", Message("assistant", "", None, (call("g"),))),
    # OpenAI's guide to the harmony format: the recipient after the channel, or in the role
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris","days":2}',
        Message("assistant", "", "Need to use function get_weather.", (WEATHER,)),
    ),
    (
        "gpt_oss",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Paris","days":2}<|call|>',
        Message("assistant", "", None, (WEATHER,)),
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>2 + 2.<|end|><|start|>assistant<|channel|>commentary<|message|>Easy.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4\n",
        Message("assistant", "Easy.\n4\n", "2 + 2."),
    ),
    ("gpt_oss", "4", Message("assistant", "4")),
    # GLM-4.5's chat template, and GLM-4.7's without line ends
    (
        "glm",
        "<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days"
        "</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        Message("assistant", "", "", (WEATHER,)),
    ),
    (
        "glm",
        "<tool_call>f<arg_key>a</arg_key><arg_value> 1 2 </arg_value></tool_call><tool_call>g</tool_call>",
        Message("assistant", "", None, (call("f", a=" 1 2 "), call("g"))),
    ),
    # DeepSeek V3's chat template, and V3.1's model card
    (
        "deepseek_v3",
        SEEK.format('function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris", "days": 2}\n```'),
        Message("assistant", "", None, (WEATHER,)),
    ),
    ("deepseek", "Hm." + SEEK.format("f<｜tool▁sep｜>{}"), Message("assistant", "Hm.", None, (call("f"),))),
    # Seed-OSS's chat template
    (
        "seed",
        "I look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>2"
        "</parameter>\n</function>\n</seed:tool_call>",
        Message("assistant", "I look.", None, (WEATHER,)),
    ),
    # Kimi K2's guide to tool calls: the policy writes the id, under which the result is told
    (
        "kimi",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 2}<|tool_call_end|> <|tool_call_begin|>a.b:12<|tool_call_argument_begin|>{}'
        "<|tool_call_end|>\n<|tool_calls_section_end|>",
        Message(
            "assistant",
            "I look.",
            None,
            (replace(WEATHER, id="functions.get_weather:0"), ToolCall("a.b", {}, "a.b:12")),
        ),
    ),
    # MiniMax M2's chat template, and without line ends
    (
        "minimax",
        'Hm.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        Message("assistant", "Hm.", None, (WEATHER, call("now"))),
    ),
    (
        "minimax",
        '<minimax:tool_call><invoke name="f"><parameter name="a">[1, "</parameter>"]</parameter></invoke>'
        "</minimax:tool_call>",
        Message("assistant", "", None, (call("f", a=[1, "</parameter>"]),)),
    ),
    # DeepSeek V3.2's chat template, and V4's: a value says itself whether it is a text
    (
        "deepseek_v32",
        'Hm.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" string="true"> 1 '
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false"> [2.0] </｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        Message("assistant", "Hm.", None, (call("f", city=" 1 ", days=[2.0]), call("now"))),
    ),
    (
        "deepseek_v32",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        Message("assistant", "", None, (call("now"),)),
    ),
    # lists: Hunyuan A13B and Apriel, Nemotron Nano v2, Granite 3, Phi-4-mini and FireFunction, Command R7B
    (
        "hunyuan",
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}, "id": 1}]</tool_calls>',
        Message("assistant", "", None, (WEATHER,)),
    ),
    (
        "nemotron",
        '<TOOLCALL>[{"name": "f", "arguments": {}}, {"name": "g"}]</TOOLCALL>\n',
        Message("assistant", "", None, (call("f"), call("g"))),
    ),
    (
        "granite",
        '<|tool_call|> [{"name": "f", "arguments": {"a": 1}}]',
        Message("assistant", "", None, (call("f", a=1),)),
    ),
    (
        "functools",
        'functools[{"name": "f", "arguments": {"a": 1}}]',
        Message("assistant", "", None, (call("f", a=1),)),
    ),
    (
        "functools",
        "Use functools.partial.",
        Message("assistant", "Use functools.partial."),
    ),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        Message("assistant", "", None, (call("f", a=1),)),
    ),
    (
        "json",
        ' {"name": "f", "arguments": {"deep": [{"a": [true, null, -0.5]}]}}\n',
        Message("assistant", "", None, (call("f", deep=[{"a": [True, None, -0.5]}]),)),
    ),
    ("json", '{"answer": 42}', Message("assistant", '{"answer": 42}')),
]


@pytest.mark.parametrize(("name", "text", "expected"), DOCUMENTED)
def test_replies_are_read_as_their_families_write_them(name: str, text: str, expected: Message) -> None:
    assert read_reply(text, form(name), SCHEMA) == expected


def test_the_two_formats_of_a_family_are_read_by_either_name() -> None:
    for names in (("mistral", "mistral_v11"), ("deepseek", "deepseek_v3"), ("deepseek_v32", "deepseek_v4")):
        for writer in names:
            text = write_calls(form(writer), [WEATHER])
            assert [read_reply(text, form(reader)).tool_calls for reader in names] == [(WEATHER,)] * 2


REFUSED: list[tuple[str, str, str]] = [
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}',
        "call 1: expected </tool_call> after the JSON object, found the end of the reply",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": "x"}</tool_call>',
        'call 2: its "arguments" is a string; expected an object',
    ),
    (
        "hermes",
        '<tool_call>{"name": "f"} {"name": "g"}</tool_call>',
        'call 1: expected </tool_call> after the JSON object, found \'{"name": "g"}</tool_call>\'',
    ),
    (
        "hermes",
        "<tool_call>[]</tool_call>",
        'call 1: it is an array; expected an object with "name" and "arguments"',
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "parameters": {}}</tool_call>',
        'call 1: it has the key \'parameters\'; expected "name" and "arguments" alone',
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {}}</tool_call>',
        'call 1: its "name" is null; expected the tool\'s name as a string',
    ),
    (
        "hermes",
        '<tool_call>{"name": " "}</tool_call>',
        "call 1: the tool's name has 1 characters; expected 1 to 200",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
        "call 1: its JSON has the key 'a' twice",
    ),
    (
        "hermes",
        "<tool_call>{'name': 'f'}</tool_call>",
        "call 1: its JSON is not valid: Expecting property name enclosed in double quotes at "
        "\"'name': 'f'}</tool_call>\"",
    ),
    ("hermes", '{"name": "f"}</tool_call>', "</tool_call> stands outside of a call"),
    ("hermes", "I will <tool_", "the reply ends inside <tool_call>"),
    (
        "hermes",
        "<think>\nI will call <tool_call>{}</tool_call>",
        "the thought that <think> opened has no end: expected '</think>' after "
        "'\\nI will call <tool_call>{}</tool_call>'",
    ),
    ("hermes", "4</think>", "</think> stands outside of a thought"),
    ("hermes", "4 <think>\nor 5\n</think>", "<think> stands outside of a thought"),
    (
        "qwen3_coder",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        'call 1: expected <function= after <tool_call>, found \'{"name": "f", "arguments": {}}\\n</tool_ca\'...',
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        "call 1: the value of 'a' has no end: expected </parameter> and then <parameter= or </function>",
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        "call 1: 'f' has the argument 'a' twice",
    ),
    (
        "qwen3_coder",
        "<function=f>1</function>",
        "call 1: expected <parameter= or </function> after 'f', found '1</function>'",
    ),
    (
        "qwen3_coder",
        "<function=>\n</function>",
        "call 1: expected the tool's name after <function=, found '>\\n</function>'",
    ),
    ("llama3", "<|python_tag|>print(1)", "call 1: its JSON is not valid: Expecting value at 'print(1)'"),
    (
        "llama3",
        '{"name": "f", "parameters": {}, "arguments": {}}',
        "call 1: it has parameters and arguments; expected one of them",
    ),
    (
        "llama3",
        '{"name": "f", "parameters": {}}; and so on',
        "call 2: its JSON is not valid: Expecting value at 'and so on'",
    ),
    ("mistral", "[TOOL_CALLS][]", "call 1: the list after [TOOL_CALLS] is empty; expected at least one call"),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f"}, 3]',
        'call 2: it is an integer; expected an object with "name" and "arguments"',
    ),
    (
        "mistral_v11",
        "[TOOL_CALLS]f[ARGS]3",
        "call 1: the arguments of 'f' are an integer; expected a JSON object",
    ),
    (
        "glm",
        "<tool_call>f\n<arg_key>a</arg_key>\n1</tool_call>",
        "call 1: expected <arg_value> after the key 'a', found '1</tool_call>'",
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        "call 1: expected <｜tool▁call▁end｜> after the arguments, found the end of the reply",
    ),
    (
        "deepseek_v3",
        SEEK.format("code<｜tool▁sep｜>f\n```json\n{}\n```"),
        "call 1: expected 'function' or JSON at <｜tool▁sep｜>, found 'code'",
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "call 1: expected functions.NAME:NUMBER after <|tool_call_begin|>, found 'f'",
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>so",
        "call 2: expected <|tool_call_begin|> or <|tool_calls_section_end|> after <|tool_call_end|>, found 'so'",
    ),
    ("kimi", "<|tool_call_begin|>f:0", "<|tool_call_begin|> stands outside of a call"),
    (
        "minimax",
        '<minimax:tool_call><invoke name="f"></minimax:tool_call>',
        "call 1: expected <parameter name=\" or </invoke> after 'f', found '</minimax:tool_call>'",
    ),
    (
        "minimax",
        '<minimax:tool_call><invoke name="f"></invoke> and',
        "call 2: expected <invoke name=\" or </minimax:tool_call> after </invoke>, found 'and'",
    ),
    (
        "minimax",
        "<minimax:tool_call>" + '<invoke name="f">' + '<parameter name="a">1</invoke>',
        "call 1: the value of 'a' has no end: expected </parameter> and then <parameter name=\" or </invoke>",
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1</｜DSML｜parameter>',
        'call 1: expected string="true" or string="false" after a key, found \'a"\'',
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1 2'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
        "call 1: the value of 'a' has text after its JSON: ' 2'",
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜function_calls>',
        'call 2: expected <｜DSML｜invoke name=" or </｜DSML｜tool_calls> after </｜DSML｜invoke>, found '
        "'</｜DSML｜function_calls>'",
    ),
    (
        "hunyuan",
        '<tool_calls>[{"name": "f"}] and',
        "call 2: expected </tool_calls> after the list of calls, found 'and'",
    ),
    (
        "granite",
        '<|tool_call|>{"name": "f"}',
        "call 1: the list after <|tool_call|> is an object; expected at least one call",
    ),
    (
        "cohere",
        '<|START_ACTION|>[{"name": "f", "parameters": {}}]<|END_ACTION|>',
        'call 1: it has the key \'name\'; expected "tool_name" and "parameters" alone',
    ),
    (
        "seed",
        "<seed:tool_call><function=f></function></tool_call>",
        "call 1: expected </seed:tool_call> after </function>, found '</tool_call>'",
    ),
    (
        "json",
        '{"name": "f", "arguments": {}} Done.',
        "call 1: expected nothing after the JSON object, found 'Done.'",
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm",
        "the reasoning in the analysis channel has no end: expected <|end|>",
    ),
    (
        "gpt_oss",
        "<|channel|>secret<|message|>Hm",
        "expected <|channel|>analysis, <|channel|>commentary or <|channel|>final and <|message|>, found "
        "'<|channel|>secret<|message|>Hm'",
    ),
    (
        "gpt_oss",
        "<|channel|>final<|message|>4<|channel|>",
        "expected <|end|> after the message in final, found '<|channel|>'",
    ),
    (
        "gpt_oss",
        "<|channel|>commentary to=functions.f<|message|>{}x",
        "call 1: expected <|call|> or <|end|> after the arguments of 'f', found 'x'",
    ),
]


@pytest.mark.parametrize(("name", "text", "why"), REFUSED)
def test_what_cannot_be_read_is_malformed_with_the_reason_and_the_whole_text(
    name: str, text: str, why: str
) -> None:
    assert read_reply(text, form(name)) == Message("assistant", text, malformed=why)


def _deep(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (_deep(MOST_DEPTH), "nested deeper than 64 levels"),
        (_deep(100_000), "nested deeper than 64 levels"),
        ("[" * 100_000, "nested deeper than 64 levels"),
        ('{"a":' * 100_000, "nested deeper than 64 levels"),
        ("9" * (MOST_DIGITS + 1), "a number of more than 1000 digits"),
        ("9" * 100_000, "a number of more than 1000 digits"),
        ("0." + "1" * 100_000, "a number of more than 1000 digits"),
        ("1e999", "a number that is too large (1e999)"),
        ("NaN", "NaN, which is not a JSON value"),
        ("-Infinity", "-Infinity, which is not a JSON value"),
        (r'"\ud800"', "half a surrogate pair"),
        (r'{"\udfff": 1}', "half a surrogate pair"),
        ('"\n"', "Invalid control character"),
    ],
)
def test_json_beyond_the_limits_is_malformed(value: str, why: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>'
    told = read_reply(text, form("hermes"))
    assert told.tool_calls == ()
    assert told.malformed is not None
    assert why in told.malformed
    assert len(told.malformed) < 300


def test_json_within_the_limits_is_read_as_it_is() -> None:
    digits = "9" * MOST_DIGITS
    text = (
        f'{{"deep": {_deep(MOST_DEPTH - 1)}, "long": {digits}, "pair": "\\ud83d\\ude00", "float": 1.0}} rest'
    )
    value, end = read_json(text)
    assert text[end:] == " rest"
    assert value["long"] == int(digits)
    assert value["pair"] == "😀"
    assert (value["float"], type(value["float"])) == (1.0, float)
    with pytest.raises(Malformed, match="Expecting value at 'rest'"):
        read_json(text, end + 1)


REFERRING = ToolSpec(
    "f",
    "",
    {
        "properties": {
            "x": {"$ref": "#/$defs/Loop"},
            "y": {"$ref": "#/$defs/Kind"},
            "z": {"$ref": "#/no/where"},
        },
        "$defs": {
            "Kind": {"enum": [1, 2]},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "boolean"}]},
        },
    },
)

TYPES: list[tuple[Any, str, Any]] = [
    ("string", " 12\n", " 12\n"),
    ("string", "true", "true"),
    ("string", "null", "null"),
    ("string", "", ""),
    ("string", "{}", "{}"),
    (["string", "integer"], "12", "12"),
    (["string", "null"], "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
    ({"type": "string", "nullable": True}, "x", "x"),
    ("integer", " 12 ", 12),
    ("integer", "3.0", 3),
    ("integer", "3.5", "3.5"),
    ("integer", "twelve", "twelve"),
    ("integer", "true", "true"),
    ("integer", "1" * 2000, "1" * 2000),
    ("number", "3.0", 3.0),
    ("number", "3", 3),
    ("number", "NaN", "NaN"),
    ("number", "1e999", "1e999"),
    ("boolean", "true", True),
    ("boolean", "False", False),
    ("boolean", "1", "1"),
    ("boolean", "yes", "yes"),
    ("null", "None", None),
    ("object", '{"b": 1, "a": [2.0]}', {"b": 1, "a": [2.0]}),
    ("object", "[]", "[]"),
    ("object", "{'a': 1}", "{'a': 1}"),
    ("object", '{"a": 1} x', '{"a": 1} x'),
    ("array", "[true]", [True]),
    (["integer", "null"], "null", None),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"const": True}, "true", True),
    ("array", "[" * 5000, "[" * 5000),
]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(("schema", "text", "expected"), TYPES)
def test_arguments_without_types_are_read_by_the_schema(
    name: str, schema: Any, text: str, expected: Any
) -> None:
    written = write_calls(form(name), [call("f", x=text)])
    (told,) = read_reply(
        written, form(name), [tool("f", x=schema if isinstance(schema, dict) else {"type": schema})]
    ).tool_calls
    assert (told.arguments["x"], type(told.arguments["x"])) == (expected, type(expected))


@pytest.mark.parametrize(
    "spec",
    [
        None,
        tool("g"),
        tool("f"),
        tool("f", x={}),
        ToolSpec("f", "", 3),
        ToolSpec("f", "", {"properties": []}),
    ],
)
def test_arguments_whose_type_nobody_names_are_text_or_json_as_the_family_has_it(
    spec: ToolSpec | None,
) -> None:
    assert read_by_schema(" 1", spec, "x", "text") == " 1"
    assert read_by_schema(" 1", spec, "x", "json") == 1
    assert read_by_schema(" one", spec, "x", "json") == " one"


def test_references_in_a_schema_are_followed_and_may_go_in_circles() -> None:
    assert [read_by_schema("1", REFERRING, key, "text") for key in "yz"] == [1, "1"]
    assert read_by_schema("true", REFERRING, "x", "text") is True


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_types_order_and_ids(name: str) -> None:
    arguments = {
        "z": True,
        "a": 1,
        "m": 1.0,
        "n": None,
        "s": "1",
        "b": "true",
        "l": [False, {"k": None}],
        "w": " \n x\t",
    }
    types = {
        "z": "boolean",
        "a": "integer",
        "m": "number",
        "n": "null",
        "s": "string",
        "b": "string",
        "l": "array",
        "w": "string",
    }
    given = [ToolCall("f", arguments, id="abc"), ToolCall("nobody_knows", {}, id="def")][
        : 1 if name == "json" else 2
    ]
    told = read_reply(write_calls(form(name), given), form(name), [tool("f", **types)])
    assert told.malformed is None
    assert json.dumps(told.tool_calls[0].arguments) == json.dumps(arguments)
    ids = ("functions.f:0", "functions.nobody_knows:1") if name == "kimi" else ("", "")
    assert [(c.name, c.id) for c in told.tool_calls] == [("f", ids[0]), ("nobody_knows", ids[1])][
        : len(given)
    ]


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_reply_that_begins_inside_a_thought(name: str) -> None:
    given = [call("f", x="y")]
    text = write_calls(form(name), given, "", "because", opened=True)
    told = read_reply(text, form(name), opened=True)
    named = tuple(replace(c, id=told.tool_calls[0].id) for c in given)
    assert told == Message("assistant", "", "because", named)
    assert read_reply(text, form(name)).malformed is not None
    cut = text[: text.index("because") + 7]
    assert "has no end" in str(read_reply(cut, form(name), opened=True).malformed)


def test_what_a_form_cannot_say_is_not_written() -> None:
    for given, name, content, reasoning in [
        ([call("f")], None, "", None),
        ([call("f"), call("g")], "json", "", None),
        ([call("f")], "json", "I look.", None),
        ([], "hermes", "the marker <tool_call>", None),
        ([], "hermes", "4", "a </think> b"),
        ([call("f", x="1</parameter>\n</function>")], "qwen3_coder", "", None),
        ([call("f", x="1</arg_value>\n</tool_call>")], "glm", "", None),
        ([call("not a name")], "glm", "", None),
        ([call("f", x=float("nan"))], "hermes", "", None),
        ([call("f", x="\ud800")], "hermes", "", None),
    ]:
        with pytest.raises(ValueError):
            write_calls(form(name), given, content, reasoning)
    with pytest.raises(ValueError, match="no markers for reasoning"):
        write_calls(ReplyForm("hermes"), [], "4", "because")
    with pytest.raises(ValueError, match="reasoning=''"):
        write_calls(form("hermes"), [], "4", opened=True)
    with pytest.raises(ValueError, match="only if its form marks reasoning"):
        read_reply("4", ReplyForm("hermes"), opened=True)
    with pytest.raises(ConfigError, match=r"No call format 'hermses'; did you mean 'hermes'"):
        ReplyForm("hermses")
    with pytest.raises(ConfigError, match="marks reasoning itself"):
        ReplyForm("gpt_oss", THINK)


def test_thoughts_of_other_families() -> None:
    assert read_reply("[THINK]a\nb[/THINK]c", ReplyForm("mistral", BRACKETS)) == Message(
        "assistant", "c", "a\nb"
    )
    assert write_calls(ReplyForm("mistral", BRACKETS), [], "c", "a\nb") == "[THINK]a\nb[/THINK]c"
    assert read_reply("<tool_call> & <think>", ReplyForm()) == Message("assistant", "<tool_call> & <think>")
    assert read_reply("\n<think>\na\n</think>b", ReplyForm(None, THINK)) == Message("assistant", "b", "a")
