"""A run reduced so that every part of it runs within a minute: same architecture, data, rewards and algorithm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.config.checks import unused
from whet.config.chosen import Chosen
from whet.config.engines import SERVED
from whet.config.environments import SEVERAL
from whet.config.evaluation import merged, observation_tokens
from whet.config.load import Loaded, stage_configs
from whet.config.recipes import resolve
from whet.config.schema import Config, ModelConfig, RewardConfig
from whet.config.scratch import architecture
from whet.config.sections.rollout import EnvironmentConfig
from whet.config.sources import order_of
from whet.config.tree import STAGE_SECTIONS
from whet.dialects.idle import without
from whet.inputs import read_json_object
from whet.rehearsal.findings import Finding, left_open
from whet.types import ConfigError, Json

STEPS = 3
REPLY_TOKENS = 24
FAMILIES = ("gpt_oss", "qwen3_moe", "qwen3", "qwen2", "llama", "mistral", "gemma", "mimo")
"""Architectures that can be built from scratch, the most specific first."""
ELSEWHERE = ("offload", "compile", "parallel", "precision")
"""Keys of `train` about devices that this machine lacks: the small run is one process, in one dtype."""
MADE_UP = "made_up"
"""Name of the rows that replace data that is not available here."""
TEACHER = "teacher"
"""The folder below the run's that holds a random model in the place of a teacher."""


def shrink(loaded: Loaded, *, run_dir: Path, lost: Mapping[str, str], broken: set[str]) -> dict[str, Json]:
    """The whole run as a small native config, ready to be written down.

    lost: sources that cannot be read ('stage/train/0': why), replaced by made-up rows. broken: rewards that cannot be
    called, left out; one that asks for the exact answer stands in where none is left. Where an environment may ask
    for them by name, each has a stand-in.
    """
    teacher = str(run_dir / TEACHER)
    whole = [
        _stage(cfg, name, lost=lost, broken=broken, teacher=teacher)
        for name, cfg in zip(loaded.names, loaded.stages)
    ]
    base = whole[0] | {"name": "rehearsal", "run_dir": str(run_dir), "seed": loaded.config.seed}
    if not loaded.config.stages:
        return _read_only(base)
    shared = {key: value for key, value in base.items() if key not in STAGE_SECTIONS}
    inside = [{key: value for key, value in tree.items() if key in STAGE_SECTIONS} for tree in whole]
    return _read_only(shared | {"stages": [{"name": n} | tree for n, tree in zip(loaded.names, inside)]})


def stand_in(reward: RewardConfig) -> RewardConfig:
    """In the place of a reward that cannot be called here."""
    return RewardConfig(function="whet.rewards.made_up:coin", weight=reward.weight)


def _read_only(tree: dict[str, Json]) -> dict[str, Json]:
    """The config without the keys that nothing reads in the small run."""
    while (rest := without(tree, dict(unused(tree, stage_configs(check(tree)))))) != tree:
        tree = rest
    return tree


def what_changed(cfg: Config) -> Iterator[Finding]:
    """The parts that the small run leaves out."""
    for role, path in (
        ("model", cfg.model.path),
        ("reference", cfg.reference.path),
        *((f"reference.models.{n}", each.path) for n, each in enumerate(cfg.reference.models)),
        ("critic", cfg.critic.path),
    ):
        if path is not None:
            yield left_open(
                f"{role}.path",
                f"{path}: the rehearsal has random weights in the architecture {family(cfg.model)}",
            )
    if real_tokenizer(cfg) is None:
        yield left_open(
            "tokenizer",
            "not available here: a stand-in tokenised the prompts, so their lengths are not the real ones",
        )
    if extra := [t for t in cfg.track.trackers if t not in ("console", "jsonl")]:
        yield left_open("track.trackers", f"{', '.join(extra)}: nothing was sent")
    said = {f"train.{name}" for name in ELSEWHERE if name in cfg.train.model_fields_set}
    said |= {"rollout.replicas"} if cfg.rollout.replicas else set()
    said |= {"mode"} if cfg.mode != "both" else set()
    if said:
        yield left_open(", ".join(sorted(said)), "the rehearsal is one process on this machine")
    if cfg.rollout.engine in SERVED:
        yield left_open(
            "rollout.engine", "no server is started: the rehearsal samples with the native engine"
        )
    if resolve(cfg.algorithm).dynamic_sampling:
        yield left_open(
            "algorithm.dynamic_sampling",
            "off in the rehearsal: random weights give every reply the same reward",
        )


def family(model: ModelConfig) -> str:
    """The architecture to stand in for a model: its own where its config.json or its name tells it, else qwen3."""
    if model.scratch is not None:
        return architecture(model).name
    file = Path(model.path or "").expanduser() / "config.json"
    said = read_json_object(file, ConfigError).get("model_type", "") if file.is_file() else ""
    name = re.sub(r"[^a-z0-9]", "", (said or Path(model.path or "").name).lower())
    if "qwen25" in name:
        return "qwen2"
    if re.search(r"a\d+b", name) and "qwen3" in name:
        return "qwen3_moe"
    return next((f for f in FAMILIES if f.replace("_", "") in name), "qwen3")


def real_tokenizer(cfg: Config) -> str | None:
    """Folder of the run's own tokenizer, if it is on this machine; '' if it is built from the data."""
    if cfg.tokenizer.build is not None:
        return ""
    path = cfg.tokenizer.path or cfg.model.path
    return path if path and (Path(path).expanduser() / "tokenizer.json").is_file() else None


# ---------------------------------------------------------------- one stage


def _stage(
    cfg: Config, name: str, *, lost: Mapping[str, str], broken: set[str], teacher: str
) -> dict[str, Json]:
    tree = cfg.model_dump(mode="json", exclude_unset=True)
    tree.pop("mode", None)
    tree.pop("dirs", None)
    tree["model"] = _model(cfg)
    tree["tokenizer"] = _tokenizer(cfg)
    for role in ("critic", "reference"):
        tree[role] = _without(tree.get(role, {}), "path", "models", "column", "overrides", "optimizer")
    if "warmup_steps" in tree["critic"]:
        tree["critic"]["warmup_steps"] = min(1, cfg.critic.warmup_steps)
    if resolve(cfg.algorithm).distills and (cfg.reference.path or cfg.reference.models):
        tree["reference"]["path"] = teacher
    tree["data"] = _data(cfg, name, lost)
    tree["train"] = _train(cfg)
    tree["rollout"] = _rollout(cfg)
    tree["algorithm"] = _without(tree.get("algorithm", {}), "groups")
    if resolve(cfg.algorithm).dynamic_sampling:
        tree["algorithm"]["dynamic_sampling"] = False
    kept = {n: r for n, r in tree.get("rewards", {}).items() if n not in broken}
    tree["rewards"] = kept if kept or not cfg.rewards else {"stand_in": {"function": "exact"}}
    if cfg.rollout.env is not None:
        tree["rewards"] = kept | {
            n: stand_in(r).model_dump(exclude_unset=True) for n, r in cfg.rewards.items() if n in broken
        }
    elif broken:  # nobody may name one that is left out
        tree.get("eval", {}).pop("reward", None)
        for source in (s for part in tree["data"].values() if isinstance(part, list) for s in part):
            source.pop("rewards", None)
    tree["eval"] = _eval(tree.get("eval", {}))
    for section, part in (("rollout", "train"), ("eval", "eval")):
        sources = tree["data"][part]
        gone = any(f"{name}/{part}/{n}" in lost for n in range(len(sources)))
        if gone or any(source.get("label") for source in sources):  # which labels few rows have is not known
            named = {source.get("name") for source in sources if not source.get("label")}
            own = tree[section].get("sources", {})
            tree[section]["sources"] = {n: how for n, how in own.items() if n in named}
        if gone and cfg.rollout.env is not None:
            tree["rollout"]["env"] |= _default_env(cfg.rollout.env)
    tree["checkpoint"] = {"interval": 1, "keep": STEPS}
    tree["track"] = {"trackers": ["jsonl"]}
    tree["reward_workers"] = tree.get("reward_workers", {}) | {"count": 1, "max_failure_rate": 1.0}
    tree["machine"] = {"logprob_parity": cfg.machine.logprob_parity}
    return {key: value for key, value in tree.items() if value != {} and key != "stages"}


def _model(cfg: Config) -> dict[str, Json]:
    longest = max(cfg.data.max_prompt_tokens + REPLY_TOKENS + observation_tokens(cfg), 64)
    small: dict[str, Json] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
    }
    made = family(cfg.model)
    if made in ("qwen3_moe", "gpt_oss"):
        small |= {"num_experts": 4, "num_experts_per_tok": 2}
    out: dict[str, Json] = {"scratch": small | {"name": made, "max_position_embeddings": longest}}
    kept = {"dtype": cfg.model.dtype, "mtp": cfg.model.mtp}
    return out | {name: value for name, value in kept.items() if value}


def _tokenizer(cfg: Config) -> dict[str, Json]:
    folder = real_tokenizer(cfg)
    if folder == "":
        return cfg.tokenizer.model_dump(mode="json", exclude_unset=True)
    return {"path": folder} if folder else {"build": "bpe", "vocab_size": 1024}


def small_order(cfg: Config) -> Chosen:
    """The order of few rows: the run's, without a number of distinct ones."""
    order = order_of(cfg.data)
    return Chosen("random", {"distinct": 1}) if order.name == "random" else order


def _data(cfg: Config, stage: str, lost: Mapping[str, str]) -> dict[str, Json]:
    tree = cfg.data.model_dump(mode="json", exclude_unset=True)
    if small_order(cfg).name == "random":
        tree["order"] = "random"
    if any(f"{stage}/train/{n}" in lost for n in range(len(cfg.data.train))):
        tree["order"] = "shuffle"  # made-up rows have no columns that another order reads
    for part in ("train", "demonstrations", "eval"):
        sources = tree.get(part) or []
        tree[part] = [
            made_up(n, part, source)
            if f"{stage}/{part}/{n}" in lost
            else source | {"limit": few(source.get("limit"), 64)}
            for n, source in enumerate(sources)
        ]
    if real_tokenizer(cfg) is None:
        tree["overlong"] = "truncate_left"  # lengths under a stand-in are not the real ones
    return tree


def few(limit: Json, most: int) -> Json:
    """A source's `limit`, of at most so many rows where it is a number of rows; a share of them stays what it is."""
    return min(limit or most, most) if limit is None or isinstance(limit, int) else limit


def made_up(number: int, part: str, source: Mapping[str, Json]) -> dict[str, Json]:
    """Rows that replace a source that is not available here, under its name and with its rewards."""
    start = 100 * number + (50 if part == "eval" else 0)
    rows = [
        {
            "prompt": f"What is {a} + {b}?",
            "answer": str(a + b),
            "response": str(a + b),
            "rejected": str(a - b - 1),
        }
        for a, b in ((start + n, n + 1) for n in range(16))
    ]
    kept = {"rewards": source["rewards"]} if "rewards" in source else {}
    return {"name": source.get("name") or f"{MADE_UP}_{part}_{number}", "rows": rows, **kept}


def _train(cfg: Config) -> dict[str, Json]:
    kept = cfg.train.model_dump(mode="json", exclude_unset=True)
    kept = _without(
        kept,
        "epochs",
        "micro_batch_tokens",
        "micro_batch_rollouts",
        "forward_micro_batch_tokens",
        "forward_micro_batch_rollouts",
        "early_stopping",
    )
    kept = _without(kept, *ELSEWHERE)
    minibatches, passes = min(2, cfg.train.minibatches), min(2, cfg.train.update_epochs)
    optimizer = _without(kept.get("optimizer", {}), "schedule")
    small = {
        "steps": STEPS,
        "tasks_per_step": 2 * minibatches,
        "minibatches": minibatches,
        "update_epochs": passes,
    }
    return kept | small | {"optimizer": optimizer}


def _rollout(cfg: Config) -> dict[str, Json]:
    elsewhere = ("engine", "server") if cfg.rollout.engine in SERVED else ()
    given = cfg.rollout.model_dump(mode="json", exclude_unset=True)
    kept = _without(given, "max_num_seqs", "replicas", *elsewhere)
    sampling = _short(kept.get("sampling", {}), cfg.rollout.sampling.max_tokens)
    sources = {
        name: _short(
            own.model_dump(mode="json", exclude_unset=True), merged(cfg.rollout.sampling, own).max_tokens
        )
        for name, own in cfg.rollout.sources.items()
    }
    return kept | {"group_size": min(cfg.rollout.group_size, 4), "sampling": sampling, "sources": sources}


def _default_env(env: EnvironmentConfig) -> dict[str, Json]:
    """Rows that are made up name no environment of several: one of them plays them."""
    if env.make != SEVERAL:
        return {}
    envs = env.arguments["envs"]
    default = next((name for name, member in envs.items() if member.get("make")), next(iter(envs)))
    return {"arguments": {"default": default, **env.arguments}}


def _eval(tree: dict[str, Json]) -> dict[str, Json]:
    out = dict(tree)
    if tree.get("sources"):
        out["sources"] = {name: _asked(how) for name, how in tree["sources"].items()}
    return _asked(out) | {"interval": 2}


def _asked(tree: dict[str, Json]) -> dict[str, Json]:
    """How often held-out tasks are asked, and how."""
    out = dict(tree)
    if tree.get("sampling"):
        out["sampling"] = _short(tree["sampling"], tree["sampling"].get("max_tokens") or REPLY_TOKENS)
    if tree.get("samples"):
        out["samples"] = min(2, tree["samples"])
    return out


def _short(sampling: Mapping[str, Json], max_tokens: int) -> dict[str, Json]:
    return _without(dict(sampling), "min_tokens") | {"max_tokens": min(max_tokens, REPLY_TOKENS)}


def _without(tree: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in names}


def check(tree: dict[str, Json]) -> Config:
    """The small config, validated. A ConfigError here is the rehearsal's own."""
    try:
        return Config.model_validate_json(json.dumps(tree))
    except ValueError as e:
        raise ConfigError(f"the small config of the rehearsal is not valid: {e}") from e
