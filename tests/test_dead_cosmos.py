"""No key of the Cosmos-RL tables is dead: another value of any key that is mapped or translated changes the native
config, or is refused by that key's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.config import hardware
from whet.config.load import load
from whet.config.schema import Config
from whet.config.tree import path_of
from whet.dialects import here
from whet.dialects.row import Row
from whet.dialects.tables import table
from whet.dialects.values import nested
from whet.types import ConfigError

POLICY, MESH = "train.train_policy.", "policy.parallelism."
FILE = {POLICY + "dataset.name": "rows.jsonl", POLICY + "prompt_column_name": "question"}
BASE: dict[str, dict[str, Any]] = {
    "grpo": FILE | {POLICY + "type": "grpo", "train.train_batch_per_replica": 64},
    "sft": {POLICY + "dataset.name": "rows.jsonl", POLICY + "type": "sft"},
}

VALIDATES = {"validation.enable": True, "validation.dataset.name": "held_out.jsonl"}
HOLDS_OUT = {"validation.enable": True, POLICY + "dataset.test_size": 4}
FOLDER = {POLICY + "dataset.name": "folder"}
FOLDER_OF_VALIDATION = VALIDATES | {"validation.dataset.name": "folder"}
OVERLONG = {
    POLICY + "overlong_reward.enable_overlong_penalty": True,
    POLICY + "overlong_reward.buffer_length": 1024,
}
TWO_REWARDS = {POLICY + "variant": "dapo", POLICY + "reward_function": ["gsm8k", "format"]}
ON_POLICY = {POLICY + "variant": "dapo", POLICY + "on_policy": True}
KL = {POLICY + "kl_beta": 0.1}
SAVES = {"train.ckpt.enable_checkpoint": True}
SUB = "profiler.sub_profiler_config."
PROFILES = {"profiler.enable_profiler": True}
LORA = {"policy.lora.r": 4}
TO_S3 = SAVES | {"train.ckpt.upload_s3": "all", "train.ckpt.s3_bucket": "pail"}
TO_HUB = SAVES | {"train.ckpt.upload_hf": True, "train.ckpt.hf_repo_name": "org/name"}
DECAYS = {"train.optm_decay_type": "linear"}
TEACHER = {"distillation.enable": True}

SERVED = {"whet.rollout.engine": "vllm"}
CONTEXTS: dict[str, dict[str, Any]] = {
    **{f"rollout.parallelism.{dim}_size": SERVED for dim in ("tp", "pp", "ep")},
    "rollout.gpu_memory_utilization": SERVED,
    "rollout.multi_turn_config.max_assistant_turns": {"rollout.multi_turn_config.enable": True},
    "custom": {POLICY + "dataset.name": "rows.py:rows"},
    POLICY + "dataset.subset": FOLDER,
    POLICY + "dataset.split": FOLDER,
    POLICY + "dataset.test_size": HOLDS_OUT,
    "validation.enable": {"validation.dataset.name": "held_out.jsonl"},
    "validation.dataset.subset": FOLDER_OF_VALIDATION,
    "validation.dataset.split": FOLDER_OF_VALIDATION,
    POLICY + "filter_reward_metric": TWO_REWARDS,
    POLICY + "unbiased_loss_max_tokens": {POLICY + "loss_type": "seq-mean-token-mean"},
    POLICY + "overlong_reward.enable_overlong_penalty": {POLICY + "overlong_reward.buffer_length": 1024},
    POLICY + "overlong_reward.buffer_length": OVERLONG,
    POLICY + "overlong_reward.penalty_factor": OVERLONG,
    POLICY + "max_retry_for_on_policy": ON_POLICY,
    POLICY + "reference_reset_interval": KL,
    POLICY + "reset_optimizer_with_reference": KL | {POLICY + "reference_reset_interval": 5},
    POLICY + "unbiased_kl_estimate": KL,
    POLICY + "behav_imp_weight_cap": {POLICY + "use_decoupled_loss": True},
    MESH + "dp_shard_size": {POLICY + "batch_size_per_optimize": 16},
    "train.fsdp_reshard_after_forward": {MESH + "dp_shard_size": 2},
    **{key: {MESH + "tp_size": 1} for key in ("train.compile", "train.activation_offload")},
    "train.fsdp_offload": {MESH + "dp_shard_size": 2},
    **{f"train.fp8.{key}": {"train.fp8.enable_fp8": True} for key in ("fp8_recipe", "quant_recipe")},
    MESH + "ep_size": {MESH + "dp_shard_size": 2},
    POLICY + "dataset.revision": {POLICY + "dataset.name": "org/rows"},
    "validation.dataset.revision": VALIDATES | {"validation.dataset.name": "org/rows"},
    "validation.n_generation": VALIDATES | {"validation.temperature": 1.0},
    "train.optm_decay_ratio": DECAYS,
    "train.optm_min_lr_factor": DECAYS,
    "train.ckpt.save_freq": SAVES,
    "train.ckpt.save_freq_in_epoch": SAVES,
    "train.ckpt.max_keep": SAVES,
    "train.ckpt.export_safetensors": SAVES,
    "logging.project_name": {"logging.logger": ["wandb"]},
    "logging.group_name": {"logging.logger": ["wandb"]},
    "distillation.model_name_or_path": TEACHER,
    "distillation.model_revision": TEACHER | {"distillation.model_name_or_path": "org/teacher"},
    "distillation.kl_penalty_coef": TEACHER,
    "distillation.kl_discount_factor": TEACHER,
    "distillation.top_k": TEACHER,
    "distillation.jsd_beta": TEACHER | {"distillation.top_k": 8},
    SUB + "rank_filter": PROFILES | {"train.max_num_steps": 9},
    **{
        f"policy.lora.{name}": LORA
        for name in (
            *("lora_alpha", "lora_dropout", "target_modules", "use_rslora", "modules_to_save"),
            *("alpha_pattern", "r_pattern", "init_lora_weights"),
        )
    },
    "train.ckpt.save_mode": SAVES,
    "train.ckpt.upload_s3": SAVES | {"train.ckpt.s3_bucket": "pail"},
    **{f"train.ckpt.{key}": TO_S3 for key in ("s3_bucket", "s3_prefix")},
    "train.ckpt.upload_hf": SAVES | {"train.ckpt.hf_repo_name": "org/name"},
    "train.ckpt.hf_repo_name": TO_HUB,
    "profiler.enable_profiler": {"train.max_num_steps": 9},
    "profiler.enable_nsys": {"train.max_num_steps": 9},
    **{
        SUB + name: PROFILES | {"train.max_num_steps": 9}
        for name in (
            *("active_steps", "warmup_steps", "wait_steps"),
            *("record_shape", "profile_memory", "with_stack"),
        )
    },
}
"""What a key needs around it to be read; with itself in it where the document's default is refused."""

OTHER: dict[str, Any] = {
    "rollout.gpu_memory_utilization": 0.5,
    "train.fsdp_reduce_dtype": "bfloat16",
    "train.fp8.fp8_recipe": "delayed_scaling",
    "train.fp8.quant_recipe": "tensorwise",
    "train.fsdp_reshard_after_forward": "never",
    "policy.model_revision": "v1",
    "train.train_policy.dataset.revision": "v1",
    "validation.dataset.revision": "v1",
    "custom": {"count": 3},
    "train.resume": "checkpoints/step_20",
    "train.optm_name": "Adam",
    "train.optm_impl": "foreach",
    "train.master_dtype": "bfloat16",
    "train.ckpt.save_mode": "sync",
    "mode": "colocated",
    "train.ckpt.upload_s3": "final",
    "train.ckpt.hf_repo_name": "org/other",
    "policy.lora": {},
    "train.ckpt.s3_bucket": "other",
    "policy.lora.r": 4,
    "policy.lora.lora_alpha": 2.0,
    "policy.lora.lora_dropout": 0.1,
    "policy.lora.target_modules": ["q_proj"],
    "policy.lora.use_rslora": True,
    "policy.lora.modules_to_save": ["lm_head"],
    "policy.lora.alpha_pattern": {"q_proj": 4.0},
    "policy.lora.r_pattern": {"q_proj": 4},
    "policy.lora.init_lora_weights": "pissa_niter_4",
    "policy.trainable_map": {"lm_head": False},
    "policy.freeze_pattern": ["embed"],
    "policy.trainable_pattern": ["lm_head"],
    "logging.group_name": "sweep",
    "distillation.enable": True,
    "distillation.model_name_or_path": "teacher",
    "distillation.model_revision": "v1",
    SUB + "rank_filter": [1],
    POLICY + "off_policy_masking_delta": 0.1,
    "train.optm_betas": [0.9, 0.95],
    "train.optm_decay_type": "cosine",
    "train.optm_decay_ratio": 0.5,
    "train.optm_warmup_start_factor": 0.1,
    "train.param_dtype": "float32",
    "train.train_batch_per_replica": 32,
    "train.seed": 7,
    "train.max_num_steps": 7,
    "logging.logger": ["console"],
    "logging.experiment_name": "another",
    "policy.model_name_or_path": "folder/of/a/model",
    MESH + "dp_replicate_size": 2,
    "rollout.n_generation": 8,
    "rollout.quantization": "fp8",
    "rollout.seed": 7,
    "rollout.sampling_config.top_k": 20,
    "rollout.sampling_config.top_p": 0.9,
    "rollout.multi_turn_config.custom_chat_template_path": "template.jinja",
    "validation.top_p": 0.9,
    "validation.top_k": 20,
    "validation.max_response_length": 100,
    "validation.reward_function": ["format"],
    "validation.dataset.test_size": 0.5,
    POLICY + "type": "ppo",
    POLICY + "variant": "dapo",
    POLICY + "dataset.test_size": 9,
    POLICY + "reward_function": {"gsm8k": 0.9, "format": 0.1},
    POLICY + "filter_reward_metric": ["format"],
    POLICY + "overlong_reward.buffer_length": 512,
    POLICY + "loss_type": "seq-mean-token-sum",
    POLICY + "unbiased_loss_max_tokens": 1000,
    POLICY + "positive_nll_coef": 0.1,
    POLICY + "aipo_rho": 4.0,
    POLICY + "mini_batch": 4,
    POLICY + "batch_size_per_optimize": 16,
    POLICY + "max_token_len_per_mini_batch": 9000,
    POLICY + "min_filter_prefix_tokens": 3,
    POLICY + "reference_reset_interval": 5,
    POLICY + "behav_imp_weight_cap": 2.0,
}
"""Another value of the right kind, for keys whose default does not say what that is."""

LATER = {"train.epsilon"}
"""Keys of the document's version that only later ones read."""

REFUSED = {"train.fp8.fp8_recipe", "train.fsdp_reduce_dtype", POLICY + "type", MESH + "dp_replicate_size"}
"""Keys of which every other value is refused: there is one RL algorithm with variants, one replica."""


def the_rows(kind: str) -> list[Row]:
    return [row for row in table(f"cosmos-{kind}") if row.status in ("mapped", "translated")]


def another(row: Row) -> Any:
    """A value of the same kind that is not the default."""
    if row.key in OTHER:
        return OTHER[row.key]
    if isinstance(row.default, bool):
        return not row.default
    if isinstance(row.default, int):
        return row.default + 1
    if isinstance(row.default, float):
        return row.default * 2 if row.default else 0.25
    assert isinstance(row.default, str), f"{row.key}: say in OTHER what another value of it is"
    return "another"


def read(folder: Path, kind: str, given: dict[str, Any], version: str = "0.3.6") -> Config:
    file = folder / "job.json"
    file.write_text(json.dumps(nested({path_of(key, ()): value for key, value in given.items()})))
    return load(file, dialect=f"cosmos-{kind}@{version}").config


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which every layout has room."""
    monkeypatch.setattr(hardware, "cuda_count", lambda: 64)
    monkeypatch.setattr(here, "is_installed", lambda name: True)


def context(row: Row, kind: str) -> dict[str, Any]:
    of_validation = VALIDATES if row.key.startswith("validation.") else {}
    return BASE[kind] | CONTEXTS.get(row.key, of_validation)


@pytest.mark.parametrize(
    ("kind", "row"),
    [pytest.param(kind, row, id=f"{kind}-{row.key}") for kind in BASE for row in the_rows(kind)],
)
def test_another_value_of_a_key_changes_the_native_config(tmp_path: Path, kind: str, row: Row) -> None:
    around, version = context(row, kind), "0.4.4" if row.since or row.key in LATER else "0.3.6"
    default = {} if row.default in (None, "") else {row.key: row.default}
    before = read(tmp_path, kind, default | around, version)
    changed = around | {row.key: another(row)}
    assert changed != default | around
    if row.key not in REFUSED:
        assert read(tmp_path, kind, changed, version) != before
        return
    with pytest.raises(ConfigError, match=row.key):
        read(tmp_path, kind, changed, version)


@pytest.mark.parametrize(
    "key", [MESH + "dp_replicate_size", MESH + "dp_shard_size", MESH + "n_init_replicas"]
)
def test_workers_of_an_sft_job_count(tmp_path: Path, key: str) -> None:
    steps = [read(tmp_path, "sft", BASE["sft"] | {key: n}).train.tasks_per_step for n in (1, 3)]
    assert steps == [8, 24]


def test_the_small_tables_of_this_test_name_keys() -> None:
    names = {row.key for kind in BASE for row in the_rows(kind)}
    assert names >= CONTEXTS.keys() | OTHER.keys() | REFUSED
