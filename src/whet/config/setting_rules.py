"""When each part of an algorithm is read: from the tables of its functions, so that a form can hide the others.

`recipes.resolve` refuses such a key once its value is not the default (a stage may reset what the base config says);
its error gives the reason. Conditions are those of `idle.NAMED`.
"""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.conditions import Condition, Rule, under
from whet.config.functions import ADVANTAGES, LOSSES, SETTINGS, Advantage, Loss
from whet.config.idle_rules import ONLINE
from whet.config.recipes import ONLINE as ONLINE_KEYS

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


def _rule(keys: tuple[str, ...], read_when: Condition) -> Rule:
    return Rule(under("algorithm", *keys), read_when, "")


OWN_RATIO = _of_loss("ppo", {"not": {"key": "algorithm.fallback_to_policy_gradient"}})

SETTING_RULES: tuple[Rule, ...] = (
    *(_rule((setting,), _readers(setting)) for setting in sorted(SETTINGS)),
    _rule((*sorted(ONLINE_KEYS), "advantage", "mix", "correction", "reward_kl", "positive_nll_coef"), ONLINE),
    _rule(
        ("norm_tokens",), {"condition": "aggregation", "in": ["seq-mean-token-sum-norm", "token-sum-norm"]}
    ),
    _rule(("aggregation", "entropy_coef", "kl"), BY_TOKEN),
    _rule(("entropy_aggregation",), {"not": {"key": "algorithm.entropy_coef", "is": 0.0}}),
    _rule(("sequence_mask_delta", "clip_low", "clip_high"), OWN_RATIO),
    _rule(
        ("clip_low", "clip_high"), _of_loss("rec", {"not": {"key": "algorithm.rec_clip_mode", "is": "none"}})
    ),
    _rule(
        ("rec_ring_low", "rec_ring_high"), _of_loss("rec", {"key": "algorithm.rec_clip_mode", "is": "ring"})
    ),
    _rule(("rec_temperature",), _of_loss("rec", {"key": "algorithm.rec_weight", "is": "advantage"})),
    _rule(
        ("rec_regularizer_coef",),
        _of_loss("rec", {"not": {"key": "algorithm.rec_regularizer", "is": "none"}}),
    ),
    _rule(
        ("label_smoothing",),
        _of_loss("dpo", {"key": "algorithm.pair_loss", "in": ["sigmoid", "robust"]}),
    ),
    _rule(("reward_kl.target",), {"key": "algorithm.reward_kl.coef", "above": 0}),
    _rule(("reward_kl.horizon",), {"key": "algorithm.reward_kl.target", "given": True}),
    _rule(("mix.mu_decay_steps",), {"key": "algorithm.mix.mu_valley", "given": True}),
    _rule(tuple(f"correction.{key}" for key in ("low", "high", "normalize", "outside")), WEIGHTED),
    _rule(("correction.outside",), BOUNDED),
    _rule(
        ("correction.denominator",),
        {
            "any": [
                {"key": "algorithm.correction.reject", "longer": 0},
                {"key": "algorithm.correction.outside", "is": "mask"},
            ]
        },
    ),
)
