"""Trinity-RFT's `trainer` and its veRL section: the critic, memory, checkpoints; the embedded trainer stands in."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from whet.config.dialects.key import Values
from whet.config.dialects.trinity_algorithm import schedule
from whet.config.dialects.trinity_data import limits
from whet.config.dialects.trinity_values import (
    ACTOR,
    CRITIC,
    MODEL,
    REF,
    VERL_TRAINER,
    agreed,
    count,
    given,
    preset,
    text,
    whole,
)
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- what is trained


def critic(values: Values) -> Mapping[str, Json]:
    """The value model of ppo: where it starts, its optimizer, its clipping, its warm-up alone."""
    path, policy = text(values, "model.critic_model_path"), text(values, "model.model_path")
    own = values[f"{CRITIC}.grad_clip"]
    clip = values["trainer.grad_clip"] if own == 1.0 else own
    if not values[f"{CRITIC}.cliprange_value"]:
        raise ConfigError(
            f"{CRITIC}.cliprange_value: 0 would hold every value where it was; write 0.5, the default."
        )
    optimizer = {
        "lr": values[f"{CRITIC}.optim.lr"],
        "weight_decay": 0.01,
        "grad_clip": clip,
        "schedule": schedule(
            str(values[f"{CRITIC}.optim.warmup_style"]),
            ratio=values[f"{CRITIC}.optim.lr_warmup_steps_ratio"],
            floor=given(values[f"{CRITIC}.optim.min_lr_ratio"]),
        ),
    }
    return {
        **({"critic.path": path} if path not in (None, policy) else {}),
        "critic.clip_value": values[f"{CRITIC}.cliprange_value"],
        "critic.warmup_steps": values[f"{VERL_TRAINER}.critic_warmup"],
        "critic.optimizer": optimizer,
    }


def like_the_actor(values: Values) -> Mapping[str, Json]:
    """What actor and critic have in common here must be given alike."""
    for theirs, own in (
        (f"{CRITIC}.ppo_epochs", f"{ACTOR}.ppo_epochs"),
        (f"{CRITIC}.shuffle", f"{ACTOR}.shuffle"),
        (f"{CRITIC}.model.enable_gradient_checkpointing", f"{MODEL}.enable_gradient_checkpointing"),
    ):
        if preset(values).recipe == "ppo" and values[theirs] not in (None, values[own]):
            raise ConfigError(
                f"{theirs}: {values[theirs]} is not the actor's {values[own]}: its own is coming, not built yet."
            )
    return {}


def passes(values: Values) -> Mapping[str, Json]:
    """ppo_epochs and memory for time."""
    return {
        "train.passes": values[f"{ACTOR}.ppo_epochs"],
        "train.gradient_checkpointing": values[f"{MODEL}.enable_gradient_checkpointing"],
    }


def overwritten(values: Values) -> Mapping[str, Json]:
    """Steps that Trinity puts in itself: its own number, or none."""
    wanted = given(values.get("trainer.total_steps"))
    for key in (
        f"{ACTOR}.optim.total_training_steps",
        f"{CRITIC}.optim.total_training_steps",
        f"{VERL_TRAINER}.total_training_steps",
    ):
        if values[key] not in (None, -1, wanted):
            raise ConfigError(
                f"{key}: {values[key]} would be overwritten; write trainer.total_steps: {values[key]}."
            )
    return {}


# ---------------------------------------------------------------- memory


def micro(values: Values) -> Mapping[str, Json]:
    """One cut into micro-batches for all models: the smallest of the budgets in use. It never changes the gradient."""
    dynamic = agreed(values, {"trainer.use_dynamic_bsz": True, f"{ACTOR}.use_dynamic_bsz": True})
    for key in (f"{REF}.log_prob_use_dynamic_bsz", f"{CRITIC}.use_dynamic_bsz"):
        if values[key] not in (None, dynamic):
            raise ConfigError(
                f"{key}: {values[key]} is not the actor's {dynamic}: one way for all models is what is built."
            )
    if not dynamic:
        return {
            "train.micro_rollouts": _smallest(values, MICRO_BATCHES)
            * (2 if preset(values).kind == "dpo" else 1)
        }
    width = count(values, "trainer.ulysses_sequence_parallel_size")
    floor = ceil(2 * sum(limits(values)) / width)
    own = max(whole(values, "trainer.max_token_len_per_gpu") or floor, floor)
    return {"train.micro_tokens": min(own, _smallest(values, TOKEN_BUDGETS, default=own))}


TOKEN_BUDGETS: dict[str, int | None] = {
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{REF}.log_prob_max_token_len_per_gpu": None,
    f"{CRITIC}.ppo_max_token_len_per_gpu": 32768,
    f"{CRITIC}.forward_max_token_len_per_gpu": None,
}
"""Budgets with their defaults, which bind nobody: trainer.max_token_len_per_gpu stands for those that are not given."""

MICRO_BATCHES: dict[str, int | None] = {
    f"{ACTOR}.ppo_micro_batch_size": None,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    f"{REF}.log_prob_micro_batch_size": None,
    f"{REF}.log_prob_micro_batch_size_per_gpu": 4,
    f"{CRITIC}.ppo_micro_batch_size_per_gpu": 8,
    f"{CRITIC}.forward_micro_batch_size_per_gpu": None,
}


def _smallest(values: Values, defaults: Mapping[str, int | None], *, default: int = 4) -> int:
    """The least of the numbers that are not their defaults, those of the critic in ppo alone."""
    with_critic = preset(values).recipe == "ppo"
    keys = [key for key in defaults if with_critic or not key.startswith(CRITIC)]
    told = [n for key in keys if (n := whole(values, key)) is not None and n != defaults[key]]
    return min(told, default=default)


# ---------------------------------------------------------------- checkpoints


def resume(values: Values) -> Mapping[str, Json]:
    """resume_mode where it is set, else continue_from_checkpoint."""
    at = f"{VERL_TRAINER}.resume_mode"
    kind, path = text(values, at) or "auto", text(values, f"{VERL_TRAINER}.resume_from_path")
    if kind == "resume_path":
        if path is None:
            raise ConfigError(
                f"{VERL_TRAINER}.resume_from_path: must be given with resume_mode: resume_path."
            )
        return {"checkpoint.resume": path}
    if path is not None:
        raise ConfigError(
            f"{VERL_TRAINER}.resume_from_path: has no effect with resume_mode: {kind}; write resume_path."
        )
    if kind not in ("auto", "disable"):
        raise ConfigError(f"{at}: {kind!r} is not known; it is auto, disable or resume_path.")
    goes_on = kind == "auto" and values["continue_from_checkpoint"]
    return {"checkpoint.resume": "auto" if goes_on else "never"}


KEEP_ALL = 1_000_000
"""Checkpoints kept where all are wanted."""


def keep(values: Values) -> Mapping[str, Json]:
    """Actor and critic are saved together, so they are kept alike."""
    actor, of_critic = (values[f"{VERL_TRAINER}.max_{who}_ckpt_to_keep"] for who in ("actor", "critic"))
    if values[f"{VERL_TRAINER}.remove_previous_ckpt_in_save"]:
        return {"checkpoint.keep": 1}
    if preset(values).recipe == "ppo" and actor != of_critic:
        raise ConfigError(
            f"{VERL_TRAINER}.max_critic_ckpt_to_keep: {of_critic} is not max_actor_ckpt_to_keep = {actor}: a "
            "checkpoint holds both; other numbers are coming, not built yet."
        )
    return {"checkpoint.keep": KEEP_ALL if actor is None else actor}


def export(values: Values) -> Mapping[str, Json]:
    """A Hugging Face folder at the end, or none."""
    wanted = values["trainer.save_hf_checkpoint"]
    if wanted == "always":
        raise ConfigError("trainer.save_hf_checkpoint: always is coming, not built yet; here: last, never.")
    if wanted not in ("last", "never"):
        raise ConfigError(
            f"trainer.save_hf_checkpoint: {wanted!r} is not known; it is last, always or never."
        )
    return {"checkpoint.export": wanted == "last"}
