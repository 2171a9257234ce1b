"""Cosmos-RL: the algorithm; variants of GRPO, their loss, what is weighed and left out, the reference."""

from __future__ import annotations

from whet.dialects.cosmos.data import short
from whet.dialects.cosmos.values import POLICY, is_sft, number, weights, whole
from whet.dialects.row import NotSupportedYet, Values
from whet.types import ConfigError, Json

ALL = 1_000_000
"""As good as no limit."""

OPEN_LOW, OPEN_HIGH = 1.0, 1e9
"""Widths of a clip that leave the ratio's lower and upper side open."""

MEANS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")


def algorithm(values: Values) -> dict[str, Json]:
    """The recipe: grpo, gspo, dapo (which drops groups of equal rewards), or sft."""
    kind, wanted = values[POLICY + "type"], "sft" if is_sft(values) else "grpo"
    if kind != wanted:
        raise ConfigError(f"{POLICY}type={kind!r}: grpo or sft (this file is read as {wanted}).")
    if kind == "sft":
        return {"algorithm.name": "sft"}
    variant = values[POLICY + "variant"]
    if variant not in ("grpo", "gspo", "dapo"):
        raise ConfigError(f"{POLICY}variant={variant!r}: grpo, gspo or dapo.")
    return {"algorithm.name": variant} | (_dropping(values) if variant == "dapo" else {})


def _dropping(values: Values) -> dict[str, Json]:
    """Groups whose rewards are all equal are dropped; more prompts are asked for, up to a bound on-policy."""
    metric, trained = (
        list(weights(values, POLICY + key)) for key in ("filter_reward_metric", "reward_function")
    )
    for name in metric:
        if name not in trained:
            raise NotSupportedYet(
                f"{POLICY}filter_reward_metric: {name!r} is not in reward_function; dropping by what is not part of "
                "the reward is coming."
            )
    parts = {"algorithm.groups.uniform_by": [short(name) for name in metric]}
    most = whole(values, POLICY + "max_retry_for_on_policy")
    bound = {"algorithm.max_refills": most - 1 if most > 0 else ALL} if values[POLICY + "on_policy"] else {}
    return (parts if metric and set(metric) != set(trained) else {}) | bound


def clipping(values: Values) -> dict[str, Json]:
    """How far the ratio may go: two sides and a cap for negative advantages (not gspo), or one side (aipo_rho)."""
    gspo = values[POLICY + "variant"] == "gspo"
    if values[POLICY + "aipo_rho"] is not None:
        if gspo:
            raise NotSupportedYet(f"{POLICY}aipo_rho with variant='gspo' is coming; use grpo or dapo.")
        return {"algorithm.loss": "aipo", "algorithm.aipo_rho": number(values, POLICY + "aipo_rho")}
    low, high = (number(values, POLICY + key) for key in ("epsilon_low", "epsilon_high"))
    bounds = {
        "algorithm.clip_low": low if low >= 0 else OPEN_LOW,
        "algorithm.clip_high": high if high >= 0 else OPEN_HIGH,
    }
    return bounds | ({} if gspo else {"algorithm.dual_clip": number(values, POLICY + "lower_bound_ratio")})


def aggregation(values: Values) -> dict[str, Json]:
    """How token losses become one number; a constant in place of the length makes it Dr. GRPO's."""
    kind, constant = values[POLICY + "loss_type"], whole(values, POLICY + "unbiased_loss_max_tokens", null=0)
    if kind not in MEANS:
        raise ConfigError(f"{POLICY}loss_type={kind!r}: one of {', '.join(MEANS)}.")
    if constant <= 0:
        return {"algorithm.aggregation": kind}
    if kind != "seq-mean-token-mean":
        raise ConfigError(
            f"{POLICY}unbiased_loss_max_tokens={constant} stands in the denominator of "
            f"loss_type='seq-mean-token-mean' only, and loss_type is {kind!r}."
        )
    return {"algorithm.aggregation": "seq-mean-token-sum-norm", "algorithm.norm_tokens": constant}


def normalize(values: Values) -> dict[str, Json]:
    """Unbiased advantages are not divided by the group's standard deviation (the document's text has it inverted)."""
    if values[POLICY + "unbiased_advantage"]:
        return {"algorithm.normalize_std": False}
    return {"algorithm.std_ddof": 0}


def entropy(values: Values) -> dict[str, Json]:
    """A bonus of the mean entropy over tokens, where its coefficient is above 0."""
    coef = number(values, POLICY + "entropy_coeff")
    if coef <= 0:
        return {}
    return {"algorithm.entropy_coef": coef, "algorithm.entropy_aggregation": "token-mean"}


def likelihood(values: Values) -> dict[str, Json]:
    """A term on replies with a reward above 0, where its coefficient is above 0."""
    key = POLICY + "positive_nll_coef"
    coef = 0 if values[key] is None else number(values, key)
    return {"algorithm.positive_nll_coef": coef} if coef > 0 else {}


def prefixes(values: Values) -> dict[str, Json]:
    """Beginnings that replies of different rewards share give no loss, from so many tokens on; below 1: all do."""
    least = whole(values, POLICY + "min_filter_prefix_tokens", null=0)
    return {"algorithm.groups.min_shared_prefix": least} if least > 0 else {}


def decoupled(values: Values) -> dict[str, Json]:
    """Losses weighed by the trainer's probability over the engine's; a weight above the cap is 0."""
    if not values[POLICY + "use_decoupled_loss"]:
        return {}
    at, cap = "algorithm.correction.", POLICY + "behav_imp_weight_cap"
    if values[cap] is None:
        return {at + "weight": "token"}
    masked = {at + "high": number(values, cap), at + "outside": "mask", at + "denominator": "all"}
    return {at + "weight": "token"} | masked


def reference(values: Values) -> dict[str, Json]:
    """Where there is one: its estimator, and how often the policy becomes the reference."""
    every = whole(values, POLICY + "reference_reset_interval", null=0)
    if values[POLICY + "kl_beta"] == 0:
        return {}
    out: dict[str, Json] = {}
    if values[POLICY + "unbiased_kl_estimate"]:
        out["algorithm.kl.estimator"] = "unbiased_k3"
    if every > 0:
        out |= {
            "reference.reset_every": every,
            "reference.reset_optimizer": values[POLICY + "reset_optimizer_with_reference"],
        }
    return out
