"""verl's keys of example files and recipes (Hydra's, PRIME's, DAPO's), which its document does not name."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, translated
from whet.config.dialects.verl_algorithm import dynamic_sampling
from whet.config.dialects.verl_parts import hydra_defaults, nothing, overlong_penalty
from whet.config.dialects.verl_reward_model import later
from whet.config.dialects.verl_rules import ACTOR, CRITIC, MODEL, at_least, equal, is_flag

_PRIME = "PRIME, SPIN and SPPO (recipes with trainers of their own)"
_TIMEOUT = "One process has nobody to wait for."

RECIPES: tuple[Key, ...] = (
    derived(
        "defaults",
        hydra_defaults,
        default=None,
        reason="Hydra's list: ppo_trainer is what a file leaves out anyway, ppo_megatron_trainer says that `optim` is "
        "Megatron's; other files are refused.",
    ),
    derived("hydra.*", nothing, default={}, reason="Hydra's own settings; nothing here reads them."),
    *(
        derived(f"{role}.nccl_timeout", at_least(f"{role}.nccl_timeout", 1), default=600, reason=_TIMEOUT)
        for role in ("actor_rollout_ref", CRITIC, "reward_model")
    ),
    *(
        coming(
            f"{model}.fused_kernel_options.impl_backend",
            "kernels of others; they change no number",
            default="torch",
            harmless=("triton", None),
        )
        for model in (MODEL, "reward_model.model")
    ),
    *(
        coming(f"data.{name}", _PRIME, default=default)
        for name, default in (
            ("filter_accuracy", False),
            ("accuracy_lower_bound", 0.0),
            ("accuracy_upper_bound", 1.0),
            ("oversample_factor", 1.0),
            ("filter_truncate", False),
        )
    ),
    *(
        coming(name, _PRIME, default=None)
        for name in (
            f"{ACTOR}.dpo_beta",
            f"{ACTOR}.sppo_eta",
            "algorithm.sppo_eta",
            "trainer.ref_update_freq",
            "trainer.log_freq",
            "algorithm.reward_gt_coef",
            "algorithm.reward_dpo_coef",
        )
    ),
    *(
        later(name, None)
        for name in (
            "prime_granularity",
            "prime_norm",
            "mini_batch_size",
            "model.ref_path",
            "model.ref_type",
            "model.tokenizer_path",
            "model.enable_gradient_checkpointing",
            "model.update",
            "model.beta_train",
            "model.loss_type",
            "model.optim.*",
            "model.fsdp_config.optimizer_offload",
        )
    ),
)

DAPO: tuple[Key, ...] = (
    derived(
        "data.gen_batch_size",
        at_least("data.gen_batch_size", 1),
        default="${data.train_batch_size}",
        reason="Prompts of one generation; whet asks for as many as are missing.",
    ),
    translated(
        "algorithm.filter_groups.enable",
        dynamic_sampling,
        "algorithm.drop_uniform_groups",
        "algorithm.max_refills",
        default=False,
        reason="DAPO's dynamic sampling.",
    ),
    translated(
        "algorithm.filter_groups.metric",
        dynamic_sampling,
        "algorithm.groups.uniform_by",
        default=None,
        reason="seq_reward, seq_final_reward: the whole reward; acc, score: without the penalty for long responses.",
    ),
    translated(
        "algorithm.filter_groups.max_num_gen_batches",
        dynamic_sampling,
        "algorithm.max_refills",
        default=0,
        reason="N generations are N - 1 refills; 0 and less: no limit.",
    ),
    *(
        translated(
            f"reward_model.overlong_buffer.{name}",
            overlong_penalty,
            "rewards.overlong",
            default=default,
            reason="DAPO's penalty for long responses, as a reward beside the score.",
        )
        for name, default in (("enable", False), ("len", 0), ("penalty_factor", 0.0))
    ),
    derived(
        "reward_model.reward_kwargs.max_resp_len",
        equal(
            "reward_model.reward_kwargs.max_resp_len",
            "data.max_response_length",
            "the penalty ends at the limit",
        ),
        default="${data.max_response_length}",
        reason="Must equal data.max_response_length.",
    ),
    derived(
        "reward_model.overlong_buffer.log",
        is_flag("reward_model.overlong_buffer.log"),
        default=False,
        reason="Every part of a reward is logged.",
    ),
)
