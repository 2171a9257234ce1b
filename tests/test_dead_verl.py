"""No key of verl's is dead: another value than the default changes the native config, or is refused by the key's name.

Every mapped and translated row of the four tables is tried, none left out. A key that is read in a context alone (a
critic's with gae ...) is tried in it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

import pytest

from whet.dialects.row import Row
from whet.dialects.tables import Dialect, dialect, parts, table
from whet.dialects.translate import Translation, translate
from whet.types import Json

A, R, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
M, RM = "actor_rollout_ref.model.", "reward_model."
OPTIM = (A + "optim.", "critic.optim.")
LORA = (M, "critic.model.", "model.")

Given = dict[str, Json]
CORRECTION_ = "algorithm.rollout_correction."
IS, RS = "algorithm.rollout_is", "algorithm.rollout_correction.rollout_rs"

MOE, SFT_MOE = A + "megatron.override_transformer_config.moe_", "engine.override_transformer_config.moe_"
DISTILL = "distillation.distillation_loss."

TURNS = R + "multi_turn."
TOOLS: Given = {TURNS + "enable": True, TURNS + "tool_config_path": "tools.yaml"}
AGENT: Given = {**TOOLS, R + "mode": "async"}

OTHER: Given = {
    TURNS + "format": "qwen3_coder",
    TURNS + "tool_response_truncate_side": "left",
    **{TURNS + f"max_{key}turns": 3 for key in ("", "assistant_", "user_")},
    R + "agent.default_agent_loop": "tool_agent",
    "algorithm.gdpo_reward_keys": ["score", "right"],
    "algorithm.gdpo_reward_weights": [0.5, 2.0],
    DISTILL + "loss_mode": "k2",
    "distillation.teacher_models.*": {"teacher_model": {"model_path": "other"}},
    "data.truncation": "left",
    "data.custom_cls.path": "other.py",
    "data.apply_chat_template_kwargs": {"enable_thinking": False},
    A + "strategy": "megatron",
    A + "kl_loss_type": "full",
    A + "loss_agg_mode": "seq-mean-token-sum",
    A + "policy_loss.loss_mode": "gspo",
    A + "checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
    A + "checkpoint.load_contents": ["model", "extra"],
    A + "checkpoint.contents": ["model", "optimizer", "extra", "hf_model"],
    "critic.loss_agg_mode": "seq-mean-token-mean",
    "critic.shuffle": True,
    "critic.model.override_config": {"a": 1},
    M + "override_config.*": {"a": 1},
    R + "engine_kwargs.vllm.*": {"kv_cache_dtype": "fp8"},
    R + "engine_kwargs.sglang.*": {"rl_on_policy_target": "fsdp"},
    M + "override_config.model_config": {"a": 1},
    R + "dtype": "float32",
    R + "top_k": 5,
    R + "top_p": 0.5,
    R + "val_kwargs.top_k": 5,
    R + "val_kwargs.top_p": 0.5,
    R + "max_num_seqs": 7,
    "algorithm.adv_estimator": "rloo",
    "algorithm.kl_penalty": "abs",
    "algorithm.reward_gt_coef": 2.0,
    "algorithm.reward_dpo_coef": 2.0,
    "data.oversample_factor": 2.0,
    "data.accuracy_lower_bound": 0.1,
    "data.accuracy_upper_bound": 0.9,
    RM + "prime_granularity": "whole",
    RM + "prime_norm": "none",
    RM + "mini_batch_size": 64,
    RM + "model.ref_path": "other",
    RM + "model.enable_gradient_checkpointing": True,
    RM + "model.update": "after",
    RM + "model.beta_train": 0.1,
    RM + "model.loss_type": "bon_acc",
    **{
        RM + f"model.optim.{key}": value
        for key, value in {
            "lr": 1e-5,
            "grad_clip": 1.0,
            "lr_warmup_steps": 7,
            "lr_warmup_steps_ratio": 0.2,
            "total_training_steps": 200,
            "weight_decay": 0.1,
        }.items()
    },
    A + "sppo_eta": 2.0,
    "algorithm.sppo_eta": 2.0,
    A + "dpo_beta": 0.2,
    "trainer.ref_update_freq": 3,
    "algorithm.dpo_loss_type": "ipo",
    "algorithm.dpo_label_smoothing": 0.1,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.pf_ppo.reweight_method": "max_min",
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_rs": "token_k3",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.5",
    "algorithm.rollout_correction.loss_type": "reinforce",
    "algorithm.filter_groups.metric": "acc",
    RM + "reward_manager": "prime",
    RM + "max_length": 512,
    RM + "model.input_tokenizer": None,
    "custom_reward_function.reward_kwargs": {"a": 1},
    "trainer.logger": ["tensorboard"],
    "trainer.device": "cpu",
    "trainer.nnodes": 2,
    A + "ulysses_sequence_parallel_size": 2,
    A + "fsdp_config.fsdp_size": 2,
    R + "tensor_model_parallel_size": 4,
    **{
        A + f"megatron.{kind}_parallel_size": 2
        for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
    },
    A + "veomni.fsdp_size": 2,
    A + "veomni.ulysses_parallel_size": 2,
    A + "veomni.expert_parallel_size": 2,
    A + "torchtitan.data_parallel_replicate_size": 2,
    A + "torchtitan.data_parallel_shard_size": 4,
    **{A + f"torchtitan.{kind}_parallel_size": 2 for kind in ("tensor", "pipeline", "context", "expert")},
    **{f"{at}engine.{name}": 2 for at in (A, "") for name in ("tp", "pp", "cp", "ep")},
    A + "engine.vpp": 2,
    **{
        f"engine.{name}": 2
        for name in (
            *(f"{kind}_parallel_size" for kind in ("ulysses", "expert", "tensor", "pipeline")),
            *(f"{kind}_size" for kind in ("tp", "pp", "cp", "ep", "dp_replicate", "data_parallel_replicate")),
        )
    },
    "engine.data_parallel_shard_size": 4,
    "engine.mixed_precision": False,
    **{f"{at}lr_scheduler_type": "cosine" for at in OPTIM},
    **{f"{at}decay_type": "sqrt" for at in (*OPTIM, "optim.")},
    **{f"{at}name": "Adam" for at in (*OPTIM, "optim.")},
    **{f"{at}{key}": 1e-7 for at in (*OPTIM, "optim.") for key in ("lr_min", "lr_start", "eps")},
    **{f"{at}{key}": 0.5 for at in (*OPTIM, "optim.") for key in ("lr_decay_ratio", "min_lr_factor")},
    **{f"{at}init_lr_ratio": 0.5 for at in ("optim.",)},
    "trainer.n_gpus_per_node": 4,
    "optim.lr_scheduler": "wsd",
    A + "fsdp_config.model_dtype": "bf16",
    A + "fsdp_config.dtype": "float32",
    A + "megatron.dtype": "float32",
    A + "megatron.virtual_pipeline_model_parallel_size": 2,
    R + "quantization": "fp8",
    R + "n_gpus_per_node": 4,
    "model_engine": "megatron",
    "global_profiler.steps": [2],
    "global_profiler.tool": "torch",
    IS + "_level": "sequence",
    IS + "_mode": "mask",
    IS + "_threshold": 3.0,
    IS + "_threshold_lower": 0.2,
    IS + "_veto_threshold": 1e-3,
    RS + "_threshold_lower": 0.2,
    CORRECTION_ + "rollout_token_veto_threshold": 1e-3,
    CORRECTION_ + "bypass_mode": True,
    "trainer.v1.trainer_mode": "colocate_async",
    "trainer.resume_mode": "disable",
    "trainer.checkpoint.save_contents": ["model", "extra"],
    "trainer.checkpoint.load_contents": ["model", "extra"],
    "engine.model_dtype": "bf16",
    "engine.dtype": "fp32",
    "engine.fsdp_size": 2,
    **{
        f"engine.{kind}_parallel_size": 2
        for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
    },
    **{
        f"optim.{key}": value
        for key, value in {
            "optimizer": "sgd",
            "warmup_style": "cosine",
            "lr_scheduler_type": "cosine",
            "min_lr_ratio": 0.5,
            "lr_warmup_steps": 7,
            "lr_decay_steps": 7,
            "lr_decay_style": "linear",
            "min_lr": 1e-7,
            "lr_warmup_init": 1e-7,
            "lr_wsd_decay_style": "cosine",
            "lr_wsd_decay_steps": 7,
        }.items()
    },
    "optim.betas": [0.9, 0.99],
    A + "optim.betas": [0.9, 0.99],
    "model.fsdp_config.model_dtype": "bf16",
    **{
        f"{at}_max_token_len_per_gpu": 2048
        for at in (A + "ppo", "critic.ppo", "critic.forward", R + "log_prob", REF + "log_prob")
    },
    **{f"{at}optimizer": "sgd" for at in OPTIM},
    **{f"{at}profile.profile_ranks": [1] for at in (A, REF)},
    **{f"{at}target_modules": ["q_proj"] for at in LORA},
    **{f"{at}lora.target_modules": ["linear_qkv"] for at in LORA},
    **{f"{at}target_parameters": ["mlp.experts.down_proj"] for at in LORA},
    **{f"{at}.override_transformer_config.moe_grouped_gemm": False for at in (A + "megatron", "engine")},
    **{f"{at}lora.lora_A_init_method": "kaiming" for at in LORA},
    **{f"{at}router_load_balancing_type": "global_aux_loss" for at in (MOE, SFT_MOE)},
    **{f"{at}warmup_style": "cosine" for at in OPTIM},
    **{f"{at}min_lr_ratio": 0.5 for at in OPTIM},
    **{f"{at}lr_warmup_steps_ratio": 0.5 for at in OPTIM},
    **{f"{at}lr_decay_style": "constant" for at in OPTIM},
    **{f"{at}lr_wsd_decay_style": "cosine" for at in OPTIM},
    **{f"{at}lr_wsd_decay_steps": 7 for at in OPTIM},
    **{f"{at}lr_decay_steps": 7 for at in OPTIM},
    **{f"{at}lr_warmup_steps": 7 for at in OPTIM},
    **{f"{at}lr_warmup_init": 1e-7 for at in OPTIM},
    **{f"{at}min_lr": 1e-7 for at in OPTIM},
}
"""A second value of every key for which none follows from the default's kind."""

COSINE: Given = {f"{at}warmup_style": "cosine" for at in OPTIM}
GROUPED = "override_transformer_config.moe_grouped_gemm"
MEGATRON_LORA = (
    "type",
    "alpha",
    "dropout",
    "target_modules",
    "lora_A_init_method",
    "share_expert_adapters",
)
MEGATRON: Given = {A + "strategy": "megatron", "critic.strategy": "megatron"}
VEOMNI: Given = {A + "strategy": "veomni", "critic.strategy": "veomni"}
TITAN: Given = {
    A + "strategy": "torchtitan",
    "critic.strategy": "torchtitan",
    A + "torchtitan.data_parallel_shard_size": -1,
}
LITE: Given = {A + "strategy": "mlite", "critic.strategy": "mlite"}
SHARED: Given = {R + "n": 8, A + "ppo_micro_batch_size_per_gpu": 1}
WSD: Given = {
    **MEGATRON,
    **{f"{at}lr_decay_style": "WSD" for at in OPTIM},
    **{f"{at}lr_wsd_decay_steps": 5 for at in OPTIM},
}
WARM: Given = {**MEGATRON, **{f"{at}lr_warmup_steps": 5 for at in OPTIM}}
IN_LOSS: Given = {A + "use_kl_loss": True}
IN_REWARD: Given = {"algorithm.use_kl_in_reward": True}
GROUPS: Given = {"algorithm.adv_estimator": "grpo", R + "n": 4}
FORWARD: Given = {
    **GROUPS,
    **IN_LOSS,
    R + "log_prob_micro_batch_size_per_gpu": 64,
    REF + "log_prob_micro_batch_size_per_gpu": 64,
}
VALUES: Given = {R + "log_prob_micro_batch_size_per_gpu": 64, "critic.ppo_micro_batch_size_per_gpu": 32}
JUDGE: Given = {
    RM + "enable": True,
    RM + "model.path": "judge",
    RM + "model.input_tokenizer": "policy",
    M + "path": "policy",
}
DAPO: Given = {RM + "reward_manager": "dapo"}
PENALTY: Given = {**DAPO, RM + "overlong_buffer.enable": True, RM + "overlong_buffer.len": 8}
DYNAMIC: Given = {**IN_LOSS, A + "use_dynamic_bsz": True}
VALIDATION: Given = {R + "val_kwargs.do_sample": True, R + "val_kwargs.temperature": 0.7}
CORRECTION = "algorithm.rollout_correction."
TEACHER: Given = {
    "distillation.enabled": True,
    "distillation.teacher_models": {"teacher_model": {"model_path": "org/teacher"}},
    "algorithm.adv_estimator": "reinforce_plus_plus",
}
TEACHERS: Given = {
    **TEACHER,
    "distillation.teacher_models": {n: {"key": n, "model_path": f"org/{n}"} for n in ("one", "two")},
}
ALONE: Given = {**TEACHER, DISTILL + "use_task_rewards": False}
TOPK: Given = {**ALONE, DISTILL + "loss_mode": "forward_kl_topk"}
PG: Given = {**ALONE, DISTILL + "use_policy_gradient": True}
MULTI_TURN: Given = {"data.multiturn.enable": True}

ENGINES: Given = {"model.path": "policy", "optim.lr_scheduler_type": "constant"}
FIRST: Given = {IS: True, IS + "_threshold": 2.0, IS + "_veto_threshold": None}
FULLY: Given = {
    "data.train_batch_size": 0,
    "actor_rollout_ref.hybrid_engine": False,
    R + "n": 8,
    "algorithm.adv_estimator": "grpo",
    "rollout.total_rollout_steps": 10_000,
}
APART: Given = {"actor_rollout_ref.hybrid_engine": False, "rollout.nnodes": 4}
OWN: Given = {R + "nnodes": 4}

DRAFTS: Given = {M + "mtp.enable": True, M + "mtp.enable_rollout": True}


MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")


def narrow(at: str, engine: Given, switch: str, on: Json) -> dict[str, Given]:
    """Moments in bfloat16, with the key that lets an engine read their dtypes."""
    both: Given = dict.fromkeys((at + key for key in MOMENTS), "bf16")
    return {key: {**engine, **both, at + switch: on} for key in both} | {at + switch: {**engine, **both}}


def learns(model: str) -> Given:
    """Layers of multi-token prediction do."""
    return {model + "mtp.enable": True, model + "mtp.enable_train": True}


GDPO: Given = {
    "algorithm.adv_estimator": "gdpo",
    R + "n": 4,
    "algorithm.gdpo_reward_keys": ["format", "right"],
}

SPPO: Given = {"algorithm.adv_estimator": None, "algorithm.sppo_eta": 0.5}
SPIN: Given = {"algorithm.adv_estimator": None, A + "dpo_beta": 0.5, R + "n": 2}

PRIME: Given = {
    "algorithm.adv_estimator": "rloo",
    "algorithm.reward_gt_coef": 5,
    "algorithm.reward_dpo_coef": 5,
    RM + "enable": True,
    RM + "reward_manager": "prime",
    RM + "model.path": "sft",
    M + "path": "sft",
    R + "n": 4,
}
MORE: Given = {**PRIME, "data.oversample_factor": 2.0, "data.filter_accuracy": True}

CONTEXTS: dict[str, Given] = {
    **dict.fromkeys(
        (
            "algorithm.reward_gt_coef",
            "algorithm.reward_dpo_coef",
            "data.oversample_factor",
            *(RM + key for key in ("prime_granularity", "prime_norm", "mini_batch_size")),
            *(
                RM + f"model.{key}"
                for key in ("ref_path", "enable_gradient_checkpointing", "update", "beta_train")
            ),
            RM + "model.loss_type",
            *(RM + f"model.optim.{key}" for key in ("lr", "grad_clip", "lr_warmup_steps", "weight_decay")),
        ),
        PRIME,
    ),
    RM + "model.optim.lr_warmup_steps_ratio": {**PRIME, RM + "model.optim.total_training_steps": 100},
    RM + "model.optim.total_training_steps": {**PRIME, RM + "model.optim.lr_warmup_steps_ratio": 0.1},
    "data.filter_accuracy": {**PRIME, "data.oversample_factor": 2.0},
    "data.filter_truncate": MORE,
    **{f"data.accuracy_{side}_bound": MORE for side in ("lower", "upper")},
    **dict.fromkeys((A + "sppo_eta", "algorithm.sppo_eta"), SPPO),
    **dict.fromkeys(
        (
            A + "dpo_beta",
            "trainer.ref_update_freq",
            "algorithm.dpo_loss_type",
            "algorithm.dpo_label_smoothing",
        ),
        SPIN,
    ),
    TURNS + "enable": {TURNS + "tool_config_path": "tools.yaml"},
    **{TURNS + key: {TURNS + "enable": True} for key in ("tool_config_path", "interaction_config_path")},
    TURNS + "function_tool_path": {TURNS + "enable": True},
    **{TURNS + key: TOOLS for key in ("max_turns", "max_assistant_turns", "max_user_turns")},
    **dict.fromkeys(
        (TURNS + "format", TURNS + "use_inference_chat_template", TURNS + "max_parallel_calls"), AGENT
    ),
    **dict.fromkeys((TURNS + "max_tool_response_length", TURNS + "tool_response_truncate_side"), AGENT),
    R + "agent.default_agent_loop": AGENT,
    **dict.fromkeys(("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"), GDPO),
    **{
        f"reward_model.sandbox_fusion.{key}": {
            "reward_model.sandbox_fusion.url": "http://localhost:8080/run_code"
        }
        for key in ("max_concurrent", "memory_limit_mb")
    },
    "distillation.teacher_key": TEACHERS,
    "distillation.enabled": {k: v for k, v in TEACHER.items() if k != "distillation.enabled"},
    **dict.fromkeys(("distillation.teacher_models.*", DISTILL + "use_task_rewards"), TEACHER),
    DISTILL + "distillation_loss_coef": TEACHER,
    R + "engine_kwargs.sglang.*": {R + "name": "sglang"},
    **dict.fromkeys(
        (DISTILL + "loss_mode", DISTILL + "loss_max_clamp", DISTILL + "use_policy_gradient"), ALONE
    ),
    **dict.fromkeys((DISTILL + "topk", DISTILL + "log_prob_min_clamp"), TOPK),
    **dict.fromkeys((DISTILL + "clip_ratio_low", DISTILL + "clip_ratio_high"), PG),
    A + "clip_ratio": {A + "clip_ratio_low": None, A + "clip_ratio_high": None},
    DISTILL + "clip_ratio": {**PG, DISTILL + "clip_ratio_low": None, DISTILL + "clip_ratio_high": None},
    M + "mtp.enable": {**MEGATRON, M + "mtp.enable_train": True},
    M + "mtp.enable_train": {**MEGATRON, M + "mtp.enable": True},
    **{M + f"mtp.{key}": {**MEGATRON, **learns(M)} for key in ("detach_encoder", "mtp_loss_scaling_factor")},
    M + "mtp.enable_rollout": {M + "mtp.enable": True},
    **{M + f"mtp.{key}": DRAFTS for key in ("method", "num_speculative_tokens")},
    **{
        M + f"mtp.speculative_{key}": {**DRAFTS, R + "name": "sglang"}
        for key in ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")
    },
    REF + "model.path": IN_LOSS,
    "rollout.nnodes": APART,
    "rollout.n_gpus_per_node": APART,
    R + "nnodes": OWN,
    R + "n_gpus_per_node": OWN,
    A + "megatron.dtype": MEGATRON,
    R + "enable_rollout_routing_replay": {**MEGATRON, A + "router_replay.mode": "R2"},
    MOE + "z_loss_coeff": MEGATRON,
    MOE + "aux_loss_coeff": {**MEGATRON, MOE + "router_load_balancing_type": "aux_loss"},
    MOE + "router_load_balancing_type": {**MEGATRON, MOE + "aux_loss_coeff": 0.5},
    A + "megatron.virtual_pipeline_model_parallel_size": {
        R + "n": 8,
        A + "ppo_micro_batch_size_per_gpu": 1,
        A + "megatron.pipeline_model_parallel_size": 2,
    },
    **{A + f"megatron.{key}_offload": MEGATRON for key in ("param", "grad", "optimizer")},
    A + "veomni.fsdp_size": VEOMNI,
    A + "veomni.ulysses_parallel_size": {**VEOMNI, **SHARED},
    A + "veomni.expert_parallel_size": VEOMNI,
    A + "veomni.mixed_precision": VEOMNI,
    **{A + f"torchtitan.data_parallel_{kind}_size": TITAN for kind in ("replicate", "shard")},
    **{
        A + f"torchtitan.{kind}_parallel_size": {**TITAN, **SHARED}
        for kind in ("tensor", "pipeline", "context", "expert")
    },
    **{A + f"engine.{dim}": {**LITE, **SHARED} for dim in ("tp", "pp", "cp", "ep")},
    A + "engine.vpp": {**LITE, **SHARED, A + "engine.pp": 2},
    **{A + f"engine.{part}_offload": LITE for part in ("param", "optimizer", "grad")},
    REF + "engine.param_offload": {**LITE, **IN_LOSS},
    **{
        f"{at}{key}": {**VEOMNI, f"{at}lr_scheduler_type": "cosine"}
        for at in OPTIM
        for key in ("lr_min", "lr_start")
    },
    **{f"{at}lr_decay_ratio": {**VEOMNI, "trainer.total_training_steps": 10} for at in OPTIM},
    **{f"{at}{key}": TITAN for at in OPTIM for key in ("decay_type", "name", "eps", "min_lr_factor")},
    IS: {**FIRST, IS: False},
    **{f"{IS}{key}": FIRST for key in ("_level", "_threshold", "_veto_threshold")},
    IS + "_mode": {**FIRST, IS + "_threshold": 3.0},
    IS + "_threshold_lower": {**FIRST, IS + "_mode": "mask"},
    RS + "_threshold_lower": {RS: "token", RS + "_threshold": 2.0},
    **{
        f"async_training.{key}": FULLY
        for key in (
            "partial_rollout",
            "require_batches",
            "staleness_threshold",
            "trigger_parameter_sync_step",
            "use_rollout_log_probs",
            "compute_prox_log_prob",
        )
    },
    "rollout.total_rollout_steps": FULLY,
    **{
        key: given
        for at in OPTIM
        for key, given in narrow(at, MEGATRON, "use_precision_aware_optimizer", True).items()
    },
    **{
        at + "total_training_steps": {
            **FULLY,
            **({"algorithm.adv_estimator": "gae"} if at.startswith("critic.") else {}),
            **{one + "total_training_steps": 100 for one in OPTIM},
            at + "lr_scheduler_type": "cosine",
        }
        for at in OPTIM
    },
    "trainer.v1.sampler.max_off_policy_threshold": {"trainer.v1.trainer_mode": "colocate_async"},
    "global_profiler.steps": {"global_profiler.tool": "torch"},
    "global_profiler.tool": {"global_profiler.steps": [1]},
    "global_profiler.save_path": {"global_profiler.tool": "torch", "global_profiler.steps": [1]},
    M + "lora_adapter_path": {M + "lora_rank": 8},
    "critic.model.lora_adapter_path": {"critic.model.lora_rank": 8},
    "data.custom_cls.path": {"data.custom_cls.name": "Rows"},
    "data.custom_cls.name": {"data.custom_cls.path": "rows.py", "data.custom_cls.name": "Rows"},
    "custom_reward_function.name": {"custom_reward_function.path": "mine.py"},
    A + "shuffle": {A + "data_loader_seed": 1},
    "critic.shuffle": {A + "data_loader_seed": 1},
    A + "kl_loss_coef": IN_LOSS,
    A + "kl_loss_type": IN_LOSS,
    A + "loss_scale_factor": {
        A + "loss_agg_mode": "seq-mean-token-sum-norm",
        "critic.loss_agg_mode": "token-mean",
    },
    **{
        A + f"policy_loss.clip_cov_{key}": {A + "policy_loss.loss_mode": "clip_cov"}
        for key in ("ratio", "lb", "ub")
    },
    **{
        A + f"policy_loss.{key}": {A + "policy_loss.loss_mode": "kl_cov"}
        for key in ("kl_cov_ratio", "ppo_kl_coef")
    },
    **{A + key: {A + "policy_loss.loss_mode": "sapo"} for key in ("tau_pos", "tau_neg")},
    A + "ppo_max_token_len_per_gpu": DYNAMIC,
    **{f"critic.{key}_max_token_len_per_gpu": DYNAMIC for key in ("ppo", "forward")},
    **{f"{at}log_prob_max_token_len_per_gpu": DYNAMIC for at in (R, REF)},
    **{
        f"{at}log_prob_{key}": FORWARD
        for at in (R, REF)
        for key in ("micro_batch_size", "micro_batch_size_per_gpu")
    },
    **{f"{at}log_prob_use_dynamic_bsz": FORWARD for at in (R, REF)},
    **{f"critic.forward_micro_batch_size{key}": VALUES for key in ("", "_per_gpu")},
    A + "checkpoint.load_contents": GROUPS,
    R + "top_k": {},
    **{R + f"val_kwargs.{key}": VALIDATION for key in ("top_k", "top_p", "temperature", "n")},
    R + "val_kwargs.do_sample": {R + "val_kwargs.temperature": 0.7},
    R + "max_num_seqs": {},
    "algorithm.norm_adv_by_std_in_grpo": GROUPS,
    "algorithm.kl_penalty": IN_REWARD,
    "algorithm.kl_ctrl.type": IN_REWARD,
    "algorithm.kl_ctrl.kl_coef": IN_REWARD,
    **{
        f"algorithm.kl_ctrl.{key}": {**IN_REWARD, "algorithm.kl_ctrl.type": "adaptive"}
        for key in ("horizon", "target_kl")
    },
    **{
        f"algorithm.pf_ppo.{key}": {"algorithm.use_pf_ppo": True} for key in ("reweight_method", "weight_pow")
    },
    **{
        CORRECTION + f"rollout_is_{key}": {CORRECTION + "rollout_is": "token"}
        for key in ("threshold", "batch_normalize")
    },
    CORRECTION + "rollout_rs": {CORRECTION + "rollout_rs_threshold": 0.1},
    CORRECTION + "rollout_rs_threshold": {
        CORRECTION + "rollout_rs": "token_k3",
        CORRECTION + "rollout_rs_threshold": "0.1",
    },
    CORRECTION + "loss_type": {CORRECTION + "bypass_mode": True},
    "algorithm.filter_groups.enable": {"algorithm.filter_groups.metric": "acc"},
    "algorithm.filter_groups.metric": {
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "seq_reward",
        **PENALTY,
    },
    **{
        RM + key: JUDGE for key in ("max_length", "model.path", "model.input_tokenizer", "model.external_lib")
    },
    RM + "overlong_buffer.enable": {**DAPO, RM + "overlong_buffer.len": 8},
    "algorithm.filter_groups.max_num_gen_batches": {
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
    },
    **{RM + f"overlong_buffer.{key}": PENALTY for key in ("len", "penalty_factor")},
    "trainer.resume_from_path": {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "a"},
    **{f"{at}{key}": COSINE for at in OPTIM for key in ("min_lr_ratio", "num_cycles")},
    **{f"{at}{key}": WSD for at in OPTIM for key in ("lr_wsd_decay_style", "lr_wsd_decay_steps")},
    **{
        f"{at}{key}": MEGATRON
        for at in OPTIM
        for key in ("clip_grad", "lr_decay_style", "lr_decay_steps", "min_lr")
    },
    **{f"{at}lr_warmup_init": WARM for at in OPTIM},
    "data.multiturn.messages_key": MULTI_TURN,
    "data.multiturn.tools_key": MULTI_TURN,
    A + "fsdp_config.grad_offload": {},
    A + "megatron.expert_model_parallel_size": MEGATRON,
    "model.fsdp_config.cpu_offload": {"model.fsdp_config.offload_params": True},
    "model.fsdp_config.offload_params": {"model.fsdp_config.cpu_offload": True},
    **{
        A + f"megatron.{kind}_parallel_size": {R + "n": 8, A + "ppo_micro_batch_size_per_gpu": 1}
        for kind in ("tensor_model", "pipeline_model", "context")
    },
    **{
        f"{at}{key}": {f"{at}lora_rank": 8}
        for at in LORA
        for key in ("lora_alpha", "target_modules", "exclude_modules", "target_parameters")
    },
    **{f"{at}lora.{key}": {**MEGATRON, f"{at}lora.rank": 8} for at in LORA[:2] for key in MEGATRON_LORA},
    A + f"megatron.{GROUPED}": {**MEGATRON, M + "lora.rank": 8, A + "megatron.expert_model_parallel_size": 2},
    **{f"{at}lora.rank": MEGATRON for at in LORA[:2]},
    **{
        f"{at}profile.{key}": {
            f"{at}profile.{name}": value
            for name, value in (("use_profile", True), ("step_start", 1), ("step_end", 9))
            if name != key or key != "use_profile"
        }
        for at in (A, REF)
        for key in ("use_profile", "profile_ranks", "step_start", "step_end", "save_path")
    },
}
"""What a file must say, too, for a key to be read; a value that stands there for the key itself takes the default's
place."""

SFT_MEGATRON: Given = {**ENGINES, "model.strategy": "megatron"}
SFT_CONTEXTS: dict[str, Given] = {
    **{f"model.lora.{key}": {**SFT_MEGATRON, "model.lora.rank": 8} for key in MEGATRON_LORA},
    f"engine.{GROUPED}": {**SFT_MEGATRON, "model.lora.rank": 8, "engine.expert_model_parallel_size": 2},
    "model.lora.rank": SFT_MEGATRON,
    "model.mtp.enable": {**SFT_MEGATRON, "model.mtp.enable_train": True},
    "model.mtp.enable_train": {**SFT_MEGATRON, "model.mtp.enable": True},
    **{
        f"model.mtp.{key}": {**SFT_MEGATRON, **learns("model.")}
        for key in ("detach_encoder", "mtp_loss_scaling_factor")
    },
    SFT_MOE + "z_loss_coeff": SFT_MEGATRON,
    SFT_MOE + "aux_loss_coeff": {**SFT_MEGATRON, SFT_MOE + "router_load_balancing_type": "aux_loss"},
    SFT_MOE + "router_load_balancing_type": {**SFT_MEGATRON, SFT_MOE + "aux_loss_coeff": 0.5},
    **CONTEXTS,
    "data.val_files": {"trainer.test_freq": 5},
    "data.val_max_samples": {"trainer.test_freq": 5},
    "trainer.resume_from_path": {},
    "trainer.save_freq": {},
    **dict.fromkeys(
        (
            *(f"data.{key}" for key in ("shuffle", "use_dynamic_bsz")),
            *(f"engine.{key}" for key in ("model_dtype", "dtype", "fsdp_size")),
            *(
                f"optim.{key}"
                for key in (
                    "optimizer",
                    "lr_scheduler_type",
                    "lr_warmup_steps",
                    "zero_indexed_step",
                )
            ),
        ),
        ENGINES,
    ),
    "optim.warmup_style": {"model.path": "policy"},
    **{
        key: {**ENGINES, "model.strategy": "veomni", "optim.lr_scheduler_type": "cosine"}
        for key in (
            "engine.ulysses_parallel_size",
            "engine.mixed_precision",
            "optim.lr_min",
            "optim.lr_start",
        )
    },
    "engine.expert_parallel_size": {**ENGINES, "model.strategy": "veomni"},
    "optim.lr_decay_ratio": {
        "model.path": "policy",
        "model.strategy": "veomni",
        "trainer.total_training_steps": 10,
    },
    **{
        key: {**ENGINES, "model.strategy": "torchtitan", "engine.data_parallel_shard_size": -1}
        for key in (
            *(f"engine.{kind}_parallel_size" for kind in ("tensor", "pipeline")),
            *(f"engine.data_parallel_{kind}_size" for kind in ("replicate", "shard")),
            *(f"optim.{key}" for key in ("decay_type", "name", "eps", "min_lr_factor")),
        )
    },
    **{
        key: {**ENGINES, "model.strategy": "automodel"}
        for key in (
            *(f"engine.{dim}_size" for dim in ("tp", "pp", "cp", "ep", "dp_replicate")),
            "optim.init_lr_ratio",
        )
    },
    "optim.master_weights": {**ENGINES, "model.strategy": "automodel", "engine.model_dtype": "bf16"},
    **narrow("optim.", {**ENGINES, "model.strategy": "automodel"}, "optimizer", "FusedAdam"),
    "optim.optimizer": {**ENGINES, "model.strategy": "automodel"},
    "optim.use_precision_aware_optimizer": {
        **SFT_MEGATRON,
        **dict.fromkeys(("optim." + key for key in MOMENTS), "bf16"),
    },
    **{f"engine.{dim}": {**ENGINES, "model.strategy": "mlite"} for dim in ("tp", "pp", "cp", "ep")},
    "data.max_token_len_per_gpu": {**ENGINES, "data.use_dynamic_bsz": True},
    **{
        f"optim.{key}": {**ENGINES, "optim.lr_scheduler_type": "cosine"}
        for key in ("min_lr_ratio", "num_cycles")
    },
    **{
        key: {**ENGINES, "model.strategy": "megatron"}
        for key in (
            *(f"engine.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")),
            "engine.expert_model_parallel_size",
            *(f"optim.{key}" for key in ("lr_decay_steps", "lr_decay_style", "lr_warmup_init", "min_lr")),
        )
    },
    **{
        f"optim.{key}": {
            **ENGINES,
            "model.strategy": "megatron",
            "optim.lr_decay_style": "WSD",
            "optim.lr_wsd_decay_steps": 5,
        }
        for key in ("lr_wsd_decay_style", "lr_wsd_decay_steps")
    },
}

ROWS = [
    (name, row)
    for name in ("verl-ppo", "verl-megatron-optim", "verl-eval", "verl-sft")
    for row in table(name)
    if row.status in ("mapped", "translated")
]


def another(row: Row, of: Dialect) -> Json:
    """Another value than the default, of the same kind. A section that is no section must be refused."""
    if row.key in OTHER:
        return OTHER[row.key]
    default = row.default
    if parts(row.key) in of.below:
        return 3
    if isinstance(default, str) and default.startswith("${"):
        default = of.row(default[2:-1]).default if default.count("${") == 1 else None  # type: ignore[union-attr]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return 2 * default + 1 if default >= 0 else 4
    if isinstance(default, str):
        return f"{default}x"
    return (
        4
        if any(word in row.key for word in ("size", "steps", "keep", "factor", "seed", "clip_ratio"))
        else "other"
    )


def file(given: Mapping[str, Json]) -> dict[str, Json]:
    """Dotted keys as the sections of a file; a last part * stands for the section itself."""
    out: dict[str, Json] = {}
    for name, value in given.items():
        *above, last = parts(name.removesuffix(".*"))
        around = out
        for part in above:
            around = around.setdefault(part, {})
        around[last] = {**around.get(last, {}), **value} if isinstance(value, dict) else value
    return out


@functools.cache
def translated(name: str, given: str) -> Translation:
    """The translation of a file with these keys (as JSON)."""
    return translate(file(json.loads(given)), dialect(name), origins={})


def said(made: Translation) -> set[str]:
    return {text for _, text in (*made.problems, *made.unbuilt)}


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name}:{row.key}" for name, row in ROWS])
def test_no_key_is_dead(name: str, row: Row) -> None:
    kind = "verl-ppo" if name == "verl-megatron-optim" else name
    own = MEGATRON if name == "verl-megatron-optim" else {}
    given = {**own, **CONTEXTS.get(row.key, {})} if kind == "verl-ppo" else SFT_CONTEXTS.get(row.key, {})
    base = translated(kind, json.dumps(given))
    assert not said(base), "the context itself is a file that works"
    changed = translated(kind, json.dumps({**given, row.key: another(row, dialect(kind))}))
    refused = any(row.key.removesuffix(".*") in text for text in said(changed))
    assert refused or (not said(changed) and changed.tree != base.tree), said(changed)


def test_every_context_belongs_to_a_key() -> None:
    names = {row.key for _, row in ROWS}
    assert (CONTEXTS.keys() | SFT_CONTEXTS.keys() | OTHER.keys()) <= names
