"""Cosmos-RL: the algorithm; variants of GRPO, their loss, what is weighed and left out, the reference, a teacher."""

from __future__ import annotations

from whet.dialects.cosmos.data import short
from whet.dialects.cosmos.steps import steps_together
from whet.dialects.cosmos.values import POLICY, at_revision, is_sft, weights
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.served import placed
from whet.types import ConfigError, Json

ALL = 1_000_000
"""As good as no limit."""

OPEN_LOW, OPEN_HIGH = 1.0, 1e9
"""Widths of a clip that leave the ratio's lower and upper side open."""


def algorithm(values: Values) -> dict[str, Json]:
    """The recipe: grpo, gspo, dapo (which drops equal groups), sft, or gkd with a teacher's likely tokens."""
    if is_sft(values):
        return {"algorithm.name": "sft"}
    if judges_likely(values):
        return {"algorithm.name": "gkd"}
    variant = values[POLICY + "variant"]
    return {"algorithm.name": variant} | (_dropping(values) if variant == "dapo" else {})


def backend(values: Values) -> dict[str, Json]:
    """What a server of its own would be told."""
    if is_sft(values):
        return {}
    at = "rollout.parallelism"
    return dict(
        placed(
            "vllm",
            tp=values[f"{at}.tp_size"],
            pp=values[f"{at}.pp_size"],
            dp=values[f"{at}.n_init_replicas"],
            ep=values[f"{at}.ep_size"],
            memory=values["rollout.gpu_memory_utilization"],
        )
    )


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
    most = values[POLICY + "max_retry_for_on_policy"]
    bound = {"algorithm.max_refills": most - 1 if most > 0 else ALL} if values[POLICY + "on_policy"] else {}
    return (parts if metric and set(metric) != set(trained) else {}) | bound


def aggregation(values: Values) -> dict[str, Json]:
    """How token losses become one number; a constant in place of the length makes it Dr. GRPO's."""
    kind, constant = values[POLICY + "loss_type"], values[POLICY + "unbiased_loss_max_tokens"] or 0
    if constant <= 0:
        return {"algorithm.loss_agg_mode": kind}
    if kind != "seq-mean-token-mean":
        raise ConfigError(
            f"{POLICY}unbiased_loss_max_tokens={constant} stands in the denominator of "
            f"loss_type='seq-mean-token-mean' only, and loss_type is {kind!r}."
        )
    return {"algorithm.loss_agg_mode": "seq-mean-token-sum-norm", "algorithm.norm_tokens": constant}


# ---------------------------------------------------------------- reference and teacher


def reference(values: Values) -> dict[str, Json]:
    """Where there is one: its estimator, and how often the policy becomes the reference."""
    every = values[POLICY + "reference_reset_interval"] or 0
    unbiased = {"algorithm.kl.estimator": "unbiased_k3"} if values[POLICY + "unbiased_kl_estimate"] else {}
    if every <= 0:
        return unbiased
    return unbiased | {
        "reference.reset_interval": every // steps_together(values),
        "reference.reset_optimizer": values[POLICY + "reset_optimizer_with_reference"],
    }


def distills(values: Values) -> bool:
    """Whether a teacher judges the tokens."""
    return values["distillation.enable"] is True


def judges_likely(values: Values) -> bool:
    """Whether the teacher judges the likely tokens of each place, in place of the sampled one."""
    return distills(values) and int(values["distillation.top_k"]) > 0  # type: ignore[call-overload]


def distillation(values: Values) -> dict[str, Json]:
    """A teacher in place of rewards: every token learns how much likelier the teacher finds it, or every place how far
    the policy is from the teacher among its likely tokens."""
    at = "distillation."
    if is_sft(values) or values[POLICY + "variant"] == "dapo":
        why = (
            "applies to RL jobs only" if is_sft(values) else "has no rewards, so dapo would drop every group"
        )
        raise ConfigError(f"{at}enable=true {why}; leave it out, or take variant grpo or gspo.")
    discount = values[at + "kl_discount_factor"]
    path = at_revision(values, values[at + "model_name_or_path"], at + "model_revision")
    if judges_likely(values):
        return _likely(values) | {"reference.path": path}
    return {
        "algorithm.advantage": "distill",
        "algorithm.advantage.distill_coef": values[at + "kl_penalty_coef"],
        **({"algorithm.advantage.distill_discount": discount} if discount else {}),
        "reference.path": path,
    }


def _likely(values: Values) -> dict[str, Json]:
    """The divergence over likely tokens as the loss: Cosmos multiplies it by the token's ratio and differentiates
    both, and the part of the ratio has mean 0."""
    at, of = "algorithm.loss.", "distillation."
    if not 0 <= values[of + "jsd_beta"] <= 1:  # type: ignore[operator]
        raise ConfigError(f"{of}jsd_beta={values[of + 'jsd_beta']}: expected a number from 0 to 1.")
    beside = {
        of + "kl_discount_factor": values[of + "kl_discount_factor"] != 0,
        POLICY + "aipo_rho": values[POLICY + "aipo_rho"] is not None,
        POLICY + "use_decoupled_loss": values[POLICY + "use_decoupled_loss"],
        POLICY + "off_policy_masking_delta": values[POLICY + "off_policy_masking_delta"] is not None,
    }
    for key in (key for key, given in beside.items() if given):
        raise NotSupportedYet(
            f"{key} with {of}top_k={values[of + 'top_k']} is coming, not built yet: today the divergence over likely "
            "tokens is the loss, without an advantage or a ratio; leave it out, or set top_k=0."
        )
    return {
        at + "divergence": "jsd_topk",
        at + "jsd_beta": values[of + "jsd_beta"],
        at + "top_k": values[of + "top_k"],
        at + "top_k_of": "policy",
        at + "top_k_rest": "drop",
        at + "distill_coef": values[of + "kl_penalty_coef"],
    }
