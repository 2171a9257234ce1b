"""verl's optimizers, schedules, checkpoints and trainer as native keys."""

from __future__ import annotations

from pathlib import PurePath

from whet.config.faults import shown
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.typed import choose, flag, number, whole
from whet.dialects.uploads import place
from whet.dialects.verl.rules import (
    ACTOR,
    ANY,
    CRITIC,
    MODEL,
    NOTHING,
    Native,
    anywhere,
    has_critic,
    has_reward_model,
    is_megatron,
    local,
    texts,
)
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- optimizers


def actor_optimizer(v: Values) -> Native:
    return _optimizer(v, ACTOR, native="train.optimizer")


def critic_optimizer(v: Values) -> Native:
    return _optimizer(v, CRITIC, native="critic.optimizer")


def _optimizer(v: Values, role: str, *, native: str) -> Native:
    """AdamW and its schedule, which moves once a training step, by FSDP's keys or Megatron's."""
    at = f"{role}.optim"
    megatron = is_megatron(v)
    schedule = _megatron_schedule(v, at) if megatron else _fsdp_schedule(v, at)
    return {
        **_kind(v, f"{at}.optimizer", native),
        f"{native}.weight_decay": v[f"{at}.weight_decay"],
        f"{native}.decay_all": not megatron,
        f"{native}.betas": v.get(f"{at}.betas", [0.9, 0.999]),
        f"{native}.grad_clip": number(v, f"{at}.clip_grad" if megatron else f"{role}.grad_clip") or None,
        f"{native}.schedule.unit": "train_step",
        f"{native}.schedule.warmup_ends": "start",
        **{f"{native}.schedule.{key}": value for key, value in {**schedule, **_warmup(v, at)}.items()},
        **_length(v, f"{native}.schedule", schedule),
    }


def _kind(v: Values, key: str, native: str) -> Native:
    """FSDP has AdamW alone; Megatron's adam is AdamW, too, and its sgd has a momentum that no key of verl sets."""
    kinds = {"adam": "adamw", "sgd": "sgd"} if is_megatron(v) else {"adam": "adamw", "AdamW": "adamw"}
    kind = choose({key: v.get(key, "adam")}, key, kinds)
    return {f"{native}.kind": kind, **({f"{native}.momentum": 0.9} if kind == "sgd" else {})}


def _warmup(v: Values, at: str) -> Native:
    """Steps, or else a share of all. Megatron takes the share also at 0 steps."""
    steps, ratio = v[f"{at}.lr_warmup_steps"], number(v, f"{at}.lr_warmup_steps_ratio")
    if steps is not None and whole(v, f"{at}.lr_warmup_steps", least=ANY) >= (1 if is_megatron(v) else 0):
        return {"warmup_steps": steps}
    return {"warmup_fraction": ratio} if ratio else NOTHING


def _length(v: Values, at: str, schedule: Native) -> Native:
    """verl's schedule is as long as total_training_steps says, even if epochs end before or the critic begins alone."""
    steps = v["trainer.total_training_steps"]
    if steps is None or "total_steps" in schedule or _warmup_steps(v, at) >= steps:
        return NOTHING
    return {f"{at}.total_steps": steps}


def _warmup_steps(v: Values, at: str) -> int:
    role = ACTOR if at.startswith("train.") else CRITIC
    return _warmup(v, f"{role}.optim").get("warmup_steps") or 0


def _fsdp_schedule(v: Values, at: str) -> Native:
    """A cosine also warms up from its floor, not from 0."""
    kind = choose(v, f"{at}.warmup_style", {"constant": "constant", "cosine": "cosine"})
    if kind == "constant":
        return {"kind": kind}
    low = number(v, f"{at}.min_lr_ratio") if v[f"{at}.min_lr_ratio"] is not None else 0.0
    return {"kind": kind, "min_factor": low, "warmup_start": low, "cycles": number(v, f"{at}.num_cycles")}


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
    key, lr = f"{at}.lr_decay_style", number(v, f"{at}.lr")
    kind = choose({key: _style(v, at)}, key, MEGATRON_STYLES)
    shares = {key: number(v, f"{at}.{key}") for key in ("min_lr", "lr_warmup_init")}
    for key, value in shares.items():
        if not 0 <= value <= lr:
            raise ConfigError(f"{at}.{key}={value} must be between 0 and {at}.lr={lr}")
    low, start = (value / lr if lr else 0.0 for value in shares.values())
    out: dict[str, Json] = {"kind": kind, "warmup_start": start}
    if v[f"{at}.lr_decay_steps"] not in (None, -1):
        out["total_steps"] = whole(v, f"{at}.lr_decay_steps")
    if kind == "wsd":
        out |= _stable_then_down(v, at)
    return out if out["kind"] == "constant" else out | {"min_factor": low}


def _style(v: Values, at: str) -> Json:
    """lr_decay_style; the document lets warmup_style name the same thing."""
    style, other = v[f"{at}.lr_decay_style"], v[f"{at}.warmup_style"]
    if other != "cosine" or style == other:
        return style
    if style != "linear":
        raise ConfigError(f"{at}.warmup_style=cosine and {at}.lr_decay_style={shown(style)} differ; keep one")
    return other


def _stable_then_down(v: Values, at: str) -> Native:
    """The decay's shape and steps, which must be given; a decay that is constant is none."""
    shapes = {name: name for name in ("exponential", "linear", "cosine", "minus_sqrt", "constant")}
    shape = choose(v, f"{at}.lr_wsd_decay_style", shapes)
    if shape == "constant":
        return {"kind": "constant"}
    if v[f"{at}.lr_wsd_decay_steps"] is None:
        raise ConfigError(f"{at}.lr_decay_style=WSD needs {at}.lr_wsd_decay_steps, the steps of the decay")
    return {"decay_shape": shape, "decay_steps": whole(v, f"{at}.lr_wsd_decay_steps")}


# ---------------------------------------------------------------- the trainer


def length(v: Values) -> Native:
    """Epochs of full batches; total_training_steps, where it is given, ends the run in the midst of them."""
    steps = v["trainer.total_training_steps"]
    out: dict[str, Json] = {"train.epochs": whole(v, "trainer.total_epochs"), "train.drop_last": True}
    return out if steps is None else out | {"train.steps": whole(v, "trainer.total_training_steps")}


def imports(v: Values) -> Native:
    """Modules that are imported before a model is built; the misspelling external_libs counts, too."""
    keys = [f"{MODEL}.external_lib", f"{MODEL}.external_libs"]
    keys += ["critic.model.external_lib"] if has_critic(v) else []
    keys += ["reward_model.model.external_lib"] if has_reward_model(v) else []
    names = [name for key in keys if v[key] is not None for name in texts(v, key)]
    return {"imports": list(dict.fromkeys(names))} if names else NOTHING


def run_directory(v: Values) -> Native:
    """Where verl puts checkpoints stands everything that a run writes."""
    return {"run_dir": local(v, "trainer.default_local_dir")}


PARTS = ("model", "optimizer")
"""What a checkpoint may be without; the run's place (extra) is always in it."""

CONTENTS = (*PARTS, "extra", "hf_model")


def checkpoints(v: Values) -> Native:
    """Every save_freq steps, and always at the end. hf_model asks for an export beside each."""
    every = max(whole(v, "trainer.save_freq", least=ANY), 0)
    saved = _contents(v, f"{ACTOR}.checkpoint.save_contents")
    loaded = _contents(v, f"{ACTOR}.checkpoint.load_contents")
    if "extra" not in loaded:
        raise NotSupportedYet(
            f"{ACTOR}.checkpoint.load_contents={shown(loaded)}: to go on without schedule, data position and random "
            "state (extra) is coming, not built yet"
        )
    if has_critic(v):
        _check_critic(v, saved, loaded)
    return {
        "checkpoint.every": every,
        "checkpoint.keep": _kept(v),
        "checkpoint.contents": [part for part in PARTS if part in saved],
        "checkpoint.load": [part for part in PARTS if part in loaded],
        "checkpoint.export": "hf_model" in saved,
        "checkpoint.export_every": every if "hf_model" in saved else 0,
    }


def _kept(v: Values) -> int | None:
    if flag(v, "trainer.remove_previous_ckpt_in_save"):
        return 1
    keep = v["trainer.max_actor_ckpt_to_keep"]
    return None if keep is None else whole(v, "trainer.max_actor_ckpt_to_keep")


def _contents(v: Values, key: str) -> list[str]:
    """The parts named by a key, or by the older `contents` of the actor, which must not contradict it."""
    given = _parts(v, key)
    old = f"{ACTOR}.checkpoint.contents"
    if not key.startswith(ACTOR) or v[old] is None:
        return given
    older = _parts(v, old)
    if set(given) not in (set(CONTENTS) - {"hf_model"}, set(older)):
        raise ConfigError(f"{old}={shown(older)} and {key}={shown(given)} differ; keep one")
    return older


def _parts(v: Values, key: str) -> list[str]:
    given = texts(v, key)
    if unknown := sorted(set(given) - set(CONTENTS)):
        raise ConfigError(f"{key}: {', '.join(unknown)} is not one of {', '.join(CONTENTS)}")
    if "model" not in given:
        raise ConfigError(f"{key}={shown(given)} has no model, and no run can go on without its weights")
    return given


def _check_critic(v: Values, saved: list[str], loaded: list[str]) -> None:
    """Policy and critic lie in one checkpoint, so what is said of the critic's must be the same."""
    for key, parts in (("save_contents", saved), ("load_contents", loaded)):
        mine = _contents(v, f"{CRITIC}.checkpoint.{key}")
        if set(mine) - {"hf_model"} != set(parts) - {"hf_model"}:
            raise NotSupportedYet(
                f"{CRITIC}.checkpoint.{key}={shown(mine)}: other parts than the policy's, {shown(parts)}, are coming, "
                "not built yet"
            )
    keep = v["trainer.max_critic_ckpt_to_keep"]
    if keep is not None and keep != _kept(v):
        raise NotSupportedYet(
            f"trainer.max_critic_ckpt_to_keep={shown(keep)}: policy and critic lie in one checkpoint; another number "
            "than max_actor_ckpt_to_keep is coming, not built yet"
        )


def resume(v: Values) -> Native:
    """auto goes on where the directory stands, disable moves what is there aside, resume_path names a checkpoint."""
    modes = {"auto": "auto", "disable": "fresh", "resume_path": "resume_path"}
    mode = choose(v, "trainer.resume_mode", modes)
    path = v["trainer.resume_from_path"] or None
    if mode != "resume_path":
        return {"checkpoint.resume": mode}
    if path is None:
        raise ConfigError(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path, a checkpoint's folder"
        )
    return {"checkpoint.resume": anywhere(v, "trainer.resume_from_path")}


TRACKERS: dict[str, str | None] = {
    **{name: name for name in ("console", "tensorboard", "wandb", "mlflow", "swanlab")},
    "file": "jsonl",
    **dict.fromkeys(("vemlp_wandb", "clearml", "trackio")),
}


def trackers(v: Values) -> Native:
    """By the same names; metrics.jsonl is written always."""
    names = [
        choose({"trainer.logger": one}, "trainer.logger", TRACKERS) for one in texts(v, "trainer.logger")
    ]
    return {"track.trackers": list(dict.fromkeys(names))}


def device(v: Values) -> Native:
    """cuda is CUDA where there is one, and else the CPU stands in."""
    known = {"cuda": "auto", "cpu": "cpu", "npu": None}
    return {"machine.device": choose(v, "trainer.device", known)}


def dumps(v: Values) -> Native:
    """STEP.jsonl in each of the two folders that is given."""
    keys = (("rollout_data_dir", "rollouts_dump"), ("validation_data_dir", "eval_dump"))
    return {
        f"track.{native}": str(PurePath(local(v, f"trainer.{key}")) / "{step}.jsonl")
        for key, native in keys
        if v[f"trainer.{key}"] is not None
    }


DOCUMENTED = "~/experiments/gsm8k/ppo/${trainer.experiment_name}"
"""What verl's document has for default_hdfs_dir."""


def copies(v: Values) -> Native:
    """Another place for checkpoints."""
    given = v["trainer.default_hdfs_dir"]
    if given in (None, DOCUMENTED.replace("${trainer.experiment_name}", str(v["trainer.experiment_name"]))):
        return NOTHING
    return {"checkpoint.upload_to": [place(anywhere(v, "trainer.default_hdfs_dir"))]}
