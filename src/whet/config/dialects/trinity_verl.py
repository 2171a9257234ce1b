"""The rows of the veRL section of a Trinity-RFT file, trainer.trainer_config."""

from __future__ import annotations

from collections.abc import Mapping

from whet.config.dialects.key import Key, Unbuilt, Values, coming, derived, inert, refused, translated
from whet.config.dialects.trinity_algorithm import optimizer
from whet.config.dialects.trinity_layout import fsdp, layout, strategy
from whet.config.dialects.trinity_presets import preset
from whet.config.dialects.trinity_run import libraries, model
from whet.config.dialects.trinity_trainer import (
    contents,
    copies,
    critic,
    keep,
    like_the_actor,
    micro,
    offload,
    overwritten,
    passes,
    resume,
)
from whet.config.dialects.trinity_values import (
    ACTOR,
    CONFIG,
    CRITIC,
    MODEL,
    REF,
    VERL_TRAINER,
    given,
    known_as,
    section,
    whole,
)
from whet.config.dialects.typed import flag
from whet.types import Json

_CUT = "it never changes the gradient; forwards without gradient are cut in one way for all models"
_FOLLOWS = "null: the actor's"
_PADDING = "batches are packed: there is no padding"
_ENTROPY = "entropy comes with the log-probs; beyond 64 MiB of logits in chunks, computed again for the backward pass"
_FUSED = "log-probs come fused out of the output layer, always"
_STRATEGY = "where tensors are cut, by FSDP2; fsdp is the same but for its means. megatron is coming"
_INJECTED = "Trinity writes its own number here: trainer.total_steps"


def _micro(name: str, default: object, reason: str = _CUT) -> Key:
    owner, end = ("critic", "") if ".critic." in name else ("train", "")
    owner, end = ("train", "_forward") if ".log_prob_" in name or ".forward_" in name else (owner, end)
    native = [f"{owner}.micro_{unit}{end}" for unit in ("tokens", "rollouts")]
    return translated(name, micro, *native, default=default, reason=reason)


def _offload(name: str, what: str) -> Key:
    return translated(
        name, offload, "train.offload", default=False, reason=f"{what}; left out where there is no GPU"
    )


def _ulysses(at: str, default: Json = 1) -> Key:
    return translated(
        f"{at}.ulysses_sequence_parallel_size",
        layout,
        "train.parallel.cp",
        default=default,
        reason="as trainer.ulysses_sequence_parallel_size",
    )


def _any_switch(name: str, reason: str, *, default: Json = False) -> Key:
    """What is done in one way always, which changes no number beyond rounding."""

    def check(values: Values) -> Mapping[str, Json]:
        if values[name] is not None:
            flag(values, name)
        return {}

    return derived(name, check, default=default, reason=reason)


def backends(values: Values) -> Mapping[str, Json]:
    """Which kernels veRL takes."""
    key = f"{MODEL}.fused_kernel_options.impl_backend"
    if given(values[key]) is not None:
        known_as(str(values[key]), dict.fromkeys(("triton", "torch")), key=key)
    return {}


def together(values: Values) -> Mapping[str, Json]:
    """What is saved and loaded of the critic: as of the actor."""
    for way in ("load", "save") if preset(values).recipe == "ppo" else ():
        key, own = f"{CRITIC}.checkpoint.{way}_contents", values[f"{ACTOR}.checkpoint.{way}_contents"]
        if sorted(values[key] or []) != sorted({*(own or [])} - {"hf_model"}):
            raise Unbuilt(f"{key}: {values[key]} beside the actor's {own} is coming, not built yet.")
    return {}


def seeded(values: Values) -> Mapping[str, Json]:
    """A seed that nothing reads."""
    whole(values, f"{ACTOR}.data_loader_seed", least=0)
    return {}


def _critic(name: str, *native: str, default: object, reason: str) -> Key:
    return translated(f"{CRITIC}.{name}", critic, *native, default=default, reason=reason)


def _fsdp(owner: str, *, optimizer_too: bool) -> tuple[Key, ...]:
    """The FSDP section of one model."""
    at = f"{owner}.fsdp_config"
    resting = "where several devices train" if owner == ACTOR else "where the algorithm has this model"
    memory = [_offload(f"{at}.param_offload", f"weights that rest; {resting}")]
    if optimizer_too:
        memory.append(_offload(f"{at}.optimizer_offload", "of policy and critic together"))
    return (
        section(at),
        section(f"{at}.wrap_policy"),
        *memory,
        *fsdp(owner),
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
    translated(f"{MODEL}.external_lib", libraries, "imports", default=None, reason="one module, or a list"),
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
    _any_switch(f"{MODEL}.use_fused_kernels", _FUSED),
    section(f"{MODEL}.fused_kernel_options"),
    derived(f"{MODEL}.fused_kernel_options.impl_backend", backends, default=None, reason=_FUSED),
)

ACTOR_ROWS: tuple[Key, ...] = (
    section(ACTOR, "train"),
    derived(f"{ACTOR}.strategy", strategy, default="fsdp", reason=_STRATEGY),
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
    translated(
        f"{ACTOR}.shuffle",
        passes,
        "train.shuffle_passes",
        default=False,
        reason="a new order of minibatches in every pass; Trinity has one",
    ),
    _ulysses(ACTOR),
    _any_switch(f"{ACTOR}.entropy_from_logits_with_chunking", _ENTROPY),
    _any_switch(f"{ACTOR}.entropy_checkpointing", _ENTROPY),
    section(f"{ACTOR}.checkpoint", "checkpoint"),
    translated(
        f"{ACTOR}.checkpoint.load_contents",
        contents,
        "checkpoint.load",
        default=_WHOLE,
        reason="model and optimizer, or model",
    ),
    translated(
        f"{ACTOR}.checkpoint.save_contents",
        contents,
        "checkpoint.contents",
        default=_WHOLE,
        reason="extra is always saved; hf_model: a Hugging Face folder with every checkpoint",
    ),
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
    _micro(f"{REF}.log_prob_use_dynamic_bsz", None, f"{_FOLLOWS}; of forwards without gradient"),
    _micro(f"{REF}.log_prob_max_token_len_per_gpu", None, f"{_FOLLOWS}; {_CUT}"),
    _ulysses(REF, None),
    _any_switch(f"{REF}.entropy_from_logits_with_chunking", _ENTROPY, default=None),
    _any_switch(f"{REF}.entropy_checkpointing", _ENTROPY, default=None),
)

CRITIC_ROWS: tuple[Key, ...] = (
    section(CRITIC, "critic"),
    derived(f"{CRITIC}.strategy", strategy, default="fsdp", reason=_STRATEGY),
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
        reason="warm-up s / W in training steps; ppo only",
    ),
    derived(f"{CRITIC}.optim.total_training_steps", overwritten, default=-1, reason=_INJECTED),
    section(f"{CRITIC}.model", "critic"),
    _critic("model.override_config", "critic.overrides", default={}, reason="put over config.json; ppo only"),
    translated(
        f"{CRITIC}.model.external_lib",
        libraries,
        "imports",
        default=None,
        reason="beside the actor's; ppo only",
    ),
    _critic(
        "model.enable_gradient_checkpointing",
        "critic.gradient_checkpointing",
        default=True,
        reason="less memory, equal gradients; ppo only",
    ),
    inert(f"{CRITIC}.model.use_remove_padding", _PADDING, default=False, harmless=(True,)),
    *_fsdp(f"{CRITIC}.model", optimizer_too=True),
    _micro(f"{CRITIC}.ppo_micro_batch_size_per_gpu", 8),
    _micro(f"{CRITIC}.forward_micro_batch_size_per_gpu", None, f"null: the one for training; {_CUT}"),
    _micro(f"{CRITIC}.use_dynamic_bsz", None, _FOLLOWS),
    _micro(f"{CRITIC}.ppo_max_token_len_per_gpu", 32768),
    _micro(f"{CRITIC}.forward_max_token_len_per_gpu", None, f"null: the one for training; {_CUT}"),
    _ulysses(CRITIC),
    _critic("ppo_epochs", "critic.passes", default=None, reason=f"{_FOLLOWS}; ppo only"),
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
        "ranks always get parts of equal work, which changes no number",
        default=True,
        harmless=(False,),
    ),
    derived(f"{VERL_TRAINER}.total_training_steps", overwritten, default=None, reason=_INJECTED),
    translated(
        f"{VERL_TRAINER}.resume_mode",
        resume,
        "checkpoint.resume",
        default="auto",
        reason="heeded where it is given (Trinity overwrites it); disable: the run that is there is moved aside",
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
        reason="exactly so many steps of the critic alone (Trinity: one less); ppo only",
    ),
    translated(
        f"{VERL_TRAINER}.default_hdfs_dir",
        copies,
        "checkpoint.upload_to",
        default=None,
        reason="checkpoints are copied there, too",
    ),
    translated(
        f"{VERL_TRAINER}.remove_previous_ckpt_in_save",
        keep,
        "checkpoint.keep",
        default=False,
        reason="true keeps one",
    ),
    _any_switch(
        f"{VERL_TRAINER}.del_local_ckpt_after_load",
        "veRL deletes only what it had downloaded; such copies stay in a cache here, for the next run",
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


def _rest(at: str) -> tuple[Key, ...]:
    """Keys that actor, reference and critic have alike."""
    return (
        coming(f"{at}.megatron.*", "Megatron", default={}),
        coming(f"{at}.profile.*", "profiling", default={}),
        coming(f"{at}.load_weight", "models without their weights", default=True),
    )


def _more_fsdp(at: str) -> tuple[Key, ...]:
    return (
        _offload(f"{at}.fsdp_config.offload_policy", "weights, gradients and moments, as FSDP2 does"),
        *fsdp(at, "reshard_after_forward"),
        coming(f"{at}.fsdp_config.model_dtype", "a dtype of each model", default=None),
    )


def _whole_checkpoint(at: str, parts: list[str]) -> tuple[Key, ...]:
    return tuple(
        derived(
            f"{at}.checkpoint.{way}_contents",
            together,
            default=parts,
            reason="all models lie in one checkpoint, and the actor's parts count; others are coming",
        )
        for way in ("load", "save")
    )


MORE_VERL: tuple[Key, ...] = (
    *_rest(ACTOR),
    *_rest(REF),
    *_rest(CRITIC),
    *_more_fsdp(ACTOR),
    *_more_fsdp(REF),
    *_more_fsdp(f"{CRITIC}.model"),
    *_whole_checkpoint(REF, ["model"]),
    *_whole_checkpoint(CRITIC, _WHOLE),
    *(
        translated(
            f"{ACTOR}.optim.{key}", optimizer, native, default=default, reason=f"as algorithm.optimizer.{key}"
        )
        for key, native, default in (
            ("betas", "train.optimizer.betas", [0.9, 0.999]),
            ("weight_decay", "train.optimizer.weight_decay", 0.01),
            ("lr_warmup_steps", "train.optimizer.schedule.warmup_steps", -1),
        )
    ),
    _critic("optim.betas", "critic.optimizer.betas", default=[0.9, 0.999], reason="AdamW; ppo only"),
    _critic(
        "optim.weight_decay",
        "critic.optimizer.weight_decay",
        default=0.01,
        reason="AdamW, of all parameters; ppo only",
    ),
    _critic(
        "optim.lr_warmup_steps",
        "critic.optimizer.schedule.warmup_steps",
        default=-1,
        reason="training steps; from 0 up over the ratio; ppo only",
    ),
    _offload(f"{MODEL}.enable_activation_offload", "what layers keep for the backward pass"),
    _any_switch(
        f"{MODEL}.use_shm", "weights are read by mapping their files into memory: there is nothing to stage"
    ),
    refused(f"{MODEL}.trust_remote_code", "code that comes with a model is never run", default=False),
    refused(f"{CRITIC}.model.trust_remote_code", "code that comes with a model is never run", default=False),
    inert(
        f"{ACTOR}.fix_actor_microbatch_loss_scale",
        "micro-batches never change the gradient here",
        default=None,
        harmless=(True, False),
    ),
    derived(
        f"{ACTOR}.data_loader_seed",
        seeded,
        default=None,
        reason="every random number follows from the run's seed here",
    ),
)
"""Keys that the document leaves to the source code."""
