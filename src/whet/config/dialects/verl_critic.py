"""verl's keys of the critic."""

from __future__ import annotations

from whet.config.dialects.key import Key, derived, inert, mapped, translated
from whet.config.dialects.verl_algorithm import value_reduction
from whet.config.dialects.verl_layout import OF_CRITIC, fsdp_like
from whet.config.dialects.verl_loop import checkpoints, critic_optimizer, imports
from whet.config.dialects.verl_lora import critic_lora, lora_keys
from whet.config.dialects.verl_parts import critic_overrides, critic_path, critic_tokenizer
from whet.config.dialects.verl_policy import (
    BATCHES,
    CUT,
    DECAY,
    FORWARD,
    IMPORTED,
    NO_CODE,
    PACKED,
    RAMP,
    STEPS,
    TP,
    parallel,
    rests,
    unstaged,
)
from whet.config.dialects.verl_rules import (
    ACTOR,
    MODEL,
    ROLLOUT,
    at_least,
    batches,
    check_parallel,
    cut,
    equal,
    same_family,
    shuffling,
)

ONLY_CRITIC = "Read where a critic learns (adv_estimator=gae), as there."


def critic(name: str, native: str, default: object, reason: str = "") -> Key:
    """A key of the critic's optimizer."""
    return translated(
        f"critic.optim.{name}",
        critic_optimizer,
        f"critic.optimizer.{native}",
        default=default,
        reason=f"{ONLY_CRITIC} {reason}".strip(),
    )


CRITIC: tuple[Key, ...] = (
    derived(
        "critic.rollout_n",
        equal("critic.rollout_n", f"{ROLLOUT}.n", "policy and critic read the same rollouts"),
        default=f"${{{ROLLOUT}.n}}",
        reason=f"Must equal {ROLLOUT}.n.",
    ),
    derived("critic.strategy", same_family, default="fsdp", reason="Of the same family as the actor's."),
    mapped("critic.optim.lr", "critic.optimizer.lr", default=1e-5, reason=ONLY_CRITIC),
    critic("lr_warmup_steps", "schedule.warmup_steps", -1, f"{STEPS} {RAMP}"),
    critic("lr_warmup_steps_ratio", "schedule.warmup_fraction", 0.0),
    critic("min_lr_ratio", "schedule.min_factor", None, "Honoured here; verl of then forgot to pass it on."),
    critic("num_cycles", "schedule.cycles", 0.5, "Read by cosine."),
    critic("warmup_style", "schedule.kind", "constant"),
    derived(
        "critic.optim.total_training_steps",
        at_least("critic.optim.total_training_steps", -1),
        default=-1,
        reason="verl's trainer writes it, over any value; it follows from the run's length here, too.",
    ),
    critic("weight_decay", "weight_decay", 0.01, DECAY),
    translated(
        "critic.model.path",
        critic_path,
        "critic.path",
        default="~/models/deepseek-llm-7b-chat",
        reason=ONLY_CRITIC,
    ),
    derived(
        "critic.model.tokenizer_path",
        critic_tokenizer,
        default=f"${{{MODEL}.path}}",
        reason="Policy and critic read the same tokens.",
    ),
    translated(
        "critic.model.override_config",
        critic_overrides,
        "critic.overrides",
        default={},
        reason=f"{ONLY_CRITIC} Flat fields and those of model_config count alike; the policy's do not.",
    ),
    translated(
        "critic.model.external_lib",
        imports,
        "imports",
        default=f"${{{MODEL}.external_lib}}",
        reason=f"{ONLY_CRITIC} {IMPORTED}",
    ),
    inert(
        "critic.model.trust_remote_code",
        NO_CODE,
        default=f"${{{MODEL}.trust_remote_code}}",
        harmless=(True, False),
    ),
    mapped(
        "critic.model.enable_gradient_checkpointing",
        "critic.gradient_checkpointing",
        default=True,
        reason=ONLY_CRITIC,
    ),
    rests("critic.model.enable_activation_offload", "With adv_estimator=gae as the actor's."),
    derived("critic.model.use_remove_padding", check_parallel, default=False, reason=PACKED),
    unstaged("critic.model.use_shm"),
    *lora_keys("critic.model", critic_lora, "critic.lora"),
    *(
        rests(f"critic.model.fsdp_config.{name}", what)
        for name, what in (
            ("param_offload", "Read with adv_estimator=gae."),
            ("optimizer_offload", "With adv_estimator=gae as the actor's."),
        )
    ),
    rests("critic.model.fsdp_config.offload_policy", "With adv_estimator=gae as the actor's."),
    *fsdp_like(OF_CRITIC, "reshard_after_forward", "forward_prefetch"),
    derived(
        "critic.model.fsdp_config.fsdp_size",
        at_least("critic.model.fsdp_config.fsdp_size", -1),
        default=-1,
        reason=TP,
    ),
    translated(
        "critic.ppo_mini_batch_size",
        batches,
        "critic.minibatches",
        default=f"${{{ACTOR}.ppo_mini_batch_size}}",
        reason=f"{ONLY_CRITIC} {BATCHES}",
    ),
    *(
        translated(f"critic.{name}", cut, native, default=default, reason=f"{ONLY_CRITIC} {reason}")
        for name, native, default, reason in (
            ("ppo_micro_batch_size", "critic.micro_rollouts", None, CUT),
            ("ppo_micro_batch_size_per_gpu", "critic.micro_rollouts", None, f"null: the policy's cut. {CUT}"),
            (
                "forward_micro_batch_size",
                "train.micro_rollouts_forward",
                "${critic.ppo_micro_batch_size}",
                FORWARD,
            ),
            (
                "forward_micro_batch_size_per_gpu",
                "train.micro_rollouts_forward",
                "${critic.ppo_micro_batch_size_per_gpu}",
                FORWARD,
            ),
            ("use_dynamic_bsz", "critic.micro_tokens", f"${{{ACTOR}.use_dynamic_bsz}}", CUT),
            ("ppo_max_token_len_per_gpu", "critic.micro_tokens", 32768, CUT),
            (
                "forward_max_token_len_per_gpu",
                "train.micro_tokens_forward",
                "${critic.ppo_max_token_len_per_gpu}",
                FORWARD,
            ),
        )
    ),
    parallel("critic.ulysses_sequence_parallel_size", 1),
    translated(
        "critic.ppo_epochs",
        batches,
        "critic.passes",
        default=f"${{{ACTOR}.ppo_epochs}}",
        reason=ONLY_CRITIC,
    ),
    translated(
        "critic.shuffle",
        shuffling,
        "train.shuffle_passes",
        default=f"${{{ACTOR}.shuffle}}",
        reason="The actor's; another choice is coming.",
    ),
    derived(
        "critic.data_loader_seed",
        at_least("critic.data_loader_seed", 0),
        default=f"${{{ACTOR}.data_loader_seed}}",
        reason="Every random number follows from the run's seed here.",
    ),
    translated(
        "critic.grad_clip", critic_optimizer, "critic.optimizer.grad_clip", default=1.0, reason=ONLY_CRITIC
    ),
    mapped(
        "critic.cliprange_value",
        "critic.clip_value",
        default=0.5,
        reason=f"{ONLY_CRITIC} The loss has the factor 1/2 of present verl.",
    ),
    translated(
        "critic.loss_agg_mode",
        value_reduction,
        "critic.aggregation",
        default=f"${{{ACTOR}.loss_agg_mode}}",
        reason=f"{ONLY_CRITIC} Over the whole mini batch; seq-mean-token-sum-norm divides by the longest response.",
    ),
    derived(
        "critic.checkpoint.save_contents",
        checkpoints,
        default=["model", "optimizer", "extra"],
        reason="Policy and critic lie in one checkpoint: the actor's; other parts are coming.",
    ),
    derived(
        "critic.checkpoint.load_contents",
        checkpoints,
        default="${critic.checkpoint.save_contents}",
        reason="The actor's; other parts are coming.",
    ),
)
