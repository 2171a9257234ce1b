"""The plan: numbers worked by hand, every refusal, and the parameter count against the modules themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from whet.config import describe as describing
from whet.config.describe import arithmetic, facts, notes
from whet.config.evaluation import eval_sampling, writes_replies
from whet.config.load import load, stage_configs
from whet.config.memory_estimate import phases
from whet.config.plan import Plan, cores, describe, dtype_on, halves, plan, plans
from whet.config.recipes import RECIPES
from whet.config.schema import ModelConfig
from whet.config.sizes import new_shape
from whet.types import ConfigError

ROOT = Path(__file__).parent.parent

BASE: dict = {
    "model": {
        "scratch": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
        }
    },
    "tokenizer": {"build": "chars", "vocab_size": 50},
    "data": {"train": [{"path": "a.jsonl"}], "max_prompt_tokens": 64},
    "rewards": {"acc": {"function": "exact"}},
    "train": {"steps": 10},
}


def made(*overrides: str, **sections) -> Plan:
    return plans(load(None, overrides, {**BASE, **sections}))[0]


def refused(*overrides: str, **sections) -> str:
    with pytest.raises(ConfigError) as caught:
        plans(load(None, overrides, {**BASE, **sections}))
    return str(caught.value)


# ---------------------------------------------------------------- arithmetic


def test_batch_arithmetic_of_grpo():
    p = made(
        "train.tasks_per_step=12", "rollout.group_size=6", "train.minibatches=4", "train.update_epochs=2"
    )
    assert (p.rollouts_per_step, p.rollouts_per_minibatch) == (72, 18)
    assert (p.updates_per_step, p.steps, p.optimizer_steps) == (8, 10, 80)


@pytest.mark.parametrize(("name", "size"), [("sft", 1), ("dpo", 2), ("grpo", 8), ("ppo", 8)])
def test_rollouts_of_a_task(name, size):
    overrides = [f"algorithm.name={name}"] + (["rewards={}"] if name in ("sft", "dpo") else [])
    values = {k: v for k, v in BASE.items() if k != "rewards" or name not in ("sft", "dpo")}
    p = plans(load(None, overrides[:1], values))[0]
    assert p.group_size == size
    assert p.needs_critic == (name == "ppo")
    assert p.needs_reference == (name == "dpo")
    assert p.generates == (name in ("grpo", "ppo"))


def test_a_kl_term_needs_a_reference():
    assert not made().needs_reference
    assert made("algorithm.kl.coef=0.01").needs_reference


def test_epochs_become_steps_when_the_rows_are_known():
    cfg = load(None, ["train={epochs: 1.5, tasks_per_step: 16}"], {**BASE, "train": {}}).config
    open_plan = plan(cfg)
    assert open_plan.total_steps is None
    with pytest.raises(ConfigError, match="rows"):
        _ = open_plan.steps
    assert plan(cfg, rows=100).steps == 10, "150 draws in steps of 16, the last one full"
    assert plan(cfg, rows=32).steps == 3
    assert plans(cfg, rows={"main": 1})[0].steps == 1
    part = load(None, ["train={epochs: 1.1, tasks_per_step: 11}"], {**BASE, "train": {}}).config
    assert plan(part, rows=10).steps == 1, "11 draws, though 1.1 * 10 is a little more in binary"


def test_steps_and_epochs_whichever_ends_first():
    cfg = load(None, ["train={steps: 5, epochs: 2, tasks_per_step: 16}"], {**BASE, "train": {}}).config
    assert plan(cfg).total_steps is None
    assert "at most 5: epochs x rows" in printed((plan(cfg),))
    assert plan(cfg, rows=32).steps == 4
    assert plan(cfg, rows=100).steps == 5


def test_drop_last_leaves_out_what_does_not_fill_a_step():
    base = {**BASE, "train": {"epochs": 3, "tasks_per_step": 16}}
    kept, dropped = (load(None, [f"train.drop_last={flag}"], base).config for flag in ("false", "true"))
    assert plan(kept, rows=100).steps == 19, "300 draws in steps of 16"
    assert plan(dropped, rows=100).steps == 18, "three epochs of 6 whole steps"
    assert plan(dropped, rows=96).steps == 18, "the stream's own count has lost them already"


def test_a_run_that_ends_with_its_last_full_step_leaves_out_what_is_left_of_all_epochs():
    """Three epochs of 100 rows are 300 draws: 18 steps of 16, and 12 draws are left."""
    base = {**BASE, "train": {"epochs": 3, "tasks_per_step": 16}}
    cfg = load(None, ["train.drop_last=end"], base).config
    assert plan(cfg, rows=100).steps == 18
    assert plan(cfg, rows=102).steps == 19, "306 draws; whole steps of each epoch are 18"
    assert plan(cfg, rows=112).steps == 21, "nothing is left"
    with pytest.raises(ConfigError, match="5 rows in 3 epochs fill no step of 16 tasks"):
        plan(cfg, rows=5)


def test_warm_up():
    assert made().warmup_steps == 0
    assert made("train.optimizer.schedule.warmup_steps=3").warmup_steps == 3
    assert made("train.optimizer.schedule.warmup_steps=0.25", "train.minibatches=2").warmup_steps == 5
    long = made("train.optimizer.schedule.warmup_steps=11")
    assert long.warmup_steps == 11, "a short trial run is no error"
    assert any("11 steps is longer than the stage (10 steps)" in note for note in notes([long]))
    assert not notes([made("train.optimizer.schedule.warmup_steps=10")])


def test_a_schedule_that_counts_training_steps():
    by_step = "train.optimizer.schedule={unit: train_step, warmup_steps: 0.25}"
    p = made(by_step, "train.minibatches=2", "train.update_epochs=3")
    assert (p.optimizer_steps, p.schedule_steps, p.warmup_steps) == (60, 10, 2)
    assert "the first 2 training steps warm up" in facts(p)["optimizer steps"]


def test_critic_warm_up_takes_steps_from_the_policy():
    p = made("algorithm.name=ppo", "critic.warmup_steps=4", "train.minibatches=2")
    assert (p.steps, p.optimizer_steps, p.critic_optimizer_steps) == (10, 12, 20)
    assert made().critic is None
    assert made().critic_optimizer_steps == 0


def test_the_critic_trains_as_the_policy_unless_told():
    both = [
        "algorithm.name=ppo",
        "train={steps: 10, minibatches: 2, update_epochs: 3, micro_batch_tokens: 100}",
    ]
    same = made(*both, "train.gradient_checkpointing=true").critic
    assert same is not None
    assert (same.minibatches, same.update_epochs, same.micro_batch_tokens, same.gradient_checkpointing) == (
        2,
        3,
        100,
        True,
    )
    assert same.optimizer.lr == 1e-5, "its own"
    p = made(
        *both,
        "critic={minibatches: 8, update_epochs: 1, micro_batch_rollouts: 4, gradient_checkpointing: true}",
    )
    own = p.critic
    assert own is not None
    assert (own.minibatches, own.update_epochs, own.gradient_checkpointing) == (8, 1, True)
    assert (own.micro_batch_tokens, own.micro_batch_rollouts) == (None, 4), "one cut replaces the other"
    assert (p.updates_per_step, p.critic_updates_per_step) == (6, 8)
    assert arithmetic(p).endswith("3 update epochs; critic 8 minibatches, 1 update epoch")
    assert not made(
        *both, "train.gradient_checkpointing=true", "critic.gradient_checkpointing=false"
    ).critic.gradient_checkpointing


def test_dtype():
    cfg = load(None, values=BASE).config
    assert (dtype_on(cfg, "cpu"), dtype_on(cfg, "cuda")) == ("float32", "bfloat16")
    assert (halves([cfg], "cpu"), halves([cfg], "cuda")) == (set(), {"bfloat16"})
    stages = [load(None, (f"model.dtype={d}",), BASE).config for d in ("bfloat16", "float16")]
    assert halves([cfg, *stages], "cpu") == {"bfloat16", "float16"}
    assert made().dtype_open
    p = made("machine.device=cuda")
    assert (p.dtype, p.dtype_open) == ("bfloat16", False)
    assert made("machine.device=cuda", "model.dtype=float32").dtype == "float32"


def test_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert made().threads == cores() == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert made().threads == cores() == len(os.sched_getaffinity(0))
    assert made("machine.threads=3").threads == 3


def test_evaluation_is_greedy_with_the_training_limits():
    cfg = load(
        None,
        values={
            **BASE,
            "rollout": {"sampling": {"max_tokens": 7, "stop": ["#"], "top_k": 5, "temperature": 0.7}},
        },
    ).config
    s = eval_sampling(cfg)
    assert (s.temperature, s.top_k, s.max_tokens, s.stop) == (0.0, 0, 7, ("#",))
    cfg = load(
        None, ["eval.sampling={max_tokens: 9}"], cfg.model_dump(mode="json", exclude_unset=True)
    ).config
    s = eval_sampling(cfg)
    assert (s.temperature, s.max_tokens, s.stop) == (0.0, 9, ("#",))


def test_the_longer_limit_of_training_and_evaluation_counts():
    data = {"train": [{"path": "a"}], "eval": [{"path": "b"}], "max_prompt_tokens": 10}
    p = made("rollout.sampling.max_tokens=20", "eval.sampling={max_tokens: 30}", data=data)
    assert p.max_sequence_tokens == 40
    p = made("rollout.sampling.max_tokens=20", data=data)
    assert p.max_sequence_tokens == 30


# ---------------------------------------------------------------- sizes


ARCHITECTURES = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 40},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 8},
    "gemma": {"head_dim": 16, "num_key_value_heads": 1},
    "qwen3_moe": {"num_experts": 4, "intermediate_size": 24, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_those_of_the_modules(name):
    own = ARCHITECTURES[name]
    sizes = {"name": name, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **own}
    shape = new_shape(ModelConfig(scratch=sizes), vocab_size=50)
    config = AutoConfig.for_model(
        name,
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=own.get("intermediate_size", 96),
        tie_word_embeddings=own.get("tie_word_embeddings", True),
        pad_token_id=None,
        **({"moe_intermediate_size": 24, "num_experts": 4} if name == "qwen3_moe" else {}),
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_memory_and_disk_by_hand():
    # embeddings 50*32; a layer: q, k, v, o 4*32*32, two head norms 8, feed-forward 3*32*96, two norms 32
    count = 50 * 32 + 2 * (4 * 32 * 32 + 2 * 8 + 3 * 32 * 96 + 2 * 32) + 32
    p = made("rollout.sampling.max_tokens=100", "rollout.max_num_seqs=5")
    assert p.shape is not None
    assert p.shape.parameters == count
    pages = -(-(64 + 100) // 16)
    assert p.kv_cache_bytes == 5 * pages * 16 * 2 * 2 * 4 * 8 * 4
    assert p.memory == {"policy with gradients and Adam": count * 16, "KV cache": p.kv_cache_bytes}
    assert p.checkpoint_bytes == count * 12
    p = made("algorithm.name=ppo", "algorithm.kl.coef=0.1", "model.dtype=bfloat16")
    assert p.memory["policy with gradients and Adam"] == count * (2 + 2 + 8 + 4)
    assert p.memory["reference"] == count * 2
    assert p.checkpoint_bytes == 2 * count * (2 + 8 + 4) + count * 2
    assert made("machine.kv_cache_mb=3").kv_cache_bytes == 3 * 2**20


def test_a_folder_is_measured_by_its_files(tmp_path):
    config = {
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "max_position_embeddings": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {"a": [3, 5], "b": [7], "c": []}
    tensors = {name: {"dtype": "F32", "shape": size} for name, size in sizes.items()}
    head = json.dumps({"__metadata__": {}, **tensors}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(100))
    values = {**BASE, "model": {"path": str(tmp_path)}, "tokenizer": {}}
    shape = plans(load(None, ["data.max_prompt_tokens=9", "rollout.sampling.max_tokens=9"], values))[0].shape
    assert shape is not None
    assert (shape.parameters, shape.layers, shape.kv_heads, shape.head_dim) == (23, 2, 4, 8)
    with pytest.raises(ConfigError, match="max_position_embeddings is 100; lower one of the two"):
        plans(load(None, values=values))
    (tmp_path / "model.safetensors").write_bytes((10**9).to_bytes(8, "little") + head)
    with pytest.raises(ConfigError, match="damaged or incomplete"):
        plans(load(None, values=values))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="num_attention_heads"):
        plans(load(None, values=values))


def test_a_model_that_is_elsewhere_can_be_planned():
    p = made(model={"path": "no/such/folder"}, tokenizer={})
    assert (p.shape, p.memory, p.checkpoint_bytes) == (None, {}, None)
    assert p.steps == 10


# ---------------------------------------------------------------- what cannot work


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model={path: x}"], "model: give either path"),
        (["train.steps=null"], "neither is given"),
        (["train.micro_batch_tokens=8", "train.micro_batch_rollouts=2"], "give train.micro_batch_tokens or"),
        (["train.minibatches=32", "algorithm.loss_agg_mode=prompt-mean"],
         "32 does not divide train.tasks_per_step=16; "),
        (["train.minibatches=5"], "5 does not divide train.tasks_per_step=16, nor their 128 rollouts; nearest "
         "values that do: train.minibatches=4 or 8, or train.tasks_per_step=15 or 20"),
        (["algorithm.name=ppo", "critic.minibatches=3"], "critic.minibatches: 3 does not divide "
         "train.tasks_per_step=16, nor their 128 rollouts; nearest values that do: critic.minibatches=2 or 4"),
        (["train.forward_micro_batch_tokens=8", "train.forward_micro_batch_rollouts=2"],
         "give train.forward_micro_batch_tokens or"),
        (["algorithm.name=ppo", "critic.micro_batch_tokens=8", "critic.micro_batch_rollouts=2"],
         "give critic.micro_batch_tokens or"),
        (["train.drop_last=true", "data.train=[{path: a}, {path: b}]"], "train.drop_last: several sources are mixed"),
        (["train.optimizer.schedule={type: linear, warmup_steps: 5, total_steps: 5}"], "5 steps of warm-up leave "
         "no step of total_steps=5"),
        (["train.optimizer.schedule={type: wsd, warmup_steps: 2, decay_steps: 4, total_steps: 5}"], "4 steps of decay "
         "after 2 of warm-up are more than total_steps=5"),
        (["train.tasks_per_step=2", "train.minibatches=3"], "train.minibatches=2, or train.tasks_per_step=3"),
        (["tokenizer.build=null"], "tokenizer: model.scratch has no tokenizer"),
        (["tokenizer.path=x"], "tokenizer: give path or build, not both"),
        (["tokenizer.chat_template=no/such.jinja"], "is neither a file nor a template"),
        (["data.train=[]"], "data.train: give at least one source"),
        (["data.train.0.function='m:f'"], "data.train[0]: give exactly one of path, "
         "function and rows; given: path, function"),
        (["data.train.0.path=null"], "given: none"),
        (["data.train=[{function: nope}]"], "data.train[0].function: 'nope' is not known; known: reasoning_gym, "
         "random_tokens, or your own as 'package.module:name'"),
        (["data.train=[{function: ':nope'}]"], "data.train[0].function: ':nope' is not known"),
        (["rewards.answer.function=exakt"], "rewards.answer.function: 'exakt' is not known; did you mean 'exact'?"),
        (["data.train.0.arguments={a: 1}"], "arguments are for function only"),
        (["data.train.0.template=hello"], "has no {prompt}, so every task"),
        (["model.scratch.num_key_value_heads=3"], "3 does not divide num_attention_heads=4; these do: 1, 2, 4"),
        (["model.scratch.num_attention_heads=5"], "num_attention_heads=5 does not divide hidden_size=32; give"),
        (["model.scratch.head_dim=7"], "7 is odd"),
        (["model.overrides.hidden_size=0"], "model.overrides: hidden_size is 0, expected a whole number from 1"),
        (["model.overrides.head_dim=0"], "model.overrides: head_dim is 0, expected a whole number from 1"),
        (["model.overrides.num_key_value_heads=3"],
         "model.overrides: num_key_value_heads=3 does not divide num_attention_heads=4"),
        (["model.scratch.name=qwen3_moe", "model.scratch.num_experts_per_tok=9"], "9 is more than "
         "num_experts=8"),
        (["model.scratch.max_position_embeddings=200"], "64 prompt tokens + 256 reply tokens "
         "(rollout.sampling.max_tokens) = 320, but model.scratch.max_position_embeddings is 200"),
        (["rollout.group_size=1"], "advantage=grpo compares the rollouts of a group"),
        (["rollout.group_size=1", "algorithm.name=rloo"], "advantage=rloo compares the rollouts of a group"),
        (["rollout.sampling.temperature=0"], "all 8 rollouts of a task would be equal"),
        (["rollout.sampling.min_tokens=300"], "300 is more than max_tokens=256"),
        (["algorithm.reward_kl.target=0.1"], "algorithm.reward_kl.target"),
        (["algorithm.name=dr_gpro"], "is not known; did you mean 'dr_grpo'"),
        (["eval.reward=x", "data.eval=[{path: b}]"], "eval.reward: 'x' is not among rewards: acc"),
        (["eval.samples=4", "data.eval=[{path: b}]"], "4 greedy replies to a task are all the same"),
        (["rewards.acc.weight=0"], "every weight is 0"),
        (["data.eval=[{path: b}]", "eval={at_start: false, at_end: false}"], "data.eval: is never used"),
        (["algorithm.entropy_control={min: 0.3, max: 0.2}"], "0.3 is above max=0.2; lower it, or raise max"),
        (["algorithm.entropy_control={target: 0}"], "algorithm.entropy_control.target: got 0, expected a number > 0"),
        (["algorithm.entropy_clip='mine.py:f'"], "'mine.py:f' is not known; known: batch, vocabulary"),
        (["model.scratch='mine.py:f'"], "'mine.py:f' is not known; known: llama, "),
        (["train.optimizer.schedule.warmup_steps=1.5"],
         "got 1.5, expected a whole number >= 0 or a number >= 0 and < 1"),
        (["train.optimizer.schedule.warmup_ratio=0.1"], "did you mean train.optimizer.schedule.warmup_steps?"),
        (["machine.kv_cache_mb=1", "model.scratch.hidden_size=2048", "model.scratch.num_hidden_layers=8"], "1 MiB "
         "does not hold one rollout of 320 tokens, which takes 40 MiB"),
        (["algorithm.name=ppo", "critic.warmup_steps=10"], "leave no step for the policy (train.steps=10)"),
    ],
)  # fmt: skip
def test_refusals(overrides, said):
    assert said in refused(*overrides)


def test_rewards_are_required_where_rollouts_are_judged():
    values = {k: v for k, v in BASE.items() if k != "rewards"}
    for name, needed in (("grpo", True), ("sft", False)):
        run = load(None, [f"algorithm.name={name}"], values)
        if needed:
            with pytest.raises(ConfigError, match=r"rewards: algorithm\.name=grpo needs rewards"):
                plans(run)
        else:
            plans(run)
    looking = plans(load(None, ["algorithm.name=sft", "data.eval=[{path: b}]"], values))[0]
    assert looking.evaluates
    assert not looking.generates, "only the loss of held-out replies is measured"


def test_all_problems_stand_in_one_message_with_their_lines(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {scratch: {num_attention_heads: 3}}\n"
        "data: {train: [{}]}\n"
        "train:\n  steps: 5\n  minibatches: 3\n"
        "rollout: {group_size: 1}\n"
        "critic: {warmup_steps: 2}\n"
    )
    with pytest.raises(ConfigError) as caught:
        plans(load(path, ["eval.reward=x"]))
    lines = str(caught.value).splitlines()
    found = [line.strip().split(": ")[:2] for line in lines[1:]]
    assert lines[0].startswith(f"{len(found)} problems in {path}")
    for place, key in [
        (f"{path}:1", "model.scratch"),
        (f"{path}:2", "data.train[0]"),
        (f"{path}:5", "train.minibatches"),
        (f"{path}:6", "rollout.group_size"),
        (f"{path}:7", "critic.warmup_steps"),
        ("override eval.reward=x", "eval.reward"),
    ]:
        assert [place, key] in found


def test_all_contradictions_of_an_algorithm_are_told_at_once_each_at_its_key() -> None:
    wrong = ["algorithm.advantage_clip=[1.0, 0.0]", "algorithm.correction.reject=[{}, {low: 3.0, high: 1.0}]"]
    with pytest.raises(ConfigError) as caught:
        plans(load(None, wrong, BASE))
    said = str(caught.value)
    assert "algorithm.advantage_clip: 1.0 is above 0.0; give the lower bound first" in said
    assert "algorithm.correction.reject[0]: has no bound" in said
    assert "algorithm.correction.reject[1].low: 3.0 is above high=1.0" in said


# ---------------------------------------------------------------- what has no effect


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["critic.optimizer.lr=1e-4"], "critic.optimizer.lr"),
        (["reference.reset_interval=3"], "reference.reset_interval"),
        (["algorithm.kl.estimator=k1"], "algorithm.kl.estimator"),
        (["algorithm.reward_kl.estimator=k2"], "algorithm.reward_kl.estimator"),
        (["reference.reset_optimizer=true", "algorithm.kl.coef=0.1"], "reference.reset_optimizer"),
        (["algorithm.advantage.lam=0.9"], "algorithm.advantage.lam"),
        (["algorithm.loss.beta=0.3"], "algorithm.loss.beta"),
        (["data.train.0.rejected=r"], "data.train[0].rejected"),
        (["data.train.0.response=r"], "data.train[0].response"),
        (["eval.interval=3"], "eval.interval"),
        (["data.exclude_eval=true"], "data.exclude_eval"),
        (["data.eval=[{path: b, weight: 2}]"], "data.eval[0].weight"),
        (["model.scratch.num_experts=4"], "model.scratch.num_experts"),
        (["model.scratch.sliding_window=4"], "model.scratch.sliding_window"),
        (["train.optimizer.schedule.decay_steps=0.2"], "train.optimizer.schedule.decay_steps"),
        (["train.optimizer.schedule.min_lr_ratio=0.2"], "train.optimizer.schedule.min_lr_ratio"),
        (["train.optimizer.schedule={type: linear, num_cycles: 1.0}"], "train.optimizer.schedule.num_cycles"),
        (["train.optimizer.schedule={type: wsd, num_cycles: 1.0}"], "train.optimizer.schedule.num_cycles"),
        (["train.optimizer.schedule={type: inverse_sqrt, decay_type: cosine}"],
         "train.optimizer.schedule.decay_type"),
        (["train.optimizer.schedule.total_steps=7"], "train.optimizer.schedule.total_steps"),
        (["train.optimizer.schedule.warmup_ends=peak"], "train.optimizer.schedule.warmup_ends"),
        (["train.optimizer.schedule.warmup_start_ratio=0.5"], "train.optimizer.schedule.warmup_start_ratio"),
        (["train.optimizer.schedule.unit=train_step"], "train.optimizer.schedule.unit"),
        (["train.optimizer.schedule.weight_decay_type=cosine"], "train.optimizer.schedule.weight_decay_type"),
        (["train.optimizer.decay_all=true"], "train.optimizer.decay_all"),
        (["train.shuffle_minibatches=true"], "train.shuffle_minibatches"),
        (["algorithm.name=ppo", "critic.overrides={a: 1}"], "critic.overrides.a"),
        (["algorithm.name=ppo", "critic.optimizer.schedule.unit=train_step"], "critic.optimizer.schedule.unit"),
        (["algorithm.name=dpo", "reference.overrides={a: 1}"], "reference.overrides.a"),
        (["rollout.engine=hf", "machine.kv_cache_mb=10"], "machine.kv_cache_mb"),
        (["algorithm.name=sft"], "rewards.acc.function"),
        (["algorithm.name=sft", "rollout.group_size=4"], "rollout.group_size"),
        (["algorithm.name=sft", "rollout.sampling.temperature=0.5"], "rollout.sampling.temperature"),
        (["algorithm.name=sft", "reward_workers.count=2"], "reward_workers.count"),
        (["algorithm.name=dpo", "rollout.max_num_seqs=2"], "rollout.max_num_seqs"),
        (["model={path: x}", "tokenizer={vocab_size: 5}"], "tokenizer.vocab_size"),
    ],
)  # fmt: skip
def test_keys_that_nothing_reads_are_refused(overrides, key):
    values = dict(BASE)
    if overrides[0].startswith("model="):
        values = {k: v for k, v in BASE.items() if k not in ("model", "tokenizer")}
    with pytest.raises(ConfigError) as caught:
        plans(load(None, overrides, values))
    assert f"{key}: " in str(caught.value)
    assert "has no effect" in str(caught.value)


def test_null_and_defaults_left_alone():
    assert made("critic.path=null", "eval.sampling=null", "algorithm.kl={}") == made()


STAGED = {
    **{k: v for k, v in BASE.items() if k != "train"},
    "train": {"tasks_per_step": 8},
    "stages": [
        {"name": "sft", "algorithm": {"name": "sft"}, "train": {"steps": 5}},
        {"name": "rl", "train": {"steps": 7}},
    ],
}


def test_a_key_of_the_base_may_serve_one_stage_alone():
    first, second = plans(
        load(
            None,
            [
                "rollout.group_size=4",
                "algorithm.loss.clip_high=0.3",
                "train.update_epochs=2",
                "data.train.0.response=r",
            ],
            STAGED,
        )
    )
    assert (first.group_size, second.group_size) == (1, 4)
    assert second.algorithm.settings["loss"].settings["clip_high"] == 0.3
    assert (first.steps, second.steps, first.name, second.name) == (5, 7, "sft", "rl")


def test_a_key_of_a_stage_must_serve_that_stage():
    with pytest.raises(ConfigError) as caught:
        plans(load(None, ["stages.sft.rollout.group_size=4", "critic.value_clip=0.3"], STAGED))
    assert (
        "override stages.sft.rollout.group_size=4: stages[0] ('sft').rollout.group_size: has no effect"
        in str(caught.value)
    )
    assert "override critic.value_clip=0.3: critic.value_clip: has no effect" in str(caught.value)


def test_an_override_that_every_stage_hides_is_refused():
    with pytest.raises(ConfigError, match=r"train\.steps: every stage overrides it"):
        plans(load(None, ["train.steps=3"], STAGED))
    plans(load(None, ["stages.sft.train.steps=3"], STAGED))


def test_problems_of_all_stages_are_told_once_and_of_one_by_its_name():
    with pytest.raises(ConfigError) as caught:
        plans(load(None, ["model.scratch.num_attention_heads=3", "stages.rl.train.minibatches=3"], STAGED))
    said = str(caught.value)
    assert said.count("does not divide hidden_size") == 1
    assert "stages[1] ('rl').train.minibatches: 3 does not divide" in said


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([{"name": "a", "train": {"steps": 1}}] * 2, "'a' is taken by an earlier stage"),
        ([{"name": "../x", "train": {"steps": 1}}], "'../x' becomes a part of names of files"),
        ([{"name": "_warm", "train": {"steps": 1}}], "'_warm' becomes a part of names of files"),
        (
            [{"name": "a", "train": {"steps": 1}, "rollout": {"engine": "hf"}}],
            "one engine serves the whole run",
        ),
        (
            [{"name": "a", "train": {"steps": 1}, "rollout": {"server": {"timeout_s": 9}}}],
            "stages[0].rollout.server: one engine serves the whole run",
        ),
    ],
)
def test_stages_that_do_not_go_together(stages, said):
    with pytest.raises(ConfigError) as caught:
        plans(load(None, values={**STAGED, "stages": stages}))
    assert said in str(caught.value)


def test_one_stage_by_itself():
    run = load(None, values=STAGED)
    assert plan(run.stages[1], name="rl") == plans(run)[1]
    with pytest.raises(ConfigError, match="has stages"):
        plan(run.config)
    assert plans(run.config) == plans(run)
    assert stage_configs(run.config) == run.stages


# ---------------------------------------------------------------- shown


def printed(found: tuple[Plan, ...]) -> str:
    with open(os.devnull, "w") as sink:
        console = Console(width=220, record=True, file=sink)
        console.print(describe(found))
    return console.export_text()


def test_the_table_writes_the_arithmetic_out():
    text = printed((made("train.minibatches=2", "algorithm.kl.coef=0.1"),))
    assert "16 tasks x 8 = 128 rollouts, 2 minibatches of 64" in text
    assert "10 steps x 2 minibatches x 1 update epoch = 20" in text
    assert "policy, reference" in text
    assert "at most 28,416" in text
    text = printed(plans(load(None, values=STAGED)))
    assert "8 demonstrations, 1 minibatch of 8" in text
    assert "sft" in text
    text = printed((made(model={"path": "no/such"}, tokenizer={}),))
    assert "no such folder on this machine" in text


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_loads_plans_and_prints(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = load(path)
    found = plans(loaded, trains=not writes_replies(loaded.config))
    assert all(p.name in printed(found) for p in found)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_plans(name):
    kind = RECIPES[name].kind
    values = {k: v for k, v in BASE.items() if k != "rewards" or kind == "online"}
    expert = "data.demonstrations=[{path: b}]"
    needs = {
        "distill": "reference.path=teacher",
        "gkd": "reference.path=teacher",
        "mix": expert,
        "mix_chord": expert,
    }
    more = [needs[name]] if name in needs else []
    found = plans(load(None, [f"algorithm.name={name}", *more], values))
    assert found[0].algorithm.name == name


# ---------------------------------------------------------------- what is counted


def test_reward_models_take_memory(tmp_path: Path) -> None:
    """Two tensors of 6 and 4 numbers: 40 bytes in float32, 20 in bfloat16; a folder that is not here counts nothing."""
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, tmp_path / "model.safetensors")
    judge = {"model": {"path": str(tmp_path)}}
    (of_cpu,) = plans(load(None, ["machine.device=cpu"], {**BASE, "rewards": {"rm": judge}}))
    judge["model"]["dtype"] = "bfloat16"
    (half,) = plans(load(None, ["machine.device=cpu"], {**BASE, "rewards": {"rm": judge}}))
    assert (of_cpu.memory["reward model rm"], half.memory["reward model rm"]) == (40, 20)
    assert all(phase.parts["reward model rm"] == 40 for phase in phases(of_cpu))
    assert not made().reward_models


def test_a_reference_that_is_reset_is_saved_wherever_it_came_from(tmp_path: Path) -> None:
    at_kl = ["algorithm.kl.coef=0.1"]
    fixed = made(*at_kl, "reference.path=somewhere")
    reset = made(*at_kl, "reference.path=somewhere", "reference.reset_interval=3")
    assert (fixed.reference_saved, reset.reference_saved, made(*at_kl).reference_saved) == (False, True, True)
    assert fixed.checkpoint_bytes is not None
    assert reset.checkpoint_bytes is not None
    assert reset.shape is not None
    weights = reset.shape.parameters * {"float32": 4, "bfloat16": 2}[reset.dtype]
    assert reset.checkpoint_bytes - fixed.checkpoint_bytes == weights


def test_a_regularizer_without_weight_is_refused() -> None:
    said = refused("algorithm.name=rec", "algorithm.loss.rec_regularizer=k2")
    assert "algorithm.loss.rec_regularizer: k2 adds nothing at rec_regularizer_coef=0" in said


@pytest.mark.parametrize(
    ("overrides", "units", "said"),
    [
        (
            ["model.dtype=float32"],
            ["bfloat16"],
            "model.dtype=bfloat16 would be faster: this CPU has instructions for it",
        ),
        (["model.dtype=float32", "model.scratch.hidden_size=64"], ["bfloat16"], None),
        (["model.dtype=float32"], [], None),
        (["model.dtype=bfloat16"], ["bfloat16"], None),
        (
            ["model.dtype=float16"],
            ["bfloat16"],
            "computed in float32 and rounded: this CPU has no instructions for it",
        ),
        (["train.precision.compute=bfloat16"], [], "is slower than float32"),
        (["train.precision.compute=bfloat16"], ["bfloat16"], None),
    ],
)
def test_the_plan_says_which_dtype_this_cpu_is_fast_in(monkeypatch, overrides, units, said):
    monkeypatch.setattr(describing, "multiplies_half", lambda dtype: dtype in units)
    wide = ["model.scratch.hidden_size=512", "model.scratch.num_attention_heads=8", "machine.device=cpu"]
    told = facts(made(*wide, *overrides))["machine"]
    assert said in told if said else told.endswith(("float32", "bfloat16"))
