"""verl's on-policy distillation as native keys: the teacher as the reference, and what is learned from it."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.choices import choices
from whet.dialects.row import Native, NotSupportedYet, Values
from whet.dialects.typed import choose
from whet.types import ConfigError, Json

AT = "distillation"
LOSS = f"{AT}.distillation_loss"
TEACHERS = f"{AT}.teacher_models"

DUAL_CLIP = 3.0
"""clip_ratio_c of the policy loss of distillation, which has no key for it."""

DIVERGENCES = choices("verl", "divergence")

BOUND = 10.0
"""low_var_kl is never above it."""


def distills(v: Values) -> bool:
    """Whether a teacher judges the tokens."""
    return v[f"{AT}.enabled"] is True


def replaces_rewards(v: Values) -> bool:
    """Whether the teacher alone is learned from: then rewards are measured only, and neither the policy loss nor its
    terms count."""
    return distills(v) and not v[f"{LOSS}.use_task_rewards"]


def by_gradient(v: Values) -> bool:
    """Whether the divergence itself is the loss; else minus it is an advantage."""
    return not v[f"{LOSS}.use_policy_gradient"]


def algorithm(v: Values) -> dict[str, Json]:
    """The parts of the algorithm where the teacher alone is learned from."""
    divergence, most = choose(v, f"{LOSS}.loss_mode", DIVERGENCES), v[f"{LOSS}.loss_max_clamp"]
    if by_gradient(v):
        out: dict[str, Json] = {"algorithm.name": "gkd", "algorithm.loss.divergence": _learnable(v)}
        out["algorithm.loss.max_divergence"] = most
        if divergence == "forward_topk":
            out["algorithm.loss.top_k"] = v[f"{LOSS}.topk"]
            out["algorithm.loss.min_logprob"] = v[f"{LOSS}.log_prob_min_clamp"]
        return out
    if divergence == "forward_topk":
        raise NotSupportedYet(
            f"{LOSS}.loss_mode=forward_kl_topk with use_policy_gradient is coming, not built yet: minus the divergence "
            "over many tokens as the advantage of the sampled one; set use_policy_gradient=False"
        )
    low, high = (v[f"{LOSS}.clip_ratio_{side}"] for side in ("low", "high"))
    ratio = v[f"{LOSS}.clip_ratio"]
    out = {
        "algorithm.name": "distill",
        "algorithm.advantage.distill_estimator": divergence,
        "algorithm.loss.clip_low": ratio if low is None else low,
        "algorithm.loss.clip_high": ratio if high is None else high,
        "algorithm.loss.dual_clip": DUAL_CLIP,
    }
    return out if most is None else out | {"algorithm.advantage_clip": [-most, most]}


def teacher(v: Values) -> Native:
    """The model of the one teacher, as the reference; beside task rewards the divergence is a KL in the loss."""
    if replaces_rewards(v):
        return {"reference.path": _path(v)}
    divergence, most = _learnable(v), v[f"{LOSS}.loss_max_clamp"]
    if divergence == "forward_topk":
        raise NotSupportedYet(
            f"{LOSS}.loss_mode=forward_kl_topk with use_task_rewards is coming, not built yet: a divergence over the "
            "teacher's likeliest tokens beside rewards"
        )
    if most is not None and (divergence != "low_var_kl" or most < BOUND):
        raise NotSupportedYet(
            f"{LOSS}.loss_max_clamp={most} with use_task_rewards and loss_mode={v[f'{LOSS}.loss_mode']} is coming, not "
            "built yet: a bound of the divergence beside rewards; leave it out"
        )
    return {
        "reference.path": _path(v),
        "algorithm.kl.coef": v[f"{LOSS}.distillation_loss_coef"],
        "algorithm.kl.estimator": divergence,
    }


def _learnable(v: Values) -> str:
    """k1 has no gradient that knows of the teacher."""
    divergence = choose(v, f"{LOSS}.loss_mode", DIVERGENCES)
    if divergence == "k1":
        raise ConfigError(
            f"{LOSS}.loss_mode={v[f'{LOSS}.loss_mode']} needs use_policy_gradient=True: its own gradient does not "
            "depend on the teacher"
        )
    return divergence


def _path(v: Values) -> str:
    """The model of the one teacher: of teacher_model, or of the one other entry, which takes its place."""
    given = v.get(f"{TEACHERS}.*") or {}
    named = {name: one for name, one in given.items() if name != "teacher_model"}
    chosen: list[Json] = list(named.values()) or [given.get("teacher_model")]
    if len(chosen) > 1:
        raise NotSupportedYet(
            f"{TEACHERS}: {', '.join(named)} are coming, not built yet: several teachers, chosen by a column of "
            "the data"
        )
    path = chosen[0].get("model_path") if isinstance(chosen[0], Mapping) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{TEACHERS}: must have the model_path of a teacher with {AT}.enabled=True")
    return path
