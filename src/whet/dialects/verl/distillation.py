"""verl's on-policy distillation as native keys: its teachers as references, and what is learned from it."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.row import Native, NotSupportedYet, Values
from whet.types import ConfigError, Json

AT = "distillation"
LOSS = f"{AT}.distillation_loss"
TEACHERS = f"{AT}.teacher_models"


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


def bounds(v: Values) -> list[Json]:
    """Between which minus the divergence is an advantage."""
    return [-v[f"{LOSS}.loss_max_clamp"], v[f"{LOSS}.loss_max_clamp"]]


def teacher(v: Values) -> Native:
    """The teachers as references. teacher_model is one, and others take its place; several are chosen by their keys."""
    given = v.get(f"{TEACHERS}.*") or {}
    named = {name: one for name, one in given.items() if name != "teacher_model"}
    named = named or {"teacher_model": given.get("teacher_model")}
    paths = {name: _text(one, "model_path", of=name) for name, one in named.items()}
    if len(named) == 1:
        return {"reference.path": next(iter(paths.values()))}
    if v[f"{LOSS}.loss_mode"] == "forward_kl_topk":
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
