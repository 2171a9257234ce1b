"""verl's recipes SPPO and SPIN: their launch scripts, their keys, and runs of their files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import whet
from asked import asked
from test_verl import A, R, refusal, values
from test_verl_runs import HERE, work  # noqa: F401  (a fixture)
from whet.config.load import Loaded, load
from whet.dialects.verl import algorithm, optimizer, prime, roles, sizes
from whet.guard import sandbox
from whet.types import ConfigError, Json

WHY = sandbox.lacking() or ("" if shutil.which("bash") else "no bash")
algorithm, optimizer, prime, roles, sizes = map(asked, (algorithm, optimizer, prime, roles, sizes))

NONE: dict[str, Json] = {"algorithm.adv_estimator": None}
SPPO = NONE | {"algorithm.sppo_eta": 0.5}
SPIN = NONE | {A + "dpo_beta": 0.2, R + "n": 2}


def test_sppo() -> None:
    assert algorithm.advantage(values(SPPO | {A + "sppo_eta": 2.0})) == {
        "algorithm.name": "self_play",
        "algorithm.loss.eta": 2.0,
        "algorithm.advantage": "softmean",
        "algorithm.advantage.softmean_eta": 0.5,
    }
    assert algorithm.advantage(values(NONE | {A + "sppo_eta": 2.0}))["algorithm.advantage.softmean_eta"] == 1
    assert algorithm.loss(values(SPPO)) == {}, "its own, without a clip"
    assert algorithm.reduction(values(SPPO)) == {}, "a mean over replies"
    assert algorithm.entropy(values(SPPO | {A + "entropy_coeff": 0.1})) == {"algorithm.entropy_coef": 0.1}
    assert algorithm.kl(values(SPPO | {A + "use_kl_loss": True}))["algorithm.kl.coef"] == 0.001
    assert "no mean but token-mean" in refusal(
        algorithm.advantage, SPPO | {A + "loss_agg_mode": "seq-mean-token-sum"}
    )


def test_spin() -> None:
    pairs: dict[str, Json] = {
        "algorithm.name": "online_dpo",
        "algorithm.dynamic_sampling": False,
        "algorithm.loss.pairs_of": "neighbours",
        "algorithm.loss.beta": 0.2,
        "algorithm.loss.pair_loss": "sigmoid",
    }
    assert algorithm.advantage(values(SPIN)) == pairs
    smooth = algorithm.advantage(values(SPIN | {"algorithm.dpo_label_smoothing": 0.1}))
    assert smooth == pairs | {"algorithm.loss.label_smoothing": 0.1}
    ipo = algorithm.advantage(values(SPIN | {"algorithm.dpo_loss_type": "ipo"}))
    assert ipo == pairs | {"algorithm.loss.pair_loss": "ipo", "algorithm.loss.ipo_mean": False}
    assert algorithm.advantage(values(SPIN | {R + "n": 1})) == pairs | {"train.share_prompts": False}
    only = NONE | {"trainer.ref_update_freq": 1, R + "n": 2}
    assert algorithm.advantage(values(only))["algorithm.loss.beta"] == 0.1
    unread = SPIN | {A + "entropy_coeff": 0.1, A + "use_kl_loss": True, "algorithm.use_kl_in_reward": True}
    assert algorithm.entropy(values(unread)) == algorithm.kl(values(unread)) == {}
    assert roles.has_reference(values(SPIN)), "without a KL, too"
    sized = SPIN | {"data.train_batch_size": 64, A + "ppo_mini_batch_size": 16, A + "ppo_epochs": 3}
    sized |= {A + "ppo_micro_batch_size_per_gpu": 4}
    found = sizes.batches(values(sized))
    assert (found["train.minibatches"], found["train.update_epochs"]) == (1, 1), "one optimizer step for all"


@pytest.mark.parametrize(
    ("every", "native"),
    [
        (None, {}),
        (-1, {}),
        (1, {"reference.reset_interval": 1}),
        (4, {"reference.reset_interval": "4 steps from 3"}),
    ],
)
def test_spin_renews_its_reference_before_a_step(every: Json, native: dict[str, Json]) -> None:
    assert algorithm.renewal(values(SPIN | {"trainer.ref_update_freq": every})) == native
    assert algorithm.renewal(values(SPPO)) == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (NONE, "give algorithm.sppo_eta of SPPO, or"),
        (SPPO | {"algorithm.adv_estimator": "grpo"}, "their trainers read no estimator"),
        (SPPO | {A + "dpo_beta": 0.1}, "keep those of one of them"),
        (SPIN | {R + "n": 3}, "set it to 2"),
        (SPIN | {R + "temperature": 0.7}, "at temperature 1"),
        (SPIN | {"algorithm.dpo_loss_type": "hinge"}, "expected one of sigmoid, ipo"),
    ],
)
def test_what_they_cannot_be(given: dict[str, Json], said: str) -> None:
    assert said in refusal(algorithm.advantage, given)


RM = "reward_model."
PRIME: dict[str, Json] = {
    "algorithm.adv_estimator": "rloo",
    "algorithm.reward_gt_coef": 5,
    "algorithm.reward_dpo_coef": 2,
    RM + "enable": True,
    RM + "reward_manager": "prime",
    RM + "model.path": "sft",
    "actor_rollout_ref.model.path": "sft",
    R + "n": 4,
    "data.train_batch_size": 64,
    A + "ppo_mini_batch_size": 64,
}


def test_prime() -> None:
    assert algorithm.advantage(values(PRIME)) == {
        "algorithm.name": "prime",
        "algorithm.advantage.process_coef": 2,
        "algorithm.advantage.outcome_coef": 5,
        "algorithm.advantage.implicit_beta": 0.05,
        "algorithm.advantage.implicit_loss": "ce",
        "algorithm.advantage.implicit_update": "before",
        "algorithm.advantage.implicit_normalize": True,
    }
    given = {RM + "model.update": "reverse", RM + "model.loss_type": "dpo", RM + "prime_norm": "none"}
    found = algorithm.advantage(values(PRIME | given))
    assert [found[f"algorithm.advantage.implicit_{key}"] for key in ("loss", "update", "normalize")] == [
        "dpo",
        "after",
        False,
    ]
    assert not roles.has_reward_model(values(PRIME)), "no frozen model scores whole responses"
    in_reward = PRIME | {"algorithm.use_kl_in_reward": True}
    assert algorithm.kl(values(in_reward)) == {}, "its trainer subtracts none"


def test_the_model_of_prime_is_the_native_critic() -> None:
    at = RM + "model.optim."
    given: dict[str, Json] = {
        RM + "mini_batch_size": 128,
        RM + "micro_batch_size_per_gpu": 2,
        at + "weight_decay": 0.1,
        at + "lr_warmup_steps": 7,
        RM + "model.ref_path": "other",
        RM + "model.enable_gradient_checkpointing": True,
        "critic.optim.lr": 1.0,
    }
    assert prime.model(values(PRIME | given)) == {
        "critic.path": "sft",
        "reference.path": "other",
        "critic.minibatches": 2,
        "critic.update_epochs": 1,
        "critic.micro_batch_rollouts": 2,
        "critic.gradient_checkpointing": True,
        "critic.optimizer.lr": 1e-6,
        "critic.optimizer.weight_decay": 0.1,
        "critic.optimizer.decay_all": True,
        "critic.optimizer.max_grad_norm": 10.0,
        "critic.optimizer.schedule.unit": "train_step",
        "critic.optimizer.schedule.warmup_steps": 7,
    }
    share = {at + "lr_warmup_steps_ratio": 0.1, at + "total_training_steps": 50}
    assert prime.model(values(PRIME | share))["critic.optimizer.schedule.warmup_steps"] == 5
    assert optimizer.critic(values(PRIME)) == optimizer.critic_rate(values(PRIME)) == {}, (
        "verl's critic rests"
    )
    assert prime.model(values({})) == {}


def test_prime_chooses_among_more_prompts() -> None:
    given: dict[str, Json] = {"data.oversample_factor": 4.0, "data.filter_accuracy": True}
    at = "algorithm.oversample"
    assert prime.oversampling(values(PRIME | given | {"data.accuracy_lower_bound": 0.2})) == {
        f"{at}.factor": 4.0,
        f"{at}.low": 0.2,
        f"{at}.high": 1.0,
        f"{at}.finished": False,
    }
    unbounded = prime.oversampling(
        values(PRIME | {"data.oversample_factor": 2.0, "data.filter_truncate": True})
    )
    assert unbounded == {f"{at}.factor": 2.0, f"{at}.low": None, f"{at}.high": None, f"{at}.finished": True}
    assert prime.oversampling(values(PRIME | {"data.filter_accuracy": True})) == {}
    assert prime.oversampling(values(given)) == {}, "read by PRIME's trainer alone"
    assert "a whole number" in refusal(prime.oversampling, PRIME | {"data.oversample_factor": 1.3})


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        ("advantage", {"algorithm.adv_estimator": "grpo"}, "PRIME has rloo alone"),
        ("advantage", {"algorithm.adv_estimator": None}, "PRIME, which has rloo"),
        ("advantage", {"algorithm.reward_gt_coef": None}, "PRIME needs both"),
        ("advantage", {RM + "enable": False}, "without its reward model it is rloo"),
        ("advantage", {RM + "reward_manager": "naive"}, "the manager prime alone"),
        ("advantage", {"custom_reward_function.path": "a.py"}, "does not read it"),
        ("advantage", {R + "temperature": 0.7}, "at another temperature"),
        ("advantage", {RM + "model.update": "none"}, "update=none is coming"),
        ("advantage", {RM + "model.loss_type": "bon_acc"}, "bon_acc is coming"),
        ("advantage", {RM + "model.loss_type": "dpo"}, "update=reverse"),
        ("advantage", {RM + "prime_granularity": "whole"}, "fails with any but token"),
        ("model", {RM + "mini_batch_size": 100}, "must divide"),
        ("model", {RM + "use_dynamic_bsz": True}, "set it to False"),
        ("model", {RM + "model.ref_path": "other", A + "use_kl_loss": True}, "another reference"),
    ],
)
def test_what_prime_cannot_be(function: str, given: dict[str, Json], said: str) -> None:
    of = algorithm.advantage if function == "advantage" else prime.model
    assert said in refusal(of, PRIME | given)


# ---------------------------------------------------------------- launch scripts

COMMON = """ \
    data.train_files=a.parquet data.val_files=b.parquet data.train_batch_size=64 \
    actor_rollout_ref.model.path=models/chat actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size=8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size=8 actor_rollout_ref.ref.log_prob_micro_batch_size=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.logger=console \
    trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.total_epochs=3 trainer.default_hdfs_dir=null "$@"
"""


def script(tmp_path: Path, module: str, *arguments: str) -> Loaded:
    path = tmp_path / "run.sh"
    path.write_text(f"set -x\npython3 -m {module}{COMMON}")
    return load(path, arguments, here=False)


@pytest.mark.skipif(bool(WHY), reason=f"no launch script can be read here: {WHY}")
def test_the_script_of_sppo(tmp_path: Path) -> None:
    cfg = script(tmp_path, "recipe.sppo.main_sppo").config
    assert (cfg.algorithm.name, cfg.algorithm.advantage) == (
        "self_play",
        {"name": "softmean", "softmean_eta": 1.0},
    )
    assert cfg.algorithm.loss == {"name": "self_play", "eta": 1.0} or cfg.algorithm.loss == {"eta": 1.0}
    assert (cfg.rollout.group_size, cfg.train.minibatches) == (1, 4)
    assert cfg.train.optimizer.schedule.warmup_steps == 15, "of the recipe's own file"
    other = script(tmp_path, "recipe.sppo.main_sppo", "algorithm.sppo_eta=0.5", A + "optim.lr_warmup_steps=3")
    assert other.config.algorithm.advantage == {"name": "softmean", "softmean_eta": 0.5}
    assert other.config.train.optimizer.schedule.warmup_steps == 3


@pytest.mark.skipif(bool(WHY), reason=f"no launch script can be read here: {WHY}")
def test_the_script_of_spin(tmp_path: Path) -> None:
    cfg = script(tmp_path, "recipe.spin.main_spin", "+trainer.log_freq=1", "trainer.ref_update_freq=2").config
    assert cfg.algorithm.name == "online_dpo"
    assert cfg.algorithm.dynamic_sampling is False
    assert cfg.reference.reset_interval == "2 steps from 1"
    assert (cfg.rollout.group_size, cfg.train.minibatches, cfg.train.share_prompts) == (1, 1, False)
    loaded = script(tmp_path, "recipe.spin.main_spin", R + "n=2")
    assert loaded.config.train.share_prompts
    said = {line.key: line.differs for line in loaded.translation.lines}  # type: ignore[union-attr]
    assert "its pairs may be of replies to different prompts" in said[A + "dpo_beta"]
    with pytest.raises(ConfigError, match="keep those of one of them"):
        script(tmp_path, "recipe.spin.main_spin", "algorithm.sppo_eta=1")


@pytest.mark.skipif(bool(WHY), reason=f"no launch script can be read here: {WHY}")
def test_the_script_of_prime(tmp_path: Path) -> None:
    given = ("reward_model.model.path=models/chat", "reward_model.micro_batch_size_per_gpu=1")
    offloads = "actor_rollout_ref.actor.fsdp_config.param_offload=True"
    cfg = script(
        tmp_path, "recipe.prime.main_prime", *given, "algorithm.use_kl_in_reward=True", offloads
    ).config
    assert (cfg.algorithm.name, cfg.rollout.group_size, cfg.algorithm.entropy_coef) == ("prime", 4, 0.001)
    assert cfg.algorithm.oversample == {"factor": 4.0, "low": 0.2, "high": 0.8, "finished": True}
    assert cfg.algorithm.reward_kl.coef == 0
    critic = cfg.critic
    assert (critic.path, critic.minibatches, critic.optimizer.lr) == ("models/chat", 16, 1e-6)
    assert (critic.optimizer.weight_decay, critic.optimizer.max_grad_norm) == (0.0, 10.0)
    assert cfg.reference.path == "models/chat"
    assert set(cfg.train.offload) == {"policy", "critic", "reference"}


# ---------------------------------------------------------------- runs

FILES: dict[str, dict[str, Any]] = {
    "sppo": {"algorithm.sppo_eta": 1.0, A + "sppo_eta": 4.0, A + "use_kl_loss": False},
    "sppo, one reply": {"algorithm.sppo_eta": 1.0, A + "sppo_eta": 4.0, R + "n": 1},
    "spin": {A + "dpo_beta": 0.5, "trainer.ref_update_freq": 1, R + "n": 2},
    "prime": {
        "algorithm.reward_gt_coef": 5,
        "algorithm.reward_dpo_coef": 5,
        "data.train_batch_size": 4,
        "data.oversample_factor": 2.0,
        "data.filter_accuracy": True,
        RM + "enable": True,
        RM + "reward_manager": "prime",
        RM + "model.optim.lr": 1e-3,
        RM + "mini_batch_size": 8,
        RM + "micro_batch_size_per_gpu": 4,
        "custom_reward_function.path": "null",
        "data.train_files": "${oc.env:VERL_TEST}/gsm8k.parquet",
        A + "use_kl_loss": False,
    },
    "spin, one reply": {A + "dpo_beta": 0.5, "trainer.ref_update_freq": 2, R + "n": 1},
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_runs(work: Path, name: str) -> None:  # noqa: F811
    estimator = "rloo" if name == "prime" else "null"
    given = FILES[name] | {"algorithm.adv_estimator": estimator, "trainer.total_training_steps": 6}
    if name == "prime":  # verl's own function judges
        rows = pq.read_table(work / "train.parquet").to_pylist()
        judged = [row | {"data_source": "openai/gsm8k"} for row in rows]
        pq.write_table(pa.Table.from_pylist(judged), work / "gsm8k.parquet")
        given |= {
            RM + "model.path": f"{work}/model",
            "trainer.test_freq": -1,
            "trainer.val_before_train": False,
        }
    result = whet.train(
        HERE / "verl_letters.yaml", overrides=[f"{key}={value}" for key, value in given.items()]
    )
    assert result.finished
    lines = [m for m in result.metrics if "train/loss" in m]
    assert len(lines) == 6
    if name == "spin":
        assert all(line["train/kl_reference_nats"] == 0 for line in lines), "renewed before every step"
    if name == "prime":
        assert all(line["ledger/rejected/surplus_rollouts"] == 16 for line in lines)
        assert lines[-1]["critic/loss"] < lines[0]["critic/loss"], "it learns what no reply earns"
