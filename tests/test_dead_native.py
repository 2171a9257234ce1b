"""No dead key: every leaf of the schema changes what a tiny run leaves behind, in a config that gives it meaning.

`observed.Watcher` runs the config with and without the change; files (metrics, rollouts, evaluations, weights, exports)
and what the engines, guards and trackers were told are compared. A key that is refused wherever it stands is listed
with the reason.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from batches import make_batch
from native_cases import (
    APART,
    BASE,
    BELOW,
    CASES,
    CLUSTER,
    DEEPSPEED,
    ENDS,
    LATER,
    PARTS,
    PPO,
    RANKS,
    REFUSED,
    ROWS,
    SERVER,
)
from observed import Watcher
from swept import except_for
from whet.algos.recipes import build
from whet.config.keys import entries, keys, settings
from whet.config.schema import AlgorithmConfig, CriticConfig, StageConfig
from whet.types import Json

LEAVES = [".".join(key.path) for key in keys().values() if key.section is None and not entries(key)]
LEAVES += [".".join((*key.path, name)) for key in keys().values() for name in entries(key)]
LEAVES += [".".join(path) for path in settings() if path[-1] != "name"]


# ---------------------------------------------------------------- trees


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watcher]:
    made = Watcher(tmp_path_factory.mktemp("observed"))
    make_models(made)
    yield made
    made.close()


def make_models(made: Watcher) -> None:
    """The folders of models, adapters and judges that contexts name."""
    for n, name in enumerate("ABC"):
        own = {"seed": n, "checkpoint": {"export": True}, "run_dir": str(made.folder / name)}
        tokens = {"tokenizer": {"build": "words" if name == "C" else "chars"}}
        assert "refused" not in made.record({**BASE, **own, **tokens})
    adapters = {
        "checkpoint": {"export": True, "export_as": "adapter"},
        "run_dir": str(made.folder / "ADAPTER"),
    }
    lora = {"model": {**BASE["model"], "lora": {"rank": 2}}}
    assert "refused" not in made.record({**BASE, **adapters, **lora})
    with_head(made.folder / "A/export/main", made.folder / "HEAD")
    for name, judge in (("A", "JUDGE_A"), ("C", "JUDGE_C")):
        with_head(made.folder / f"{name}/export/main", made.folder / judge)
        config = made.folder / judge / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_labels": 1}))


def with_head(model: Path, to: Path) -> None:
    """The same model with a value head among its weights."""
    shutil.copytree(model, to)
    weights = load_file(to / "model.safetensors")
    save_file(weights | {"score.weight": torch.ones(1, 16)}, to / "model.safetensors", {"format": "pt"})


def tree_of(watcher: Watcher, context: str, *changes: tuple[str, Any]) -> dict[str, Json]:
    """BASE with overrides, 'key=value; key=value', and changes put over it."""
    context = context.replace("CORRECT=", "rollout.sync_interval=2; algorithm.correction.reject.0=")
    tree = copy.deepcopy(BASE)
    pairs = [part.partition("=") for part in context.split("; ") if part]
    for path, value in [*((place(key.strip()), yaml.safe_load(text)) for key, _, text in pairs), *changes]:
        put(tree, path.split("."), filled(value, watcher.folder))
    return json.loads(json.dumps(tree))


def put(tree: Any, path: list[str], value: Json) -> None:
    """Set a value at a path; a number is a place in a list, and sections that are not there are made."""
    for name, after in zip(path, [*path[1:], ""]):
        at: Any = int(name) if name.isdecimal() else name
        if isinstance(tree, list):
            tree += [{}] * (at + 1 - len(tree))
        if not after:
            tree[at] = value
        elif isinstance(tree, dict) and not tree.get(at):
            tree[at] = [] if after.isdecimal() else {}
        elif isinstance(tree, dict) and isinstance(tree[at], str):
            tree[at] = {"name": tree[at]}
        tree = tree[at]


def filled(value: Any, folder: Path) -> Any:
    """The same with the rows and folders that its words stand for."""
    if isinstance(value, dict):
        return {k: filled(v, folder) for k, v in value.items()}
    if isinstance(value, list):
        return [filled(v, folder) for v in value]
    words = {"ROWS": ROWS} | {name: f"{folder}/{name}" for name in ("HEAD", "JUDGE_A", "JUDGE_C")}
    words |= {name: f"{folder}/{name}/export/main" for name in ("A", "B", "C", "ADAPTER")}
    return words.get(value, value) if isinstance(value, str) else value


def place(name: str) -> str:
    """The key with its stars filled in: the first of a list, or a name that contexts use."""
    for section, given in (("rewards", "r"), ("sources", "held"), ("optimizer.param_groups", "norm")):
        name = name.replace(f"{section}.*", f"{section}.{given}")
    return name.replace("*", "0")


# ---------------------------------------------------------------- every key


def test_every_key_has_a_case() -> None:
    listed = [*CASES, *REFUSED, *ENDS, *BELOW]
    assert set(LEAVES) - set(listed) == set(), "give each a line in native_cases.py"
    assert sorted(listed) == sorted(LEAVES)
    assert {f"{section}.{key}" for section, tried in SECTIONS.items() for key in tried} <= CASES.keys()
    assert set(StageConfig.model_fields) == {
        name.split(".")[2] for name in LEAVES if name.startswith("stages.")
    }


def test_equal_configs_leave_equal_records(watcher: Watcher) -> None:
    tree = tree_of(watcher, "train.steps=2")
    first = watcher.record(tree)
    watcher.seen.clear()
    assert watcher.record(tree) == first
    assert len([name for name in first if name.endswith((".parquet", "metrics.jsonl", ".safetensors"))]) >= 5


SECTIONS = {
    "critic.optimizer": ("name", "lr", "weight_decay", "schedule.type", "schedule.warmup_steps"),
    "critic.lora": ("rank", "dropout", "path"),
    "rollout.sources.*": ("temperature", "max_tokens", "stop", "top_k"),
    "eval.sampling": ("temperature", "max_tokens"),
    "eval.sources.*.sampling": ("temperature", "max_tokens"),
    "data.eval.*": ("name", "path", "prompt", "answer", "rewards", "limit"),
    "data.demonstrations.*": ("path", "prompt", "messages", "response", "weight", "limit"),
}
"""Sections that stand elsewhere, too (train.optimizer, model.lora, rollout.sampling, data.train), where each of their
keys is tried: these keys show that the section is read here, the others are tried in the sweep."""


def is_tried(name: str) -> bool:
    """train.compile is not: torch's compiler writes C++ and has it compiled; test_precision.py has it trace the same
    layers."""
    for section, keys_here in SECTIONS.items():
        if name.startswith(f"{section}."):
            return name.removeprefix(f"{section}.") in keys_here
    return name != "train.compile"


@pytest.mark.parametrize("name", except_for(is_tried, CASES))
def test_a_key_has_an_effect(watcher: Watcher, name: str) -> None:
    context, value = CASES[name]
    context = f"train.steps=2; {context}" if name in LATER else context
    without = watcher.record(tree_of(watcher, context))
    changed = watcher.record(tree_of(watcher, context, (place(name), value)))
    assert "refused" not in without, without
    assert "refused" not in changed, changed
    assert without != changed


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_is_refused_everywhere(watcher: Watcher, name: str) -> None:
    context, value, said = REFUSED[name]
    assert "refused" not in watcher.record(tree_of(watcher, context))
    assert said in watcher.record(tree_of(watcher, context, (place(name), value)))["refused"]


@pytest.mark.parametrize("name", ENDS)
def test_a_key_ends_the_run(watcher: Watcher, name: str) -> None:
    context, value, said = ENDS[name]
    without = watcher.record(tree_of(watcher, context))
    changed = watcher.record(tree_of(watcher, context, (place(name), value)))
    assert said in changed["refused"]
    assert without != changed


# ---------------------------------------------------------------- keys that one training run cannot show


def test_the_head_of_a_critic_that_was_trained_before(watcher: Watcher) -> None:
    there = f"{PPO}; critic.path=HEAD"
    assert "unexpected: score.weight" in watcher.record(tree_of(watcher, there))["refused"]
    assert "refused" not in watcher.record(tree_of(watcher, there, ("critic.head", "score")))


def test_what_is_read_when_a_run_goes_on(watcher: Watcher) -> None:
    tree = tree_of(watcher, "checkpoint.interval=1; checkpoint.keep=3; train.steps=3")
    whole, part = (
        watcher.resumed(tree, {"checkpoint": {"load_contents": load}})
        for load in (["model", "optimizer"], ["model"])
    )
    assert whole == watcher.record(tree)
    assert part != whole


def test_turns_of_an_episode() -> None:
    """Runs have episodes of one turn yet; here is one of two."""
    batch = make_batch([["paoaa", "pa"]], [1.0, 3.0])

    def advantage(divide: bool) -> list[float]:
        cfg = AlgorithmConfig(name="step_wise_grpo", advantage={"divide_by_turns": divide})
        made = build(cfg, critic=CriticConfig(), max_tokens=4)
        adv_N = made.advantage(batch, 0.0).adv_N
        assert adv_N is not None
        return adv_N[batch.mask_N].tolist()

    assert advantage(True) == pytest.approx([x / 2 for x in advantage(False)[:3]] + advantage(False)[3:])
    assert advantage(True) != advantage(False)

    def returns(reset: bool) -> list[float]:
        cfg = AlgorithmConfig(name="reinforce_pp", advantage={"reset_at_turns": reset})
        adv_N = build(cfg, critic=CriticConfig(), max_tokens=4).advantage(batch, 0.0).adv_N
        assert adv_N is not None
        return adv_N[batch.mask_N].tolist()

    # rewards 1 and 3 at the ends: the first turn's return is that of the episode, or nothing
    assert returns(False)[0] == returns(False)[1] == returns(False)[2]
    assert returns(True)[0] < returns(True)[1]


def test_nothing_is_left_out() -> None:
    grouped = {*APART, *CLUSTER, *DEEPSPEED, *PARTS, *RANKS, *SERVER}
    assert BELOW.keys() - grouped == {
        "critic.head", "checkpoint.load_contents", "algorithm.advantage.divide_by_turns",
        "algorithm.advantage.reset_at_turns",
        "checkpoint.sharded", "eval.offline", "profile.ranks", "track.dump.replies",
    }  # fmt: skip
