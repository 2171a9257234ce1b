"""Equal settings in five tongues: the files of four other systems and a native one are the same run, bit for bit.

The settings are those that all of them can say: GRPO without a reference and without the division by the standard
deviation (which Cosmos-RL takes with n, the others with n - 1).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from whet.config.load import load
from whet.config.plan import plan
from whet.config.schema import Config, ModelConfig, TokenizerConfig
from whet.data.tokenizer import load_tokenizer
from whet.models.load import build, export

NATIVE = """
run_dir: WORK/native
name: same
seed: 0
model: {path: WORK/model}
data: {max_prompt_tokens: 12, train: [{path: WORK/words.jsonl}]}
algorithm:
  name: grpo
  loss_agg_mode: token-mean
  advantage: {normalize_std: false}
  loss: {clip_low: 0.2, clip_high: 0.28, dual_clip: 3.0}
rewards: {score: {function: "WORK/reward.py:score"}}
rollout: {group_size: 4, sampling: {max_tokens: 5}}
train:
  epochs: 2
  drop_last: true
  tasks_per_step: 8
  update_epochs: 2
  micro_batch_rollouts: 4
  optimizer: {lr: 1.0e-2, max_grad_norm: 0.5}
checkpoint: {interval: 0}
"""

VERL = """
data:
  train_files: WORK/words.jsonl
  val_files: null
  train_batch_size: 8
  max_prompt_length: 12
  max_response_length: 5
actor_rollout_ref:
  model: {path: WORK/model}
  actor:
    optim: {lr: 1e-2, weight_decay: 0.0}
    grad_clip: 0.5
    ppo_mini_batch_size: 8
    ppo_epochs: 2
    ppo_micro_batch_size_per_gpu: 4
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    use_kl_loss: False
  rollout: {name: vllm, n: 4, tensor_model_parallel_size: 1, log_prob_micro_batch_size_per_gpu: 4}
  ref: {log_prob_micro_batch_size_per_gpu: 4}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: False}
custom_reward_function: {path: WORK/reward.py, name: score}
trainer:
  logger: [console]
  experiment_name: same
  n_gpus_per_node: 1
  save_freq: -1
  test_freq: -1
  val_before_train: False
  total_epochs: 2
  default_local_dir: WORK/verl
  default_hdfs_dir: null
"""

SKYRL = """
data: {train_data: [WORK/words.jsonl], val_data: null}
trainer:
  policy:
    model: {path: WORK/model}
    optimizer_config: {lr: 1e-2, weight_decay: 0.0, max_grad_norm: 0.5}
  algorithm:
    advantage_estimator: grpo
    grpo_norm_by_std: false
    loss_reduction: token_mean
    ppo_loss_type: dual_clip
    eps_clip_high: 0.28
    use_kl_loss: false
  placement: {policy_num_gpus_per_node: 1}
  seed: 0
  epochs: 2
  train_batch_size: 8
  policy_mini_batch_size: 8
  update_epochs_per_batch: 2
  micro_train_batch_size_per_gpu: 4
  micro_forward_batch_size_per_gpu: 4
  max_prompt_length: 12
  eval_interval: -1
  ckpt_interval: -1
  ckpt_path: WORK/skyrl
  export_path: WORK/skyrl_exports
  run_name: same
  logger: console
generator:
  inference_engine_tensor_parallel_size: 1
  n_samples_per_prompt: 4
  sampling_params: {max_generate_length: 5}
environment: {env_class: "WORK/reward.py:score"}
"""

COSMOS = """
[train]
resume = false
epoch = 2
epsilon = 1e-8
optm_lr = 1e-2
optm_weight_decay = 0.0
optm_betas = [0.9, 0.999]
optm_warmup_steps = 0
optm_grad_norm_clip = 0.5
train_batch_per_replica = 32
param_dtype = "float32"
fsdp_reduce_dtype = "float32"
seed = 0
output_dir = "WORK/cosmos"
timestamp = "first"

[rollout]
max_response_length = 5
n_generation = 4
batch_size = 8

[policy]
model_name_or_path = "WORK/model"
model_max_length = 17

[logging]
logger = ["console"]
experiment_name = "same"

[train.train_policy]
type = "grpo"
on_policy = true
dataset.name = "WORK/words.jsonl"
prompt_column_name = "prompt"
reward_function = "WORK/reward.py:score"
unbiased_advantage = true
loss_type = "token-mean"
epsilon_low = 0.2
epsilon_high = 0.28
lower_bound_ratio = 3.0
kl_beta = 0.0
mini_batch = 4
mu_iterations = 2

[train.ckpt]
enable_checkpoint = false

[validation]
enable = false
"""

TRINITY = """
project: trinity
name: same
mode: both
checkpoint_root_dir: WORK
algorithm:
  algorithm_type: grpo
  repeat_times: 4
  advantage_fn: rec
  kl_loss_fn: none
  policy_loss_fn_args: {clip_range_low: 0.2, clip_range_high: 0.28}
  optimizer: {lr: 1e-2, weight_decay: 0.0}
model: {model_path: WORK/model, max_prompt_tokens: 12, max_response_tokens: 5}
cluster: {node_num: 1, gpu_per_node: 2}
buffer:
  batch_size: 8
  total_epochs: 2
  explorer_input:
    default_workflow_type: simple_workflow
    default_reward_fn_type: "WORK/reward.py:score"
    taskset:
      name: words
      storage_type: file
      path: WORK/words.jsonl
      task_selector: {selector_type: shuffle, seed: 0}
      format: {prompt_key: prompt, response_key: answer}
      rollout_args: {temperature: 1.0}
explorer:
  rollout_model: {engine_type: vllm, engine_num: 1, tensor_parallel_size: 1, seed: 0}
trainer:
  trainer_type: verl
  save_interval: 0
  grad_clip: 0.5
  use_dynamic_bsz: false
  trainer_config: {actor_rollout_ref: {actor: {ppo_epochs: 2}}}
synchronizer: {sync_method: nccl, sync_style: fixed, sync_interval: 1}
"""

FILES = {
    "native": ("yaml", NATIVE, "native"),
    "verl": ("yaml", VERL, "verl"),
    "skyrl": ("yaml", SKYRL, "skyrl"),
    "cosmos": ("toml", COSMOS, "cosmos/first"),
    "trinity": ("yaml", TRINITY, "trinity/same"),
}
"""Dialect -> (kind of file, text, where its run goes)."""


SHARED = {
    "advantage_clip", "loss_agg_mode", "correction", "dynamic_sampling", "entropy_coef", "groups",
    "kl", "kind", "loss", "mix", "positive_nll_coef", "refill", "reward_kl", "whiten",
}  # fmt: skip
"""What makes an algorithm. Not its name and advantage: Trinity-RFT can say GRPO without the deviation as rec only."""


def learning(config: Config) -> dict[str, Any]:
    """All that has a part in what is learned."""
    made = plan(config, rows=24)
    algorithm = {key: getattr(made.algorithm, key) for key in SHARED}
    return {
        **algorithm,
        "settings": [made.algorithm.settings.get(part) for part in ("loss", "resample", "entropy_clip")],
        "deviation": made.algorithm.settings["advantage"].settings["normalize_std"],
        "seed": config.seed,
        "order": (config.data.order, config.data.seed or config.seed),
        "steps": (made.total_steps, made.tasks_per_step, made.group_size, made.minibatches, made.passes),
        "sampling": config.rollout.sampling,
        "temperature": config.train.temperature or config.rollout.sampling.temperature,
        "micro": (config.train.micro_batch_rollouts, config.train.micro_batch_tokens),
        "optimizer": made.optimizer.model_copy(update={"schedule": made.optimizer.schedule.type}),
        "warmup": made.optimizer.schedule.warmup_steps or 0,
        "rewards": config.rewards,
    }


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model, 24 chat rows, a reward, and the five files."""
    folder = tmp_path_factory.mktemp("same")
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": letter * n}],
            "answer": letter,
            "reward_model": {"ground_truth": letter},
        }
        for letter in "abcdefgh"
        for n in (1, 2, 3)
    ]
    (folder / "words.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "reward.py").write_text(
        "def score(response, task):\n    return response.count('a') / max(len(response), 1)\n"
    )
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=["abcdefgh"])
    model = build(
        ModelConfig(
            scratch={
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "max_position_embeddings": 64,
            }
        ),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )
    export(model, tokenizer, folder / "model")
    for dialect, (kind, text, _) in FILES.items():
        (folder / f"{dialect}.{kind}").write_text(text.replace("WORK", str(folder)))
    return folder


MORE = ["machine.threads=1", "track.trackers=[jsonl]", "checkpoint.export=true", "machine.logprob_parity=on"]
"""What the other systems leave to the machine, and the weights to compare."""


def file(work: Path, dialect: str) -> tuple[Path, list[str]]:
    """A dialect's file, and the overrides that only whet knows."""
    start = "" if dialect == "native" else "whet."
    return work / f"{dialect}.{FILES[dialect][0]}", [f"{start}{more}" for more in MORE]


@pytest.fixture(scope="module")
def native(work: Path) -> Path:
    path, more = file(work, "native")
    whet.train(path, overrides=more)
    return work / FILES["native"][2]


@pytest.mark.parametrize("dialect", [name for name in FILES if name != "native"])
def test_a_file_means_the_native_settings(work: Path, dialect: str) -> None:
    (path, more), (own, own_more) = file(work, dialect), file(work, "native")
    loaded = load(path, more)
    assert loaded.translation is not None
    assert loaded.translation.dialect.startswith(dialect)
    assert learning(loaded.config) == learning(load(own, own_more).config)


@pytest.mark.parametrize("dialect", [name for name in FILES if name != "native"])
def test_a_file_is_the_native_run_bit_for_bit(work: Path, native: Path, dialect: str) -> None:
    path, more = file(work, dialect)
    done = whet.train(path, overrides=more)
    assert done.run_dir == work / FILES[dialect][2]
    for made in ("metrics.jsonl", "export/main/model.safetensors"):
        assert (done.run_dir / made).read_bytes() == (native / made).read_bytes(), made
    assert [line["step"] for line in done.metrics] == [1, 2, 3, 4, 5, 6]
    assert done.metrics[-1]["reward/mean"] > done.metrics[0]["reward/mean"]
