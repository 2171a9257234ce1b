"""verl's algorithm as native keys: advantages, policy losses, aggregation, KL, off-policy correction, resampling."""

from __future__ import annotations

import math

from whet.config.faults import shown
from whet.dialects.row import NOTHING, Native, NotSupportedYet, Values
from whet.dialects.typed import choices, choose, settings
from whet.dialects.verl import distillation
from whet.dialects.verl.roles import ACTOR, CRITIC, texts
from whet.dialects.verl.sizes import is_fully_async, is_one_step_off, prompts
from whet.dialects.versions import since
from whet.types import ConfigError, Json

UNBOUNDED = 1_000_000
"""Refills of a step where there is no limit."""

# ---------------------------------------------------------------- advantages


def is_own(v: Values) -> bool:
    """Whether the estimator is a function of yours."""
    return ":" in str(v["algorithm.adv_estimator"])


def gdpo_parts(v: Values) -> list[str]:
    """What GDPO normalises apart: entries of what compute_score returns, which are parts of the reward `score`."""
    keys, weights = texts(v, "algorithm.gdpo_reward_keys"), v["algorithm.gdpo_reward_weights"]
    if weights is not None and len(weights) != len(keys):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights: got {len(weights)} weights for {len(keys)} gdpo_reward_keys"
        )
    return [key if key == "score" else f"score/{key}" for key in keys]


def dynamic_sampling(v: Values) -> Native:
    """DAPO drops groups whose scores are all equal and asks for more. verl's newer trainer (use_v1) reads no number of
    generations since 0.9.1."""
    newer = since(v, "verl", "0.9.1") and v.get("trainer.use_v1", True)
    generations = 0 if newer else v["algorithm.filter_groups.max_num_gen_batches"]
    most = math.ceil(generations * (v["data.gen_batch_size"] or prompts(v)) / prompts(v))
    return {"algorithm.max_refills": most - 1 if most > 0 else UNBOUNDED}


# ---------------------------------------------------------------- policy losses

LOSSES = choices("verl", "loss")

BY_SEQUENCE = ("gspo", "sapo", "geo_mean")
"""Losses that verl averages over sequences, whatever loss_agg_mode says; gspo until 0.9.1, which honours
loss_agg_mode."""


def reinforces(v: Values) -> bool:
    """Whether bypass_mode takes REINFORCE, with weights of the policy that learns, in place of any other loss."""
    if v[f"{CORRECTION}.use_policy_gradient"] or v[f"{ACTOR}.policy_loss.loss_mode"] == "rollout_correction":
        return True
    kind = choose(v, f"{CORRECTION}.loss_type", {"ppo_clip": "ppo", "reinforce": "reinforce_is"})
    return kind == "reinforce_is" and bypasses(v)


def loss_of(v: Values) -> str:
    if distillation.replaces_rewards(v):
        return "ppo"
    if reinforces(v):
        return "reinforce_is"
    return choose(v, f"{ACTOR}.policy_loss.loss_mode", LOSSES)


def clip_low(v: Values) -> Json:
    """How far the ratio may go below 1."""
    return v[f"{ACTOR}.clip_ratio" if v[f"{ACTOR}.clip_ratio_low"] is None else f"{ACTOR}.clip_ratio_low"]


def clip_high(v: Values) -> Json:
    """How far it may go above."""
    return v[f"{ACTOR}.clip_ratio" if v[f"{ACTOR}.clip_ratio_high"] is None else f"{ACTOR}.clip_ratio_high"]


def loss(v: Values) -> Native:
    """What the policy loss reads beside its clips."""
    name = loss_of(v)
    own = settings("verl", "loss setting", name)
    told = {f"algorithm.loss.{native}": v[f"{ACTOR}.{key}"] for native, key in own.items()}
    return _own_weight(v) if name == "reinforce_is" else told


def _own_weight(v: Values) -> dict[str, Json]:
    """The weights of REINFORCE in bypass_mode: rollout_is, of the policy that learns."""
    native, weight = "algorithm.correction.weight", _weight(v)
    if not weight:
        return {"algorithm.loss.weight_over": "none"}
    out: dict[str, Json] = {
        "algorithm.loss.weight_over": weight[native],
        "algorithm.loss.weight_high": weight[f"{native}.high"],
    }
    if f"{native}.low" in weight:
        out |= {
            "algorithm.loss.weight_low": weight[f"{native}.low"],
            "algorithm.loss.weight_outside": "mask",
        }
    if weight[f"{native}.normalize"]:
        out["algorithm.loss.weight_normalize"] = True
    return out


NORM = "seq-mean-token-sum-norm"


def aggregation(v: Values, key: str) -> str:
    """Until 0.7.1 seq-mean-token-sum-norm took no mean over sequences, despite its name."""
    mode: str = v[key]
    return "token-sum-norm" if mode == NORM and not since(v, "verl", "0.7.1") else mode


def reduction(v: Values) -> Native:
    """Counts are those of the whole mini batch (verl's present rule), so no cut of it changes the gradient."""
    mode = aggregation(v, f"{ACTOR}.loss_agg_mode")
    name = loss_of(v)
    if name in BY_SEQUENCE and not (name == "gspo" and since(v, "verl", "0.9.1")):
        own = mode == "token-mean" and v[f"{ACTOR}.entropy_coeff"] != 0
        return {
            "algorithm.loss_agg_mode": "seq-mean-token-mean",
            **({"algorithm.entropy_agg_mode": "token-mean"} if own else {}),
        }
    if not mode.endswith("-norm"):
        return {"algorithm.loss_agg_mode": mode}
    width = v[f"{ACTOR}.loss_scale_factor"] or v["data.max_response_length"]
    return {"algorithm.loss_agg_mode": mode, "algorithm.norm_tokens": width}


def averages_sequences(v: Values) -> bool:
    """Whether the loss of the policy is a mean over sequences."""
    return str(reduction(v)["algorithm.loss_agg_mode"]).startswith("seq-mean")


def value_reduction(v: Values) -> Native:
    """The critic's own, by the same names; its norm is the longest response, and since 0.9.0 a factor of its own."""
    key, longest = f"{CRITIC}.loss_agg_mode", v["data.max_response_length"]
    mode = aggregation(v, key)
    width = (v[f"{CRITIC}.loss_scale_factor"] or longest) if since(v, "verl", "0.9.0") else longest
    if mode.endswith("-norm") and reduction(v).get("algorithm.norm_tokens") not in (None, width):
        raise NotSupportedYet(
            f"{key}={NORM} with {ACTOR}.loss_scale_factor={v[f'{ACTOR}.loss_scale_factor']}: a norm of the critic's "
            "own is coming, not built yet; leave loss_scale_factor out"
        )
    return {"critic.loss_agg_mode": mode}


# ---------------------------------------------------------------- KL


def renewal(v: Values) -> Native:
    """SPIN's reference is the policy before each step that ref_update_freq divides: after the step before it."""
    every = v["trainer.ref_update_freq"]
    return {"reference.reset_interval": 1 if every == 1 else f"{every} steps from {every - 1}"}


# ---------------------------------------------------------------- off-policy correction (newer verl)

CORRECTION = "algorithm.rollout_correction"
LEVELS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
OLD_LEVELS = {"token": "token", "sequence": "sum", "geometric": "mean"}
"""Of rejection by the ratio until 0.7.1."""


def correction(v: Values) -> Native:
    """What is done about the engine's log-probs differing from the trainer's."""
    weight, tests = _weight(v), _tests(v)
    if v["algorithm.rollout_is_threshold"] is not None:
        weight, tests = _first_form(v)
    if distillation.replaces_rewards(v) and distillation.by_gradient(v):
        if tests:
            raise NotSupportedYet(
                f"{CORRECTION}.rollout_rs with distillation.enabled is coming, not built yet: leaving tokens out of a "
                "divergence"
            )
        return NOTHING  # a divergence has no ratio to weigh
    if bypasses(v):
        return _of_the_policy_that_learns(v, tests)
    if tests:
        return weight | {"algorithm.correction.reject": tests}
    return weight | ({"algorithm.correction.denominator": "all"} if _keeps_outside(v) else {})


def _of_the_policy_that_learns(v: Values, tests: list[Json]) -> Native:
    """bypass_mode, where the loss compares the policy that learns with the engine. In 0.6.1 the loss of PPO rejects
    nothing, and REINFORCE only with rollout_rs."""
    out: dict[str, Json] = {} if reinforces(v) else {"algorithm.old_logprobs": "sampled"}
    rejects = reinforces(v) and v[f"{CORRECTION}.rollout_rs"] is not None
    if not tests or not (rejects or since(v, "verl", "0.7.0")):
        return out
    loss_of_bypass = _says_bypass(v) or reinforces(v)  # else its log-probs alone may be taken
    if not loss_of_bypass and v[f"{ACTOR}.policy_loss.loss_mode"] != "bypass_mode":
        raise NotSupportedYet(
            f"{CORRECTION}.rollout_rs with {ACTOR}.use_rollout_log_probs and without bypass_mode is coming, not built "
            "yet: verl rejects by log-probs that the trainer computes before the step, which its loss does not read; "
            "set bypass_mode=true"
        )
    return out | {"algorithm.correction.reject": tests, "algorithm.correction.reject_policy": "current"}


def _keeps_outside(v: Values) -> bool:
    """Whether tokens of weight 0 stay in the averages: those outside of 'low_high'. What 0.6.0 masks, and what
    rollout_rs rejects, is left out of them."""
    return v[f"{CORRECTION}.rollout_is"] is not None and "_" in str(v[f"{CORRECTION}.rollout_is_threshold"])


def weighs_some_nothing(v: Values) -> bool:
    """Whether there are tokens of weight 0 that stay in verl's averages. Beside those that rollout_rs rejects whet
    cannot tell them apart."""
    return not bypasses(v) and _keeps_outside(v)


def weighs_tokens(v: Values) -> bool:
    """Whether each token has a weight of its own."""
    return correction(v).get("algorithm.correction.weight") == "token"


def bypasses(v: Values) -> bool:
    """Whether the ratio's denominator is the engine's log-prob."""
    asked = v[f"{ACTOR}.policy_loss.loss_mode"] == "bypass_mode" or v[f"{ACTOR}.use_rollout_log_probs"]
    return bool(_says_bypass(v) or asked)


def _says_bypass(v: Values) -> bool:
    """bypass_mode. The asynchronous trainers have it by themselves: the one that is a step ahead since 0.7.0."""
    said = v[f"{CORRECTION}.bypass_mode"]
    if said is None and is_one_step_off(v):
        said = since(v, "verl", "0.7.0")
    elif said is None and is_fully_async(v):
        said = v["async_training.use_rollout_log_probs"] and not v["async_training.compute_prox_log_prob"]
    return bool(said)


def _weight(v: Values) -> dict[str, Json]:
    """A bound 'low_high' (since 0.8.0) makes weights outside of it 0; a number is the largest weight."""
    at, native = f"{CORRECTION}.rollout_is", "algorithm.correction.weight"
    if v[at] is None:
        return {}
    bound = v[f"{at}_threshold"]
    if bound is None:
        raise ConfigError(f"{at}_threshold: got null, expected the bound of {at}={v[at]}")
    low, _, high = bound.rpartition("_") if isinstance(bound, str) else ("", "", bound)
    texts = [text for text in (low, high) if text != ""] or [bound]
    bounds = [_number(text, key=f"{at}_threshold") for text in texts]
    out: dict[str, Json] = {native: v[at], f"{native}.high": bounds[-1]}
    if len(bounds) == 2:
        out |= {f"{native}.low": bounds[0], f"{native}.outside": "mask"}
    return out | {f"{native}.normalize": v[f"{at}_batch_normalize"]}


def _number(text: Json, *, key: str) -> float:
    """A bound of a ratio or a divergence."""
    if isinstance(text, str):
        try:
            text = float(text)
        except ValueError:
            text = None
    if isinstance(text, bool) or not isinstance(text, int | float) or not 0 < text < math.inf:
        raise ConfigError(f"{key}: got {shown(text)}, expected a number above 0")
    return text


def _first_form(v: Values) -> tuple[dict[str, Json], list[Json]]:
    """0.6.0: rollout_is switches it on, rollout_is_mode says whether weights or tokens go that are out of bounds."""
    at = "algorithm.rollout_is"
    key = f"{at}_threshold"
    high, low = _number(v[key], key=key), v[f"{at}_threshold_lower"]
    low = 1.0 / high if low is None else _number(low, key=f"{key}_lower")
    level = choose(v, f"{at}_level", {"token": "token", "sequence": "sequence", "geometric": "geometric"})
    mode = choose(v, f"{at}_mode", {"truncate": "truncate", "mask": "mask"})
    if not v[at]:
        return {}, []
    out: dict[str, Json] = {"algorithm.correction.weight": level, "algorithm.correction.weight.high": high}
    if mode == "mask":
        out |= {"algorithm.correction.weight.low": low, "algorithm.correction.weight.outside": "mask"}
    return out, _veto(v, f"{at}_veto_threshold")


def _veto(v: Values, key: str) -> list[Json]:
    """A rollout goes for one token with a smaller ratio than this."""
    if v[key] is None:
        return []
    return [{"statistic": "ratio", "over": "max", "low": _number(v[key], key=key)}]


def _tests(v: Values) -> list[Json]:
    """rollout_rs is one mode or several behind commas, and so are their bounds."""
    key = f"{CORRECTION}.rollout_rs"
    veto = _veto(v, f"{CORRECTION}.rollout_token_veto_threshold")
    if v[key] is None:
        return veto
    if str(v[key]) in OLD_LEVELS:
        return [_old_test(v, key), *veto]
    modes = [name.strip() for name in str(v[key]).split(",")]
    bounds = [text.strip() for text in str(v[f"{key}_threshold"]).split(",")]
    bounds = bounds * len(modes) if len(bounds) == 1 else bounds
    if len(bounds) != len(modes):
        raise ConfigError(
            f"{key}_threshold={shown(v[f'{key}_threshold'])}: one for each of {len(modes)} modes"
        )
    return [_test(mode, bound, key=key) for mode, bound in zip(modes, bounds)]


def _old_test(v: Values, key: str) -> dict[str, Json]:
    """0.6.1 and 0.7.0: by the ratio, between a bound and its inverse; without one that of rollout_is."""
    high, low = v[f"{key}_threshold"], v[f"{key}_threshold_lower"]
    high = _number(v[f"{CORRECTION}.rollout_is_threshold"] if high is None else high, key=f"{key}_threshold")
    low = 1.0 / high if low is None else _number(low, key=f"{key}_threshold_lower")
    return {"statistic": "ratio", "over": OLD_LEVELS[v[key]], "high": high, "low": low}


def _test(mode: str, bound: str, *, key: str) -> dict[str, Json]:
    """k1 has a lower and an upper bound ('0.5_2', '2' being 1/2 to 2), k2 and k3 an upper one. k1 is minus the
    log-ratio there, so its bounds are those of the engine's probability over the trainer's, the inverse of whet's."""
    level, _, kind = mode.rpartition("_")
    if level not in LEVELS or kind not in ("k1", "k2", "k3") or (level, kind) == ("seq_max", "k1"):
        raise ConfigError(f"{key}: {shown(mode)} is none of {', '.join(LEVELS)} with _k1, _k2 or _k3")
    texts = bound.split("_")
    if len(texts) > (2 if kind == "k1" else 1):
        raise ConfigError(f"{key}_threshold: got {shown(bound)} for {mode}, expected a number above 0")
    numbers = [_number(text, key=f"{key}_threshold") for text in texts]
    out: dict[str, Json] = {"statistic": "ratio" if kind == "k1" else kind, "over": LEVELS[level]}
    if kind != "k1":
        return out | {"high": numbers[0]}
    return out | {"high": 1.0 / numbers[0] if len(numbers) == 2 else numbers[0], "low": 1.0 / numbers[-1]}
