"""Edits of a YAML text: what is wanted comes out, nothing else changes, comments and order stay."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swept import one_each
from whet.config.parse import parse
from whet.config.tree import get, leaves
from whet.studio.edit import Edited, remove_key, rename_key, set_key
from whet.types import ConfigError

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("tests/dialects/*.yaml")])
ODD = """\
# head
a: &x {b: 1, c: [1, 2, {d: 3}]}   # after an anchor
e: *x
f: |
  line 1
  line 2

# before g
g:
- 1   # one
- - 2
  - 3
- h: 4
  i: 5  # five
  # end of the list

j:   # nothing
k: >-
   folded
   text
"q r": 'single ''quote'
multi: this is
  a plain text
  over lines   # and a comment
? s
: t
flow: {
  a: 1,   # x
  b: [1,
      2,],
}
nul: null  # written out
ü: "ä\\n"
last: end"""
VALUES: list[Any] = [
    1, 2.5, True, None, "text", "a: b", "{x", "- y", "", [1, 2], [], {}, {"a": 1, "b": {"c": [1]}},
    [{"p": 1, "q": "z"}, {"p": 2}], 1e-6, "3", "null", "#no", "a #b", "several\nlines", float("inf"), "${a.b}", "</x>",
]  # fmt: skip


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The oracle: plain values with one of them replaced or added."""
    if not path:
        return value
    if isinstance(tree, list):
        out = [*tree, None] if path[0] == len(tree) else list(tree)
        out[path[0]] = changed(out[path[0]], path[1:], value)
        return out
    return {**(tree or {}), path[0]: changed((tree or {}).get(path[0]), path[1:], value)}


def without(tree: Any, path: tuple[Any, ...]) -> Any:
    inner = without(tree[path[0]], path[1:]) if len(path) > 1 else None
    if isinstance(tree, list):
        return [inner if n == path[0] else one for n, one in enumerate(tree) if n != path[0] or len(path) > 1]
    return {
        key: inner if key == path[0] else one for key, one in tree.items() if key != path[0] or len(path) > 1
    }


def exactly(tree: Any) -> str:
    """Kinds of values and the order of keys count."""
    return repr(tree)


def paths(tree: Any) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(path[:n] for path, _ in leaves(tree) for n in range(1, len(path) + 1)))


def edits(text: str, chance: random.Random) -> Iterator[tuple[Edited, Any]]:
    """(text after an edit, the values it should have) for edits in every place."""
    tree = parse(text).tree
    for path in paths(tree):
        for value in chance.sample(VALUES, 3):
            yield set_key(text, path, value), changed(tree, path, value)
        here = get(tree, path)
        if isinstance(here, list):
            yield set_key(text, (*path, len(here)), {"new": 7}), changed(tree, (*path, len(here)), {"new": 7})
        elif isinstance(here, dict):
            yield set_key(text, (*path, "new", "er"), 7), changed(tree, (*path, "new", "er"), 7)
        if len(get(tree, path[:-1])) > 1:
            yield remove_key(text, path), without(tree, path)


@pytest.mark.parametrize(
    "file", [None, *one_each(FILES, lambda file: (file.parent.name, file.name.partition("_")[0] == "from"))],
    ids=lambda file: file.name if file else "odd",
)  # fmt: skip
def test_an_edit_in_any_place_changes_its_key_alone(file: Path | None) -> None:
    text = file.read_text() if file else ODD
    chance, rewritten, count = random.Random(7), 0, 0
    for made, wanted in edits(text, chance):
        found = parse(made.text)
        assert not found.problems
        assert exactly(found.tree) == exactly(wanted)
        rewritten, count = rewritten + bool(made.rewritten), count + 1
    # a rewritten section loses its comments: in files as people write them that is rare
    assert count > 5
    assert file is None or rewritten <= count // 50, (rewritten, count)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_writing_every_value_again_changes_no_character(file: Path) -> None:
    text = file.read_text()
    tree = parse(text).tree
    for path in paths(tree):
        assert set_key(text, path, get(tree, path)).text == text


@pytest.mark.parametrize("file", one_each(FILES, lambda file: file.parent), ids=lambda file: file.name)
def test_a_value_that_is_changed_and_changed_back_leaves_all_comments(file: Path) -> None:
    text = file.read_text()
    tree = parse(text).tree
    comments = sorted(line.partition("#")[2] for line in text.splitlines() if "#" in line)
    for path, value in random.Random(3).sample(list(leaves(tree)), min(12, len(list(leaves(tree))))):
        there = set_key(text, path, "another")
        back = set_key(there.text, path, value).text
        assert exactly(parse(back).tree) == exactly(tree)
        if not there.rewritten:
            assert sorted(line.partition("#")[2] for line in back.splitlines() if "#" in line) == comments


def test_only_the_value_is_another_one() -> None:
    text = "a:  # section\n  b: 1   # one\n  c: {d: [1, 2], e: x}\n# end\n"
    assert set_key(text, ("a", "b"), 2e-6, "2e-6").text == text.replace("b: 1 ", "b: 2e-6 ")
    assert set_key(text, ("a", "c", "e"), "y, z").text == text.replace("e: x", 'e: "y, z"')
    assert set_key(text, ("a", "c", "d", 2), 3).text == text.replace("[1, 2]", "[1, 2, 3]")
    assert set_key(text, ("a", "f"), True).text == text.replace("e: x}\n", "e: x}\n  f: true\n")
    assert set_key(text, ("g", "h"), None).text == text.replace("e: x}\n", "e: x}\ng:\n  h: null\n")
    assert remove_key(text, ("a", "b")).text == text.replace("  b: 1   # one\n", "")
    assert remove_key(text, ("a", "c", "e")).text == text.replace(", e: x", "")
    assert rename_key(text, ("a", "c"), "k").text == text.replace("c:", "k:")


def test_a_first_key_is_written_below_the_comments() -> None:
    assert (
        set_key("# only a comment\n", ("train", "steps"), 3).text == "# only a comment\ntrain:\n  steps: 3\n"
    )
    assert set_key("", ("seed",), 1).text == "seed: 1\n"
    assert set_key("a: 1", ("b",), 2).text == "a: 1\nb: 2\n"


def test_a_short_form_becomes_a_section_when_a_key_beside_it_is_set() -> None:
    assert set_key("model: folder  # mine\n", ("model", "dtype"), "float32").text == (
        "model:\n  path: folder\n  dtype: float32  # mine\n"
    )
    assert parse(set_key("algorithm: {loss: gspo}\n", ("algorithm", "loss", "clip_low"), 0.1).text).tree == {
        "algorithm": {"loss": {"name": "gspo", "clip_low": 0.1}}
    }
    assert parse(set_key("data: {train: x.jsonl}\n", ("data", "train", 0, "limit"), 5).text).tree == {
        "data": {"train": [{"path": "x.jsonl", "limit": 5}]}
    }
    assert parse(set_key("data: x.jsonl\n", ("data", "order"), "file").text).tree == {
        "data": {"train": [{"path": "x.jsonl"}], "order": "file"}
    }
    in_stage = ("stages", 0, "algorithm", "kl", "coef")
    assert parse(set_key("stages: [{name: a, algorithm: dpo}]\n", in_stage, 1).text).tree == {
        "stages": [{"name": "a", "algorithm": {"name": "dpo", "kl": {"coef": 1}}}]
    }  # fmt: skip


def test_an_empty_section_goes_but_not_one_that_asks_for_something() -> None:
    assert (
        remove_key("seed: 1\ntrain:\n  optimizer:\n    lr: 1e-4\n", ("train", "optimizer", "lr")).text
        == "seed: 1\n"
    )
    assert (
        remove_key("model:\n  lora:\n    rank: 4\n", ("model", "lora", "rank")).text == "model:\n  lora: {}\n"
    )
    assert parse(remove_key("rewards: {a: {weight: 2}}\n", ("rewards", "a", "weight")).text).tree == {
        "rewards": {"a": {}}
    }
    assert remove_key("a: 1\n", ("b", "c")).text == "a: 1\n"


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("a: [1\n", ("a",), "line 2: not valid YAML"),
        ("- 1\n", ("a",), "a config is a mapping of keys"),
        ("a: 1\n", ("a", "b"), "cannot be set inside of a single value"),
        ("a: [1]\n", ("a", 3), "no such entry"),
        ("a: 1\na: 2\n", ("a",), "given twice"),
    ],
)
def test_what_cannot_be_edited_is_said(text: str, path: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        set_key(text, path, 5)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ConfigError, match="taken"):
        rename_key("rewards: {a: {}, b: {}}\n", ("rewards", "a"), "b")
