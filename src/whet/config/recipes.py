"""`resolve` puts the user's keys over a recipe's and refuses what cannot work or would have no effect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import ValidationError

from whet.config.correction import check_correction
from whet.config.functions import ADVANTAGES, LOSSES, Kind, LossEntry, Need
from whet.config.keys import TABLES, setting, words
from whet.config.recipe_table import RECIPES, Recipe
from whet.config.schema import (
    AlgorithmConfig,
    CorrectionConfig,
    GroupsConfig,
    KlConfig,
    MixConfig,
    RepromptConfig,
    RewardKlConfig,
)
from whet.tables import near
from whet.types import ConfigError, Json

FUNCTIONS = {".".join(map(str, path[1:])): table for path, table in TABLES.items()}
"""What each part of an algorithm may be."""

__all__ = ["RECIPES", "Chosen", "Kind", "Recipe", "Resolved", "kind_of", "resolve"]


def kind_of(cfg: AlgorithmConfig) -> Kind | None:
    """The kind of data that an algorithm learns from; None where its name is not known."""
    return RECIPES[cfg.name].kind if cfg.name in RECIPES else None


@dataclass(frozen=True)
class Chosen:
    """An advantage, a loss or an importance weight with its settings."""

    name: str
    settings: Mapping[str, Any]
    """All of them, by the names in its signature; of a function of the user's those that are given."""

    @property
    def is_own(self) -> bool:
        """It is a function of the user's."""
        return ":" in self.name


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """An `AlgorithmConfig` section with nothing left open, save `norm_tokens` (None: rollout.max_tokens)."""

    name: str
    kind: Kind
    advantage: str
    loss: str
    settings: Mapping[str, Chosen]
    """By part: `advantage`, `loss`, `mix.loss` where there is a mix, `correction.weight` where there is one."""
    loss_agg_mode: str
    norm_tokens: int | None
    mean_over_rollouts: int | None
    whiten: bool
    whiten_ddof: int
    advantage_low: float | None
    advantage_high: float | None
    top_entropy_quantile: float
    entropy_clip: str
    entropy_clip_mu: float
    entropy_clip_max_frac: float | None
    resample: str
    resample_power: float
    refill: Literal["sample", "copy"]
    groups: GroupsConfig
    entropy_coef: float
    entropy_target: float | None
    entropy_coef_delta: float
    entropy_coef_min: float
    entropy_coef_max: float
    kl: KlConfig
    reward_kl: RewardKlConfig
    correction: CorrectionConfig
    old_logprobs: Literal["auto", "sampled", "recompute"]
    dynamic_sampling: bool
    max_refills: int
    needs: frozenset[Need]
    compares: bool
    """Rollouts of a task are compared with each other."""
    judged: bool
    """The advantage reads rewards and the loss the advantage, or rewards decide which reply the reference is shown."""
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
    mix: MixConfig | None
    """Demonstrations among the own rollouts, their loss filled in. None: there are none."""
    reprompt: RepromptConfig | None
    """The prompts with which the reference scores rollouts. None: those of the policy."""
    source: str
    note: str

    @property
    def needs_critic(self) -> bool:
        return "critic" in self.needs

    @property
    def needs_reference(self) -> bool:
        return "reference" in self.needs


def resolve(cfg: AlgorithmConfig) -> Resolved:
    """The recipe with the user's keys put over it. ConfigError for unknown names and for what cannot work."""
    if cfg.name not in RECIPES:
        raise ConfigError(f"algorithm.name: {unknown(cfg.name, RECIPES)}")
    recipe = RECIPES[cfg.name]

    def pick(key: str) -> object:
        mine = getattr(cfg, key)
        return getattr(recipe, key) if mine is None else mine

    for key, said in setting_problems(cfg):
        raise ConfigError(f"{key}: {said}")
    settings = {part: chosen for part, chosen, _ in _parts(cfg, recipe)}
    advantage = ADVANTAGES[recipe.advantage if settings["advantage"].is_own else settings["advantage"].name]
    loss = LOSSES[recipe.loss if settings["loss"].is_own else settings["loss"].name]
    reprompt = cfg.reprompt or (RepromptConfig() if recipe.reprompts else None)
    as_given = {
        f.name: getattr(cfg, f.name) for f in fields(Resolved) if f.name in AlgorithmConfig.model_fields
    }
    found = {
        "kind": recipe.kind,
        "advantage": settings["advantage"].name,
        "loss": settings["loss"].name,
        "settings": settings,
        "loss_agg_mode": "pair-mean" if loss.pairs else str(pick("loss_agg_mode")),
        "whiten": bool(pick("whiten")),
        "groups": _groups(cfg, recipe.kind, pairs=loss.pairs),
        "dynamic_sampling": bool(pick("dynamic_sampling")),
        "needs": advantage.needs | loss.needs | _term_needs(cfg),
        "compares": advantage.compares and settings["advantage"].settings.get("single_rollout") != "raw",
        "judged": (advantage.judged and loss.judged) or reprompt is not None,
        "ratio": loss.ratio or settings["loss"].is_own,
        "anchor": "old" if settings["loss"].is_own else _anchor(loss, settings["loss"]),
        "entropy_own_mean": cfg.entropy_agg_mode == "token-mean",
        "pairs": loss.pairs,
        "whole_replies": loss.whole_replies,
        "mix": _mix(cfg, settings),
        "reprompt": reprompt,
        "source": recipe.source,
        "note": recipe.note,
    }
    resolved = Resolved(**{**as_given, **found})
    _check_parts(cfg, resolved)
    weight = settings.get("correction.weight")
    check_correction(cfg.correction, weight.settings if weight else {}, old_logprobs=cfg.old_logprobs)
    return resolved


def _groups(cfg: AlgorithmConfig, kind: Kind, *, pairs: bool) -> GroupsConfig:
    """What is done with groups. A loss on pairs of sampled replies has the best and the worst of each."""
    if kind != "online":
        return GroupsConfig()
    return cfg.groups.model_copy(update={"keep_best": 1, "keep_worst": 1}) if pairs else cfg.groups


def _anchor(loss: LossEntry, chosen: Chosen) -> Literal["old", "sampled", "none"]:
    """What the loss compares with; a setting may say it."""
    return "old" if chosen.settings.get("dppo_anchor") == "old" else loss.anchor


def _mix(cfg: AlgorithmConfig, settings: Mapping[str, Chosen]) -> MixConfig | None:
    """What the user says of a mix, or nothing more than that there is one, with the loss of the demonstrations."""
    if "mix.loss" not in settings:
        return None
    return (cfg.mix or MixConfig()).model_copy(update={"loss": settings["mix.loss"].name})


# ---------------------------------------------------------------- advantages and losses with their settings


def _parts(cfg: AlgorithmConfig, recipe: Recipe) -> Iterator[tuple[str, Chosen, Mapping[str, Any]]]:
    """(part, what is chosen for it, settings that are given) of the advantage, the loss, and the loss of a mix."""
    yield "advantage", *_chosen(cfg.advantage, recipe.advantage, recipe, part="advantage")
    yield "loss", *_chosen(cfg.loss, recipe.loss, recipe, part="loss")
    if cfg.mix is not None or recipe.expert_loss is not None:
        own = recipe.expert_loss or "sft"
        yield "mix.loss", *_chosen(cfg.mix.loss if cfg.mix else None, own, recipe, part="mix.loss")
    if cfg.correction.weight is not None:
        yield "correction.weight", *_chosen(cfg.correction.weight, "", recipe, part="correction.weight")


def with_settings(algorithm: Json) -> Json:
    """A section `algorithm` as plain values, with each of its functions as a table of its name and all settings, so
    that two sections compare. A section that no recipe fits stays as it is."""
    recipe = RECIPES.get(str(algorithm.get("name") or "grpo"))
    if recipe is None:
        return algorithm

    def table(given: Any, own: str, part: str) -> Json:
        chosen, _ = _chosen(given, own, recipe, part=part)
        return {"name": chosen.name, **chosen.settings}

    out = {
        **algorithm,
        "advantage": table(algorithm.get("advantage"), recipe.advantage, "advantage"),
        "loss": table(algorithm.get("loss"), recipe.loss, "loss"),
    }
    if mix := algorithm.get("mix"):
        out["mix"] = {**mix, "loss": table(mix.get("loss"), recipe.expert_loss or "sft", "mix.loss")}
    if (correction := algorithm.get("correction")) and (weight := correction.get("weight")):
        out["correction"] = {**correction, "weight": table(weight, "", "correction.weight")}
    return out


def _chosen(
    given: str | dict[str, Any] | None, own: str, recipe: Recipe, *, part: str
) -> tuple[Chosen, Mapping[str, Any]]:
    """A name, or a table of settings with or without one. The recipe's settings are those of its own function."""
    rest = {"name": given} if isinstance(given, str) else dict(given or {})
    name = str(rest.pop("name", None) or own)
    if ":" in name or name not in FUNCTIONS[part]:
        return Chosen(name, rest), {}
    fields = FUNCTIONS[part][name].settings.model_fields
    of_recipe = {key: value for key, value in recipe.settings.items() if name == own and key in fields}
    taken = {
        key: _listed(value, like=fields[key].default)
        for key, value in rest.items()
        if key in fields and value is not None
    }
    defaults = {key: field.default for key, field in fields.items()}
    return Chosen(name, defaults | of_recipe | taken), rest


def _listed(value: Any, *, like: object) -> Any:
    """One name where a setting holds a list is a list of one."""
    return (value,) if isinstance(value, str) and isinstance(like, tuple) else value


def setting_problems(cfg: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of names that are unknown, of settings that no function has, and of values that
    their function cannot take."""
    for part, chosen, given in _parts(cfg, RECIPES[cfg.name]):
        if chosen.is_own:
            continue
        if not chosen.name:
            yield f"algorithm.{part}.name", f"must be given: {', '.join(FUNCTIONS[part])}"
            continue
        if chosen.name not in FUNCTIONS[part]:
            yield f"algorithm.{part}", unknown(chosen.name, FUNCTIONS[part])
            continue
        section = FUNCTIONS[part][chosen.name].settings
        known = {name for row in FUNCTIONS[part].values() for name in row.settings.model_fields}
        for name in (name for name in given if name not in known):
            has = ", ".join(section.model_fields) or "none"
            yield f"algorithm.{part}.{name}", f"unknown setting{near(name, known)}; {chosen.name} has: {has}"
        taken = {name: value for name, value in given.items() if name in section.model_fields}
        try:
            section.model_validate_json(json.dumps(taken))
        except ValidationError as e:
            for fault in e.errors(include_url=False, include_context=False):
                name = str(fault["loc"][0])
                wanted = words(setting(section, name).annotation)
                yield f"algorithm.{part}.{name}", f"got {json.dumps(taken[name])}, expected {wanted}"


def unread_settings(cfg: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """(key, why nothing reads it) of settings that belong to other functions than the one that is chosen."""
    for part, chosen, given in _parts(cfg, RECIPES[cfg.name]):
        fields = () if chosen.is_own else FUNCTIONS[part][chosen.name].settings.model_fields
        for name in () if chosen.is_own else (name for name in given if name not in fields):
            yield f"algorithm.{part}.{name}", f"{part}={chosen.name} does not read it"


def _term_needs(cfg: AlgorithmConfig) -> frozenset[Need]:
    needs: set[Need] = {"reference"} if max(cfg.kl.coef, cfg.reward_kl.coef) > 0 else set()
    if cfg.top_entropy_quantile < 1:
        needs.add("entropy")
    if cfg.entropy_clip != "none":
        needs.add("discriminant" if cfg.entropy_clip == "batch" else "centred_discriminant")
    return frozenset(needs)


def unknown(name: str, table: Mapping[str, object]) -> str:
    """What is said of a name that a table does not have."""
    return f"{name!r} is not known{near(name, table)}; known: {', '.join(sorted(table))}"


def _check_parts(cfg: AlgorithmConfig, r: Resolved) -> None:
    """Refuse parts that cannot work together."""
    wants = LOSSES[r.loss].kind if r.loss in LOSSES else r.kind
    if wants != r.kind:
        names = ", ".join(sorted(n for n, recipe in RECIPES.items() if recipe.kind == wants))
        raise ConfigError(
            f"algorithm.loss={r.loss!r} learns from {wants} data, but algorithm.name={r.name!r} gives it "
            f"{r.kind} data: set algorithm.name to one of {names}, or choose another loss."
        )
    if r.loss_agg_mode == "pair-mean" and not r.pairs:
        raise ConfigError(
            f"algorithm.loss={r.loss!r} is not a loss on pairs, but algorithm.name={r.name!r} averages over pairs: "
            "give algorithm.loss_agg_mode, or take another algorithm.name."
        )
    if r.mix is not None and r.mix.mu == 0 and not r.mix.mu_valley:
        raise ConfigError("algorithm.mix.mu=0: the demonstrations would have no weight; set it above 0.")
    given = r.settings["advantage"].settings
    if r.advantage == "gdpo" and given["part_weights"] and len(given["part_weights"]) != len(given["parts"]):
        raise ConfigError(
            f"algorithm.advantage.part_weights: got {len(given['part_weights'])} weights for {len(given['parts'])} "
            "parts; give one for each"
        )
    if r.reprompt is not None:
        _check_reprompt(r.reprompt)
    settings = r.settings["loss"].settings
    if "pair_loss" in settings:
        _check_pair_losses(settings)
    if settings.get("rec_regularizer", "none") != "none" and settings["rec_regularizer_coef"] == 0:
        raise ConfigError(
            f"algorithm.loss.rec_regularizer={settings['rec_regularizer']} adds nothing at rec_regularizer_coef=0: "
            "give one above 0."
        )


def _check_reprompt(given: RepromptConfig) -> None:
    """Every template must have its places, or what it should show would be left out."""
    places = {
        "template": ["{prompt}", "{solution}"] + ["{feedback}"] * (given.feedback is not None),
        "solution_template": ["{reply}"],
        "feedback_template": ["{feedback}"],
    }
    for name, wanted in places.items():
        if lacks := [place for place in wanted if place not in getattr(given, name)]:
            raise ConfigError(
                f"algorithm.reprompt.{name}: got a text without {lacks[0]}, so the teacher would not be shown it: add "
                f"{lacks[0]}."
            )


def _check_pair_losses(given: Mapping[str, Any]) -> None:
    names, weights = given["pair_loss"], given["pair_weights"]
    if not names:
        raise ConfigError("algorithm.loss.pair_loss is empty: name at least one loss, e.g. sigmoid.")
    if weights and len(weights) != len(names):
        raise ConfigError(
            f"algorithm.loss.pair_weights: got {len(weights)} weights for {len(names)} losses of pair_loss; "
            "give one for each"
        )
    if "exo" in names and given["label_smoothing"] == 0:
        raise ConfigError(
            "algorithm.loss.pair_loss=exo takes the logarithm of label_smoothing, which is 0: set it above 0, e.g. "
            "1e-3."
        )
