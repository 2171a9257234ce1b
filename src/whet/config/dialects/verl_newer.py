"""verl's keys that its document does not name: of its own base file at that time, and of newer versions."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, engine, inert, mapped, translated
from whet.config.dialects.verl_algorithm import (
    CORRECTION,
    advantage,
    correction,
    loss,
    reduction,
    resampling,
)
from whet.config.dialects.verl_layout import fsdp, sized
from whet.config.dialects.verl_loop import actor_optimizer, checkpoints, device, dumps, length
from whet.config.dialects.verl_lora import lora_keys, policy_lora
from whet.config.dialects.verl_parts import overrides, rewards, training_data
from whet.config.dialects.verl_policy import (
    DECAY,
    ENTROPY,
    FUSED,
    KERNELS,
    OFFLOAD,
    SIZED,
    own,
    rests,
    unstaged,
)
from whet.config.dialects.verl_recipes import DAPO, RECIPES
from whet.config.dialects.verl_roles import ROLES
from whet.config.dialects.verl_rules import (
    ACTOR,
    MODEL,
    ROLLOUT,
    at_least,
    is_path,
)

_SIZES = "Read where the sizes are Megatron's."
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
    mapped(
        "data.apply_chat_template_kwargs",
        "tokenizer.chat_arguments",
        default={},
        reason="Newer verl. A name that the template does not use is refused.",
    ),
    coming("data.video_key", _VIDEO, default="videos"),
    unstaged("data.use_shm"),
    inert(
        "data.validation_shuffle",
        "The order of a validation changes no mean of it.",
        default=False,
        harmless=(True,),
    ),
    mapped("data.seed", "data.seed", default=None, reason="Of the order of prompts alone; null: the run's."),
    derived(
        "data.dataloader_num_workers",
        at_least("data.dataloader_num_workers", 0),
        default=8,
        reason="One process reads; the number changes no result.",
    ),
)

POLICY: tuple[Key, ...] = (
    *(
        translated(f"{ACTOR}.{name}", loss, f"algorithm.{native}", default=default, reason=reason)
        for name, native, default, reason in (
            ("clip_ratio_low", "clip_low", None, "null: clip_ratio. Read by the losses with a clip."),
            ("clip_ratio_high", "clip_high", None, "null: clip_ratio. Read by the losses with a clip."),
            ("clip_ratio_c", "dual_clip", 3.0, "Always on in vanilla, as there."),
            (
                "policy_loss.loss_mode",
                "loss",
                "vanilla",
                "vanilla is PPO with the dual clip, gspo that of tokens. gspo, sapo and geo_mean are averaged over "
                "sequences whatever loss_agg_mode says, and here the KL loss with them.",
            ),
            ("policy_loss.clip_cov_ratio", "clip_cov_ratio", 2e-4, "Of clip_cov."),
            ("policy_loss.clip_cov_lb", "clip_cov_lb", 1.0, "Of clip_cov."),
            ("policy_loss.clip_cov_ub", "clip_cov_ub", 5.0, "Of clip_cov."),
            ("policy_loss.kl_cov_ratio", "kl_cov_ratio", 2e-4, "Of kl_cov."),
            (
                "policy_loss.ppo_kl_coef",
                "ppo_kl_coef",
                0.1,
                "Of kl_cov; the function's own default there is 1.",
            ),
            ("tau_pos", "tau_pos", 1.0, "Of sapo."),
            ("tau_neg", "tau_neg", 1.05, "Of sapo."),
        )
    ),
    translated(
        f"{ACTOR}.loss_agg_mode",
        reduction,
        "algorithm.aggregation",
        default="token-mean",
        reason="Over the whole mini batch (verl's present rule). seq-mean-token-sum-norm is token-sum-norm here: there "
        "is no mean over sequences in it.",
    ),
    translated(
        f"{ACTOR}.loss_scale_factor",
        reduction,
        "algorithm.norm_tokens",
        default=None,
        reason="Of seq-mean-token-sum-norm; null: the longest response.",
    ),
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
    *(
        own(f"{ACTOR}.{name}", ENTROPY)
        for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")
    ),
    rests(f"{ACTOR}.fsdp_config.offload_policy", "Weights, gradients, moments; of policy and critic."),
    fsdp("reshard_after_forward"),
    fsdp("forward_prefetch"),
    translated(
        f"{MODEL}.override_config.*",
        overrides,
        "model.overrides",
        default={},
        reason="Fields of the model's config.json.",
    ),
    *lora_keys(MODEL, policy_lora, "model.lora"),
    own(f"{MODEL}.use_liger", KERNELS),
    own(f"{MODEL}.use_fused_kernels", FUSED),
    unstaged(f"{MODEL}.use_shm"),
)

MEGATRON: tuple[Key, ...] = (
    *(
        coming(f"{ACTOR}.megatron.{part}_offload", OFFLOAD, default=False, harmless=(True,))
        for part in ("param", "grad", "optimizer")
    ),
    *(
        sized(f"{ACTOR}.megatron.{kind}_parallel_size", dim, default=1, reason=_SIZES)
        for kind, dim in (
            ("tensor_model", "tp"),
            ("pipeline_model", "pp"),
            ("context", "cp"),
            ("expert_model", "ep"),
        )
    ),
    coming(f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size", "pipelines", default=None),
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
    own(
        f"{ROLLOUT}.enable_chunked_prefill",
        "The embedded engine reads prompts in its own way; no number changes.",
        default=True,
    ),
    own(f"{ROLLOUT}.layered_summon", "Cut weights are gathered tensor by tensor for the rollouts, always."),
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
    inert(
        "reward_model.launch_reward_fn_async",
        "It overlaps rewards with other work there; they are the same.",
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
    translated(
        "algorithm.use_pf_ppo",
        resampling,
        "algorithm.resample",
        default=False,
        reason="PF-PPO draws rollouts by their score; read with gae, as there.",
    ),
    translated(
        "algorithm.pf_ppo.reweight_method",
        resampling,
        "algorithm.resample",
        default="pow",
        reason="Read with use_pf_ppo; pow, max_min or max_random.",
    ),
    translated(
        "algorithm.pf_ppo.weight_pow",
        resampling,
        "algorithm.resample_power",
        default=2.0,
        reason="Read with use_pf_ppo and pow.",
    ),
    *(
        translated(
            f"{CORRECTION}.{name}", correction, native, default=default, reason=f"Newer verl. {reason}"
        )
        for name, native, default, reason in (
            (
                "rollout_is",
                "algorithm.correction.weight",
                None,
                "Weights by the ratio of trainer and engine.",
            ),
            ("rollout_is_threshold", "algorithm.correction.high", 2.0, "Larger weights become this."),
            (
                "rollout_is_batch_normalize",
                "algorithm.correction.normalize",
                False,
                "To mean 1 over the step.",
            ),
            (
                "rollout_rs",
                "algorithm.correction.reject",
                None,
                "token, seq_sum, seq_mean, seq_max with _k1 .. _k3.",
            ),
            (
                "rollout_rs_threshold",
                "algorithm.correction.reject",
                None,
                "k1 has a lower and an upper bound of the ratio ('0.5_2'), k2 and k3 an upper one.",
            ),
            (
                "bypass_mode",
                "algorithm.old_logprobs",
                False,
                "The ratio's denominator is the engine's log-prob.",
            ),
            ("loss_type", "algorithm.old_logprobs", "ppo_clip", "Of bypass_mode; reinforce is coming."),
        )
    ),
    own(
        "trainer.balance_batch",
        "Ranks always get parts of equal work (Karmarkar and Karp's differencing); no number changes.",
        default=True,
    ),
    translated(
        "trainer.total_training_steps",
        length,
        "train.steps",
        default=None,
        reason="Stands over total_epochs.",
    ),
    coming("trainer.val_only", "evaluation without training", default=False),
    *(
        translated(
            f"trainer.{key}",
            dumps,
            native,
            default=None,
            reason="STEP.jsonl in it, with input, output, gts, score, step and the parts of the reward, as there; "
            "prompts as they stand in the data, before the chat template. Everything is in the run's folder, too.",
        )
        for key, native in (
            ("rollout_data_dir", "track.rollouts_dump"),
            ("validation_data_dir", "track.eval_dump"),
        )
    ),
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
    derived("ray_init.timeline_json_file", is_path("ray_init.timeline_json_file"), default=None, reason=_RAY),
)

NEWER: tuple[Key, ...] = (*ROLES, *RECIPES, *DAPO, *DATA, *POLICY, *MEGATRON, *ENGINE, *REWARD, *TRAINER)
