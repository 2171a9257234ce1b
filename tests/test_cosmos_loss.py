"""Cosmos-RL's algorithm keys, by hand: variants, clips, means, what is weighed and left out, the reference."""

from __future__ import annotations

from typing import Any

import pytest

from whet.dialects.cosmos.algorithm import ALL
from whet.dialects.row import AnotherModel, NotSupportedYet
from whet.dialects.rules import function
from whet.dialects.tables import dialect
from whet.dialects.translate import translate
from whet.types import ConfigError

algorithm = function("cosmos", "algorithm.algorithm")
aggregation = function("cosmos", "algorithm.aggregation")
terms = function("cosmos", "algorithm.terms")
trainer = function("cosmos", "algorithm.trainer")
normalize = function("cosmos", "algorithm.normalize")
clipping = function("cosmos", "algorithm.clipping")
distillation = function("cosmos", "algorithm.distillation")
engine_probabilities = function("cosmos", "algorithm.engine_probabilities")
far_from_policy = function("cosmos", "algorithm.far_from_policy")
reference = function("cosmos", "algorithm.reference")

POLICY = "train.train_policy."


def values(kind: str = "grpo", **given: Any) -> dict[str, Any]:
    """A file's values; names are those of train.train_policy."""
    out = {row.key: row.default for row in dialect(f"cosmos-{kind}").rows}
    out |= {"train.train_batch_per_replica": 16} if kind == "grpo" else {}
    for name, value in given.items():
        assert POLICY + name in out, name
        out[POLICY + name] = value
    return out


def test_variants() -> None:
    for variant in ("grpo", "gspo", "dapo"):
        assert algorithm(values(variant=variant)) == {"algorithm.name": variant}
    assert algorithm(values("sft")) == {"algorithm.name": "sft"}
    for most, refills in ((4, 3), (-1, ALL)):
        given = values(variant="dapo", on_policy=True, max_retry_for_on_policy=most)
        assert algorithm(given) == {"algorithm.name": "dapo", "algorithm.max_refills": refills}
    for key, wrong in (("variant", "ppo"), ("type", "sft")):
        found = translate({"train": {"train_policy": {key: wrong}}}, dialect("cosmos-grpo"), origins={})
        assert any(f"{POLICY}{key}: got" in text for _, text in found.problems)


def test_groups_are_dropped_by_a_part_of_the_reward() -> None:
    both = {"variant": "dapo", "reward_function": ["gsm8k", "lib.py:mine"]}
    by = "algorithm.groups.uniform.by"
    assert algorithm(values(**both, filter_reward_metric="lib.py:mine"))[by] == ["mine"]
    assert by not in algorithm(values(**both, filter_reward_metric=["lib.py:mine", "gsm8k"])), (
        "the whole reward"
    )
    assert by not in algorithm(values(**both | {"variant": "grpo"}, filter_reward_metric="gsm8k")), (
        "nothing is dropped"
    )
    with pytest.raises(NotSupportedYet, match="'format' is not in reward_function"):
        algorithm(values(**both, filter_reward_metric="format"))


def test_the_ratio_is_bounded_on_two_sides_or_from_above() -> None:
    low, high, cap = ("algorithm.loss." + key for key in ("clip_low", "clip_high", "dual_clip"))
    assert clipping(values(epsilon_high=0.28)) == {low: 0.2, high: 0.28, cap: 3.0}
    assert clipping(values(epsilon_low=-1, epsilon_high=-1.0)) == {low: 1.0, high: 1e9, cap: 3.0}, "open"
    assert clipping(values(variant="gspo", epsilon_low=3e-4)) == {low: 3e-4, high: 0.2}, "no dual clip"
    assert clipping(values(aipo_rho=4.0)) == {"algorithm.loss": "aipo", "algorithm.loss.aipo_rho": 4.0}
    with pytest.raises(NotSupportedYet, match="gspo"):
        clipping(values(variant="gspo", aipo_rho=4.0))


def test_means_and_advantages() -> None:
    mean = "algorithm.loss_agg_mode"
    for kind in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
        assert aggregation(values(loss_type=kind)) == {mean: kind}
    constant = {"unbiased_loss_max_tokens": 100}
    assert aggregation(values(loss_type="seq-mean-token-mean", **constant)) == {
        mean: "seq-mean-token-sum-norm", "algorithm.norm_tokens": 100,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="loss_type"):
        aggregation(values(**constant))
    assert normalize(values()) == {"algorithm.advantage.std_ddof": 0}
    assert normalize(values(unbiased_advantage=True)) == {"algorithm.advantage.normalize_std": False}


def test_terms_that_zero_or_less_switches_off() -> None:
    assert terms(values(entropy_coeff=0.01)) == {
        "algorithm.entropy_coef": 0.01, "algorithm.entropy_agg_mode": "token-mean",
    }  # fmt: skip
    assert terms(values(positive_nll_coef=0.5)) == {"algorithm.positive_nll_coef": 0.5}
    assert terms(values(min_filter_prefix_tokens=3)) == {"algorithm.groups.min_shared_prefix": 3}
    for off in (-1, 0):
        assert terms(values(entropy_coeff=off, positive_nll_coef=off, min_filter_prefix_tokens=off)) == {}
    assert terms(values()) == {}


def test_the_decoupled_loss_masks_above_its_cap_and_keeps_the_count() -> None:
    at = "algorithm.correction."
    assert engine_probabilities(values(behav_imp_weight_cap=2.0)) == {}, "read with use_decoupled_loss alone"
    assert engine_probabilities(values(use_decoupled_loss=True)) == {at + "weight": "token"}
    assert engine_probabilities(values(use_decoupled_loss=True, behav_imp_weight_cap=2.0)) == {
        at + "weight": "token", at + "weight.high": 2.0, at + "weight.outside": "mask", at + "denominator": "all",
    }  # fmt: skip


def test_the_reference_is_reset_with_its_optimizer() -> None:
    every = {"reference_reset_interval": 5}
    assert reference(values(**every)) == {}, "no KL, no reference"
    reset = {"reference.reset_interval": 5, "reference.reset_optimizer": True}
    assert reference(values(**every, kl_beta=0.1)) == reset
    kept = values(**every, kl_beta=0.1, reset_optimizer_with_reference=False)
    assert reference(kept) == reset | {"reference.reset_optimizer": False}
    assert reference(values(kl_beta=0.1, unbiased_kl_estimate=True)) == {
        "algorithm.kl.estimator": "unbiased_k3"
    }


def test_the_engine_s_log_probs_are_the_ratio_s_denominator() -> None:
    given = values(use_rollout_logprobs_for_loss=True)
    assert engine_probabilities(given) == {"algorithm.old_logprobs": "sampled"}
    with pytest.raises(ConfigError, match="give one of them"):
        engine_probabilities(given | {POLICY + "use_decoupled_loss": True})


def test_replies_far_from_the_policy_learn_nothing() -> None:
    assert far_from_policy(values()) == {}
    assert far_from_policy(values(off_policy_masking_delta=0.1)) == {
        "algorithm.loss.sequence_mask_delta": 0.1
    }
    for beside in ({"variant": "gspo"}, {"aipo_rho": 2.0}, {"use_decoupled_loss": True}):
        with pytest.raises(NotSupportedYet, match="off_policy_masking_delta"):
            far_from_policy(values(off_policy_masking_delta=0.1, **beside))


def test_a_teacher_in_place_of_rewards() -> None:
    on = {"distillation.enable": True, "distillation.model_name_or_path": "teacher"}
    assert distillation(values()) == {}
    assert distillation(values() | on | {"distillation.kl_penalty_coef": 0.5}) == {
        "algorithm.advantage": "distill", "algorithm.advantage.distill_coef": 0.5, "reference.path": "teacher",
    }  # fmt: skip
    later = distillation(values() | on | {"distillation.kl_discount_factor": 0.9})
    assert later["algorithm.advantage.distill_discount"] == 0.9
    assert distillation(values() | on | {"distillation.top_k": -1}) == distillation(values() | on)
    with pytest.raises(NotSupportedYet, match="include_prompt"):
        distillation(values() | on | {"distillation.include_prompt": True})
    with pytest.raises(NotSupportedYet, match="kl_beta"):
        distillation(values(kl_beta=0.1) | on)
    for wrong in (values("sft"), values(variant="dapo")):
        with pytest.raises(ConfigError, match=r"distillation\.enable"):
            distillation(wrong | on)


def test_a_teacher_that_judges_likely_tokens() -> None:
    on = {"distillation.enable": True, "distillation.model_name_or_path": "teacher", "distillation.top_k": 8}
    at, given = "algorithm.loss.", {"distillation.jsd_beta": 0.3, "distillation.kl_penalty_coef": 2.0}
    assert algorithm(values() | {"distillation.top_k": 8}) == {"algorithm.name": "grpo"}, "no teacher"
    assert algorithm(values(variant="gspo") | on) == {"algorithm.name": "gkd"}
    assert distillation(values() | on | given) == {
        at + "divergence": "jsd_topk", at + "jsd_beta": 0.3, at + "top_k": 8, at + "top_k_of": "policy",
        at + "top_k_rest": "drop", at + "distill_coef": 2.0, "reference.path": "teacher",
    }  # fmt: skip
    for wrong in (
        values() | {"distillation.kl_discount_factor": 0.5},
        values(aipo_rho=2.0),
        values(use_decoupled_loss=True),
        values(off_policy_masking_delta=0.1),
    ):
        with pytest.raises(NotSupportedYet, match=r"with distillation\.top_k=8"):
            distillation(wrong | on)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        distillation(values() | on | {"distillation.jsd_beta": 1.5})


def test_trainers_of_other_models_are_coming() -> None:
    assert trainer(values()) == trainer(values("sft")) == {}
    for name, what in (("diffusion_nft", "diffusion"), ("grpo_vla", "vision-language-action")):
        with pytest.raises(AnotherModel, match=what):
            trainer(values(trainer_type=name))
    with pytest.raises(NotSupportedYet, match="of your own"):
        trainer(values(trainer_type="mine"))
    with pytest.raises(NotSupportedYet, match="without a reference"):
        trainer(values("sft", trainer_type="dpo"))
