"""A chat template is a program from outside: it renders as transformers renders it, and never runs without end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from encoded import with_template
from whet.config.schema import TokenizerConfig
from whet.data import templates
from whet.data.chat import read_template, render
from whet.data.tokenizer import load_tokenizer
from whet.types import ConfigError, DataError, Message

CHAT = [
    Message("system", "be brief"),
    Message("user", "2 + 2?"),
    Message("assistant", "4"),
    Message("user", "é"),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["2 + 4?"])


CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
FEATURES = """
{% set ns = namespace(last=-1, seen='') %}
{% macro show(m) %}[{{ m.role | upper }}: {{ m | tojson }}]{% endmacro %}
{% for m in messages if m.role != 'system' %}
{% if loop.first %}{{ eos_token }}{{ loop.length }}{% endif %}
{% set ns.seen = ns.seen ~ m.role %}{{ show(m) }}{{ loop.previtem is defined }}
{% generation %}{{ '%s-%s' | format(loop.index, m.content) }}{% endgeneration %}
{% if loop.last %}{% break %}{% endif %}
{% endfor %}
{{ ns.seen }}{{ messages[::-1] | map(attribute='role') | join(',') }}{{ tools is none }}
{{ 'é' in messages[-1].content }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ (3 * 7) ** 2 % 5 }}
{{ dict(a=1) | tojson }}
{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}
"""


@pytest.mark.parametrize("template", [CHATML, FEATURES, "{{ messages[0].content }}  \n"])
def test_a_template_renders_as_transformers_renders_it(
    template: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    plain: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in CHAT]
    theirs = tokenizer.apply_chat_template(
        plain, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert render(with_template(tokenizer, template), CHAT) == theirs


ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "text that doubles": (
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "lists that double": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "pairs of pairs": (
        "{% set ns = namespace(x=(1,)) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x }}"
    ),
    "text that replaces itself": (
        "{% set ns = namespace(x='a' * 9999) %}{% for i in range(9) %}"
        "{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}"
    ),
    "a long text": "{{ 'x' * 10000000000 }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a method's width": "{{ 'x'.ljust(10000000000) }}",
    "a filter's width": "{{ 'x' | center(10000000000) }}",
    "a format's width": "{{ '{:9999999999}'.format(1) }}",
    "a percent's width": "{{ '%9999999999d' % 1 }}",
    "a star's width": "{{ '%*d' % (9999999999, 1) }}",
    "an indent": "{{ messages | tojson(indent=1000000000) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_not_end_or_fill_the_memory_is_refused(
    name: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MOST_WORK", 2_000_000)
    monkeypatch.setattr(templates, "MOST_TEXT", 1_000_000)
    with pytest.raises(
        DataError, match=r"The chat template refuses the messages \(user\): .*(end|more than|large)"
    ):
        render(with_template(tokenizer, ENDLESS[name]), [Message("user", "hi")])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("a\n{{ messages | sum }}", r"TypeError.*line 2 of the template"),
        ("{% include 'x' %}", "TypeError"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "RecursionError"),
        ("{% for a in 'x' %}" * 30 + "{% endfor %}" * 30, "SyntaxError"),
        ('{{ "\\ud800" }}', "UnicodeEncodeError"),
        ("{% for %}", r"line 1 of the template"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ ''.__class__.x }}", "unsafe"),
    ],
)
def test_whatever_a_template_raises_is_told_in_one_sentence(
    template: str, says: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(DataError, match=rf"The chat template refuses the messages \(user\): .*{says}"):
        render(with_template(tokenizer, template), [Message("user", "hi")])


def test_a_conversation_of_a_million_characters_is_rendered(tokenizer: PreTrainedTokenizerFast) -> None:
    long = [Message("user" if n % 2 == 0 else "assistant", "word " * 1000) for n in range(201)]
    assert len(render(with_template(tokenizer, FEATURES), long)) > 10**6


def test_a_template_file_is_a_text_file_of_bounded_size(tmp_path: Path) -> None:
    large, odd = tmp_path / "large", tmp_path / "odd"
    large.write_bytes(b"x" * (5 * 2**20))
    odd.write_bytes(b"ok\n\xff")
    for path, says in ((large, "more than 4 MiB"), (odd, "odd:2: not UTF-8"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=says):
            read_template(str(path))
