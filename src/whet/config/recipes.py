"""What each algorithm name means: a table of plain values, readable without torch.

`resolve` puts the user's keys over a recipe's and refuses what cannot work or would have no effect.
The functions behind the names are in `whet.algos`; formulas and sources in docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from whet.config.schema import Algorithm, Kl
from whet.tables import near
from whet.types import ConfigError

Kind = Literal["online", "demonstrations", "preferences"]
"""What a recipe learns from: the policy's own rollouts, given replies, pairs of a better and a worse one."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm's parts by name, and its source. KL and entropy are no part: both are off by default."""

    kind: Kind = "online"
    advantage: str
    loss: str
    aggregation: str
    normalize_std: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    whiten: bool = False
    drop_uniform_groups: bool = False
    needs_critic: bool = False
    source: str
    note: str


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(
        advantage="grpo",
        loss="ppo",
        aggregation="seq-mean-token-mean",
        source="arXiv:2402.03300 eq. 3",
        note="Reward against the group's mean, in units of its standard deviation; rollouts count the same. "
        "The paper adds kl.coef=0.04 with k3 in the loss.",
    ),
    "dr_grpo": Recipe(
        advantage="grpo",
        loss="ppo",
        aggregation="seq-mean-token-sum-norm",
        normalize_std=False,
        source="arXiv:2503.20783 section 3.2",
        note="GRPO without its two biases: no division by the deviation, a constant instead of the length.",
    ),
    "dapo": Recipe(
        advantage="grpo",
        loss="ppo",
        aggregation="token-mean",
        clip_high=0.28,
        drop_uniform_groups=True,
        source="arXiv:2503.14476 eq. 8",
        note="GRPO with clip-higher, dynamic sampling and token-level loss; add the reward 'overlong'.",
    ),
    "ppo": Recipe(
        advantage="gae",
        loss="ppo",
        aggregation="token-mean",
        whiten=True,
        needs_critic=True,
        source="arXiv:1707.06347 eq. 7; arXiv:1506.02438 eq. 16",
        note="A critic gives every token its own advantage.",
    ),
    "rloo": Recipe(
        advantage="rloo",
        loss="reinforce",
        aggregation="seq-mean-token-sum",
        source="arXiv:2402.14740",
        note="REINFORCE with the mean of the group's other rollouts as the baseline. On-policy: set loss=ppo "
        "for more than one optimizer step a batch.",
    ),
    "reinforce": Recipe(
        advantage="reinforce",
        loss="reinforce",
        aggregation="seq-mean-token-sum",
        source="doi:10.1007/BF00992696 (Williams 1992)",
        note="Discounted return times the gradient of the log-probability, no baseline. REINFORCE++ "
        "(arXiv:2501.03262): whiten=true, loss=ppo, kl.place=reward, kl.estimator=k1.",
    ),
    "sft": Recipe(
        kind="demonstrations",
        advantage="none",
        loss="sft",
        aggregation="token-mean",
        source="maximum likelihood",
        note="Cross entropy of the tokens of given replies.",
    ),
    "dpo": Recipe(
        kind="preferences",
        advantage="none",
        loss="dpo",
        aggregation="pair-mean",
        source="arXiv:2305.18290 eq. 7",
        note="Prefer the chosen reply to the rejected one, by log-probability against the reference.",
    ),
}

ADVANTAGE_SETTINGS: dict[str, frozenset[str]] = {
    "grpo": frozenset({"normalize_std", "std_epsilon"}),
    "rloo": frozenset(),
    "gae": frozenset({"gamma", "lam"}),
    "reinforce": frozenset({"gamma"}),
    "none": frozenset(),
}
"""Keys of `Algorithm` that each built-in advantage reads."""

LOSS_SETTINGS: dict[str, frozenset[str]] = {
    "ppo": frozenset({"clip_low", "clip_high", "dual_clip"}),
    "reinforce": frozenset(),
    "sft": frozenset(),
    "dpo": frozenset({"beta", "label_smoothing"}),
}
"""Keys of `Algorithm` that each built-in loss reads."""

LOSS_KIND: dict[str, Kind] = {
    "ppo": "online",
    "reinforce": "online",
    "sft": "demonstrations",
    "dpo": "preferences",
}

SETTINGS: frozenset[str] = frozenset().union(*ADVANTAGE_SETTINGS.values(), *LOSS_SETTINGS.values())
"""Keys that are given to advantages and losses, by the names in their signatures."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """An `Algorithm` section with nothing left open, save `norm_tokens` (None: rollout.max_tokens)."""

    name: str
    kind: Kind
    advantage: str
    loss: str
    aggregation: str
    norm_tokens: int | None
    normalize_std: bool
    std_epsilon: float
    clip_low: float
    clip_high: float
    dual_clip: float | None
    gamma: float
    lam: float
    whiten: bool
    entropy_coef: float
    kl: Kl
    old_logprobs: Literal["auto", "sampled", "recompute"]
    drop_uniform_groups: bool
    max_refills: int
    beta: float
    label_smoothing: float
    needs_critic: bool
    needs_reference: bool
    source: str
    note: str


def resolve(cfg: Algorithm) -> Resolved:
    """The recipe with the user's keys put over it. ConfigError for unknown names and for what cannot work."""
    recipe = RECIPES[_known(cfg.name, RECIPES, key="algorithm.name")]

    def pick(key: str) -> object:
        mine = getattr(cfg, key)
        return getattr(recipe, key) if mine is None else mine

    advantage, loss = str(pick("advantage")), str(pick("loss"))
    for key, name, table in (("advantage", advantage, ADVANTAGE_SETTINGS), ("loss", loss, LOSS_SETTINGS)):
        if ":" not in name:
            _known(name, table, key=f"algorithm.{key}")
    custom = ":" in advantage
    resolved = Resolved(
        name=cfg.name,
        kind=recipe.kind,
        advantage=advantage,
        loss=loss,
        aggregation=str(pick("aggregation")),
        norm_tokens=cfg.norm_tokens,
        normalize_std=bool(pick("normalize_std")),
        std_epsilon=cfg.std_epsilon,
        clip_low=recipe.clip_low if cfg.clip_low is None else cfg.clip_low,
        clip_high=recipe.clip_high if cfg.clip_high is None else cfg.clip_high,
        dual_clip=recipe.dual_clip if cfg.dual_clip is None else cfg.dual_clip,
        gamma=cfg.gamma,
        lam=cfg.lam,
        whiten=bool(pick("whiten")),
        entropy_coef=cfg.entropy_coef,
        kl=cfg.kl,
        old_logprobs=cfg.old_logprobs,
        drop_uniform_groups=bool(pick("drop_uniform_groups")),
        max_refills=cfg.max_refills,
        beta=cfg.beta,
        label_smoothing=cfg.label_smoothing,
        needs_critic=advantage == "gae" or (custom and recipe.needs_critic),
        needs_reference=cfg.kl.coef > 0 or recipe.kind == "preferences",
        source=recipe.source,
        note=recipe.note,
    )
    _check_parts(resolved)
    _check_kl(resolved)
    taken = ADVANTAGE_SETTINGS.get(advantage, SETTINGS) | LOSS_SETTINGS.get(loss, SETTINGS)
    refuse_unused(cfg, resolved, taken)
    return resolved


def refuse_unused(cfg: Algorithm, resolved: Resolved, taken: Collection[str]) -> None:
    """ConfigError for keys that were changed but nothing reads; `taken`: what advantage and loss read."""
    used = set(taken)
    if resolved.aggregation == "seq-mean-token-sum-norm":
        used.add("norm_tokens")
    if resolved.kind == "online":
        used |= {"whiten", "old_logprobs", "drop_uniform_groups", "max_refills"}
    watched = SETTINGS | {"norm_tokens", "whiten", "old_logprobs", "drop_uniform_groups", "max_refills"}
    for key in sorted(watched - used):
        value, default = getattr(cfg, key), Algorithm.model_fields[key].default
        if value != default and value is not False:
            raise ConfigError(
                f"algorithm.{key}={value!r} has no effect with name={resolved.name!r}, "
                f"advantage={resolved.advantage!r}, loss={resolved.loss!r}, "
                f"aggregation={resolved.aggregation!r}: leave it out (in a stage: reset it to {default!r})."
            )


def _known(name: str, table: Mapping[str, object], *, key: str) -> str:
    if name not in table:
        raise ConfigError(
            f"{key}={name!r} is not known{near(name, table)}; known: {', '.join(sorted(table))}."
        )
    return name


def _check_parts(r: Resolved) -> None:
    """Refuse a loss or an advantage that cannot learn from what the recipe is given."""
    wants = LOSS_KIND.get(r.loss, r.kind)
    if wants != r.kind:
        names = ", ".join(sorted(n for n, recipe in RECIPES.items() if recipe.kind == wants))
        raise ConfigError(
            f"algorithm.loss={r.loss!r} learns from {wants} data, but algorithm.name={r.name!r} gives it "
            f"{r.kind} data: set algorithm.name to one of {names}, or choose another loss."
        )
    if r.kind != "online" and r.advantage != "none":
        raise ConfigError(
            f"algorithm.advantage={r.advantage!r} has no effect with algorithm.name={r.name!r}, "
            f"which learns from {r.kind}: leave it out."
        )
    if (r.loss == "dpo") and (r.aggregation != "pair-mean" or r.entropy_coef != 0):
        raise ConfigError(
            "the loss 'dpo' is one number a pair, averaged over pairs: algorithm.aggregation and "
            "algorithm.entropy_coef do not apply, leave them out."
        )


def _check_kl(r: Resolved) -> None:
    """Refuse a KL term that would have no effect or no meaning."""
    kl = r.kl
    if kl.coef > 0 and r.loss == "dpo":
        raise ConfigError(
            "algorithm.kl.coef: the loss 'dpo' holds its own KL to the reference; use algorithm.beta."
        )
    if kl.coef > 0 and kl.place == "reward" and r.kind != "online":
        raise ConfigError(f"algorithm.kl.place='reward': {r.name!r} reads no rewards; use kl.place='loss'.")
    if kl.target is not None and (kl.place != "reward" or kl.coef == 0):
        raise ConfigError(
            f"algorithm.kl.target={kl.target} steers the KL in the reward from a starting weight: set "
            f"kl.place='reward' and kl.coef > 0 (given: {kl.place!r} and {kl.coef}), or leave target out."
        )
    if kl.target is None and kl.horizon != Kl.model_fields["horizon"].default:
        raise ConfigError(
            "algorithm.kl.horizon has no effect without algorithm.kl.target: set target, or leave it out."
        )
