"""Trinity-RFT's advantages with their arguments, and the operators that filter rollouts before them."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.presets import preset
from whet.dialects.trinity.values import arguments, entries, known_as, text
from whet.types import ConfigError, Json

KEY = "algorithm.advantage_fn"
OPERATORS = "data_processor.experience_pipeline.operators"

_GROUPS: dict[str, Json] = {"epsilon": 1e-6, "std_threshold": None, "std_cal_level": "group"}

ADVANTAGES: dict[str, dict[str, Json]] = {
    "ppo": {"gamma": 1.0, "lam": 1.0},
    "grpo": {**_GROUPS, "duplicate_experiences": False, "rank_penalty": None},
    "step_wise_grpo": {**_GROUPS, "enable_step_norm": False},
    "opmd": {"opmd_baseline": "mean", "tau": 1.0},
    "asymre": {"baseline_shift": -0.1},
    "rec": {"epsilon": 1e-6, "std_normalize": False, "drop": None},
    "rloo": {},
    "remax": {},
    "reinforce": {},
    "reinforceplusplus": {"gamma": 1.0},
    "on_policy_distill": {"kl_coef": 1.0},
    "none": {},
}
"""The advantages with their arguments and defaults."""

NEWER = ("clipb", "clipv", "gigpo", "jsd")
_NATIVE = {"ppo": "gae", "reinforceplusplus": "reinforce_plus_plus", "on_policy_distill": "distill"}
_OF_ONE = {"ppo": "ppo", "on_policy_distill": "on_policy_distill"}
"""Advantages that only one algorithm_type has the models for."""


def advantage(values: Values) -> Mapping[str, Json]:
    """advantage_fn with its arguments."""
    base = preset(values)
    if base.kind != "online":
        if text(values, KEY) not in (None, "none"):
            raise ConfigError(
                f"{KEY}: {values[KEY]} has no effect: {base.kind} learns from a file, without advantages; leave it out."
            )
        return {}
    name = text(values, KEY) or base.advantage
    known_as(name, ADVANTAGES, key=KEY, coming=NEWER)
    kind = values["algorithm.algorithm_type"]
    for only, owner in _OF_ONE.items():
        if (name == only) != (kind == owner):
            needs = "a critic" if only == "ppo" else "a teacher"
            raise ConfigError(
                f"{KEY}: {name} does not go with algorithm_type {kind}: the advantage {only} needs {needs}, which only "
                f"the algorithm {owner} has. Leave advantage_fn out, or change algorithm_type."
            )
    given = arguments(values, f"{KEY}_args", ADVANTAGES[name])
    return {"algorithm.advantage": _NATIVE.get(name, name), **_settings(name, given)}


def _settings(name: str, given: Mapping[str, Json]) -> dict[str, Json]:
    """An advantage's arguments in native keys."""
    if name in ("grpo", "step_wise_grpo"):
        return _grouped(name, given)
    if name == "opmd":
        soft = given["opmd_baseline"] != "mean"
        tau = {"algorithm.tau": given["tau"]} if soft else _idle(given, "tau", 1.0, "opmd_baseline: mean")
        return {"algorithm.opmd_baseline": given["opmd_baseline"], **tau}
    if name == "rec":
        divides = {"algorithm.std_epsilon": given["epsilon"], "algorithm.std_ddof": 0}
        return {
            "algorithm.normalize_std": given["std_normalize"],
            **(divides if given["std_normalize"] else _idle(given, "epsilon", 1e-6, "std_normalize: false")),
            **({"algorithm.resample": given["drop"]} if given["drop"] else {}),
        }
    renamed = {"kl_coef": "distill_coef", "baseline_shift": "baseline_shift", "gamma": "gamma", "lam": "lam"}
    return {f"algorithm.{renamed[key]}": value for key, value in given.items()}


def _grouped(name: str, given: Mapping[str, Json]) -> dict[str, Json]:
    out: dict[str, Json] = {"algorithm.std_epsilon": given["epsilon"]}
    if given["std_cal_level"] != "group":
        if name != "grpo":
            raise NotSupportedYet(
                f"{KEY}_args.std_cal_level: {given['std_cal_level']} with {name} is coming, not built yet; here: group."
            )
        out["algorithm.std_scope"] = given["std_cal_level"]
    if given["std_threshold"] is not None:
        out["algorithm.groups.min_std"] = given["std_threshold"]
    elif given.get("duplicate_experiences"):
        raise ConfigError(
            f"{KEY}_args.duplicate_experiences: has no effect without std_threshold, which drops groups."
        )
    if given.get("duplicate_experiences"):
        out["algorithm.refill"] = "copy"
    if given.get("rank_penalty") is not None:
        out["algorithm.rank_penalty"] = given["rank_penalty"]
    if given.get("enable_step_norm"):
        out["algorithm.divide_by_turns"] = True
    return out


def _idle(given: Mapping[str, Json], argument: str, default: Json, why: str) -> dict[str, Json]:
    if given[argument] != default:
        raise ConfigError(f"{KEY}_args.{argument}: has no effect with {why}; leave it out.")
    return {}


# ---------------------------------------------------------------- operators

FILTERS = {
    "reward_filter": "algorithm.groups.min_reward",
    "reward_std_filter": "algorithm.groups.min_std",
}
"""Operators of the experience pipeline that exist here, in the order in which whet applies them."""

COMING_OPERATORS = ("data_juicer", "reward_shaping_mapper", "pass_rate_calculator")


def operators(values: Values) -> Mapping[str, Json]:
    """The experience pipeline: rollouts below a reward, and groups with too little spread, are left out."""
    out: dict[str, Json] = {}
    for n, own in enumerate(entries(values, OPERATORS)):
        at, name = f"{OPERATORS}[{n}]", str(own.get("name") or "")
        known_as(name, FILTERS, key=f"{at}.name", coming=COMING_OPERATORS)
        for key in own:
            if key not in ("name", "args", "args.threshold"):
                raise ConfigError(f"{at}.{key}: {name} has no such argument; it has: threshold.")
        if FILTERS[name] in out or (name == "reward_filter" and out):
            raise NotSupportedYet(
                f"{at}.name: {name} once more, or after reward_std_filter, is coming, not built yet; here: each "
                f"once, in the order {', '.join(FILTERS)}."
            )
        out[FILTERS[name]] = own.get("args.threshold", 0.0)
        if name == "reward_std_filter":
            out["algorithm.groups.min_std_ddof"] = 0
    return out if preset(values).kind == "online" else {}
