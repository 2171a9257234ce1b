"""When each part of an algorithm is read, and what one setting of a loss says of another.

A default that is written out passes: a stage may reset a value of the base config, and a file may list all settings.
"""

from __future__ import annotations

from whet.config.conditions import ONLINE, Condition, Rule, read_when, under
from whet.config.functions import LOSSES

OF_ROLLOUTS = (
    *("advantage", "mix", "correction", "reward_kl", "positive_nll_coef", "whiten", "whiten_ddof"),
    *(
        "advantage_low",
        "advantage_high",
        "top_entropy_quantile",
        "resample",
        "resample_power",
        "refill",
        "old_logprobs",
    ),
    *("dynamic_sampling", "max_refills"),
)
"""Parts of `algorithm` that have a meaning only where the policy samples."""

WHOLE = tuple(name for name, row in LOSSES.items() if row.whole_replies)
"""Losses with one number per reply."""

PAIRS = tuple(name for name, row in LOSSES.items() if row.pairs)
"""Losses with one number per pair."""

SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo")
"""Losses of pairs that assume a share of flipped labels."""

BY_TOKEN: Condition = {"not": {"condition": "loss", "in": [*PAIRS, *WHOLE]}}
BOUNDED: Condition = {
    "any": [
        {"condition": "correction.weight.low", "given": True},
        {"condition": "correction.weight.high", "given": True},
    ]
}


def _rule(keys: tuple[str, ...], condition: Condition, why: str) -> Rule:
    return read_when(under("algorithm", *keys), condition, why, default_passes=True)


SETTING_RULES: tuple[Rule, ...] = (
    _rule(OF_ROLLOUTS, ONLINE, "the replies are in the data ({kind})"),
    _rule(
        ("mean_over_rollouts",),
        {"condition": "loss_agg_mode", "is": "token-mean"},
        "loss_agg_mode={loss_agg_mode} is no mean over tokens of several rollouts",
    ),
    _rule(
        ("norm_tokens",),
        {"condition": "loss_agg_mode", "in": ["seq-mean-token-sum-norm", "token-sum-norm"]},
        "loss_agg_mode={loss_agg_mode} divides by no fixed length",
    ),
    _rule(
        ("loss_agg_mode", "entropy_coef"),
        BY_TOKEN,
        "loss={loss} is one number per pair or per reply, and the mean of these is taken",
    ),
    _rule(
        ("kl", "reward_kl"),
        {"not": {"condition": "loss", "in": list(WHOLE)}},
        "loss={loss} is defined on whole replies and has no KL per token (algorithm.loss.beta bounds the distance to "
        "the reference)",
    ),
    _rule(
        ("entropy_agg_mode",),
        {"not": {"key": "algorithm.entropy_coef", "is": 0.0}},
        "algorithm.entropy_coef is 0",
    ),
    _rule(
        under("loss", "sequence_mask_delta", "clip_low", "clip_high"),
        {"not": {"condition": "loss.fallback_to_policy_gradient"}},
        "algorithm.loss.fallback_to_policy_gradient is true",
    ),
    _rule(
        under("loss", "sequence_mask_anchor"),
        {"condition": "loss.sequence_mask_delta", "given": True},
        "algorithm.loss.sequence_mask_delta is not given",
    ),
    _rule(
        under("loss", "mask_low", "mask_high"),
        {"condition": "loss.cispo_mask"},
        "algorithm.loss.cispo_mask is false",
    ),
    _rule(
        under("loss", "clip_low", "clip_high"),
        {"not": {"condition": "loss.rec_clip_mode", "is": "none"}},
        "algorithm.loss.rec_clip_mode is none",
    ),
    _rule(
        under("loss", "rec_ring_low", "rec_ring_high"),
        {"condition": "loss.rec_clip_mode", "is": "ring"},
        "algorithm.loss.rec_clip_mode is not ring",
    ),
    _rule(
        under("loss", "rec_temperature"),
        {"condition": "loss.rec_weight", "is": "advantage"},
        "algorithm.loss.rec_weight is not advantage",
    ),
    _rule(
        under("loss", "rec_regularizer_coef"),
        {"not": {"condition": "loss.rec_regularizer", "is": "none"}},
        "algorithm.loss.rec_regularizer is none",
    ),
    _rule(
        ("advantage", "reward_kl", "whiten", "whiten_ddof", "advantage_low", "advantage_high", "correction"),
        {"not": {"condition": "loss", "is": "gkd"}},
        "loss=gkd reads no advantage and has no ratio",
    ),
    _rule(
        ("top_entropy_quantile",),
        {"not": {"condition": "loss", "in": ["gkd", "cross_entropy"]}},
        "loss={loss} reads no advantage",
    ),
    _rule(
        under("advantage", "distill_mixture"),
        {"condition": "advantage.distill_estimator", "is": "jsd"},
        "algorithm.advantage.distill_estimator is not jsd",
    ),
    _rule(
        under("loss", "top_k", "min_logprob"),
        {"condition": "loss.divergence", "is": "forward_topk"},
        "algorithm.loss.divergence is not forward_topk",
    ),
    _rule(
        under("loss", "max_divergence"),
        {"not": {"condition": "loss.divergence", "is": "full"}},
        "algorithm.loss.divergence=full is not bounded",
    ),
    _rule(
        under("loss", "label_smoothing"),
        {
            "any": [
                {"condition": "loss", "is": "cpo"},
                {"condition": "loss.pair_loss", "holds": list(SMOOTHED)},
            ]
        },
        f"the pair_loss of algorithm.loss has none: {', '.join(SMOOTHED)} have one",
    ),
    _rule(
        under("loss", "pair_weights"),
        {"condition": "loss.pair_loss", "longer": 1},
        "algorithm.loss.pair_loss names one loss, whose weight is 1",
    ),
    _rule(
        under("loss", "ipo_mean"),
        {"condition": "loss.pair_loss", "holds": ["ipo"]},
        "algorithm.loss.pair_loss does not name ipo",
    ),
    _rule(
        ("reward_kl.target",),
        {"key": "algorithm.reward_kl.coef", "above": 0},
        "algorithm.reward_kl.coef is 0, which is the initial weight of the controller",
    ),
    _rule(
        ("reward_kl.horizon",),
        {"key": "algorithm.reward_kl.target", "given": True},
        "algorithm.reward_kl.target is not given",
    ),
    _rule(
        ("mix.mu_decay_steps",),
        {"key": "algorithm.mix.mu_valley", "given": True},
        "mix.mu_valley, the final value of mu, is not given",
    ),
    _rule(
        ("correction.weight.outside",),
        BOUNDED,
        "neither low nor high of algorithm.correction.weight is given, so no weight is outside the bounds",
    ),
    _rule(
        ("correction.denominator",),
        {
            "any": [
                {"key": "algorithm.correction.reject", "longer": 0},
                {"condition": "correction.weight.outside", "is": "mask"},
            ]
        },
        "nothing is masked or rejected",
    ),
)
