"""Cosmos-RL: the algorithm; variants of GRPO, their loss, what is weighed and left out, the reference, a teacher."""

from __future__ import annotations

from whet.dialects.cosmos.data import short
from whet.dialects.cosmos.steps import steps_together
from whet.dialects.cosmos.values import POLICY, at_revision, weights
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.served import placed
from whet.types import Json

ALL = 1_000_000
"""As good as no limit."""

OPEN_LOW, OPEN_HIGH = 1.0, 1e9
"""Widths of a clip that leave the ratio's lower and upper side open."""


def backend(values: Values) -> dict[str, Json]:
    """What a server of its own would be told."""
    at = "rollout.parallelism"
    return placed(
        "vllm",
        tp=values[f"{at}.tp_size"],
        pp=values[f"{at}.pp_size"],
        dp=values[f"{at}.n_init_replicas"],
        ep=values[f"{at}.ep_size"],
        memory=values["rollout.gpu_memory_utilization"],
    )


def algorithm(values: Values) -> dict[str, Json]:
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
    parts = {"algorithm.groups.uniform.by": [short(name) for name in metric]}
    most = values[POLICY + "max_retry_for_on_policy"]
    bound = {"algorithm.max_refills": most - 1 if most > 0 else ALL} if values[POLICY + "on_policy"] else {}
    return (parts if metric and set(metric) != set(trained) else {}) | bound


# ---------------------------------------------------------------- reference and teacher


def reference(values: Values) -> dict[str, Json]:
    """How often the policy becomes the reference."""
    return {"reference.reset_interval": values[POLICY + "reference_reset_interval"] // steps_together(values)}


def distills(values: Values) -> bool:
    """Whether a teacher judges the tokens."""
    return values["distillation.enable"] is True


def judges_likely(values: Values) -> bool:
    """Whether the teacher judges the likely tokens of each place, in place of the sampled one."""
    return distills(values) and int(values["distillation.top_k"]) > 0  # type: ignore[call-overload]


def teacher(values: Values) -> str:
    """The teacher's folder, or its revision on the hub."""
    return at_revision(values, values["distillation.model_name_or_path"], "distillation.model_revision")
