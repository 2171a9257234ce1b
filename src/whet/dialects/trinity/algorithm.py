"""Trinity-RFT's `algorithm` section beside its loss: advantages, operators before them, KL, entropy, the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.loss import outside_mu
from whet.dialects.trinity.rewards import accuracy
from whet.dialects.trinity.values import (
    ACTOR,
    Native,
    agreed,
    arguments,
    arguments_of,
    at_least,
    chooses_by_difficulty,
    distills,
    entries,
    functions,
    given,
    is_megatron,
    known_as,
    number,
    online,
    preset,
    text,
)
from whet.dialects.typed import share_of_steps
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- advantages

KEY = "algorithm.advantage_fn"

ASSUMED = "ppo"
"""What Trinity puts in the place of null where an algorithm_type has no advantage; its loss reads none then, either."""
_ENTROPY_CLIP = {"clipb": "batch", "clipv": "vocabulary"}
"""Advantages of grpo that leave tokens out: entropy_clip."""
_OF_ONE = {"ppo": "ppo", "on_policy_distill": "on_policy_distill", "jsd": "jsd"}
"""Advantages that only one algorithm_type has the models for."""


def advantage(values: Values) -> Native:
    """advantage_fn with its arguments."""
    base = preset(values)
    if base.kind != "online":
        if text(values, KEY) not in (None, "none", ASSUMED):
            raise ConfigError(
                f"{KEY}: {values[KEY]} has no effect: {base.kind} learns from a file, without advantages; leave it out."
            )
        return {}
    name = text(values, KEY) or base.advantage
    if name == ASSUMED and base.advantage == "none":
        name, values = base.advantage, {**values, f"{KEY}_args.*": {}}
    known_as(name, functions("advantage"), key=KEY)
    kind = values["algorithm.algorithm_type"]
    for only, owner in _OF_ONE.items():
        if (name == only) != (kind == owner):
            model = "a critic" if only == "ppo" else "a teacher"
            raise ConfigError(
                f"{KEY}: {name} does not go with algorithm_type {kind}: the advantage {only} needs {model}, which only "
                f"the algorithm {owner} has. Leave advantage_fn out, or change algorithm_type."
            )
    function = functions("advantage")[name]
    return {"algorithm.advantage": function.native, **_settings(name, arguments_of(values, KEY, function))}


def _settings(name: str, given: Mapping[str, Json]) -> Native:
    """An advantage's arguments in native keys."""
    told = {
        native: given[key]
        for key, native in functions("advantage")[name].natives.items()
        if given[key] is not None and (given[key] is not False or key == "std_normalize")
    }
    if name == "opmd" and given["opmd_baseline"] != "mean":
        told["advantage.tau"] = given["tau"]
    elif name == "opmd" and given["tau"] != 1.0:
        raise ConfigError(f"{KEY}_args.tau: has no effect with opmd_baseline: mean; leave it out.")
    if name == "jsd":
        _check_divergence(given)
        if told["advantage.distill_mixture"] == 0:
            del told["advantage.distill_mixture"]  # log teacher - log policy, as in Trinity
        else:
            told["advantage.distill_estimator"] = "jsd"
    if name == "gigpo":
        _check_turns(given)
        told["advantage.normalize_std"] = given["fnorm"] == "std"
    if name in _ENTROPY_CLIP:
        told["entropy_clip"] = _ENTROPY_CLIP[name]
    if name == "rloo":
        told["advantage.single_rollout"] = "raw"
    if name == "rec" and given["std_normalize"]:
        told["advantage.std_ddof"] = 0
    elif name == "rec":
        told.pop("advantage.std_epsilon")
    if given.get("duplicate_experiences"):
        told["refill"] = "copy"
    if given.get("std_cal_level", "group") != "group":
        told["advantage.std_scope"] = given["std_cal_level"]
    return {f"algorithm.{key}": value for key, value in told.items()}


def _check_turns(given: Mapping[str, Json]) -> None:
    """The names under which a workflow of Trinity's tells rewards and states: environments have no names for them."""
    known_as(str(given["fnorm"]), {"std": 1, "none": 1}, key=f"{KEY}_args.fnorm")
    for key in ("step_reward_key", "env_state_hash_key"):
        if given[key] != functions("advantage")["gigpo"].defaults[key]:
            raise ConfigError(
                f"{KEY}_args.{key}: {given[key]} is a name in a workflow of yours; here a turn has the reward of its "
                "environment's answer, and is compared with turns that answer the same; leave it out."
            )


def _check_divergence(given: Mapping[str, Json]) -> None:
    """chunk_size changes memory alone."""
    if given["temperature"] != 1:
        raise NotSupportedYet(
            f"{KEY}_args.temperature: {given['temperature']}: log-probs divided by it, which are those of no policy, "
            "are coming, not built yet; here: 1."
        )
    if number(given["lambda_coef"], f"{KEY}_args.lambda_coef") == 1:
        raise ConfigError(
            f"{KEY}_args.lambda_coef: 1 moves the policy away from the teacher (its advantage is log policy - log "
            "teacher); write 0, or a number between."
        )


# ---------------------------------------------------------------- operators

OPERATORS = "data_processor.experience_pipeline.operators"
_GROUP = "algorithm.groups"
FILTERS: dict[str, Native] = {
    "invalid_reward_filter": {},
    "mask_response_truncated": {f"{_GROUP}.truncated": "mask"},
    "reward_filter": {f"{_GROUP}.min_reward": 0.0},
    "reward_std_filter": {f"{_GROUP}.uniform.min_std": 0.0, f"{_GROUP}.uniform.ddof": 0},
    "dapo_dynamic_sampling": {f"{_GROUP}.uniform.above": 0.0, "algorithm.dynamic_sampling": True},
}
"""Operators of the experience pipeline that exist here, in the order in which whet applies them; an argument of
`_THRESHOLD` is the value of the first key. A reward that is missing or NaN leaves its rollout unscored in any case."""
_THRESHOLD = {
    "reward_filter": "threshold",
    "reward_std_filter": "threshold",
    "dapo_dynamic_sampling": "correct_threshold",
}
_METRIC = "metric_key"
_ACCURACY = "accuracy"

COMING_OPERATORS = (
    "data_juicer",
    "reward_shaping_mapper",
)
PASS_RATES = "pass_rate_calculator"
"""Tells the selector difficulty_based how the tasks went, which happens here in any case."""


def operators(values: Values) -> Native:
    """The experience pipeline: rollouts below a reward, and groups with too little spread, are left out."""
    out: Native = {}
    order, before = list(FILTERS), -1
    for n, own in enumerate(entries(values, OPERATORS)):
        at, name = f"{OPERATORS}[{n}]", str(own.get("name") or "")
        if name == PASS_RATES and chooses_by_difficulty(values) and set(own) <= {"name", "args"}:
            continue
        known_as(name, FILTERS, key=f"{at}.name", coming=(*COMING_OPERATORS, PASS_RATES))
        compares = name == "dapo_dynamic_sampling"
        has = [_THRESHOLD[name], *([_METRIC] if compares else [])] if name in _THRESHOLD else []
        for key in own:
            if key not in ("name", "args", *(f"args.{argument}" for argument in has)):
                raise ConfigError(
                    f"{at}.{key}: {name} has no such argument; it has: {', '.join(has) or 'none'}."
                )
        if has and order.index(name) <= before:
            raise NotSupportedYet(
                f"{at}.name: {name} once more, or after another filter, is coming, not built yet; here: each once, in "
                f"the order {', '.join(order)}."
            )
        before = max(before, order.index(name))
        told = dict(FILTERS[name])
        if has and f"args.{has[0]}" in own:
            told[next(iter(told))] = own[f"args.{has[0]}"]
        if compares and online(values):
            told |= _compared(values, own.get(f"args.{_METRIC}", _ACCURACY), f"{at}.args.{_METRIC}")
        out |= told
    return out if online(values) else {}


def _compared(values: Values, metric: Json, at: str) -> Native:
    """The number by which dapo_dynamic_sampling tells right replies: a metric, not the shaped reward."""
    if metric != _ACCURACY:
        raise NotSupportedYet(f"{at}: {metric} is coming, not built yet; here: {_ACCURACY}.")
    by = accuracy(values, at)
    return {f"{_GROUP}.uniform.by": by} if by else {}


# ---------------------------------------------------------------- KL and entropy


def kl(values: Values) -> Native:
    """KL to the reference: in the loss (kl_loss_fn), and in the rewards (kl_penalty_fn)."""
    return {**_kl_loss(values), **_kl_penalty(values)}


def _kl_loss(values: Values) -> Native:
    base, key = preset(values), "algorithm.kl_loss_fn"
    name = given(values[key]) or base.kl_loss
    told = arguments(values, f"{key}_args", {"kl_coef": 0.001, "adaptive": False})
    if told["adaptive"]:
        raise ConfigError(f"{key}_args.adaptive: has no effect in the loss; use kl_penalty_fn.")
    if base.kind == "dpo":
        name = _beside_dpo(values, name)
    if name == "none" or told["kl_coef"] == 0:
        return {}
    if distills(values):
        raise ConfigError(
            f"{key}: {name} has no policy to compare with: the reference is the teacher. Leave it out."
        )
    coef = outside_mu(values, told["kl_coef"], key=f"{key}_args.kl_coef")
    return {"algorithm.kl.coef": coef, "algorithm.kl.estimator": name}


def _beside_dpo(values: Values, name: Json) -> Json:
    """Trinity's dpo has a KL to the reference in any case: for none it takes k2."""
    if name == "corrected_k3":
        raise ConfigError(
            "algorithm.kl_loss_fn: corrected_k3 needs sampled replies, and dpo is given them; write k3."
        )
    mode = text(values, "algorithm.loss_agg_mode")
    if mode not in (None, "token-mean"):
        raise NotSupportedYet(
            f"algorithm.loss_agg_mode: {mode} with dpo, where it is that of the KL, is coming, not built yet; here: "
            "token-mean."
        )
    return "k2" if name == "none" else name


def _kl_penalty(values: Values) -> Native:
    key = "algorithm.kl_penalty_fn"
    name = given(values[key]) or "none"
    told = arguments(
        values, f"{key}_args", {"adaptive": False, "kl_coef": 0.001, "target_kl": None, "horizon": None}
    )
    if name == "none" or told["kl_coef"] == 0:
        return {}
    if not preset(values).in_trainer:
        raise ConfigError(
            f"{key}: {name} has no effect with algorithm_type {values['algorithm.algorithm_type']}: its advantages are "
            'computed before the penalty. Write "none", or use kl_loss_fn.'
        )
    out = {"coef": told["kl_coef"], "estimator": "k3" if name == "corrected_k3" else name}
    if told["adaptive"]:
        if told["target_kl"] is None or told["horizon"] is None:
            raise ConfigError(f"{key}_args: adaptive needs target_kl and horizon.")
        out |= {"target": told["target_kl"], "horizon": told["horizon"]}
    return {f"algorithm.reward_kl.{key}": value for key, value in out.items()}


def entropy(values: Values) -> Native:
    """entropy_loss_fn and its coefficient, 0 where it is not given. mix leaves demonstrations out, as whet does."""
    base, key = preset(values), "algorithm.entropy_loss_fn"
    name = given(values[key]) or base.entropy
    coef = arguments(values, f"{key}_args", {"entropy_coef": 0.0})["entropy_coef"]
    if name == "mix" and not base.mixes:
        raise ConfigError(f"{key}: mix is for the algorithms mix and mix_chord; write default.")
    if name == "none" or not coef:
        return {}
    if name == "default" and base.mixes:
        raise NotSupportedYet(
            f"{key}: default, over the demonstrations too, is coming, not built yet; here: mix, none."
        )
    return {"algorithm.entropy_coef": outside_mu(values, coef, key=f"{key}_args.entropy_coef")}


# ---------------------------------------------------------------- the policy's optimizer

OPTIMIZER = "algorithm.optimizer"


def optimizer(values: Values) -> Native:
    """AdamW of the policy: `algorithm.optimizer` over the veRL section's `actor.optim`, and the clipping."""
    floor, megatron = 0.01 if at_least(values, "0.5.2") else 0.0, is_megatron(values)

    def both(name: str, default: Json, theirs: Json = None) -> Json:
        return agreed(values, {f"{OPTIMIZER}.{name}": default, f"{ACTOR}.optim.{name}": theirs or default})

    clips: Native = {"trainer.grad_clip": 1.0, f"{ACTOR}.grad_clip": 1.0}
    if at_least(values, "0.6.0"):
        clips[f"{OPTIMIZER}.clip_grad"] = 1.0
    decay, kind = both("weight_decay", 0.01), given(values[f"{OPTIMIZER}.optimizer_type"])
    # Megatron's sgd has a momentum, torch's, which FSDP takes from 0.4.1 on, has none
    plain = at_least(values, "0.4.1") and not megatron
    momentum: Native = {"momentum": 0.0 if plain else 0.9} if kind == "sgd" else {}
    out = {
        "name": "sgd" if kind == "sgd" else "adamw",
        **momentum,
        "lr": both("lr", 1e-6),
        "betas": both("betas", [0.9, 0.999]),
        "weight_decay": decay,
        "decay_all": bool(decay) and not megatron,  # Megatron spares norms and biases
        "max_grad_norm": agreed(values, clips),
    }
    own_style = megatron and not at_least(values, "0.4.1")  # lr_decay_style, constant
    shape = schedule(
        "constant" if own_style else both("warmup_style", "constant"),
        ratio=both("lr_warmup_steps_ratio", 0.0),
        floor=0.0 if own_style else both("min_lr_ratio", floor, 0.0),
        steps=both("lr_warmup_steps", -1),
        megatron=megatron,
    )
    out |= {f"schedule.{key}": value for key, value in shape.items()}
    return {f"train.optimizer.{key}": value for key, value in out.items()}


def schedule(style: Json, *, ratio: Json, floor: Json, steps: Json, megatron: bool = False) -> Native:
    """Warm-up s / W in training steps, so that the first moves nothing; then constant, or cosine, which has a floor.

    Megatron begins its warm-up at the floor, and takes the ratio also where the steps are 0.
    """
    out: Native = {"type": style or "constant", "unit": "train_step"}
    if floor and style == "cosine":
        out["min_lr_ratio"] = floor
    warm: Native = {}
    if steps > 0:
        warm = {"warmup_steps": steps, "warmup_ends": "start"}
    elif ratio and (steps < 0 or megatron):
        warm = {
            "warmup_steps": share_of_steps(ratio, f"{OPTIMIZER}.lr_warmup_steps_ratio"),
            "warmup_ends": "start",
        }
    if warm and floor and megatron:
        warm["warmup_start_ratio"] = floor
    return out | warm
