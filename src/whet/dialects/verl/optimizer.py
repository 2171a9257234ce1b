"""verl's optimizers and their schedules as native keys, by FSDP's keys or Megatron's."""

from __future__ import annotations

from whet.config.faults import shown
from whet.dialects.row import NOTHING, Native, Values
from whet.dialects.typed import choose
from whet.dialects.verl.roles import ACTOR, CRITIC, check_engine, is_megatron
from whet.dialects.versions import since
from whet.types import ConfigError, Json


def actor(v: Values) -> Native:
    check_engine(v)
    return settings(
        v, f"{ACTOR}.optim", native="train.optimizer", megatron=is_megatron(v), clip=_clip(v, ACTOR)
    )


def critic(v: Values) -> Native:
    return settings(
        v, f"{CRITIC}.optim", native="critic.optimizer", megatron=is_megatron(v), clip=_clip(v, CRITIC)
    )


def _clip(v: Values, role: str) -> Json:
    """FSDP reads the role's own key, Megatron that of its optimizer, and so does every engine since 0.8.0."""
    of_optimizer = f"{role}.optim.clip_grad"
    if is_megatron(v) or (since(v, "verl", "0.8.0") and of_optimizer in v):
        return v[of_optimizer]
    return v[f"{role}.grad_clip"]


def settings(v: Values, at: str, *, native: str, megatron: bool, clip: Json) -> Native:
    """AdamW and its schedule, which moves once a training step."""
    schedule = _megatron_schedule(v, at) if megatron else _fsdp_schedule(v, at)
    warmup = _warmup(v, at, megatron=megatron)
    steps, length = v["trainer.total_training_steps"], {}
    if steps is not None and "total_steps" not in schedule and (warmup.get("warmup_steps") or 0) < steps:
        length = {"total_steps": steps}  # even if epochs end before or the critic begins alone
    return {
        **_kind(v, f"{at}.optimizer", native, megatron=megatron),
        f"{native}.weight_decay": v[f"{at}.weight_decay"],
        f"{native}.decay_all": not megatron,
        f"{native}.betas": v.get(f"{at}.betas", [0.9, 0.999]),
        f"{native}.max_grad_norm": clip or None,
        f"{native}.schedule.unit": "train_step",
        f"{native}.schedule.warmup_ends": "start" if v.get(f"{at}.zero_indexed_step", True) else "peak",
        **{f"{native}.schedule.{key}": value for key, value in {**schedule, **warmup, **length}.items()},
    }


def _kind(v: Values, key: str, native: str, *, megatron: bool) -> Native:
    """FSDP has AdamW alone; Megatron's adam is AdamW, too, and its sgd has a momentum that no key of verl sets."""
    kinds = {"adam": "adamw", "sgd": "sgd", "muon": None} if megatron else {"adam": "adamw", "AdamW": "adamw"}
    kind = choose({key: v.get(key, "adam")}, key, {**kinds, **({"AdamW": "adamw"} if megatron else {})})
    return {f"{native}.name": kind, **({f"{native}.momentum": 0.9} if kind == "sgd" else {})}


def _warmup(v: Values, at: str, *, megatron: bool) -> Native:
    """Steps, or else a share of all. Megatron takes the share also at 0 steps, and so does FSDP since 0.8.0."""
    steps, ratio = v[f"{at}.lr_warmup_steps"], v[f"{at}.lr_warmup_steps_ratio"]
    least = 1 if megatron or since(v, "verl", "0.8.0") else 0
    if steps is not None and steps >= least:
        return {"warmup_steps": steps}
    return {"warmup_ratio": ratio} if ratio else NOTHING


def _fsdp_schedule(v: Values, at: str) -> Native:
    """Until 0.6.0 a cosine also warms up from its floor, and not from 0."""
    if v[f"{at}.warmup_style"] in (None, "constant"):
        return {"type": "constant"}
    low = v[f"{at}.min_lr_ratio"] or 0.0
    return {
        "type": "cosine",
        "min_lr_ratio": low,
        "warmup_start_ratio": 0.0 if since(v, "verl", "0.6.0") else low,
        "num_cycles": v[f"{at}.num_cycles"],
    }


MEGATRON_STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_square_root": "inverse_sqrt",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}


def _megatron_schedule(v: Values, at: str) -> Native:
    """Megatron warms up from lr_warmup_init to lr, and goes down to min_lr by the step lr_decay_steps."""
    key, lr = f"{at}.lr_decay_style", v[f"{at}.lr"]
    kind = choose({key: _style(v, at)}, key, MEGATRON_STYLES)
    shares = {key: v[f"{at}.{key}"] for key in ("min_lr", "lr_warmup_init")}
    for key, value in shares.items():
        if not 0 <= value <= lr:
            raise ConfigError(f"{at}.{key}={value} must be between 0 and {at}.lr={lr}")
    low, start = (value / lr if lr else 0.0 for value in shares.values())
    out: dict[str, Json] = {"type": kind, "warmup_start_ratio": start}
    if v[f"{at}.lr_decay_steps"] not in (None, -1):
        out["total_steps"] = v[f"{at}.lr_decay_steps"]
    if kind == "wsd":
        out |= _stable_then_down(v, at)
    return out if out["type"] == "constant" else out | {"min_lr_ratio": low}


def _style(v: Values, at: str) -> Json:
    """lr_decay_style; the document lets warmup_style name the same thing."""
    style, other = v[f"{at}.lr_decay_style"], v[f"{at}.warmup_style"]
    if other != "cosine" or style == other:
        return style
    if style not in ("linear", "constant"):
        raise ConfigError(f"{at}.warmup_style=cosine and {at}.lr_decay_style={shown(style)} differ; keep one")
    return other


SHAPES = {name: name for name in ("exponential", "linear", "cosine", "minus_sqrt", "constant")}


def _stable_then_down(v: Values, at: str) -> Native:
    """The decay's shape and steps, which must be given; a decay that is constant is none."""
    shape = choose(v, f"{at}.lr_wsd_decay_style", SHAPES)
    if shape == "constant":
        return {"type": "constant"}
    if v[f"{at}.lr_wsd_decay_steps"] is None:
        raise ConfigError(f"{at}.lr_decay_style=WSD needs {at}.lr_wsd_decay_steps, the steps of the decay")
    return {"decay_type": shape, "decay_steps": v[f"{at}.lr_wsd_decay_steps"]}
