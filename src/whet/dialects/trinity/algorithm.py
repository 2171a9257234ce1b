"""Trinity-RFT's `algorithm` section: KL, entropy, the policy's optimizer, and the rows of all of it."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.mix import outside_mu
from whet.dialects.trinity.presets import preset
from whet.dialects.trinity.values import ACTOR as VERL
from whet.dialects.trinity.values import agreed, arguments, known_as, text
from whet.dialects.typed import choose
from whet.types import ConfigError, Json

OPTIMIZER = "algorithm.optimizer"
KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")

# ---------------------------------------------------------------- KL and entropy


def kl(values: Values) -> Mapping[str, Json]:
    """KL to the reference: in the loss (kl_loss_fn), and in the rewards (kl_penalty_fn)."""
    return {**_kl_loss(values), **_kl_penalty(values)}


def _kl_loss(values: Values) -> dict[str, Json]:
    base, key = preset(values), "algorithm.kl_loss_fn"
    name = _estimator(values, key, base.kl_loss)
    known: dict[str, Json] = {"kl_coef": 0.001, "adaptive": False}
    given = arguments(values, f"{key}_args", known)
    if given["adaptive"]:
        raise ConfigError(f"{key}_args.adaptive: has no effect in the loss; use kl_penalty_fn.")
    if name is None or given["kl_coef"] == 0:
        return {}
    if base.kind == "dpo":
        raise NotSupportedYet(
            f"{key}: the loss of dpo holds its own KL to the reference (policy_loss_fn_args.beta); a second term is "
            'coming, not built yet. Leave kl_loss_fn out, or write "none".'
        )
    if base.advantage == "on_policy_distill":
        raise ConfigError(
            f"{key}: {name} has no policy to compare with: the reference is the teacher. Leave it out."
        )
    coef = outside_mu(values, given["kl_coef"], key=f"{key}_args.kl_coef")
    return {"algorithm.kl.coef": coef, "algorithm.kl.estimator": name}


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
    out: dict[str, Json] = {
        "algorithm.reward_kl.coef": given["kl_coef"],
        "algorithm.reward_kl.estimator": "k3" if name == "corrected_k3" else name,
    }
    if not given["adaptive"]:
        return out
    if given["target_kl"] is None or given["horizon"] is None:
        raise ConfigError(f"{key}_args: adaptive needs target_kl and horizon.")
    return out | {
        "algorithm.reward_kl.target": given["target_kl"],
        "algorithm.reward_kl.horizon": given["horizon"],
    }


def _estimator(values: Values, key: str, default: str) -> str | None:
    name = text(values, key) or default
    known_as(name, dict.fromkeys(("none", *KL_ESTIMATORS)), key=key)
    return None if name == "none" else name


def entropy(values: Values) -> Mapping[str, Json]:
    """entropy_loss_fn and its coefficient, 0 where it is not given. mix leaves demonstrations out, as whet does."""
    base, key = preset(values), "algorithm.entropy_loss_fn"
    name = text(values, key) or base.entropy
    known_as(name, dict.fromkeys(("default", "mix", "none")), key=key)
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


def optimizer(values: Values) -> Mapping[str, Json]:
    """AdamW of the policy: `algorithm.optimizer` over the veRL section's `actor.optim`, and the clipping."""
    theirs = f"{VERL}.optim"

    def both(name: str, default: Json) -> Json:
        return agreed(values, {f"{OPTIMIZER}.{name}": default, f"{theirs}.{name}": default})

    shape = schedule(
        str(both("warmup_style", "constant")),
        ratio=both("lr_warmup_steps_ratio", 0.0),
        floor=both("min_lr_ratio", 0.0),
        steps=both("lr_warmup_steps", -1),
    )
    decay = both("weight_decay", 0.01)
    kind = choose(values, f"{OPTIMIZER}.optimizer_type", {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"})
    return {
        "train.optimizer.kind": kind,
        **({"train.optimizer.momentum": 0.9} if kind == "sgd" else {}),
        "train.optimizer.lr": both("lr", 1e-6),
        "train.optimizer.betas": both("betas", [0.9, 0.999]),
        "train.optimizer.weight_decay": decay,
        "train.optimizer.decay_all": bool(decay),
        "train.optimizer.grad_clip": agreed(values, {"trainer.grad_clip": 1.0, f"{VERL}.grad_clip": 1.0}),
        **{f"train.optimizer.schedule.{key}": value for key, value in shape.items()},
    }


def schedule(style: str, *, ratio: Json, floor: Json, steps: Json = -1) -> dict[str, Json]:
    """Warm-up s / W in training steps, so that the first moves nothing; then constant, or cosine, which has a floor."""
    known_as(style, dict.fromkeys(("constant", "cosine")), key="warmup_style")
    out: dict[str, Json] = {"kind": style, "unit": "train_step"}
    if floor:
        out["min_factor"] = floor
    if isinstance(steps, int) and steps > 0:
        return out | {"warmup_steps": steps, "warmup_ends": "start"}
    return out | ({"warmup_fraction": ratio, "warmup_ends": "start"} if ratio and steps < 0 else {})


# ---------------------------------------------------------------- rows
