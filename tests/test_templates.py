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
    "a width within the limit of a product": "{{ 'x'.ljust(5000000) }}",
    "slices of a long text": (
        "{% set s = 'a' * 99999 %}{% for i in range(999) %}{% set y = s[1:] %}{% endfor %}"
    ),
    "a hash of pairs of pairs": (
        "{% set a0 = (1, 1) %}"
        + "".join(f"{{% set a{n + 1} = (a{n}, a{n}) %}}" for n in range(60))
        + "{% set d = {a60: 1} %}"
    ),
    "a table of long texts": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "widths of a format, each given": "{{ '{:{}{}}'.format('a', '9999', '999999') }}",
    "many widths of a format": "{{ ('{0:9999}' * 1000).format(1) }}",
    "many widths of a percent": "{{ ('%(a)9999d' * 1000) % {'a': 1} }}",
    "many long values of a percent": "{{ ('%(a)s' * 9999) % {'a': 'x' * 9999} }}",
    "the same by the filter": "{{ ('%(a)s' * 9999) | format(a='x' * 9999) }}",
    "a division of long numbers": "{{ ('f' * 99999) | int(base=16) // ('f' * 49999) | int(base=16) }}",
    "a long text in a loop": "{% for i in range(999) %}{% set x %}" + "z" * 9999 + "{% endset %}{% endfor %}",
    "a long text read as a number": (
        "{% set s = '1' * 99999 %}{% for i in range(999) %}{{ (s | float) is string }}{% endfor %}"
    ),
    "lists added to lists": "{{ range(9999) | list | batch(1) | sum(start=[]) }}",
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
        ("{{ ('ab' * 9).encode('punycode') }}", "'encode' of 'str' object is unsafe"),
        ("{{ (1).to_bytes(8000000000, 'big') }}", "'to_bytes' of 'int' object is unsafe"),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
    ],
)
def test_whatever_a_template_raises_is_told_in_one_sentence(
    template: str, says: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(DataError, match=rf"The chat template refuses the messages \(user\): .*{says}"):
        render(with_template(tokenizer, template), [Message("user", "hi")])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 1717171717171 | tojson }}", "1717171717171"),
        ("{{ [9999999999] | map('tojson') | join }}", "9999999999"),
        ("{{ 9999999999 | replace('9', '1') }}", "1111111111"),
        ("{{ '%s-1234567' | format(1717171717171) }}", "1717171717171-1234567"),
        ('{{ \'{"a": {"b": %s}}\' | format(1) }}', '{"a": {"b": 1}}'),
        ("{{ '**%s**' | format('x') }}", "**x**"),
        ("{{ '{{{}}}'.format(99999999999) }}", "{99999999999}"),
        ("{{ (('p' * 9999) ~ '{}').format('x' * 500000) | length }}", "509999"),
        ("{% set a, b = (1, [2, {'c': 3}]) %}{{ a }}{{ b[1:] | tojson }}", '1[{"c": 3}]'),
        ("{{ [[1], [2, 3]] | sum(start=[]) }}{{ [1, 2] | sum }}", "[1, 2, 3]3"),
    ],
)
def test_what_only_looks_large_is_rendered(
    template: str, text: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A number that is written is no width, and a long format is no longer for being long."""
    assert render(with_template(tokenizer, template), [Message("user", "hi")]) == text


def test_a_conversation_of_a_million_characters_is_rendered(tokenizer: PreTrainedTokenizerFast) -> None:
    long = [Message("user" if n % 2 == 0 else "assistant", "word " * 1000) for n in range(201)]
    assert len(render(with_template(tokenizer, FEATURES), long)) > 10**6


def test_each_message_may_ask_how_many_there_are(tokenizer: PreTrainedTokenizerFast) -> None:
    """As Qwen3's template does: the work grows with the conversation, not with its square."""
    long = [Message("user" if n % 2 == 0 else "assistant", "word " * 100) for n in range(1000)]
    asks = (
        "{% for m in messages[::-1] %}"
        "{% if m.content is string and messages is iterable and (messages|first).role == 'user' %}"
        "{% set index = (messages|length - 1) - loop.index0 %}{{ index }} {% endif %}{% endfor %}"
    )
    assert render(with_template(tokenizer, asks), long).split() == [str(n) for n in reversed(range(1000))]


def test_a_template_file_is_a_text_file_of_bounded_size(tmp_path: Path) -> None:
    large, odd = tmp_path / "large", tmp_path / "odd"
    large.write_bytes(b"x" * (5 * 2**20))
    odd.write_bytes(b"ok\n\xff")
    for path, says in ((large, "more than 4 MiB"), (odd, "odd:2: not UTF-8"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=says):
            read_template(str(path))
