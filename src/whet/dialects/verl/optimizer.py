"""verl's optimizers and their schedules as native keys, by the keys of each training engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from whet.config.faults import shown
from whet.dialects.row import NOTHING, Native, NotSupportedYet, Values
from whet.dialects.typed import choices, choose, share_of_steps
from whet.dialects.verl.roles import ACTOR, CRITIC, check_engine, engine_of, has_critic
from whet.dialects.verl.sizes import is_fully_async, updates_of_a_step
from whet.dialects.versions import since
from whet.types import ConfigError, Json


def actor(v: Values) -> Native:
    check_engine(v)
    return _of_role(v, ACTOR, native="train.optimizer")


def _of_role(v: Values, role: str, *, native: str) -> Native:
    at, engine = f"{role}.optim", engine_of(v)
    told = _without_length(v, at, engine) if is_fully_async(v) else v
    if (updates := updates_of_a_step(v)) == 1:
        return settings(told, at, native=native, engine=engine, clip=_clip(v, role))
    steps = v["trainer.total_training_steps"]
    told = {**v, "trainer.total_training_steps": None if steps is None else steps * updates}
    made = settings(told, at, native=native, engine=engine, clip=_clip(v, role))
    return {**made, f"{native}.schedule.unit": "optimizer_step"}


critic = partial(_of_role, role=CRITIC, native="critic.optimizer")


def _without_length(v: Values, at: str, engine: str) -> Values:
    """As the engines of the fully asynchronous trainer see it: they start before the steps are counted, so they have
    the optimizer's own number, which other trainers overwrite. -1, as in the document, is no length of a decay, and no
    share of it is a step of warm-up. As verl 0.6.1 to 0.9.1."""
    key, total = f"{at}.total_training_steps", v[f"{at}.total_training_steps"]
    if total is not None and total > 0:
        return {**v, "trainer.total_training_steps": total}
    shape = SCHEDULES[engine](v, at)
    if "total_steps" in shape:
        return {**v, "trainer.total_training_steps": None}
    if engine == "megatron":
        raise ConfigError(
            f"{at}.lr_decay_steps=null: verl's fully asynchronous trainer does not tell Megatron the number of steps; "
            f"give lr_decay_steps, also where the rate is constant, or {key}"
        )
    if shape["type"] != "constant":
        raise ConfigError(
            f"{key}={shown(total)}: verl's fully asynchronous trainer does not tell its engine the number of steps, "
            f"which a learning rate of type {shape['type']} needs; give {key}, or take a constant rate"
        )
    return {**v, "trainer.total_training_steps": None, f"{at}.lr_warmup_steps_ratio": 0.0}


def critic_warmup(v: Values) -> Native:
    """verl trains the policy in steps, counted from 1, that are not below this number."""
    return {"critic.warmup_steps": max(v["trainer.critic_warmup"] - 1, 0)}


def constant_rates(v: Values) -> bool:
    """Whether no learning rate ever changes, so that a schedule has no place to go on from."""
    made = [("train.optimizer", actor(v)), *([("critic.optimizer", critic(v))] if has_critic(v) else [])]
    return all(
        own.get(f"{at}.schedule.type", "constant") == "constant"
        and not own.get(f"{at}.schedule.warmup_steps")
        for at, own in made
    )


def _clip(v: Values, role: str) -> Json:
    """FSDP reads the role's own key, the other engines that of the optimizer, and so does FSDP since 0.8.0."""
    of_optimizer = f"{role}.optim.clip_grad"
    if engine_of(v) != "fsdp" or (since(v, "verl", "0.8.0") and of_optimizer in v):
        return v[of_optimizer]
    return v[f"{role}.grad_clip"]


def settings(v: Values, at: str, *, native: str, engine: str, clip: Json) -> Native:
    """The optimizer and its schedule, which moves once a training step."""
    _check_own(v, at, engine)
    schedule = {"warmup_ends": "start", **SCHEDULES[engine](v, at)}
    warmup = _warmup(v, at, engine=engine)
    steps, length = v["trainer.total_training_steps"], {}
    if steps is not None and "total_steps" not in schedule and (warmup.get("warmup_steps") or 0) < steps:
        length = {"total_steps": steps}  # even if epochs end before or the critic begins alone
    return {
        **_kind(v, at, native, engine=engine),
        f"{native}.weight_decay": v[f"{at}.weight_decay"],
        f"{native}.decay_all": engine not in ("megatron", "mlite"),
        f"{native}.betas": v.get(f"{at}.betas", [0.9, 0.999]),
        **({f"{native}.eps": v[f"{at}.eps"]} if "eps" in OWN.get(engine, ()) else {}),
        f"{native}.max_grad_norm": clip or None,
        f"{native}.schedule.unit": "train_step",
        **{f"{native}.schedule.{key}": value for key, value in {**schedule, **warmup, **length}.items()},
    }


OWN: Mapping[str, Mapping[str, Json]] = {
    "veomni": {"lr_min": 0.0, "lr_start": 0.0, "lr_decay_ratio": 1.0},
    "torchtitan": {"name": "AdamW", "eps": 1e-8, "decay_type": "linear", "min_lr_factor": 0.0},
    "automodel": {"eps": 1e-8, "init_lr_ratio": 0.1},
}
"""Keys that only some engines have, with their defaults."""


def _check_own(v: Values, at: str, engine: str) -> None:
    """A key of another engine has no effect, and verl knows it there only."""
    for other, keys in OWN.items():
        for name, default in keys.items():
            value = v.get(f"{at}.{name}", default)
            if name not in OWN.get(engine, ()) and value != default:
                raise ConfigError(
                    f"{at}.{name}={shown(value)} is a key of {other}, not of {engine}; leave it out"
                )


ADAMW = dict.fromkeys(("adam", "AdamW", "FusedAdam"), "adamw")
OPTIMIZERS: Mapping[str, tuple[str, str, Mapping[str, str | None]]] = {
    "fsdp": ("optimizer", "AdamW", ADAMW),
    "megatron": ("optimizer", "adam", {**ADAMW, "sgd": "sgd", "muon": None}),
    "veomni": ("optimizer", "adamw", {**ADAMW, "adamw": "adamw", "anyprecision_adamw": None}),
    "torchtitan": ("name", "AdamW", {"AdamW": "adamw", "Adam": "adam"}),
    "automodel": ("optimizer", "AdamW", ADAMW),
    "mlite": ("optimizer", "adam", ADAMW),
}
"""By engine: the key that names the optimizer, its default, and the native optimizers by its values."""


def _kind(v: Values, at: str, native: str, *, engine: str) -> Native:
    """Megatron's adam is AdamW, too, and its sgd has a momentum that no key of verl sets."""
    name, default, kinds = OPTIMIZERS[engine]
    kind = choose({f"{at}.{name}": v.get(f"{at}.{name}", default)}, f"{at}.{name}", kinds)
    return {
        f"{native}.name": kind,
        **({f"{native}.momentum": 0.9} if kind == "sgd" else {}),
        **_moments(v, at, native, engine),
    }


MOMENTS = {"fp32": None, "torch.float32": None, "bf16": "bfloat16", "torch.bfloat16": "bfloat16"}


def _moments(v: Values, at: str, native: str, engine: str) -> Native:
    """The dtype of Adam's moments: of Megatron-LM where its precision-aware optimizer is on, and of the FusedAdam
    that Automodel may have."""
    keys = (f"{at}.exp_avg_dtype", f"{at}.exp_avg_sq_dtype")
    one, other = ("fp32" if v.get(key) is None else v[key] for key in keys)
    aware = engine == "megatron" and v.get(f"{at}.use_precision_aware_optimizer")
    plain = all(MOMENTS.get(dtype, dtype) is None for dtype in (one, other))
    if plain or not (aware or engine == "automodel"):
        return NOTHING
    if engine == "automodel" and v[f"{at}.optimizer"] != "FusedAdam":
        raise ConfigError(
            f"{keys[0]}={shown(v[keys[0]])}, {keys[1]}={shown(v[keys[1]])}: Automodel's {v[f'{at}.optimizer']} has no "
            "such option; its FusedAdam has"
        )
    if one not in MOMENTS or MOMENTS.get(one) != MOMENTS.get(other):
        raise NotSupportedYet(
            f"{keys[0]}={one}, {keys[1]}={other}: moments of two dtypes, and in float16, are coming, not built yet; "
            "today: fp32 or bf16 for both"
        )
    return {f"{native}.state_dtype": MOMENTS[one]} if MOMENTS[one] else NOTHING


def _warmup(v: Values, at: str, *, engine: str) -> Native:
    """Steps, or else a share of all. Until 0.8.0 FSDP alone takes 0 steps for no warm-up; elsewhere the share counts
    then, too. VeOmni loses the steps on their way; they count here."""
    steps, ratio = v[f"{at}.lr_warmup_steps"], v[f"{at}.lr_warmup_steps_ratio"]
    least = 0 if engine == "fsdp" and not since(v, "verl", "0.8.0") else 1
    if steps is not None and steps >= least:
        return {"warmup_steps": steps}
    if engine == "veomni" and v[f"{at}.lr_decay_ratio"] != 1.0:  # a share of all steps, not of the decay's
        return {"warmup_steps": int(ratio * (v["trainer.total_training_steps"] or 0))}
    return {"warmup_steps": share_of_steps(ratio, f"{at}.lr_warmup_steps_ratio")} if ratio else NOTHING


def _fsdp_schedule(v: Values, at: str) -> Native:
    """Until 0.6.0 a cosine also warms up from its floor, and not from 0."""
    ends = {"warmup_ends": "start" if v.get(f"{at}.zero_indexed_step", True) else "peak"}
    if _fsdp_type(v, at) == "constant":
        return {"type": "constant", **ends}
    low = v[f"{at}.min_lr_ratio"] or 0.0
    return {
        "type": "cosine",
        "min_lr_ratio": low,
        "warmup_start_ratio": 0.0 if since(v, "verl", "0.6.0") else low,
        "num_cycles": v[f"{at}.num_cycles"],
        **ends,
    }


def _fsdp_type(v: Values, at: str) -> str:
    """lr_scheduler_type, or the older warmup_style, which must not contradict it."""
    key, older = f"{at}.lr_scheduler_type", v[f"{at}.warmup_style"]
    if None not in (v[key], older) and v[key] != older and since(v, "verl", "0.6.0"):
        raise ConfigError(f"{key}={v[key]} and {at}.warmup_style={older} differ; keep one")
    return choose({key: v[key] or older or "constant"}, key, {"constant": "constant", "cosine": "cosine"})


def _type(v: Values, at: str, known: Mapping[str, str | None]) -> str:
    """lr_scheduler_type of VeOmni and Automodel, a cosine by default."""
    key = f"{at}.lr_scheduler_type"
    return choose({key: v[key] or "cosine"}, key, known)


def _veomni_schedule(v: Values, at: str) -> Native:
    """VeOmni warms up from lr_start to lr; a cosine goes down to lr_min by a share of all steps."""
    kind = _type(v, at, {"constant": "constant", "cosine": "cosine"})
    start = {"warmup_start_ratio": _share(v, at, "lr_start")}
    if kind == "constant":
        return {"type": kind, **start}
    return {"type": kind, "min_lr_ratio": _share(v, at, "lr_min"), **start, **_decay_end(v, at)}


def _decay_end(v: Values, at: str) -> Native:
    """The step at which VeOmni's cosine ends."""
    share, steps = v[f"{at}.lr_decay_ratio"], v["trainer.total_training_steps"]
    if share == 1.0:
        return NOTHING
    if steps is None:
        raise NotSupportedYet(
            f"{at}.lr_decay_ratio={share}: a share of a number of steps that is not given is coming, not built yet; "
            "give trainer.total_training_steps"
        )
    return {"total_steps": max(int(steps * share), 1)}


def _torchtitan_schedule(v: Values, at: str) -> Native:
    """Step s of W has (s + 1) / W of the peak; then the rate goes down to min_lr_factor. verl does not tell torchtitan
    how many steps there are, so there the decay is over its own 10,000; here it is over the run's."""
    kind = choose(v, f"{at}.decay_type", choices("verl", "torchtitan decay"))
    shape = {"decay_type": "minus_sqrt", "decay_steps": None} if kind == "wsd" else {}
    return {"type": kind, "warmup_ends": "peak", "min_lr_ratio": v[f"{at}.min_lr_factor"], **shape}


def _automodel_schedule(v: Values, at: str) -> Native:
    """Automodel has Megatron's scheduler, with shares of lr in place of rates."""
    kind = _type(v, at, choices("verl", "automodel schedule"))
    start, low = v[f"{at}.init_lr_ratio"], v[f"{at}.min_lr_ratio"]
    out = {"type": kind, "warmup_start_ratio": 0.1 if start is None else start}
    return out if kind == "constant" else {**out, "min_lr_ratio": 0.01 if low is None else low}


def _megatron_schedule(v: Values, at: str) -> Native:
    """Megatron warms up from lr_warmup_init to lr, and goes down to min_lr by the step lr_decay_steps."""
    key = f"{at}.lr_decay_style"
    kind = choose({key: _style(v, at)}, key, choices("verl", "megatron decay"))
    low, start = (_share(v, at, name) for name in ("min_lr", "lr_warmup_init"))
    out: dict[str, Json] = {"type": kind, "warmup_start_ratio": start}
    if v[f"{at}.lr_decay_steps"] not in (None, -1):
        out["total_steps"] = v[f"{at}.lr_decay_steps"]
    if kind == "wsd":
        out |= _stable_then_down(v, at)
    return out if out["type"] == "constant" else out | {"min_lr_ratio": low}


def _share(v: Values, at: str, name: str) -> float:
    """A learning rate as a share of lr."""
    lr, value = v[f"{at}.lr"], v[f"{at}.{name}"]
    if not 0 <= value <= lr:
        raise ConfigError(f"{at}.{name}={value} must be between 0 and {at}.lr={lr}")
    return float(value / lr) if lr else 0.0


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


def _mlite_schedule(v: Values, at: str) -> Native:
    """Megatron Lite has a scheduler of its own, with Megatron's shapes but for an exponential decay: its rate falls by
    the same factor in each step, and in a line where min_lr is 0. WSD without lr_wsd_decay_steps never decays."""
    key, shape, steps = (
        f"{at}.{name}" for name in ("lr_decay_style", "lr_wsd_decay_style", "lr_wsd_decay_steps")
    )
    if choose(v, key, choices("verl", "mlite decay")) != "wsd":
        return _megatron_schedule(v, at)
    if not v[steps]:
        return _megatron_schedule({**v, key: "constant"}, at)
    kind = choose(v, shape, {name: name for name in ("exponential", "linear", "cosine", "constant")})
    if kind == "exponential" and v[f"{at}.min_lr"]:
        raise NotSupportedYet(
            f"{shape}=exponential with {at}.min_lr={v[f'{at}.min_lr']} and strategy=mlite: a rate that falls by the "
            "same factor in each step is coming, not built yet; today: linear, cosine, or a min_lr of 0"
        )
    return _megatron_schedule({**v, key: "WSD", shape: "linear" if kind == "exponential" else kind}, at)


SCHEDULES: Mapping[str, Callable[[Values, str], Native]] = {
    "fsdp": _fsdp_schedule,
    "megatron": _megatron_schedule,
    "veomni": _veomni_schedule,
    "torchtitan": _torchtitan_schedule,
    "automodel": _automodel_schedule,
    "mlite": _mlite_schedule,
}
