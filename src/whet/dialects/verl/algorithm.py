"""verl's algorithm as native keys: advantages, policy losses, aggregation, KL, off-policy correction, resampling."""

from __future__ import annotations

import math

from whet.config.faults import shown
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.typed import choose, flag, number, whole
from whet.dialects.verl.rules import (
    ACTOR,
    ANY,
    CRITIC,
    NOTHING,
    ROLLOUT,
    UNBOUNDED,
    Native,
    has_critic,
    responses,
)
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- advantages

ESTIMATORS: dict[str, tuple[str, str | None]] = {
    "gae": ("ppo", None),
    "grpo": ("grpo", None),
    "reinforce_plus_plus": ("reinforce_pp", None),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", None),
    "rloo": ("rloo", None),
    "reward": ("reinforce", "reward"),
    "none": ("reinforce", "none"),
    "remax": ("remax", None),
    "opo": ("opo", None),
    "grpo_passk": ("grpo_passk", None),
    "gpg": ("gpg", None),
    "grpo_vectorized": ("grpo", None),
    "rloo_vectorized": ("rloo", None),
    "optimal_token_baseline": ("optimal_token_baseline", None),
    "tir_optimal_token_baseline": ("optimal_token_baseline", "tir_optimal_token_baseline"),
}
"""Recipe and, where it is not the recipe's, advantage of every estimator."""

BY_STD = ("grpo", "grpo_passk", "grpo_vectorized")
"""Estimators that read norm_adv_by_std_in_grpo."""

ALONE: dict[str, str] = {
    **dict.fromkeys(("grpo", "grpo_vectorized", "reinforce_plus_plus_baseline", "opo"), "reward"),
    **dict.fromkeys(("optimal_token_baseline", "tir_optimal_token_baseline"), "reinforce"),
}
"""What remains of an estimator in a group of one, which has no baseline: the score at every token, or the rewards from
here on."""


def advantage(v: Values) -> Native:
    """The estimator over the recipe that has it; verl's policy loss and aggregation are chosen apart."""
    key = "algorithm.adv_estimator"
    if v[key] is None:
        raise NotSupportedYet(
            f"{key}=null: SPIN and SPPO, with trainers of their own, are coming, not built yet"
        )
    estimator = str(v[key])
    recipe, own = choose(v, key, ESTIMATORS)
    if responses(v) == 1 and estimator in ("grpo_passk", "gpg"):
        raise ConfigError(f"{key}={estimator} compares several responses; raise {ROLLOUT}.n above 1")
    if responses(v) == 1 and estimator in ALONE:
        whitened = {"algorithm.whiten": True} if estimator == "reinforce_plus_plus_baseline" else {}
        return {"algorithm.name": "reinforce", "algorithm.advantage": ALONE[estimator], **whitened}
    out: dict[str, Json] = {"algorithm.name": recipe}
    if own is not None:
        out["algorithm.advantage"] = own
    if estimator in BY_STD:
        out["algorithm.normalize_std"] = flag(v, "algorithm.norm_adv_by_std_in_grpo")
    if estimator == "grpo_vectorized":
        out["algorithm.std_floor"] = 1e-3
    if estimator == "rloo":
        out["algorithm.single_rollout"] = "raw"
    return out


def discount(v: Values) -> Native:
    """gamma and lam, where an estimator discounts: lam in gae, gamma also in reinforce_plus_plus."""
    estimator = v["algorithm.adv_estimator"]
    gamma, lam = number(v, "algorithm.gamma"), number(v, "algorithm.lam")
    if estimator == "gae":
        return {"algorithm.gamma": gamma, "algorithm.lam": lam}
    return {"algorithm.gamma": gamma} if estimator == "reinforce_plus_plus" else NOTHING


def resampling(v: Values) -> Native:
    """PF-PPO draws the rollouts of a step anew by their scores; read with gae, as there."""
    if not flag(v, "algorithm.use_pf_ppo") or not has_critic(v):
        return NOTHING
    known = {"pow": "pow", "max_min": "max_min", "max_random": "max_random"}
    how = choose(v, "algorithm.pf_ppo.reweight_method", known)
    power = {"algorithm.resample_power": number(v, "algorithm.pf_ppo.weight_pow")} if how == "pow" else {}
    return {"algorithm.resample": how, **power}


def dynamic_sampling(v: Values) -> Native:
    """DAPO drops groups whose scores are all equal and asks for more; acc is the score without the length penalty."""
    at = "algorithm.filter_groups"
    if not flag(v, f"{at}.enable"):
        return NOTHING
    known = {"seq_reward": False, "seq_final_reward": False, "acc": True, "score": True}
    by_score = choose(v, f"{at}.metric", known)
    most = whole(v, f"{at}.max_num_gen_batches", least=ANY)
    penalised = bool(v["reward_model.overlong_buffer.enable"])
    return {
        "algorithm.drop_uniform_groups": True,
        "algorithm.max_refills": most - 1 if most > 0 else UNBOUNDED,
        **({"algorithm.groups.uniform_by": ["score"]} if by_score and penalised else {}),
    }


# ---------------------------------------------------------------- policy losses

LOSSES: dict[str, str] = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "clip-cov": "clip_cov",
    "kl_cov": "kl_cov",
    "kl-cov": "kl_cov",
    "geo_mean": "geo_mean",
    "cispo": "cispo",
    "bypass_mode": "ppo",
}

CLIPPED = ("ppo", "gspo", "geo_mean", "clip_cov", "cispo")
"""Losses that read clip_ratio and its sides."""

BY_SEQUENCE = ("gspo", "sapo", "geo_mean")
"""Losses that verl averages over sequences, whatever loss_agg_mode says."""

SETTINGS = {
    "sapo": {"tau_pos": "tau_pos", "tau_neg": "tau_neg"},
    "clip_cov": {f"policy_loss.{name}": name for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")},
    "kl_cov": {f"policy_loss.{name}": name for name in ("kl_cov_ratio", "ppo_kl_coef")},
}
"""Settings of single losses: verl's name below `actor` -> native."""


def loss_of(v: Values) -> str:
    return choose(v, f"{ACTOR}.policy_loss.loss_mode", LOSSES)


def loss(v: Values) -> Native:
    """The policy loss with what it reads. PPO's dual clip is always on; GSPO's gradient is that of each token."""
    name = loss_of(v)
    out: dict[str, Json] = {"algorithm.loss": name}
    if name in CLIPPED:
        ratio, low, high = (v[f"{ACTOR}.clip_ratio{side}"] for side in ("", "_low", "_high"))
        out["algorithm.clip_low"] = ratio if low is None else low
        out["algorithm.clip_high"] = ratio if high is None else high
    if name == "ppo":
        out["algorithm.dual_clip"] = v[f"{ACTOR}.clip_ratio_c"]
    elif name == "gspo":
        out["algorithm.gspo_form"] = "token"
    out |= {f"algorithm.{to}": v[f"{ACTOR}.{key}"] for key, to in SETTINGS.get(name, {}).items()}
    return out


NORM = "seq-mean-token-sum-norm"
AGGREGATIONS = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
AGGREGATIONS[NORM] = "token-sum-norm"


def reduction(v: Values) -> Native:
    """Counts are those of the whole mini batch (verl's present rule), so no cut of it changes the gradient.

    Despite its name seq-mean-token-sum-norm takes no mean over sequences there.
    """
    mode = choose(v, f"{ACTOR}.loss_agg_mode", AGGREGATIONS)
    if loss_of(v) in BY_SEQUENCE:
        own = mode == "token-mean" and number(v, f"{ACTOR}.entropy_coeff") != 0
        return {
            "algorithm.aggregation": "seq-mean-token-mean",
            **({"algorithm.entropy_aggregation": "token-mean"} if own else {}),
        }
    if mode != "token-sum-norm":
        return {"algorithm.aggregation": mode}
    width = v[f"{ACTOR}.loss_scale_factor"] or whole(v, "data.max_response_length")
    return {"algorithm.aggregation": mode, "algorithm.norm_tokens": width}


def value_reduction(v: Values) -> Native:
    """The critic's own, by the same names; its norm is always the longest response."""
    if not has_critic(v):
        return NOTHING
    key = f"{CRITIC}.loss_agg_mode"
    mode = choose(v, key, AGGREGATIONS)
    if mode == "token-sum-norm" and reduction(v).get("algorithm.norm_tokens") not in (
        None,
        v["data.max_response_length"],
    ):
        raise NotSupportedYet(
            f"{key}={NORM} with {ACTOR}.loss_scale_factor={v[f'{ACTOR}.loss_scale_factor']}: a norm of the critic's "
            "own is coming, not built yet; leave loss_scale_factor out"
        )
    return {"critic.aggregation": mode}


# ---------------------------------------------------------------- KL

KL = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "low_var_kl",
    "k3": "low_var_kl",
}
IN_LOSS: dict[str, str | None] = {**KL, **{f"{name}+": f"{to}+" for name, to in KL.items()}, "full": "full"}
IN_REWARD: dict[str, str | None] = {**KL, "full": None}


def kl(v: Values) -> Native:
    """In the loss, in the reward, or in both, each with its own estimator and weight."""
    out: dict[str, Json] = {}
    if flag(v, f"{ACTOR}.use_kl_loss"):
        out["algorithm.kl.coef"] = number(v, f"{ACTOR}.kl_loss_coef")
        out["algorithm.kl.estimator"] = choose(v, f"{ACTOR}.kl_loss_type", IN_LOSS)
    return out | _kl_in_reward(v) if flag(v, "algorithm.use_kl_in_reward") else out


def _kl_in_reward(v: Values) -> dict[str, Json]:
    at = "algorithm.kl_ctrl"
    out: dict[str, Json] = {
        "algorithm.reward_kl.coef": number(v, f"{at}.kl_coef"),
        "algorithm.reward_kl.estimator": choose(v, "algorithm.kl_penalty", IN_REWARD),
    }
    if choose(v, f"{at}.type", {"fixed": "fixed", "adaptive": "adaptive"}) == "fixed":
        return out
    horizon = whole(v, f"{at}.horizon")
    return out | {
        "algorithm.reward_kl.target": number(v, f"{at}.target_kl"),
        "algorithm.reward_kl.horizon": horizon,
    }


# ---------------------------------------------------------------- off-policy correction (newer verl)

CORRECTION = "algorithm.rollout_correction"
LEVELS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}


def correction(v: Values) -> Native:
    """What is done about the engine's log-probs differing from the trainer's."""
    out: dict[str, Json] = {}
    weight = v[f"{CORRECTION}.rollout_is"]
    if weight is not None:
        known = {"token": "token", "sequence": "sequence"}
        out["algorithm.correction.weight"] = choose(v, f"{CORRECTION}.rollout_is", known)
        out["algorithm.correction.high"] = number(v, f"{CORRECTION}.rollout_is_threshold")
        out["algorithm.correction.normalize"] = flag(v, f"{CORRECTION}.rollout_is_batch_normalize")
    tests = _tests(v)
    if tests:
        out["algorithm.correction.reject"] = tests
    if flag(v, f"{CORRECTION}.bypass_mode") or v[f"{ACTOR}.policy_loss.loss_mode"] == "bypass_mode":
        choose(v, f"{CORRECTION}.loss_type", {"ppo_clip": "ppo", "reinforce": None})
        if tests:
            raise NotSupportedYet(
                f"{CORRECTION}.rollout_rs with bypass_mode: leaving tokens out by the ratio to the policy that is "
                "learning is coming, not built yet"
            )
        return {"algorithm.old_logprobs": "sampled"}
    return out


def _tests(v: Values) -> list[Json]:
    """rollout_rs is one mode or several behind commas, and so are their bounds."""
    key = f"{CORRECTION}.rollout_rs"
    if v[key] is None:
        return []
    modes = [name.strip() for name in str(v[key]).split(",")]
    bounds = [text.strip() for text in str(v[f"{key}_threshold"]).split(",")]
    bounds = bounds * len(modes) if len(bounds) == 1 else bounds
    if len(bounds) != len(modes):
        raise ConfigError(
            f"{key}_threshold={shown(v[f'{key}_threshold'])}: one for each of {len(modes)} modes"
        )
    return [_test(mode, bound, key=key) for mode, bound in zip(modes, bounds)]


def _test(mode: str, bound: str, *, key: str) -> dict[str, Json]:
    """k1 has a lower and an upper bound of the ratio ('0.5_2', '2' being 1/2 to 2), k2 and k3 an upper one."""
    level, _, kind = mode.rpartition("_")
    if level not in LEVELS or kind not in ("k1", "k2", "k3") or (level, kind) == ("seq_max", "k1"):
        raise ConfigError(f"{key}: {shown(mode)} is none of {', '.join(LEVELS)} with _k1, _k2 or _k3")
    try:
        numbers = [float(text) for text in bound.split("_")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= (2 if kind == "k1" else 1) or not all(0 < n < math.inf for n in numbers):
        raise ConfigError(f"{key}_threshold: got {shown(bound)} for {mode}, expected a number above 0")
    statistic = "ratio" if kind == "k1" else kind
    out: dict[str, Json] = {"statistic": statistic, "over": LEVELS[level], "high": numbers[-1]}
    return out | ({"low": numbers[0] if len(numbers) == 2 else 1.0 / numbers[0]} if kind == "k1" else {})
