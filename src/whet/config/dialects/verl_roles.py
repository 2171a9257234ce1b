"""verl's keys of what its base files say of every role: Megatron's layout, profiles, kernels, the reward model."""

from __future__ import annotations

from whet.config.dialects.key import Key, Values, coming, derived, translated
from whet.config.dialects.typed import flag, whole
from whet.config.dialects.verl_layout import OF_REF, fsdp_like
from whet.config.dialects.verl_policy import ENTROPY, FUSED, TP, own
from whet.config.dialects.verl_reward_model import later
from whet.config.dialects.verl_rules import (
    ACTOR,
    ANY,
    CRITIC,
    MODEL,
    NOTHING,
    REF,
    ROLLOUT,
    Native,
    at_least,
    is_flag,
    is_number,
    is_one_of,
    mini_batches,
)
from whet.types import ConfigError, Json

_ELSEWHERE = "verl reads algorithm.kl_ctrl alone; a leftover of older files."
_NOT_LOADED = "models whose weights are not loaded"
_PROFILE = (
    "step_start to step_end - 1 are optimizer steps, counted from 0, as there; the whole training steps with them are "
    "recorded, of all models. Rank 0 alone; shapes and call stacks, as there."
)
_MEGATRON = "parallel training with Megatron; read there only with strategy=megatron"


def _megatron(role: str, *, coming_with: str = _MEGATRON) -> tuple[Key, ...]:
    """Megatron's layout of one role beside the actor: it must be that of one device, where there is one."""
    free = (
        "param_offload",
        "grad_offload",
        "optimizer_offload",
        "use_distributed_optimizer",
        "sequence_parallel",
    )
    return (
        *(coming(f"{role}.megatron.{name}", coming_with, default=False, harmless=(True,)) for name in free),
        *(
            derived(
                f"{role}.megatron.{kind}_parallel_size",
                at_least(f"{role}.megatron.{kind}_parallel_size", 1),
                default=1,
                reason=TP,
            )
            for kind in ("tensor_model", "pipeline_model", "context")
        ),
        coming(f"{role}.megatron.virtual_pipeline_model_parallel_size", "pipelines", default=None),
        coming(f"{role}.megatron.expert_model_parallel_size", "experts over devices", default=1),
        coming(
            f"{role}.megatron.expert_tensor_parallel_size",
            "experts over devices",
            default=None,
            harmless=("None",),
        ),
        coming(f"{role}.megatron.use_dist_checkpointing", "Megatron's checkpoints", default=False),
        coming(f"{role}.megatron.dist_checkpointing_path", "Megatron's checkpoints", default=None),
        derived(
            f"{role}.megatron.seed",
            at_least(f"{role}.megatron.seed", 0),
            default=42,
            reason="Nothing is dropped.",
        ),
        coming(f"{role}.megatron.override_transformer_config.*", "Megatron", default={}),
    )


def profile(v: Values) -> Native:
    """The training steps that hold the optimizer steps which verl's profiler would record."""
    steps, folders = set[int](), dict[str, Json]()
    for role in (ACTOR, REF):
        at = f"{role}.profile"
        if not flag(v, f"{at}.use_profile"):
            continue
        first, end = (whole(v, f"{at}.{key}", least=ANY) for key in ("step_start", "step_end"))
        if not 0 <= first < end <= first + 1000:
            raise ConfigError(
                f"{at}: step_start={first} must be at least 0, and step_end={end} larger, by at most 1000"
            )
        ranks = v[f"{at}.profile_ranks"]
        if ranks is not None and 0 not in (ranks if isinstance(ranks, list) else [ranks]):
            raise ConfigError(f"{at}.profile_ranks={ranks}: the one process here is rank 0; write [0]")
        each = mini_batches(v, ACTOR) * whole(v, f"{ACTOR}.ppo_epochs")
        steps |= {step // each + 1 for step in range(first, end)}
        folders |= {f"{at}.save_path": path for path in [v[f"{at}.save_path"]] if path}
    if not steps:
        return NOTHING
    if len(set(folders.values())) > 1:
        raise ConfigError(f"{', '.join(folders)}: one folder holds all traces of a run; write the same")
    return {
        "profile.steps": sorted(steps),
        "profile.shapes": True,
        "profile.stack": True,
        "profile.dir": next(iter(folders.values()), None),
    }


def _profile(role: str) -> tuple[Key, ...]:
    given = (
        ("use_profile", False),
        ("profile_ranks", None),
        ("step_start", -1),
        ("step_end", -1),
        ("save_path", None),
    )
    natives = {"save_path": "profile.dir"}
    return tuple(
        translated(
            f"{role}.profile.{name}",
            profile,
            natives.get(name, "profile.steps"),
            default=default,
            reason=_PROFILE,
        )
        for name, default in given
    )


def _recompute(model: str) -> tuple[Key, ...]:
    """Megatron's choice of what to recompute."""
    names = ("method", "granularity", "num_layers")
    return tuple(
        coming(
            f"{model}.gradient_checkpointing_kwargs.activations_checkpoint_{name}", "Megatron", default=None
        )
        for name in names
    )


ROLES: tuple[Key, ...] = (
    *_megatron(REF),
    *_megatron(CRITIC),
    *(key for role in (ACTOR, REF) for key in _profile(role)),
    *(coming(f"{role}.load_weight", _NOT_LOADED, default=True) for role in (ACTOR, REF, CRITIC)),
    *(key for model in (MODEL, f"{CRITIC}.model") for key in _recompute(model)),
    derived(
        f"{REF}.strategy",
        is_one_of(f"{REF}.strategy", "fsdp", "fsdp2", "megatron"),
        default=f"${{{ACTOR}.strategy}}",
        reason="One process keeps a frozen copy of the policy.",
    ),
    derived(
        f"{REF}.use_torch_compile",
        is_flag(f"{REF}.use_torch_compile"),
        default=f"${{{ACTOR}.use_torch_compile}}",
        reason="Kernels are whet's own; compiled or not, results are meant to agree.",
    ),
    *(
        own(f"{REF}.{name}", ENTROPY)
        for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")
    ),
    *fsdp_like(OF_REF, "reshard_after_forward", "forward_prefetch")[2:],
    *(own(f"{MODEL}.{name}", FUSED) for name in ("use_fused_loss", "return_last_hidden_state")),
    own(f"{MODEL}.use_efficient_resharding", "Weights go over to the rollouts tensor by tensor, always."),
    coming(f"{ROLLOUT}.chat_scheduler", "inference servers", default=None),
    *(
        coming(f"{ROLLOUT}.layer_name_map.{name}", "Megatron", default=default)
        for name, default in (("qkv_layer_name", "qkv"), ("gate_proj_layer_name", "gate_up"))
    ),
    derived(
        "critic.kl_ctrl.type",
        is_one_of("critic.kl_ctrl.type", "fixed", "adaptive"),
        default="fixed",
        reason=_ELSEWHERE,
    ),
    derived("critic.kl_ctrl.kl_coef", is_number("critic.kl_ctrl.kl_coef"), default=0.001, reason=_ELSEWHERE),
    later("load_weight", True),
    later("megatron.*", {}),
    *(
        later(f"model.{name}", default)
        for name, default in (
            ("use_shm", False),
            ("use_fused_kernels", False),
            ("fsdp_config.reshard_after_forward", True),
            ("fsdp_config.forward_prefetch", False),
            ("fsdp_config.wrap_policy.transformer_layer_cls_to_wrap", None),
        )
    ),
    derived(
        "trainer.max_ref_ckpt_to_keep",
        at_least("trainer.max_ref_ckpt_to_keep", 1),
        default=None,
        reason="The reference lies in the policy's checkpoints.",
    ),
)
