"""rules.tsv of the dialects: what its words mean, in which order rules are asked, and that every line can hold."""

from __future__ import annotations

import re
from typing import Any

import pytest

from asked import is_function, strange, strange_names
from whet.config.keys import lookup
from whet.config.tree import path_of
from whet.dialects import rules
from whet.dialects.row import NOTHING, AnotherModel, NotSupportedYet, rows
from whet.dialects.tables import dialect
from whet.dialects.translate import translate
from whet.dialects.versions import VERSION
from whet.tables import lines
from whet.types import ConfigError

LINES = lines("whet.dialects", "rules.tsv")


@pytest.mark.parametrize(
    "line", LINES, ids=lambda line: f"{line['system']}-{line['function']}-{line['when']}"
)
def test_each_line_names_what_there_is(line: dict[str, str]) -> None:
    system = line["system"]
    instead = {each["text"] for each in LINES if each["rule"] == "instead" and each["system"] == system}
    named = {row.function for row in rows(system)} | instead
    assert line["function"] in named, "a row of the table has the function, or another one is replaced by it"
    assert line["rule"] in ("read", "set", "add", "instead", *rules.ERRORS)
    assert line["rule"] != "instead" or is_function(system, line["text"])
    assert (line["text"] == "") == (line["rule"] == "read")
    assert (line["native"] != "") == (line["rule"] in ("set", "add"))
    assert not line["native"] or lookup(path_of(line["native"], ())), "the native key is one"
    assert strange_names(system, line["when"]) == []
    assert strange(system, (found[0] for found in re.findall(rules.VALUE, line["text"]))) == []


@pytest.mark.parametrize(
    ("words", "values", "holds"),
    [
        ("", {}, True),
        ("a.b", {"a.b": 1}, True),
        ("not a.b", {"a.b": []}, True),
        ("a.b is null", {"a.b": None}, True),
        ("a.b is c.d", {"a.b": 3, "c.d": 3}, True),
        ("a.b is not c.d", {"a.b": 3, "c.d": 3}, False),
        ("a.b < c.d", {"a.b": 2, "c.d": 3}, True),
        ("a.b is one of x, false", {"a.b": False}, True),
        ("a.b is x or a.b > 1 and c.d", {"a.b": "x", "c.d": False}, True),
        ("(a.b is x or a.b is y) and c.d", {"a.b": "x", "c.d": False}, False),
        ("roles.has_critic", {"algorithm.adv_estimator": "gae"}, True),
        ("roles.has_critic", {"algorithm.adv_estimator": "grpo"}, False),
        ("since_0.7.0", {VERSION: "0.7.1"}, True),
        ("since_0.7.0", {VERSION: "0.6.1"}, False),
        ("of.another_version is null", {}, True),
    ],
)
def test_words_over_values(words: str, values: dict[str, object], holds: bool) -> None:
    assert rules.condition("verl", words)(values) is holds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{a.b}", {"x": [1]}),
        ("word", "word"),
        ("1", 1),
        ("null", None),
        ('"1"', "1"),
        ("at_{c.d}", "at_7"),
        ('{"n": {c.d}, "list": [{e.f}]}', {"n": 7, "list": ["text"]}),
        ("{e.f}.{c.d}", "text.7"),
        ("{g.h:as sft dtype}", "bfloat16"),
    ],
)
def test_what_is_set(text: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"rule": "set", "when": "", "native": "model.path", "text": text}
    monkeypatch.setattr(rules, "rules_of", lambda system: {"x.y": [line]})
    ask = rules.function.__wrapped__("verl", "x.y")
    assert ask({"a.b": {"x": [1]}, "c.d": 7, "e.f": "text", "g.h": "bf16"}) == {"model.path": value}


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ("fp8", ConfigError, 'g.h: got "fp8", expected one of fp32, float32, bf16, bfloat16, fp16'),
        ("fp16", NotSupportedYet, "g.h=fp16 is coming, not built yet; today: fp32, float32, bf16, bfloat16"),
    ],
)
def test_a_value_that_is_none_of_a_choice(
    value: str, error: type[ConfigError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"rule": "set", "when": "", "native": "model.dtype", "text": "{g.h:as sft dtype}"}
    monkeypatch.setattr(rules, "rules_of", lambda system: {"x.y": [line]})
    with pytest.raises(error) as raised:
        rules.function.__wrapped__("verl", "x.y")({"g.h": value})
    assert (type(raised.value), str(raised.value)) == (error, said)


def test_entries_are_added_to_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [("set", "", "[]"), ("add", "a.b", "one"), ("add", "c.d", "{e.f}")]
    keys = ("rule", "when", "text")
    monkeypatch.setattr(
        rules,
        "rules_of",
        lambda system: {"x.y": [{**dict(zip(keys, line)), "native": "train.offload"} for line in told]},
    )
    ask = rules.function.__wrapped__("verl", "x.y")
    assert ask({"a.b": False, "c.d": False, "e.f": "two"}) == {"train.offload": []}
    assert ask({"a.b": True, "c.d": True, "e.f": "two"}) == {"train.offload": ["one", "two"]}


def test_what_stands_before_a_line_that_does_not_hold_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """read ends the matter where it stands, and instead goes on with another function."""
    names = ("rule", "when", "native", "text")
    told = (
        ("set", "", "model.path", "{a.b}"),
        ("instead", "a.b is 2", "", "x.z"),
        ("read", "a.b > 2", "", ""),
        ("set", "", "model.dtype", "float32"),
    )
    other = {"rule": "set", "when": "", "native": "model.dtype", "text": "bfloat16"}
    found = {"x.y": [dict(zip(names, line)) for line in told], "x.z": [other]}
    monkeypatch.setattr(rules, "rules_of", lambda system: found)
    monkeypatch.setattr(rules, "function", rules.function.__wrapped__)
    ask = rules.function("verl", "x.y")
    assert ask({"a.b": 1}) == {"model.path": 1}
    assert ask({"a.b": 2}) == {"model.path": 2, "model.dtype": "bfloat16"}
    assert ask({"a.b": 3}) == {"model.path": 3, "model.dtype": "float32"}


def test_the_first_rule_that_does_not_pass_ends_the_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function whose keys rest is not asked, and refuses nothing; one with rules alone gives nothing."""
    names = ("rule", "when", "text")
    told = (
        ("read", "a.b", ""),
        ("coming", "a.b > 5", "a.b={a.b}: {c.d!r} is coming"),
        ("refused", "a.b > 3", "a.b={a.b}, not {c.d:shown}"),
        ("others", "a.b is 2", "no language model"),
    )
    monkeypatch.setattr(rules, "rules_of", lambda system: {"x.y": [dict(zip(names, line)) for line in told]})
    ask = rules.function.__wrapped__("verl", "x.y")
    assert ask({"a.b": 0, "c.d": "x"}) == ask({"a.b": 1, "c.d": "x"}) == NOTHING
    for value, error, said in (
        (6, NotSupportedYet, "a.b=6: 'x' is coming"),
        (4, ConfigError, 'a.b=4, not "x"'),
        (2, AnotherModel, "no language model"),
    ):
        with pytest.raises(error) as raised:
            ask({"a.b": value, "c.d": "x"})
        assert type(raised.value) is error
        assert str(raised.value) == said
    with pytest.raises(ValueError, match=r"no function x\.z, and no rule of it"):
        rules.function.__wrapped__("verl", "x.z")


def test_a_condition_over_a_value_that_a_function_refuses() -> None:
    """What an unknown algorithm trains is not known; that it is unknown is told once, by the function that reads it."""
    tree: dict[str, Any] = {"algorithm": {"algorithm_type": "new"}, "model": {"model_path": "x"}}
    tree["trainer"] = {"trainer_config": {"critic": {"strategy": "other", "ppo_epochs": 2}}}
    made = translate(tree, dialect("trinity"), origins={})
    assert any("'new' is not known" in said for _, said in made.problems)


def test_a_reference_to_what_cannot_be_meant() -> None:
    """The key that is referred to is wrong; its default stands in for both."""
    keys = ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu")
    critic = {"use_dynamic_bsz": True, keys[0]: "many", keys[1]: f"${{critic.{keys[0]}}}"}
    tree = {"algorithm": {"adv_estimator": "gae"}, "critic": critic}
    made = translate(tree, dialect("verl-ppo"), origins={})
    assert [said for _, said in made.problems if "many" in said] == [
        f'critic.{key}: got "many", expected a whole number >= 1' for key in keys
    ]


@pytest.mark.parametrize("base", [{"model_engine": "dp"}, {"actor": "dp_actor"}])
def test_verl_s_own_list_of_files_names_fsdp_dp(base: dict[str, str]) -> None:
    """As ppo_trainer.yaml of its main branch begins."""
    made = translate({"defaults": [base, "_self_"]}, dialect("verl-ppo"), origins={})
    same = translate({}, dialect("verl-ppo"), origins={})
    assert (made.problems, made.tree) == (same.problems, same.tree)
