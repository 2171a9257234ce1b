"""Trinity-RFT's `algorithm` section: KL, entropy, the policy's optimizer, and the rows of all of it."""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.dialects.key import Key, Unbuilt, Values, coming, translated
from whet.config.dialects.trinity_advantage import advantage
from whet.config.dialects.trinity_loss import policy_loss, recipe
from whet.config.dialects.trinity_mix import mixed, outside_mu
from whet.config.dialects.trinity_presets import preset
from whet.config.dialects.trinity_values import ACTOR as VERL
from whet.config.dialects.trinity_values import agreed, arguments, known_as, section, text
from whet.config.dialects.typed import choose
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
        raise Unbuilt(
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
        raise Unbuilt(
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

_KL = (
    "low_var_kl is the bounded k3; with mix the coefficient is divided by 1 - mu, which stands before it here"
)
_MOMENTS = "AdamW; as actor.optim's, which must agree with it"


def _keys(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


ALGORITHM: tuple[Key, ...] = (
    section("algorithm", "algorithm"),
    translated(
        "algorithm.algorithm_type",
        recipe,
        "algorithm.name",
        default="ppo",
        reason="the recipe with Trinity's own choices put over it (token-mean, dual clip 3, KL k2 at 0.001, the ratio "
        "to the engine's log-probs); dpo without Trinity's second KL",
    ),
    section("algorithm.optimizer", "train.optimizer"),
    translated(
        "algorithm.optimizer.lr",
        optimizer,
        "train.optimizer.lr",
        default=1e-6,
        reason="AdamW, weight decay 0.01 of all parameters",
    ),
    translated(
        "algorithm.optimizer.warmup_style",
        optimizer,
        "train.optimizer.schedule.kind",
        default="constant",
        reason="warm-up s / W in training steps: the first one moves nothing",
    ),
    translated(
        "algorithm.advantage_fn",
        advantage,
        "algorithm.advantage",
        default=None,
        reason="null: by algorithm_type; ppo needs the critic of algorithm_type ppo",
    ),
    translated(
        "algorithm.kl_penalty_fn",
        kl,
        "algorithm.reward_kl.estimator",
        default=None,
        reason="corrected_k3 is k3 here: its ratio is 1 before the step",
    ),
    translated("algorithm.kl_loss_fn", kl, "algorithm.kl.estimator", default=None, reason=f"null: k2; {_KL}"),
    translated(
        "algorithm.entropy_loss_fn",
        entropy,
        "algorithm.entropy_coef",
        default=None,
        reason="null: default, whose coefficient is 0; mix: without the demonstrations",
    ),
)
"""Without repeat_times and sample_strategy, which stand with the buffer."""

MORE_ALGORITHM: tuple[Key, ...] = (
    translated(
        "algorithm.advantage_fn_args.*",
        advantage,
        *_keys(
            "algorithm",
            *("gamma", "lam", "std_epsilon", "std_ddof", "std_scope", "normalize_std", "rank_penalty"),
            *(
                "groups.min_std",
                "refill",
                "resample",
                "divide_by_turns",
                "opmd_baseline",
                "tau",
                "baseline_shift",
            ),
            "distill_coef",
        ),
        default={},
        reason="arguments of advantage_fn",
    ),
    translated(
        "algorithm.policy_loss_fn",
        policy_loss,
        "algorithm.loss",
        "algorithm.old_logprobs",
        default=None,
        reason="null: by algorithm_type; sapo differentiates its gate as the paper does (whet.algorithm.sapo_detach: "
        "Trinity's form)",
    ),
    translated(
        "algorithm.policy_loss_fn_args.*",
        policy_loss,
        *_keys(
            "algorithm",
            *("clip_low", "clip_high", "dual_clip", "sequence_mask_delta", "fallback_to_policy_gradient"),
            *("gspo_form", "cispo_mask", "tau_pos", "tau_neg", "sppo_epsilon", "topr_threshold", "tau"),
            *("rec_clip_mode", "rec_weight", "rec_regularizer", "rec_regularizer_coef", "rec_temperature"),
            *("rec_ring_low", "rec_ring_high", "phi_cutoff", "beta", "label_smoothing"),
        ),
        default={},
        reason="arguments of policy_loss_fn; what the mixed losses count with must be what a step has",
    ),
    translated(
        "algorithm.loss_agg_mode",
        policy_loss,
        "algorithm.aggregation",
        default=None,
        reason="null: the loss's own (gspo: seq-mean-token-mean, others token-mean); over the whole batch, whatever "
        "the micro-batches; seq-mean-token-sum-norm divides by max_response_tokens, not by the batch's longest reply",
    ),
    translated(
        "algorithm.sample_strategy_args.*",
        mixed,
        *_keys(
            "algorithm.mix", "expert_ratio", "mu", "mu_warmup_steps", "mu_valley", "mu_decay_steps", "loss"
        ),
        "data.expert",
        "data.learn_turns",
        default={},
        reason="mix: Trinity's share is of experiences, that of whet of tasks",
    ),
    translated(
        "algorithm.kl_penalty_fn_args.*",
        kl,
        *_keys("algorithm.reward_kl", "coef", "target", "horizon"),
        default={},
        reason="kl_coef, adaptive, target_kl, horizon",
    ),
    translated("algorithm.kl_loss_fn_args.*", kl, "algorithm.kl.coef", default={}, reason=f"kl_coef; {_KL}"),
    translated(
        "algorithm.entropy_loss_fn_args.*",
        entropy,
        "algorithm.entropy_coef",
        default={},
        reason="entropy_coef",
    ),
    *(
        translated(f"{OPTIMIZER}.{name}", optimizer, native, default=default, reason=reason)
        for name, native, default, reason in (
            ("betas", "train.optimizer.betas", [0.9, 0.999], _MOMENTS),
            ("weight_decay", "train.optimizer.weight_decay", 0.01, "AdamW, of all parameters"),
            (
                "lr_warmup_steps",
                "train.optimizer.schedule.warmup_steps",
                -1,
                "training steps; wins over the ratio",
            ),
            (
                "lr_warmup_steps_ratio",
                "train.optimizer.schedule.warmup_fraction",
                0.0,
                "fraction of all steps",
            ),
            ("min_lr_ratio", "train.optimizer.schedule.min_factor", None, "where cosine ends"),
        )
    ),
    translated(
        f"{OPTIMIZER}.optimizer_type",
        optimizer,
        "train.optimizer.kind",
        default="adam",
        reason="adam is AdamW there; sgd with Megatron's momentum of 0.9",
    ),
    *(
        coming(f"{OPTIMIZER}.{name}", "Megatron's optimizer", default=default)
        for name, default in (
            ("clip_grad", 1.0),
            ("lr_warmup_init", 0.0),
            ("lr_decay_steps", None),
            ("lr_decay_style", "constant"),
            ("min_lr", 0.0),
        )
    ),
)
"""Keys that the document leaves to the source code."""
