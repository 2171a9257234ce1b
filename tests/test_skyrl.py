"""SkyRL files: every key has a status, its own rules hold, and a run equals the native one to the bit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from whet.config import schema
from whet.config.dialects import skyrl_parts as parts
from whet.config.dialects import skyrl_rules as rules
from whet.config.dialects.key import Values
from whet.config.dialects.skyrl import ALIASES, SKYRL
from whet.config.load import Loaded
from whet.config.load import load as load_config
from whet.config.parse import parse
from whet.config.plan import plans
from whet.config.tree import leaves
from whet.data.tokenizer import load_tokenizer
from whet.models.load import build, export
from whet.types import ConfigError, Json

HERE = Path(__file__).parent / "dialects"
DOCUMENT = dict(line.split("\t") for line in (HERE / "skyrl.keys.txt").read_text().splitlines())
ROWS = {row.name: row for row in SKYRL}


def values(**given: Json) -> Values:
    """All values of a file that sets these; `__` stands for a dot."""
    written = {k.replace("__", "."): v for k, v in given.items()}
    assert written.keys() <= ROWS.keys()
    flat = {name: written.get(name, row.default) for name, row in ROWS.items()}
    limits = {
        "generator.max_input_length": flat["trainer.max_prompt_length"],
        "generator.eval_sampling_params.max_generate_length": flat[
            "generator.sampling_params.max_generate_length"
        ],
    }
    return flat | {name: limit for name, limit in limits.items() if name not in written}


def load(name: str, *overrides: str) -> Loaded:
    return load_config(HERE / name, overrides, dialect="skyrl")


def refusal(function: Any, **given: Json) -> str:
    with pytest.raises(ConfigError) as e:
        function(values(**given))
    return str(e.value)


# ---------------------------------------------------------------- the table


def test_every_key_of_the_document_has_a_row_with_its_default() -> None:
    assert len(DOCUMENT) == 130
    assert not DOCUMENT.keys() - ROWS.keys()
    sections = {name for name in DOCUMENT if isinstance(ROWS[name].default, dict)}
    assert sections == {
        "trainer.policy.optimizer_config",
        "trainer.policy.fsdp_config",
        "generator.sampling_params",
        "generator.eval_sampling_params",
    }
    for name, text in DOCUMENT.items():
        if name not in sections:
            assert ROWS[name].default == parse(text).tree, name


def test_names_are_unique_and_newer_names_lead_to_rows() -> None:
    assert len(ROWS) == len(SKYRL)
    assert set(ALIASES.values()) <= ROWS.keys()
    assert not ALIASES.keys() & ROWS.keys()


def test_statuses() -> None:
    counts = Counter(ROWS[name].status for name in DOCUMENT)
    assert counts == {
        "translated": 52,
        "coming": 31,
        "derived": 18,
        "mapped": 15,
        "engine": 13,
        "inert": 1,
    }
    few = sum(row.status in ("inert", "refused") for row in SKYRL)
    assert few < 0.05 * len(SKYRL)
    assert all(row.reason for row in SKYRL if row.status != "mapped")


def test_every_native_key_that_a_function_gives_is_declared() -> None:
    gae = values(trainer__algorithm__advantage_estimator="gae", trainer__critic__model__path="m")
    dual = values(
        trainer__algorithm__ppo_loss_type="dual_clip",
        trainer__algorithm__grpo_norm_by_std=False,
        trainer__algorithm__advantage_batch_normalize=True,
        generator__model_dtype="float32",
    )
    for row in SKYRL:
        if row.translate is not None and row.status == "translated":
            together = {n.removesuffix(".*") for r in SKYRL if r.translate is row.translate for n in r.native}
            given = {key for v in (gae, dual) for key in row.translate(v)}
            assert all(any(key == n or key.startswith(f"{n}.") for n in together) for key in given), row.name


OTHER: dict[str, Json] = {
    "data.train_data": ["other.parquet"],
    "data.val_data": ["other.parquet"],
    "trainer.policy_mini_batch_size": 512,
    "trainer.critic_mini_batch_size": 512,
    "trainer.resume_mode": None,
    "trainer.resume_path": "c",
    "trainer.logger": "tensorboard",
    "trainer.max_ckpts_to_keep": 2,
    "trainer.hf_save_interval": 5,
    "trainer.critic.optimizer_config.adam_betas": [0.9, 0.95],
    "trainer.algorithm.advantage_estimator": "rloo",
    "trainer.algorithm.loss_reduction": "token_mean",
    "trainer.algorithm.ppo_loss_type": "regular",
    "trainer.algorithm.kl_estimator_type": "k2",
    "trainer.policy.optimizer_config.num_warmup_steps": 3,
    "trainer.critic.optimizer_config.num_warmup_steps": 3,
    "trainer.policy.optimizer_config.scheduler": "linear",
    "trainer.critic.optimizer_config.scheduler": "linear",
    "generator.model_dtype": "float32",
    "generator.backend": "sglang",
    "generator.sampling_params.top_k": 5,
    "generator.sampling_params.*": {"stop": ["x"]},
    "generator.eval_sampling_params.top_k": 5,
    "generator.eval_sampling_params.*": {"stop": ["x"]},
}
"""A second value of every key for which none follows from the default."""


def another(name: str) -> Json:
    default = ROWS[name].default
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return not default
    return 2 * default + 1 if isinstance(default, int | float) else f"{default}x"


@pytest.mark.parametrize("name", [row.name for row in SKYRL if row.status == "translated"])
def test_no_key_is_dead(name: str) -> None:
    """In a plain file or in one of PPO, without k3 and in larger micro-batches, another value does something."""
    function = ROWS[name].translate
    assert function is not None
    ppo: dict[str, Json] = {
        "trainer__algorithm__advantage_estimator": "gae",
        "trainer__critic__model__path": "m",
        "trainer__algorithm__ppo_loss_type": "dual_clip",
        "trainer__algorithm__use_kl_estimator_k3": False,
        "trainer__micro_train_batch_size_per_gpu": 4,
        "trainer__micro_forward_batch_size_per_gpu": 4,
    }

    def effect(**given: Json) -> object:
        try:
            return function(values(**given))
        except ConfigError:
            return "refused"

    changed = {name.replace(".", "__"): another(name)}
    assert any(effect(**context) != effect(**{**context, **changed}) for context in ({}, ppo)), name


# ---------------------------------------------------------------- batch sizes


def test_batches_by_hand() -> None:
    v = values(
        trainer__train_batch_size=32,
        trainer__policy_mini_batch_size=8,
        trainer__micro_train_batch_size_per_gpu=2,
        trainer__micro_forward_batch_size_per_gpu=4,
        generator__n_samples_per_prompt=4,
    )
    # 8 prompts * 4 = 32 rollouts, on 4 ranks 8 each, in micro-batches of 2
    assert parts.batches(v) == {"train.tasks_per_step": 32, "train.minibatches": 4, "train.micro_rollouts": 2}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"trainer__train_batch_size": 128},
            "trainer.train_batch_size=128 must be at least trainer.policy_mini",
        ),
        (
            {"trainer__train_batch_size": 1000},
            "trainer.policy_mini_batch_size=256 must divide trainer.train_batch",
        ),
        ({"trainer__policy_mini_batch_size": 2}, "= 10 rollouts".replace("= ", "are ")),
        ({"trainer__micro_train_batch_size_per_gpu": 7}, "must divide the mini batch of a rank, 320 = "),
        ({"trainer__policy__sequence_parallel_size": 3}, "must divide the 4 GPUs of the policy"),
        ({"trainer__train_batch_size": 0}, "trainer.train_batch_size: got 0, expected a whole number >= 1"),
        ({"trainer__micro_forward_batch_size_per_gpu": "8"}, 'got "8", expected a whole number >= 1'),
    ],
)
def test_batches_that_skyrl_refuses(given: dict[str, Json], said: str) -> None:
    assert said in refusal(parts.batches, **given)


def test_ranks_of_sequence_parallel_groups_count_once() -> None:
    v = values(trainer__placement__policy_num_nodes=2, trainer__policy__sequence_parallel_size=4)
    assert rules.data_parallel(v, "policy") == 2


def test_a_critic_is_checked_only_where_it_learns() -> None:
    odd = {"trainer__critic_mini_batch_size": 300}
    assert parts.batches(values(**odd))["train.minibatches"] == 4
    gae = {"trainer__algorithm__advantage_estimator": "gae", "trainer__critic__model__path": "m"}
    assert "trainer.critic_mini_batch_size=300 must divide" in refusal(parts.batches, **odd, **gae)
    assert "not built yet" in refusal(parts.batches, trainer__critic_mini_batch_size=128, **gae)


# ---------------------------------------------------------------- placement and engine


def test_placement() -> None:
    assert rules.check_placement(values()) == {}
    eight = {f"trainer__placement__{role}_num_gpus_per_node": 8 for role in ("policy", "ref")}
    assert "the policy's 8 GPUs" in refusal(rules.check_placement, **eight)
    engines = {"generator__num_inference_engines": 2}
    assert rules.check_placement(values(**eight, **engines)) == {}
    alone = engines | {"trainer__placement__policy_num_gpus_per_node": 8}
    assert "the ref has 4 GPUs" in refusal(rules.check_placement, **alone)
    assert rules.check_placement(values(**alone, trainer__algorithm__use_kl_loss=False)) == {}
    apart = alone | {"trainer__placement__colocate_all": False}
    assert "policy_num_gpus_per_node=8 must equal ref_num_gpus_per_node=4" in refusal(
        rules.check_placement, **apart
    )
    assert rules.check_placement(values(**apart, trainer__placement__colocate_policy_ref=False)) == {}


def test_engines() -> None:
    assert parts.rollout_engine(values()) == {"rollout.engine": "native"}
    assert "coming" in refusal(parts.rollout_engine, generator__run_engines_locally=False)
    assert "remote engines only" in refusal(parts.rollout_engine, generator__backend="sglang")
    assert "expected one of vllm, sglang" in refusal(parts.rollout_engine, generator__backend="hf")
    assert rules.check_engine_mode(values(generator__batched=False)) == {}
    blocking = {"generator__async_engine": False, "generator__batched": False}
    assert "needs generator.batched=true" in refusal(rules.check_engine_mode, **blocking)
    assert "at most 1" in refusal(rules.check_engine_memory, generator__gpu_memory_utilization=1.5)
    assert "expected one of nccl, gloo" in refusal(
        rules.check_update_group, generator__weight_sync_backend="mpi"
    )
    assert "must equal trainer.max_prompt_length=512" in refusal(
        rules.check_input_length, generator__max_input_length=600
    )


def test_dtype_is_the_derived_one_unless_float32_is_asked_for() -> None:
    assert parts.dtype(values()) == {}
    assert parts.dtype(values(generator__model_dtype="float32")) == {"model.dtype": "float32"}
    assert parts.dtype(values(trainer__bf16=False)) == {"model.dtype": "float32"}
    assert "coming" in refusal(parts.dtype, generator__model_dtype="float16")


# ---------------------------------------------------------------- algorithm

KL = "trainer__algorithm__"


@pytest.mark.parametrize(
    ("given", "place", "estimator"),
    [
        ({}, "loss", "k3"),
        ({KL + "use_abs_kl": True}, "loss", "k3"),  # k3 is never negative
        ({KL + "use_abs_kl": True, KL + "use_kl_estimator_k3": False}, "loss", "abs"),
        ({KL + "use_kl_estimator_k3": False}, "loss", "k1"),
        ({KL + "use_kl_in_reward": True, KL + "use_kl_loss": False}, "reward", "k3"),
        ({KL + "kl_estimator_type": "k2"}, "loss", "k2"),
    ],
)
def test_kl(given: dict[str, Json], place: str, estimator: str) -> None:
    assert parts.kl(values(**given)) == {
        "algorithm.kl.place": place,
        "algorithm.kl.coef": 0.001,
        "algorithm.kl.estimator": estimator,
    }


def test_kl_off_and_kl_twice() -> None:
    assert parts.kl(values(trainer__algorithm__use_kl_loss=False)) == {}
    assert parts.kl(values(trainer__algorithm__kl_loss_coef=0)) == {}
    assert "exclude each other" in refusal(parts.kl, trainer__algorithm__use_kl_in_reward=True)
    assert "expected a number >= 0" in refusal(parts.kl, trainer__algorithm__kl_loss_coef=-0.1)


def test_advantages() -> None:
    assert parts.advantages(values()) == {"algorithm.name": "grpo"}
    settings: dict[str, Json] = {
        KL + "lambd": 0.95,
        KL + "gamma": 0.9,
        KL + "advantage_batch_normalize": True,
    }
    assert parts.advantages(values(**settings)) == {"algorithm.name": "grpo", "algorithm.whiten": True}
    gae = values(**settings, **{KL + "advantage_estimator": "gae"}, trainer__critic__model__path="m")
    assert parts.advantages(gae) == {
        "algorithm.name": "ppo",
        "algorithm.gamma": 0.9,
        "algorithm.lam": 0.95,
        "algorithm.whiten": True,
    }
    assert parts.advantages(values(**{KL + "grpo_norm_by_std": False}))["algorithm.normalize_std"] is False
    assert parts.advantages(values(**{KL + "advantage_estimator": "reinforce++"})) == {
        "algorithm.name": "reinforce",
        "algorithm.loss": "ppo",
        "algorithm.whiten": True,
        "algorithm.gamma": 1.0,
    }
    assert "coming" in refusal(parts.advantages, **{KL + "advantage_estimator": "maxrl"})
    assert "expected one of grpo, gae" in refusal(parts.advantages, **{KL + "advantage_estimator": "gra"})


def test_losses_and_reductions() -> None:
    assert parts.policy_loss(values(trainer__algorithm__clip_ratio_c=4.0)) == {}
    dual: dict[str, Json] = {KL + "ppo_loss_type": "dual_clip", KL + "clip_ratio_c": 4.0}
    assert parts.policy_loss(values(**dual)) == {"algorithm.dual_clip": 4.0}
    assert "coming" in refusal(parts.policy_loss, **{KL + "ppo_loss_type": "gspo"})
    assert parts.reduction(values()) == {"algorithm.aggregation": "seq-mean-token-mean"}
    assert parts.reduction(values(**{KL + "loss_reduction": "seq_mean_token_sum_norm"})) == {
        "algorithm.aggregation": "seq-mean-token-sum-norm",
        "algorithm.norm_tokens": 512 + 1024,
    }
    assert "coming" in refusal(parts.reduction, **{KL + "loss_reduction": "token_mean_legacy"})


# ---------------------------------------------------------------- optimizers, sampling, data


def test_optimizers() -> None:
    assert parts.policy_optimizer(values(trainer__num_warmup_steps=7)) == {
        "train.optimizer.grad_clip": 1.0,
        "train.optimizer.schedule.kind": "constant",
        "train.optimizer.schedule.warmup_steps": 7,
    }
    own = values(
        trainer__num_warmup_steps=7,
        trainer__policy__optimizer_config__num_warmup_steps=3,
        trainer__policy__optimizer_config__max_grad_norm=-1,
        trainer__policy__optimizer_config__scheduler="cosine",
    )
    assert parts.policy_optimizer(own) == {
        "train.optimizer.grad_clip": None,
        "train.optimizer.schedule.kind": "cosine",
        "train.optimizer.schedule.warmup_steps": 3,
    }
    assert "coming" in refusal(
        parts.policy_optimizer, trainer__policy__optimizer_config__scheduler="polynomial"
    )


def test_critic() -> None:
    learning: dict[str, Json] = {
        "trainer__algorithm__value_clip": None,
        "trainer__critic__optimizer_config__lr": 3e-6,
        "trainer__num_warmup_steps": 5,
    }
    assert parts.critic(values(**learning)) == {}
    gae: dict[str, Json] = {KL + "advantage_estimator": "gae", "trainer__critic__model__path": "m"}
    assert "must be given" in refusal(parts.critic, **gae | {"trainer__critic__model__path": None})
    assert parts.critic(values(**learning, **gae)) == {
        "critic.path": "m",
        "critic.clip_value": None,
        "critic.optimizer.lr": 3e-6,
        "critic.optimizer.betas": [0.9, 0.999],
        "critic.optimizer.weight_decay": 0.01,
        "critic.optimizer.grad_clip": 1.0,
        "critic.optimizer.schedule.kind": "constant",
        "critic.optimizer.schedule.warmup_steps": 5,
    }


def test_sampling() -> None:
    given = {"generator__sampling_params__top_k": 20, "generator__sampling_params__max_generate_length": 64}
    assert parts.training_sampling(values(**given)) == {
        "rollout.sampling.max_tokens": 64,
        "rollout.sampling.temperature": 1.0,
        "rollout.sampling.top_p": 1.0,
        "rollout.sampling.min_p": 0.0,
        "rollout.sampling.top_k": 20,
    }
    assert parts.training_sampling(values())["rollout.sampling.top_k"] == 0
    more = parts.training_sampling(
        values(**{"generator.sampling_params.*": {"stop": ["x"], "min_tokens": 2}})
    )
    assert (more["rollout.sampling.stop"], more["rollout.sampling.min_tokens"]) == (["x"], 2)
    assert "best_of is handed on to vLLM" in refusal(
        parts.training_sampling, **{"generator.sampling_params.*": {"best_of": 2}}
    )
    assert "write -1" in refusal(parts.training_sampling, generator__sampling_params__top_k=0)


def test_data() -> None:
    two = values(data__train_data=["a.parquet", "b.parquet"])
    assert parts.training_data(two) == {
        "data.train.0.path": ["a.parquet", "b.parquet"],
        "data.train.0.answer": "reward_spec.ground_truth",
    }
    mine = values(data__train_data="a.parquet", environment__env_class="mine.py:score")
    assert parts.training_data(mine) == {"data.train.0.path": ["a.parquet"]}
    assert parts.environment(mine) == {"rewards.environment.function": "mine.py:score"}
    assert parts.environment(values()) == {"rewards.gsm8k.function": "number"}
    assert "expected a list of files" in refusal(parts.training_data, data__train_data=[])
    assert "only gsm8k" in refusal(parts.environment, environment__env_class="search")


def test_evaluation() -> None:
    on = parts.evaluation(
        values(data__val_data=["v/a.parquet", "v/b.parquet"], trainer__eval_before_train=False)
    )
    assert [on[f"data.eval.{n}.name"] for n in (0, 1)] == ["a", "b"]
    assert (on["eval.every"], on["eval.at_start"], on["eval.at_end"]) == (5, False, True)
    assert (on["eval.samples"], on["eval.sampling.max_tokens"], on["data.exclude_eval"]) == (1, 1024, False)
    same = parts.evaluation(values(data__val_data=["x/a.parquet", "y/a.parquet"]))
    assert [same[f"data.eval.{n}.name"] for n in (0, 1)] == ["x/a.parquet", "y/a.parquet"]
    assert parts.evaluation(values(trainer__eval_interval=-1)) == {}
    assert parts.evaluation(values(data__val_data=None)) == {}


# ---------------------------------------------------------------- checkpoints and tracking


@pytest.mark.parametrize(
    ("mode", "native"),
    [("latest", "auto"), (None, "never"), ("none", "never"), ("from_path", "c/0-main-000010")],
)
def test_resume_modes(mode: str | None, native: str) -> None:
    path = native if mode == "from_path" else None
    given = values(trainer__resume_mode=mode, trainer__resume_path=path)
    assert parts.resume(given) == {"checkpoint.resume": native}


def test_resume_that_does_not_fit() -> None:
    assert "needs trainer.resume_path" in refusal(parts.resume, trainer__resume_mode="from_path")
    assert "only with trainer.resume_mode=from_path" in refusal(parts.resume, trainer__resume_path="c")
    assert "expected one of none, latest, from_path" in refusal(parts.resume, trainer__resume_mode="auto")


def test_checkpoints_exports_and_trackers() -> None:
    assert parts.checkpoints(values()) == {"checkpoint.every": 10, "checkpoint.keep": parts.KEEP_ALL}
    few = values(trainer__ckpt_interval=-1, trainer__max_ckpts_to_keep=2)
    assert parts.checkpoints(few) == {"checkpoint.every": 0, "checkpoint.keep": 2}
    assert "must not be 0" in refusal(parts.checkpoints, trainer__max_ckpts_to_keep=0)
    assert parts.export(values()) == {"checkpoint.export": False}
    assert "coming" in refusal(parts.export, trainer__hf_save_interval=5)
    assert parts.trackers(values()) == {"track.trackers": ["console", "jsonl"]}
    both = values(trainer__logger=["console", "wandb", "tensorboard"])
    assert parts.trackers(both) == {"track.trackers": ["console", "tensorboard", "jsonl"]}
    assert "coming" in refusal(parts.trackers, trainer__logger="mlflow")
    assert parts.run_name(values(trainer__run_name="a")) == {"name": "skyrl/a"}


# ---------------------------------------------------------------- whole files


def test_the_document_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    whole = load("skyrl_document.yaml").config
    assert whole.data.train[0].path == ("/home/user/data/gsm8k/train.parquet",)
    assert whole.run_dir == "/home/user/ckpts/"
    assert (whole.train.tasks_per_step, whole.train.minibatches, whole.rollout.group_size) == (1024, 4, 5)
    assert whole.eval.sampling is not None
    assert whole.eval.sampling.temperature == 1.0
    tree = parse((HERE / "skyrl_document.yaml").read_text()).tree
    given = {".".join(map(str, path)) for path, value in leaves(tree) if not isinstance(path[-1], int)}
    assert given | {"trainer.strategy"} <= ROWS.keys()


def test_a_ppo_file_in_newer_names() -> None:
    loaded = load("skyrl_gsm8k_ppo.yaml")
    cfg = loaded.config
    plans(loaded)
    assert (cfg.algorithm.name, cfg.algorithm.lam, cfg.algorithm.dual_clip) == ("ppo", 0.95, 3.0)
    assert (cfg.algorithm.kl.place, cfg.algorithm.kl.estimator) == ("reward", "k1")
    assert cfg.algorithm.aggregation == "token-mean"
    assert (cfg.critic.path, cfg.critic.clip_value, cfg.critic.optimizer.lr) == ("models/chat", None, 5e-6)
    assert cfg.critic.optimizer.schedule == schema.Schedule(kind="cosine", warmup_steps=20)
    assert cfg.train.optimizer.schedule.warmup_steps == 10
    assert cfg.train.optimizer.grad_clip is None
    assert (cfg.train.minibatches, cfg.train.micro_rollouts, cfg.rollout.sampling.top_k) == (2, 8, 50)
    assert cfg.checkpoint == schema.Checkpoint(every=0, keep=3, resume="never", export=False)
    assert cfg.track.trackers == ("console", "tensorboard", "jsonl")


@pytest.mark.parametrize(
    "override",
    [
        "defaults=[_self_, {deepspeed_config@deepspeed_config.train: train}, "
        "{deepspeed_config@deepspeed_config.eval: eval}]",
        "deepspeed_config.train={zero_optimization: {stage: 3, overlap_comm: false}, bf16: {enabled: true}}",
        "trainer.sequence_parallel_backend=ulysses",
        "trainer.gradient_checkpointing_use_reentrant=true",
        "trainer.flash_attn=false",
        "trainer.use_sample_packing=false",
        "trainer.dump_eval_results=false",
        "trainer.ref.fsdp_config.cpu_offload=false",
        "trainer.reward.model.path=null",
        "trainer.algorithm.kl_target=null",
        "trainer.algorithm.normalize_reward=false",
        "trainer.critic.optimizer_config.lr=1e-4",
        "generator.vllm_v1_disable_multiproc=false",
        "generator.batched=false",
        "environment.max_env_workers=0",
        "environment.skyrl_gym={max_env_workers: 4, text2sql: {db_path: sql}}",
    ],
)
def test_what_changes_nothing_is_accepted(override: str) -> None:
    with_it, without = (load("skyrl_document.yaml", *more).config for more in ([override], []))
    assert with_it == without


@pytest.mark.parametrize(
    "override",
    [
        "trainer.strategy=deepspeed",
        "trainer.hf_save_interval=5",
        "trainer.policy.sequence_parallel_size=2",
        "trainer.policy.fsdp_config.cpu_offload=true",
        "trainer.update_ref_every_epoch=true",
        "trainer.dump_data_batch=true",
        "trainer.policy.record_memory=true",
        "generator.max_turns=4",
        "generator.zero_reward_on_non_stop=true",
        "generator.run_engines_locally=false",
        "environment.env_class=text2sql",
        "trainer.reward.model.path=judge",
    ],
)
def test_what_is_not_built_is_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError, match="coming") as e:
        load("skyrl_gsm8k_ppo.yaml", override)
    assert override.partition("=")[0] in str(e.value)


REWARD = "def score(response, task):\n    return response.count('a') / max(len(response), 1)\n"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny chat model, chat rows in SkyRL's layout and a reward."""
    for name, letters in (("words", "abcdefgh"), ("held_out", "ijk")):
        rows = [
            {
                "data_source": "letters",
                "prompt": [{"role": "user", "content": letter * n}],
                "env_class": "letters",
                "reward_spec": {"method": "rule", "ground_truth": letter},
            }
            for letter in letters
            for n in (1, 2, 3, 4)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    tokenizer = load_tokenizer(schema.Tokenizer(build="chars"), model_path=None, texts=["abcdefghijk"])
    model = build(
        schema.Model(
            scratch=schema.Scratch(hidden_size=32, layers=1, heads=2, ffn_size=64, max_positions=64)
        ),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )
    export(model, tokenizer, tmp_path / "model")
    for name, value in (
        ("WORK", tmp_path),
        ("MODEL", tmp_path / "model"),
        ("REWARD", f"{tmp_path}/reward.py:score"),
    ):
        monkeypatch.setenv(name, str(value))
    return tmp_path


def test_a_run_equals_the_native_one_to_the_bit(work: Path) -> None:
    native: dict[str, Any] = {
        "seed": 42,
        "model": {"path": str(work / "model")},
        "data": {
            "max_prompt_tokens": 12,
            "overlong": "truncate_left",
            "exclude_eval": False,
            "train": [{"path": str(work / "words.jsonl")}],
            "eval": [{"path": str(work / "held_out.jsonl")}],
        },
        "algorithm": {
            "name": "grpo",
            "aggregation": "seq-mean-token-mean",
            "clip_high": 0.28,
            "kl": {"place": "loss", "coef": 0.01, "estimator": "k3"},
        },
        "rewards": {"environment": {"function": f"{work}/reward.py:score"}},
        "rollout": {"group_size": 4, "max_batch": 64, "sampling": {"max_tokens": 5}},
        "train": {
            "epochs": 4,
            "tasks_per_step": 8,
            "minibatches": 2,
            "micro_rollouts": 8,
            "optimizer": {"lr": 1e-2, "grad_clip": 0.5},
        },
        "eval": {"every": 10},
        "checkpoint": {"every": 0, "export": False},
        "run_dir": str(work / "native"),
    }
    here = whet.train(HERE / "skyrl_letters.yaml")
    there = whet.train(**native)
    assert here.finished
    assert here.run_dir == work / "ckpts"
    lines = [(run / "metrics.jsonl").read_bytes() for run in (here.run_dir, there.run_dir)]
    assert lines[0] == lines[1]
    rewards = [line["reward/mean"] for line in here.metrics if "reward/mean" in line]
    assert len(rewards) == 4 * 32 // 8
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_a_critic_learns_beside_the_policy(work: Path) -> None:
    ppo = [
        "trainer.algorithm.advantage_estimator=gae",
        f"trainer.critic.model.path={work}/model",
        "trainer.critic_mini_batch_size=4",
        "trainer.placement.critic_num_gpus_per_node=2",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.epochs=1",
        "trainer.eval_interval=-1",
    ]
    result = whet.train(HERE / "skyrl_letters.yaml", overrides=ppo)
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4]
    assert all(line["critic/lr"] == 5e-6 and line["train/kl_coef"] == 0.01 for line in result.metrics)
