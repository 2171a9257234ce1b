"""The functions that an algorithm is made of, by name: what each reads and needs. Plain values, readable without torch.

The functions themselves are `whet.algos.advantages.ADVANTAGES` and `whet.algos.losses.LOSSES`; a test holds the two
together. Formulas and sources stand in docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from whet.config import settings
from whet.config.sections.base import Section

Kind = Literal["online", "demonstrations", "preferences", "labels"]
"""What is learned from: the policy's own rollouts, given replies, pairs of a better and a worse one, replies marked as
desirable or not."""

Need = Literal[
    "critic", "reference", "baseline", "entropy", "collision", "discriminant", "centred_discriminant", "kl_zero", "old"
]  # fmt: skip
"""What must be at hand beside rewards: values, reference log-probs, the greedy reply's reward, entropies, the sum of
p^2, by how much the entropy falls with a token's logit, KTO's reference point, log-probs of the policy before the
step."""

Skips = Literal["nothing", "no weight", "no advantage"]
"""Rollouts that have no part in a loss's gradient, whatever the policy says of them, nor in that of other rollouts:
nothing (it looks across rollouts), those that weigh 0, or also those whose advantage is 0 at every token."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """What every function of an algorithm has."""

    settings: type[Section] = settings.NoSettings
    needs: frozenset[Need] = frozenset()


@dataclass(frozen=True, kw_only=True)
class WeightEntry(Function):
    """How much a token counts that another policy sampled."""

    settings: type[Section] = settings.ImportanceWeight


@dataclass(frozen=True, kw_only=True)
class AdvantageEntry(Function):
    """What an advantage reads."""

    compares: bool = False
    """Rollouts of a task are compared with each other: a group of one teaches nothing."""
    judged: bool = True
    """It reads the rewards of rollouts; else a run needs none."""


@dataclass(frozen=True, kw_only=True)
class LossEntry(Function):
    """What a loss reads, and what data it learns from."""

    kind: Kind = "online"
    ratio: bool = True
    """It compares with the policy before the step, or need not, so more than one optimizer step a batch is right."""
    anchor: Literal["old", "sampled", "none"] = "old"
    """What it compares with: the policy before the step, the engine's own log-probs as they are, or nothing."""
    judged: bool = True
    """It reads the advantage; else a run needs no rewards."""
    pairs: bool = False
    """One number a pair of replies, averaged over pairs."""
    whole_replies: bool = False
    """One number a reply, averaged over replies."""
    skips: Skips = "nothing"
    skips_if: Mapping[str, object] = field(default_factory=dict)
    """Settings under which it skips what has no advantage; under others it learns from that, too."""


ADVANTAGES: dict[str, AdvantageEntry] = {
    "grpo": AdvantageEntry(
        settings=settings.Grpo,
        compares=True,
    ),
    "gdpo": AdvantageEntry(settings=settings.Gdpo, compares=True),
    "grpo_passk": AdvantageEntry(settings=settings.GroupStd, compares=True),
    "rloo": AdvantageEntry(settings=settings.Rloo, compares=True),
    "rec": AdvantageEntry(settings=settings.RecAdvantage, compares=True),
    "opo": AdvantageEntry(compares=True),
    "gpg": AdvantageEntry(settings=settings.Gpg, compares=True),
    "opmd": AdvantageEntry(settings=settings.OpmdAdvantage, compares=True),
    "asymre": AdvantageEntry(settings=settings.Asymre, compares=True),
    "maxrl": AdvantageEntry(settings=settings.Maxrl, compares=True),
    "best": AdvantageEntry(compares=True),
    "gae": AdvantageEntry(settings=settings.Gae, needs=frozenset({"critic"})),
    "turn_level_gae": AdvantageEntry(settings=settings.TurnLevelGae, needs=frozenset({"critic"})),
    "reinforce": AdvantageEntry(
        settings=settings.Discount,
    ),
    "reinforce_plus_plus": AdvantageEntry(settings=settings.ReinforcePlusPlus),
    "reinforce_plus_plus_baseline": AdvantageEntry(compares=True),
    "remax": AdvantageEntry(needs=frozenset({"baseline"})),
    "gigpo": AdvantageEntry(
        settings=settings.Gigpo,
        compares=True,
    ),
    "step_wise_grpo": AdvantageEntry(settings=settings.StepWiseGrpo, compares=True),
    **dict.fromkeys(
        ("optimal_token_baseline", "tir_optimal_token_baseline"),
        AdvantageEntry(
            settings=settings.OptimalTokenBaseline, needs=frozenset({"collision", "old"}), compares=True
        ),
    ),
    "distill": AdvantageEntry(settings=settings.Distill, needs=frozenset({"reference", "old"}), judged=False),
    "reward": AdvantageEntry(),
    "none": AdvantageEntry(),
}

LOSSES: dict[str, LossEntry] = {
    "ppo": LossEntry(
        settings=settings.Ppo,
        skips="no advantage",
    ),
    "gspo": LossEntry(settings=settings.Gspo, skips="no advantage"),
    "geo_mean": LossEntry(settings=settings.GeoMean, skips="no advantage"),
    "vespo": LossEntry(settings=settings.Vespo, skips="no advantage"),
    "cispo": LossEntry(
        settings=settings.Cispo,
        skips="no advantage",
    ),
    "sapo": LossEntry(settings=settings.Sapo, skips="no advantage"),
    "clip_cov": LossEntry(
        settings=settings.ClipCov,
    ),
    "kl_cov": LossEntry(
        settings=settings.KlCov,
    ),
    "dppo": LossEntry(
        settings=settings.Dppo,
        anchor="sampled",
        skips="no advantage",
    ),
    "aipo": LossEntry(settings=settings.Aipo, skips="no advantage"),
    "softmax_ppo": LossEntry(settings=settings.SoftmaxPpo, skips="no advantage"),
    "importance_sampling": LossEntry(skips="no advantage"),
    "rollout_is": LossEntry(settings=settings.Clip, anchor="sampled", skips="no advantage"),
    "reinforce": LossEntry(ratio=False, skips="no advantage"),
    "gpg": LossEntry(ratio=False, skips="no advantage"),
    "reinforce_is": LossEntry(settings=settings.ReinforceIs, anchor="sampled", skips="no advantage"),
    "dro": LossEntry(settings=settings.Dro, skips="no weight"),
    "opmd": LossEntry(settings=settings.Opmd, anchor="none", skips="no advantage"),
    "topr": LossEntry(settings=settings.Topr, skips="no advantage"),
    "rec": LossEntry(
        settings=settings.Rec,
        skips="no advantage",
        skips_if={"rec_regularizer": "none"},
    ),
    "cross_entropy": LossEntry(anchor="none", skips="no weight"),
    "gkd": LossEntry(
        settings=settings.Gkd, needs=frozenset({"reference"}), anchor="none", judged=False, skips="no weight"
    ),
    "sft": LossEntry(kind="demonstrations", ratio=False, skips="no weight"),
    "sft_is": LossEntry(kind="demonstrations", ratio=False, skips="no weight"),
    "sft_phi": LossEntry(settings=settings.SftPhi, kind="demonstrations", ratio=False, skips="no weight"),
    "dpo": LossEntry(
        settings=settings.Dpo,
        kind="preferences",
        needs=frozenset({"reference"}),
        ratio=False,
        pairs=True,
    ),
    "online_dpo": LossEntry(settings=settings.Dpo, needs=frozenset({"reference"}), anchor="none", pairs=True),
    "simpo": LossEntry(
        settings=settings.Simpo,
        kind="preferences",
        ratio=False,
        pairs=True,
    ),
    "cpo": LossEntry(settings=settings.Cpo, kind="preferences", ratio=False, pairs=True),
    "orpo": LossEntry(settings=settings.Orpo, kind="preferences", ratio=False, pairs=True),
    "kto": LossEntry(
        settings=settings.Kto,
        kind="labels",
        needs=frozenset({"reference", "kl_zero"}),
        ratio=False,
        whole_replies=True,
        skips="no weight",
    ),
}

WEIGHTS: dict[str, WeightEntry] = {name: WeightEntry() for name in ("token", "sequence", "geometric")}
