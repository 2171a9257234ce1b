"""The JSON schema that forms are drawn from: whole, true of the checks, and usable by itself."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from whet.cli import app
from whet.config import checks, functions, hints
from whet.config.checks import hard_problems, unused
from whet.config.conditions import TESTS, met, subjects
from whet.config.constraints import BASE, CONSTRAINTS
from whet.config.facts import NAMED, named
from whet.config.forms import schema, visible_when
from whet.config.keys import Key, keys, lookup
from whet.config.keys import settings as keys_of_settings
from whet.config.load import load
from whet.config.recipes import RECIPES, resolve
from whet.config.rules import REFUSED, RULES
from whet.config.schema import AlgorithmConfig, Config
from whet.config.shorthand import SECTIONS, SOURCES
from whet.rewards.builtin import BUILTIN
from whet.types import ConfigError, Json

LEAVES = [key for key in keys().values() if key.section is None]
SETTINGS = [key for key in keys_of_settings().values() if key.path[-1] != "name"]
"""Settings of advantages and losses: they stand among the choices of their key."""


@functools.cache
def made() -> dict[str, Any]:
    return json.loads(json.dumps(schema()))


def node(path: tuple[str, ...]) -> dict[str, Any]:
    """The node of a key, found by the schema alone."""
    at = made()
    for name in path:
        at = next(option for option in options(at) if "properties" in option or name == "*")
        at = (at.get("items") or at["additionalProperties"]) if name == "*" else at["properties"][name]
    return at


def options(at: dict[str, Any]) -> list[dict[str, Any]]:
    """The kinds of value that a node allows, each by itself."""
    found = [o for part in at.get("anyOf", [at]) for o in (options(part) if "anyOf" in part else [part])]
    return [o for o in found if o.get("type") in ("object", "array", ["object", "string"])] or found


def everything(at: Any) -> Iterator[dict[str, Any]]:
    if isinstance(at, dict):
        yield at
    for inner in at.values() if isinstance(at, dict) else at if isinstance(at, list) else ():
        yield from everything(inner)


# ---------------------------------------------------------------- whole


def test_every_key_has_what_a_form_needs() -> None:
    assert made()["$schema"].endswith("2020-12/schema")
    for key in LEAVES:
        found = node(key.path)
        assert found["title"].strip() == found["title"] != ""
        assert found["description"] == " ".join(key.description.split()) != ""
        assert found["x-level"] in ("beginner", "expert")
        assert {"type", "enum", "const", "anyOf"} & found.keys(), key.path
        if not key.required:
            assert found["default"] == json.loads(json.dumps(key.default)), key.path


def test_it_stands_by_itself_and_uses_only_words_of_the_draft_or_its_own() -> None:
    words = {
        "$schema", "additionalProperties", "anyOf", "const", "default", "description", "enum", "examples",
        "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems", "maximum", "minItems", "minimum",
        "prefixItems", "properties", "required", "title", "type",
    }  # fmt: skip
    schemas = [made(), *(node(key.path) for key in keys().values())]
    for found in schemas:
        assert {word for word in found if not word.startswith("x-")} <= words
    assert "$ref" not in json.dumps(made())
    for found in everything(made()["properties"]):
        if isinstance(found.get("required"), list):
            assert set(found["required"]) <= found["properties"].keys()


def test_sections_are_closed_and_have_the_keys_of_the_config_in_order() -> None:
    for key in keys().values():
        if key.section is None or (key.path[-1] != "*" and (*key.path, "*") in keys()):
            continue
        found = next(option for option in options(node(key.path)) if "properties" in option)
        assert list(found["properties"]) == list(key.section.model_fields)
        assert found["additionalProperties"] is False


SHORT: list[tuple[str, bool]] = [
    (
        "{model: models/mine, data: tasks.jsonl, algorithm: grpo, rewards: {right: math}, train: {steps: 3}}",
        True,
    ),
    ("{data: {train: [a.jsonl, {path: b.jsonl, weight: 2}], eval: {path: c.jsonl}}}", True),
    ("{data: {train: {rows: [{prompt: p}]}, demonstrations: d.jsonl}}", True),
    ("{reference: base, critic: base, tokenizer: folder}", True),
    ("{stages: [{name: sft, algorithm: sft, data: demo.jsonl}, {name: rl}]}", True),
    ("{rewards: {right: {function: exact, weight: 2.0}}}", True),
    ("{model: 3}", False),
    ("{algorithm: [grpo]}", False),
    ("{rewards: exact}", False),
    ("{rollout: native}", False),
    ("{data: {train: 3}}", False),
    ("{data: {train: {pth: a.jsonl}}}", False),
    ("{data: {train: [[a.jsonl]]}}", False),
    ("{stages: [{name: sft, train: 3}]}", False),
]


@pytest.mark.parametrize(("text", "valid"), SHORT)
def test_short_forms_are_accepted_as_the_loader_accepts_them(text: str, valid: bool, tmp_path: Path) -> None:
    said = [error.message for error in Draft202012Validator(made()).iter_errors(yaml.safe_load(text))]
    assert (not said) == valid, said
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with nullcontext() if valid else pytest.raises(ConfigError):
        load(file)


def test_every_short_form_is_marked_with_its_key() -> None:
    for path, key in SECTIONS.items():
        found = node(path)
        assert (found["type"], found["x-short"]) == (["object", "string"], key)
        assert key in found["properties"]
    marked = [found for found in everything(made()["properties"]) if isinstance(found.get("x-short"), str)]
    stages = [found for found in node(("stages", "*"))["properties"].values() if "x-short" in found]
    assert {found["title"] for found in stages} == {"Algorithm", "Data", "Critic", "Reference"}
    assert len(marked) == len(SECTIONS) + len(SOURCES) + len(stages)  # a source stands alone, too


def test_bounds_stand_where_pydantic_has_them() -> None:
    assert node(("rollout", "group_size"))["minimum"] == 1
    assert node(("train", "optimizer", "schedule", "type"))["enum"][0] == "constant"
    assert {"exclusiveMinimum": 0.0, "type": "number"} in node(("train", "epochs"))["anyOf"]
    assert node(("critic", "optimizer", "lr"))["default"] != node(("train", "optimizer", "lr"))["default"]


def test_titles_beside_each_other_differ_and_are_short() -> None:
    above: dict[tuple[str, ...], list[str]] = {}
    for key in keys().values():
        if key.path[-1] != "*":
            above.setdefault(key.path[:-1], []).append(node(key.path)["title"])
    for path, titles in above.items():
        assert len(set(titles)) == len(titles), path
        assert all(len(title) <= 50 and "_" not in title for title in titles)


def test_beginners_see_about_sixty_keys_that_exist() -> None:
    assert 50 <= len(hints.BEGINNER) <= 75
    assert {".".join(key.path) for key in (*LEAVES, *SETTINGS)} >= hints.BEGINNER
    seen = {name.rpartition(".")[0] for name in hints.BEGINNER}
    needed = {".".join(key.path) for key in LEAVES if key.required and ".".join(key.path[:-1]) in seen}
    assert needed <= hints.BEGINNER, "what must be given, where a beginner gives anything"


def test_units() -> None:
    assert hints.unit("reward_workers.timeout_s") == "s"
    assert hints.unit("reward_workers.memory_mb") == "MiB"
    assert hints.unit("data.max_prompt_tokens") == "tokens"
    assert hints.unit("algorithm.reward_kl.target") == "nats"
    assert hints.unit("name") is None
    assert hints.title("timeout_s") == "Timeout"
    known = {".".join(key.path) for key in (*LEAVES, *SETTINGS)}
    assert set(hints.UNITS) <= known
    for suffix in hints.SUFFIXES:
        assert any(name.endswith(suffix) for name in known), suffix


def test_choices_are_the_tables() -> None:
    def names(key: str) -> list[str]:
        found = node(tuple(key.split(".")))
        assert found["examples"] == [choice["name"] for choice in found["x-choices"]]
        assert all(choice["about"].endswith(".") for choice in found["x-choices"])
        return found["examples"]

    assert names("algorithm.name") == list(RECIPES)
    assert names("algorithm.advantage") == list(functions.ADVANTAGES)
    assert names("algorithm.loss") == list(functions.LOSSES)
    assert names("rewards.*.function") == list(functions.REWARDS)
    assert set(functions.REWARDS) == set(BUILTIN)
    assert names("checkpoint.resume") == ["auto", "never", "fresh"]


def test_the_recipes_say_enough_to_know_the_named_conditions() -> None:
    for choice in node(("algorithm", "name"))["x-choices"]:
        sets, resolved = choice["sets"], resolve(AlgorithmConfig(name=choice["name"]))
        assert (sets["kind"], sets["advantage"], sets["loss"]) == (
            resolved.kind,
            resolved.advantage,
            resolved.loss,
        )
        assert sets["loss_agg_mode"] == resolved.loss_agg_mode
        assert (sets["whiten"], sets["dynamic_sampling"]) == (
            resolved.whiten,
            resolved.dynamic_sampling,
        )


# ---------------------------------------------------------------- conditions


def test_conditions_name_keys_and_conditions_that_exist_and_one_test() -> None:
    used = set()
    for found in (*everything(made()["properties"]), *made()["x-constraints"], *made()["x-notes"]):
        when = next(
            (found[key] for key in ("x-visible-when", "refused-when", "noted-when") if key in found), {}
        )
        for what, name in subjects(when):
            assert lookup(name.split(".")) or what == "condition", name
            used |= {name} if what == "condition" else set()
    assert set(made()["x-conditions"]) == used >= set(NAMED)
    for name in used - set(NAMED):
        assert ("algorithm", *name.split(".")) in keys_of_settings(), name
    for rule in RULES:
        for part in everything(rule.when):
            assert len(part.keys() & TESTS.keys()) <= 1
            assert part.keys() <= {"key", "condition", "all", "any", "not", *TESTS}
        for key in rule.keys:
            assert lookup(key.split(".")) or key.startswith("track.arguments."), key


def test_each_test_of_a_value_by_hand() -> None:
    cfg = Config.model_validate_json('{"train": {"steps": 3}, "rollout": {"sampling": {"stop": ["a", "b"]}}}')

    def holds(**condition: Json) -> bool:
        return met(condition, cfg, {"yes": True, "no": False, "kind": "online"})

    assert holds(key="train.steps", **{"is": 3})
    assert not holds(key="train.steps", **{"is": 4})
    assert holds(condition="kind", **{"in": ["online", "x"]})
    assert holds(key="train.steps", above=2)
    assert not holds(key="train.steps", above=3)
    assert not holds(key="train.epochs", above=0)
    assert holds(key="train.epochs", given=False)
    assert holds(key="rollout.sampling.stop", holds=["b", "c"])
    assert not holds(key="rollout.sampling.stop", holds=["c"])
    assert holds(key="rollout.sampling.stop", longer=1)
    assert not holds(key="rollout.sampling.stop", longer=2)
    assert not holds(key="critic.lora.rank", above=0)
    assert holds(all=[{"condition": "yes"}, {"not": {"condition": "no"}}])
    assert not holds(any=[])


def random_config() -> st.SearchStrategy[dict[str, Json]]:
    """Configs that differ in what conditions look at."""

    def maybe(**values: Any) -> st.SearchStrategy[dict[str, Json]]:
        return st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in values.items()})

    schedule = maybe(
        type=["constant", "linear", "cosine", "wsd"], warmup_steps=[0, 3, 0.1], decay_steps=[2, 0.5, None],
        decay_type=["cosine"], weight_decay_end=[0.0, 0.1],
    )  # fmt: skip
    row = {"rows": [{"prompt": "1+1="}]}
    sections = {
        "algorithm": maybe(
            name=list(RECIPES), advantage=[{"normalize_std": True}, {"normalize_std": False}],
            whiten=[True], dynamic_sampling=[True],
            kl=[{"coef": 0.1}], reward_kl=[{"coef": 0.1}], resample=["pow", {"name": "pow"}],
            oversample=["mean_reward", {"factor": 2.0}],
            groups=[{"uniform": {"min_std": 0.1}}, {"uniform": {"ddof": 0}}],
        ),
        "data": maybe(
            train=[[row], [row, row]], eval=[[], [row]], demonstrations=[[row], [row, row]], order=["sequential"]
        ),
        "rewards": st.sampled_from([{}, {"r": {"function": "exact"}}]),
        "eval": maybe(interval=[0, 5], at_start=[False], at_end=[False]),
        "train": st.builds(
            lambda train, s: {**train, "optimizer": {"schedule": s}}, maybe(minibatches=[1, 2]), schedule
        ),
        "critic": st.builds(lambda critic, s: {**critic, "optimizer": {"schedule": s}}, maybe(path=["x"]), schedule),
        "reference": maybe(path=["x"], reset_interval=[0, 2, "1 epoch", [3, "2 epochs"]]),
        "rollout": maybe(engine=["hf"]),
        "checkpoint": maybe(resume=["never", "auto"], export=[False]),
        "track": maybe(trackers=[["jsonl"], ["wandb"]], rollouts_interval=[0]),
        "tokenizer": maybe(build=["chars"]),
        "model": maybe(scratch=[{"name": "mistral"}, {"name": "qwen3_moe"}, {}]),
    }  # fmt: skip
    return st.fixed_dictionaries(sections)


def given_one(key: Key) -> Json:
    """A tree with one key of the schema set to some value that says something."""
    tree: Json = key.default if key.default not in (None, (), {}) else "x"
    for name in reversed(key.path):
        tree = [tree] if name == "*" and isinstance(tree, dict) and key.path[0] == "data" else {name: tree}
    return tree


@given(random_config())
@settings(max_examples=40, deadline=None)
def test_what_a_form_hides_is_what_the_checks_refuse(tree: dict[str, Json]) -> None:
    """For every key there is: the rules of the table hold if and only if a set value is not called idle."""
    cfg = Config.model_validate_json(json.dumps(tree))
    try:
        algorithm = resolve(cfg.algorithm)
    except ConfigError:
        return
    known = named(cfg, algorithm)
    own = {key for rule in RULES if rule.default_passes for key in rule.keys}
    idle = list(checks.idle_keys(cfg))  # worked out once for all keys
    with mock.patch.object(checks, "idle_keys", return_value=idle):
        for key in LEAVES:
            name = ".".join(key.path)
            if key.path[0] == "stages" or ("*" in key.path and key.path[0] not in ("data", "rewards")):
                continue
            if key.path[:2] == ("model", "scratch") and cfg.model.scratch is None:
                continue
            if any(f"{name}.".startswith(f"{k}.") for k in own):
                continue
            condition = visible_when(key.path)
            shown = condition is None or met(condition, cfg, known)
            found = unused(plain(given_one(key)), [cfg])
            assert shown == (not found), (name, found)


def plain(tree: Any) -> dict[str, Json]:
    return json.loads(json.dumps(tree))


def changed(key: Key) -> Json:
    """Another value of a key of `algorithm` than its default."""
    special = {
        "advantage": "rloo", "loss": "reinforce", "mix": {"mu": 0.5}, "loss_agg_mode": "token-sum",
        "advantage_clip": [-1.0, None], "entropy_control": "adaptive", "entropy_clip": "batch", "resample": "pow",
        "oversample": "mean_reward",
    }  # fmt: skip
    if key.path[-1] in special:
        return special[key.path[-1]]
    enum = re.findall(r"'([^']*)'", key.words)
    if enum:
        return next(value for value in enum if value != key.default)
    if "true" in key.words:
        return not key.default
    if key.default in (0, 1) and "1 or 0" in key.words:
        return 1 - key.default
    number = key.default if isinstance(key.default, int | float) else 0
    return number + 1 if "whole" in key.words else number / 2 or 0.25


@pytest.mark.parametrize("recipe", RECIPES)
def test_settings_that_a_form_hides_are_refused_and_others_are_not_called_idle(recipe: str) -> None:
    """Every setting of an algorithm, changed by itself under every recipe."""
    base = resolve(AlgorithmConfig(name=recipe))
    cfg = Config.model_validate_json(json.dumps({"algorithm": {"name": recipe}}))
    known = named(cfg, base)
    for name, field in AlgorithmConfig.model_fields.items():
        path = ("algorithm", name)
        if name in ("name", "advantage", "loss") or keys()[path].section:
            continue
        condition = visible_when(path)
        tree = {"algorithm": {"name": recipe, name: changed(keys()[path])}}
        assert field.default != tree["algorithm"][name]
        said = " | ".join(text for _, text in problems(tree))
        idle = "has no effect" in said or "do not apply" in said or "leave it out" in said
        own = tree["algorithm"][name] is False  # a switch that is off is no wish
        assert condition is None or met(condition, cfg, known) or idle or own, (name, said)
        assert not idle or (condition is not None and not met(condition, cfg, known)), (name, said)


@pytest.mark.parametrize(
    ("key", "hidden", "shown"),
    [
        ("correction", {"name": "sft", "correction": {"weight": "token"}}, {"correction": {"weight": "token"}}),
        (
            "correction.weight.outside",
            {"correction": {"weight": {"name": "token", "outside": "mask"}}},
            {"correction": {"weight": {"name": "token", "high": 2.0, "outside": "mask"}}},
        ),
        (
            "correction.denominator",
            {"correction": {"weight": "token", "denominator": "all"}},
            {"correction": {"weight": {"name": "token", "high": 2.0, "outside": "mask"}, "denominator": "all"}},
        ),
        ("mix", {"name": "sft", "mix": {}}, {"name": "mix", "mix": {}}),
        (
            "mix.mu_schedule.decay_steps",
            {"name": "mix", "mix": {"mu_schedule": {"decay_steps": 3}}},
            {"name": "mix", "mix": {"mu_schedule": {"decay_steps": 3, "valley": 0.01}}},
        ),
        ("kl.coef", {"name": "kto", "kl": {"coef": 0.1}}, {"kl": {"coef": 0.1}}),
        ("reward_kl.coef", {"name": "sft", "reward_kl": {"coef": 0.1}}, {"reward_kl": {"coef": 0.1}}),
        ("reward_kl.target", {"reward_kl": {"target": 0.1}}, {"reward_kl": {"coef": 0.1, "target": 0.1}}),
        (
            "reward_kl.horizon",
            {"reward_kl": {"coef": 0.1, "horizon": 5}},
            {"reward_kl": {"coef": 0.1, "target": 0.1, "horizon": 5}},
        ),
        ("entropy_agg_mode", {"entropy_agg_mode": "token-mean"},
         {"entropy_agg_mode": "token-mean", "entropy_coef": 0.01}),
        ("loss.clip_low", {"loss": {"fallback_to_policy_gradient": True, "clip_low": 0.1}},
         {"loss": {"clip_low": 0.1}}),
        ("loss.rec_ring_low", {"name": "rec", "loss": {"rec_ring_low": 0.5}},
         {"name": "rec", "loss": {"rec_ring_low": 0.5, "rec_clip_mode": "ring"}}),
        ("loss.rec_temperature", {"name": "rec", "loss": {"rec_temperature": 0.5}},
         {"name": "rec", "loss": {"rec_temperature": 0.5, "rec_weight": "advantage"}}),
        ("loss.rec_regularizer_coef", {"name": "rec", "loss": {"rec_regularizer_coef": 0.5}},
         {"name": "rec", "loss": {"rec_regularizer_coef": 0.5, "rec_regularizer": "k2"}}),
        ("loss.clip_high", {"name": "rec", "loss": {"rec_clip_mode": "none", "clip_high": 0.5}},
         {"name": "rec", "loss": {"clip_high": 0.5}}),
        ("loss.label_smoothing", {"name": "dpo", "loss": {"pair_loss": "ipo", "label_smoothing": 0.1}},
         {"name": "dpo", "loss": {"label_smoothing": 0.1}}),
    ],
)  # fmt: skip
def test_parts_of_parts_are_hidden_where_they_are_refused(
    key: str, hidden: dict[str, Json], shown: dict[str, Json]
) -> None:
    path = ("algorithm", *key.split("."))
    for algorithm, visible in ((hidden, False), (shown, True)):
        tree: dict[str, Json] = {"algorithm": algorithm, "train": {"update_epochs": 2}}
        said = problems(tree)
        assert bool(said) != visible, said
        cfg = Config.model_validate_json(json.dumps(tree))
        known = named(cfg, resolve(cfg.algorithm))
        condition = visible_when(path)
        assert condition is not None
        assert met(condition, cfg, known) == visible


def problems(tree: dict[str, Json]) -> list[tuple[str, str]]:
    """What is said of the algorithm: it cannot work, or nothing reads it."""
    cfg = Config.model_validate_json(json.dumps(tree))
    try:
        resolve(cfg.algorithm)
    except ConfigError as e:
        return [("algorithm", str(e))]
    return [(str(path), why) for path, why in unused(tree, [cfg])]


# ---------------------------------------------------------------- constraints


def test_constraints_name_keys_and_carry_the_error_that_a_run_shows() -> None:
    assert len(made()["x-constraints"]) == len(CONSTRAINTS) + len(REFUSED) > 100
    for rule in made()["x-constraints"]:
        assert all(lookup(key.split(".")) for key in rule["keys"]), rule
        assert len(rule["error"]) > 15
        assert {"broken-by", "refused-when"} & rule.keys()


def test_what_constraints_break_works_unbroken() -> None:
    assert hard_problems(load(None, (), BASE).config) == []


# ---------------------------------------------------------------- the command


def test_the_command_writes_it(tmp_path: Any) -> None:
    file = tmp_path / "whet.schema.json"
    assert CliRunner().invoke(app, ["schema", "-o", str(file)]).exit_code == 0
    assert json.loads(file.read_text()) == made()
    assert json.loads(CliRunner().invoke(app, ["schema"]).output) == made()
