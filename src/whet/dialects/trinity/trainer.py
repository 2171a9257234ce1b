"""Trinity-RFT's `trainer` and its veRL section: the critic, memory, devices, adapters, checkpoints."""

from __future__ import annotations

import re
from functools import partial
from math import ceil, prod

from whet.dialects.layout import FileLayout, groups
from whet.dialects.megatron import SIZES, learned, learns
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.algorithm import kl, optimizer, schedule
from whet.dialects.trinity.data import limits, trainers
from whet.dialects.trinity.loss import AGGREGATIONS
from whet.dialects.trinity.values import (
    ACTOR,
    CRITIC,
    MODEL,
    REF,
    VERL_TRAINER,
    Native,
    agreed,
    at_least,
    distills,
    entries,
    given,
    is_megatron,
    known_as,
    preset,
    text,
)
from whet.dialects.typed import place
from whet.types import ConfigError, Json

FSDP = f"{ACTOR}.fsdp_config"

# ---------------------------------------------------------------- what is there


def has_critic(values: Values) -> bool:
    """Whether the algorithm has a value model."""
    return preset(values).recipe == "ppo"


def has_reference(values: Values) -> bool:
    """Whether the algorithm compares with another model."""
    base = preset(values)
    return base.kind == "dpo" or distills(values) or bool(kl(values))


# ---------------------------------------------------------------- what is trained


def critic_warmup(values: Values) -> Native:
    """Trinity trains the policy in steps, counted from 1, that are not below this number."""
    return {"critic.warmup_steps": max(values[f"{VERL_TRAINER}.critic_warmup"] - 1, 0)}


def critic(values: Values) -> Native:
    """The value model of ppo: where it starts, its optimizer, its clipping, its passes, its warm-up alone."""
    path, policy = text(values, "model.critic_model_path"), text(values, "model.model_path")
    own, optim, passes = values[f"{CRITIC}.grad_clip"], f"{CRITIC}.optim", values[f"{CRITIC}.ppo_epochs"]
    over, mode = values[f"{CRITIC}.model.override_config"] or {}, given(values[f"{CRITIC}.loss_agg_mode"])
    styles: Native = {f"{optim}.warmup_style": "constant", f"{optim}.lr_scheduler_type": "constant"}
    decay, clip = values[f"{optim}.weight_decay"], values[f"{CRITIC}.cliprange_value"]
    optimizer = {
        "lr": values[f"{optim}.lr"],
        **({"betas": values[f"{optim}.betas"]} if has_critic(values) else {}),
        "weight_decay": decay,
        "decay_all": bool(decay) and not is_megatron(values),
        "max_grad_norm": values["trainer.grad_clip"] if own in (None, 1.0) else own,
        "schedule": schedule(
            agreed(values, styles),
            ratio=values[f"{optim}.lr_warmup_steps_ratio"],
            floor=given(values[f"{optim}.min_lr_ratio"]),
            steps=values[f"{optim}.lr_warmup_steps"],
            megatron=is_megatron(values),
        ),
    }
    return {
        **({"critic.path": path or policy} if over or path not in (None, policy) else {}),
        **({"critic.overrides": over} if over else {}),
        **({"critic.update_epochs": passes} if passes not in (None, values[f"{ACTOR}.ppo_epochs"]) else {}),
        **({"critic.loss_agg_mode": AGGREGATIONS[mode]} if mode else {}),
        **({"critic.value_clip": clip} if clip else {}),
        "critic.optimizer": optimizer,
    }


def lora(values: Values) -> Native:
    """The one adapter that is trained. Its names are the engine's business there, and one engine has one here."""
    key = "model.lora_configs"
    if len(values[key]) > 1:
        raise ConfigError(f"{key}: got {len(values[key])} entries, expected at most one, as in Trinity")
    own = {
        name: value
        for entry in entries(values, key)
        for name, value in entry.items()
        if given(value) is not None
    }
    targets = own.get("target_modules", "all-linear")
    exclude = own.get("exclude_modules")
    return {
        **({"model.lora.exclude_modules": exclude} if exclude else {}),
        "model.lora.rank": own.get("lora_rank", 32),
        "model.lora.alpha": own.get("lora_alpha", 32),
        "model.lora.targets": "all-linear" if targets == ["all-linear"] else targets,
        "model.lora.path": own.get("path"),
    }


# ---------------------------------------------------------------- memory


def micro(values: Values) -> Native:
    """Cuts into micro-batches: of the policy, the critic, forwards without gradient. They never change a gradient."""
    dynamic = agreed(values, {"trainer.use_dynamic_bsz": True, f"{ACTOR}.use_dynamic_bsz": True})
    of_ref, of_critic = (
        dynamic if values[key] is None else values[key]
        for key in (f"{REF}.log_prob_use_dynamic_bsz", f"{CRITIC}.use_dynamic_bsz")
    )
    tokens = _tokens(values) if any((dynamic, of_ref, of_critic)) else {}
    rollouts = _rollouts(values)
    policys, forward, critics = (
        ("micro_batch_tokens", tokens[who]) if by_tokens else ("micro_batch_rollouts", rollouts[who])
        for who, by_tokens in (("actor", dynamic), ("forward", of_ref), ("critic", of_critic))
    )
    out: Native = {f"train.{policys[0]}": policys[1]}
    if forward[1] is not None and forward != policys:
        out[f"train.forward_{forward[0]}"] = forward[1]
    if has_critic(values) and critics[1] is not None and critics != policys:
        out[f"critic.{critics[0]}"] = critics[1]
    return out


def _tokens(values: Values) -> dict[str, int | None]:
    """Budgets of tokens, of all ranks that share a sequence together, each of which has the file's. They hold twice
    max_model_len at least, but for the trainer's own from 0.6.0 on; None where the policy's stands for it.

    A budget that is its default, or the one it refers to, binds nobody: trainer.max_token_len_per_gpu does.
    """
    floor = ceil(2 * sum(limits(values)) / values["trainer.ulysses_sequence_parallel_size"])

    def told(key: str, default: Json) -> int | None:
        size = values[key]
        return None if size in (None, default) else max(size, floor)

    policys, critics = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{CRITIC}.ppo_max_token_len_per_gpu"
    trained = told(critics, 32768)
    forward = [told(f"{REF}.log_prob_max_token_len_per_gpu", values[policys])]
    if has_critic(values):
        forward.append(told(f"{CRITIC}.forward_max_token_len_per_gpu", values[critics]) or trained)
    own = values["trainer.max_token_len_per_gpu"] or floor
    if not at_least(values, "0.6.0"):
        own = max(own, floor)
    each = {
        "actor": told(policys, 16384) or own,
        "forward": min((size for size in forward if size), default=None),
        "critic": trained,
    }
    shared = (
        values[f"{ACTOR}.megatron.context_parallel_size"] if is_megatron(values) else sequence_ranks(values)
    )
    return {who: size and size * shared for who, size in each.items()}


def _rollouts(values: Values) -> dict[str, int | None]:
    """Rollouts of a micro-batch, by the key of all GPUs or of each; pairs of dpo are two."""
    times = 2 if preset(values).kind == "dpo" else 1

    def told(key: str) -> int | None:
        size: int | None = values[key] or values[f"{key}_per_gpu"]
        return size

    trained = told(f"{CRITIC}.ppo_micro_batch_size") or 1
    forward = times * (told(f"{REF}.log_prob_micro_batch_size") or 1)
    if has_critic(values):
        forward = min(forward, told(f"{CRITIC}.forward_micro_batch_size") or trained)
    actors = times * (told(f"{ACTOR}.ppo_micro_batch_size") or 1)
    return {"actor": actors, "forward": forward, "critic": trained}


def offload(values: Values) -> Native:
    """What lies in the host's memory while it rests: one list for the policy, its critic and its reference."""

    def rests(section: str, what: str) -> bool:
        if is_megatron(values):
            return bool(values[f"{ACTOR}.megatron.{what}"] or values[f"trainer.{what}"])
        keys = (f"{section}.fsdp_config", "trainer")
        return any(values[f"{key}.{name}"] for key in keys for name in (what, "offload_policy"))

    there = {
        "optimizer": rests(ACTOR, "optimizer_offload"),
        "activations": values[f"{MODEL}.enable_activation_offload"],
        "critic": has_critic(values) and rests(f"{CRITIC}.model", "param_offload"),
        "reference": rests(REF, "param_offload") and has_reference(values),
        "policy": rests(ACTOR, "param_offload"),
    }
    return {"train.offload": [name for name, wanted in there.items() if wanted]}


# ---------------------------------------------------------------- devices


def layout(values: Values) -> Native:
    """The trainer's GPUs are those that the explorer's engines leave over; the actor's layout serves all models."""
    left, cp = max(trainers(values), 0), sequence_ranks(values)
    if is_megatron(values):
        return _megatron(values, left)
    if left % cp:
        raise ConfigError(
            f"trainer.ulysses_sequence_parallel_size: {cp} must divide the {left} GPUs of the trainer "
            "(cluster.node_num * cluster.gpu_per_node, less those of the engines)."
        )
    copies, shards = groups(values[f"{FSDP}.fsdp_size"], left // cp or 1, key=f"{FSDP}.fsdp_size")
    return FileLayout(dp_replicate=copies, dp_shard=shards, cp=cp).natives()


def _megatron(values: Values, left: int) -> Native:
    """Megatron's sizes; what they leave over are data-parallel ranks, which share the optimizer's state."""
    sizes = {dim: values[f"{ACTOR}.megatron.{kind}_parallel_size"] for dim, kind in SIZES.items()}
    model = prod(sizes.values())
    if left % model:
        raise ConfigError(
            f"{ACTOR}.megatron: tensor, pipeline and context parallel sizes make {model} GPUs, which must divide the "
            f"{left} of the trainer."
        )
    ep = values[f"{ACTOR}.megatron.expert_model_parallel_size"]
    made = FileLayout(dp_shard=left // model or 1, ep=ep, **sizes)
    return (made.flat() if learns(values, f"{MODEL}.mtp") else made).natives()


mtp = partial(learned, at=f"{MODEL}.mtp")


def sequence_ranks(values: Values) -> int:
    """Ulysses: ranks that share one sequence, the same for every model."""
    keys = ("trainer.ulysses_sequence_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size")
    shared: int = agreed(values, dict.fromkeys(keys, 1))
    return shared


def address(values: Values) -> Native:
    """A running Ray cluster; auto: one that is started where it is needed."""
    found = given(values["cluster.ray_address"])
    if found in (None, "auto", "local"):
        return {}
    if not isinstance(found, str) or not re.fullmatch(r"(ray://)?[^/\s]+:\d+", found):
        raise ConfigError(f"cluster.ray_address: got {found!r}, expected auto or host:port.")
    if found.startswith("ray://"):
        raise NotSupportedYet(
            f"cluster.ray_address: {found}: Ray's client is coming, not built yet; here: host:port of the head."
        )
    return {"cluster.address": found}


# ---------------------------------------------------------------- checkpoints


def copies(values: Values) -> Native:
    """Another place for checkpoints."""
    path = text(values, f"{VERL_TRAINER}.default_hdfs_dir")
    return {"checkpoint.upload_to": [place(path)]} if path else {}


def export(values: Values) -> Native:
    """Hugging Face folders: at the end, with every checkpoint, or none."""
    wanted, every = values["trainer.save_hf_checkpoint"], values["trainer.save_interval"]
    always = wanted == "always" or "hf_model" in _contents(values, "save")
    return {
        "checkpoint.export": always or wanted == "last",
        "checkpoint.export_interval": every if always else 0,
    }


def _contents(values: Values, what: str) -> list[str]:
    key = f"{ACTOR}.checkpoint.{what}_contents"
    parts = values[key] or []
    if not isinstance(parts, list | tuple):
        raise ConfigError(f"{key}: got {parts!r}, expected a list of model, optimizer, extra, hf_model.")
    for part in parts:
        known_as(str(part), dict.fromkeys(("model", "optimizer", "extra", "hf_model")), key=key)
    if "model" not in parts:
        raise ConfigError(f"{key}: {list(parts)} has no model, and a run cannot resume without its weights.")
    return list(parts)


def _is_constant(values: Values) -> bool:
    """Whether the learning rates of policy and critic are the same in all steps."""
    policys = {
        key.rpartition(".")[2]: value for key, value in optimizer(values).items() if ".schedule." in key
    }
    critics = critic(values)["critic.optimizer"]["schedule"] if has_critic(values) else policys
    return all(one["type"] == "constant" and "warmup_steps" not in one for one in (policys, critics))


def contents(values: Values) -> Native:
    """What a checkpoint holds, and what is read of it. Step and position in the data are in every one; `extra` is the
    state of the schedule, which would begin anew without it, and of random numbers that no rollout is drawn with."""
    saved, loaded = _contents(values, "save"), _contents(values, "load")
    if "extra" not in loaded and not _is_constant(values):
        raise NotSupportedYet(
            f"{ACTOR}.checkpoint.load_contents: {loaded} without extra: restarting the learning-rate schedule on "
            "resume is coming, not built yet; here: with extra, or with a constant rate."
        )
    both = ("model", "optimizer")
    return {
        "checkpoint.save_contents": [part for part in both if part in saved],
        "checkpoint.load_contents": [part for part in both if part in loaded],
        **({"checkpoint.async_save": True} if values[f"{ACTOR}.checkpoint.async_save"] else {}),
    }
