"""verl's keys that its document does not name: of its own base file at that time, and of newer versions."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, engine, inert, translated
from whet.config.dialects.verl_loop import actor_optimizer, checkpoints, device, length
from whet.config.dialects.verl_parts import (
    advantage,
    clipping,
    overrides,
    reduction,
    rewards,
    seed,
    training_data,
)
from whet.config.dialects.verl_policy import DECAY, OFFLOAD, SHARDED, SIZED, TP, offload
from whet.config.dialects.verl_recipes import DAPO, RECIPES
from whet.config.dialects.verl_rules import ACTOR, CRITIC, MODEL, REF, ROLLOUT, at_least, batches
from whet.config.dialects.verl_run import later

_LOSSES = "another policy loss than PPO's"
_MULTI_TURN = "several turns and tools"
_RAY = "There is no Ray."
_VIDEO = "prompts with videos"

DATA: tuple[Key, ...] = (
    translated(
        "data.reward_fn_key",
        training_data,
        "data.train.0.label",
        default="data_source",
        reason="For validation, too.",
    ),
    derived(
        "data.val_batch_size",
        at_least("data.val_batch_size", 1),
        default=None,
        reason="Validation is asked for as a whole; the engine's max_batch limits it.",
    ),
    coming("data.video_key", _VIDEO, default="videos"),
    coming("data.use_shm", "staging in shared memory; it changes no number", default=False, harmless=(True,)),
    inert(
        "data.validation_shuffle",
        "The order of a validation changes no mean of it.",
        default=False,
        harmless=(True,),
    ),
    translated(
        "data.seed",
        seed,
        "seed",
        default=None,
        reason="Of the whole run, not of the order of tasks alone; null: 0.",
    ),
    derived(
        "data.dataloader_num_workers",
        at_least("data.dataloader_num_workers", 0),
        default=8,
        reason="One process reads; the number changes no result.",
    ),
)

POLICY: tuple[Key, ...] = (
    translated(
        f"{ACTOR}.clip_ratio_low", clipping, "algorithm.clip_low", default=None, reason="null: clip_ratio."
    ),
    translated(
        f"{ACTOR}.clip_ratio_high", clipping, "algorithm.clip_high", default=None, reason="null: clip_ratio."
    ),
    translated(
        f"{ACTOR}.clip_ratio_c", clipping, "algorithm.dual_clip", default=3.0, reason="Always on, as there."
    ),
    translated(
        f"{ACTOR}.loss_agg_mode",
        reduction,
        "algorithm.aggregation",
        default="token-mean",
        reason="Over the whole mini batch; seq-mean-token-sum-norm also divides by the rollouts, which verl leaves "
        "to the cut.",
    ),
    translated(
        f"{ACTOR}.loss_scale_factor",
        reduction,
        "algorithm.norm_tokens",
        default=None,
        reason="Of seq-mean-token-sum-norm; null: the longest response.",
    ),
    coming(f"{ACTOR}.policy_loss.loss_mode", _LOSSES, default="vanilla"),
    *(
        coming(f"{ACTOR}.policy_loss.{name}", _LOSSES, default=default)
        for name, default in (
            ("clip_cov_ratio", 0.0002),
            ("clip_cov_lb", 1.0),
            ("clip_cov_ub", 5.0),
            ("kl_cov_ratio", 0.0002),
            ("ppo_kl_coef", 0.1),
        )
    ),
    coming(f"{ACTOR}.tau_pos", _LOSSES, default=1.0),
    coming(f"{ACTOR}.tau_neg", _LOSSES, default=1.05),
    translated(
        f"{ACTOR}.optim.weight_decay",
        actor_optimizer,
        "train.optimizer.weight_decay",
        default=0.01,
        reason=DECAY,
    ),
    translated(
        f"{ACTOR}.optim.betas",
        actor_optimizer,
        "train.optimizer.betas",
        default=[0.9, 0.999],
        reason="Of AdamW.",
    ),
    coming(
        f"{ACTOR}.entropy_from_logits_with_chunking",
        "entropy in pieces, for memory; it changes no number",
        default=False,
        harmless=(True,),
    ),
    coming(
        f"{ACTOR}.entropy_checkpointing",
        "entropy computed twice, for memory; it changes no number",
        default=False,
        harmless=(True,),
    ),
    offload(f"{ACTOR}.fsdp_config.offload_policy"),
    coming(f"{ACTOR}.fsdp_config.reshard_after_forward", SHARDED, default=True, harmless=(False,)),
    coming(f"{ACTOR}.fsdp_config.forward_prefetch", SHARDED, default=False, harmless=(True,)),
    translated(
        f"{MODEL}.override_config.*",
        overrides,
        "model.overrides",
        default={},
        reason="Fields of the model's config.json.",
    ),
    coming(f"{MODEL}.lora_rank", "LoRA", default=0),
    coming(f"{MODEL}.lora_alpha", "LoRA", default=16),
    coming(f"{MODEL}.target_modules", "LoRA", default="all-linear"),
    *(
        coming(f"{MODEL}.{name}", "kernels of others; they change no number", default=False, harmless=(True,))
        for name in ("use_liger", "use_fused_kernels")
    ),
    coming(
        f"{MODEL}.use_shm", "staging in shared memory; it changes no number", default=False, harmless=(True,)
    ),
)

MEGATRON: tuple[Key, ...] = (
    *(
        coming(f"{ACTOR}.megatron.{part}_offload", OFFLOAD, default=False, harmless=(True,))
        for part in ("param", "grad", "optimizer")
    ),
    *(
        derived(f"{ACTOR}.megatron.{kind}_parallel_size", batches, default=1, reason=TP)
        for kind in ("tensor_model", "pipeline_model", "context")
    ),
    coming(f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size", "pipelines", default=None),
    coming(f"{ACTOR}.megatron.expert_model_parallel_size", "experts over devices", default=1),
    coming(
        f"{ACTOR}.megatron.expert_tensor_parallel_size",
        "experts over devices",
        default=None,
        harmless=("None",),
    ),
    *(
        coming(
            f"{ACTOR}.megatron.{name}",
            "parallel training; one process has nothing to spread",
            default=True,
            harmless=(False,),
        )
        for name in ("sequence_parallel", "use_distributed_optimizer")
    ),
    coming(f"{ACTOR}.megatron.use_dist_checkpointing", "Megatron's checkpoints", default=False),
    coming(f"{ACTOR}.megatron.dist_checkpointing_path", "Megatron's checkpoints", default=None),
    derived(
        f"{ACTOR}.megatron.seed",
        at_least(f"{ACTOR}.megatron.seed", 0),
        default=42,
        reason="Of dropout on parallel devices; nothing is dropped here.",
    ),
    coming(f"{ACTOR}.megatron.override_transformer_config.*", "Megatron", default={}),
)

ENGINE: tuple[Key, ...] = (
    coming(f"{ROLLOUT}.multi_turn.use_inference_chat_template", _MULTI_TURN, default=False, harmless=(True,)),
    coming(f"{ROLLOUT}.mode", "inference servers", default="sync"),
    derived(f"{ROLLOUT}.max_model_len", at_least(f"{ROLLOUT}.max_model_len", 1), default=None, reason=SIZED),
    inert(f"{ROLLOUT}.disable_log_stats", "What the engine prints.", default=True, harmless=(False,)),
    coming(
        f"{ROLLOUT}.enable_chunked_prefill",
        "a choice of how prompts are read; it changes no number",
        default=True,
        harmless=(False,),
    ),
    coming(f"{ROLLOUT}.layered_summon", "LoRA", default=False, harmless=(True,)),
    coming(f"{ROLLOUT}.use_fire_sampling", "another temperature for the first token", default=False),
    engine(f"{ROLLOUT}.engine_kwargs.vllm.*", "vllm", default={}, reason="Any argument of vLLM."),
    engine(f"{ROLLOUT}.engine_kwargs.sglang.*", "sglang", default={}, reason="Any argument of SGLang."),
    *(
        coming(f"{ROLLOUT}.multi_turn.{name}", _MULTI_TURN, default=default)
        for name, default in (
            ("enable", False),
            ("max_turns", None),
            ("tool_config_path", None),
            ("completion_callback", None),
            ("enable_tokenization_sanity_check", True),
            ("max_user_turns", None),
            ("max_assistant_turns", None),
            ("format", "chatml"),
        )
    ),
)

REWARD: tuple[Key, ...] = (
    later("strategy", "fsdp"),
    later("micro_batch_size", None),
    later("use_dynamic_bsz", "${critic.use_dynamic_bsz}"),
    later("forward_max_token_len_per_gpu", "${critic.forward_max_token_len_per_gpu}"),
    later("ulysses_sequence_parallel_size", 1),
    later("model.fsdp_config.wrap_policy.min_num_params", 0),
    coming(
        "reward_model.launch_reward_fn_async",
        "rewards computed beside the trainer; they are the same",
        default=False,
        harmless=(True,),
    ),
    coming("reward_model.sandbox_fusion.url", "running code in a remote sandbox", default=None),
    coming("reward_model.sandbox_fusion.max_concurrent", "running code in a remote sandbox", default=64),
    translated(
        "custom_reward_function.reward_kwargs",
        rewards,
        "rewards.score.arguments",
        default=None,
        reason="Arguments of every call.",
    ),
)

TRAINER: tuple[Key, ...] = (
    translated(
        "algorithm.norm_adv_by_std_in_grpo",
        advantage,
        "algorithm.normalize_std",
        default=True,
        reason="Read by grpo, as there; False is Dr. GRPO's.",
    ),
    coming("algorithm.use_pf_ppo", "drawing rollouts by their score", default=False),
    coming("algorithm.pf_ppo.reweight_method", "drawing rollouts by their score", default="pow"),
    coming("algorithm.pf_ppo.weight_pow", "drawing rollouts by their score", default=2.0),
    coming(
        "trainer.balance_batch",
        "parallel training; one process has no ranks to balance",
        default=True,
        harmless=(False,),
    ),
    translated(
        "trainer.total_training_steps",
        length,
        "train.steps",
        default=None,
        reason="Stands over total_epochs.",
    ),
    coming("trainer.val_only", "evaluation without training", default=False),
    coming(
        "trainer.rollout_data_dir", "rollouts at a place of yours; they lie in the run's folder", default=None
    ),
    coming("trainer.validation_data_dir", "validation generations at a place of yours", default=None),
    translated(
        "trainer.max_actor_ckpt_to_keep", checkpoints, "checkpoint.keep", default=None, reason="null: all."
    ),
    derived(
        "trainer.max_critic_ckpt_to_keep",
        checkpoints,
        default=None,
        reason="Policy and critic lie in one checkpoint: null, or the actor's number.",
    ),
    translated(
        "trainer.device", device, "machine.device", default="cuda", reason="cuda: CUDA where there is one."
    ),
    derived("ray_init.num_cpus", at_least("ray_init.num_cpus", 1), default=None, reason=_RAY),
    inert("ray_init.timeline_json_file", _RAY, default=None),
)

_NOT_LOADED = "models whose weights are not loaded"
_PROFILE = "profiles of a run"
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


def _profile(role: str) -> tuple[Key, ...]:
    given = (
        ("use_profile", False),
        ("profile_ranks", None),
        ("step_start", -1),
        ("step_end", -1),
        ("save_path", None),
    )
    return tuple(coming(f"{role}.profile.{name}", _PROFILE, default=default) for name, default in given)


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
    coming(
        f"{REF}.strategy",
        "a trainer of its own for the reference",
        default=f"${{{ACTOR}.strategy}}",
        harmless=("fsdp", "fsdp2", "megatron"),
    ),
    coming(
        f"{REF}.use_torch_compile",
        "kernels of others; they change no number",
        default=f"${{{ACTOR}.use_torch_compile}}",
        harmless=(True, False),
    ),
    *(
        coming(
            f"{REF}.{name}",
            "entropy in pieces, for memory; it changes no number",
            default=False,
            harmless=(True,),
        )
        for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")
    ),
    coming(f"{REF}.fsdp_config.reshard_after_forward", SHARDED, default=True, harmless=(False,)),
    coming(f"{REF}.fsdp_config.forward_prefetch", SHARDED, default=False, harmless=(True,)),
    *(
        coming(f"{MODEL}.{name}", "kernels of others; they change no number", default=False, harmless=(True,))
        for name in ("use_fused_loss", "return_last_hidden_state", "use_efficient_resharding")
    ),
    coming(f"{ROLLOUT}.chat_scheduler", "inference servers", default=None),
    *(
        coming(f"{ROLLOUT}.layer_name_map.{name}", "Megatron", default=default)
        for name, default in (("qkv_layer_name", "qkv"), ("gate_proj_layer_name", "gate_up"))
    ),
    coming("critic.kl_ctrl.type", "nothing: verl reads algorithm.kl_ctrl", default="fixed"),
    coming("critic.kl_ctrl.kl_coef", "nothing: verl reads algorithm.kl_ctrl", default=0.001),
    later("load_weight", True),
    later("megatron.*", {}),
    *(
        later(f"model.{name}", default)
        for name, default in (
            ("use_shm", False),
            ("use_remove_padding", False),
            ("use_fused_kernels", False),
            ("fsdp_config.fsdp_size", -1),
            ("fsdp_config.reshard_after_forward", True),
            ("fsdp_config.forward_prefetch", False),
            ("fsdp_config.wrap_policy.transformer_layer_cls_to_wrap", None),
        )
    ),
    coming("trainer.max_ref_ckpt_to_keep", "nothing: the reference is never saved anew", default=None),
)

NEWER: tuple[Key, ...] = (*ROLES, *RECIPES, *DAPO, *DATA, *POLICY, *MEGATRON, *ENGINE, *REWARD, *TRAINER)
