"""Keys that are not in SkyRL's document: of its own base file at that time, and of newer versions."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, inert, refused, translated
from whet.config.dialects.skyrl_learn import advantages, critic, kl, policy_optimizer, reduction
from whet.config.dialects.skyrl_lora import LORA
from whet.config.dialects.skyrl_models import NO_REWARD_MODEL, deepspeed
from whet.config.dialects.skyrl_parts import dtype, environment
from whet.config.dialects.skyrl_rules import check_environments, ulysses, unread
from whet.types import Json

COMPOSED: tuple[Json, ...] = tuple(
    [
        "_self_",
        {"deepspeed_config@deepspeed_config.train": "train"},
        {"deepspeed_config@deepspeed_config.eval": "eval"},
        *gym,
    ]
    for gym in ([], [{"skyrl_gym_config": "default"}])
)
"""What SkyRL's base files are composed of."""

NEWER: tuple[Key, ...] = (
    coming("defaults", "Hydra's composition of files", default=None, harmless=COMPOSED),
    *(
        deepspeed(f"deepspeed_config.{use}.{below}*", {})
        for use in ("train", "eval")
        for below in ("zero_optimization.", "")
    ),
    translated(
        "environment.env_class",
        environment,
        "rewards.gsm8k.function",
        "rewards.score.function",
        default="gsm8k",
        reason="gsm8k: 1 for the right number after the last #### (SkyRL: the first, compared as text). Other "
        "environments are coming; path/to/file.py:name is a reward function of yours.",
    ),
    *(
        derived(
            name,
            check_environments,
            default=default,
            reason="Settings of environments; those that read them are refused by environment.env_class. Rewards run "
            "in guard.workers processes.",
        )
        for name, default in (("environment.max_env_workers", 10), ("environment.skyrl_gym.*", {}))
    ),
    translated(
        "trainer.algorithm.loss_reduction",
        reduction,
        "algorithm.aggregation",
        "algorithm.norm_tokens",
        default="sequence_mean",
        reason="Default: what SkyRL did before the key came (newer: token_mean). Over the whole mini batch, of the KL "
        "loss, too (SkyRL's is always a mean over sequences); token_mean_legacy is refused.",
    ),
    translated(
        "trainer.algorithm.grpo_norm_by_std",
        advantages,
        "algorithm.normalize_std",
        default=True,
        reason="Read by grpo alone, as there.",
    ),
    translated(
        "trainer.algorithm.kl_estimator_type",
        kl,
        "algorithm.kl.estimator",
        "algorithm.reward_kl.estimator",
        default=None,
        reason="Stands over use_kl_estimator_k3 and use_abs_kl where it is given.",
    ),
    *(
        translated(
            f"trainer.{role}.optimizer_config.{name}",
            function,
            *(f"{native}.optimizer.schedule.{key}" for key in ours),
            default=default,
            reason=reason,
        )
        for role, function, native in (("policy", policy_optimizer, "train"), ("critic", critic, "critic"))
        for name, ours, default, reason in (
            (
                "num_warmup_steps",
                ("warmup_steps",),
                None,
                "Stands over trainer.num_warmup_steps where it is given.",
            ),
            (
                "scheduler",
                ("kind", "min_factor"),
                "constant_with_warmup",
                "constant, constant_with_warmup, linear, cosine, cosine_with_restarts (one cycle), polynomial, "
                "inverse_sqrt; others are coming.",
            ),
        )
    ),
    translated("trainer.bf16", dtype, "model.dtype", default=True, reason="See generator.model_dtype."),
    inert("trainer.flash_attn", "whet's attention is its own and packed.", default=True, harmless=(False,)),
    inert(
        "trainer.gradient_checkpointing_use_reentrant",
        "How activations are recomputed, not which.",
        default=False,
        harmless=(True,),
    ),
    derived("trainer.sequence_parallel_backend", ulysses, default="ulysses", reason="Ulysses, as there."),
    refused(
        "trainer.disable_fast_tokenizer",
        "Tokenizers are the fast ones: save the slow one again with transformers, which converts it.",
        default=False,
    ),
    *LORA,
    refused("trainer.use_orm_score", NO_REWARD_MODEL, default=False),
    inert(
        "trainer.algorithm.kl_target",
        "SkyRL never read it; an adaptive KL is trainer.algorithm.kl_ctrl.type=adaptive with .kl_target.",
        default=None,
    ),
    inert(
        "trainer.algorithm.init_kl_coef",
        "SkyRL never read it; a KL starts from trainer.algorithm.kl_loss_coef.",
        default=0.0,
    ),
    refused("trainer.reward.model.path", NO_REWARD_MODEL, default=None),
    deepspeed("trainer.reward.deepspeed_config", "${deepspeed_config.eval}"),
    *(
        derived(f"trainer.reward.{name}", unread, default=default, reason=NO_REWARD_MODEL)
        for name, default in (
            ("fsdp_config.cpu_offload", True),
            ("fsdp_config.reshard_after_forward", True),
            ("fsdp_config.fsdp_size", -1),
            ("sequence_parallel_size", 1),
        )
    ),
)
