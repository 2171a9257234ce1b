"""The Trinity-RFT dialect: every key of its document has a status, its arithmetic is Trinity's, its files run."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from asked import asked
from whet.algos.demonstration import cosine
from whet.config.load import load
from whet.config.parse import parse
from whet.config.plan import plans
from whet.config.schema import Config, ModelConfig, TokenizerConfig
from whet.config.tree import merge
from whet.data.tokenizer import load_tokenizer
from whet.dialects.row import NotSupportedYet
from whet.dialects.tables import dialect
from whet.dialects.translate import Translation, translate
from whet.dialects.trinity import algorithm as learn
from whet.dialects.trinity import data, run, trainer, waiting
from whet.dialects.trinity import loss as losses
from whet.dialects.trinity import rewards as judging
from whet.dialects.trinity.values import (
    ACTOR,
    CRITIC,
    EXPERIENCES,
    INPUT,
    MODEL,
    REF,
    TASKSET,
    VERL_TRAINER,
    repeat_times,
)
from whet.dialects.values import nested
from whet.dialects.versions import VERSION
from whet.models.load import build, export
from whet.types import ConfigError, Json

data, run, trainer, waiting = map(asked, (data, run, trainer, waiting))
judging, learn, losses = map(asked, (judging, learn, losses))

HERE = Path(__file__).parent
FILES = HERE / "dialects"
PLAIN_CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def values(**given: Json) -> dict[str, Json]:
    """The document's defaults, with values put over them; `__` stands for a dot."""
    out = {row.key: row.default for row in dialect("trinity").rows}
    for name, value in given.items():
        name = name.replace("__", ".")
        assert name in out, name
        out[name] = value
    return out


def grpo(**given: Json) -> dict[str, Json]:
    return values(**{"algorithm__algorithm_type": "grpo", **given})


def translated(tree: dict[str, Json], version: str = "") -> Translation:
    return translate(tree, dialect("trinity", version), origins={})


def tree_of(given: dict[str, Json]) -> dict[str, Json]:
    """A file with these keys."""
    return nested({tuple(key.split(".")): value for key, value in given.items()})


def refused(given: dict[str, Json]) -> str:
    """What is said of a key beside those of a whole small file."""
    (problem,) = (
        text
        for _, text in translated(merge(small(), tree_of(given))).problems
        if text.startswith(next(iter(given)))
    )
    return problem


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("gui:train_batch_size", "buffer.train_batch_size"),
        ("gui:_train_batch_size_per_gpu", "buffer.train_batch_size"),
        ("gui:trainer_gpu_num", "cluster.gpu_per_node"),
        ("gui:total_epochs", "buffer.total_epochs"),
    ],
)
def test_a_field_of_the_form_that_generates_files_is_refused(key: str, instead: str) -> None:
    assert f"not a key of a file; write {instead}" in refused({key: 3})


# ---------------------------------------------------------------- the table


def names(file: str) -> list[str]:
    lines = (FILES / f"{file}.keys.txt").read_text().splitlines()
    return [line.partition("\t")[0] for line in lines]


def test_every_key_of_the_document_has_a_row_and_a_reason() -> None:
    for file, count in (("trinity", 216), ("trinity_verl", 96)):
        known = {row.key: row for row in dialect("trinity").rows}
        assert len(names(file)) == count
        assert not set(names(file)) - known.keys()
        assert all(row.what for row in known.values() if row.status != "mapped")


def test_few_keys_are_inert_or_refused() -> None:
    known = {row.key: row.status for row in dialect("trinity").rows}
    for file in ("trinity", "trinity_verl"):
        counts = Counter(known[name] for name in names(file))
        assert counts["inert"] + counts["refused"] < 0.05 * len(names(file)), counts


# ---------------------------------------------------------------- batch sizes and lengths


def test_a_step_explores_tasks_times_repeats() -> None:
    want = {"train.tasks_per_step": 32, "rollout.group_size": 8}
    for size in (None, 256):
        given = grpo(buffer__batch_size=32, algorithm__repeat_times=8, buffer__train_batch_size=size)
        assert data.batch(given) == want
    with pytest.raises(NotSupportedYet, match=r"buffer.train_batch_size: 96 is not .* 32 \* 8 = 256"):
        data.batch(grpo(buffer__batch_size=32, algorithm__repeat_times=8, buffer__train_batch_size=96))
    own = {
        "buffer__batch_size": 32,
        "algorithm__repeat_times": 8,
        "synchronizer__sync_style": "trainer_driven",
    }
    sizes = {"train.tasks_per_step": 12, "rollout.group_size": 8}
    assert data.batch(grpo(**own, buffer__train_batch_size=96)) == sizes, "the trainer takes 96 of the queue"
    for wrong in (
        {"buffer__train_batch_size": 100},
        {"buffer__train_batch_size": 96, "buffer__total_steps": 9},
    ):
        with pytest.raises(NotSupportedYet, match="of different sizes"):
            data.batch(grpo(**own, **wrong))
    sizes = {"train.tasks_per_step": 32, "rollout.group_size": 8}
    for name, why in (("step_wise_alfworld_workflow", "turns"), ("email_search_workflow", "refused, once")):
        agent = {f"{TASKSET}.default_workflow_type": name, "buffer__train_batch_size": 7680}
        assert data.batch(grpo(buffer__batch_size=32, algorithm__repeat_times=8, **agent)) == sizes, why


def test_a_preset_says_how_often_a_task_is_repeated() -> None:
    assert data.batch(grpo(buffer__batch_size=3))["rollout.group_size"] == 2
    assert data.batch(values(buffer__batch_size=3))["rollout.group_size"] == 1, "ppo, the default algorithm"


def test_a_file_of_replies_is_read_by_train_batch_size() -> None:
    given = values(algorithm__algorithm_type="sft", buffer__train_batch_size=64)
    assert data.batch(given) == {"train.tasks_per_step": 64}
    with pytest.raises(ConfigError, match=r"buffer\.train_batch_size: dpo needs it"):
        data.batch(values(algorithm__algorithm_type="dpo"))


@pytest.mark.parametrize(
    ("gpus", "engines", "good"), [(8, 4, True), (8, 5, False), (2, 2, True), (7, 1, True)]
)
def test_the_gpus_left_to_the_trainer_divide_its_batch(gpus: int, engines: int, good: bool) -> None:
    """256 experiences: 8 - 4 = 4 divide them, 8 - 5 = 3 do not; none left says nothing; 7 - 1 = 6 do not divide 256."""
    given = grpo(
        buffer__batch_size=32 if gpus != 7 else 36,
        algorithm__repeat_times=8,
        cluster__node_num=1,
        cluster__gpu_per_node=gpus,
        explorer__rollout_model__engine_num=engines,
    )
    if good:
        assert data.batch(given)["rollout.group_size"] == 8
    else:
        with pytest.raises(
            ConfigError, match="256 must be divisible by the number of GPUs of the trainer, 3"
        ):
            data.batch(given)


def test_a_trainer_by_itself_has_all_gpus_and_an_explorer_has_no_trainer() -> None:
    """8 GPUs with 3 engines. mode: both leaves 5 to the trainer, which do not divide 64; in a process of its own it has
    8, and the explorer, which has none, is asked nothing."""
    sizes: dict[str, Json] = {
        "buffer__batch_size": 8,
        "algorithm__repeat_times": 8,
        "cluster__node_num": 1,
        "cluster__gpu_per_node": 8,
        "explorer__rollout_model__engine_num": 3,
    }
    with pytest.raises(ConfigError, match="64 must be divisible by the number of GPUs of the trainer, 5"):
        data.batch(grpo(**sizes))
    for mode in ("train", "explore", "bench"):
        assert data.batch(grpo(**sizes, mode=mode))["train.tasks_per_step"] == 8
    assert trainer.layout(grpo(**sizes, mode="train"))["train.parallel.dp_shard"] == 8


@pytest.mark.parametrize(
    ("least", "longest", "want"), [(1, 16, 1), (15, 16, 15), (16, 16, 15), (99, 16, 15), (1, 1, 0)]
)
def test_a_reply_may_always_end_before_its_last_token(least: int, longest: int, want: int) -> None:
    """Where min_response_tokens is not below max_response_tokens, Trinity takes one less than that."""
    lengths: dict[str, Json] = {"model__max_model_len": 64, "model__max_response_tokens": longest}
    told = data.sampling(grpo(**lengths, model__min_response_tokens=least))
    assert told["rollout.sampling.min_tokens"] == want


def test_the_smaller_number_of_steps_ends_a_run() -> None:
    assert data.run_length(values(buffer__total_epochs=20)) == {"train.epochs": 20, "train.drop_last": "end"}
    assert data.run_length(values(buffer__total_steps=100)) == {"train.steps": 100}
    assert data.run_length(values(buffer__total_steps=100, trainer__total_steps=30)) == {"train.steps": 30}


@pytest.mark.parametrize(
    ("whole", "prompt", "response", "want"),
    [
        (20480, 4096, 16384, (4096, 16384)),
        (None, 10, 20, (10, 20)),
        (100, 30, None, (30, 70)),
        (100, None, 30, (70, 30)),
        (101, None, None, (50, 51)),
        (100, 10, 20, (10, 20)),
    ],
)
def test_prompt_and_reply_share_the_models_length(
    whole: int | None, prompt: int | None, response: int | None, want: tuple[int, int]
) -> None:
    given = values(
        model__max_model_len=whole, model__max_prompt_tokens=prompt, model__max_response_tokens=response
    )
    assert data.limits(given) == want


@pytest.mark.parametrize(
    ("whole", "prompt", "response"), [(None, 5, None), (None, None, None), (9, 5, 5), (5, 5, None)]
)
def test_lengths_that_do_not_fit_are_refused(
    whole: int | None, prompt: int | None, response: int | None
) -> None:
    given = values(
        model__max_model_len=whole, model__max_prompt_tokens=prompt, model__max_response_tokens=response
    )
    with pytest.raises(ConfigError, match=r"model\.max_model_len"):
        data.limits(given)


def test_a_prompt_that_trinity_would_cut_is_left_out() -> None:
    sizes: dict[str, Json] = {"model__max_prompt_tokens": 10, "model__max_response_tokens": 20}
    assert data.token_limits(grpo(**sizes))["data.overlong"] == "filter"
    assert data.token_limits(grpo(**sizes, model__enable_prompt_truncation=False))["data.overlong"] == "error"
    own = data.token_limits(grpo(**sizes, **{f"{TASKSET}.rollout_args.max_tokens": 7}))
    assert own["rollout.sampling.max_tokens"] == 7


# ---------------------------------------------------------------- algorithms


def test_grpo_is_trinitys() -> None:
    given = grpo()
    assert losses.recipe(given) == {"algorithm.name": "grpo"}
    assert learn.advantage(given) == {"algorithm.advantage": "grpo", "algorithm.advantage.std_epsilon": 1e-6}
    assert losses.policy_loss(given) == {
        "algorithm.loss_agg_mode": "token-mean",
        "algorithm.loss": "ppo",
        "algorithm.loss.clip_low": 0.2,
        "algorithm.loss.clip_high": 0.2,
        "algorithm.loss.dual_clip": 3.0,
        "algorithm.old_logprobs": "sampled",
    }
    assert learn.kl(given) == {"algorithm.kl.coef": 0.001, "algorithm.kl.estimator": "k2"}
    assert learn.entropy(given) == {}


def test_arguments_of_functions() -> None:
    given = grpo(
        **{
            "algorithm.policy_loss_fn_args.*": {"clip_range_low": 0.1, "clip_range_high": 0.3},
            "algorithm.entropy_loss_fn_args.*": {"entropy_coef": 0.01},
            "algorithm.advantage_fn_args.*": {"epsilon": 1e-4},
            "algorithm.kl_loss_fn": "low_var_kl",
            "algorithm.kl_loss_fn_args.*": {"kl_coef": 0.04},
        }
    )
    loss = losses.policy_loss(given)
    assert (loss["algorithm.loss.clip_low"], loss["algorithm.loss.clip_high"]) == (0.1, 0.3)
    assert learn.entropy(given) == {"algorithm.entropy_coef": 0.01}
    assert learn.advantage(given)["algorithm.advantage.std_epsilon"] == 1e-4
    assert learn.kl(given)["algorithm.kl.coef"] == 0.04
    assert learn.kl(given)["algorithm.kl.estimator"] == "low_var_kl"
    with pytest.raises(
        ConfigError, match=r"advantage_fn_args.epsilom: no such argument; did you mean 'epsilon'"
    ):
        learn.advantage(grpo(**{"algorithm.advantage_fn_args.*": {"epsilom": 1}}))


CLIPV: dict[str, Json] = {
    "advantage": "grpo",
    "advantage.std_epsilon": 1e-6,
    "entropy_clip": "vocabulary",
}


@pytest.mark.parametrize(
    ("name", "given", "want"),
    [
        ("opmd", {}, {"advantage": "opmd", "advantage.opmd_baseline": "mean"}),
        (
            "clipb",
            {},
            {
                "advantage": "grpo",
                "advantage.std_epsilon": 1e-6,
                "entropy_clip": "batch",
                "entropy_clip.mu": 2.5,
            },
        ),
        (
            "clipv",
            {"mu": 2.0, "epsilon": 1e-4},
            {
                "advantage": "grpo",
                "advantage.std_epsilon": 1e-4,
                "entropy_clip": "vocabulary",
                "entropy_clip.mu": 2.0,
                "entropy_clip.max_frac": 1e-4,
            },
        ),
        ("clipv", {}, {**CLIPV, "entropy_clip.mu": 8.5, "entropy_clip.max_frac": 1e-4}),
        ("clipv", {"max_frac": 0.1}, {**CLIPV, "entropy_clip.mu": 2.0, "entropy_clip.max_frac": 0.1}),
        (
            "opmd",
            {"opmd_baseline": "logavgexp", "tau": 0.5},
            {"advantage": "opmd", "advantage.opmd_baseline": "logavgexp", "advantage.tau": 0.5},
        ),
        ("asymre", {"baseline_shift": -0.2}, {"advantage": "asymre", "advantage.baseline_shift": -0.2}),
        (
            "rec",
            {"drop": "balance"},
            {"advantage": "rec", "advantage.normalize_std": False, "resample": "balance"},
        ),
        (
            "rec",
            {"std_normalize": True, "epsilon": 1e-4},
            {
                "advantage": "rec",
                "advantage.normalize_std": True,
                "advantage.std_epsilon": 1e-4,
                "advantage.std_ddof": 0,
            },
        ),
        (
            "step_wise_grpo",
            {"enable_step_norm": True, "std_cal_level": "batch"},
            {
                "advantage": "step_wise_grpo",
                "advantage.std_epsilon": 1e-6,
                "advantage.divide_by_turns": True,
                "advantage.std_scope": "batch",
            },
        ),
        (
            "grpo",
            {
                "std_threshold": 0.1,
                "duplicate_experiences": True,
                "rank_penalty": 0.25,
                "std_cal_level": "batch",
            },
            {
                "advantage": "grpo",
                "advantage.std_epsilon": 1e-6,
                "groups.uniform.min_std": 0.1,
                "refill": "copy",
                "advantage.rank_penalty": 0.25,
                "advantage.std_scope": "batch",
            },
        ),
        ("remax", {}, {"advantage": "remax"}),
        ("rloo", {}, {"advantage": "rloo", "advantage.single_rollout": "raw"}),
        ("reinforceplusplus", {"gamma": 0.9}, {"advantage": "reinforce_plus_plus", "advantage.gamma": 0.9}),
    ],
)
def test_advantages_with_their_arguments(name: str, given: dict[str, Json], want: dict[str, Json]) -> None:
    told = learn.advantage(grpo(**{"algorithm.advantage_fn": name, "algorithm.advantage_fn_args.*": given}))
    assert told == {f"algorithm.{key}": value for key, value in want.items()}


@pytest.mark.parametrize(
    ("kind", "recipe", "advantage", "loss", "times"),
    [
        ("ppo", "ppo", "gae", "ppo", 1),
        ("reinforceplusplus", "reinforce_pp", "reinforce_plus_plus", "ppo", 2),
        ("opmd", "opmd", "opmd", "opmd", 2),
        ("asymre", "asymre", "asymre", "opmd", 2),
        ("topr", "topr", "reinforce", "topr", 2),
        ("cispo", "cispo", "grpo", "cispo", 2),
        ("gspo", "gspo", "grpo", "gspo", 2),
        ("sapo", "sapo", "grpo", "sapo", 2),
        ("sppo", "softmax_ppo", "opmd", "softmax_ppo", 2),
        ("rec", "rec", "rec", "rec", 2),
        ("m2po", "m2po", "grpo", "m2po", 8),
        ("raft", "raft", "none", "cross_entropy", 1),
        ("multi_step_grpo", "step_wise_grpo", "step_wise_grpo", "ppo", 8),
        ("on_policy_distill", "distill", "distill", "ppo", 8),
        ("jsd", "distill", "distill", "ppo", 8),
        ("mix", "mix", "grpo", "ppo", 8),
        ("mix_chord", "mix_chord", "grpo", "ppo", 8),
    ],
)
def test_presets(kind: str, recipe: str, advantage: str, loss: str, times: int) -> None:
    given = values(algorithm__algorithm_type=kind)
    assert losses.recipe(given) == {"algorithm.name": recipe}
    assert learn.advantage(given)["algorithm.advantage"] == advantage
    assert losses.policy_loss(given)["algorithm.loss"] == loss
    assert repeat_times(given) == times


@pytest.mark.parametrize(
    ("kind", "args", "want"),
    [
        (
            "gspo",
            {},
            {
                "loss.gspo_form": "token",
                "loss.clip_low": 3e-4,
                "loss.clip_high": 4e-4,
                "loss_agg_mode": "seq-mean-token-mean",
            },
        ),
        (
            "cispo",
            {"enable_mask_clip": True},
            {
                "loss.clip_low": 1.0,
                "loss.clip_high": 0.28,
                "loss.cispo_mask": True,
                "loss.mask_low": 1.0,
                "loss.mask_high": 0.28,
            },
        ),
        (
            "cispo",
            {"enable_mask_clip": True, "mask_clip_range_low": 0.5, "mask_clip_range_high": 0.1},
            {"loss.clip_low": 1.0, "loss.clip_high": 0.28, "loss.mask_low": 0.5, "loss.mask_high": 0.1},
        ),
        ("cispo", {}, {"loss.cispo_mask": False}),
        ("sapo", {"tau_neg": 1.2}, {"loss.tau_pos": 1.0, "loss.tau_neg": 1.2, "loss.sapo_detach": True}),
        ("sppo", {"epsilon": 0.1}, {"loss.ratio_epsilon": 0.1}),
        (
            "m2po",
            {"m2_threshold": 0.1, "log_ratio_clip": 20.0},
            {"loss.m2_threshold": 0.1, "loss_agg_mode": "token-mean", "old_logprobs": "sampled"},
        ),
        ("topr", {"advantage_threshold": 0.5}, {"loss.topr_threshold": 0.5}),
        ("opmd", {"tau": 2.0}, {"loss": "opmd", "loss.tau": 2.0}),
        ("opmd", {"tau": 0}, {"loss": "reinforce"}),
        (
            "rec",
            {"clip_mode": "gspo-one-side"},
            {"loss.rec_clip_mode": "gspo-one-side", "loss_agg_mode": "seq-mean-token-mean"},
        ),
        (
            "rec",
            {"clip_mode": "ring", "epsilon_low_prime": 0.7},  # beside arguments those of the constructor
            {"loss.rec_ring_low": 0.7, "loss.rec_ring_high": 0.4},
        ),
        (
            "grpo",
            {"enable_sequence_masking": True, "delta_sequence_masking": 0.2},
            {"loss.sequence_mask_delta": 0.2},
        ),
        (
            "grpo",
            {"fallback_to_policy_gradient": True},
            {"loss.fallback_to_policy_gradient": True, "loss.dual_clip": 3.0},
        ),
        ("grpo", {"loss_agg_mode": "seq-mean-token-sum-norm"}, {"loss_agg_mode": "token-sum-norm"}),
    ],
)
def test_losses_with_their_arguments(kind: str, args: dict[str, Json], want: dict[str, Json]) -> None:
    told = losses.policy_loss(
        values(algorithm__algorithm_type=kind, **{"algorithm.policy_loss_fn_args.*": args})
    )
    assert {key: told[f"algorithm.{key}"] for key in want} == want


def test_losses_of_files() -> None:
    for name in ("sft", "sft_is", "sft_phi"):
        given = values(algorithm__algorithm_type="sft", algorithm__policy_loss_fn=name)
        assert losses.recipe(given) == {"algorithm.name": name}
    phi = values(
        algorithm__algorithm_type="sft",
        algorithm__policy_loss_fn="sft_phi",
        **{"algorithm.policy_loss_fn_args.*": {"cutoff_prob": 0.9}},
    )
    assert losses.policy_loss(phi)["algorithm.loss.phi_cutoff"] == 0.9


@pytest.mark.parametrize(
    ("kind", "args", "said"),
    [
        ("grpo", {"delta_sequence_masking": 0.3}, "no effect without enable_sequence_masking"),
        ("grpo", {"fallback_to_policy_gradient": True, "clip_range": 0.3}, "no effect with fallback"),
        ("cispo", {"mask_clip_range_low": 0.5}, "no effect without enable_mask_clip"),
        ("sapo", {"tau_neg": 0.5}, "is less than tau_pos"),
        ("mix", {"sft_loss_agg_mode": "seq-mean-token-sum"}, "is coming"),
        ("m2po", {"log_ratio_clip": 10.0}, "log_ratio_clip: 10.0 is coming"),
        ("grpo", {"loss_agg_mode": "token_mean"}, "did you mean 'token-mean'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(kind: str, args: dict[str, Json], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        losses.policy_loss(
            values(algorithm__algorithm_type=kind, **{"algorithm.policy_loss_fn_args.*": args})
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"algorithm__algorithm_type": "cpt"}, "cpt, of a newer version, is coming"),
        ({"algorithm__algorithm_type": "grop"}, "did you mean 'grpo'"),
        ({"algorithm__advantage_fn": "ppo", "algorithm__algorithm_type": "grpo"}, "needs a critic"),
        ({"algorithm__advantage_fn": "grpo"}, "needs a critic"),
        (
            {
                "algorithm.advantage_fn_args.*": {"duplicate_experiences": True},
                "algorithm__algorithm_type": "grpo",
            },
            "no effect without std_threshold",
        ),
    ],
)
def test_what_is_not_built_is_named(given: dict[str, Json], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        learn.advantage(values(**given))


def test_operators_before_the_advantage() -> None:
    def pipeline(*steps: dict[str, Json]) -> dict[str, Json]:
        return grpo(data_processor__experience_pipeline__operators=list(steps))

    low: dict[str, Json] = {"name": "reward_filter", "args": {"threshold": 0.5}}
    flat: dict[str, Json] = {"name": "reward_std_filter"}
    assert learn.operators(pipeline(low, flat)) == {
        "algorithm.groups.min_reward": 0.5,
        "algorithm.groups.uniform.min_std": 0.0,
        "algorithm.groups.uniform.ddof": 0,
    }
    for steps in ((flat, low), (low, low), ({"name": "data_juicer"},)):
        with pytest.raises(NotSupportedYet, match="coming"):
            learn.operators(pipeline(*steps))
    with pytest.raises(ConfigError, match="has no such argument"):
        learn.operators(pipeline({"name": "reward_filter", "args": {"treshold": 1}}))


# ---------------------------------------------------------------- mixes


def chord(**given: Json) -> dict[str, Json]:
    """32 tasks of 8 rollouts and ceil(0.2 * 320) = 64 demonstrations."""
    return values(
        **{
            "algorithm__algorithm_type": "mix_chord",
            "algorithm.sample_strategy_args.*": {"expert_data_ratio": 0.2},
            "buffer__batch_size": 32,
            "buffer__train_batch_size": 320,
            "buffer.trainer_input.auxiliary_buffers": {
                "sft_dataset": {"path": "e.jsonl", "format": {"messages_key": "talk"}}
            },
            **given,
        }
    )


def test_a_mix_counts_tasks_where_trinity_counts_experiences() -> None:
    assert data.batch(chord()) == {"train.tasks_per_step": 96, "rollout.group_size": 8}
    told = data.mixed(chord())
    assert math.ceil(Fraction(str(told["algorithm.mix.demonstration_ratio"])) * 96) == 64
    assert told["data.demonstrations.0.messages"] == "talk"
    assert told["data.learn_turns"] == "last"
    with pytest.raises(
        NotSupportedYet, match=r"of 256 experiences 52 are demonstrations .* and 204 are not .* 32 \* 8"
    ):
        data.batch(chord(buffer__train_batch_size=256))
    with pytest.raises(ConfigError, match=r"auxiliary_buffers\.sft_dataset: must be given"):
        data.mixed(chord(**{"buffer.trainer_input.auxiliary_buffers": {"other": {"path": "x"}}}))


def test_the_share_of_demonstrations_is_exact() -> None:
    """whet rounds share * tasks up; 5/7 as a float would become 6 of 7."""
    for whole in range(2, 200):
        for part in range(1, whole):
            assert math.ceil(Fraction(str(losses.share(part, whole))) * whole) == part


def test_the_weight_of_demonstrations() -> None:
    args = {"mu_peak": 0.5, "mu_valley": 0.02, "mu_warmup_steps": 200, "mu_decay_steps": 400}
    told = data.mixed(chord(**{"algorithm.policy_loss_fn_args.*": args}))
    schedule = {"name": "cosine", "valley": 0.02, "warmup_steps": 200, "decay_steps": 400}
    want = {"mu": 0.5, "mu_schedule": schedule, "loss": "sft_phi"}
    assert {key: told[f"algorithm.mix.{key}"] for key in want} == want
    plain = data.mixed(chord(algorithm__algorithm_type="mix"))
    assert (plain["algorithm.mix.mu"], plain["algorithm.mix.loss"]) == (0.1, "sft")
    with pytest.raises(ConfigError, match="train_batch_size_expert: 7 is not 64"):
        data.mixed(chord(**{"algorithm.policy_loss_fn_args.*": {"train_batch_size_expert": 7}}))


def test_terms_beside_a_mix_keep_their_weight() -> None:
    """Trinity: 0.9 * policy + 0.1 * sft + 0.001 * KL; here 0.9 * (policy + c * KL): c = 0.001 / 0.9."""
    assert learn.kl(chord(algorithm__algorithm_type="mix"))["algorithm.kl.coef"] == pytest.approx(0.001 / 0.9)
    bonus = {"algorithm.entropy_loss_fn_args.*": {"entropy_coef": 0.09}}
    assert learn.entropy(chord(**bonus)) == {"algorithm.entropy_coef": pytest.approx(0.1)}
    with pytest.raises(NotSupportedYet, match="a mu that changes"):
        learn.kl(chord(**{"algorithm.policy_loss_fn_args.*": {"mu_peak": 0.5}}))
    with pytest.raises(NotSupportedYet, match="over the demonstrations too"):
        learn.entropy(chord(**bonus, algorithm__entropy_loss_fn="default"))


def test_sample_strategies() -> None:
    assert waiting.staleness(grpo(algorithm__sample_strategy="staleness_control")) == {}
    bound = {"algorithm.sample_strategy_args.*": {"max_staleness": 2}, "synchronizer.sync_interval": 4}
    with pytest.raises(NotSupportedYet, match="max_staleness: 2"):
        waiting.staleness(grpo(algorithm__sample_strategy="staleness_control", **bound))
    with pytest.raises(ConfigError, match="does not go with algorithm_type grpo"):
        waiting.staleness(grpo(algorithm__sample_strategy="mix"))


# ---------------------------------------------------------------- KL


def test_kl_in_the_rewards_where_it_has_an_effect() -> None:
    penalty: dict[str, Json] = {
        "algorithm__kl_penalty_fn": "k1",
        "algorithm.kl_penalty_fn_args.*": {
            "kl_coef": 0.1,
            "adaptive": True,
            "target_kl": 0.05,
            "horizon": 100,
        },
    }
    want = {
        "algorithm.reward_kl.coef": 0.1,
        "algorithm.reward_kl.estimator": "k1",
        "algorithm.reward_kl.target": 0.05,
        "algorithm.reward_kl.horizon": 100,
    }
    assert learn.kl(values(**penalty, algorithm__kl_loss_fn="none")) == want
    both = {"algorithm.kl.coef": 0.001, "algorithm.kl.estimator": "corrected_k3"}
    assert learn.kl(values(**penalty, algorithm__kl_loss_fn="corrected_k3")) == want | both
    corrected = penalty | {"algorithm__kl_penalty_fn": "corrected_k3"}
    assert learn.kl(values(**corrected))["algorithm.reward_kl.estimator"] == "k3"
    with pytest.raises(ConfigError, match="has no effect with algorithm_type grpo"):
        learn.kl(grpo(**penalty, algorithm__kl_loss_fn="none"))


def test_dpo_has_a_kl_beside_its_loss() -> None:
    """check_config of DPOAlgorithm puts k2 in the place of none, with the default coefficient 0.001."""
    dpo = {"algorithm__algorithm_type": "dpo"}
    k2 = {"algorithm.kl.coef": 0.001, "algorithm.kl.estimator": "k2"}
    assert learn.kl(values(**dpo)) == learn.kl(values(**dpo, algorithm__kl_loss_fn="none")) == k2
    given = {"algorithm__kl_loss_fn": "k1", "algorithm.kl_loss_fn_args.*": {"kl_coef": 0.1}}
    assert learn.kl(values(**dpo, **given)) == {"algorithm.kl.coef": 0.1, "algorithm.kl.estimator": "k1"}
    assert learn.kl(values(**dpo, **{"algorithm.kl_loss_fn_args.*": {"kl_coef": 0}})) == {}
    assert losses.policy_loss(values(**dpo)) == {
        "algorithm.loss.beta": 0.1,
        "algorithm.loss.label_smoothing": 0.0,
    }
    with pytest.raises(NotSupportedYet, match="seq-mean-token-mean with dpo"):
        learn.kl(values(**dpo, algorithm__loss_agg_mode="seq-mean-token-mean"))
    with pytest.raises(ConfigError, match="needs sampled replies"):
        learn.kl(values(**dpo, algorithm__kl_loss_fn="corrected_k3"))


# ---------------------------------------------------------------- optimizers, memory, checkpoints


def test_the_policys_optimizer_comes_from_either_section() -> None:
    of_algorithm = learn.optimizer(values(algorithm__optimizer__lr=5e-6, trainer__grad_clip=0.5))
    of_verl = learn.optimizer(values(**{f"{ACTOR}.optim.lr": 5e-6, f"{ACTOR}.grad_clip": 0.5}))
    assert of_algorithm == of_verl
    assert of_algorithm["train.optimizer.lr"] == 5e-6
    assert of_algorithm["train.optimizer.weight_decay"] == 0.01
    assert of_algorithm["train.optimizer.decay_all"] is True, "torch decays every parameter"
    assert of_algorithm["train.optimizer.max_grad_norm"] == 0.5
    with pytest.raises(ConfigError, match="these are one setting"):
        learn.optimizer(values(algorithm__optimizer__lr=5e-6, **{f"{ACTOR}.optim.lr": 4e-6}))


def test_warm_up_in_training_steps() -> None:
    ratio = learn.optimizer(values(**{f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1}))
    assert ratio["train.optimizer.schedule.warmup_steps"] == 0.1
    steps = learn.optimizer(values(algorithm__optimizer__lr_warmup_steps=5, **{f"{ACTOR}.ppo_epochs": 3}))
    assert steps["train.optimizer.schedule.warmup_steps"] == 5
    assert steps["train.optimizer.schedule.unit"] == "train_step"
    assert steps["train.optimizer.schedule.warmup_ends"] == "start"
    cosine = learn.optimizer(
        values(algorithm__optimizer__warmup_style="cosine", **{f"{ACTOR}.optim.min_lr_ratio": 0.2})
    )
    assert cosine["train.optimizer.schedule.type"] == "cosine"
    assert cosine["train.optimizer.schedule.min_lr_ratio"] == 0.2


def test_the_critic_starts_as_the_policy_unless_it_has_a_folder() -> None:
    same = trainer.critic(values(model__model_path="m", model__critic_model_path="m", trainer__grad_clip=0.3))
    assert "critic.path" not in same
    assert same["critic.optimizer"]["max_grad_norm"] == 0.3
    assert same["critic.optimizer"]["lr"] == 1e-5
    assert trainer.critic(values(model__model_path="m", model__critic_model_path="v"))["critic.path"] == "v"
    over = trainer.critic(values(model__model_path="m", **{f"{CRITIC}.model.override_config": {"a": 1}}))
    assert (over["critic.path"], over["critic.overrides"]) == ("m", {"a": 1})
    assert trainer.critic(values(**{f"{CRITIC}.ppo_epochs": 4}))["critic.update_epochs"] == 4
    with pytest.raises(ConfigError, match="would prevent every change of a value"):
        trainer.critic(values(**{f"{CRITIC}.cliprange_value": 0.0}))


def test_a_mean_that_the_loss_is_not_told_is_a_difference() -> None:
    """Arguments of the loss without loss_agg_mode keep the loss's own mean in Trinity."""
    key = "algorithm.policy_loss_fn_args.*"
    other: dict[str, Json] = {"algorithm__loss_agg_mode": "seq-mean-token-sum"}
    assert losses.leaves_its_own_mean(grpo(**other, **{key: {"clip_range": 0.2}}))
    assert not losses.leaves_its_own_mean(grpo(**other))
    both = {key: {"clip_range": 0.2, "loss_agg_mode": "token-mean"}}
    assert not losses.leaves_its_own_mean(grpo(**other, **both))
    same: dict[str, Json] = {"algorithm__loss_agg_mode": "token-mean"}
    assert not losses.leaves_its_own_mean(grpo(**same, **{key: {"clip_range": 0.2}}))


def test_a_mean_that_is_replaced_by_a_default_is_a_difference() -> None:
    """Trinity writes loss_agg_mode, token-mean if null, over the loss's own arguments where these have it."""
    key, of_gspo = "algorithm.policy_loss_fn_args.*", {"algorithm__algorithm_type": "gspo"}
    assert losses.keeps_its_own_mean(grpo(**of_gspo))
    assert losses.policy_loss(grpo(**of_gspo))["algorithm.loss_agg_mode"] == "seq-mean-token-mean"
    assert not losses.keeps_its_own_mean(grpo(**of_gspo, **{key: {"clip_range": 0.2}}))
    assert not losses.keeps_its_own_mean(grpo(**of_gspo, algorithm__loss_agg_mode="token-mean"))
    assert losses.keeps_its_own_mean(grpo(**{key: {"loss_agg_mode": "seq-mean-token-sum"}}))
    assert not losses.keeps_its_own_mean(grpo())
    assert not losses.keeps_its_own_mean(grpo(**{key: {"loss_agg_mode": "token-mean"}}))


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("decay", [0, 1, 3])
def test_the_weight_of_demonstrations_in_every_step(warmup: int, decay: int) -> None:
    """Trinity's mu_schedule_function: with no steps of decay the valley comes as soon as the warm-up is over."""

    def theirs(step: int) -> float:
        if step < warmup:
            return step / warmup * 0.5
        if step >= warmup + decay:
            return 0.02
        return 0.48 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / decay)) + 0.02

    ours = [cosine(0.5, s, warmup_steps=warmup, valley=0.02, decay_steps=decay) for s in range(1, 10)]
    assert ours == pytest.approx([theirs(step) for step in range(1, 10)])


def test_budgets_of_each_model() -> None:
    """Each holds twice max_model_len = 2 * 30 at least, but for the trainer's own from 0.6.0 on; a critic there is in
    ppo alone."""
    sizes: dict[str, Json] = {"model__max_prompt_tokens": 10, "model__max_response_tokens": 20}
    assert trainer.micro(grpo(**sizes)) == {"train.micro_batch_tokens": 60}
    assert trainer.micro(grpo(**sizes, trainer__max_token_len_per_gpu=500)) == {
        "train.micro_batch_tokens": 500
    }
    assert trainer.micro(grpo(**sizes, trainer__max_token_len_per_gpu=40)) == {"train.micro_batch_tokens": 60}
    later = grpo(**sizes, trainer__max_token_len_per_gpu=40) | {VERSION: "0.6.0"}
    assert trainer.micro(later) == {"train.micro_batch_tokens": 40}
    ref = {f"{REF}.log_prob_max_token_len_per_gpu": 80}
    assert trainer.micro(grpo(**sizes, **ref)) == {
        "train.micro_batch_tokens": 60,
        "train.forward_micro_batch_tokens": 80,
    }
    own = {f"{CRITIC}.ppo_max_token_len_per_gpu": 70}
    assert trainer.micro(grpo(**sizes, **own)) == {"train.micro_batch_tokens": 60}
    assert trainer.micro(values(**sizes, **own, **ref)) == {
        "train.micro_batch_tokens": 60,
        "train.forward_micro_batch_tokens": 70,
        "critic.micro_batch_tokens": 70,
    }


def test_ranks_that_share_a_sequence_have_a_budget_each() -> None:
    sizes: dict[str, Json] = {"model__max_prompt_tokens": 10, "model__max_response_tokens": 20}
    sizes |= {"trainer__max_token_len_per_gpu": 50, "trainer__ulysses_sequence_parallel_size": 2}
    assert trainer.micro(grpo(**sizes)) == {"train.micro_batch_tokens": 100}
    del sizes["trainer__max_token_len_per_gpu"]
    assert trainer.micro(grpo(**sizes)) == {"train.micro_batch_tokens": 60}, "twice the longest, over both"
    sizes |= {"trainer__ulysses_sequence_parallel_size": 1, "trainer__trainer_strategy": "megatron"}
    cp: dict[str, Json] = {f"{ACTOR}.megatron.context_parallel_size": 4}
    assert trainer.micro(grpo(**sizes, **cp)) == {"train.micro_batch_tokens": 240}


def test_micro_batches_by_rollouts() -> None:
    given: dict[str, Json] = {"trainer__use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3}
    assert trainer.micro(grpo(**given)) == {
        "train.micro_batch_rollouts": 3,
        "train.forward_micro_batch_rollouts": 4,
    }
    pairs = values(**given, algorithm__algorithm_type="dpo")
    assert trainer.micro(pairs) == {"train.micro_batch_rollouts": 6, "train.forward_micro_batch_rollouts": 8}
    with_critic = values(**given, **{f"{CRITIC}.forward_micro_batch_size_per_gpu": 2})
    assert trainer.micro(with_critic) == {
        "train.micro_batch_rollouts": 3,
        "train.forward_micro_batch_rollouts": 2,
        "critic.micro_batch_rollouts": 8,
    }


def test_checkpoints() -> None:
    assert trainer.resume(values()) == {"checkpoint.resume": "auto"}
    assert trainer.resume(values(continue_from_checkpoint=False)) == {"checkpoint.resume": "fresh"}
    disable = values(**{f"{VERL_TRAINER}.resume_mode": "disable"})
    assert trainer.resume(disable) == {"checkpoint.resume": "fresh"}
    at = {f"{VERL_TRAINER}.resume_mode": "resume_path", f"{VERL_TRAINER}.resume_from_path": "runs/x/3"}
    assert trainer.resume(values(**at)) == {"checkpoint.resume": "runs/x/3"}
    assert trainer.keep(values()) == {"checkpoint.keep": 5}
    assert trainer.keep(grpo(**{f"{VERL_TRAINER}.max_actor_ckpt_to_keep": None})) == {"checkpoint.keep": None}
    assert trainer.keep(values(**{f"{VERL_TRAINER}.remove_previous_ckpt_in_save": True})) == {
        "checkpoint.keep": 1
    }
    with pytest.raises(NotSupportedYet, match="a checkpoint holds both"):
        trainer.keep(values(**{f"{VERL_TRAINER}.max_actor_ckpt_to_keep": 2}))


@pytest.mark.parametrize(
    ("wanted", "at_end", "every"), [("last", True, 0), ("always", True, 7), ("never", False, 0)]
)
def test_hugging_face_folders(wanted: str, at_end: bool, every: int) -> None:
    given = values(trainer__save_hf_checkpoint=wanted, trainer__save_interval=7)
    assert trainer.export(given) == {"checkpoint.export": at_end, "checkpoint.export_interval": every}


def test_distillation_by_a_divergence_has_its_mixture() -> None:
    jsd: dict[str, Any] = {"algorithm__algorithm_type": "jsd"}
    out = learn.advantage(values(**jsd))
    assert (out["algorithm.advantage.distill_coef"], out["algorithm.advantage.distill_mixture"]) == (1.0, 0.5)
    arguments = "algorithm.advantage_fn_args.*"
    given = learn.advantage(
        values(**jsd, **{arguments: {"lambda_coef": 0.25, "kl_coef": 2.0, "chunk_size": 64}})
    )
    assert given == {
        "algorithm.advantage": "distill",
        "algorithm.advantage.distill_coef": 2.0,
        "algorithm.advantage.distill_mixture": 0.25,
        "algorithm.advantage.distill_estimator": "jsd",
    }
    assert learn.advantage(values(**jsd, **{arguments: {"lambda_coef": 0}})) == {
        "algorithm.advantage": "distill",
        "algorithm.advantage.distill_coef": 1.0,
    }
    with pytest.raises(ConfigError, match="away from the teacher"):
        learn.advantage(values(**jsd, **{arguments: {"lambda_coef": 1}}))
    with pytest.raises(NotSupportedYet, match="of no policy"):
        learn.advantage(values(**jsd, **{arguments: {"temperature": 0.5}}))
    with pytest.raises(ConfigError, match="jsd learns from"):
        run.teacher(values(**jsd))


def test_prompts_of_base_models_are_plain_text() -> None:
    """format_prompt of MathBoxedWorkflow: "System:" + message, then User and Assistant on lines of their own."""
    boxed = {
        f"{TASKSET}.path": "a.jsonl", f"{TASKSET}.default_workflow_type": "math_boxed_workflow",
        f"{TASKSET}.default_reward_fn_type": "math_dapo_reward", f"{TASKSET}.workflow_args": {"use_base": True},
    }  # fmt: skip
    out = data.tasks(grpo(**boxed, **{f"{TASKSET}.format.system_prompt": "Solve it."}))
    assert out["data.train.0.template"] == "System:Solve it.\nUser:\n{prompt}\nAssistant:\n"
    assert not out.keys() & {"data.chat", "data.train.0.system_prompt"}
    asked = data.tasks(grpo(**boxed))["data.train.0.template"]
    assert asked.startswith("System:Reason step by step"), "the workflow's own message"
    none = data.tasks(grpo(**boxed, **{f"{TASKSET}.format.system_prompt": ""}))
    assert none["data.train.0.template"] == "User:\n{prompt}\nAssistant:\n"
    assert judging.rewards(grpo(**boxed)) == {"rewards.math_dapo_reward": {"function": "math"}}
    with pytest.raises(ConfigError, match="reply_prefix: has no effect"):
        data.tasks(grpo(**boxed, **{f"{TASKSET}.format.reply_prefix": "So"}))
    chats: dict[str, Any] = {"path": "b.jsonl", "format": {"system_prompt": "Think."}}
    both = data.tasks(grpo(**boxed, **{"buffer.explorer_input.eval_tasksets": [chats]}))
    assert "data.chat" not in both, "a system message makes a chat"
    with pytest.raises(NotSupportedYet, match="chats without a system message"):
        data.tasks(grpo(**boxed, **{"buffer.explorer_input.eval_tasksets": [{"path": "b.jsonl"}]}))


def test_parts_of_a_checkpoint() -> None:
    key = f"{ACTOR}.checkpoint"
    given = {f"{key}.save_contents": ["model", "hf_model"], f"{key}.load_contents": ["model", "extra"]}
    assert trainer.contents(values(**given)) == {
        "checkpoint.save_contents": ["model"],
        "checkpoint.load_contents": ["model"],
    }
    assert trainer.export(values(**given, trainer__save_interval=3))["checkpoint.export_interval"] == 3
    alone = {f"{key}.load_contents": ["model"]}
    assert trainer.contents(values(**alone))["checkpoint.load_contents"] == ["model"]
    for moving in ({"lr_warmup_steps": 5}, {"warmup_style": "cosine"}, {"lr_warmup_steps_ratio": 0.1}):
        optimizer = {f"algorithm__optimizer__{name}": value for name, value in moving.items()}
        with pytest.raises(NotSupportedYet, match="restarting the learning-rate schedule"):
            trainer.contents(values(**alone, **optimizer))
    with pytest.raises(ConfigError, match="has no model"):
        trainer.contents(values(**{f"{key}.save_contents": ["extra"]}))


def test_run_and_model() -> None:
    assert run.run(values(checkpoint_root_dir="c", project="p", name="n")) == {
        "name": "n",
        "run_dir": "c/p/n",
    }
    over = run.model(
        values(model__model_path="m", model__rope_theta=1e6, **{f"{MODEL}.override_config": {"a": 1}})
    )
    assert over == {"model.path": "m", "model.overrides": {"a": 1, "rope_theta": 1e6}}
    both = values(model__custom_chat_template="{{x}}", model__chat_template_path="t.jinja")
    assert run.chat_template(both) == {"tokenizer.chat_template": "t.jinja"}
    none = values(model__custom_chat_template="None", model__chat_template_path="None")
    assert run.chat_template(none) == {}
    assert run.at_once(grpo(explorer__rollout_model__engine_num=2, algorithm__repeat_times=8)) == {
        "rollout.max_num_seqs": 128,
        "rollout.replicas": 2,
        "rollout.server.options": {"data-parallel-size": 2, "gpu-memory-utilization": 0.9},
    }


def test_weights_go_over_every_so_many_steps() -> None:
    """An evaluation every 50 // 20 * 20 = 40 steps: Trinity evaluates with weights that were just handed over."""
    given = grpo(synchronizer__sync_interval=20, explorer__eval_interval=50)
    assert run.sync_interval(given) == {"rollout.sync_interval": 20}
    assert run.sync_interval(values(algorithm__algorithm_type="sft", synchronizer__sync_interval=20)) == {}
    given[EVALS] = [{"path": "e.jsonl", "default_reward_fn_type": "math_reward"}]
    assert data.evaluation(given | SIZES)["eval.interval"] == 40
    assert "expected one of fixed, dynamic_by_explorer" in refused({"synchronizer.sync_style": "fixd"})


@pytest.mark.parametrize(
    ("mode", "algorithm", "good"),
    [
        ("both", "grpo", {"mode": "both"}),
        ("train", "grpo", {"mode": "train"}),
        ("explore", "grpo", {"mode": "explore"}),
        ("bench", "grpo", {"mode": "eval"}),
        ("train", "sft", {}),
        ("both", "dpo", None),
        ("explore", "sft", None),
        ("bench", "dpo", None),
        ("serve", "grpo", None),
    ],
)
def test_modes(mode: str, algorithm: str, good: dict[str, Json] | None) -> None:
    given = values(mode=mode, algorithm__algorithm_type=algorithm)
    if good is not None:
        assert data.mode(given) == good
    else:
        with pytest.raises(ConfigError, match=r"^mode: "):
            data.mode(given)


# ---------------------------------------------------------------- data and rewards


EVALS = "buffer.explorer_input.eval_tasksets"
SIZES: dict[str, Json] = {"model.max_prompt_tokens": 10, "model.max_response_tokens": 20}


def test_a_path_is_a_file_or_a_folder_with_splits() -> None:
    assert data.rows_of({"path": "a/b.jsonl"}, "x", at="s") == {"s.path": "a/b.jsonl"}
    folder = data.rows_of({"path": "org/name", "split": "test", "subset_name": "main"}, "x", at="s")
    assert folder == {"s.path": "org/name", "s.split": "test", "s.subset": "main"}
    for wrong in ({"split": "test"}, {"subset_name": "main"}):
        with pytest.raises(ConfigError, match="whose only split is train"):
            data.rows_of({"path": "b.parquet", **wrong}, "x", at="s")


def test_orders_of_tasks() -> None:
    """Trinity's easy2hard serves the largest feature first."""
    at, path = f"{TASKSET}.task_selector", {f"{TASKSET}.path": "t.jsonl"}
    assert data.tasks(grpo(**path))["data.order"] == "sequential"
    shuffled = data.tasks(grpo(**path, **{f"{at}.selector_type": "shuffle", f"{at}.seed": 5}))
    assert (shuffled["data.order"], shuffled["data.seed"]) == ("shuffle", 5)
    easy = grpo(**path, **{f"{at}.selector_type": "offline_easy2hard", f"{at}.feature_keys": ["rate"]})
    told = data.tasks(easy)
    assert (told["data.order"], told["data.train.0.difficulty"]) == ("hard_first", "rate")
    random = data.tasks(grpo(**path, buffer__batch_size=6, **{f"{at}.selector_type": "random"}))
    assert (random["data.order"], random["data.order.distinct"], random["data.seed"]) == ("random", 6, 42)
    with pytest.raises(ConfigError, match=r"kwargs.m: has no effect with selector_type: random"):
        data.tasks(grpo(**path, **{f"{at}.selector_type": "random", f"{at}.kwargs.*": {"m": 3}}))


def test_tasks_chosen_by_how_they_went() -> None:
    at = f"{TASKSET}.task_selector"
    rates = {f"{at}.selector_type": "difficulty_based", f"{at}.feature_keys": ["weak", "strong"]}
    told = data.tasks(
        grpo(**{f"{TASKSET}.path": "t.jsonl"}, **rates, **{f"{at}.kwargs.*": {"m": 8, "tau": 0}})
    )
    assert {key.removeprefix("data.order."): value for key, value in told.items() if "data.order" in key} == {
        "data.order": "adaptive",
        "target": 1.0,
        "temperature": 0,
        "thompson": False,
        "decay": 0.2,
        "evidence": 8,
        "prior_weight": 0.2,
        "prior_adapts": False,
        "columns": ["weak", "strong"],
    }
    with pytest.raises(ConfigError, match=r"kwargs.tua: no such argument; did you mean 'tau'"):
        data.tasks(grpo(**{f"{TASKSET}.path": "t.jsonl"}, **rates, **{f"{at}.kwargs.*": {"tua": 1}}))
    with pytest.raises(ConfigError, match=r"feature_keys: got \[\"weak\"\], expected two columns"):
        data.tasks(grpo(**{f"{TASKSET}.path": "t.jsonl"}, **rates | {f"{at}.feature_keys": ["weak"]}))
    calculator = {"data_processor.experience_pipeline.operators": [{"name": "pass_rate_calculator"}]}
    assert learn.operators(grpo(**rates, **calculator)) == {}
    with pytest.raises(NotSupportedYet, match="pass_rate_calculator is coming"):
        learn.operators(grpo(**calculator))


def test_files_of_replies() -> None:
    path = {f"{EXPERIENCES}.path": "e.jsonl"}
    talk = data.demonstrations(values(algorithm__algorithm_type="sft", **path))
    assert (talk["data.train.0.messages"], talk["data.learn_turns"]) == ("message", "last")
    every = {f"{EXPERIENCES}.format.enable_concatenated_multi_turn": True}
    assert (
        data.demonstrations(values(algorithm__algorithm_type="sft", **path, **every))["data.learn_turns"]
        == "all"
    )
    pairs = data.demonstrations(values(algorithm__algorithm_type="dpo", **path))
    columns = {key: pairs[f"data.train.0.{key}"] for key in ("prompt", "response", "rejected")}
    assert columns == {"prompt": "message", "response": "chosen", "rejected": "rejected"}
    plain = {
        f"{EXPERIENCES}.format.prompt_type": "plaintext",
        f"{EXPERIENCES}.format.system_prompt_key": "about",
    }
    told = data.demonstrations(values(algorithm__algorithm_type="sft", **path, **plain))
    assert told["data.train.0.prompt"] == "prompt"
    assert told["data.train.0.system_prompt_column"] == "about"
    limits = data.token_limits(values(algorithm__algorithm_type="sft", **SIZES))
    assert limits["data.max_total_tokens"] == limits["data.max_prompt_tokens"] == 30


def test_the_queue_is_recorded() -> None:
    assert waiting.queue(grpo(**{f"{EXPERIENCES}.path": "sqlite:///gsm8k.db"})) == {"dirs.rollouts": "gsm8k"}
    with pytest.raises(NotSupportedYet, match="sql is coming"):
        waiting.queue(grpo(**{f"{EXPERIENCES}.storage_type": "sql"}))


def test_rewards_by_name_or_file() -> None:
    given = grpo(buffer__explorer_input__default_reward_fn_type="math_boxed_reward")
    assert judging.rewards(given) == {
        "rewards.math_boxed_reward": {"function": "whet.rewards.trinity:math_boxed_reward"}
    }
    own = {f"{TASKSET}.default_reward_fn_type": "my/games.py:countdown"}
    assert judging.rewards(grpo(**own)) == {"rewards.countdown": {"function": "my/games.py:countdown"}}
    workflow = grpo(buffer__explorer_input__default_workflow_type="async_math_boxed_workflow")
    assert judging.rewards(workflow) == judging.rewards(given)
    steps = grpo(
        **{
            f"{INPUT}.default_workflow_type": "math_boxed_workflow",
            f"{TASKSET}.workflow_args": {"with_think": True},
        }
    )
    assert judging.rewards(steps)["rewards.math_boxed_reward"]["arguments"] == {"with_think": True}
    with pytest.raises(NotSupportedYet, match="rm_gallery_reward, a reward model"):
        judging.rewards(grpo(buffer__explorer_input__default_reward_fn_type="rm_gallery_reward"))
    with pytest.raises(ConfigError, match="did you mean math_reward"):
        judging.rewards(grpo(buffer__explorer_input__default_reward_fn_type="math_rewrd"))
    for workflow, why in (
        (
            "RAFT_reflect_alfworld_workflow",
            "it trains on replies after another prompt.*RAFT_alfworld_workflow",
        ),
        ("TCOD_b2f_scienceworld_workflow", "it is code over Trinity-RFT's own interfaces"),
        ("intercode_sql_workflow", "it runs SQL in a database server in Docker"),
        ("async_math_rm_workflow", "its reward is a grader of OpenJudge.*function: judge"),
        (
            "math_trainable_ruler_workflow",
            "the policy judges the replies of a whole group.*math_ruler_workflow",
        ),
        ("agentscope_react_workflow", "it is an agent of AgentScope.*whet.envs.tool_env:tools"),
        ("my_workflow", "it is code over Trinity-RFT's own interfaces"),
    ):
        with pytest.raises(
            NotSupportedYet, match=rf"{workflow} is not read: {why}.*whet\.rollout\.env\.make"
        ):
            judging.rewards(grpo(buffer__explorer_input__default_workflow_type=workflow))
    with pytest.raises(ConfigError, match="must be given"):
        judging.rewards(grpo())


def test_a_penalty_for_long_replies_is_a_reward_of_its_own() -> None:
    args = {
        "enable_overlong_penalty": True,
        "penalty_factor": 0.5,
        "max_response_length": 100,
        "cache_length": 20,
    }
    at = {f"{TASKSET}.default_reward_fn_type": "math_dapo_reward", f"{TASKSET}.reward_fn_args": args}
    assert judging.rewards(grpo(**at)) == {
        "rewards.math_dapo_reward": {"function": "math"},
        "rewards.overlong": {
            "function": "overlong",
            "weight": 0.5,
            "arguments": {"max_tokens": 100, "buffer": 20},
        },
    }


def test_evaluation_tasksets_are_asked_each_in_its_own_way() -> None:
    common: dict[str, Json] = {
        "default_reward_fn_type": "accuracy_reward",
        "rollout_args": {"temperature": 0.1},
    }
    sets = [
        {"path": "a.jsonl", "repeat_times": 4, **common},
        {"name": "hard", "path": "b.jsonl", "repeat_times": 2, **common, "rollout_args": {"top_k": 7}},
    ]
    given = grpo(
        buffer__explorer_input__default_reward_fn_type="my.py:f",
        buffer__explorer_input__eval_tasksets=sets,
        explorer__eval_interval=7,
        model__temperature=0.7,
    )
    told = data.evaluation(given | SIZES)
    assert (told["eval.interval"], told["eval.samples"], told["eval.sampling.temperature"]) == (7, 4, 0.1)
    assert [told[f"data.eval.{n}.name"] for n in (0, 1)] == ["eval_taskset_0", "hard"]
    assert told["data.eval.0.answer"] == "response"
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": 7, "max_tokens": 20}
    assert told["eval.sources"] == {"hard": {"samples": 2, "sampling": sampling}}
    judged = judging.rewards(given)
    assert judged["rewards.f"] == {"function": "my.py:f"}
    assert judged["rewards.accuracy_reward"] == {"function": "math", "weight": 0.0}
    assert judged["eval.reward"] == {"accuracy_reward": 1.0}
    assert judged["data.train.0.rewards"] == ["f"]
    assert judged["data.eval.1.rewards"] == ["accuracy_reward"]


# ---------------------------------------------------------------- trackers and the teacher


def test_trackers_and_their_arguments() -> None:
    wandb = values(
        monitor__monitor_type="wandb", monitor__monitor_args__base_url="http://here:8080", group="g"
    )
    assert run.monitor(wandb) == {
        "track.trackers": ["console", "jsonl", "wandb"],
        "track.project": "Trinity-RFT",
        "track.group": "g",
        "track.arguments.wandb.settings.base_url": "http://here:8080",
    }
    mlflow = run.monitor(values(monitor__monitor_type="mlflow"))
    assert mlflow["track.arguments.mlflow.tracking_uri"] == "http://localhost:5000"
    lab = run.monitor(values(monitor__monitor_type="swanlab", **{"monitor.monitor_args.*": {"tags": ["a"]}}))
    assert lab["track.tags"] == ["a"]
    with pytest.raises(ConfigError, match="tensorboard takes no such argument"):
        run.monitor(values(monitor__monitor_args__base_url="http://here"))
    with pytest.raises(ConfigError, match="set WANDB_API_KEY") as refused:
        run.secrets(values(monitor__monitor_args__api_key="hush-hush"))
    assert "hush" not in str(refused.value)


def test_the_teacher_is_the_first_auxiliary_model() -> None:
    models: list[Json] = [{"model_path": "big", "tensor_parallel_size": 2}]
    given = values(algorithm__algorithm_type="on_policy_distill", explorer__auxiliary_models=models)
    assert run.teacher(given) == {"reference.path": "big"}
    with pytest.raises(ConfigError, match="must be given"):
        run.teacher(values(algorithm__algorithm_type="on_policy_distill"))
    with pytest.raises(NotSupportedYet, match="models beside the policy"):
        run.teacher(grpo(explorer__auxiliary_models=models))
    assert run.environment(values(explorer__env_vars={"A": 1})) == {"reward_workers.env": {"A": "1"}}


def test_another_model_judges() -> None:
    """RULER's reward is the judge's; the function is only measured. A rubric is in the row."""
    models: list[Json] = [
        {"model_path": "big", "max_model_len": 16384, "max_response_tokens": 2048, "enable_thinking": False}
    ]
    ruler = {"buffer__explorer_input__taskset__default_workflow_type": "math_ruler_workflow"}
    found = judging.rewards(grpo(explorer__auxiliary_models=models, **ruler))
    (measured,) = [reward for key, reward in found.items() if key not in ("rewards.judge", "eval.reward")]
    assert measured["weight"] == 0.0
    judge = found["rewards.judge"]
    assert (judge["function"], judge["model"]) == ("ruler", {"path": "big", "max_tokens": 16384})
    assert {k: v for k, v in judge["arguments"].items() if k != "question"} == {
        "temperature": 1.0,
        "unread": 0.0,
        "max_tokens": 2048,
        "body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    assert run.teacher(grpo(explorer__auxiliary_models=models, **ruler)) == {}
    with pytest.raises(NotSupportedYet, match="models beside the policy"):
        run.teacher(grpo(explorer__auxiliary_models=models * 2, **ruler))
    with pytest.raises(ConfigError, match=r"auxiliary_models\[0\]\.model_path: must be given"):
        judging.rewards(grpo(**ruler))


# ---------------------------------------------------------------- stages


def small(**more: Json) -> dict[str, Json]:
    """A file of the sizes below, as a tree."""
    return {
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-2}},
        "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 5},
        "buffer": {
            "batch_size": 8,
            "total_steps": 30,
            "explorer_input": {
                "taskset": {"path": "words.jsonl", "format": {"response_key": "answer"}},
                "default_reward_fn_type": "letters.py:share",
            },
        },
        **more,
    }


@pytest.mark.parametrize("name", [None, ["a"], True])
def test_the_name_of_a_run_is_a_text(name: Json) -> None:
    for key in ("project", "name"):
        (problem,) = translated(small(**{key: name})).problems
        assert problem[1].startswith(f"{key}: got ")
    assert translated(small(name=5, project=1.5)).tree["run_dir"] == "./checkpoints/1.5/5"


def test_a_stage_inherits_key_by_key() -> None:
    form = {"prompt_type": "plaintext"}
    buffer = {
        "train_batch_size": 16,
        "trainer_input": {"experience_buffer": {"path": "sft.jsonl", "format": form}},
    }
    sft = {"stage_name": "sft", "mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer": buffer}
    done = translated(small(stages=[sft, {"stage_name": "rl", "algorithm": {"repeat_times": 2}}]))
    assert not done.problems
    first, second = done.tree["stages"]
    assert first["name"] == "sft"
    assert first["algorithm"]["name"] == "sft"
    assert first["train"]["tasks_per_step"] == 16
    assert first["train"]["steps"] == 30
    assert first["train"]["optimizer"]["lr"] == 1e-2, (
        "the global algorithm.optimizer, though the stage has an algorithm"
    )
    assert first["data"]["train"][0]["path"] == "sft.jsonl"
    assert second["algorithm"]["name"] == "grpo"
    assert second["rollout"]["group_size"] == 2
    assert second["train"]["tasks_per_step"] == 8
    assert "algorithm" not in done.tree
    assert done.tree["model"] == {"path": "m"}


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        (["grpo"], 'stages[].algorithm: got ["grpo"], expected a section'),
        ("grpo", 'stages[].algorithm: got "grpo", expected a section'),
        ({"algorithm_type": ["grpo"]}, "stages[0].algorithm.algorithm_type: \"['grpo']\" is not known"),
        ({"algorithm_type": {"name": "grpo"}}, "stages[0].algorithm.algorithm_type.name: unknown key"),
    ],
)
def test_a_stage_with_an_algorithm_that_is_none_is_refused(algorithm: Json, told: str) -> None:
    (problem,) = translated(small(stages=[{"stage_name": "a", "algorithm": algorithm}])).problems
    assert problem[1].startswith(told)


def test_a_stage_may_not_change_what_is_one_for_all() -> None:
    stages = [{"stage_name": "a"}, {"stage_name": "b", "trainer": {"save_interval": 5}}]
    (problem,) = translated(small(stages=stages)).problems
    assert "stages[1]: it asks for checkpoint.interval=5" in problem[1]
    (problem,) = translated(small(stages=[{"stage_name": "a", "buffer": {"batchsize": 5}}])).problems
    assert "did you mean stages[].buffer.batch_size" in problem[1]
    (problem,) = translated(small(stages=[{"mode": "train"}])).problems
    assert 'stages[0]: it asks for mode="train", which is one for all' in problem[1]
    assert "stages[0]: stage_name: must be given" in problem[1]
    tree = small(trainer={"trainer_config": checkpoint(async_save=True)})
    off = {"trainer_config": checkpoint(async_save=False)}
    plain = [{"stage_name": "a", "trainer": {"save_interval": 0}}, {"stage_name": "b"}]
    assert not translated({**tree, "stages": plain}).problems
    stages = [{"stage_name": "a", "trainer": off}, {"stage_name": "b"}]
    (problem,) = translated({**tree, "stages": stages}).problems
    assert "stages[0]: it asks for the default of checkpoint.async_save, which is one for all" in problem[1]


def test_what_is_wrong_in_a_stage_is_told_once_with_its_place_there() -> None:
    """A global key of the same name is not blamed, and where it is at fault itself, the stage is not."""
    stages = [
        {"stage_name": "a", "trainer": {"trainer_type": "tinker"}},
        {"stage_name": "b", "algorithm": {"algorithm_type": "grpo"}},
    ]
    tree, places = small(stages=stages), {("algorithm", "algorithm_type"): "f.yaml:3"}
    places |= {("stages", 0, "trainer", "trainer_type"): "f.yaml:14"}
    places |= {("stages", 1, "algorithm", "algorithm_type"): "f.yaml:17"}
    of = dialect("trinity")
    ((place, said),) = translate(tree, of, origins=places).unbuilt
    assert (place, said.partition(": ")[0]) == ("f.yaml:14", "stages[0].trainer.trainer_type")
    assert said.count("training by a remote service") == 1
    stages[1]["algorithm"] = {"algorithm_type": "nope"}
    ((place, said),) = translate(tree, of, origins=places).problems
    assert place == "f.yaml:17"
    assert said.startswith("stages[1].algorithm.algorithm_type: 'nope' is not known")
    stages[1:], tree["algorithm"] = [], {"algorithm_type": "nope"}
    ((place, said),) = translate(tree, of, origins=places).problems
    assert place == "f.yaml:3"
    assert said.startswith("algorithm.algorithm_type: 'nope' is not known")
    assert "stages" not in said
    stages[0] = {"stage_name": "a", "algorithm": {"algorithm_type": "sft"}}
    _, (_, said) = translate(tree, of, origins=places).problems
    assert said.startswith("stages[0]: mode: sft learns from a file")
    assert "one for all" not in said, "what the global file says of it is not known"


def test_the_engine_of_stages_stands_over_them() -> None:
    """One engine serves the whole run, so its keys are natively those of no stage; a stage that reads a file says
    nothing of them."""
    buffer = {"train_batch_size": 16, "trainer_input": {"experience_buffer": {"path": "sft.jsonl"}}}
    sft: dict[str, Json] = {"stage_name": "sft", "mode": "train", "buffer": buffer}
    sft |= {"algorithm": {"algorithm_type": "sft"}}
    stages = [sft, {"stage_name": "a"}, {"stage_name": "b"}]
    engines = {"rollout_model": {"engine_num": 2}}
    made = translated(small(explorer=engines, stages=stages))
    assert not made.problems
    assert made.tree["rollout"]["replicas"] == 2
    assert not [stage for stage in made.tree["stages"] if "replicas" in stage["rollout"]]
    served = translated(small(explorer={"rollout_model": {"extra_engine_args": {"x": 1}}}, stages=stages))
    assert served.tree["rollout"]["engine"] == "vllm"
    assert served.tree["rollout"]["server"]["options"]["x"] == 1
    stages[1] = {"stage_name": "a", "explorer": {"rollout_model": {"engine_num": 4}}}
    other = translated(small(explorer=engines, stages=stages))
    ((_, said),) = other.unbuilt
    assert "stages[2]: it asks for rollout.replicas=2, a stage before for 4" in said
    stages[1] = {"stage_name": "a", "explorer": {"rollout_model": {"tensor_parallel_size": 4}}}
    embedded = translated(small(explorer=engines, stages=stages))
    assert (embedded.problems, embedded.unbuilt) == ((), ()), "only servers have the size"


def checkpoint(**given: Json) -> dict[str, Json]:
    """Keys of the policy's checkpoints, as a tree of the veRL section."""
    return {"actor_rollout_ref": {"actor": {"checkpoint": given}}}


def test_a_stage_with_another_algorithm_does_not_inherit_its_functions() -> None:
    tree = small()
    tree["algorithm"] |= {"advantage_fn": "opmd", "kl_loss_fn_args": {"kl_coef": 0.5}}
    ppo = {"stage_name": "ppo", "algorithm": {"algorithm_type": "ppo"}}
    done = translated({**tree, "stages": [{"stage_name": "grpo"}, ppo]})
    assert not done.problems
    first, second = done.tree["stages"]
    assert first["algorithm"]["advantage"] == {"name": "opmd", "opmd_baseline": "mean"}
    assert first["algorithm"]["kl"]["coef"] == 0.5
    assert second["algorithm"]["kl"]["coef"] == 0.001
    assert second["critic"]["optimizer"]["lr"] == 1e-5
    assert second["train"]["optimizer"]["lr"] == 1e-2


# ---------------------------------------------------------------- whole files


def test_the_documents_blocks_load_and_say_what_is_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 256 experiences do not divide among 8 - 1 - 1 GPUs, it pairs grpo with the advantage of ppo,
    which needs a critic, and it has a key of wandb in it."""
    for name in ("MODEL_PATH", "TRINITY_TASKSET_PATH", "TRINITY_SFT_DATASET_PATH", "TRINITY_DATASET_PATH"):
        monkeypatch.setenv(name, f"some/{name.lower()}")
    whole = parse((FILES / "trinity_document.yaml").read_text()).tree
    assert isinstance(whole, dict)
    stages = whole.pop("stages")
    one = translated(whole)
    said = " ".join(text for _, text in (*one.problems, *one.unbuilt))
    assert "unknown key" not in said
    assert "your_api_key" not in said, "secrets are not shown"
    assert heads(one.problems) == {
        "algorithm.advantage_fn",
        "buffer.train_batch_size",
        "monitor.monitor_args.api_key",
    }
    built = {key for key in heads(one.unbuilt) if not key.startswith(("service.", "data_processor."))}
    assert built == {"explorer.auxiliary_models"}
    *_, (_, of_stages) = translated({**whole, "stages": stages}).problems
    first, second = (set(re.findall(rf"stages\[{n}\]: ([\w.]+): ", of_stages)) for n in (0, 1))
    assert not first
    assert second == {"algorithm.advantage_fn", "buffer.train_batch_size", "explorer.auxiliary_models"}


def heads(said: Iterable[tuple[str, str]]) -> set[str]:
    """The keys that are spoken of."""
    return {text.partition(":")[0] for _, text in said}


def test_a_default_that_a_file_gives_is_no_other_value() -> None:
    """Trinity's own keys count over the veRL section's, so a file with both is not read as that section alone."""

    def read(own: dict[str, Json], verl: dict[str, Json], **more: Json) -> Translation:
        section = {"actor_rollout_ref": {"actor": verl}}
        tree = small(trainer={"trainer_config": section, **more})
        tree["algorithm"]["optimizer"] = own
        return translated(tree)

    (problem,) = read({"lr": 1e-6}, {"optim": {"lr": 1e-5}}).problems
    assert (
        "optimizer.lr: 1e-06, trainer.trainer_config.actor_rollout_ref.actor.optim.lr: 1e-05: " in problem[1]
    )
    (problem,) = read({}, {"grad_clip": 0.5}, grad_clip=1.0).problems
    assert problem[1].startswith("trainer.grad_clip: 1.0, ")
    assert read({}, {"optim": {"lr": 1e-5}}).tree["train"]["optimizer"]["lr"] == 1e-5
    assert read({"lr": 1e-5}, {"optim": {"lr": 1e-6}}).tree["train"]["optimizer"]["lr"] == 1e-5, "copied"


def test_the_documents_verl_section_changes_nothing() -> None:
    tree = parse((FILES / "trinity_verl_section.yaml").read_text()).tree
    plain = translated(small())
    assert not plain.problems
    whole = translated(small(trainer={"trainer_config": tree}))
    assert not whole.problems
    assert strip(whole.tree) == strip(plain.tree)


def strip(tree: dict[str, Any]) -> dict[str, Any]:
    """A translated tree as the schema fills it."""
    from whet.config.schema import Config

    return Config.model_validate_json(json.dumps(tree)).model_dump()


# ---------------------------------------------------------------- running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trinity") / "model"
    export_tiny(path, "abcde>")
    return path


def export_tiny(path: Path, characters: str) -> None:
    """A tiny Hugging Face model with a tokenizer of these characters and a plain chat template."""
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, texts=[characters])
    tokenizer.chat_template = PLAIN_CHAT
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    model = build(
        ModelConfig(scratch=sizes),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )
    export(model, tokenizer, path)


def metrics(run_dir: Path) -> list[dict[str, Json]]:
    return whet.Result(run_dir, finished=True).metrics


@pytest.mark.sweep
def test_a_trinity_file_learns_as_the_native_file_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_PATH", str(folder))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.chdir(HERE.parent)
    whet.train(FILES / "trinity_letters.yaml", machine={"threads": 1}, track={"trackers": ["jsonl"]})
    whet.train(
        FILES / "trinity_letters.native.yaml",
        run_dir=str(tmp_path / "native"),
        model={"path": str(folder)},
        machine={"threads": 1},
    )
    foreign, native = (metrics(tmp_path / at) for at in ("Trinity-RFT/letters", "native"))
    assert foreign == native
    rewards = [line["reward/mean"] for line in foreign if "reward/mean" in line]
    assert sum(rewards[:3]) / 3 < 0.3, "a new model must not know it yet"
    assert sum(rewards[-3:]) / 3 > 0.7


def test_stages_run_one_after_the_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_PATH", str(folder))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.chdir(HERE.parent)
    whet.train(FILES / "trinity_stages.yaml", machine={"threads": 1}, track={"trackers": ["jsonl"]})
    lines = metrics(tmp_path / "Trinity-RFT/two_stages")
    by_stage = {name: [line for line in lines if line["stage"] == name] for name in ("sft_warmup", "rft")}
    assert [len(found) for found in by_stage.values()] == [6, 4]
    assert by_stage["sft_warmup"][-1]["train/loss"] < by_stage["sft_warmup"][0]["train/loss"]


def rows(path: Path, made: Iterable[Json]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def trained(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The training steps of one of the files in Trinity's style."""
    monkeypatch.setenv("MODEL_PATH", str(folder))
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.chdir(HERE.parent)
    whet.train(FILES / f"trinity_{name}.yaml", machine={"threads": 1}, track={"trackers": ["jsonl"]})
    return [line for line in metrics(tmp_path / "letters" / name) if "train/loss" in line]


def words() -> list[str]:
    return [a + b + c for a in "bcde" for b in "bcde" for c in "bc"]


def test_a_ppo_file_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [{"prompt": word, "answer": word} for word in words()]
    monkeypatch.setenv("TRINITY_TASKSET_PATH", rows(tmp_path / "tasks.jsonl", tasks))
    lines = trained("ppo", folder, tmp_path, monkeypatch)
    assert len(lines) == 12 - 1, "the policy learns from step 2 on"
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert lines[-1]["critic/loss"] > 0


def test_an_sft_file_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(role: str, content: str) -> Json:
        return {"role": role, "content": content}

    talks = [
        {"messages": [turn("user", w), turn("assistant", w[::-1]), turn("user", "a"), turn("assistant", w)]}
        for w in words()
    ]
    monkeypatch.setenv("TRINITY_TASKSET_PATH", rows(tmp_path / "talks.jsonl", talks))
    lines = trained("sft", folder, tmp_path, monkeypatch)
    assert len(lines) == 4 * 32 // 8
    assert lines[-1]["train/loss"] < 0.7 * lines[0]["train/loss"]
    assert (tmp_path / "letters/sft/export").is_dir()


def test_a_dpo_file_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [{"prompt": word, "chosen": "aaa", "rejected": word} for word in words()]
    monkeypatch.setenv("TRINITY_TASKSET_PATH", rows(tmp_path / "pairs.jsonl", pairs))
    lines = trained("dpo", folder, tmp_path, monkeypatch)
    assert len(lines) == 12, "the smaller of 12 steps and 6 epochs of 4"
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-4), "policy and reference are the same"
    assert lines[-1]["train/loss"] < 0.5 * lines[0]["train/loss"]


def test_a_chord_file_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [{"prompt": word, "answer": word} for word in words()]
    talks = [
        {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": "aaaa"}]}
        for w in words()
    ]
    monkeypatch.setenv("TRINITY_TASKSET_PATH", rows(tmp_path / "tasks.jsonl", tasks))
    monkeypatch.setenv("TRINITY_SFT_DATASET_PATH", rows(tmp_path / "talks.jsonl", talks))
    lines = trained("chord", folder, tmp_path, monkeypatch)
    assert len(lines) == 10
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_the_example_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE.parent)
    (plan,) = plans(load("examples/from_trinity.yaml"))
    assert (plan.tasks_per_step, plan.group_size) == (16, 8)


@pytest.mark.parametrize(
    ("name", "more", "has", "template"),
    [
        ("simple_workflow", {}, None, None),
        ("math_workflow", {}, "<answer>", None),
        ("math_workflow", {"default_reward_fn_type": "accuracy_reward"}, None, None),
        ("math_workflow", {"format.system_prompt": "Mine."}, "Mine.", None),
        ("math_workflow", {"format.system_prompt": ""}, None, None),
        ("async_math_boxed_workflow", {}, "boxed", None),
        ("math_boxed_workflow", {"workflow_args": {"with_think": True}}, "<think>", None),
        ("math_eval_workflow", {"format.system_prompt": "Mine."}, "assistant", "boxed"),
    ],
)
def test_workflows_of_mathematics_ask_for_what_their_reward_looks_for(
    name: str, more: dict[str, Json], has: str | None, template: str | None
) -> None:
    given = {f"{TASKSET}.path": "a.jsonl", f"{TASKSET}.default_workflow_type": name}
    if name == "simple_workflow":
        given[f"{TASKSET}.default_reward_fn_type"] = "accuracy_reward"
    out = data.tasks(grpo(**given, **{f"{TASKSET}.{key}": value for key, value in more.items()}))
    message, around = out.get("data.train.0.system_prompt"), out.get("data.train.0.template")
    for text, part in ((message, has), (around, template)):
        assert text is None if part is None else part in str(text)


def test_the_evaluation_workflow_of_mathematics_samples_in_its_own_way() -> None:
    """Temperature 0.6, top_p 0.8, one reply a task, whatever the file says."""
    own = {"path": "b.jsonl", "default_workflow_type": "math_eval_workflow", "repeat_times": 4}
    own["rollout_args"] = {"temperature": 0.1}
    out = data.evaluation(grpo(model__max_model_len=64, **{"buffer.explorer_input.eval_tasksets": [own]}))
    assert out["eval.samples"] == 1
    assert (out["eval.sampling.temperature"], out["eval.sampling.top_p"]) == (0.6, 0.8)


def test_truncated_responses_are_masked() -> None:
    masked = {"data_processor.experience_pipeline.operators": [{"name": "mask_response_truncated"}]}
    made = translated(tree_of(masked))
    config = Config.model_validate_json(json.dumps(made.tree))
    assert config.algorithm.groups.truncated == "mask"
