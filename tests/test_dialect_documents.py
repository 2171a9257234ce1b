"""Whole default documents of the systems, and several documents for one kind of file: which defaults a file has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from whet.config.load import Loaded, load
from whet.dialects import row as table_rows
from whet.dialects.tables import FILES, OPEN, TABLES, base_of, dialect, parts, version_of
from whet.dialects.versions import VERSIONS
from whet.types import ConfigError

ACTOR, CRITIC = "actor_rollout_ref.actor.", "critic."
PPO = (
    "data.train_files=a.parquet",
    "data.val_files=b.parquet",
    "actor_rollout_ref.model.path=m",
    "critic.model.path=m",
    "custom_reward_function.path=r.py",
    "custom_reward_function.name=f",
    f"{ACTOR}ppo_micro_batch_size_per_gpu=8",
    f"{CRITIC}ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.name=vllm",
)


def read(kind: str, *keys: str, at: str) -> Loaded:
    return load(None, keys, dialect=f"{kind}@{at}", here=False, rehearsal=True)


# ---------------------------------------------------------------- several documents


@pytest.mark.parametrize("at", ["0.6.0", "0.6.1", "0.7.0"])
def test_each_of_verls_sft_trainers_has_its_own_defaults(at: str) -> None:
    """0.6.0 to 0.7.0 have two, one over engines, whose file names the model by its path."""
    files = ("data.train_files=a.parquet", "data.val_files=b.parquet")
    over = read("verl-sft", *files, "model.path=m", at=at).config.train
    older = read("verl-sft", *files, "model.partial_pretrain=m", at=at).config.train
    assert (over.optimizer.lr, older.optimizer.lr) == (1e-3, 1e-5)
    assert (over.optimizer.betas, older.optimizer.betas) == ((0.9, 0.999), (0.9, 0.95))
    assert (over.optimizer.schedule.warmup_steps, older.optimizer.schedule.warmup_steps) == (0, 0.1)
    assert (over.micro_batch_tokens, older.micro_batch_tokens) == (8192, None)


@pytest.mark.parametrize(
    ("at", "lr", "replicas", "kept"),
    [
        ("0.4.0", 1e-5, 8, True),
        ("0.4.1", 1e-6, 8, True),
        ("0.5.0", 1e-6, 8, False),
        ("0.6.0", 1e-5, 4, False),
    ],
)
def test_verls_file_for_megatron_has_defaults_of_its_own(
    at: str, lr: float, replicas: int, kept: bool
) -> None:
    for sign in ("defaults=[ppo_megatron_trainer]", f"{ACTOR}strategy=megatron"):
        cfg = read("verl-ppo", *PPO, sign, "critic.strategy=megatron", at=at).config
        assert cfg.critic.optimizer.lr == lr
        assert cfg.rollout.replicas == replicas
        assert cfg.train.gradient_checkpointing is not kept
    assert read("verl-ppo", *PPO, at=at).config.critic.optimizer.lr == 1e-5


def test_the_document_that_a_file_stands_over() -> None:
    assert base_of("verl-ppo", {"defaults": ["ppo_megatron_trainer", "_self_"]}) == "ppo_megatron_trainer"
    assert base_of("verl-ppo", {"defaults": ["ppo_trainer"], "actor_rollout_ref": None}) == ""
    assert base_of("verl-sft", {"model": {"path": "m"}}) == "sft_trainer_engine"
    assert base_of("verl-sft", {"model": {"path": None}}) == ""


@pytest.mark.parametrize("system", list(VERSIONS))
def test_defaults_of_other_documents_are_of_known_keys_and_documents(system: str) -> None:
    kinds = {base: kind for kind, file in FILES.items() for base in file.bases}
    for own in table_rows.base_defaults(system):
        rows = {row.key: row for row in dialect(kinds[own.file]).rows}
        assert own.key in rows, own
        assert TABLES[kinds[own.file]][0] == system


# ---------------------------------------------------------------- whole documents


def whole(kind: str, version: str) -> list[str]:
    """All keys of a release's document, but for those of open names."""
    of = dialect(kind, version)
    plain = (row for row in of.rows if not of.newer(row) and not OPEN & set(parts(row.key)))
    return [row.key for row in plain if row.key not in of.optional]


@pytest.mark.parametrize(
    ("kind", "versions"),
    [
        ("cosmos-grpo", ("0.3.7", "0.3.8", "0.4.0", "0.4.2", "0.4.7")),
        ("cosmos-sft", ("0.3.8", "0.4.0", "0.4.1", "0.4.3", "0.4.7")),
        ("skyrl", ("train-0.2", "train-0.3", "0.1", "0.3", "main")),
        ("verl-ppo", ("0.8.0", "0.9.0", "0.9.1")),
    ],
)
def test_a_whole_document_is_read_as_its_release(kind: str, versions: Sequence[str]) -> None:
    """Newer releases have all of its keys, too, and more."""
    assert [version_of(kind, whole(kind, version)) for version in versions] == list(versions)


def test_a_file_of_some_keys_is_read_as_before() -> None:
    few = ["train.train_policy.variant", "train.optm_lr", "policy.model_name_or_path"]
    assert version_of("cosmos-grpo", few) == "0.3.6", "nothing tells: the reference's"
    newer = [key for key in whole("cosmos-grpo", "0.3.9") if key not in whole("cosmos-grpo", "0.3.8")]
    known = [key for key in newer if key in whole("cosmos-grpo", "0.4.7")]
    assert version_of("cosmos-grpo", [*few, *known[:3]]) == "0.4.7", "the newest that has them"


@pytest.mark.parametrize("at", ["0.7.1", "0.8.0", "0.9.1"])
def test_the_documents_value_under_the_newer_name_says_nothing(at: str) -> None:
    """verl's document has the reward function under both names: null under the older one, and compute_score."""
    cfg = read("verl-ppo", *PPO, "reward.custom_reward_function.name=compute_score", at=at)
    assert cfg.config.rewards == read("verl-ppo", *PPO, at=at).config.rewards
    tree: Any = {
        "custom_reward_function": {"path": "r.py", "name": "f"},
        "reward": {"custom_reward_function": {"path": None, "name": "g"}, "num_workers": 8},
        "reward_model": {"num_workers": 4},
    }
    with pytest.raises(ConfigError, match=r'custom_reward_function\.name: given twice, as "f" and "g"'):
        load("d.json", dialect=f"verl-ppo@{at}", text=_json(tree), here=False)
    tree["reward"]["custom_reward_function"]["name"] = "compute_score"
    with pytest.raises(ConfigError) as e:
        load("d.json", dialect=f"verl-ppo@{at}", text=_json(tree), here=False)
    assert "given twice" not in str(e.value)


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree)


def test_megatron_is_told_by_the_class_of_its_section() -> None:
    """verl's file of the engine has no strategy."""
    keys = (
        "data.train_files=a.parquet",
        "model.path=m",
        "engine._target_=verl.workers.config.McoreEngineConfig",
    )
    assert read("verl-sft", *keys, at="0.9.1").config.train.optimizer.decay_all is False
    assert read("verl-sft", *keys[:2], at="0.9.1").config.train.optimizer.decay_all is True


def test_a_reference_to_megatrons_options_of_the_policy_asks_for_nothing() -> None:
    keys = (
        "defaults=[ppo_megatron_trainer]",
        "critic.megatron.override_transformer_config=${actor_rollout_ref.actor.megatron.override_transformer_config}",
    )
    loaded = read("verl-ppo", *PPO, *keys, "critic.strategy=megatron", at="0.5.0")
    assert loaded.translation is not None
    assert loaded.translation.unbuilt == ()


def test_float32_moments_are_those_of_automodels_document() -> None:
    keys = (
        "data.train_files=a.parquet",
        "model.path=m",
        "engine.strategy=automodel",
        "optim.exp_avg_dtype=fp32",
    )
    loaded = load(None, keys, dialect="verl-sft@0.9.1", here=False)
    assert loaded.translation is not None
    assert loaded.translation.unbuilt == ()


@pytest.mark.parametrize("kind", ["sft", "dpo", "raft"])
def test_the_advantage_that_trinity_assumes_where_there_is_none(kind: str) -> None:
    """Trinity's own copy of a config has it written out."""
    keys = ["model.model_path=m", "model.max_prompt_tokens=8", "model.max_response_tokens=8"]
    keys += ["checkpoint_root_dir=runs", "buffer.train_batch_size=8", f"algorithm.algorithm_type={kind}"]
    if kind == "raft":
        keys += ["buffer.explorer_input.taskset.path=t.jsonl", "buffer.batch_size=8"]
        keys += ["buffer.explorer_input.default_workflow_type=math_workflow"]
        keys += ["buffer.explorer_input.default_reward_fn_type=math_reward"]
    else:
        keys += ["mode=train", "buffer.trainer_input.experience_buffer.path=rows.jsonl"]
        keys += ["buffer.trainer_input.experience_buffer.storage_type=file"]
    said = ["algorithm.advantage_fn=ppo", "algorithm.advantage_fn_args={gamma: 1.0, lam: 1.0}"]
    assert read("trinity", *keys, *said, at="0.6.0").config == read("trinity", *keys, at="0.6.0").config
    with pytest.raises(
        ConfigError, match="algorithm.advantage_fn: grpo has no effect" if kind != "raft" else "."
    ):
        read("trinity", *keys, "algorithm.advantage_fn=" + ("grpo" if kind != "raft" else "jsd"), at="0.6.0")


@pytest.mark.parametrize(
    ("kind", "key", "releases"),
    [
        ("verl-ppo", "actor_rollout_ref.model.lora.dtype", ("0.7.0", "0.8.0", "0.9.0", "main", "0.9.1")),
        ("verl-ppo", "critic.model.lora.dtype", ("0.7.0", "0.9.0", "main")),
        ("verl-sft", "model.lora.dtype", ("0.8.0", "0.9.0", "main", "0.9.1")),
        ("verl-ppo", "distillation.distillation_loss._target_", ("0.8.0", "0.9.0", "main", "0.9.1")),
        ("verl-ppo", "reward_model.model.override_config", ("0.6.0", "0.6.1", "0.7.0")),
    ],
)
def test_releases_have_the_keys_of_their_documents(kind: str, key: str, releases: Sequence[str]) -> None:
    """A key that a release is said not to have makes its document one of a newer release."""
    for release in releases:
        of = dialect(kind, release)
        row = of.row(key)
        assert row is not None
        assert of.newer(row) == "", release


def test_what_the_oldest_releases_alone_assume_is_told() -> None:
    """Where the keys of a file do not tell its release, it is read as the oldest: those defaults would be its own."""
    keys = ("data.train_files=a.parquet", "data.val_files=b.parquet", "model.partial_pretrain=m")
    told = {at: _differs(read("verl-sft", *keys, at=at)) for at in ("0.4.0", "0.4.1")}
    assert "In 0.4.0 it has dicts with the key question" in told["0.4.0"]
    assert "In 0.4.0" not in told["0.4.1"]
    keys = ("model.model_path=m", "model.max_prompt_tokens=8", "model.max_response_tokens=8")
    keys += ("checkpoint_root_dir=runs", "buffer.explorer_input.taskset.path=t.jsonl", "buffer.batch_size=8")
    keys += ("buffer.explorer_input.default_workflow_type=math_workflow", "algorithm.algorithm_type=grpo")
    told = {at: _differs(read("trinity", *keys, at=at)) for at in ("0.4.1", "0.5.0")}
    assert "Before, Trinity passes false" in told["0.4.1"]
    assert "Before, Trinity passes false" not in told["0.5.0"]


def _differs(loaded: Loaded) -> str:
    assert loaded.translation is not None
    return " ".join(line.differs for line in loaded.translation.lines)
