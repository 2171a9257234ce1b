"""When each part of an algorithm is read: from the tables of its functions, beside what one setting says of another.

A default that is written out passes: a stage may reset what the base config says, and a file may name all settings.
"""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.conditions import ONLINE, Condition, Rule, under
from whet.config.functions import ADVANTAGES, LOSSES, SETTINGS, Advantage, Loss

OF_ROLLOUTS = (
    *("advantage", "mix", "correction", "reward_kl", "positive_nll_coef", "whiten", "whiten_ddof"),
    *("advantage_low", "advantage_high", "resample", "resample_power", "refill", "old_logprobs"),
    *("dynamic_sampling", "max_refills"),
)
"""Parts of `algorithm` that only mean something where the policy samples."""

WHOLE = tuple(name for name, row in LOSSES.items() if row.pairs or row.whole_replies)
"""Losses that are one number a pair or a reply."""

BY_TOKEN: Condition = {"not": {"condition": "loss", "in": list(WHOLE)}}
WEIGHTED: Condition = {"key": "algorithm.correction.weight", "given": True}
BOUNDED: Condition = {
    "any": [
        {"key": "algorithm.correction.low", "given": True},
        {"key": "algorithm.correction.high", "given": True},
    ]
}


def _readers(setting: str) -> Condition:
    """That advantage or loss reads a setting."""
    losses = _who(LOSSES, setting)
    named = {"advantage": _who(ADVANTAGES, setting), "loss": losses, "expert_loss": losses}
    of_table = [{"condition": name, "in": who} for name, who in named.items() if who]
    return {"any": [*of_table, {"condition": "own_function"}]}


def _who(table: Mapping[str, Advantage] | Mapping[str, Loss], setting: str) -> list[str]:
    return [name for name, row in table.items() if setting in row.settings]


def _of_loss(loss: str, condition: Condition) -> Condition:
    """A condition that matters with one loss only."""
    return {"any": [{"not": {"condition": "loss", "is": loss}}, condition]}


def _rule(keys: tuple[str, ...], read_when: Condition, why: str) -> Rule:
    return Rule(under("algorithm", *keys), read_when, why, default_passes=True)


SETTING_RULES: tuple[Rule, ...] = (
    _rule(OF_ROLLOUTS, ONLINE, "the replies are in the data ({kind})"),
    *(
        _rule((setting,), _readers(setting), "advantage={advantage} and loss={loss} do not read it")
        for setting in sorted(SETTINGS)
    ),
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
        "the loss {loss} is one number a pair or a reply, and their mean is taken",
    ),
    _rule(
        ("kl", "reward_kl"),
        BY_TOKEN,
        "the loss {loss} is about whole replies and has no place for a KL at every token (how far dpo and kto may go "
        "from the reference is algorithm.beta)",
    ),
    _rule(
        ("entropy_agg_mode",),
        {"not": {"key": "algorithm.entropy_coef", "is": 0.0}},
        "algorithm.entropy_coef is 0",
    ),
    _rule(
        ("sequence_mask_delta", "clip_low", "clip_high"),
        _of_loss("ppo", {"not": {"key": "algorithm.fallback_to_policy_gradient"}}),
        "algorithm.fallback_to_policy_gradient is true",
    ),
    _rule(
        ("clip_low", "clip_high"),
        _of_loss("rec", {"not": {"key": "algorithm.rec_clip_mode", "is": "none"}}),
        "algorithm.rec_clip_mode is none",
    ),
    _rule(
        ("rec_ring_low", "rec_ring_high"),
        _of_loss("rec", {"key": "algorithm.rec_clip_mode", "is": "ring"}),
        "algorithm.rec_clip_mode is not ring",
    ),
    _rule(
        ("rec_temperature",),
        _of_loss("rec", {"key": "algorithm.rec_weight", "is": "advantage"}),
        "algorithm.rec_weight is not advantage",
    ),
    _rule(
        ("rec_regularizer_coef",),
        _of_loss("rec", {"not": {"key": "algorithm.rec_regularizer", "is": "none"}}),
        "algorithm.rec_regularizer is none",
    ),
    _rule(
        ("label_smoothing",),
        _of_loss("dpo", {"key": "algorithm.pair_loss", "in": ["sigmoid", "robust"]}),
        "algorithm.pair_loss={cfg.algorithm.pair_loss} has none: set it to sigmoid or robust",
    ),
    _rule(
        ("reward_kl.target",),
        {"key": "algorithm.reward_kl.coef", "above": 0},
        "it steers the weight from where it starts, and algorithm.reward_kl.coef is 0",
    ),
    _rule(
        ("reward_kl.horizon",),
        {"key": "algorithm.reward_kl.target", "given": True},
        "algorithm.reward_kl.target is not given",
    ),
    _rule(
        ("mix.mu_decay_steps",),
        {"key": "algorithm.mix.mu_valley", "given": True},
        "mix.mu_valley, where mu falls to, is not given",
    ),
    _rule(
        tuple(f"correction.{key}" for key in ("low", "high", "normalize", "outside")),
        WEIGHTED,
        "algorithm.correction.weight is not given, so there is nothing to bound or normalize",
    ),
    _rule(
        ("correction.outside",),
        BOUNDED,
        "neither algorithm.correction.low nor high is given, so nothing is outside",
    ),
    _rule(
        ("correction.denominator",),
        {
            "any": [
                {"key": "algorithm.correction.reject", "longer": 0},
                {"key": "algorithm.correction.outside", "is": "mask"},
            ]
        },
        "nothing is masked or rejected",
    ),
)
