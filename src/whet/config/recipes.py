"""What each algorithm name means; `resolve` puts the user's keys over a recipe's and refuses what cannot work or would
have no effect. Readable without torch.

`recipes.tsv` has a line for each recipe; the column `more` has further fields of `Recipe`, as JSON. Formulas and
sources stand in docs/algorithms.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from whet.config.chosen import Chosen, chosen, setting_problems
from whet.config.conditions import value_at
from whet.config.functions import ADVANTAGES, LOSSES, Kind, LossEntry, Need
from whet.config.keys import TABLES, Path, lookup
from whet.config.schema import (
    AlgorithmConfig,
    Config,
    CorrectionConfig,
    GroupsConfig,
    KlConfig,
    MixConfig,
    RepromptConfig,
    RewardKlConfig,
)
from whet.config.tree import get
from whet.tables import lines, not_known
from whet.types import ConfigError, Json

FUNCTIONS = {".".join(map(str, path)): table for path, table in TABLES.items()}
"""What each key that holds a name may name."""

Problem = tuple[str, str]
"""(key, what is wrong with it)."""

CORRECTION = "algorithm.correction"

__all__ = [
    "RECIPES",
    "Chosen",
    "Kind",
    "Recipe",
    "Resolved",
    "choices",
    "compares",
    "kind_of",
    "no_recipe",
    "resolve",
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm's parts by name, and its source. KL and entropy are no part: both are off by default."""

    kind: Kind
    advantage: str
    loss: str
    loss_agg_mode: str
    settings: Mapping[str, object] = field(default_factory=dict)
    """Keys of `algorithm` where this recipe departs from the defaults of its functions."""
    whiten: bool = False
    dynamic_sampling: bool = False
    expert_loss: str | None = None
    """Loss of the demonstrations among the own rollouts (algorithm.mix). None: there are none."""
    reprompts: bool = False
    """The reference scores rollouts after other prompts (algorithm.reprompt)."""
    source: str
    note: str


def _recipes() -> dict[str, Recipe]:
    found = {}
    for line in lines("whet.config", "recipes.tsv"):
        name, more = line.pop("name"), json.loads(line.pop("more") or "{}")
        given = more.pop("settings", {})
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        found[name] = Recipe(**line, settings=settings, **more)  # type: ignore[arg-type]
    return found


RECIPES: dict[str, Recipe] = _recipes()


def no_recipe(name: str) -> str:
    """What is said of a name that no recipe has; it may be that of a recipe's advantage or loss."""
    for part in ("advantage", "loss"):
        if name in FUNCTIONS[f"algorithm.{part}"]:
            having = [recipe for recipe, row in RECIPES.items() if getattr(row, part) == name]
            which = f"a recipe that has it (algorithm={' or '.join(having)}), or " if having else ""
            return f"{name!r} is no recipe, but the name of a function: give {which}algorithm.{part}={name}"
    return not_known(name, RECIPES)


def kind_of(cfg: AlgorithmConfig) -> Kind | None:
    """The kind of data that an algorithm learns from; None where its name is not known."""
    return RECIPES[cfg.name].kind if cfg.name in RECIPES else None


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """An `AlgorithmConfig` section with nothing left open, save `norm_tokens` (None: rollout.max_tokens)."""

    name: str
    kind: Kind
    advantage: str
    loss: str
    settings: Mapping[str, Chosen]
    """By part: `advantage`, `loss`; `mix.loss`, `mix.mu_schedule`, `correction.weight`, `resample`, `oversample`,
    `entropy_control` and `entropy_clip` where there is one."""
    loss_agg_mode: str
    norm_tokens: int | None
    mean_over_rollouts: int | None
    whiten: bool
    whiten_ddof: int
    advantage_clip: tuple[float | None, float | None]
    top_entropy_quantile: float
    refill: Literal["sample", "copy"]
    groups: GroupsConfig
    entropy_coef: float
    kl: KlConfig
    reward_kl: RewardKlConfig
    correction: CorrectionConfig
    old_logprobs: Literal["auto", "sampled", "recompute"]
    dynamic_sampling: bool
    uniform: Mapping[str, Any]
    """What is said of groups that are too uniform: settings of `groups.uniform`."""
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
    pairs_neighbours: bool
    """Of replies that follow each other, rather than of the best and the worst of a group."""
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
    def implicit_reward(self) -> bool:
        """The critic is a language model, whose log-probs are rewards."""
        return "implicit_reward" in self.needs

    @property
    def distills(self) -> bool:
        """The reference is a teacher: another model than the policy."""
        return self.reprompt is None and (self.advantage == "distill" or self.loss == "gkd")

    @property
    def needs_reference(self) -> bool:
        return "reference" in self.needs


def resolve(cfg: AlgorithmConfig) -> Resolved:
    """The recipe with the user's keys put over it. ConfigError for unknown names and for what cannot work."""
    found, problems = examined(cfg)
    for key, said in problems:
        raise ConfigError(f"{key}: {said}")
    assert found is not None
    return found


def examined(cfg: AlgorithmConfig) -> tuple[Resolved | None, list[Problem]]:
    """The algorithm, and what is wrong with it. Where its keys contradict each other it is the recipe alone, so that
    other checks can continue; None where its name is not known."""
    if cfg.name not in RECIPES:
        return None, [("algorithm.name", no_recipe(cfg.name))]
    found, problems = None, list(settings_problems(cfg))
    if not problems:
        found = _put_together(cfg, RECIPES[cfg.name])
        problems = list(_contradictions(cfg, found))
    alone = AlgorithmConfig(name=cfg.name)
    return (_put_together(alone, RECIPES[cfg.name]) if problems else found), problems


def _put_together(cfg: AlgorithmConfig, recipe: Recipe) -> Resolved:
    """The recipe with the user's keys put over it."""

    def pick(key: str) -> object:
        mine = getattr(cfg, key)
        return getattr(recipe, key) if mine is None else mine

    settings = _parts(cfg, recipe)
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
        "loss_agg_mode": _aggregation(settings["loss"], str(pick("loss_agg_mode"))),
        "whiten": bool(pick("whiten")),
        "whiten_ddof": 0 if cfg.whiten == "population" else 1,
        "groups": _groups(cfg, recipe.kind, extremes=loss.pairs and not _neighbours(settings["loss"])),
        "dynamic_sampling": bool(pick("dynamic_sampling")),
        "uniform": settings["groups.uniform"].settings if "groups.uniform" in settings else {},
        "needs": advantage.needs | loss.needs | _term_needs(cfg, settings),
        "compares": advantage.compares and settings["advantage"].settings.get("single_rollout") != "raw",
        "judged": (advantage.judged and loss.judged) or reprompt is not None,
        "ratio": loss.ratio or settings["loss"].is_own,
        "anchor": "old" if settings["loss"].is_own else _anchor(loss, settings["loss"]),
        "entropy_own_mean": cfg.entropy_agg_mode == "token-mean",
        "pairs": loss.pairs,
        "pairs_neighbours": _neighbours(settings["loss"]),
        "whole_replies": loss.whole_replies,
        "mix": _mix(cfg, settings),
        "reprompt": reprompt,
        "source": recipe.source,
        "note": recipe.note,
    }
    return Resolved(**{**as_given, **found})


def _aggregation(made: Chosen, picked: str) -> str:
    """A loss of one number a pair or a reply is averaged over these; one of the user's as they say, or as the recipe
    has it."""
    if made.is_own:
        return picked
    loss = LOSSES[made.name]
    return "pair-mean" if loss.pairs else "seq-mean-token-sum" if loss.whole_replies else picked


def _neighbours(loss: Chosen) -> bool:
    return loss.settings.get("pairs_of") == "neighbours"


def _groups(cfg: AlgorithmConfig, kind: Kind, *, extremes: bool) -> GroupsConfig:
    """What is done with groups. extremes: the loss has the best and the worst reply of each."""
    if kind != "online":
        return GroupsConfig()
    return cfg.groups.model_copy(update={"keep_best": 1, "keep_worst": 1}) if extremes else cfg.groups


def _anchor(loss: LossEntry, made: Chosen) -> Literal["old", "sampled", "none"]:
    """What the loss compares with; a setting may say it."""
    return "old" if made.settings.get("dppo_anchor") == "old" else loss.anchor


def _mix(cfg: AlgorithmConfig, settings: Mapping[str, Chosen]) -> MixConfig | None:
    """What the user says of a mix, or nothing more than that there is one, with the loss of the demonstrations."""
    if "mix.loss" not in settings:
        return None
    return (cfg.mix or MixConfig()).model_copy(update={"loss": settings["mix.loss"].name})


# ---------------------------------------------------------------- names with their settings

Own = tuple[str, bool]
"""What a key names where it gives no name, and whether it does where it is null."""

ELSEWHERE: dict[str, Own] = {
    "model.scratch": ("qwen3", False),
    "model.mtp": ("cross_entropy", False),
    "buffer.replay.priority": ("linear_decay", True),
    "data.order": ("shuffle", True),
}
"""Keys outside the algorithm that hold a name or a table of settings."""


def elsewhere(key: str, value: str | Mapping[str, Any] | None) -> Chosen:
    """What is chosen at one of these keys."""
    return chosen(value, FUNCTIONS[key], ELSEWHERE[key][0])


def _own(recipe: Recipe, *, mixes: bool) -> dict[str, Own]:
    """The same of an algorithm's keys."""
    return {
        "algorithm.advantage": (recipe.advantage, True),
        "algorithm.loss": (recipe.loss, True),
        "algorithm.mix.loss": (recipe.expert_loss or "sft", mixes),
        "algorithm.mix.mu_schedule": ("cosine", False),
        "algorithm.correction.weight": ("", False),
        "algorithm.resample": ("", False),
        "algorithm.entropy_control": ("adaptive", False),
        "algorithm.entropy_clip": ("", False),
        "algorithm.groups.uniform": ("rewards", False),
        "algorithm.oversample": ("mean_reward", False),
    }


_NOT_GIVEN = {key for key, (_, on) in (_own(RECIPES["grpo"], mixes=True) | ELSEWHERE).items() if not on}
"""Those that choose nothing until they are given."""


def is_optional(path: Path) -> bool:
    """Whether a section or a table of settings is off until it is given: an empty one requests its defaults."""
    path = path[2:] if path[:1] == ("stages",) else path
    key = lookup(path)
    is_section = key is not None and key.section is not None and key.default is None and not key.required
    return is_section or ".".join(map(str, path)) in _NOT_GIVEN


def _parts(cfg: AlgorithmConfig, recipe: Recipe) -> dict[str, Chosen]:
    """What is chosen for each part of an algorithm."""
    mixes = cfg.mix is not None or recipe.expert_loss is not None
    parts = {key.removeprefix("algorithm."): own for key, own in _own(recipe, mixes=mixes).items()}
    values = {part: value_at(cfg, part) for part in parts}
    return {
        part: chosen(values[part], FUNCTIONS[f"algorithm.{part}"], name, recipe.settings)
        for part, (name, on) in parts.items()
        if on or values[part] is not None
    }


def choices(cfg: Config) -> dict[str, Chosen]:
    """What is chosen at each key that holds a name or a table of settings. The algorithm is a known one."""
    parts = _parts(cfg.algorithm, RECIPES[cfg.algorithm.name])
    values = {key: value_at(cfg, key) for key in ELSEWHERE}
    return {f"algorithm.{part}": made for part, made in parts.items()} | {
        key: chosen(values[key], FUNCTIONS[key], name)
        for key, (name, on) in ELSEWHERE.items()
        if on or values[key] is not None
    }


def with_settings(values: Json) -> Json:
    """A config as plain values, with each name as a table of the name and all its settings, so that two configs
    compare. An algorithm that no recipe fits stays as it is."""
    algorithm = values.get("algorithm") or {}
    recipe = RECIPES.get(str(algorithm.get("name") or "grpo"))
    of_algorithm = _own(recipe, mixes=bool(algorithm.get("mix"))) if recipe else {}
    out = {**values, "algorithm": algorithm}
    for key, (name, on) in (of_algorithm | ELSEWHERE).items():
        path = tuple(key.split("."))
        value = get(values, path)
        if on or value is not None:
            preset = recipe.settings if recipe and key in of_algorithm else None
            made = chosen(value, FUNCTIONS[key], name, preset)
            out = _placed(out, path, {"name": made.name, **made.settings})
    return out


def _placed(tree: Json, path: Path, value: Json) -> Json:
    """A copy of sections with a value at a path."""
    inner = _placed(tree.get(path[0]) or {}, path[1:], value) if len(path) > 1 else value
    return {**tree, path[0]: inner}


def settings_problems(cfg: AlgorithmConfig) -> Iterator[Problem]:
    """(key, what is wrong with it) of the names of parts and of their settings."""
    for part, made in _parts(cfg, RECIPES[cfg.name]).items():
        key = f"algorithm.{part}"
        yield from setting_problems(key, made, FUNCTIONS[key])


def _term_needs(cfg: AlgorithmConfig, settings: Mapping[str, Chosen]) -> frozenset[Need]:
    needs: set[Need] = {"reference"} if max(cfg.kl.coef, cfg.reward_kl.coef) > 0 else set()
    if cfg.top_entropy_quantile < 1:
        needs.add("entropy")
    if "entropy_clip" in settings:
        needs.add("discriminant" if settings["entropy_clip"].name == "batch" else "centred_discriminant")
    return frozenset(needs)


def _contradictions(cfg: AlgorithmConfig, r: Resolved) -> Iterator[Problem]:
    """(key, what is wrong with it) of parts that cannot work together."""
    wants = LOSSES[r.loss].kind if r.loss in LOSSES else r.kind
    if wants != r.kind:
        names = ", ".join(sorted(n for n, recipe in RECIPES.items() if recipe.kind == wants))
        yield (
            "algorithm.loss",
            f"{r.loss!r} learns from {wants} data, but algorithm.name={r.name!r} gives it {r.kind} data: set "
            f"algorithm.name to one of {names}, or choose another loss",
        )
    if r.loss_agg_mode == "pair-mean" and not r.pairs:
        yield (
            "algorithm.loss",
            f"{r.loss!r} is not a loss on pairs, but algorithm.name={r.name!r} averages over pairs: give "
            "algorithm.loss_agg_mode, or take another algorithm.name",
        )
    schedule = r.settings.get("mix.mu_schedule")
    if r.mix is not None and r.mix.mu == 0 and not (schedule and schedule.settings["valley"]):
        yield "algorithm.mix.mu", "0: the demonstrations would have no weight; set it above 0"
    low, high = r.advantage_clip
    if r.kind == "online" and low is not None and high is not None and low > high:
        yield "algorithm.advantage_clip", f"{low} is above {high}; give the lower bound first"
    control = r.settings.get("entropy_control")
    if control is not None and control.settings["min"] > control.settings["max"]:
        yield (
            "algorithm.entropy_control.min",
            f"{control.settings['min']} is above max={control.settings['max']}; lower it, or raise max",
        )
    given = r.settings["advantage"].settings
    if r.advantage == "gdpo" and given["part_weights"] and len(given["part_weights"]) != len(given["parts"]):
        yield (
            "algorithm.advantage.part_weights",
            f"got {len(given['part_weights'])} weights for {len(given['parts'])} parts; give one for each",
        )
    if r.reprompt is not None:
        yield from _template_problems(r.reprompt)
    settings = r.settings["loss"].settings
    if "pair_loss" in settings:
        yield from _pair_problems(settings)
    if settings.get("rec_regularizer", "none") != "none" and settings["rec_regularizer_coef"] == 0:
        yield (
            "algorithm.loss.rec_regularizer",
            f"{settings['rec_regularizer']} adds nothing at rec_regularizer_coef=0: give one above 0",
        )
    weight = r.settings.get("correction.weight")
    yield from _correction_problems(
        cfg.correction, weight.settings if weight else {}, old_logprobs=cfg.old_logprobs
    )


def _template_problems(given: RepromptConfig) -> Iterator[Problem]:
    """Every template must have its places, or what it should show would be left out."""
    places = {
        "template": ["{prompt}", "{solution}"] + ["{feedback}"] * (given.feedback is not None),
        "solution_template": ["{reply}"],
        "feedback_template": ["{feedback}"],
    }
    for name, wanted in places.items():
        if lacks := [place for place in wanted if place not in getattr(given, name)]:
            yield (
                f"algorithm.reprompt.{name}",
                f"got a text without {lacks[0]}, so the teacher would not be shown it: add {lacks[0]}",
            )


def _pair_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    names, weights = given["pair_loss"], given["pair_weights"]
    if not names:
        yield "algorithm.loss.pair_loss", "is empty: name at least one loss, e.g. sigmoid"
    if weights and len(weights) != len(names):
        yield (
            "algorithm.loss.pair_weights",
            f"got {len(weights)} weights for {len(names)} losses of pair_loss; give one for each",
        )
    if "exo" in names and given["label_smoothing"] == 0:
        yield (
            "algorithm.loss.pair_loss",
            "exo takes the logarithm of label_smoothing, which is 0: set it above 0, e.g. 1e-3",
        )


def compares(c: CorrectionConfig) -> bool:
    """Whether the log-probs of the policy before the step are compared with the engine's."""
    tests = c.reject if c.reject_policy == "old" else ()
    return bool(c.weight or tests) or c.second_moment is not None


def _correction_problems(
    c: CorrectionConfig, weight: Mapping[str, Json], *, old_logprobs: str
) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of off-policy correction. weight: the settings of the importance weight."""
    if old_logprobs == "sampled" and compares(c):
        yield (
            "algorithm.old_logprobs",
            "'sampled' uses the log-probs of the engine as those of the trainer, so every ratio of "
            f"{CORRECTION} would be 1: set it to recompute, or leave it out",
        )
    bounds = [(f"{CORRECTION}.weight", weight.get("low"), weight.get("high"))]
    bounds += [(f"{CORRECTION}.reject[{n}]", test.low, test.high) for n, test in enumerate(c.reject)]
    for at, low, high in bounds:
        if low is not None and high is not None and low > high:
            yield f"{at}.low", f"{low} is above high={high}: lower it, or raise high"
    for n, test in enumerate(c.reject):
        if test.low is None and test.high is None:
            yield f"{CORRECTION}.reject[{n}]", "has no bound, so every value passes: give low, high or both"
