"""Whatever a key of another system says: its function gives native keys that there are, of the right kind, or says what
is wrong. A key that does not exist would be told to the user as a fault of the file."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

import test_dead_cosmos
import test_dead_skyrl
import test_dead_trinity
import test_dead_verl
from asked import is_free, strange_natives
from swept import except_for
from test_dialect_tables import put
from whet import dialects
from whet.config.keys import TABLES, keys, lookup, settings
from whet.config.schema import Config
from whet.config.tree import merge, path_of
from whet.dialects.kinds import KINDS, accepts, same, understood
from whet.dialects.row import Reference, Row
from whet.dialects.rules import rules_of
from whet.dialects.style import overridden
from whet.dialects.tables import FILES, Dialect, dialect, parts
from whet.dialects.translate import translate
from whet.dialects.typed import lines_of
from whet.dialects.values import nested, reading
from whet.dialects.versions import VERSIONS
from whet.tables import lines
from whet.types import ConfigError, Json

Tree = dict[str, Any]

PACKAGE = Path(dialects.__file__).parent


# ---------------------------------------------------------------- native keys


def faults(native: Mapping[str, Json], *, kinds: bool) -> Iterator[str]:
    """What is wrong with native keys by themselves; `kinds`: with their values, too."""
    strange = strange_natives(native)
    yield from (f"{key} is no native key" for key in strange)
    for key, value in native.items() if kinds else ():
        found = lookup(path_of(key, ()))
        if found and not isinstance(value, Reference) and (said := wrong(".".join(found.path), value)):
            yield f"{key}={value!r}: {said}"


@functools.cache
def adapter(key: str) -> TypeAdapter[Any]:
    found = lookup(tuple(key.split(".")))
    assert found is not None
    return TypeAdapter(found.annotation)


def wrong(key: str, value: Json) -> str:
    """Why a value is not one of a native key, or ''. A null is left out, where nothing else is said."""
    if value is None:
        return ""
    try:
        adapter(key).validate_json(json.dumps(value))
    except ValidationError as e:
        return str(e.errors(include_url=False)[0]["msg"])
    return ""


# ---------------------------------------------------------------- values


@functools.cache
def texts_of(system: str, module: str) -> tuple[str, ...]:
    """The words that a module of a system's package has: names of choices are among them."""
    file = PACKAGE / system / f"{module}.py"
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])
    found = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return tuple(dict.fromkeys(t for t in found if isinstance(t, str) and re.fullmatch(r"[\w+-]{2,40}", t)))


@functools.cache
def compared(system: str) -> dict[str, list[str]]:
    """By key: the words that rules compare it with."""
    found: dict[str, list[str]] = {}
    for line in (line for ruled in rules_of(system).values() for line in ruled):
        for key, word in re.findall(r"([\w.]+) is (?:not )?(?:one of )?([\w.-]+)", line["when"]):
            found.setdefault(key, []).append(word)
    return found


OF_KIND: dict[str, tuple[Json, ...]] = {
    "bool": (True, False),
    "int": (0, 1, 2, 64),
    "number": (0, 1, 2, 0.5, math.nan, math.inf),
    "share": (0.5, 1),
    "list": ([], ["other"], [1], [{}]),
    "text": ("other", "", "/"),
    "texts": (["other"], []),
    "numbers": ([0.5, 0.9],),
    "ints": ([1, 2],),
    "function": ("mine.py:score",),
    "section": ({}, {"a": 1}),
}
ANY: tuple[Json, ...] = (True, 0, 2, 0.5, "other", ["other"], {"a": 1})
"""What the key of no type is given."""


def is_told(row: Row, value: Json) -> bool:
    """Whether the table itself says that it may have this value, which then must be one of the native key's."""
    kinds = row.type.split("|")
    named = [each for kind in kinds if kind.startswith("one_of:") for each in kind[7:].split(",")]
    if isinstance(value, bool) or value is None:
        return row.type != "" and accepts(row.type, value)
    return value in named if isinstance(value, str) else same(value, row.default)


def values_of(row: Row) -> Iterator[Json]:
    """Values that the table says it may have."""
    yield from (row.default, None, *row.harmless)
    for kind in row.type.split("|"):
        if kind.startswith("one_of:"):
            yield from kind.removeprefix("one_of:").split(",")
        else:
            yield from OF_KIND.get(re.split("[>]", kind)[0], ("other",) if kind in KINDS else ())
    if not row.type:
        yield from ANY


def words_of(row: Row, system: str) -> Iterator[str]:
    """Words that its function may know, where it may be any text."""
    yield from compared(system).get(row.key, ())
    yield from (line["value"] for line in lines_of(system, row.key))
    if row.function and (not row.type or "text" in row.type.split("|")):
        yield from texts_of(system, row.function.split(".")[0])


# ---------------------------------------------------------------- files


@functools.cache
def context(kind: str, key: str) -> str:
    """A small file, as JSON, in which the key is read."""
    if kind == "verl-ppo":
        return json.dumps(test_dead_verl.file(test_dead_verl.CONTEXTS.get(key, {})))
    if kind == "verl-sft":
        return json.dumps(test_dead_verl.file(test_dead_verl.SFT_CONTEXTS.get(key, {})))
    if kind == "trinity" and key in test_dead_trinity.CONTEXTS:
        return json.dumps(test_dead_trinity.CONTEXTS[key])
    if kind == "skyrl":
        fits = max(filter(key.startswith, test_dead_skyrl.CONTEXTS), key=len, default="")
        given = [x for x in test_dead_skyrl.CONTEXTS.get(fits, []) if not x.startswith("whet.")]
        return json.dumps(overridden({}, {}, given).tree)
    if kind.startswith("cosmos"):
        own = test_dead_cosmos.VALIDATES if key.startswith("validation.") else {}
        flat = test_dead_cosmos.BASE[kind.partition("-")[2]] | test_dead_cosmos.CONTEXTS.get(key, own)
        return json.dumps(nested({path_of(k, ()): v for k, v in flat.items() if not k.startswith("whet.")}))
    return json.dumps(test_dead_trinity.base() if kind == "trinity" else {})


@functools.cache
def read_as(kind: str, version: str, text: str) -> Any:
    return reading(json.loads(text), dialect(kind, version), origins={})


def outcomes(of: Dialect, row: Row, *, words: bool) -> Iterator[str]:
    """What is wrong with what the row's function gives, over the values of the key and the files it is read in."""
    tried = [*values_of(row), *(words_of(row, of.system) if words else ())]
    for text in dict.fromkeys(("{}", context(of.name, row.key))):
        file = read_as(of.name, of.version, text)
        for value in tried:
            v, problem = understood(value, row, default=file.defaults.get(row.key), nulls=of.nulls)
            if problem:
                continue
            try:
                native = of.functions(row.function)({**file.values, row.key: v})
            except ConfigError:
                continue
            except Exception as e:
                yield f"{row.key}={value!r} in {text}: {type(e).__name__}: {e}"
                continue
            yield from (
                f"{row.key}={value!r} in {text}: {said}" for said in faults(native, kinds=is_told(row, v))
            )


WHERE_READ: dict[str, Tree] = {
    "actor_rollout_ref.actor.veomni.router_replay.mode": {"actor_rollout_ref.actor.strategy": "veomni"},
    "actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_bias_update_rate": {
        "actor_rollout_ref.actor.strategy": "megatron"
    },
    "trainer.ref.megatron_config.moe_enable_routing_replay": {"trainer.strategy": "megatron"},
    "distillation.include_prompt": {"distillation.enable": True},
    "buffer.trainer_input.auxiliary_buffers.<name>.storage_type": {"algorithm.algorithm_type": "mix"},
    "buffer.trainer_input.experience_buffer.path": {"mode": "train", "algorithm.algorithm_type": "grpo"},
}
"""What else a file says where a value that is not built is read."""
NAMES = {"[]": 0, "<name>": "sft_dataset", "*": "any"}


def single(text: str) -> Iterator[Json]:
    """The values that unbuilt.tsv names by themselves, without words about other keys; all of them, or none."""
    words = text.split(", ")
    if all(re.fullmatch(r"true|above 0|[\w:/.+-]+", word) for word in words) and not {*words} & VAGUE:
        yield from (True if word == "true" else 1 if word == "above 0" else word for word in words)


VAGUE = {"any", "given", "operators"}
UNBUILT = [
    (line["system"], line["key"], value)
    for line in lines("whet.dialects", "unbuilt.tsv")
    for value in single(line["value"])
    if ".tasksets[]." not in line["key"]  # read by what reads `taskset`
]


def is_plain(row: Row) -> bool:
    return not {"[]", "<name>", "*"} & set(parts(row.key))


KINDS_AND_VERSIONS = [
    pytest.param(name, version, id=f"{name}-{version}")
    for name in FILES
    for version in VERSIONS[dialect(name).system]
]


def newest(case: Any) -> bool:
    name, version = case.values
    return bool(version == VERSIONS[dialect(name).system][-1])


@pytest.mark.parametrize("words", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("name", "version"),
    [
        pytest.param(*case.values, id=case.id, marks=() if newest(case) else pytest.mark.sweep)
        for case in KINDS_AND_VERSIONS
    ],
)
def test_every_value_of_a_key_gives_native_keys_that_there_are(name: str, version: str, words: bool) -> None:
    of = dialect(name, version)
    rows = [row for row in of.rows if row.function and is_plain(row) and parts(row.key) not in of.below]
    assert [text for row in rows for text in outcomes(of, row, words=words)] == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("skyrl", "trainer.policy.optimizer_config.max_grad_norm"),
        ("skyrl", "trainer.arctic_rl.lr_warmup_ratio"),
        ("cosmos-grpo", "train.optm_warmup_steps"),
        ("trinity", "trainer.grad_clip"),
        ("verl-ppo", "data.oversample_factor"),
    ],
)
def test_numbers_that_are_none_are_refused_by_name(kind: str, key: str, value: float) -> None:
    """A norm of NaN is no clipping to a comparison, and infinity is no number of steps."""
    of = dialect(kind, VERSIONS[dialect(kind).system][-1])
    made = translate(nested({path_of(key, ()): value}), of, origins={})
    assert any(text.startswith(f"{key}: got ") and "a number" in text for _, text in made.problems)


# ---------------------------------------------------------------- whole files


def tree_of(of: Dialect, row: Row, value: Json) -> Tree:
    """The file in which a key is read, with this value at it."""
    tree: Tree = json.loads(context(of.name, row.key))
    put(tree, parts(row.key.removesuffix(".*")), value)
    return tree


def said_of(of: Dialect, row: Row, value: Json) -> str:
    """What is wrong with the translation of a file: an exception, or a native key that does not exist."""
    tree = tree_of(of, row, value)
    try:
        made = translate(tree, of, origins={})
    except Exception as e:
        return f"{tree}: {type(e).__name__}: {e}"
    try:
        Config.model_validate_json(json.dumps(made.tree))
    except ValidationError as e:
        strange = [fault["loc"] for fault in e.errors() if fault["type"] == "extra_forbidden"]
        return f"{tree}: {strange} are no native keys" if strange else ""
    return ""


def in_lists(of: Dialect) -> list[Row]:
    """Rows whose value is found by its place in the file, those of sections among them."""
    return [row for row in of.rows if row.function and (not is_plain(row) or parts(row.key) in of.below)]


def is_of_a_stage(row: Row) -> bool:
    return row.key.startswith("stages[]")


@pytest.mark.parametrize("name", except_for(lambda name: name not in ("trinity", "verl-ppo"), FILES))
def test_every_value_in_a_list_or_a_section_is_translated_or_refused(name: str) -> None:
    of = dialect(name, VERSIONS[dialect(name).system][-1])
    rows = [row for row in in_lists(of) if not is_of_a_stage(row)]
    tried = ((row, value) for row in rows for value in (*values_of(row), *ANY))
    assert [text for row, value in tried if (text := said_of(of, row, value))] == []


@pytest.mark.sweep
@pytest.mark.parametrize("system", VERSIONS)
def test_every_word_of_the_code_in_a_list_is_translated_or_refused(system: str) -> None:
    """The names that a list may have are words of the code."""
    names = [name for name in FILES if dialect(name).system == system]
    of_names = [dialect(name, VERSIONS[system][-1]) for name in names]
    rows = [(of, row) for of in of_names for row in in_lists(of) if not is_of_a_stage(row)]
    tried = ((of, row, word) for of, row in rows for word in words_of(row, system))
    assert [text for of, row, word in tried if (text := said_of(of, row, word))] == []


@pytest.mark.sweep  # a stage is translated as a file of its own
def test_every_value_of_a_stage_is_translated_or_refused() -> None:
    of = dialect("trinity", VERSIONS["trinity"][-1])
    rows = [row for row in in_lists(of) if is_of_a_stage(row)]
    assert [text for row in rows for value in ANY if (text := said_of(of, row, value))] == []


@pytest.mark.parametrize(
    "entry",
    [{"tensor_parallel_size": {"a": 1}}, {"engine_num": ["a"]}, {"tensor_parallel_siz": 2}, 3, "a", None],
)
def test_what_cannot_be_meant_in_a_list_reaches_no_function(entry: Json) -> None:
    """It is refused where it stands, and the functions read the list without it."""
    tree = test_dead_trinity.base()
    tree["explorer"] = {"auxiliary_models": [entry]}
    made = translate(tree, dialect("trinity", "0.6.0"), origins={})
    assert [text for _, text in made.problems if text.startswith("explorer.auxiliary_models[")]
    made = translate(test_dead_trinity.base() | {"stages": [entry]}, dialect("trinity"), origins={})
    assert [text for _, text in made.problems if "stages[]" in text]
    stage: Tree = {"stage_name": "first", "algorithm": "grpo"}
    made = translate(test_dead_trinity.base() | {"stages": [stage]}, dialect("trinity"), origins={})
    assert [text for _, text in made.problems if text.startswith("stages[].algorithm: got")]


# ---------------------------------------------------------------- what no test reaches


def names_in(system: str) -> Iterator[tuple[str, str]]:
    """(where, the text) of each dotted name in the code of a system that begins with a section of the config; what is
    put into it as the code runs is \0."""
    for file in sorted((PACKAGE / system).glob("*.py")):
        module = importlib.import_module(f"{dialects.__name__}.{system}.{file.stem}")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        parts_of_others = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        for node in ast.walk(tree):
            text = "" if id(node) in parts_of_others else spelled(node, vars(module))
            if (
                re.fullmatch(r"[\w\0]+(\.[\w\0*]+|\[\0\])+", text)
                and text.split(".")[0] in Config.model_fields
            ):
                yield f"{system}/{file.name}:{getattr(node, 'lineno', 0)}", text


def spelled(node: ast.AST, names: Mapping[str, Any]) -> str:
    """A text of the code, with the constants of its module in their places."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        told = names.get(node.value.id) if isinstance(node.value, ast.Name) else None
        return told if isinstance(told, str) else "\0"
    return "".join(spelled(part, names) for part in node.values) if isinstance(node, ast.JoinedStr) else ""


@functools.cache
def known(system: str) -> str:
    """All native keys, and the keys and sections of a system, one a line."""
    theirs = (
        parts(row.key) for name in FILES if dialect(name).system == system for row in dialect(name).rows
    )
    other = {".".join(cut[:n]) for cut in theirs for n in range(1, len(cut) + 1)}
    return "\n".join(sorted(other | {".".join(path) for path in (*keys(), *settings())}))


@pytest.mark.parametrize("system", VERSIONS)
def test_names_in_the_code_are_keys(system: str) -> None:
    """Also in branches that no file of a test reaches."""
    strange = []
    for where, text in names_in(system):
        path = path_of(text.replace("\0", "a"), ())
        native = any(lookup(at) for at in (path, path_of(text.removesuffix(".\0"), ())))
        ways = (text, f"{text.rpartition('.')[0]}.*")
        patterns = (re.escape(way.replace("[\0]", ".[]")).replace("\0", r"[^\n]+") for way in ways)
        theirs = any(re.search(rf"^{pattern}$", known(system), re.MULTILINE) for pattern in patterns)
        if not (native or theirs or path[:-1] in TABLES or is_free(path)):
            strange.append(f"{where}: {text}")
    assert strange == []


def test_native_names_in_the_tables_are_keys() -> None:
    """Of rules, and of the functions of Trinity-RFT, whose names begin inside `algorithm`."""
    ruled = [line["native"] for line in lines(dialects.__name__, "rules.tsv")]
    named = [line["native"] for line in lines(f"{dialects.__name__}.trinity", "functions.tsv")]
    told = {name for name in (*ruled, *(f"algorithm.{each}" for each in named if "." in each)) if name}
    assert len(told) > 100
    assert [name for name in sorted(told) if lookup(path_of(name, ())) is None] == []


@pytest.mark.parametrize(("system", "key", "value"), UNBUILT)
def test_a_value_that_is_listed_as_not_built_is_refused_by_its_key(
    system: str, key: str, value: Json
) -> None:
    """In some kind of file, in the newest release that has the key."""
    path = tuple(NAMES.get(part, part) for part in parts(key))
    given = {path_of(k, ()): v for k, v in WHERE_READ.get(key, {}).items()}
    name = ".".join(map(str, path)).replace(".0.", "[0].")
    told: list[str] = []
    for kind in (kind for kind in FILES if dialect(kind).system == system):
        of = next(
            (at for v in reversed(VERSIONS[system]) if parts(key) in (at := dialect(kind, v)).by_parts), None
        )
        if of is not None:
            tree = merge(json.loads(context(kind, key)), nested({**given, path: value}))
            made = translate(tree, of, origins={})
            told += [text for _, text in (*made.problems, *made.unbuilt) if name in text]
    assert told


def test_most_values_that_are_not_built_are_tried() -> None:
    assert len(UNBUILT) > 70
    assert {key for _, key, _ in UNBUILT} >= WHERE_READ.keys()
