"""A thousand random typos of native keys, and some of every dialect's: refused, and the right key is named first."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from test_dialect_tables import put, typo
from whet.config.keys import dotted, is_list, keys, lookup
from whet.config.keys import suggest as suggest_native
from whet.config.load import load
from whet.dialects.match import read, suggest
from whet.dialects.tables import FILES, dialect, joined, parts
from whet.tables import find
from whet.types import ConfigError

SHARE = 0.95
"""Of the typos, how many must lead to the right key in the first place."""


def native_typo(draw: random.Random) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(a key, the same with one or two letters of one of its parts changed, as far as that part)."""
    names = [path for path in keys() if path[-1] != "*"]
    while True:
        path = draw.choice(names)
        at = draw.choice([n for n, part in enumerate(path) if part != "*"])
        right = path[: at + 1]
        wrong = (*right[:-1], *typo(right[-1:], draw))
        if lookup(wrong) is None:
            return right, wrong


def tree_of(path: tuple[str, ...]) -> Any:
    """A config with a value at a path; lists have one entry, names are `mine`."""
    tree: Any = 1
    for n in range(len(path) - 1, -1, -1):
        above = keys().get(path[:n])
        listed = path[n] == "*" and above is not None and is_list(above)
        tree = [tree] if listed else {"mine" if path[n] == "*" else path[n]: tree}
    return tree


def test_1000_typos_of_native_keys_lead_to_the_right_one() -> None:
    draw = random.Random(11)
    pairs = [native_typo(draw) for _ in range(1000)]
    right = sum(suggest_native(wrong)[:1] == [dotted(key)] for key, wrong in pairs)
    assert right >= SHARE * 1000, right


def test_typos_of_native_keys_are_refused_by_name() -> None:
    draw = random.Random(12)
    for _ in range(150):
        key, wrong = native_typo(draw)
        with pytest.raises(ConfigError) as error:
            load(None, (), json.loads(json.dumps(tree_of(wrong))))
        assert f"{wrong[-1]}: unknown key" in str(error.value), (key, wrong)


@pytest.mark.parametrize("name", FILES)
def test_typos_of_every_dialect_are_refused_and_lead_to_the_right_key(name: str) -> None:
    draw, of, right = random.Random(name), dialect(name), 0
    closed = [cut for row in of.rows if "*" not in of.below[(cut := parts(row.key))[:-1]]]
    for _ in range(250):
        key = wrong = draw.choice(closed)
        while wrong in of.by_parts or wrong in of.below or joined(wrong) in of.aliases:
            wrong = typo(key, draw)
        tree: dict[str, Any] = {}
        put(tree, wrong, 1)
        unknown = [one for one in read(tree, of) if one.row is None and not one.is_section]
        assert unknown, f"{joined(wrong)} passes"
        right += suggest(unknown[0].cut, of)[:1] == [joined(key).removesuffix("[]")]
    assert right >= SHARE * 250, right


@pytest.mark.parametrize("wrong", ["{file}::f", "{file}.f", "{file}:f()", "{file}::f()"])
def test_a_function_in_the_form_of_another_tool_is_told_the_form_of_this_one(tmp_path, wrong):
    file = tmp_path / "own.py"
    file.write_text("def f(response): return 1.0\n")
    for table in ({}, {"exact": len}):
        with pytest.raises(ConfigError, match=f"expected '{file}:f'$"):
            find(table, wrong.format(file=file), what="function")
    assert find({}, f"{file}:f", what="function")("") == 1.0


@pytest.mark.parametrize("given", ["{folder}/own", "{folder}/own.txt"])
def test_a_path_is_a_file_whose_name_ends_in_py(tmp_path, given):
    (tmp_path / "own.txt").write_text("def f(response): return 1.0\n")
    with pytest.raises(ConfigError, match=r"no such file: |expected a name that ends in \.py"):
        find({}, given.format(folder=tmp_path) + ":f", what="function")
