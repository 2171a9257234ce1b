"""What holds for every dialect's table: well formed, recognised, no typo passes, the pages are the generated ones."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from asked import strange_names
from whet.config.keys import lookup
from whet.dialects import docs
from whet.dialects.kinds import accepts
from whet.dialects.listing import conditions, what_happens
from whet.dialects.match import read, suggest
from whet.dialects.recognise import recognise
from whet.dialects.row import rows, unbuilt
from whet.dialects.tables import FILES, TABLES, dialect, every_line, function, joined, parts, table
from whet.dialects.translate import translate

ROOT = Path(__file__).parent.parent


def the_rows(names=TABLES):
    return [(name, row) for name in names for row in table(name)]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_well_formed(name):
    rows = table(name)
    assert rows, "an empty table"
    assert [n for n, count in Counter(row.key for row in rows).items() if count > 1] == []
    for row in rows:
        assert row.status == "mapped" or row.what, row.key
        assert (row.status == "translated") <= (row.function != ""), row.key
        assert not row.function or callable(function(TABLES[name][0], row.function)), row.key
        assert strange_names(TABLES[name][0], row.when) == [], row.key
        assert accepts(row.type or "null", None) in (True, False), "the type is one that is known"
        for native in row.native if row.status in ("mapped", "translated") else ():
            assert lookup(tuple(native.removesuffix(".*").split("."))), (
                f"{row.key} feeds {native}, which is no key"
            )


@pytest.mark.parametrize("name", FILES)
def test_other_names_lead_to_keys(name):
    of = dialect(name)
    for old, (_new, _) in of.aliases.items():
        assert parts(old) not in of.by_parts, f"{old} is a key and another name"


BUILT = {
    "training in float8",
    "distillation",
    "inference servers",
    "rows of token ids",
    "rollouts beyond those needed",
}
"""Features by names under which keys were once refused."""


@pytest.mark.parametrize("name", TABLES)
def test_no_key_is_refused_for_a_feature_that_is_there(name):
    """What is refused of it has a name of its own, and its line says what is there instead."""
    assert [row.key for row in every_line(name) if row.area in BUILT] == []
    assert [row.key for row in every_line(name) if "run of whet is deterministic" in row.reason] == []


def test_a_policy_that_verl_would_not_train_is_refused():
    for section, wanted in (("fsdp_config", True), ("megatron", True), ("fsdp_config", False)):
        tree = {"actor_rollout_ref": {"actor": {section: {"forward_only": wanted}}}}
        made = translate(tree, dialect("verl-ppo", "0.9.1"), origins={})
        said = [text for _, text in made.problems if "forward_only" in text]
        assert len(said) == wanted
        assert all("builds no optimizer" in text for text in said)


@pytest.mark.parametrize("page", docs.PAGES)
def test_few_keys_are_refused(page):
    rows = [row for name in docs.PAGES[page][1] for row in table(name)]
    idle = [row.key for row in rows if row.status == "refused"]
    assert len(idle) < 0.05 * len(rows), idle


@pytest.mark.parametrize("name", list(FILES))
def test_defaults_do_not_contradict_each_other(name):
    """Whatever functions complain about is a value that a file must give, not two defaults that disagree."""
    made = translate({}, dialect(name), origins={})
    assert not [text for _, text in made.problems if "asks for" in text or "unknown key" in text]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_all_keys_is_recognised_and_has_none_unknown(name):
    of, tree = dialect(name), {}
    for row in of.rows:
        if parts(row.key) not in of.below and row.key not in of.optional:
            put(tree, parts(row.key), row.default)
    key, values = FILES[of.name].sign
    if key:
        put(tree, parts(key), values[0])
    assert [found.cut for found in read(tree, of) if found.row is None and not found.is_section] == []
    assert recognise(tree) == name
    assert recognise(tree, name) == name


def test_1000_typos_are_refused_and_the_right_key_comes_first():
    draw, right = random.Random(7), 0
    closed = [
        (name, parts(row.key))
        for name in FILES
        for row in dialect(name).rows
        if "*"
        not in dialect(name).below[parts(row.key)[:-1]]  # beside an open name nothing is a typo for sure
    ]
    for name, key in draw.sample(closed, 1000):
        of, wrong = dialect(name), key
        while is_right(wrong, key, of):
            wrong = typo(key, draw)
        tree = {}
        put(tree, wrong, 1)
        unknown = [one for one in read(tree, of) if one.row is None and not one.is_section]
        assert unknown, f"{joined(wrong)} passes"
        right += suggest(unknown[0].cut, of)[:1] == [joined(key).removesuffix("[]")]
    assert right >= 950


@pytest.mark.parametrize("name", FILES)
def test_the_last_part_of_a_key_leads_to_it(name):
    """Also where a key of the top level is nearly the same: `lr` is no `log`."""
    of = dialect(name)
    ends = {key[-1] for key in of.by_parts} - {"*", "[]", "<name>"}
    alone = {end for end in ends if (end,) not in of.by_parts and (end,) not in of.below}
    found = {end: suggest((end,), of)[:1] for end in alone}
    assert {end: keys for end, keys in found.items() if [parts(key)[-1] for key in keys] != [end]} == {}


def is_right(wrong, key, of):
    """Whether a typo made another key, or led into another section."""
    others = [wrong[:n] for n in range(1, len(wrong) + 1) if wrong[:n] != key[:n]]
    known = any(cut in of.below or cut in of.by_parts for cut in others)
    return not others or known or joined(wrong) in of.aliases


def put(tree, cut, value):
    """Put a value into a file at a row's parts; lists have one entry, names of the user's are `mine`."""
    for part, after in zip(cut, (*cut[1:], None)):
        key = 0 if part == "[]" else "of_mine" if part in ("<name>", "*") else part
        new = value if after is None else [{}] if after == "[]" else {}
        if isinstance(tree, dict) and not isinstance(tree.get(key), dict | list):
            tree[key] = new
        tree = tree[key]


def typo(cut, draw):
    """One or two letters of one part changed."""
    places = [n for n, part in enumerate(cut) if part not in ("[]", "<name>")]
    at = draw.choice(places)
    text = cut[at]
    for _ in range(draw.choice((1, 2))):
        n, letter = draw.randrange(len(text) + 1), draw.choice("abcdefghijklmnopqrstuvwxyz_")
        text = draw.choice(
            [text[:n] + letter + text[n:], text[:n] + text[n + 1 :], text[:n] + letter + text[n + 1 :]]
        )
        text = text or letter
    return (*cut[:at], text, *cut[at + 1 :])


@pytest.mark.parametrize("system", ["verl", "skyrl", "cosmos", "trinity"])
def test_values_that_are_not_built_are_those_of_keys(system):
    keys = {row.key for row in rows(system)}
    assert [key for key in unbuilt(system) if key not in keys] == []


@pytest.mark.parametrize("system", ["verl", "skyrl", "cosmos", "trinity"])
def test_a_row_that_does_not_always_count_says_when(system):
    assert conditions(system).keys() == {row.when for row in rows(system) if row.when}
    of = {kind for kind, (named, _) in TABLES.items() if named == system}
    for row in (row for kind in of for row in every_line(kind) if row.when):
        assert f"Only read {conditions(system)[row.when]}." in what_happens(row, system)


@pytest.mark.parametrize("name", docs.PAGES)
def test_the_committed_page_is_the_generated_one(name):
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == docs.page(name), "run: make docs"


def test_the_list_of_keys_needs_no_torch():
    code = (
        "import sys; from whet.cli import app; app(['keys', '--json'], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert len(listed) == sum(len(every_line(name)) for name in TABLES)
    assert set(listed[0]) == {"dialect", "key", "since", "until", "status", "native", "reason", "unbuilt"}
