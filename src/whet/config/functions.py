"""The functions that an algorithm is made of, by name: what each reads and needs. Plain values, readable without torch.

The functions themselves are `whet.algos.advantages.ADVANTAGES` and `whet.algos.losses.LOSSES`; a test holds the two
together. Formulas and sources stand in docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["online", "demonstrations", "preferences", "labels"]
"""What is learned from: the policy's own rollouts, given replies, pairs of a better and a worse one, replies marked as
desirable or not."""

Need = Literal["critic", "reference", "baseline", "collision", "kl_zero", "old"]
"""What must be at hand beside rewards: values, reference log-probs, the greedy reply's reward, the sum of p^2, KTO's
reference point, log-probs of the policy before the step."""

Skips = Literal["nothing", "no weight", "no advantage"]
"""Rollouts that have no part in a loss's gradient, whatever the policy says of them, nor in that of other rollouts:
nothing (it looks across rollouts), those that weigh 0, or also those whose advantage is 0 at every token."""


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """What an advantage reads."""

    reads: frozenset[str] = frozenset()
    """Keys of `algorithm` with a default of their own."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Keys of `algorithm` that are null unless given, and what null means here (a recipe may say otherwise)."""
    needs: frozenset[Need] = frozenset()
    compares: bool = False
    """Rollouts of a task are compared with each other: a group of one teaches nothing."""
    judged: bool = True
    """It reads the rewards of rollouts; else a run needs none."""

    @property
    def settings(self) -> frozenset[str]:
        return self.reads | self.defaults.keys()


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a loss reads, and what data it learns from."""

    kind: Kind = "online"
    reads: frozenset[str] = frozenset()
    defaults: Mapping[str, object] = field(default_factory=dict)
    needs: frozenset[Need] = frozenset()
    ratio: bool = True
    """It compares with the policy before the step, or need not, so more than one optimizer step a batch is right."""
    anchor: Literal["old", "sampled", "none"] = "old"
    """What it compares with: the policy before the step, the engine's own log-probs as they are, or nothing."""
    pairs: bool = False
    """One number a pair of replies, averaged over pairs."""
    whole_replies: bool = False
    """One number a reply, averaged over replies."""
    skips: Skips = "nothing"
    skips_if: Mapping[str, object] = field(default_factory=dict)
    """Settings under which it skips what has no advantage; under others it learns from that, too."""

    @property
    def settings(self) -> frozenset[str]:
        return self.reads | self.defaults.keys()


ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(
        reads=frozenset({"std_epsilon", "std_ddof", "std_floor", "std_scope", "rank_penalty"}),
        defaults={"normalize_std": True},
        compares=True,
    ),
    "grpo_passk": Advantage(
        reads=frozenset({"std_epsilon", "std_ddof"}), defaults={"normalize_std": True}, compares=True
    ),
    "rloo": Advantage(reads=frozenset({"single_rollout"}), compares=True),
    "rec": Advantage(reads=frozenset({"std_epsilon"}), defaults={"normalize_std": False}, compares=True),
    "opo": Advantage(compares=True),
    "gpg": Advantage(compares=True),
    "opmd": Advantage(reads=frozenset({"opmd_baseline", "tau"}), compares=True),
    "asymre": Advantage(reads=frozenset({"baseline_shift"}), compares=True),
    "maxrl": Advantage(reads=frozenset({"std_epsilon"}), compares=True),
    "best": Advantage(compares=True),
    "gae": Advantage(reads=frozenset({"gamma", "lam"}), needs=frozenset({"critic"})),
    "reinforce": Advantage(reads=frozenset({"gamma"})),
    "reinforce_plus_plus": Advantage(reads=frozenset({"gamma"})),
    "reinforce_plus_plus_baseline": Advantage(compares=True),
    "remax": Advantage(needs=frozenset({"baseline"})),
    "gigpo": Advantage(
        reads=frozenset({"std_epsilon", "gamma", "turn_weight"}),
        defaults={"normalize_std": True},
        compares=True,
    ),
    "step_wise_grpo": Advantage(
        reads=frozenset({"std_epsilon", "std_ddof", "divide_by_turns"}), compares=True
    ),
    "optimal_token_baseline": Advantage(needs=frozenset({"collision", "old"}), compares=True),
    "tir_optimal_token_baseline": Advantage(needs=frozenset({"collision", "old"}), compares=True),
    "distill": Advantage(
        reads=frozenset({"distill_coef"}), needs=frozenset({"reference", "old"}), judged=False
    ),
    "reward": Advantage(),
    "none": Advantage(),
}

LOSSES: dict[str, Loss] = {
    "ppo": Loss(
        reads=frozenset({"fallback_to_policy_gradient"}),
        defaults={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "sequence_mask_delta": None},
        skips="no advantage",
    ),
    "gspo": Loss(
        defaults={"clip_low": 3e-4, "clip_high": 4e-4, "gspo_form": "sequence"}, skips="no advantage"
    ),
    "geo_mean": Loss(defaults={"clip_low": 0.4, "clip_high": 0.4}, skips="no advantage"),
    "cispo": Loss(
        reads=frozenset({"cispo_mask"}),
        defaults={"clip_low": 1.0, "clip_high": 4.0},
        skips="no advantage",
    ),
    "sapo": Loss(reads=frozenset({"tau_pos", "tau_neg", "sapo_detach"}), skips="no advantage"),
    "clip_cov": Loss(
        reads=frozenset({"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"}),
        defaults={"clip_low": 0.2, "clip_high": 0.2},
    ),
    "kl_cov": Loss(reads=frozenset({"kl_cov_ratio", "ppo_kl_coef"})),
    "dppo": Loss(
        reads=frozenset({"dppo_divergence", "dppo_delta_low", "dppo_delta_high"}),
        anchor="sampled",
        skips="no advantage",
    ),
    "aipo": Loss(reads=frozenset({"aipo_rho"}), skips="no advantage"),
    "sppo": Loss(reads=frozenset({"sppo_epsilon"}), skips="no advantage"),
    "importance_sampling": Loss(skips="no advantage"),
    "rollout_is": Loss(defaults={"clip_low": 0.2, "clip_high": 0.2}, anchor="sampled", skips="no advantage"),
    "reinforce": Loss(ratio=False, skips="no advantage"),
    "gpg": Loss(ratio=False, skips="no advantage"),
    "opmd": Loss(reads=frozenset({"tau"}), anchor="none", skips="no advantage"),
    "topr": Loss(reads=frozenset({"topr_threshold"}), skips="no advantage"),
    "rec": Loss(
        reads=frozenset(
            {
                "rec_clip_mode",
                "rec_ring_low",
                "rec_ring_high",
                "rec_weight",
                "rec_temperature",
                "rec_regularizer",
                "rec_regularizer_coef",
            }
        ),
        defaults={"clip_low": 0.2, "clip_high": 0.2},
        skips="no advantage",
        skips_if={"rec_regularizer": "none"},
    ),
    "cross_entropy": Loss(anchor="none", skips="no weight"),
    "sft": Loss(kind="demonstrations", ratio=False, skips="no weight"),
    "sft_is": Loss(kind="demonstrations", ratio=False, skips="no weight"),
    "sft_phi": Loss(kind="demonstrations", reads=frozenset({"phi_cutoff"}), ratio=False, skips="no weight"),
    "dpo": Loss(
        kind="preferences",
        reads=frozenset({"label_smoothing", "pair_loss"}),
        defaults={"beta": 0.1},
        needs=frozenset({"reference"}),
        ratio=False,
        pairs=True,
    ),
    "simpo": Loss(
        kind="preferences",
        reads=frozenset({"target_margin"}),
        defaults={"beta": 2.0},
        ratio=False,
        pairs=True,
    ),
    "orpo": Loss(kind="preferences", reads=frozenset({"odds_weight"}), ratio=False, pairs=True),
    "kto": Loss(
        kind="labels",
        reads=frozenset({"desirable_weight", "undesirable_weight"}),
        defaults={"beta": 0.1},
        needs=frozenset({"reference", "kl_zero"}),
        ratio=False,
        whole_replies=True,
        skips="no weight",
    ),
}

SETTINGS: frozenset[str] = frozenset().union(
    *(row.settings for row in ADVANTAGES.values()), *(row.settings for row in LOSSES.values())
)
"""Keys that are given to advantages and losses, by the names in their signatures."""
