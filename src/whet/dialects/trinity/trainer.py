"""Trinity-RFT's `trainer` and its veRL section: the critic, memory, checkpoints; the embedded trainer stands in."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.algorithm import kl, schedule
from whet.dialects.trinity.data import limits
from whet.dialects.trinity.presets import preset
from whet.dialects.trinity.values import (
    ACTOR,
    CRITIC,
    MODEL,
    REF,
    VERL_TRAINER,
    agreed,
    count,
    given,
    known_as,
    text,
    whole,
)
from whet.dialects.typed import flag
from whet.dialects.uploads import place
from whet.types import ConfigError, Json

# ---------------------------------------------------------------- what is trained


def critic(values: Values) -> Mapping[str, Json]:
    """The value model of ppo: where it starts, its optimizer, its clipping, its passes, its warm-up alone."""
    path, policy = text(values, "model.critic_model_path"), text(values, "model.model_path")
    own, optim = values[f"{CRITIC}.grad_clip"], f"{CRITIC}.optim"
    over = values[f"{CRITIC}.model.override_config"] or {}
    if not values[f"{CRITIC}.cliprange_value"]:
        raise ConfigError(
            f"{CRITIC}.cliprange_value: 0 would hold every value where it was; write 0.5, the default."
        )
    optimizer = {
        "lr": values[f"{optim}.lr"],
        **({"betas": values[f"{optim}.betas"]} if preset(values).recipe == "ppo" else {}),
        "weight_decay": values[f"{optim}.weight_decay"],
        "decay_all": bool(values[f"{optim}.weight_decay"]),
        "grad_clip": values["trainer.grad_clip"] if own == 1.0 else own,
        "schedule": schedule(
            str(values[f"{optim}.warmup_style"]),
            ratio=values[f"{optim}.lr_warmup_steps_ratio"],
            floor=given(values[f"{optim}.min_lr_ratio"]),
            steps=values[f"{optim}.lr_warmup_steps"],
        ),
    }
    passes = whole(values, f"{CRITIC}.ppo_epochs")
    own_passes = passes is not None and passes != values[f"{ACTOR}.ppo_epochs"]
    return {
        **({"critic.path": path or policy} if over or path not in (None, policy) else {}),
        **({"critic.overrides": over} if over else {}),
        **({"critic.passes": passes} if own_passes else {}),
        "critic.gradient_checkpointing": values[f"{CRITIC}.model.enable_gradient_checkpointing"],
        "critic.clip_value": values[f"{CRITIC}.cliprange_value"],
        "critic.warmup_steps": values[f"{VERL_TRAINER}.critic_warmup"],
        "critic.optimizer": optimizer,
    }


def like_the_actor(values: Values) -> Mapping[str, Json]:
    """What actor and critic have in common here must be given alike."""
    theirs, own = f"{CRITIC}.shuffle", f"{ACTOR}.shuffle"
    if preset(values).recipe == "ppo" and values[theirs] not in (None, values[own]):
        raise NotSupportedYet(
            f"{theirs}: {values[theirs]} is not the actor's {values[own]}: its own is coming, not built yet."
        )
    return {}


def passes(values: Values) -> Mapping[str, Json]:
    """ppo_epochs and memory for time."""
    return {
        "train.passes": values[f"{ACTOR}.ppo_epochs"],
        "train.shuffle_passes": values[f"{ACTOR}.shuffle"],
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
    """Cuts into micro-batches: of the policy, the critic, forwards without gradient. They never change a gradient.

    A budget of tokens counts where it differs from its default; it holds twice max_model_len at least.
    """
    with_critic = preset(values).recipe == "ppo"
    dynamic = agreed(values, {"trainer.use_dynamic_bsz": True, f"{ACTOR}.use_dynamic_bsz": True})
    of_ref, of_critic = (
        dynamic if values[key] is None else values[key]
        for key in (f"{REF}.log_prob_use_dynamic_bsz", f"{CRITIC}.use_dynamic_bsz")
    )
    if with_critic and of_ref != of_critic:
        raise NotSupportedYet(
            f"{CRITIC}.use_dynamic_bsz: {of_critic} beside {REF}.log_prob_use_dynamic_bsz: {of_ref} is coming, not "
            "built yet: forwards without gradient are cut in one way."
        )
    cuts = (_tokens if dynamic else _rollouts)(values, actor=True)
    forward = (_tokens if of_ref else _rollouts)(values, forward=True, critic=with_critic)
    own = (_tokens if of_critic else _rollouts)(values, critic=True) if with_critic else None
    out: dict[str, Json] = {f"train.{_kind(dynamic)}": cuts}
    if forward is not None and (_kind(of_ref), forward) != (_kind(dynamic), cuts):
        out[f"train.{_kind(of_ref)}_forward"] = forward
    if own is not None and (_kind(of_critic), own) != (_kind(dynamic), cuts):
        out[f"critic.{_kind(of_critic)}"] = own
    return out


def _kind(dynamic: Json) -> str:
    return "micro_tokens" if dynamic else "micro_rollouts"


def _tokens(
    values: Values, *, actor: bool = False, forward: bool = False, critic: bool = False
) -> int | None:
    """A budget of tokens: that of one model; of forwards the smaller one; None where the policy's stands for it.

    A budget that is its default, or the one it refers to, binds nobody: trainer.max_token_len_per_gpu does.
    """
    width = count(values, "trainer.ulysses_sequence_parallel_size")
    floor = ceil(2 * sum(limits(values)) / width)

    def told(key: str, default: Json) -> int | None:
        size = whole(values, key)
        return None if size in (None, default) else max(size or floor, floor)

    policys, critics = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{CRITIC}.ppo_max_token_len_per_gpu"
    if actor:
        own = max(whole(values, "trainer.max_token_len_per_gpu") or floor, floor)
        return told(policys, 16384) or own
    trained = told(critics, 32768) if critic else None
    if not forward:
        return trained
    of_ref = told(f"{REF}.log_prob_max_token_len_per_gpu", values[policys])
    of_critic = told(f"{CRITIC}.forward_max_token_len_per_gpu", values[critics]) or trained
    return min((size for size in (of_ref, of_critic if critic else None) if size), default=None)


def _rollouts(values: Values, *, actor: bool = False, forward: bool = False, critic: bool = False) -> int:
    """Rollouts of a micro-batch; pairs of dpo are two."""
    times = 2 if preset(values).kind == "dpo" else 1
    if actor:
        return times * (
            whole(values, f"{ACTOR}.ppo_micro_batch_size")
            or count(values, f"{ACTOR}.ppo_micro_batch_size_per_gpu")
        )
    trained = count(values, f"{CRITIC}.ppo_micro_batch_size_per_gpu")
    if not forward:
        return trained
    of_ref = times * (
        whole(values, f"{REF}.log_prob_micro_batch_size")
        or count(values, f"{REF}.log_prob_micro_batch_size_per_gpu")
    )
    of_critic = whole(values, f"{CRITIC}.forward_micro_batch_size_per_gpu") or trained
    return min(of_ref, of_critic) if critic else of_ref


def offload(values: Values) -> Mapping[str, Json]:
    """What lies in the host's memory while it rests: one list for the policy, its critic and its reference."""
    ppo, at = preset(values).recipe == "ppo", {"actor": ACTOR, "critic": f"{CRITIC}.model", "ref": REF}
    # FSDP2's offload_policy: weights, gradients and the optimizer's state
    every = {who: flag(values, f"{section}.fsdp_config.offload_policy") for who, section in at.items()}
    weights = {
        who: every[who] or values[f"{section}.fsdp_config.param_offload"] for who, section in at.items()
    }
    of_actor, of_critic = (f"{at[who]}.fsdp_config.optimizer_offload" for who in ("actor", "critic"))
    moments, other = (every[who] or values[key] for who, key in (("actor", of_actor), ("critic", of_critic)))
    if ppo and other != moments:
        raise NotSupportedYet(
            f"{of_critic}, or {at['critic']}.fsdp_config.offload_policy: {other} beside {of_actor}: {moments} is "
            "coming, not built yet: the optimizers of policy and critic rest in one place. Give both the same value."
        )
    there = {
        "optimizer": moments,
        "activations": values[f"{MODEL}.enable_activation_offload"],
        "critic": ppo and weights["critic"],
        "reference": weights["ref"] and has_reference(values),
        "policy": weights["actor"],
    }
    return {"train.offload": [name for name, wanted in there.items() if wanted]}


def has_reference(values: Values) -> bool:
    base = preset(values)
    return base.kind == "dpo" or base.advantage == "on_policy_distill" or bool(kl(values))


def sequence_ranks(values: Values) -> int:
    """Ulysses: ranks that share one sequence, the same for every model."""
    keys: dict[str, Json] = {
        "trainer.ulysses_sequence_parallel_size": 1,
        f"{ACTOR}.ulysses_sequence_parallel_size": 1,
        f"{REF}.ulysses_sequence_parallel_size": 1,
    }
    if preset(values).recipe == "ppo":
        keys[f"{CRITIC}.ulysses_sequence_parallel_size"] = 1
    sizes = {key: whole(values, key) or 1 for key in keys}
    shared = agreed(sizes, keys)
    assert isinstance(shared, int)
    return shared


# ---------------------------------------------------------------- checkpoints


def copies(values: Values) -> Mapping[str, Json]:
    """Another place for checkpoints."""
    path = text(values, f"{VERL_TRAINER}.default_hdfs_dir")
    return {"checkpoint.upload_to": [place(path)]} if path else {}


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
    known_as(kind, dict.fromkeys(("auto", "disable", "resume_path")), key=at)
    goes_on = kind == "auto" and values["continue_from_checkpoint"]
    return {"checkpoint.resume": "auto" if goes_on else "fresh"}


def keep(values: Values) -> Mapping[str, Json]:
    """Actor and critic are saved together, so they are kept alike."""
    actor, of_critic = (
        given(values[f"{VERL_TRAINER}.max_{who}_ckpt_to_keep"]) for who in ("actor", "critic")
    )
    if values[f"{VERL_TRAINER}.remove_previous_ckpt_in_save"]:
        return {"checkpoint.keep": 1}
    if preset(values).recipe == "ppo" and actor != of_critic:
        raise NotSupportedYet(
            f"{VERL_TRAINER}.max_critic_ckpt_to_keep: {of_critic} is not max_actor_ckpt_to_keep = {actor}: a "
            "checkpoint holds both; other numbers are coming, not built yet."
        )
    return {"checkpoint.keep": actor}


def export(values: Values) -> Mapping[str, Json]:
    """Hugging Face folders: at the end, with every checkpoint, or none."""
    key = "trainer.save_hf_checkpoint"
    wanted, every = str(values[key]), values["trainer.save_interval"]
    known_as(wanted, dict.fromkeys(("last", "always", "never")), key=key)
    always = wanted == "always" or "hf_model" in _contents(values, "save")
    return {
        "checkpoint.export": always or wanted == "last",
        "checkpoint.export_every": every if always else 0,
    }


def _contents(values: Values, what: str) -> list[Json]:
    key = f"{ACTOR}.checkpoint.{what}_contents"
    parts = values[key] or []
    if not isinstance(parts, list | tuple):
        raise ConfigError(f"{key}: got {parts!r}, expected a list of model, optimizer, extra, hf_model.")
    for part in parts:
        known_as(str(part), dict.fromkeys(("model", "optimizer", "extra", "hf_model")), key=key)
    if "model" not in parts:
        raise ConfigError(f"{key}: {list(parts)} has no model, and without its weights no run goes on.")
    return list(parts)


def contents(values: Values) -> Mapping[str, Json]:
    """What a checkpoint holds, and what is read of it. `extra`, the run's place, is in every one."""
    saved, loaded = _contents(values, "save"), _contents(values, "load")
    if "extra" not in loaded:
        raise NotSupportedYet(
            f"{ACTOR}.checkpoint.load_contents: {loaded} without extra (a run that starts again at step 0 with these "
            "weights) is coming, not built yet; here: with extra."
        )
    both = ("model", "optimizer")
    return {
        "checkpoint.contents": [part for part in both if part in saved],
        "checkpoint.load": [part for part in both if part in loaded],
    }
