"""verl's optimizers, schedules and trainer as native keys."""

from __future__ import annotations

from whet.config.dialects.key import Values
from whet.config.dialects.typed import choose, flag, number, whole
from whet.config.dialects.verl_rules import (
    ACTOR,
    ALL,
    ANY,
    CRITIC,
    MODEL,
    NOTHING,
    Native,
    has_critic,
    is_megatron,
    local,
    mini_batches,
    texts,
)
from whet.config.faults import shown
from whet.types import ConfigError

# ---------------------------------------------------------------- optimizers


def actor_optimizer(v: Values) -> Native:
    return _optimizer(v, ACTOR, native="train.optimizer")


def critic_optimizer(v: Values) -> Native:
    return _optimizer(v, CRITIC, native="critic.optimizer")


def _optimizer(v: Values, role: str, *, native: str) -> Native:
    """AdamW and its schedule, by FSDP's keys or Megatron's."""
    at = f"{role}.optim"
    clip: float | None = number(v, f"{role}.grad_clip")
    if is_megatron(v) and f"{at}.clip_grad" in v:
        clip = number(v, f"{at}.clip_grad") or None
    schedule = _megatron_schedule(v, at) if is_megatron(v) else _fsdp_schedule(v, at)
    return {
        f"{native}.weight_decay": v.get(f"{at}.weight_decay", 0.01),
        f"{native}.betas": v.get(f"{at}.betas", [0.9, 0.999]),
        f"{native}.grad_clip": clip,
        **_warmup(v, role, native=native),
        **{f"{native}.schedule.{key}": value for key, value in schedule.items()},
    }


def _warmup(v: Values, role: str, *, native: str) -> Native:
    """verl counts warm-up in training steps, whet in optimizer steps. Megatron takes the ratio also at 0 steps."""
    steps, ratio = v[f"{role}.optim.lr_warmup_steps"], number(v, f"{role}.optim.lr_warmup_steps_ratio")
    if steps is not None and whole(v, f"{role}.optim.lr_warmup_steps", least=ANY) >= (
        1 if is_megatron(v) else 0
    ):
        updates = mini_batches(v, ACTOR) * whole(v, f"{ACTOR}.ppo_epochs")
        return {f"{native}.schedule.warmup_steps": steps * updates}
    return {f"{native}.schedule.warmup_fraction": ratio} if ratio else NOTHING


def _fsdp_schedule(v: Values, at: str) -> Native:
    kind = choose(v, f"{at}.warmup_style", {"constant": "constant", "cosine": "cosine"})
    if kind == "constant":
        return {"kind": kind}
    if number(v, f"{at}.num_cycles") != 0.5:
        raise ConfigError(
            f"{at}.num_cycles={v[f'{at}.num_cycles']}: other than half a wave (0.5) is coming, not built yet"
        )
    return {"kind": kind, "min_factor": v[f"{at}.min_lr_ratio"] or 0.0}


MEGATRON_STYLES: dict[str, str | None] = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_square_root": None,
    "inverse-square-root": None,
    "WSD": None,
}


def _megatron_schedule(v: Values, at: str) -> Native:
    """Megatron decays from lr to min_lr over all steps after the warm-up; warmup_style names the same thing."""
    style = v.get(f"{at}.lr_decay_style", "linear" if v[f"{at}.warmup_style"] == "constant" else "cosine")
    kind = choose({f"{at}.lr_decay_style": style}, f"{at}.lr_decay_style", MEGATRON_STYLES)
    for key, only in (("lr_warmup_init", (0,)), ("lr_decay_steps", (None, -1))):
        if (given := v.get(f"{at}.{key}", only[0])) not in only:
            raise ConfigError(f"{at}.{key}={given}: coming, not built yet; today {shown(only[0])}")
    low, lr = v.get(f"{at}.min_lr", 0.0), number(v, f"{at}.lr")
    if not 0 <= low <= lr:
        raise ConfigError(f"{at}.min_lr={low} must be between 0 and {at}.lr={lr}")
    if kind == "constant":
        return {"kind": kind}
    return {"kind": kind, "min_factor": low / lr if lr else 0.0}


def checkpointing(v: Values) -> Native:
    """One switch for policy and critic, which learn with the same one."""
    return {"train.gradient_checkpointing": flag(v, f"{MODEL}.enable_gradient_checkpointing")}


# ---------------------------------------------------------------- the trainer


def length(v: Values) -> Native:
    """total_training_steps, where it is given, stands over total_epochs."""
    steps = v.get("trainer.total_training_steps")
    return {"train.epochs": whole(v, "trainer.total_epochs")} if steps is None else {"train.steps": steps}


def run_directory(v: Values) -> Native:
    """Where verl puts checkpoints stands everything that a run writes."""
    return {"run_dir": local(v, "trainer.default_local_dir")}


CONTENTS = {"model", "optimizer", "extra"}


def checkpoints(v: Values) -> Native:
    """Every save_freq steps; whet also saves at the end, and always the whole run. hf_model asks for an export."""
    every = max(whole(v, "trainer.save_freq", least=ANY), 0)
    saved = _saved(v)
    for role in (ACTOR, CRITIC) if has_critic(v) else (ACTOR,):
        _check_contents(v, f"{role}.checkpoint.save_contents")
        _check_contents(v, f"{role}.checkpoint.load_contents")
    keep = 1 if flag(v, "trainer.remove_previous_ckpt_in_save") else v.get("trainer.max_actor_ckpt_to_keep")
    return {
        "checkpoint.every": every,
        "checkpoint.keep": keep or (ALL if every else 1),
        "checkpoint.export": "hf_model" in saved,
    }


def _saved(v: Values) -> list[str]:
    """save_contents, or the older `contents`, which must not contradict it."""
    old, new = f"{ACTOR}.checkpoint.contents", f"{ACTOR}.checkpoint.save_contents"
    if v[old] is None:
        return texts(v, new)
    _check_contents(v, old)
    if set(texts(v, new)) not in (CONTENTS, set(texts(v, old))):
        raise ConfigError(f"{old}={shown(v[old])} and {new}={shown(v[new])} differ; keep one")
    return texts(v, old)


def _check_contents(v: Values, key: str) -> None:
    given = set(texts(v, key))
    if unknown := given - CONTENTS - {"hf_model"}:
        raise ConfigError(
            f"{key}: {', '.join(sorted(unknown))} is not one of model, optimizer, extra, hf_model"
        )
    if missing := CONTENTS - given:
        raise ConfigError(
            f"{key} without {', '.join(sorted(missing))}: checkpoints of parts are coming, not built yet; a checkpoint "
            "holds the whole run"
        )


def resume(v: Values) -> Native:
    """auto goes on where the directory stands, disable wants a fresh one, resume_path names a checkpoint."""
    modes = {"auto": "auto", "disable": "never", "resume_path": "resume_path"}
    mode = choose(v, "trainer.resume_mode", modes)
    path = v["trainer.resume_from_path"] or None
    if mode != "resume_path":
        return {"checkpoint.resume": mode}
    if path is None:
        raise ConfigError(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path, a checkpoint's folder"
        )
    return {"checkpoint.resume": local(v, "trainer.resume_from_path")}


TRACKERS: dict[str, str | None] = {
    "console": "console",
    "tensorboard": "tensorboard",
    "file": "jsonl",
    "wandb": "jsonl",
    **dict.fromkeys(("swanlab", "mlflow", "vemlp_wandb", "clearml", "trackio")),
}


def trackers(v: Values) -> Native:
    """jsonl always; wandb, which the document has as its default, is written there instead."""
    names = [
        choose({"trainer.logger": one}, "trainer.logger", TRACKERS) for one in texts(v, "trainer.logger")
    ]
    return {"track.trackers": list(dict.fromkeys([*names, "jsonl"]))}


def device(v: Values) -> Native:
    """cuda is CUDA where there is one, and else the CPU stands in."""
    known = {"cuda": "auto", "cpu": "cpu", "npu": None}
    return {"machine.device": choose(v, "trainer.device", known)}
