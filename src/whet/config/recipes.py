"""`resolve` puts the user's keys over a recipe's and refuses what cannot work or would have no effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from whet.config.correction import check_correction
from whet.config.functions import ADVANTAGES, LOSSES, SETTINGS, Advantage, Kind, Loss, Need
from whet.config.recipe_table import RECIPES, Recipe
from whet.config.schema import Algorithm, Correction, Groups, Kl, Mix, RewardKl
from whet.tables import near
from whet.types import ConfigError

T = TypeVar("T", Advantage, Loss)

__all__ = ["RECIPES", "SETTINGS", "Kind", "Recipe", "Resolved", "refuse_unread", "resolve"]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """An `Algorithm` section with nothing left open, save `norm_tokens` (None: rollout.max_tokens)."""

    name: str
    kind: Kind
    advantage: str
    loss: str
    loss_agg_mode: str
    norm_tokens: int | None
    mean_over_rollouts: int | None
    settings: Mapping[str, object]
    """What advantage and loss are given, by the names in their signatures."""
    whiten: bool
    whiten_ddof: int
    advantage_low: float | None
    advantage_high: float | None
    resample: str
    resample_power: float
    refill: Literal["sample", "copy"]
    groups: Groups
    entropy_coef: float
    kl: Kl
    reward_kl: RewardKl
    correction: Correction
    old_logprobs: Literal["auto", "sampled", "recompute"]
    dynamic_sampling: bool
    max_refills: int
    needs: frozenset[Need]
    compares: bool
    """Rollouts of a task are compared with each other."""
    judged: bool
    """The advantage reads rewards."""
    ratio: bool
    """The loss compares with the policy before the step."""
    anchor: Literal["old", "sampled", "none"]
    """What the loss compares with."""
    positive_nll_coef: float
    entropy_own_mean: bool
    """The entropy bonus is a mean over tokens, whatever the aggregation."""
    pairs: bool
    """The loss is one number a pair."""
    whole_replies: bool
    """The loss is one number a reply."""
    mix: Mix | None
    """Demonstrations among the own rollouts, their loss filled in. None: there are none."""
    source: str
    note: str

    @property
    def needs_critic(self) -> bool:
        return "critic" in self.needs

    @property
    def needs_reference(self) -> bool:
        return "reference" in self.needs


def resolve(cfg: Algorithm) -> Resolved:
    """The recipe with the user's keys put over it. ConfigError for unknown names and for what cannot work."""
    recipe = RECIPES[_known(cfg.name, RECIPES, key="algorithm.name")]

    def pick(key: str) -> object:
        mine = getattr(cfg, key)
        return getattr(recipe, key) if mine is None else mine

    advantage = _row(
        str(pick("advantage")), ADVANTAGES, of_recipe=recipe.advantage, key="algorithm.advantage"
    )
    loss = _row(str(pick("loss")), LOSSES, of_recipe=recipe.loss, key="algorithm.loss")
    open_keys = {**advantage.defaults, **loss.defaults, **recipe.settings}
    mine = {key: getattr(cfg, key) for key in SETTINGS}
    resolved = Resolved(
        name=cfg.name,
        kind=recipe.kind,
        advantage=str(pick("advantage")),
        loss=str(pick("loss")),
        loss_agg_mode=str(pick("loss_agg_mode")),
        norm_tokens=cfg.norm_tokens,
        mean_over_rollouts=cfg.mean_over_rollouts,
        settings={key: open_keys.get(key) if value is None else value for key, value in mine.items()},
        whiten=bool(pick("whiten")),
        whiten_ddof=cfg.whiten_ddof,
        advantage_low=cfg.advantage_low,
        advantage_high=cfg.advantage_high,
        resample=cfg.resample,
        resample_power=cfg.resample_power,
        refill=cfg.refill,
        groups=cfg.groups if recipe.kind == "online" else Groups(),
        entropy_coef=cfg.entropy_coef,
        kl=cfg.kl,
        reward_kl=cfg.reward_kl,
        correction=cfg.correction,
        old_logprobs=cfg.old_logprobs,
        dynamic_sampling=bool(pick("dynamic_sampling")),
        max_refills=cfg.max_refills,
        needs=advantage.needs | loss.needs | _kl_needs(cfg),
        compares=advantage.compares and cfg.single_rollout == "zero",
        judged=advantage.judged,
        ratio=loss.ratio or ":" in str(pick("loss")),
        anchor="old" if ":" in str(pick("loss")) else loss.anchor,
        positive_nll_coef=cfg.positive_nll_coef,
        entropy_own_mean=cfg.entropy_agg_mode == "token-mean",
        pairs=loss.pairs,
        whole_replies=loss.whole_replies,
        mix=_mix(cfg, recipe),
        source=recipe.source,
        note=recipe.note,
    )
    _check_parts(cfg, resolved)
    check_correction(cfg.correction, old_logprobs=cfg.old_logprobs)
    return resolved


def _mix(cfg: Algorithm, recipe: Recipe) -> Mix | None:
    """What the user says of a mix, or nothing more than that there is one, with the loss of the demonstrations."""
    if cfg.mix is None and recipe.expert_loss is None:
        return None
    mix = cfg.mix or Mix()
    return mix.model_copy(update={"loss": mix.loss or recipe.expert_loss or "sft"})


def _kl_needs(cfg: Algorithm) -> frozenset[Need]:
    return frozenset({"reference"}) if max(cfg.kl.coef, cfg.reward_kl.coef) > 0 else frozenset()


def _row(name: str, table: Mapping[str, T], *, of_recipe: str, key: str) -> T:
    """A function's row; that of the recipe's own function stands for a function of the user's."""
    return table[of_recipe if ":" in name else _known(name, table, key=key)]


def refuse_unread(cfg: Algorithm, taken: Collection[str]) -> None:
    """ConfigError for settings that were changed but that functions of the user's, which read `taken`, do not read."""
    for key in sorted(SETTINGS - set(taken)):
        value, default = getattr(cfg, key), Algorithm.model_fields[key].default
        if value != default and value is not False:
            raise ConfigError(
                f"algorithm.{key}={value!r} has no effect: neither advantage nor loss takes it; leave it out (in a "
                f"stage: reset it to {default!r})."
            )


def _known(name: str, table: Mapping[str, object], *, key: str) -> str:
    if name not in table:
        raise ConfigError(
            f"{key}={name!r} is not known{near(name, table)}; known: {', '.join(sorted(table))}."
        )
    return name


def _check_parts(cfg: Algorithm, r: Resolved) -> None:
    """Refuse parts that cannot work together."""
    wants = LOSSES[r.loss].kind if r.loss in LOSSES else r.kind
    if wants != r.kind:
        names = ", ".join(sorted(n for n, recipe in RECIPES.items() if recipe.kind == wants))
        raise ConfigError(
            f"algorithm.loss={r.loss!r} learns from {wants} data, but algorithm.name={r.name!r} gives it "
            f"{r.kind} data: set algorithm.name to one of {names}, or choose another loss."
        )
    if r.mix is not None and r.mix.mu == 0 and not r.mix.mu_valley:
        raise ConfigError("algorithm.mix.mu=0: the demonstrations would count nothing; set it above 0.")
    regularizer = cfg.rec_regularizer if r.loss == "rec" else "none"
    if regularizer != "none" and r.settings["rec_regularizer_coef"] == 0:
        raise ConfigError(
            f"algorithm.rec_regularizer={regularizer} adds nothing at rec_regularizer_coef=0: give one above 0."
        )
