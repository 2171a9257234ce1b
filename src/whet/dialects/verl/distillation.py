"""verl's on-policy distillation as native keys: its teachers as references, and what is learned from it."""

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
    """The teachers as references; beside task rewards the divergence is a KL in the loss."""
    if replaces_rewards(v):
        return _models(v)
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
    return _models(v) | {
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


def _models(v: Values) -> dict[str, Json]:
    """The teachers as references. teacher_model is one, and others take its place; several are chosen by their keys."""
    given = v.get(f"{TEACHERS}.*") or {}
    named = {name: one for name, one in given.items() if name != "teacher_model"}
    named = named or {"teacher_model": given.get("teacher_model")}
    paths = {name: _text(one, "model_path", of=name) for name, one in named.items()}
    if len(named) == 1:
        return {"reference.path": next(iter(paths.values()))}
    if choose(v, f"{LOSS}.loss_mode", DIVERGENCES) == "forward_topk":
        raise NotSupportedYet(
            f"{LOSS}.loss_mode=forward_kl_topk with several {TEACHERS} is coming, not built yet: a divergence over "
            "many tokens from one of several teachers; take a loss_mode of the sampled token, or one teacher"
        )
    keys = {name: _text(one, "key", of=name) for name, one in named.items()}
    if twice := sorted(name for name, key in keys.items() if list(keys.values()).count(key) > 1):
        raise ConfigError(f"{TEACHERS}: {', '.join(twice)} have the same key; verl refuses this, too")
    models = [{"path": paths[name], "values": [keys[name]]} for name in named]
    column = v[f"{AT}.teacher_key"]
    label = column == v["data.reward_fn_key"]
    return {"reference.models": models} | ({} if label else {"reference.column": column})


def _text(teacher: Json, key: str, *, of: str) -> str:
    """An entry of a teacher."""
    value = teacher.get(key) if isinstance(teacher, Mapping) else None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{TEACHERS}.{of}: must have the {key} of a teacher with {AT}.enabled=True")
    return value
