"""The rows of the veRL section of a Trinity-RFT file, trainer.trainer_config."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, inert, translated
from whet.config.dialects.trinity_algorithm import optimizer
from whet.config.dialects.trinity_run import model
from whet.config.dialects.trinity_trainer import (
    critic,
    keep,
    like_the_actor,
    micro,
    overwritten,
    passes,
    resume,
)
from whet.config.dialects.trinity_values import ACTOR, CONFIG, CRITIC, MODEL, REF, VERL_TRAINER, section

_CUT = "one cut for all models, by the smallest budget of those in use; it never changes the gradient"
_FOLLOWS = "null: the actor's"
_PADDING = "batches are packed: there is no padding"
_ENTROPY = "entropy with less memory"
_PARALLEL = "parallel training; one device needs no sharding"
_INJECTED = "Trinity writes its own number here: trainer.total_steps"


def _micro(name: str, default: object, reason: str = _CUT) -> Key:
    return translated(
        name, micro, "train.micro_tokens", "train.micro_rollouts", default=default, reason=reason
    )


def _critic(name: str, *native: str, default: object, reason: str) -> Key:
    return translated(f"{CRITIC}.{name}", critic, *native, default=default, reason=reason)


def _fsdp(owner: str, *, optimizer_too: bool) -> tuple[Key, ...]:
    """The FSDP section of one model."""
    at = f"{owner}.fsdp_config"
    offload = [coming(f"{at}.param_offload", "moving idle weights to the CPU", default=False)]
    if optimizer_too:
        offload.append(
            coming(f"{at}.optimizer_offload", "moving idle optimizer states to the CPU", default=False)
        )
    return (
        section(at),
        section(f"{at}.wrap_policy"),
        coming(f"{at}.wrap_policy.transformer_layer_cls_to_wrap", _PARALLEL, default=None),
        coming(f"{at}.wrap_policy.min_num_params", _PARALLEL, default=0),
        *offload,
        coming(f"{at}.fsdp_size", _PARALLEL, default=-1, harmless=(1,)),
        coming(f"{at}.forward_prefetch", _PARALLEL, default=False),
    )


_WHOLE = ["model", "optimizer", "extra"]

MODEL_ROWS: tuple[Key, ...] = (
    section(f"{CONFIG}.actor_rollout_ref"),
    inert(
        f"{CONFIG}.actor_rollout_ref.hybrid_engine",
        "sampling is the explorer's in Trinity: veRL's own rollout is never run",
        default=True,
        harmless=(False,),
    ),
    section(MODEL, "model"),
    coming(f"{MODEL}.external_lib", "a Python module imported before the model", default=None),
    translated(
        f"{MODEL}.override_config", model, "model.overrides", default={}, reason="put over config.json"
    ),
    translated(
        f"{MODEL}.enable_gradient_checkpointing",
        passes,
        "train.gradient_checkpointing",
        default=True,
        reason="less memory, equal gradients",
    ),
    inert(f"{MODEL}.use_remove_padding", _PADDING, default=True, harmless=(False,)),
    coming(f"{MODEL}.use_fused_kernels", "fused kernels of the output layer", default=False),
    section(f"{MODEL}.fused_kernel_options"),
    coming(
        f"{MODEL}.fused_kernel_options.impl_backend",
        "fused kernels of the output layer",
        default=None,
        harmless=("None", "null", "triton", "torch"),
    ),
)

ACTOR_ROWS: tuple[Key, ...] = (
    section(ACTOR, "train"),
    coming(
        f"{ACTOR}.strategy",
        "Megatron; one device needs no sharding",
        default="fsdp",
        harmless=("fsdp2", None),
    ),
    _micro(f"{ACTOR}.ppo_micro_batch_size", None, "of all GPUs; veRL's older name"),
    _micro(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 4),
    _micro(f"{ACTOR}.use_dynamic_bsz", True),
    _micro(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384),
    translated(
        f"{ACTOR}.grad_clip",
        optimizer,
        "train.optimizer.grad_clip",
        default=1.0,
        reason="as trainer.grad_clip",
    ),
    translated(f"{ACTOR}.ppo_epochs", passes, "train.passes", default=1, reason="passes over one batch"),
    coming(f"{ACTOR}.shuffle", "a new order of minibatches in every pass", default=False),
    coming(f"{ACTOR}.ulysses_sequence_parallel_size", "parallel training", default=1),
    coming(f"{ACTOR}.entropy_from_logits_with_chunking", _ENTROPY, default=False),
    coming(f"{ACTOR}.entropy_checkpointing", _ENTROPY, default=False),
    section(f"{ACTOR}.checkpoint", "checkpoint"),
    coming(f"{ACTOR}.checkpoint.load_contents", "loading a part of a checkpoint", default=_WHOLE),
    coming(f"{ACTOR}.checkpoint.save_contents", "saving another part than the whole run", default=_WHOLE),
    section(f"{ACTOR}.optim", "train.optimizer"),
    translated(
        f"{ACTOR}.optim.lr", optimizer, "train.optimizer.lr", default=1e-6, reason="as algorithm.optimizer.lr"
    ),
    translated(
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
        optimizer,
        "train.optimizer.schedule.warmup_fraction",
        default=0.0,
        reason="fraction of all steps",
    ),
    translated(
        f"{ACTOR}.optim.min_lr_ratio",
        optimizer,
        "train.optimizer.schedule.min_factor",
        default=None,
        reason="where cosine ends; null: 0",
    ),
    translated(
        f"{ACTOR}.optim.warmup_style",
        optimizer,
        "train.optimizer.schedule.kind",
        default="constant",
        reason="as algorithm.optimizer.warmup_style",
    ),
    derived(f"{ACTOR}.optim.total_training_steps", overwritten, default=-1, reason=_INJECTED),
    *_fsdp(ACTOR, optimizer_too=True),
)

REF_ROWS: tuple[Key, ...] = (
    section(REF, "reference"),
    *_fsdp(REF, optimizer_too=False),
    _micro(f"{REF}.log_prob_micro_batch_size", None, "of all GPUs; veRL's older name"),
    _micro(f"{REF}.log_prob_micro_batch_size_per_gpu", 4),
    _micro(f"{REF}.log_prob_use_dynamic_bsz", None, f"{_FOLLOWS}, which it must be"),
    _micro(f"{REF}.log_prob_max_token_len_per_gpu", None, f"{_FOLLOWS}; {_CUT}"),
    coming(f"{REF}.ulysses_sequence_parallel_size", "parallel training", default=None, harmless=(1,)),
    coming(f"{REF}.entropy_from_logits_with_chunking", _ENTROPY, default=None, harmless=(False,)),
    coming(f"{REF}.entropy_checkpointing", _ENTROPY, default=None, harmless=(False,)),
)

CRITIC_ROWS: tuple[Key, ...] = (
    section(CRITIC, "critic"),
    coming(
        f"{CRITIC}.strategy",
        "Megatron; one device needs no sharding",
        default="fsdp",
        harmless=("fsdp2", None),
    ),
    section(f"{CRITIC}.optim", "critic.optimizer"),
    _critic("optim.lr", "critic.optimizer.lr", default=1e-5, reason="AdamW, weight decay 0.01; ppo only"),
    _critic(
        "optim.lr_warmup_steps_ratio",
        "critic.optimizer.schedule.warmup_fraction",
        default=0.0,
        reason="fraction of all steps; ppo only",
    ),
    _critic(
        "optim.min_lr_ratio",
        "critic.optimizer.schedule.min_factor",
        default=None,
        reason="where cosine ends; null: 0; ppo only",
    ),
    _critic(
        "optim.warmup_style",
        "critic.optimizer.schedule.kind",
        default="constant",
        reason="ppo only",
    ),
    derived(f"{CRITIC}.optim.total_training_steps", overwritten, default=-1, reason=_INJECTED),
    section(f"{CRITIC}.model", "critic"),
    coming(f"{CRITIC}.model.override_config", "overrides of the critic's config.json", default={}),
    coming(f"{CRITIC}.model.external_lib", "a Python module imported before the model", default=None),
    derived(
        f"{CRITIC}.model.enable_gradient_checkpointing",
        like_the_actor,
        default=True,
        reason="as the actor's (ppo)",
    ),
    inert(f"{CRITIC}.model.use_remove_padding", _PADDING, default=False, harmless=(True,)),
    *_fsdp(f"{CRITIC}.model", optimizer_too=True),
    _micro(f"{CRITIC}.ppo_micro_batch_size_per_gpu", 8),
    _micro(f"{CRITIC}.forward_micro_batch_size_per_gpu", None, f"null: the one for training; {_CUT}"),
    _micro(f"{CRITIC}.use_dynamic_bsz", None, f"{_FOLLOWS}, which it must be"),
    _micro(f"{CRITIC}.ppo_max_token_len_per_gpu", 32768),
    _micro(f"{CRITIC}.forward_max_token_len_per_gpu", None, f"null: the one for training; {_CUT}"),
    coming(f"{CRITIC}.ulysses_sequence_parallel_size", "parallel training", default=1),
    derived(
        f"{CRITIC}.ppo_epochs", like_the_actor, default=None, reason=f"{_FOLLOWS}, which it must be (ppo)"
    ),
    derived(f"{CRITIC}.shuffle", like_the_actor, default=None, reason=f"{_FOLLOWS}, which it must be (ppo)"),
    _critic(
        "grad_clip",
        "critic.optimizer.grad_clip",
        default=1.0,
        reason="at its default trainer.grad_clip's; ppo only",
    ),
    _critic(
        "cliprange_value",
        "critic.clip_value",
        default=0.5,
        reason="the document's 0.5, not the code's 0; ppo only",
    ),
)

TRAINER_ROWS: tuple[Key, ...] = (
    section(VERL_TRAINER, "train"),
    inert(
        f"{VERL_TRAINER}.balance_batch",
        "one device has nobody to share a batch with",
        default=True,
        harmless=(False,),
    ),
    derived(f"{VERL_TRAINER}.total_training_steps", overwritten, default=None, reason=_INJECTED),
    translated(
        f"{VERL_TRAINER}.resume_mode",
        resume,
        "checkpoint.resume",
        default="auto",
        reason="heeded where it is given (Trinity overwrites it); disable: a folder that holds a run is refused",
    ),
    translated(
        f"{VERL_TRAINER}.resume_from_path",
        resume,
        "checkpoint.resume",
        default="",
        reason="with resume_mode: resume_path",
    ),
    translated(
        f"{VERL_TRAINER}.critic_warmup",
        critic,
        "critic.warmup_steps",
        default=0,
        reason="steps of the critic alone; ppo only",
    ),
    coming(f"{VERL_TRAINER}.default_hdfs_dir", "copying checkpoints elsewhere", default=None),
    translated(
        f"{VERL_TRAINER}.remove_previous_ckpt_in_save",
        keep,
        "checkpoint.keep",
        default=False,
        reason="true keeps one",
    ),
    coming(
        f"{VERL_TRAINER}.del_local_ckpt_after_load", "deleting a checkpoint once it is loaded", default=False
    ),
    translated(
        f"{VERL_TRAINER}.max_actor_ckpt_to_keep", keep, "checkpoint.keep", default=5, reason="null: all"
    ),
    translated(
        f"{VERL_TRAINER}.max_critic_ckpt_to_keep",
        keep,
        "checkpoint.keep",
        default=5,
        reason="as the actor's (ppo): a checkpoint holds both",
    ),
)

VERL: tuple[Key, ...] = (*MODEL_ROWS, *ACTOR_ROWS, *REF_ROWS, *CRITIC_ROWS, *TRAINER_ROWS)
