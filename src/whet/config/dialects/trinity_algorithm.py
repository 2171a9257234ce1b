"""Trinity-RFT's `algorithm` section: presets, advantages, losses, KL, entropy, the policy's optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whet.config.dialects.key import Key, Values, translated
from whet.config.dialects.trinity_values import agreed, arguments, count, preset, section, text
from whet.tables import near
from whet.types import ConfigError, Json

VERL = "trainer.trainer_config.actor_rollout_ref.actor"
OPTIMIZER = "algorithm.optimizer"

COMING_ADVANTAGES = [
    "asymre",
    "rec",
    "remax",
    "step_wise_grpo",
    "on_policy_distill",
    "clipb",
    "clipv",
    "gigpo",
    "jsd",
]
COMING_LOSSES = (
    "gspo",
    "opmd",
    "mix",
    "mix_chord",
    "sft_is",
    "sft_phi",
    "sft_phi_normalized",
    "topr",
    "cispo",
    "sapo",
    "sppo",
    "rec",
    "importance_sampling",
)
KL_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3", "abs": "abs"}


def _one_of(
    values: Values, key: str, known: Mapping[str, Json], *, coming: Sequence[str], default: str
) -> str:
    """The function a key names. ConfigError for one that is coming or unknown."""
    name = text(values, key) or default
    if name not in known:
        what = "is coming, not built yet" if name in coming else f"is not known{near(name, known)}"
        raise ConfigError(f"{key}: {name} {what}; here: {', '.join(known)}.")
    return name


# ---------------------------------------------------------------- advantages

ADVANTAGES: dict[str, dict[str, Json]] = {
    "ppo": {"gamma": 1.0, "lam": 1.0},
    "grpo": {
        "epsilon": 1e-6,
        "std_threshold": None,
        "duplicate_experiences": False,
        "rank_penalty": None,
        "std_cal_level": "group",
    },
    "opmd": {"opmd_baseline": "mean", "tau": 1.0},
    "rloo": {},
    "reinforce": {},
    "reinforceplusplus": {"gamma": 1.0},
}
"""The advantages that exist here, with their arguments and defaults."""

_AS_BUILT: dict[str, Json] = {
    "std_threshold": None,
    "duplicate_experiences": False,
    "rank_penalty": None,
    "std_cal_level": "group",
    "opmd_baseline": "mean",
}
"""Arguments of which only the default is built."""


def advantage(values: Values) -> Mapping[str, Json]:
    """algorithm_type with advantage_fn and its arguments: the recipe, and what it is given."""
    base = preset(values)
    out: dict[str, Json] = {"algorithm.name": base.recipe}
    if base.kind != "online":
        _same(
            values,
            "algorithm.advantage_fn",
            ("none",),
            why=f"{base.kind} learns from a file, without advantages",
        )
        return out
    key = "algorithm.advantage_fn"
    name = _one_of(values, key, ADVANTAGES, coming=COMING_ADVANTAGES, default=base.advantage)
    given = arguments(values, f"{key}_args", ADVANTAGES[name])
    for argument, built in _AS_BUILT.items():
        if given.get(argument, built) != built:
            raise ConfigError(
                f"{key}_args.{argument}: {given[argument]} is coming, not built yet; here: {built}."
            )
    return out | _native_advantage(values, name, given)


def _native_advantage(values: Values, name: str, given: Mapping[str, Json]) -> dict[str, Json]:
    kind = values["algorithm.algorithm_type"]
    if (name == "ppo") != (kind == "ppo"):
        raise ConfigError(
            f"algorithm.advantage_fn: {name} does not go with algorithm_type {kind}: the advantage ppo needs a critic, "
            "which only the algorithm ppo has. Leave advantage_fn out, or change algorithm_type."
        )
    if name == "ppo":
        return {"algorithm.gamma": given["gamma"], "algorithm.lam": given["lam"]}
    if name == "grpo":
        return {"algorithm.advantage": "grpo", "algorithm.std_epsilon": given["epsilon"]}
    if name == "opmd":
        return {"algorithm.advantage": "grpo", "algorithm.normalize_std": False}
    if name == "reinforceplusplus":
        gamma = {"algorithm.gamma": given["gamma"]}
        return {"algorithm.advantage": "reinforce", "algorithm.whiten": True, **gamma}
    return {"algorithm.advantage": name}


def _same(values: Values, key: str, allowed: tuple[str, ...], *, why: str) -> None:
    """ConfigError if a key names a function that would do nothing."""
    name = text(values, key)
    if name is not None and name not in allowed:
        raise ConfigError(f"{key}: {name} has no effect: {why}; leave it out.")


# ---------------------------------------------------------------- losses

LOSSES: dict[str, dict[str, Json]] = {
    "ppo": {
        "clip_range": 0.2,
        "clip_range_low": None,
        "clip_range_high": None,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "enable_sequence_masking": False,
        "delta_sequence_masking": 0.1,
        "fallback_to_policy_gradient": False,
    },
    "sft": {"use_token_level_loss": True, "loss_agg_mode": "token-mean"},
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},
}
"""The losses that exist here, with their arguments and defaults."""

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def policy_loss(values: Values) -> Mapping[str, Json]:
    """policy_loss_fn with its arguments: clipping, dual clip, aggregation, DPO's beta."""
    base, key = preset(values), "algorithm.policy_loss_fn"
    name = _one_of(values, key, LOSSES, coming=COMING_LOSSES, default=base.loss)
    if name != base.loss:
        raise ConfigError(
            f"{key}: {name} does not go with algorithm_type {values['algorithm.algorithm_type']}."
        )
    given = arguments(values, f"{key}_args", LOSSES[name])
    for argument in ("enable_sequence_masking", "fallback_to_policy_gradient"):
        if given.get(argument):
            raise ConfigError(f"{key}_args.{argument}: true is coming, not built yet.")
    if name == "dpo":
        return {"algorithm.beta": given["beta"], "algorithm.label_smoothing": given["label_smoothing"]}
    out: dict[str, Json] = {"algorithm.aggregation": _aggregation(values, given)}
    if name == "ppo":
        low, high = given["clip_range_low"], given["clip_range_high"]
        out |= {
            "algorithm.loss": "ppo",
            "algorithm.clip_low": given["clip_range"] if low is None else low,
            "algorithm.clip_high": given["clip_range"] if high is None else high,
            "algorithm.dual_clip": given["clip_ratio_c"],
        }
    return out


def _aggregation(values: Values, given: Mapping[str, Json]) -> Json:
    mode = text(values, "algorithm.loss_agg_mode") or given["loss_agg_mode"]
    if not given.get("use_token_level_loss", True):
        mode = "seq-mean-token-mean"
    if mode not in AGGREGATIONS:
        raise ConfigError(
            f"algorithm.loss_agg_mode: {mode} is coming, not built yet (Trinity's seq-mean-token-sum-norm does not "
            f"divide by the number of sequences); here: {', '.join(AGGREGATIONS)}."
        )
    return mode


# ---------------------------------------------------------------- KL and entropy


def kl(values: Values) -> Mapping[str, Json]:
    """KL to the reference: in the loss (kl_loss_fn) or in the rewards (kl_penalty_fn), one of the two."""
    penalty, loss = _kl_penalty(values), _kl_loss(values)
    if penalty and loss:
        raise ConfigError(
            "algorithm.kl_penalty_fn and algorithm.kl_loss_fn: both at once are coming, not built yet; set one to "
            'none, or its kl_coef to 0. (kl_loss_fn is k2 where it is not given: write kl_loss_fn: "none".)'
        )
    return penalty or loss


def _kl_loss(values: Values) -> dict[str, Json]:
    base = preset(values)
    name = _estimator(values, "algorithm.kl_loss_fn", base.kl_loss)
    coef = arguments(values, "algorithm.kl_loss_fn_args", {"kl_coef": 0.001})["kl_coef"]
    if name is None or coef == 0:
        return {}
    if base.kind == "dpo":
        raise ConfigError(
            "algorithm.kl_loss_fn: the loss of dpo holds its own KL to the reference (policy_loss_fn_args.beta); a "
            'second term is coming, not built yet. Leave kl_loss_fn out, or write "none".'
        )
    return {"algorithm.kl.place": "loss", "algorithm.kl.coef": coef, "algorithm.kl.estimator": name}


def _kl_penalty(values: Values) -> dict[str, Json]:
    key = "algorithm.kl_penalty_fn"
    name = _estimator(values, key, "none")
    known: dict[str, Json] = {"adaptive": False, "kl_coef": 0.001, "target_kl": None, "horizon": None}
    given = arguments(values, f"{key}_args", known)
    if name is None or given["kl_coef"] == 0:
        return {}
    if not preset(values).in_trainer:
        raise ConfigError(
            f"{key}: {text(values, key)} has no effect with algorithm_type {values['algorithm.algorithm_type']}: its "
            'advantages are computed before the penalty. Write "none", or use kl_loss_fn.'
        )
    out = {
        "algorithm.kl.place": "reward",
        "algorithm.kl.coef": given["kl_coef"],
        "algorithm.kl.estimator": name,
    }
    if not given["adaptive"]:
        return out
    if given["target_kl"] is None or given["horizon"] is None:
        raise ConfigError(f"{key}_args: adaptive needs target_kl and horizon.")
    return out | {"algorithm.kl.target": given["target_kl"], "algorithm.kl.horizon": given["horizon"]}


def _estimator(values: Values, key: str, default: str) -> str | None:
    name = text(values, key) or default
    if name == "none":
        return None
    if name not in KL_ESTIMATORS:
        what = (
            "is coming, not built yet"
            if name == "corrected_k3"
            else f"is not known{near(name, KL_ESTIMATORS)}"
        )
        raise ConfigError(f"{key}: {name} {what}; here: none, {', '.join(KL_ESTIMATORS)}.")
    return KL_ESTIMATORS[name]


def entropy(values: Values) -> Mapping[str, Json]:
    """entropy_loss_fn and its coefficient, 0 where it is not given."""
    key = "algorithm.entropy_loss_fn"
    name = text(values, key) or "default"
    if name not in ("default", "none"):
        what = "is coming (with expert data), not built yet" if name == "mix" else "is not known"
        raise ConfigError(f"{key}: {name} {what}; here: default, none.")
    coef = arguments(values, f"{key}_args", {"entropy_coef": 0.0})["entropy_coef"]
    return {"algorithm.entropy_coef": coef} if name == "default" and coef else {}


# ---------------------------------------------------------------- the policy's optimizer


def optimizer(values: Values) -> Mapping[str, Json]:
    """AdamW of the policy: `algorithm.optimizer` over the veRL section's `actor.optim`, and the clipping."""
    ratio, floor = "lr_warmup_steps_ratio", "min_lr_ratio"
    shape = schedule(
        str(
            agreed(
                values, {f"{OPTIMIZER}.warmup_style": "constant", f"{VERL}.optim.warmup_style": "constant"}
            )
        ),
        ratio=agreed(values, {f"{VERL}.optim.{ratio}": 0.0, f"{OPTIMIZER}.{ratio}": 0.0}),
        floor=agreed(values, {f"{VERL}.optim.{floor}": 0.0, f"{OPTIMIZER}.{floor}": 0.0}),
        steps=_warmup_updates(values),
    )
    return {
        "train.optimizer.lr": agreed(values, {f"{OPTIMIZER}.lr": 1e-6, f"{VERL}.optim.lr": 1e-6}),
        "train.optimizer.betas": values[f"{OPTIMIZER}.betas"],
        "train.optimizer.weight_decay": values[f"{OPTIMIZER}.weight_decay"],
        "train.optimizer.grad_clip": agreed(values, {"trainer.grad_clip": 1.0, f"{VERL}.grad_clip": 1.0}),
        **{f"train.optimizer.schedule.{key}": value for key, value in shape.items()},
    }


def _warmup_updates(values: Values) -> int:
    """lr_warmup_steps counts training steps; here it counts optimizer steps, ppo_epochs of them a training step."""
    return max(count(values, f"{OPTIMIZER}.lr_warmup_steps", least=-1), 0) * count(
        values, f"{VERL}.ppo_epochs"
    )


def schedule(style: str, *, ratio: Json, floor: Json, steps: int = 0) -> dict[str, Json]:
    """Warm-up, then constant or cosine, which alone has a floor."""
    if style not in ("constant", "cosine"):
        raise ConfigError(f"warmup_style: {style!r} is not known; it is constant or cosine.")
    out: dict[str, Json] = {"kind": style}
    if floor:
        out["min_factor"] = floor
    if steps:
        return out | {"warmup_steps": steps}
    return out | ({"warmup_fraction": ratio} if ratio else {})


# ---------------------------------------------------------------- rows

_KL = "one KL term, in the loss or in the rewards; low_var_kl is the bounded k3"

ALGORITHM: tuple[Key, ...] = (
    section("algorithm", "algorithm"),
    translated(
        "algorithm.algorithm_type",
        advantage,
        "algorithm.name",
        default="ppo",
        reason="the recipe with Trinity's own choices put over it (token-mean, dual clip 3, KL k2 at 0.001)",
    ),
    section("algorithm.optimizer", "train.optimizer"),
    translated(
        "algorithm.optimizer.lr",
        optimizer,
        "train.optimizer.lr",
        default=1e-6,
        reason="AdamW, weight decay 0.01",
    ),
    translated(
        "algorithm.optimizer.warmup_style",
        optimizer,
        "train.optimizer.schedule.kind",
        default="constant",
        reason="warm-up starts above 0 here: (s + 1) / (W + 1) instead of s / W",
    ),
    translated(
        "algorithm.advantage_fn",
        advantage,
        "algorithm.advantage",
        default=None,
        reason="null: by algorithm_type; ppo needs the critic of algorithm_type ppo",
    ),
    translated("algorithm.kl_penalty_fn", kl, "algorithm.kl.place", default=None, reason=_KL),
    translated("algorithm.kl_loss_fn", kl, "algorithm.kl.estimator", default=None, reason=f"{_KL}; null: k2"),
    translated(
        "algorithm.entropy_loss_fn",
        entropy,
        "algorithm.entropy_coef",
        default=None,
        reason="null: default, whose coefficient is 0",
    ),
)
"""Without repeat_times and sample_strategy, which stand with the buffer."""

MORE_ALGORITHM: tuple[Key, ...] = (
    translated(
        "algorithm.advantage_fn_args.*",
        advantage,
        "algorithm.gamma",
        "algorithm.lam",
        "algorithm.std_epsilon",
        default={},
        reason="arguments of advantage_fn",
    ),
    translated(
        "algorithm.policy_loss_fn",
        policy_loss,
        "algorithm.loss",
        default=None,
        reason="null: by algorithm_type",
    ),
    translated(
        "algorithm.policy_loss_fn_args.*",
        policy_loss,
        "algorithm.clip_low",
        "algorithm.clip_high",
        "algorithm.dual_clip",
        "algorithm.beta",
        "algorithm.label_smoothing",
        default={},
        reason="clipping, aggregation, beta",
    ),
    translated(
        "algorithm.loss_agg_mode",
        policy_loss,
        "algorithm.aggregation",
        default=None,
        reason="counts are over the whole batch, whatever the micro-batches",
    ),
    translated(
        "algorithm.kl_penalty_fn_args.*",
        kl,
        "algorithm.kl.target",
        "algorithm.kl.horizon",
        default={},
        reason=_KL,
    ),
    translated("algorithm.kl_loss_fn_args.*", kl, "algorithm.kl.coef", default={}, reason=_KL),
    translated(
        "algorithm.entropy_loss_fn_args.*",
        entropy,
        "algorithm.entropy_coef",
        default={},
        reason="entropy_coef",
    ),
    translated(
        "algorithm.optimizer.betas", optimizer, "train.optimizer.betas", default=[0.9, 0.999], reason="AdamW"
    ),
    translated(
        "algorithm.optimizer.weight_decay",
        optimizer,
        "train.optimizer.weight_decay",
        default=0.01,
        reason="AdamW",
    ),
    translated(
        "algorithm.optimizer.lr_warmup_steps",
        optimizer,
        "train.optimizer.schedule.warmup_steps",
        default=-1,
        reason="training steps; wins over the ratio",
    ),
    translated(
        "algorithm.optimizer.lr_warmup_steps_ratio",
        optimizer,
        "train.optimizer.schedule.warmup_fraction",
        default=0.0,
        reason="fraction of all steps",
    ),
    translated(
        "algorithm.optimizer.min_lr_ratio",
        optimizer,
        "train.optimizer.schedule.min_factor",
        default=None,
        reason="where cosine ends",
    ),
)
"""Keys that the document leaves to the source code."""
