"""The functions that an algorithm is made of, by name: what each reads and needs. Plain values, readable without torch.

The functions themselves are `whet.algos.advantages.ADVANTAGES` and `whet.algos.losses.LOSSES`; a test holds the two
together. Formulas and sources stand in docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from whet.config import settings
from whet.config.parts.base import Section

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
class Function:
    """What every function of an algorithm has."""

    settings: type[Section] = settings.NoSettings
    needs: frozenset[Need] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Weight(Function):
    """How much a token counts that another policy sampled."""

    settings: type[Section] = settings.ImportanceWeight


@dataclass(frozen=True, kw_only=True)
class Advantage(Function):
    """What an advantage reads."""

    compares: bool = False
    """Rollouts of a task are compared with each other: a group of one teaches nothing."""
    judged: bool = True
    """It reads the rewards of rollouts; else a run needs none."""


@dataclass(frozen=True, kw_only=True)
class Loss(Function):
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


ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(
        settings=settings.Grpo,
        compares=True,
    ),
    "gdpo": Advantage(settings=settings.Gdpo, compares=True),
    "grpo_passk": Advantage(settings=settings.GroupStd, compares=True),
    "rloo": Advantage(settings=settings.Rloo, compares=True),
    "rec": Advantage(settings=settings.RecAdvantage, compares=True),
    "opo": Advantage(compares=True),
    "gpg": Advantage(compares=True),
    "opmd": Advantage(settings=settings.OpmdAdvantage, compares=True),
    "asymre": Advantage(settings=settings.Asymre, compares=True),
    "maxrl": Advantage(settings=settings.Maxrl, compares=True),
    "best": Advantage(compares=True),
    "gae": Advantage(settings=settings.Gae, needs=frozenset({"critic"})),
    "reinforce": Advantage(
        settings=settings.Discount,
    ),
    "reinforce_plus_plus": Advantage(
        settings=settings.Discount,
    ),
    "reinforce_plus_plus_baseline": Advantage(compares=True),
    "remax": Advantage(needs=frozenset({"baseline"})),
    "gigpo": Advantage(
        settings=settings.Gigpo,
        compares=True,
    ),
    "step_wise_grpo": Advantage(settings=settings.StepWiseGrpo, compares=True),
    "optimal_token_baseline": Advantage(needs=frozenset({"collision", "old"}), compares=True),
    "tir_optimal_token_baseline": Advantage(needs=frozenset({"collision", "old"}), compares=True),
    "distill": Advantage(settings=settings.Distill, needs=frozenset({"reference", "old"}), judged=False),
    "reward": Advantage(),
    "none": Advantage(),
}

LOSSES: dict[str, Loss] = {
    "ppo": Loss(
        settings=settings.Ppo,
        skips="no advantage",
    ),
    "gspo": Loss(settings=settings.Gspo, skips="no advantage"),
    "geo_mean": Loss(settings=settings.GeoMean, skips="no advantage"),
    "cispo": Loss(
        settings=settings.Cispo,
        skips="no advantage",
    ),
    "sapo": Loss(settings=settings.Sapo, skips="no advantage"),
    "clip_cov": Loss(
        settings=settings.ClipCov,
    ),
    "kl_cov": Loss(
        settings=settings.KlCov,
    ),
    "dppo": Loss(
        settings=settings.Dppo,
        anchor="sampled",
        skips="no advantage",
    ),
    "aipo": Loss(settings=settings.Aipo, skips="no advantage"),
    "sppo": Loss(settings=settings.Sppo, skips="no advantage"),
    "importance_sampling": Loss(skips="no advantage"),
    "rollout_is": Loss(settings=settings.Clip, anchor="sampled", skips="no advantage"),
    "reinforce": Loss(ratio=False, skips="no advantage"),
    "gpg": Loss(ratio=False, skips="no advantage"),
    "opmd": Loss(settings=settings.Opmd, anchor="none", skips="no advantage"),
    "topr": Loss(settings=settings.Topr, skips="no advantage"),
    "rec": Loss(
        settings=settings.Rec,
        skips="no advantage",
        skips_if={"rec_regularizer": "none"},
    ),
    "cross_entropy": Loss(anchor="none", skips="no weight"),
    "gkd": Loss(
        settings=settings.Gkd, needs=frozenset({"reference"}), anchor="none", judged=False, skips="no weight"
    ),
    "sft": Loss(kind="demonstrations", ratio=False, skips="no weight"),
    "sft_is": Loss(kind="demonstrations", ratio=False, skips="no weight"),
    "sft_phi": Loss(settings=settings.SftPhi, kind="demonstrations", ratio=False, skips="no weight"),
    "dpo": Loss(
        settings=settings.Dpo,
        kind="preferences",
        needs=frozenset({"reference"}),
        ratio=False,
        pairs=True,
    ),
    "simpo": Loss(
        settings=settings.Simpo,
        kind="preferences",
        ratio=False,
        pairs=True,
    ),
    "orpo": Loss(settings=settings.Orpo, kind="preferences", ratio=False, pairs=True),
    "kto": Loss(
        settings=settings.Kto,
        kind="labels",
        needs=frozenset({"reference", "kl_zero"}),
        ratio=False,
        whole_replies=True,
        skips="no weight",
    ),
}

WEIGHTS: dict[str, Weight] = {"token": Weight(), "sequence": Weight(), "geometric": Weight()}
