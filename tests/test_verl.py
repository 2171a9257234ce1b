"""verl files: every key has a status, its own rules hold, and a run equals the native one to the bit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import whet
from whet.config import schema
from whet.config.dialects import verl_loop as loop
from whet.config.dialects import verl_parts as parts
from whet.config.dialects import verl_rules as rules
from whet.config.dialects import verl_sft as sft
from whet.config.dialects.key import Values
from whet.config.dialects.tables import dialect
from whet.config.dialects.translate import translate
from whet.config.dialects.verl import ALIASES, VERL_EVAL, VERL_MEGATRON, VERL_PPO, VERL_SFT
from whet.config.keys import lookup
from whet.config.load import load
from whet.config.parse import parse
from whet.config.plan import plans
from whet.config.tree import path_of
from whet.data.tokenizer import load_tokenizer
from whet.models.load import build, export
from whet.rewards.verl import compute_score
from whet.types import ConfigError, Json, Task

HERE = Path(__file__).parent / "dialects"
TABLES = {
    "verl-ppo": VERL_PPO,
    "verl-megatron-optim": VERL_MEGATRON,
    "verl-eval": VERL_EVAL,
    "verl-sft": VERL_SFT,
}
ROWS = {row.name: row for row in VERL_PPO}
SFT = {row.name: row for row in VERL_SFT}
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


def document(name: str) -> dict[str, str]:
    """Keys of the document with their defaults, as text."""
    lines = (HERE / f"{name}.keys.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)


def values(given: dict[str, Json] | None = None, table: str = "verl-ppo") -> Values:
    """All values of a file that sets these, references in the defaults resolved."""
    rows = {row.name: row for row in TABLES[table]}
    flat = {name: row.default for name, row in rows.items()} | (given or {})

    def resolved(value: Json) -> Json:
        refers = isinstance(value, str) and value.startswith("${") and value.count("${") == 1
        return resolved(flat[value[2:-1]]) if refers and value[2:-1] in flat else value

    return {name: resolved(value) for name, value in flat.items()}


def refusal(function: Any, given: dict[str, Json], table: str = "verl-ppo") -> str:
    with pytest.raises(ConfigError) as e:
        function(values(given, table))
    return str(e.value)


# ---------------------------------------------------------------- the tables

OTHERWISE = {
    "data.trust_remote_code": False,  # never run
    "actor_rollout_ref.actor.checkpoint.contents": None,  # the older name of two keys
    "algorithm.kl_ctrl.kl_coef": 0.001,  # the document's text
}
"""Defaults that are not the document's, as the rows say."""


@pytest.mark.parametrize(
    ("name", "count"), [("verl-ppo", 200), ("verl-megatron-optim", 30), ("verl-eval", 7), ("verl-sft", 20)]
)
def test_every_key_of_the_document_has_a_row_with_its_default(name: str, count: int) -> None:
    wanted, rows = document(name), {row.name: row for row in TABLES[name]}
    assert len(wanted) == count
    assert not wanted.keys() - rows.keys()
    assert len(rows) == len(TABLES[name]), "names are unique"
    for key, text in wanted.items():
        default = rows[key].default
        if key in OTHERWISE:
            assert default == OTHERWISE[key]
        elif default != {}:
            assert default == (text if text.startswith("${") else parse(text).tree), key


def test_statuses() -> None:
    counts = {
        name: Counter(row.status for row in rows if row.name in document(name))
        for name, rows in TABLES.items()
    }
    few = sum(c["inert"] + c["refused"] for c in counts.values())
    assert few < 0.05 * 257
    assert sum(row.status in ("inert", "refused") for row in VERL_PPO) < 0.05 * len(VERL_PPO)
    assert counts["verl-eval"] == {"coming": 7}
    assert counts["verl-ppo"]["translated"] + counts["verl-ppo"]["mapped"] > 100
    assert all(row.reason for rows in TABLES.values() for row in rows if row.status != "mapped")


def test_native_keys_exist_and_aliases_lead_to_rows() -> None:
    for row in (*VERL_PPO, *VERL_MEGATRON, *VERL_SFT):
        for native in row.native if row.status in ("mapped", "translated") else ():
            assert lookup(path_of(native, ())) is not None, (row.name, native)
    targets = {new if isinstance(new, str) else new[0] for new in ALIASES.values()}
    assert targets <= ROWS.keys() | SFT.keys()
    assert not ALIASES.keys() & ROWS.keys()


OTHER: dict[str, Json] = {
    "data.truncation": "left",
    "data.train_files": "other.parquet",
    A + "strategy": "megatron",
    A + "kl_loss_type": "mse",
    A + "loss_agg_mode": "seq-mean-token-sum",
    A + "optim.warmup_style": "cosine",
    A + "optim.betas": [0.9, 0.95],
    A + "checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
    A + "checkpoint.contents": ["model", "optimizer", "extra", "hf_model"],
    "critic.optim.warmup_style": "cosine",
    "critic.optim.min_lr_ratio": 0.5,
    R + "name": "trtllm",
    R + "dtype": "float32",
    R + "top_k": 5,
    R + "val_kwargs.top_k": 5,
    "algorithm.adv_estimator": "rloo",
    "algorithm.kl_penalty": "abs",
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.filter_groups.metric": "acc",
    "reward_model.reward_manager": "prime",
    "trainer.logger": ["tensorboard"],
    "trainer.resume_mode": "disable",
    "trainer.device": "cpu",
    "custom_reward_function.path": "other.py",
    "custom_reward_function.reward_kwargs": {"a": 1},
    "actor_rollout_ref.model.override_config.*": {"a": 1},
    "actor_rollout_ref.model.override_config.model_config": {"a": 1},
}
"""A second value of every key for which none follows from the default."""

BASES: tuple[dict[str, Json], ...] = (
    {},
    {"algorithm.adv_estimator": "grpo", R + "n": 4, A + "use_kl_loss": True},
    {"algorithm.use_kl_in_reward": True},
    {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
    {A + "optim.warmup_style": "cosine", "critic.optim.warmup_style": "cosine", A + "use_dynamic_bsz": True},
    {
        A + "use_kl_loss": True,
        A + "ppo_micro_batch_size_per_gpu": 32,
        R + "log_prob_micro_batch_size_per_gpu": 64,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 64,
        "data.max_response_length": 1024,
    },
    {A + "use_kl_loss": True, A + "use_dynamic_bsz": True},
    {
        R + "val_kwargs.do_sample": True,
        R + "val_kwargs.temperature": 0.7,
        "custom_reward_function.path": "r.py",
    },
    {R + "val_kwargs.temperature": 0.7},
    {
        A + "loss_agg_mode": "seq-mean-token-sum-norm",
        "trainer.resume_mode": "resume_path",
        "trainer.save_freq": 2,
    },
    {
        "reward_model.overlong_buffer.enable": True,
        "reward_model.overlong_buffer.len": 8,
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "seq_final_reward",
    },
)


def another(name: str) -> tuple[Json, ...]:
    default = values()[name]
    if name in OTHER:
        return (OTHER[name],)
    if isinstance(default, bool):
        return (not default,)
    if isinstance(default, int | float):
        return (2 * default + 1, 1)
    return (f"{default}x", 4, 600)


SECTIONS = {row.name for row in VERL_PPO if row.translate is parts.nothing}


@pytest.mark.parametrize(
    "name", [row.name for row in VERL_PPO if row.status == "translated" and row.name not in SECTIONS]
)
def test_no_key_is_dead(name: str) -> None:
    """In one of a few files another value changes a native key or is refused."""
    function = ROWS[name].translate
    assert function is not None

    def effect(given: dict[str, Json]) -> object:
        try:
            return function(values(given))
        except ConfigError:
            return "refused"

    if name == "trainer.project_name":
        assert "trainer.project_name" in ROWS["trainer.default_local_dir"].default
        return
    assert any(effect(base) != effect(base | {name: other}) for base in BASES for other in another(name)), (
        name
    )


# ---------------------------------------------------------------- batch sizes

SMALL: dict[str, Json] = {
    "data.train_batch_size": 8, A + "ppo_mini_batch_size": 4, R + "n": 4, "trainer.n_gpus_per_node": 2,
    A + "ppo_micro_batch_size_per_gpu": 4, "algorithm.adv_estimator": "grpo",
}  # fmt: skip


def test_batches_by_hand() -> None:
    # 8 prompts in two mini batches of 4; 4 * 4 responses on 2 ranks are 8 each, two passes of 4
    assert parts_batches(SMALL) == {"train.tasks_per_step": 8, "train.minibatches": 2, "train.passes": 1}
    assert parts_batches(SMALL | {A + "ppo_epochs": 3})["train.passes"] == 3


def parts_batches(given: dict[str, Json]) -> Any:
    return rules.batches(values(given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({A + "ppo_mini_batch_size": 16}, "data.train_batch_size=8 must be at least"),
        ({A + "ppo_mini_batch_size": 3}, "ppo_mini_batch_size=3 must divide data.train_batch_size=8"),
        (
            {"trainer.n_gpus_per_node": 3},
            "n = 32 must be divisible by trainer.nnodes * trainer.n_gpus_per_node = 3",
        ),
        ({A + "ppo_micro_batch_size_per_gpu": 3}, "ppo_micro_batch_size_per_gpu=3 must divide"),
        ({A + "ppo_micro_batch_size": 4, A + "ppo_micro_batch_size_per_gpu": 2}, "You have set both"),
        ({A + "ppo_micro_batch_size": 6, A + "ppo_micro_batch_size_per_gpu": None}, "must divide"),
        (
            {A + "ppo_micro_batch_size": 1, A + "ppo_micro_batch_size_per_gpu": None},
            "at least the 2 data-parallel",
        ),
        ({A + "ulysses_sequence_parallel_size": 3}, "= 2 must be divisible by"),
        ({"data.train_batch_size": 0}, "data.train_batch_size: got 0, expected a whole number >= 1"),
        ({"trainer.n_gpus_per_node": 32, A + "ppo_mini_batch_size": 1}, "leaves a rank without a sequence"),
    ],
)
def test_batches_that_verl_refuses(given: dict[str, Json], said: str) -> None:
    assert said in refusal(rules.batches, SMALL | given)


def test_a_critic_shares_the_actors_batches() -> None:
    gae = SMALL | {"algorithm.adv_estimator": "gae"}
    assert parts_batches(gae) == parts_batches(SMALL)
    assert "is coming" in refusal(rules.batches, gae | {"critic.ppo_mini_batch_size": 8})
    assert parts_batches(SMALL | {"critic.ppo_mini_batch_size": 8}) == parts_batches(SMALL)


def test_devices() -> None:
    assert "tensor_model_parallel_size=3" in refusal(
        rules.check_parallel, {R + "tensor_model_parallel_size": 3}
    )
    alone = {"trainer.n_gpus_per_node": 1}
    assert rules.check_parallel(values(alone)) == {}
    sp = {A + "ulysses_sequence_parallel_size": 2}
    assert "use_remove_padding" in refusal(rules.check_parallel, sp)
    assert rules.check_parallel(values(sp | {"actor_rollout_ref.model.use_remove_padding": True})) == {}
    megatron = {A + "strategy": "megatron", A + "megatron.tensor_model_parallel_size": 4}
    assert rules.ranks(values(megatron), "actor_rollout_ref.actor") == 2
    assert "must be of the family" in refusal(rules.same_family, {"critic.strategy": "megatron"})


def test_the_cut_is_the_smallest_that_is_asked_for() -> None:
    assert rules.cut(values()) == {"train.micro_rollouts": 8}
    assert rules.cut(values({R + "log_prob_micro_batch_size_per_gpu": 2})) == {"train.micro_rollouts": 2}
    reference = {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1}
    assert rules.cut(values(reference)) == {"train.micro_rollouts": 8}, "no KL, so no reference"
    assert rules.cut(values(reference | {A + "use_kl_loss": True})) == {"train.micro_rollouts": 1}
    # 64 sequences over 8 devices
    older = {A + "ppo_micro_batch_size": 32, A + "ppo_micro_batch_size_per_gpu": None}
    assert rules.cut(values(older)) == {"train.micro_rollouts": 4}
    dynamic = {A + "use_dynamic_bsz": True}
    assert rules.cut(values(dynamic)) == {"train.micro_tokens": 16384}
    # not dynamic: 16 sequences of 1024 tokens at most; 8192 tokens are 8 of them
    mixed = dynamic | {R + "log_prob_use_dynamic_bsz": False, A + "ppo_max_token_len_per_gpu": 8192}
    assert rules.cut(values(mixed)) == {"train.micro_rollouts": 8}
    assert "= 1024" in refusal(rules.cut, dynamic | {A + "ppo_max_token_len_per_gpu": 1000})
    assert "set at least one of" in refusal(rules.cut, {A + "ppo_micro_batch_size_per_gpu": None})


# ---------------------------------------------------------------- algorithm


@pytest.mark.parametrize(
    ("estimator", "n", "native"),
    [
        ("gae", 1, {"algorithm.name": "ppo"}),
        ("grpo", 4, {"algorithm.name": "grpo", "algorithm.normalize_std": True}),
        ("grpo", 1, {"algorithm.name": "reinforce"}),
        ("rloo", 4, {"algorithm.name": "rloo"}),
        ("reinforce_plus_plus", 1, {"algorithm.name": "reinforce", "algorithm.whiten": True}),
        (
            "reinforce_plus_plus_baseline",
            4,
            {"algorithm.name": "grpo", "algorithm.normalize_std": False, "algorithm.whiten": True},
        ),
        ("reinforce_plus_plus_baseline", 1, {"algorithm.name": "reinforce", "algorithm.whiten": True}),
        ("reward", 2, {"algorithm.name": "reinforce"}),
        ("none", 2, {"algorithm.name": "reinforce", "algorithm.advantage": "none"}),
    ],
)
def test_advantages(estimator: str, n: int, native: dict[str, Json]) -> None:
    given = {"algorithm.adv_estimator": estimator, R + "n": n}
    assert parts.advantage(values(given)) == {"algorithm.loss": "ppo", **native}


def test_advantages_that_are_refused() -> None:
    assert "coming" in refusal(parts.advantage, {"algorithm.adv_estimator": "remax"})
    assert "expected one of gae" in refusal(parts.advantage, {"algorithm.adv_estimator": "grpoo"})
    alone = {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": True}
    assert "coming" in refusal(parts.advantage, alone)
    dr = {"algorithm.adv_estimator": "grpo", R + "n": 2, "algorithm.norm_adv_by_std_in_grpo": False}
    assert parts.advantage(values(dr))["algorithm.normalize_std"] is False


def test_clipping() -> None:
    def sides(**given: Json) -> tuple[Json, ...]:
        return tuple(parts.clipping(values({A + key: value for key, value in given.items()})).values())

    assert sides() == (0.2, 0.2, 3.0)
    assert sides(clip_ratio=0.1) == (0.1, 0.1, 3.0)
    assert sides(clip_ratio_high=0.28, clip_ratio_c=10.0) == (0.2, 0.28, 10.0)


@pytest.mark.parametrize(
    ("given", "native"),
    [
        ({}, (None, 0.0, None)),
        ({A + "use_kl_loss": True}, ("loss", 0.001, "k3")),
        ({A + "use_kl_loss": True, A + "kl_loss_type": "kl", A + "kl_loss_coef": 0.5}, ("loss", 0.5, "k1")),
        ({"algorithm.use_kl_in_reward": True}, ("reward", 0.001, "k1")),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "mse"}, ("reward", 0.001, "k2")),
    ],
)
def test_kl(given: dict[str, Json], native: tuple[Json, ...]) -> None:
    found = parts.kl(values(given))
    assert tuple(found.get(f"algorithm.kl.{key}") for key in ("place", "coef", "estimator")) == native
    assert "algorithm.kl.target" not in found


def test_adaptive_kl_and_kl_twice() -> None:
    adaptive = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}
    assert parts.kl(values(adaptive))["algorithm.kl.target"] == 0.1
    assert parts.kl(values(adaptive))["algorithm.kl.horizon"] == 10000
    assert "both at once" in refusal(parts.kl, adaptive | {A + "use_kl_loss": True})
    assert "kl_loss_type=full is coming" in refusal(
        parts.kl, {A + "use_kl_loss": True, A + "kl_loss_type": "full"}
    )


# ---------------------------------------------------------------- optimizers


def test_schedules() -> None:
    steps: dict[str, Json] = {
        A + "optim.lr_warmup_steps": 3,
        A + "ppo_mini_batch_size": 512,
        A + "ppo_epochs": 2,
    }
    found = loop.actor_optimizer(values(steps))
    assert found["train.optimizer.schedule.warmup_steps"] == 3 * 2 * 2
    assert found["train.optimizer.schedule.kind"] == "constant"
    assert found["train.optimizer.weight_decay"] == 0.01
    ratio = {
        A + "optim.lr_warmup_steps_ratio": 0.1,
        A + "optim.warmup_style": "cosine",
        A + "optim.min_lr_ratio": 0.2,
    }
    found = loop.actor_optimizer(values(ratio))
    assert found["train.optimizer.schedule.warmup_fraction"] == 0.1
    assert found["train.optimizer.schedule.min_factor"] == 0.2
    assert "0.5) is coming" in refusal(
        loop.actor_optimizer, {A + "optim.warmup_style": "cosine", A + "optim.num_cycles": 1.0}
    )
    none = loop.actor_optimizer(
        values({A + "optim.lr_warmup_steps": 0, A + "optim.lr_warmup_steps_ratio": 0.1})
    )
    assert none["train.optimizer.schedule.warmup_steps"] == 0


def test_megatron_schedules() -> None:
    megatron: dict[str, Json] = {A + "strategy": "megatron", A + "optim.lr": 1e-5}
    found = loop.actor_optimizer(values(megatron | {A + "optim.min_lr": 1e-6, A + "optim.clip_grad": 0}))
    assert found["train.optimizer.schedule.kind"] == "linear"
    assert found["train.optimizer.schedule.min_factor"] == pytest.approx(0.1)
    assert found["train.optimizer.grad_clip"] is None
    zero = megatron | {A + "optim.lr_warmup_steps": 0, A + "optim.lr_warmup_steps_ratio": 0.1}
    assert loop.actor_optimizer(values(zero))["train.optimizer.schedule.warmup_fraction"] == 0.1
    for style in ("inverse_square_root", "inverse-square-root", "WSD"):
        assert "coming" in refusal(loop.actor_optimizer, megatron | {A + "optim.lr_decay_style": style})
    assert "must be between 0 and" in refusal(loop.actor_optimizer, megatron | {A + "optim.min_lr": 1.0})
    assert "lr_decay_steps=7: coming" in refusal(
        loop.actor_optimizer, megatron | {A + "optim.lr_decay_steps": 7}
    )


# ---------------------------------------------------------------- rollouts, data, trainer


def test_sampling() -> None:
    assert parts.sampling(values({R + "n": 5, R + "top_k": 0})) == {
        "rollout.group_size": 5, "rollout.sampling.temperature": 1.0, "rollout.sampling.top_k": 0,
        "rollout.sampling.top_p": 1,
    }  # fmt: skip
    greedy = parts.sampling(values({R + "n": 5, R + "do_sample": False, R + "top_p": 0.5}))
    assert tuple(greedy.values()) == (1, 0.0, 0, 1.0)
    assert parts.concurrency(values({"data.train_batch_size": 16, R + "n": 4})) == {"rollout.max_batch": 64}
    assert "coming" in refusal(parts.engine, {R + "name": "trtllm"})


def test_validation() -> None:
    assert parts.validation(values({"trainer.test_freq": -1, "trainer.val_before_train": False})) == {}
    start = parts.validation(values({"trainer.test_freq": -1, R + "val_kwargs.n": 4}))
    keys = ("every", "at_start", "at_end", "samples")
    assert tuple(start[f"eval.{key}"] for key in keys) == (0, True, False, 1)
    sampled = {R + "val_kwargs.do_sample": True, R + "val_kwargs.temperature": 0.6, R + "val_kwargs.n": 4}
    found = parts.validation(values(sampled))
    assert (found["eval.every"], found["eval.samples"], found["eval.sampling.temperature"]) == (2, 4, 0.6)
    assert found["eval.sampling.top_k"] == 0
    assert found["data.eval.0.label"] == "data_source"


def test_data_and_rewards() -> None:
    files = parts.training_data(
        values({"data.train_files": ["a.parquet", "b.parquet"], "data.prompt_key": "p"})
    )
    assert files["data.train.0.path"] == ["a.parquet", "b.parquet"]
    assert files["data.train.0.prompt"] == "p"
    assert "remote files are coming" in refusal(
        parts.training_data, {"data.train_files": "hdfs://x/a.parquet"}
    )
    assert parts.overlong(values({"data.truncation": "middle"})) == {"data.overlong": "truncate_middle"}
    assert parts.overlong(values({"data.filter_overlong_prompts": True})) == {"data.overlong": "filter"}
    assert parts.rewards(values())["rewards.score.function"] == "whet.rewards.verl:compute_score"
    own = {"custom_reward_function.path": "a/b.py", "custom_reward_function.name": "f"}
    assert parts.rewards(values(own))["rewards.score.function"] == "a/b.py:f"
    assert parts.rewards(values({"reward_model.reward_manager": "prime"}))["guard.timeout_s"] == 300.0
    assert "reward models are coming" in refusal(parts.no_reward_model, {"reward_model.enable": True})


def test_dapo() -> None:
    at = "reward_model.overlong_buffer."
    given = {at + "enable": True, at + "len": 128, at + "penalty_factor": 0.5}
    assert parts.overlong_penalty(values(given)) == {
        "rewards.overlong.function": "overlong",
        "rewards.overlong.weight": 0.5,
        "rewards.overlong.arguments": {"max_tokens": 512, "buffer": 128},
    }
    groups = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}
    assert parts.dynamic_sampling(values(groups))["algorithm.max_refills"] == 1_000_000
    some = groups | {"algorithm.filter_groups.max_num_gen_batches": 10}
    assert parts.dynamic_sampling(values(some))["algorithm.max_refills"] == 9
    assert "coming" in refusal(parts.dynamic_sampling, groups | given), "acc is not the penalised reward"


def test_checkpoints_and_resume() -> None:
    assert loop.checkpoints(values()) == {
        "checkpoint.every": 0,
        "checkpoint.keep": 1,
        "checkpoint.export": False,
    }
    every = {"trainer.save_freq": 5, A + "checkpoint.contents": ["model", "optimizer", "extra", "hf_model"]}
    assert loop.checkpoints(values(every)) == {
        "checkpoint.every": 5, "checkpoint.keep": 1_000_000, "checkpoint.export": True,
    }  # fmt: skip
    last = every | {"trainer.remove_previous_ckpt_in_save": True}
    assert loop.checkpoints(values(last))["checkpoint.keep"] == 1
    assert "without extra, optimizer" in refusal(
        loop.checkpoints, {A + "checkpoint.save_contents": ["model"]}
    )
    assert "is not one of" in refusal(loop.checkpoints, {A + "checkpoint.save_contents": ["modle"]})
    modes = {"auto": "auto", "disable": "never"}
    for mode, native in modes.items():
        assert loop.resume(values({"trainer.resume_mode": mode})) == {"checkpoint.resume": native}
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "runs/x"}
    assert loop.resume(values(path)) == {"checkpoint.resume": "runs/x"}
    assert "needs trainer.resume_from_path" in refusal(
        loop.resume, path | {"trainer.resume_from_path": False}
    )


def test_trackers() -> None:
    assert loop.trackers(values()) == {"track.trackers": ["console", "jsonl"]}
    assert loop.trackers(values({"trainer.logger": "tensorboard"})) == {
        "track.trackers": ["tensorboard", "jsonl"]
    }
    assert "swanlab is coming" in refusal(loop.trackers, {"trainer.logger": ["console", "swanlab"]})


def test_sft_batches_and_schedule() -> None:
    given = {"data.train_batch_size": 32, "trainer.n_gpus_per_node": 4}
    assert sft.batch(values(given, "verl-sft")) == {"train.tasks_per_step": 32, "train.micro_rollouts": 4}
    assert "divisible by the 5 data" in refusal(sft.batch, given | {"trainer.n_gpus_per_node": 5}, "verl-sft")
    assert "must divide" in refusal(sft.batch, given | {"data.micro_batch_size_per_gpu": 3}, "verl-sft")
    assert "wsd is coming" in refusal(sft.optimizer, {"optim.lr_scheduler": "wsd"}, "verl-sft")
    inside = {"data.prompt_key": "extra_info", "data.prompt_dict_keys": ["question"]}
    assert sft.data(values(inside, "verl-sft"))["data.train.0.prompt"] == "extra_info.question"


# ---------------------------------------------------------------- rewards by data source


def task(source: str, answer: str) -> Task:
    return Task(uid=0, source=source, prompt="q", answer=answer)


@pytest.mark.parametrize(
    ("source", "reply", "answer", "score"),
    [
        ("openai/gsm8k", "so it is\n#### 1,234", "1234", 1.0),
        ("openai/gsm8k", "so it is 1234", "1234", 0.0),
        ("lighteval/MATH", r"thus \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("lighteval/MATH", "thus 0.5", "0.5", 0.0),
        ("math_dapo", "Answer: 7", "7", 1.0),
        ("aime2024", "Answer: 8", "7", -1.0),
        ("aime2024", "it is 7", "7", -1.0),
        ("aime2024", "Answer:", "7", -1.0),
    ],
)
def test_rewards_by_source(source: str, reply: str, answer: str, score: float) -> None:
    assert compute_score(reply, task(source, answer))["score"] == score


def test_a_source_without_a_rule_is_named() -> None:
    with pytest.raises(ValueError, match="no rule for data source 'codecontests'"):
        compute_score("x", task("codecontests", "x"))


# ---------------------------------------------------------------- whole files


def problems(name: str, kind: str = "verl-ppo") -> list[str]:
    tree = parse((HERE / name).read_text(encoding="utf-8")).tree
    return [text for _, text in translate(tree, dialect(kind), origins={}).problems]


def test_the_document_loads() -> None:
    assert problems("verl_document.yaml") == []
    assert problems("verl_document_zh.yaml") == []
    assert problems("verl_document_sft.yaml", "verl-sft") == []
    assert problems("verl_document_eval.yaml", "verl-eval") == []


def test_a_file_for_64_gpus_with_megatron_says_what_is_coming() -> None:
    assert sorted(text.split(":")[0] for text in problems("verl_64_gpus.yaml")) == [
        "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space",
        "actor_rollout_ref.rollout.mode",
    ]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model and data in verl's columns."""
    monkeypatch.setenv("VERL_TEST", str(tmp_path))
    monkeypatch.chdir(HERE.parent.parent)
    rows = [json.loads(line) for line in Path("tests/data/words.jsonl").read_text().splitlines()[:32]]
    made = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": n},
        }
        for n, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(made[:24]), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(made[24:]), tmp_path / "test.parquet")
    tokenizer = load_tokenizer(schema.Tokenizer(build="chars"), model_path=None, texts=["abcdefgh>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = build(
        schema.Model(
            scratch=schema.Scratch(hidden_size=32, layers=1, heads=2, ffn_size=64, max_positions=64)
        ),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    export(model, tokenizer, tmp_path / "model")
    return tmp_path


def test_a_run_equals_the_native_one_to_the_bit(work: Path) -> None:
    mine = whet.train(HERE / "verl_letters.yaml")
    native = whet.train(HERE / "verl_letters.native.yaml")
    rewards = [m["reward/mean"] for m in mine.metrics if "reward/mean" in m]
    assert len(rewards) == 15
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3]), "it learns"
    assert (work / "run/metrics.jsonl").read_bytes() == (work / "native/metrics.jsonl").read_bytes()
    assert mine.finished
    assert native.finished


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        "+reward_model.strategy=fsdp2",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.load_format=dummy_megatron",
        "critic.optim.lr=3e-4",
        "trainer.n_gpus_per_node=2",
        "ray_init.num_cpus=8",
    ],
)
def test_what_changes_nothing_is_accepted(work: Path, override: str) -> None:
    plain, changed = (load(HERE / "verl_letters.yaml", o) for o in ((), (override,)))
    assert plain.config == changed.config


def test_a_critic_learns_beside_the_policy(work: Path) -> None:
    overrides = (
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        f"critic.model.path={work}/model",
        "critic.optim.lr=1e-3",
        "trainer.critic_warmup=1",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "critic.ppo_micro_batch_size_per_gpu=2",
    )
    loaded = load(HERE / "verl_letters.yaml", overrides)
    assert plans(loaded)[0].needs_critic
    config = loaded.config
    assert (config.algorithm.name, config.algorithm.lam, config.train.micro_rollouts) == ("ppo", 0.95, 2)
    assert (config.critic.optimizer.lr, config.critic.warmup_steps, config.train.steps) == (1e-3, 1, 2)
    assert (config.critic.path, config.critic.optimizer.weight_decay) == (f"{work}/model", 0.01)


def test_an_sft_file(work: Path) -> None:
    overrides = (
        "optim.lr=1e-2",
        f"model.partial_pretrain={work}/model",
        f"data.train_files={work}/train.parquet",
    )
    sizes = (
        "data.train_batch_size=8",
        "trainer.n_gpus_per_node=1",
        "data.max_length=24",
        "trainer.total_epochs=3",
    )
    loaded = load(None, (*overrides, *sizes, "data.prompt_key=q"), dialect="verl-sft")
    config, optimizer = loaded.config, loaded.config.train.optimizer
    assert (config.algorithm.name, config.data.chat, config.data.train[0].prompt) == ("sft", True, "q")
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-2, (0.9, 0.95), 0.01)
    assert (optimizer.schedule.kind, optimizer.schedule.warmup_fraction) == ("cosine", 0.1)
    assert (config.train.tasks_per_step, config.train.micro_rollouts, config.train.epochs) == (8, 4, 3)
    assert (config.model.dtype, config.seed, config.run_dir) == ("float32", 1, "checkpoints/gsm8k-sft/test")
    assert plans(loaded, rows={"main": 24})[0].steps == 9
    with pytest.raises(ConfigError, match="the loss on"):
        load(None, ("trainer.test_freq=5",), dialect="verl-sft")


def test_the_example_is_a_valid_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE.parent.parent)
    loaded = load("examples/from_verl.yaml")
    assert loaded.translation is not None
    assert loaded.translation.dialect == "verl-ppo"
    assert plans(loaded, rows={"main": 124})[0].steps == 78  # ceil(124 * 10 / 16)
