"""verl's keys: every one has a status, its own rules hold, and values are what they are there."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asked import asked
from sections import section
from whet.config import schema
from whet.config.keys import lookup
from whet.config.load import load
from whet.config.parse import parse
from whet.config.recipes import resolve
from whet.config.schedules import factor
from whet.config.tree import merge, path_of
from whet.dialects.kinds import understood
from whet.dialects.row import Values, aliases
from whet.dialects.tables import dialect, table
from whet.dialects.translate import translate
from whet.dialects.verl import algorithm, data, loop, optimizer, roles, sft, sizes
from whet.dialects.versions import VERSION
from whet.rewards.verl import compute_score
from whet.types import ConfigError, Json, Task

algorithm, data, loop, optimizer, roles, sft, sizes = map(
    asked, (algorithm, data, loop, optimizer, roles, sft, sizes)
)

HERE = Path(__file__).parent / "dialects"
TABLES = {name: table(name) for name in ("verl-ppo", "verl-megatron-optim", "verl-eval", "verl-sft")}
ROWS = {row.key: row for row in table("verl-ppo")}
SFT = {row.key: row for row in table("verl-sft")}
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


def document(name: str) -> dict[str, str]:
    """Keys of the document with their defaults, as text."""
    lines = (HERE / f"{name}.keys.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)


def values(given: dict[str, Json] | None = None, table: str = "verl-ppo") -> Values:
    """All values of a file that sets these, references in the defaults resolved."""
    rows = {row.key: row for row in dialect(table).rows}
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
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,  # as ppo_trainer.yaml has it in every release
    "trainer.test_freq": -1,  # the same
}
"""Defaults that are not the document's, as the rows say."""


@pytest.mark.parametrize(
    ("name", "count"), [("verl-ppo", 200), ("verl-megatron-optim", 30), ("verl-eval", 7), ("verl-sft", 20)]
)
def test_every_key_of_the_document_has_a_row_with_its_default(name: str, count: int) -> None:
    wanted, rows = document(name), {row.key: row for row in TABLES[name]}
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
        name: Counter(row.status for row in rows if row.key in document(name))
        for name, rows in TABLES.items()
    }
    few = sum(c["inert"] + c["refused"] for c in counts.values())
    assert few < 0.05 * 257
    assert sum(row.status in ("inert", "refused") for row in table("verl-ppo")) < 0.05 * len(ROWS)
    assert counts["verl-eval"] == {"mapped": 3, "translated": 4}
    assert counts["verl-ppo"]["translated"] + counts["verl-ppo"]["mapped"] > 120
    assert counts["verl-megatron-optim"]["coming"] == 0
    assert all(row.what for rows in TABLES.values() for row in rows if row.status != "mapped")


def test_native_keys_exist_and_aliases_lead_to_rows() -> None:
    for row in (row for rows in TABLES.values() for row in rows):
        for native in row.native if row.status in ("mapped", "translated") else ():
            assert lookup(path_of(native, ())) is not None, (row.key, native)
    other = aliases("verl", ("ppo", "megatron-optim", "eval", "sft", "generation"))
    keys = [key.removesuffix("*") for key in ROWS.keys() | SFT.keys()]
    for new, _ in other.values():  # a key, a section, or inside an open one
        assert any(
            key == new or key.startswith(f"{new}.") or (key[-1] == "." and new.startswith(key))
            for key in keys
        ), new
    assert not other.keys() & ROWS.keys()


# ---------------------------------------------------------------- batch sizes

SMALL: dict[str, Json] = {
    "data.train_batch_size": 8, A + "ppo_mini_batch_size": 4, R + "n": 4, "trainer.n_gpus_per_node": 2,
    A + "ppo_micro_batch_size_per_gpu": 4, "algorithm.adv_estimator": "grpo",
}  # fmt: skip


def test_batches_by_hand() -> None:
    # 8 prompts in two mini batches of 4; 4 * 4 responses on 2 ranks are 8 each, two passes of 4
    assert parts_batches(SMALL) == {
        "train.tasks_per_step": 8,
        "train.minibatches": 2,
        "train.update_epochs": 1,
    }
    assert parts_batches(SMALL | {A + "ppo_epochs": 3})["train.update_epochs"] == 3


def parts_batches(given: dict[str, Json]) -> Any:
    return sizes.batches(values(given))


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
    assert said in refusal(sizes.batches, SMALL | given)


def test_without_a_filter_a_step_has_all_prompts_of_a_generation() -> None:
    """verl's dataloader has batches of gen_batch_size; DAPO's filter alone takes train_batch_size of them."""
    given: dict[str, Json] = {"data.train_batch_size": 256, "data.gen_batch_size": 512}

    def found(**more: Json) -> tuple[Json, ...]:
        made = sizes.batches(values(given | more))
        return made["train.tasks_per_step"], made["train.minibatches"]

    assert found() == (512, 2), "ppo_mini_batch_size=256"
    assert found(**{VERSION: "0.8.0"}) == found(**{VERSION: "0.9.0", "trainer.use_v1": False}) == (512, 2)
    assert found(**{VERSION: "0.9.0"}) == found(**{"algorithm.filter_groups.enable": True}) == (256, 1)
    assert found(**{"data.gen_batch_size": None}) == (256, 1)
    more = {"data.gen_batch_size": 384}
    assert "must divide data.gen_batch_size=384" in refusal(sizes.batches, given | more)


def test_a_critic_shares_the_actors_batches() -> None:
    gae = SMALL | {"algorithm.adv_estimator": "gae"}
    assert parts_batches(gae) == parts_batches(SMALL)
    assert parts_batches(SMALL | {"critic.ppo_mini_batch_size": 8}) == parts_batches(SMALL), "no critic"
    own = gae | {"critic.ppo_mini_batch_size": 8, "critic.ppo_epochs": 3}
    assert parts_batches(own) == {**parts_batches(SMALL), "critic.minibatches": 1, "critic.update_epochs": 3}
    assert "critic.ppo_mini_batch_size=3 must divide" in refusal(
        sizes.batches, gae | {"critic.ppo_mini_batch_size": 3}
    )


def test_shuffled_passes() -> None:
    shuffle: dict[str, Json] = {A + "shuffle": True, A + "data_loader_seed": 1}
    assert sizes.shuffling(values(shuffle)) == {"train.shuffle_minibatches": True}
    assert "data_loader_seed must be set" in refusal(sizes.shuffling, {A + "shuffle": True})
    assert "is coming" in refusal(sizes.shuffling, shuffle | {"critic.shuffle": False})
    alone = shuffle | {"critic.shuffle": False, "algorithm.adv_estimator": "grpo"}
    assert sizes.shuffling(values(alone)) == {"train.shuffle_minibatches": True}


def test_devices() -> None:
    assert "tensor_model_parallel_size=3" in refusal(sizes.layout, {R + "tensor_model_parallel_size": 3})
    alone = {"trainer.n_gpus_per_node": 1}
    assert sizes.layout(values(alone)) == {}
    sp = {A + "ulysses_sequence_parallel_size": 2}
    assert "use_remove_padding" in refusal(sizes.layout, sp)
    shared = sizes.layout(values(sp | {"actor_rollout_ref.model.use_remove_padding": True}))
    assert shared["train.parallel.cp"] == 2
    megatron = {A + "strategy": "megatron", A + "megatron.tensor_model_parallel_size": 4}
    assert sizes.ranks(values(megatron), "actor_rollout_ref.actor") == 2
    assert "must be of the family" in refusal(roles.same_family, {"critic.strategy": "megatron"})
    # sizes and base file that only Megatron has say that it is Megatron's file
    assert roles.is_megatron(values({A + "megatron.pipeline_model_parallel_size": 2}))
    assert roles.is_megatron(values({"defaults": ["ppo_megatron_trainer", "_self_"]}))
    assert not roles.is_megatron(values())


def test_passes_with_gradient_have_cuts_of_their_own_those_without_the_smallest() -> None:
    def found(given: dict[str, Json]) -> tuple[Json, ...]:
        made = sizes.cut(values({"algorithm.adv_estimator": "grpo"} | given))
        assert all("micro_batch_" in key for key in made)
        return tuple(made.values())

    assert found({}) == (8, 16)
    assert found({R + "log_prob_micro_batch_size_per_gpu": 2}) == (8, 2)
    reference = {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1}
    assert found(reference) == (8, 16), "no KL, so no reference"
    assert found(reference | {A + "use_kl_loss": True}) == (8, 1)
    # 64 sequences over 8 devices
    older = {A + "ppo_micro_batch_size": 32, A + "ppo_micro_batch_size_per_gpu": None}
    assert found(older) == (4, 16)
    dynamic = {A + "use_dynamic_bsz": True}
    assert sizes.cut(values(dynamic | {"algorithm.adv_estimator": "grpo"})) == {
        "train.micro_batch_tokens": 16384, "train.forward_micro_batch_tokens": 16384,
    }  # fmt: skip
    # 16 sequences; 8192 tokens of the reference are 8 of at most 1024 tokens
    mixed: dict[str, Json] = {A + "use_kl_loss": True, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True}
    mixed |= {"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 8192}
    assert found(mixed) == (8, 8)
    assert "= 1024" in refusal(sizes.cut, dynamic | {A + "ppo_max_token_len_per_gpu": 1000})
    # ranks that share a sequence have a budget each
    shared: dict[str, Json] = dynamic | {
        A + "ulysses_sequence_parallel_size": 4,
        A + "ppo_max_token_len_per_gpu": 256,
    }
    assert sizes.cut(values(shared | {"algorithm.adv_estimator": "grpo"}))["train.micro_batch_tokens"] == 1024
    few = refusal(sizes.cut, shared | {A + "ppo_max_token_len_per_gpu": 255})
    assert "per_gpu=255 * 4 ranks that share a sequence must be at least" in few
    assert "set at least one of" in refusal(sizes.cut, {A + "ppo_micro_batch_size_per_gpu": None})


def test_a_critic_has_its_own_cut() -> None:
    given = {"critic.ppo_micro_batch_size_per_gpu": 2, "critic.forward_micro_batch_size_per_gpu": 4}
    assert sizes.cut(values(given)) == {
        "train.micro_batch_rollouts": 8, "critic.micro_batch_rollouts": 2, "train.forward_micro_batch_rollouts": 4,
    }  # fmt: skip
    dynamic = {"critic.use_dynamic_bsz": True}
    assert sizes.cut(values(dynamic))["critic.micro_batch_tokens"] == 32768
    assert "critic.micro_batch_rollouts" not in sizes.cut(values()), "null: the policy's"


# ---------------------------------------------------------------- algorithm


@pytest.mark.parametrize(
    ("estimator", "n", "native"),
    [
        ("gae", 1, {"name": "ppo"}),
        ("grpo", 4, {"name": "grpo", "advantage.normalize_std": True}),
        ("grpo", 1, {"name": "reinforce", "advantage": "reward"}),
        (
            "grpo_vectorized",
            4,
            {"name": "grpo", "advantage.normalize_std": True, "advantage.std_floor": 1e-3},
        ),
        ("grpo_passk", 4, {"name": "grpo_passk", "advantage.normalize_std": True}),
        ("rloo", 4, {"name": "rloo", "advantage.single_rollout": "raw"}),
        ("rloo", 1, {"name": "rloo", "advantage.single_rollout": "raw"}),
        ("rloo_vectorized", 4, {"name": "rloo"}),
        ("reinforce_plus_plus", 1, {"name": "reinforce_pp"}),
        ("reinforce_plus_plus_baseline", 4, {"name": "reinforce_pp_baseline"}),
        ("reinforce_plus_plus_baseline", 1, {"name": "reinforce", "advantage": "reward", "whiten": True}),
        ("remax", 1, {"name": "remax"}),
        ("opo", 4, {"name": "opo"}),
        ("opo", 1, {"name": "reinforce", "advantage": "reward"}),
        ("gpg", 4, {"name": "gpg", "advantage.gpg_alpha": "nonzero"}),
        (
            "optimal_token_baseline",
            4,
            {"name": "optimal_token_baseline", "advantage.handle_zero_tail": False},
        ),
        ("optimal_token_baseline", 1, {"name": "reinforce", "advantage": "reinforce"}),
        (
            "tir_optimal_token_baseline",
            4,
            {"name": "optimal_token_baseline", "advantage": "tir_optimal_token_baseline"},
        ),
        ("reward", 2, {"name": "reinforce", "advantage": "reward"}),
        ("none", 2, {"name": "reinforce", "advantage": "none"}),
    ],
)
def test_advantages(estimator: str, n: int, native: dict[str, Json]) -> None:
    given = {"algorithm.adv_estimator": estimator, R + "n": n}
    found = algorithm.advantage(values(given))
    assert found == {f"algorithm.{key}": value for key, value in native.items()}
    resolve(section(found))


def test_advantages_that_are_refused() -> None:
    assert "expected one of gae" in refusal(algorithm.advantage, {"algorithm.adv_estimator": "grpoo"})
    assert "raise" in refusal(algorithm.advantage, {"algorithm.adv_estimator": "grpo_passk"})
    assert "SPPO's or SPIN's" in refusal(algorithm.advantage, {"algorithm.adv_estimator": None})
    dr = {"algorithm.adv_estimator": "grpo", R + "n": 2, "algorithm.norm_adv_by_std_in_grpo": False}
    assert algorithm.advantage(values(dr))["algorithm.advantage.normalize_std"] is False


LOSS = A + "policy_loss."


def test_losses() -> None:
    def found(mode: str, **given: Json) -> dict[str, Json]:
        at = {LOSS + "loss_mode": mode} | {A + key: value for key, value in given.items()}
        made = algorithm.loss(values(at))
        return {key.removeprefix("algorithm."): value for key, value in made.items()}

    assert found("vanilla") == {
        "loss": "ppo",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.2,
        "loss.dual_clip": 3.0,
    }
    sides = found("vanilla", clip_ratio=0.1, clip_ratio_low=None, clip_ratio_high=0.28, clip_ratio_c=10.0)
    assert tuple(sides.values()) == ("ppo", 0.1, 0.28, 10.0)
    assert found("vanilla", clip_ratio=0.1) == found("vanilla"), "its file has 0.2 for both sides"
    assert found("gspo", clip_ratio_low=3e-4) == {
        "loss": "gspo", "loss.clip_low": 3e-4, "loss.clip_high": 0.2, "loss.gspo_form": "token",
    }  # fmt: skip
    assert found("geo_mean") == {"loss": "geo_mean", "loss.clip_low": 0.2, "loss.clip_high": 0.2}
    assert found("sapo", tau_neg=1.1) == {"loss": "sapo", "loss.tau_pos": 1.0, "loss.tau_neg": 1.1}
    assert found("kl-cov") == {"loss": "kl_cov", "loss.kl_cov_ratio": 2e-4, "loss.ppo_kl_coef": 0.1}
    assert found("clip_cov")["loss.clip_cov_ub"] == 5.0
    assert found("gpg") == {"loss": "gpg"}
    assert "expected one of vanilla" in refusal(algorithm.loss, {LOSS + "loss_mode": "ppo"})


@pytest.mark.parametrize("mode", [mode for mode, native in algorithm.LOSSES.items() if native])
def test_every_loss_is_one_that_can_run(mode: str) -> None:
    """Whatever is translated for it is read: nothing is refused as having no effect."""
    given = values(
        {LOSS + "loss_mode": mode, LOSS + "dro_beta": 0.2, "algorithm.adv_estimator": "grpo", R + "n": 4}
    )
    made = {**algorithm.advantage(given), **algorithm.loss(given), **algorithm.reduction(given)}
    assert resolve(section(made)).loss == algorithm.LOSSES[mode]


def test_aggregations() -> None:
    norm = {A + "loss_agg_mode": "seq-mean-token-sum-norm"}
    assert tuple(algorithm.reduction(values(norm)).values()) == ("token-sum-norm", 512)
    assert tuple(algorithm.reduction(values(norm | {A + "loss_scale_factor": 7})).values())[1] == 7
    gspo = {LOSS + "loss_mode": "gspo"}
    newer = {**values(gspo | {A + "loss_agg_mode": "seq-mean-token-sum"}), VERSION: "0.9.1"}
    assert algorithm.reduction(newer) == {"algorithm.loss_agg_mode": "seq-mean-token-sum"}
    assert algorithm.reduction(values(gspo)) == {"algorithm.loss_agg_mode": "seq-mean-token-mean"}
    entropy = algorithm.reduction(values(gspo | {A + "entropy_coeff": 0.01}))
    assert entropy["algorithm.entropy_agg_mode"] == "token-mean", "verl's loss_agg_mode rules the entropy"
    assert algorithm.value_reduction(values()) == {"critic.loss_agg_mode": "token-mean"}
    assert algorithm.value_reduction(values(norm)) == {"critic.loss_agg_mode": "token-sum-norm"}
    assert algorithm.value_reduction(values(norm | {"algorithm.adv_estimator": "grpo"})) == {}
    assert "coming" in refusal(algorithm.value_reduction, norm | {A + "loss_scale_factor": 7})


@pytest.mark.parametrize(
    ("given", "native"),
    [
        ({}, {}),
        ({A + "use_kl_loss": True}, {"kl.coef": 0.001, "kl.estimator": "low_var_kl"}),
        ({A + "use_kl_loss": True, A + "kl_loss_type": "k3"}, {"kl.coef": 0.001, "kl.estimator": "low_var_kl"}),
        ({A + "use_kl_loss": True, A + "kl_loss_type": "k1+"}, {"kl.coef": 0.001, "kl.estimator": "k1+"}),
        ({A + "use_kl_loss": True, A + "kl_loss_type": "full"}, {"kl.coef": 0.001, "kl.estimator": "full"}),
        (
            {A + "use_kl_loss": True, A + "kl_loss_type": "kl", A + "kl_loss_coef": 0.5},
            {"kl.coef": 0.5, "kl.estimator": "k1"},
        ),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "mse"},
            {"reward_kl.coef": 0.001, "reward_kl.estimator": "k2"},
        ),
        (
            {"algorithm.use_kl_in_reward": True, A + "use_kl_loss": True},
            {
                "kl.coef": 0.001, "kl.estimator": "low_var_kl",
                "reward_kl.coef": 0.001, "reward_kl.estimator": "k1",
            },
        ),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
            {
                "reward_kl.coef": 0.001, "reward_kl.estimator": "k1",
                "reward_kl.target": 0.1, "reward_kl.horizon": 10000,
            },
        ),
    ],
)  # fmt: skip
def test_kl(given: dict[str, Json], native: dict[str, Json]) -> None:
    assert algorithm.kl(values(given)) == {f"algorithm.{key}": value for key, value in native.items()}


def test_kl_that_is_refused() -> None:
    full = {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "full"}
    assert "kl_penalty=full is coming" in refusal(algorithm.kl, full)


def test_resampling() -> None:
    given: dict[str, Json] = {"algorithm.use_pf_ppo": True}
    assert algorithm.resampling(values()) == {}
    assert tuple(algorithm.resampling(values(given)).values()) == ("pow", 2.0)
    extremes = given | {"algorithm.pf_ppo.reweight_method": "max_min"}
    assert algorithm.resampling(values(extremes)) == {"algorithm.resample": "max_min"}
    assert algorithm.resampling(values(given | {"algorithm.adv_estimator": "grpo"})) == {}, "as in verl"


C = algorithm.CORRECTION + "."


def test_corrections() -> None:
    assert algorithm.correction(values()) == {}
    weights = algorithm.correction(values({C + "rollout_is": "sequence", C + "rollout_is_threshold": 5.0}))
    assert tuple(weights.values()) == ("sequence", 5.0, False)
    two = {C + "rollout_rs": "token_k1, seq_max_k2", C + "rollout_rs_threshold": "0.5_4,0.1"}
    assert algorithm.correction(values(two))["algorithm.correction.reject"] == [
        {"statistic": "ratio", "over": "token", "low": 0.25, "high": 2.0},  # k1 is of the inverse ratio
        {"statistic": "k2", "over": "max", "high": 0.1},
    ]
    one = {C + "rollout_rs": "seq_mean_k1,seq_sum_k1", C + "rollout_rs_threshold": 2.0}
    bounds = [
        (test["over"], test["low"], test["high"])  # type: ignore[index,call-overload]
        for test in algorithm.correction(values(one))["algorithm.correction.reject"]  # type: ignore[union-attr]
    ]
    assert bounds == [("mean", 0.5, 2.0), ("sum", 0.5, 2.0)]
    bypass = {C + "bypass_mode": True}
    assert algorithm.correction(values(bypass)) == {"algorithm.old_logprobs": "sampled"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": "a"}, "expected a number above 0"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0}, "is none of"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "expected a number above 0"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": None}, "expected a number above 0"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1,2"}, "one for each of 1 modes"),
    ],
)
def test_corrections_that_are_refused(given: dict[str, Json], said: str) -> None:
    assert said in refusal(algorithm.correction, {C + key: value for key, value in given.items()})


def test_a_weight_of_corrections_that_verl_does_not_have_is_refused() -> None:
    tree = {"algorithm": {"rollout_correction": {"rollout_is": "rollout"}}}
    key = C + "rollout_is"
    assert [text for _, text in translate(tree, dialect("verl-ppo"), origins={}).problems] == [
        f'{key}: got "rollout", expected null or one of token, sequence'
    ]


@pytest.mark.parametrize(
    ("given", "native"),
    [
        (
            {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"},
            {"weight_over": "token", "weight_high": 2.0},
        ),
        (
            {
                "bypass_mode": True,
                "loss_type": "reinforce",
                "rollout_is": "sequence",
                "rollout_is_threshold": "0.5_4",
            },
            {
                "weight_over": "sequence",
                "weight_high": 4.0,
                "weight_low": 0.5,
                "weight_outside": "mask",
            },
        ),
        ({"bypass_mode": True, "loss_type": "reinforce"}, {"weight_over": "none"}),
        (
            {"bypass_mode": True, "use_policy_gradient": True, "rollout_is": "token"},
            {"weight_over": "token", "weight_high": 2.0},
        ),
    ],
)
def test_reinforce_in_bypass_mode_has_weights_of_the_policy_that_learns(
    given: dict[str, Json], native: dict[str, Json]
) -> None:
    tree = values({C + key: value for key, value in given.items()})
    assert algorithm.loss(tree) == {
        "algorithm.loss": "reinforce_is",
        **{f"algorithm.loss.{key}": value for key, value in native.items()},
    }
    assert algorithm.correction(tree) == {}, "no weight is counted twice"
    normal = {C + "rollout_is_batch_normalize": True}
    found = algorithm.loss(values({C + key: value for key, value in given.items()} | normal))
    assert found.get("algorithm.loss.weight_normalize") == (True if "rollout_is" in given else None)


def test_what_bypass_mode_rejects_is_tested_by_the_policy_that_learns() -> None:
    """The file examples/rollout_correction/run_qwen2_5_7b_fsdp_multi_rs.sh of verl 0.8.0."""
    rejects = {
        VERSION: "0.8.0",
        C + "bypass_mode": True,
        C + "rollout_rs": "token_k1,seq_max_k2",
        C + "rollout_rs_threshold": "0.6_1.6,2.5",
    }
    tests = {
        "algorithm.correction.reject": [
            {"statistic": "ratio", "over": "token", "low": 1 / 1.6, "high": 1 / 0.6},
            {"statistic": "k2", "over": "max", "high": 2.5},
        ],
        "algorithm.correction.reject_policy": "current",
    }
    assert algorithm.correction(values(rejects)) == {"algorithm.old_logprobs": "sampled", **tests}
    assert algorithm.correction(values(rejects | {C + "loss_type": "reinforce"})) == tests
    learner = {"actor_rollout_ref.actor.policy_loss.loss_mode": "bypass_mode", C + "bypass_mode": None}
    assert algorithm.correction(values(rejects | learner)) == {"algorithm.old_logprobs": "sampled", **tests}
    engine = {C + "bypass_mode": None, "actor_rollout_ref.actor.use_rollout_log_probs": True}
    assert "use_rollout_log_probs and without bypass_mode is coming" in refusal(
        algorithm.correction, rejects | engine
    )


def test_reinforce_is_read_with_bypass_mode_alone() -> None:
    assert algorithm.loss_of(values({C + "loss_type": "reinforce"})) == "ppo"


def test_dro_needs_its_beta() -> None:
    said = refusal(algorithm.loss, {LOSS + "loss_mode": "dro"})
    assert "dro_beta must be given" in said


# ---------------------------------------------------------------- optimizers


def schedule(given: dict[str, Json]) -> dict[str, Json]:
    at = "train.optimizer.schedule."
    made = optimizer.actor(values(given))
    return {key.removeprefix(at): value for key, value in made.items() if key.startswith(at)}


STEP = {"unit": "train_step", "warmup_ends": "start"}


def test_schedules() -> None:
    assert schedule({A + "optim.lr_warmup_steps": 3, A + "ppo_mini_batch_size": 512}) == {
        **STEP, "type": "constant", "warmup_steps": 3,
    }  # fmt: skip
    ratio: dict[str, Json] = {
        A + "optim.lr_warmup_steps_ratio": 0.1,
        A + "optim.warmup_style": "cosine",
        A + "optim.min_lr_ratio": 0.2,
        A + "optim.num_cycles": 1.5,
    }
    assert schedule(ratio) == {
        **STEP, "type": "cosine", "warmup_steps": 0.1, "warmup_start_ratio": 0.2, "min_lr_ratio": 0.2,
        "num_cycles": 1.5,
    }  # fmt: skip
    assert (
        schedule({A + "optim.lr_warmup_steps": 0, A + "optim.lr_warmup_steps_ratio": 0.1})["warmup_steps"]
        == 0
    )
    assert schedule(ratio | {"trainer.total_training_steps": 50})["total_steps"] == 50
    made = optimizer.actor(values())
    assert (made["train.optimizer.weight_decay"], made["train.optimizer.decay_all"]) == (0.01, True)


def verl_cosine(s: int, W: int, N: int, f: float, c: float) -> float:
    """verl's get_cosine_schedule_with_warmup, from its formula."""
    if s < W:
        return f + (1 - f) * s / max(1, W)
    p = (s - W) / max(1, N - W)
    return max(f, (1 - f) / 2 * math.cos(2 * math.pi * c * p) + (1 + f) / 2)


def test_a_cosine_has_verls_learning_rate_in_every_step() -> None:
    given: dict[str, Json] = {A + "optim.warmup_style": "cosine", "trainer.total_training_steps": 40}
    given |= {A + "optim.lr_warmup_steps_ratio": 0.11, A + "optim.min_lr_ratio": 0.1}
    native = schema.ScheduleConfig(**schedule(given))  # type: ignore[arg-type]
    for step in range(40):
        assert factor(native, step, 40) == pytest.approx(verl_cosine(step, 4, 40, 0.1, 0.5), abs=1e-12)


MEGATRON: dict[str, Json] = {A + "strategy": "megatron", A + "optim.lr": 1e-5}


def test_megatron_schedules() -> None:
    assert schedule(MEGATRON | {A + "optim.min_lr": 1e-6, A + "optim.lr_warmup_init": 5e-6}) == {
        **STEP, "type": "linear", "min_lr_ratio": pytest.approx(0.1), "warmup_start_ratio": 0.5,
    }  # fmt: skip
    made = optimizer.actor(values(MEGATRON | {A + "optim.clip_grad": 0}))
    assert made["train.optimizer.max_grad_norm"] is None
    assert made["train.optimizer.decay_all"] is False, "Megatron spares norms and biases"
    zero = MEGATRON | {A + "optim.lr_warmup_steps": 0, A + "optim.lr_warmup_steps_ratio": 0.1}
    assert schedule(zero)["warmup_steps"] == 0.1
    assert schedule(MEGATRON | {A + "optim.lr_decay_steps": 7})["total_steps"] == 7
    for style in ("inverse_square_root", "inverse-square-root"):
        assert schedule(MEGATRON | {A + "optim.lr_decay_style": style})["type"] == "inverse_sqrt"
    assert schedule(MEGATRON | {A + "optim.warmup_style": "cosine"})["type"] == "cosine"
    wsd = MEGATRON | {A + "optim.lr_decay_style": "WSD", A + "optim.lr_wsd_decay_steps": 5}
    found = schedule(wsd)
    assert (found["type"], found["decay_type"], found["decay_steps"]) == ("wsd", "exponential", 5)
    assert schedule(wsd | {A + "optim.lr_wsd_decay_style": "constant"})["type"] == "constant"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_lr": 1.0}, "optim.min_lr=1.0 must be between 0 and"),
        ({"lr_warmup_init": 1.0}, "optim.lr_warmup_init=1.0 must be between 0 and"),
        ({"lr_decay_style": "WSD"}, "needs actor_rollout_ref.actor.optim.lr_wsd_decay_steps"),
        ({"lr_decay_style": "WSD", "warmup_style": "cosine"}, "differ; keep one"),
        ({"lr_decay_style": "square"}, "expected one of constant"),
    ],
)
def test_megatron_schedules_that_are_refused(given: dict[str, Json], said: str) -> None:
    at = {A + f"optim.{key}": value for key, value in given.items()}
    assert said in refusal(optimizer.actor, MEGATRON | at)


# ---------------------------------------------------------------- rollouts, data, trainer


def test_sampling() -> None:
    assert data.sampling(values({R + "n": 5, R + "top_k": 0})) == {
        "rollout.group_size": 5, "rollout.sampling.temperature": 1.0, "rollout.sampling.top_k": 0,
        "rollout.sampling.top_p": 1,
    }  # fmt: skip
    greedy = data.sampling(values({R + "n": 5, R + "do_sample": False, R + "top_p": 0.5}))
    assert tuple(greedy.values()) == (1, 0.0, 0, 1.0)
    unread = data.sampling(values({R + "n": 5, R + "do_sample": False, R + "mode": "async"}))
    assert tuple(unread.values()) == (5, 1.0, 0, 1)
    assert data.concurrency(values({"data.train_batch_size": 16, R + "n": 4})) == {"rollout.max_num_seqs": 64}
    assert data.engine(values({R + "name": "trtllm"})) == {"rollout.engine": "native"}


def test_validation() -> None:
    assert data.validation(values({"trainer.test_freq": -1, "trainer.val_before_train": False})) == {}
    start = data.validation(values({"trainer.test_freq": -1, R + "val_kwargs.n": 4}))
    keys = ("interval", "at_start", "at_end", "samples")
    assert tuple(start[f"eval.{key}"] for key in keys) == (0, True, False, 1)
    sampled = {R + "val_kwargs.do_sample": True, R + "val_kwargs.temperature": 0.6, R + "val_kwargs.n": 4}
    sampled["trainer.test_freq"] = 2
    found = data.validation(values(sampled))
    assert (found["eval.interval"], found["eval.samples"], found["eval.sampling.temperature"]) == (2, 4, 0.6)
    assert found["eval.sampling.top_k"] == 0
    assert found["data.eval.0.label"] == "data_source"
    unsaid = {key: value for key, value in sampled.items() if not key.endswith("do_sample")}
    assert "eval.sampling.temperature" not in data.validation(values(unsaid))
    for agents in ({R + "mode": "async"}, {VERSION: "0.7.0"}):  # agent loops do not read do_sample
        assert data.validation(values(unsaid | agents)) == found
    for given in (unsaid, sampled):  # of the engine, in whose parameters verl replaces others alone
        told = data.validation(values(given | {R + "repetition_penalty": 1.3}))
        assert told["eval.sampling.repetition_penalty"] == 1.3
        assert "eval.sampling.repetition_penalty" not in data.validation(values(given))


def test_data_and_rewards() -> None:
    files = data.training(values({"data.train_files": ["a.parquet", "b.parquet"], "data.prompt_key": "p"}))
    assert files["data.train.0.path"] == ["a.parquet", "b.parquet"]
    assert files["data.train.0.prompt"] == "p"
    remote = data.training(values({"data.train_files": "hdfs://x/a.parquet"}))
    assert remote["data.train.0.path"] == "hdfs://x/a.parquet"
    assert data.overlong(values({"data.truncation": "middle"})) == {"data.overlong": "truncate_middle"}
    assert data.overlong(values({"data.filter_overlong_prompts": True})) == {"data.overlong": "filter"}
    assert data.rewards(values())["rewards.score.function"] == "whet.rewards.verl:compute_score"
    own = {"custom_reward_function.path": "a/b.py", "custom_reward_function.name": "f"}
    assert data.rewards(values(own))["rewards.score.function"] == "a/b.py:f"
    assert data.rewards(values({"reward_model.reward_manager": "prime"}))["reward_workers.timeout_s"] == 300.0
    mine: dict[str, Json] = {"data.custom_cls.path": "a/d.py", "data.custom_cls.name": "Rows"}
    made = data.training(values(mine | {"data.train_files": "a.parquet"}))
    assert made["data.train.0.function"] == "a/d.py:Rows"
    assert made["data.train.0.arguments"] == {"data_files": "a.parquet"}
    assert "data.train.0.path" not in made
    assert "needs data.custom_cls.name" in refusal(data.training, {"data.custom_cls.path": "a/d.py"})


RM: dict[str, Json] = {
    "reward_model.enable": True,
    "reward_model.model.path": "judge",
    "actor_rollout_ref.model.path": "policy",
}


def test_a_reward_model() -> None:
    longest = {"data.max_prompt_length": 30, "data.max_response_length": 12}
    at = "rewards.rm.model"
    assert data.reward_model(values({"reward_model.model.path": "judge"})) == {}, "it is not enabled"
    assert data.reward_model(values(RM | longest)) == {
        f"{at}.path": "judge",
        f"{at}.max_tokens": 42,
        f"{at}.overlong": "truncate_right",
    }
    assert data.reward_model(values(RM | {"reward_model.max_length": 99}))[f"{at}.max_tokens"] == 99
    alike = RM | {"reward_model.model.input_tokenizer": None}
    assert data.reward_model(values(alike)) == {f"{at}.path": "judge", f"{at}.input": "tokens"}
    assert "leave it out" in refusal(data.reward_model, alike | {"reward_model.max_length": 99})
    strange = RM | {"reward_model.model.input_tokenizer": "other"}
    assert "the policy's own: policy" in refusal(data.reward_model, strange)


@pytest.mark.parametrize("version", ["0.7.0", "0.7.1", "0.9.1"])
def test_a_reward_model_that_is_a_server(version: str) -> None:
    """From 0.7.0 on it reads the conversation in its own template, up to its positions, and nothing is cut. What
    places the server changes no score."""
    server: dict[str, Json] = {
        "name": "vllm", "gpu_memory_utilization": 0.8, "tensor_model_parallel_size": 1, "prompt_length": 256,
        "response_length": 128, "enforce_eager": False, "max_num_seqs": 64,
    }  # fmt: skip

    def told(**more: Json) -> tuple[Json, list[str]]:
        section = {
            "enable": True,
            "model": {"path": "judge"},
            "num_workers": 8,
            "rollout": {**server, **more},
        }
        made = translate({"reward_model": section}, dialect("verl-ppo", version), origins={})
        texts = [text for _, text in (*made.problems, *made.unbuilt) if "reward_model" in text]
        return made.tree["rewards"]["rm"]["model"], texts

    assert told() == ({"path": "judge"}, [])
    longest = {} if version == "0.7.0" else {"max_tokens": 512}  # 0.7.0 puts the model's positions over it
    assert told(max_model_len=512, dtype="float32") == ({"path": "judge", **longest, "dtype": "float32"}, [])
    for key, value in (
        ("name", "trtllm"),
        ("dtype", "float16"),
        ("load_format", "dummy"),
        ("quantization", "fp8"),
    ):
        assert f"reward_model.rollout.{key}" in " ".join(told(**{key: value})[1])


def test_older_workers_of_a_reward_model_cut_what_is_long() -> None:
    section = {"enable": True, "use_reward_loop": False, "model": {"path": "judge", "input_tokenizer": None}}
    made = translate({"reward_model": section}, dialect("verl-ppo", "0.7.0"), origins={})
    assert made.tree["rewards"]["rm"]["model"] == {"path": "judge", "input": "tokens"}
    del section["model"]["input_tokenizer"]  # type: ignore[attr-defined]
    made = translate({"reward_model": section}, dialect("verl-ppo", "0.7.0"), origins={})
    found = {"path": "judge", "max_tokens": 1024, "overlong": "truncate_right"}
    assert made.tree["rewards"]["rm"]["model"] == found


def test_a_reward_model_takes_the_place_of_rules() -> None:
    assert data.rewards(values(RM | {"reward_model.reward_manager": "prime"})) == {}
    own = RM | {"custom_reward_function.path": "a/b.py", "custom_reward_function.name": "f"}
    without = {"rewards.score.function": "a/b.py:f", "rewards.score.weight": 0.0}
    assert data.rewards(values(own | {"trainer.test_freq": 5})) == {**without, "eval.reward": "score"}
    assert data.rewards(values(own | {"trainer.test_freq": -1, "trainer.val_before_train": False})) == without
    penalty: dict[str, Json] = {"reward_model.overlong_buffer.enable": True}
    assert "set it to False" in refusal(data.overlong_penalty, RM | penalty)


@pytest.mark.parametrize(
    ("key", "value", "passes"),
    [
        ("model.fsdp_config.param_offload", True, True),
        ("ulysses_sequence_parallel_size", 2, True),
        ("megatron", {"param_offload": True}, True),
        ("model.trust_remote_code", True, False),
        ("strategy", "fsdp2", True),
        ("use_dynamic_bsz", True, True),
        ("micro_batch_size_per_gpu", 4, True),
        ("launch_reward_fn_async", True, True),
    ],
)
def test_keys_beside_a_reward_model(key: str, value: Json, passes: bool) -> None:
    section: dict[str, Json] = {}
    *above, last = key.split(".")
    inner = section
    for name in above:
        inner = inner.setdefault(name, {})
    inner[last] = value
    for enable, fine in ((False, True), (True, passes)):
        made = translate({"reward_model": {"enable": enable} | section}, dialect("verl-ppo"), origins={})
        told = [text for _, text in (*made.problems, *made.unbuilt) if f"reward_model.{key}" in text]
        assert (told == []) == fine, told


def test_critic_overrides() -> None:
    assert roles.critic(values())["critic.overrides"] == {}, "none of its own, whatever the policy has"
    own: dict[str, Json] = {"critic.model.override_config": {"model_config": {"a": 1}, "b": 2}}
    assert roles.critic(values(own))["critic.overrides"] == {"a": 1, "b": 2}
    assert roles.critic(values(own | {"algorithm.adv_estimator": "grpo"})) == {}


def test_modules_that_are_imported() -> None:
    model = "actor_rollout_ref.model.external_lib"
    both = {model: "a.b", model + "s": ["c", "a.b"]}
    assert roles.imports(values(both)) == {"imports": ["a.b", "c"]}
    assert roles.imports(values({"critic.model.external_lib": "d"})) == {"imports": ["d"]}
    grpo = {"critic.model.external_lib": "d", "algorithm.adv_estimator": "grpo"}
    assert roles.imports(values(grpo)) == {}


def test_dapo() -> None:
    at = "reward_model.overlong_buffer."
    given = {at + "enable": True, at + "len": 128, at + "penalty_factor": 0.5}
    for other in ("naive", "prime", "batch"):
        assert "reward_manager=dapo alone" in refusal(
            data.overlong_penalty, given | {"reward_model.reward_manager": other}
        )
    given["reward_model.reward_manager"] = "dapo"
    assert data.overlong_penalty(values(given)) == {
        "rewards.overlong.function": "overlong",
        "rewards.overlong.weight": 0.5,
        "rewards.overlong.arguments": {"max_tokens": 512, "buffer": 128},
    }
    groups = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}
    assert algorithm.dynamic_sampling(values(groups))["algorithm.max_refills"] == 1_000_000
    some = groups | {"algorithm.filter_groups.max_num_gen_batches": 10}
    assert algorithm.dynamic_sampling(values(some))["algorithm.max_refills"] == 9
    three = some | {"data.train_batch_size": 512, "data.gen_batch_size": 1536}
    assert algorithm.dynamic_sampling(values(three))["algorithm.max_refills"] == 29
    assert "algorithm.groups.uniform.by" not in algorithm.dynamic_sampling(values(groups))
    by_score = algorithm.dynamic_sampling(values(groups | given))
    assert by_score["algorithm.groups.uniform.by"] == ["score"], "acc is not the penalised reward"
    penalised = groups | given | {"algorithm.filter_groups.metric": "seq_reward"}
    assert "algorithm.groups.uniform.by" not in algorithm.dynamic_sampling(values(penalised))


def kept(given: dict[str, Json]) -> tuple[Json, ...]:
    """every, keep, contents, load, export, export_interval."""
    return tuple(loop.checkpoints(values(given)).values())


BOTH = ["model", "optimizer"]


def test_checkpoints() -> None:
    assert kept({}) == (0, None, BOTH, BOTH, False, 0)
    every: dict[str, Json] = {
        "trainer.save_freq": 5,
        A + "checkpoint.contents": [*BOTH, "extra", "hf_model"],
    }
    assert kept(every) == (5, None, BOTH, BOTH, True, 5)
    assert kept(every | {"trainer.remove_previous_ckpt_in_save": True})[1] == 1
    assert kept(every | {"trainer.max_actor_ckpt_to_keep": 3, "trainer.max_critic_ckpt_to_keep": 3})[1] == 3
    only = {
        A + "checkpoint.load_contents": ["model", "extra"],
        "critic.checkpoint.load_contents": ["model", "extra"],
    }
    assert kept(only)[2:4] == (BOTH, ["model"])
    fresh: dict[str, Json] = {
        f"{at}load_contents": ["model"] for at in (A + "checkpoint.", "critic.checkpoint.")
    }
    assert kept(fresh)[2:4] == (BOTH, ["model"]), "rates are constant, so no schedule begins anew"
    exports = {A + "checkpoint.save_contents": ["hf_model"], A + "checkpoint.load_contents": ["hf_model"]}
    assert loop.checkpoints(values({**exports, "trainer.save_freq": 5, A + "optim.lr_warmup_steps": 5})) == {
        "checkpoint.interval": 0,
        "checkpoint.keep": None,
        "checkpoint.export": True,
        "checkpoint.export_interval": 5,
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({A + "checkpoint.save_contents": ["modle"]}, "is not one of"),
        ({A + "checkpoint.save_contents": ["optimizer", "extra"]}, "has no model"),
        ({A + "checkpoint.load_contents": ["hf_model", "extra"]}, "has no model"),
        (
            {A + "checkpoint.load_contents": ["model"], A + "optim.lr_warmup_steps": 5},
            "restarts the learning-rate schedule",
        ),
        ({A + "checkpoint.save_contents": ["model", "extra"]}, "other parts than the policy's"),
        ({"trainer.max_critic_ckpt_to_keep": 3}, "policy and critic lie in one checkpoint"),
        (
            {
                A + "checkpoint.contents": ["model", "extra"],
                A + "checkpoint.save_contents": [*BOTH, "hf_model"],
            },
            "differ; keep one",
        ),
    ],
)
def test_checkpoints_that_are_refused(given: dict[str, Json], said: str) -> None:
    assert said in refusal(loop.checkpoints, given)


def test_resume() -> None:
    modes = {"auto": "auto", "disable": "fresh"}
    for mode, native in modes.items():
        assert loop.resume(values({"trainer.resume_mode": mode})) == {"checkpoint.resume": native}
    path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "runs/x"}
    assert loop.resume(values(path)) == {"checkpoint.resume": "runs/x"}
    assert "needs trainer.resume_from_path" in refusal(
        loop.resume, path | {"trainer.resume_from_path": False}
    )


def test_length() -> None:
    assert loop.length(values()) == {"train.epochs": 30, "train.drop_last": True}
    steps = loop.length(values({"trainer.total_training_steps": 7}))
    assert steps == {"train.epochs": 30, "train.drop_last": True, "train.steps": 7}
    only = {"trainer.val_only": True, "trainer.total_training_steps": 7}
    assert loop.length(values(only))["train.steps"] == 0
    assert loop.length(values(only | {"trainer.val_before_train": False}))["train.steps"] == 7


def test_trackers() -> None:
    assert loop.trackers(values()) == {"track.trackers": ["console", "wandb"]}
    assert loop.trackers(values({"trainer.logger": "file"})) == {"track.trackers": ["jsonl"]}
    assert "clearml is coming" in refusal(loop.trackers, {"trainer.logger": ["console", "clearml"]})


def sft_schedule(given: dict[str, Json]) -> schema.ScheduleConfig:
    at = "train.optimizer.schedule."
    made = sft.optimizer(values(given, "verl-sft"))
    flat = {key.removeprefix(at): value for key, value in made.items() if key.startswith(at)}
    return schema.ScheduleConfig(**flat)  # type: ignore[arg-type]


def verl_wsd(s: int, W: int, N: int) -> float:
    """verl's get_wsd_schedule_with_warmup with its defaults, from its formula."""
    stable = math.floor(0.9 * (N - W))
    if s < W:
        return s / max(1, W)
    if s < W + stable:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (s - W - stable) / max(1, N - W - stable)))


def test_sft_batches_and_columns() -> None:
    given = {"data.train_batch_size": 32, "trainer.n_gpus_per_node": 4}
    assert sft.batch(values(given, "verl-sft")) == {
        "train.tasks_per_step": 32,
        "train.micro_batch_rollouts": 4,
    }
    assert "divisible by the 5 data" in refusal(sft.batch, given | {"trainer.n_gpus_per_node": 5}, "verl-sft")
    assert "must divide" in refusal(sft.batch, given | {"data.micro_batch_size_per_gpu": 3}, "verl-sft")
    inside = {"data.prompt_key": "extra_info", "data.prompt_dict_keys": ["question"]}
    assert sft.data(values(inside, "verl-sft"))["data.train.0.prompt"] == "extra_info.question"
    turns = sft.data(values({"data.multiturn.enable": True}, "verl-sft"))
    assert (turns["data.train.0.messages"], turns["data.learn_turns"]) == ("messages", "all")
    assert "data.train.0.prompt" not in turns


@pytest.mark.parametrize(("steps", "warmup"), [(50, 5), (37, 3), (12, 1)])
def test_sft_schedules_have_verls_learning_rate_in_every_step(steps: int, warmup: int) -> None:
    cosine = sft_schedule({"trainer.total_training_steps": steps})
    wsd = sft_schedule({"trainer.total_training_steps": steps, "optim.lr_scheduler": "wsd"})
    for step in range(steps):
        wanted = verl_cosine(step, warmup, steps, 0.0, 0.5)
        assert factor(cosine, step, steps) == pytest.approx(wanted, abs=1e-12)
        assert factor(wsd, step, steps) == pytest.approx(verl_wsd(step, warmup, steps), abs=1e-12)
    open_end = sft_schedule({"optim.lr_scheduler": "wsd"})
    assert factor(open_end, 39, 100) == 1.0
    assert factor(open_end, 95, 100) == pytest.approx(verl_wsd(95, 10, 100), abs=1e-12), "9 of 100 steps"


def test_sft_validation() -> None:
    assert sft.validation(values({"data.val_files": None}, "verl-sft")) == {}
    last = sft.validation(values({"trainer.test_freq": -1, "data.val_files": "v.parquet"}, "verl-sft"))
    assert "eval.interval" not in last
    assert (last["data.eval.0.path"], last["eval.at_end"]) == ("v.parquet", True), (
        "verl evaluates the last step"
    )
    made = sft.validation(values({"trainer.test_freq": 4, "data.val_files": "v.parquet"}, "verl-sft"))
    assert (made["data.eval.0.path"], made["data.eval.0.response"]) == ("v.parquet", "answer")
    assert (made["eval.interval"], made["eval.at_start"], made["eval.at_end"]) == (4, False, True)


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
        ("math_dapo", "the answer : $7$.\nBye", "7", 1.0),
        ("math_dapo", "Answer: 7\nANSWER:\n8", "7", -1.0),
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.model.override_config.model_config", [1]),
        ("actor_rollout_ref.model.override_config.model_config", "x"),
        ("critic.model.override_config", [1]),
        ("critic.model.override_config.model_config", [1]),
        ("critic.model.override_config.moe_config", "x"),
    ],
)
def test_a_section_that_is_none_is_refused_by_its_key(key: str, value: Json, tmp_path: Path) -> None:
    tree: Json = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    whole = merge({"algorithm": {"adv_estimator": "gae"}, "data": {"train_files": "a.parquet"}}, tree)
    (tmp_path / "verl.yaml").write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=r"override_config.*sections? of keys"):
        load(tmp_path / "verl.yaml", dialect="verl")


def test_what_python_counts_as_false_is_false() -> None:
    """verl tests its values by Python's truth: an empty text is false, and false is 0."""
    row = {row.key: row for row in table("verl-ppo", "0.4.0")}
    assert understood("", row["data.return_raw_chat"], default=False, nulls=()) == (False, "")
    assert understood(False, row["trainer.test_freq"], default=-1, nulls=()) == (0, "")
    assert (
        understood(True, row["trainer.test_freq"], default=-1, nulls=())[1]
        == "got true, expected a whole number"
    )


# ---------------------------------------------------------------- rewards normalised apart


def test_gdpo_normalises_entries_of_what_the_reward_returns() -> None:
    given = {"algorithm.adv_estimator": "gdpo", R + "n": 4, "algorithm.gdpo_reward_keys": ["score", "format"]}
    assert algorithm.advantage(values(given)) == {
        "algorithm.name": "grpo",
        "algorithm.advantage": "gdpo",
        "algorithm.advantage.parts": ["score", "score/format"],
        "algorithm.advantage.part_weights": None,
    }
    said = refusal(algorithm.advantage, {**given, "algorithm.gdpo_reward_weights": [1.0]})
    assert "got 1 weights for 2 gdpo_reward_keys" in said
    assert "gdpo_reward_keys" in refusal(algorithm.advantage, {**given, "algorithm.gdpo_reward_keys": None})


def test_sft_evaluates_after_each_epoch() -> None:
    given: dict[str, Json] = {"data.val_files": "val.parquet", "trainer.test_freq": "after_each_epoch"}
    found = sft.validation(values(given, "verl-sft"))
    assert found["eval.interval"] == "1 epoch"


@pytest.mark.parametrize("given", [{}, {"trainer.checkpoint.save_contents": ["hf_model"]}])
def test_sft_exports_after_each_epoch(given: dict[str, Json]) -> None:
    found = sft.checkpoints(values({"trainer.save_freq": "after_each_epoch", **given}, "verl-sft"))
    assert found["checkpoint.export_interval"] == "1 epoch", "verl's checkpoint is a Hugging Face folder"


def test_an_estimator_may_be_a_function_of_ones_own() -> None:
    given: dict[str, Json] = {"algorithm.adv_estimator": "mine.py:leave_one_out"}
    assert algorithm.advantage(values(given)) == {
        "algorithm.name": "grpo",
        "algorithm.advantage": "mine.py:leave_one_out",
    }
    assert not roles.has_critic(values(given))


def test_dppo_has_the_bounds_of_the_divergence_and_the_largest_weight() -> None:
    given: dict[str, Json] = {
        A + "policy_loss.loss_mode": "dppo_kl",
        A + "clip_ratio": 0.05,
        A + "clip_ratio_low": None,
        A + "clip_ratio_high": 0.1,
    }
    assert algorithm.loss(values(given)) == {
        "algorithm.loss": "dppo",
        "algorithm.loss.dppo_divergence": "binary_kl",
        "algorithm.loss.dppo_delta_low": 0.05,
        "algorithm.loss.dppo_delta_high": 0.1,
        "algorithm.loss.dppo_anchor": "old",
        "algorithm.loss.dppo_max_ratio": 3.0,
    }


def test_a_sampler_of_the_users_chooses_the_rows() -> None:
    at, version = "data.sampler", {VERSION: "0.7.1"}
    known = {row.key: row.default for row in table("verl-ppo", "0.7.1")} | version

    def told(**own: Json) -> dict[str, Json]:
        return data.sampler(known | {f"{at}.{name}": value for name, value in own.items()})

    own: dict[str, Json] = {"class_path": "pkg://pack/mod", "class_name": "Cls", "*": {"pace": 3}}
    made = told(**own)
    assert (made["data.order"], made["data.order.class_path"]) == ("whet.data.samplers:verl", "pack.mod:Cls")
    assert made["data.order.config"]["sampler"] == {
        "class_path": "pkg://pack/mod",
        "class_name": "Cls",
        "pace": 3,
    }
    assert made["data.order.config"]["prompt_key"] == "prompt"
    for file in ("a/b.py", "a/T10:30/b.py"):
        assert told(**own | {"class_path": file})["data.order.class_path"] == f"{file}:Cls"
    assert told() == {}
    assert data.order(known) == {"data.order": "shuffle"}
    assert data.order(known | {f"{at}.class_path": "a/b.py"}) == {}
    with pytest.raises(ConfigError, match=r"data.sampler.class_path needs data.sampler.class_name"):
        told(class_path="a/b.py")
    with pytest.raises(
        ConfigError, match=r"class_path=pkg://a.b:Cls: expected a.b alone; data.sampler.class_name is"
    ):
        told(**own | {"class_path": "pkg://a.b:Cls"})
