"""What keys that hold a name may name, the functions of an algorithm above all: what each reads and needs. Plain
values, readable without torch.

The functions themselves are `whet.algos.advantages.ADVANTAGES` and `whet.algos.losses.LOSSES`; a test holds the two
together. Formulas and sources stand in docs/algorithms.md. `functions.tsv` has a line for each, with the columns:

    part      advantage, loss, weight (the importance weight of a correction), resample, uniform (which groups are too
              uniform to be trained on), oversample, entropy_control, entropy_clip, mu_schedule (of the weight of
              demonstrations), priority (of a group that is trained on again), order (of the rows of a source), reward,
              scratch (the family of a new model), or mtp (what layers of multi-token prediction learn)
    name      what a config says
    needs     what must be at hand (`Need`)
    more      further fields of its entry, as JSON
    about     its meaning in one line
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from whet.config.sections.base import Section
from whet.config.settings import section
from whet.tables import lines

Kind = Literal["online", "demonstrations", "preferences", "labels"]
"""What is learned from: the policy's own rollouts, given replies, pairs of a better and a worse one, replies marked as
desirable or not."""

Need = Literal[
    "critic", "implicit_reward", "reference", "baseline", "entropy", "collision", "discriminant",
    "centred_discriminant", "kl_zero", "old",
]  # fmt: skip
"""What must be at hand beside rewards: a critic's values, or its log-probs where it is a language model, reference
log-probs, the greedy reply's reward, entropies, the sum of p^2, by how much the entropy falls with a token's logit,
KTO's reference point, log-probs of the policy before the step."""

Skips = Literal["nothing", "no weight", "no advantage"]
"""Rollouts that have no part in a loss's gradient, whatever the policy says of them, nor in that of other rollouts:
nothing (it looks across rollouts), those that weigh 0, or also those whose advantage is 0 at every token."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """What every function of an algorithm has."""

    about: str = ""
    settings: type[Section] = Section
    needs: frozenset[Need] = frozenset()


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


F = TypeVar("F", bound=Function)


def _table(part: str, entry: type[F]) -> dict[str, F]:
    """The entries of one part by name."""
    return {
        line["name"]: entry(
            about=line["about"],
            settings=section(part, line["name"]),
            needs=frozenset(line["needs"].split()),  # type: ignore[arg-type]
            **json.loads(line["more"] or "{}"),
        )
        for line in lines("whet.config", "functions.tsv")
        if line["part"] == part
    }


ADVANTAGES = _table("advantage", AdvantageEntry)
LOSSES = _table("loss", LossEntry)
WEIGHTS = _table("weight", Function)
"""How much a token counts that another policy sampled."""
REWARDS = _table("reward", Function)
"""The rewards that come with whet."""
RESAMPLINGS = _table("resample", Function)
UNIFORM = _table("uniform", Function)
"""Which groups are too uniform to be trained on."""
ENTROPY_CONTROLS = _table("entropy_control", Function)
ENTROPY_CLIPS = _table("entropy_clip", Function)
MU_SCHEDULES = _table("mu_schedule", Function)
"""How the weight of the demonstrations changes."""
OVERSAMPLINGS = _table("oversample", Function)
PRIORITIES = _table("priority", Function)
ORDERS = _table("order", Function)
"""In which order the rows of a source are drawn."""
ARCHITECTURES = _table("scratch", Function)
"""Families of models that can be made new, by the `model_type` of their config.json."""
MTP_LOSSES = _table("mtp", Function)
"""What layers of multi-token prediction learn."""
