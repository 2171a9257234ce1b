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

ONLINE = frozenset(
    {
        "whiten",
        "whiten_ddof",
        "advantage_low",
        "advantage_high",
        "resample",
        "resample_power",
        "refill",
        "old_logprobs",
        "drop_uniform_groups",
        "max_refills",
    }
)
"""Keys that only mean something where the policy samples."""

__all__ = ["RECIPES", "SETTINGS", "Kind", "Recipe", "Resolved", "refuse_unused", "resolve"]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """An `Algorithm` section with nothing left open, save `norm_tokens` (None: rollout.max_tokens)."""

    name: str
    kind: Kind
    advantage: str
    loss: str
    aggregation: str
    norm_tokens: int | None
    settings: Mapping[str, object]
    """What advantage and loss are given, by the names in their signatures."""
    whiten: bool
    whiten_ddof: int
    advantage_low: float | None
    advantage_high: float | None
    resample: str
    resample_power: float
    refill: Literal["ask", "copy"]
    groups: Groups
    entropy_coef: float
    kl: Kl
    reward_kl: RewardKl
    correction: Correction
    old_logprobs: Literal["auto", "sampled", "recompute"]
    drop_uniform_groups: bool
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
        aggregation=str(pick("aggregation")),
        norm_tokens=cfg.norm_tokens,
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
        drop_uniform_groups=bool(pick("drop_uniform_groups")),
        max_refills=cfg.max_refills,
        needs=advantage.needs | loss.needs | _kl_needs(cfg),
        compares=advantage.compares and cfg.single_rollout == "zero",
        judged=advantage.judged,
        ratio=loss.ratio or ":" in str(pick("loss")),
        anchor="old" if ":" in str(pick("loss")) else loss.anchor,
        positive_nll_coef=cfg.positive_nll_coef,
        entropy_own_mean=cfg.entropy_aggregation == "token-mean",
        pairs=loss.pairs,
        whole_replies=loss.whole_replies,
        mix=_mix(cfg, recipe),
        source=recipe.source,
        note=recipe.note,
    )
    _check_parts(resolved)
    _check_kl(resolved)
    check_correction(cfg.correction, samples=resolved.kind == "online", old_logprobs=cfg.old_logprobs)
    _check_terms(cfg, resolved)
    custom = any(":" in name for name in (resolved.advantage, resolved.loss))
    taken = advantage.settings | loss.settings | _expert_settings(resolved)
    refuse_unused(cfg, resolved, SETTINGS if custom else taken)
    return resolved


def _mix(cfg: Algorithm, recipe: Recipe) -> Mix | None:
    """What the user says of a mix, or nothing more than that there is one, with the loss of the demonstrations."""
    if cfg.mix is None and recipe.expert_loss is None:
        return None
    mix = cfg.mix or Mix()
    return mix.model_copy(update={"loss": mix.loss or recipe.expert_loss or "sft"})


def _expert_settings(r: Resolved) -> frozenset[str]:
    return LOSSES[r.mix.loss].settings if r.mix and r.mix.loss else frozenset()


def _kl_needs(cfg: Algorithm) -> frozenset[Need]:
    return frozenset({"reference"}) if max(cfg.kl.coef, cfg.reward_kl.coef) > 0 else frozenset()


def _row(name: str, table: Mapping[str, T], *, of_recipe: str, key: str) -> T:
    """A function's row; that of the recipe's own function stands for a function of the user's."""
    return table[of_recipe if ":" in name else _known(name, table, key=key)]


def refuse_unused(cfg: Algorithm, resolved: Resolved, taken: Collection[str]) -> None:
    """ConfigError for keys that were changed but nothing reads; `taken`: what advantage and loss read."""
    used = set(taken)
    if resolved.aggregation in ("seq-mean-token-sum-norm", "token-sum-norm"):
        used.add("norm_tokens")
    if resolved.kind == "online":
        used |= ONLINE
    watched = SETTINGS | ONLINE | {"norm_tokens"}
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
    wants = LOSSES[r.loss].kind if r.loss in LOSSES else r.kind
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
    fitting = "pair-mean" if r.pairs else "seq-mean-token-sum" if r.whole_replies else r.aggregation
    if (r.pairs or r.whole_replies) and (r.aggregation != fitting or r.entropy_coef != 0):
        one = "pair" if r.pairs else "reply"
        raise ConfigError(
            f"the loss {r.loss!r} is one number a {one}, and their mean is taken: algorithm.aggregation and "
            "algorithm.entropy_coef do not apply, leave them out."
        )
    if r.loss == "dpo" and r.settings["pair_loss"] in ("hinge", "ipo") and r.settings["label_smoothing"]:
        raise ConfigError(
            f"algorithm.label_smoothing has no effect with algorithm.pair_loss={r.settings['pair_loss']!r}: leave it "
            "out, or set pair_loss to sigmoid or robust."
        )
    _check_mix(r)


def _check_mix(r: Resolved) -> None:
    """Refuse a mix that cannot work, or a schedule of its weight that would have no effect."""
    mix = r.mix
    if mix is None:
        return
    if r.kind != "online":
        raise ConfigError(
            f"algorithm.mix puts demonstrations among the policy's own rollouts, and {r.name!r} has none "
            f"(it learns from {r.kind}): leave it out, or set algorithm.name=mix."
        )
    if mix.mu_valley is None and mix.mu_decay_steps:
        raise ConfigError(
            f"algorithm.mix.mu_decay_steps={mix.mu_decay_steps} has no effect without mix.mu_valley, where mu falls to."
        )
    if mix.mu == 0 and not mix.mu_valley:
        raise ConfigError("algorithm.mix.mu=0: the demonstrations would count nothing; set it above 0.")


def _check_kl(r: Resolved) -> None:
    """Refuse a KL term that would have no effect or no meaning."""
    kl = r.reward_kl
    for key, coef in (("kl", r.kl.coef), ("reward_kl", kl.coef)):
        if coef > 0 and (r.pairs or r.whole_replies):
            raise ConfigError(
                f"algorithm.{key}.coef: the loss {r.loss!r} is about whole replies and has no place for a KL at every "
                "token: leave it out (how far dpo and kto may go from the reference is algorithm.beta)."
            )
    if kl.coef > 0 and r.kind != "online":
        raise ConfigError(f"algorithm.reward_kl.coef: {r.name!r} reads no rewards; use algorithm.kl.coef.")
    if kl.target is not None and kl.coef == 0:
        raise ConfigError(
            f"algorithm.reward_kl.target={kl.target} steers the weight from where it starts: set "
            "algorithm.reward_kl.coef > 0, or leave target out."
        )
    if kl.target is None and kl.horizon != RewardKl.model_fields["horizon"].default:
        raise ConfigError(
            "algorithm.reward_kl.horizon has no effect without algorithm.reward_kl.target: set target, or leave it out."
        )


def _check_terms(cfg: Algorithm, r: Resolved) -> None:
    """Refuse terms of the loss, and parts of a loss, that would have no effect."""
    if r.positive_nll_coef > 0 and r.kind != "online":
        raise ConfigError(
            f"algorithm.positive_nll_coef={r.positive_nll_coef} is for rollouts with a reward, and {r.name!r} learns "
            f"from {r.kind}: leave it out."
        )
    if r.entropy_own_mean and r.entropy_coef == 0:
        raise ConfigError("algorithm.entropy_aggregation has no effect with entropy_coef=0: leave it out.")
    regularizer = cfg.rec_regularizer if r.loss == "rec" else "none"
    if regularizer != "none" and r.settings["rec_regularizer_coef"] == 0:
        raise ConfigError(
            f"algorithm.rec_regularizer={regularizer} adds nothing at rec_regularizer_coef=0: give one above 0."
        )
    for key, why in idle_settings(r.loss, r.settings).items():
        value = getattr(cfg, key)
        if value != Algorithm.model_fields[key].default:
            raise ConfigError(f"algorithm.{key}={value!r} has no effect with {why}: leave it out.")


def idle_settings(loss: str, settings: Mapping[str, object]) -> dict[str, str]:
    """Keys that a loss reads but that its other settings make idle, and which."""
    if loss == "ppo" and settings["fallback_to_policy_gradient"]:
        why = "fallback_to_policy_gradient=true"
        return dict.fromkeys(("sequence_mask_delta", "clip_low", "clip_high"), why)
    if loss != "rec":
        return {}
    mode, weight = settings["rec_clip_mode"], settings["rec_weight"]
    idle = {} if mode == "ring" else dict.fromkeys(("rec_ring_low", "rec_ring_high"), f"rec_clip_mode={mode}")
    if mode == "none":
        idle |= dict.fromkeys(("clip_low", "clip_high"), "rec_clip_mode=none")
    if weight != "advantage":
        idle["rec_temperature"] = f"rec_weight={weight}"
    if settings["rec_regularizer"] == "none":
        idle["rec_regularizer_coef"] = "rec_regularizer=none"
    return idle
