"""Cosmos-RL, policy and rollout: the model, the devices it lies on, the engine that samples; the profiler."""

from __future__ import annotations

from whet.config.dialects.cosmos_lora import adapters, trainable
from whet.config.dialects.cosmos_profile import SUB_PROFILER, profile
from whet.config.dialects.cosmos_run import chat, lengths, model, quantization, rollout, sampling, seed
from whet.config.dialects.cosmos_shared import (
    BATCH,
    EITHER,
    ENGINES,
    HUB,
    SIZES,
    size,
    sized,
    switch,
    vllm,
)
from whet.config.dialects.cosmos_steps import batch
from whet.config.dialects.key import Key, coming, derived, inert, mapped, translated
from whet.config.dialects.layout import FITTED

_PIECES = "A pipeline cuts its micro-batches in its own way; no number changes."
TURNS = "conversations of several turns, tools"
PROFILING = (
    "wait_steps, then warmup_steps, then active_steps that are recorded, once, from the run's first step; read where "
    "enable_profiler is true."
)

MODEL: tuple[Key, ...] = (
    translated(
        "policy.model_name_or_path",
        model,
        "model.path",
        default="Qwen/Qwen2.5-VL-7B-Instruct",
        reason="A local folder, or with policy.model_revision ORG/NAME. Code that comes with a model is never run.",
    ),
    translated("policy.model_revision", model, "model.path", default=None, reason=HUB),
    translated(
        "policy.model_max_length",
        lengths,
        "data.max_total_tokens",
        "data.max_prompt_tokens",
        "data.overlong",
        default=4096,
        reason="Prompt and reply together: a reply ends there; rows that are longer by themselves are left "
        "out and counted.",
    ),
    mapped("policy.model_gradient_checkpointing", "train.gradient_checkpointing", default=True),
    translated(
        "policy.trainable_map",
        trainable,
        "train.trainable",
        default=None,
        reason="Names of parameters or modules, the longer first; all others learn. A name that fits nothing is "
        "refused.",
    ),
    switch(
        "policy.enable_liger_kernel",
        "Kernels of others; whet's own are used whatever it says. They agree but for rounding.",
        default=False,
    ),
)

ADAPTERS: tuple[Key, ...] = tuple(
    translated(f"policy.lora.{name}", adapters, f"model.lora.{native}", default=None, reason=reason)
    for name, native, reason in (
        ("r", "rank", "8 where the section leaves it out."),
        ("lora_alpha", "alpha", "8.0 where the section leaves it out."),
        ("lora_dropout", "dropout", "0.0 where the section leaves it out."),
        (
            "target_modules",
            "targets",
            "all-linear, or a list of names. Null leaves it to the backend: all-linear here.",
        ),
        ("use_rslora", "rslora", "false where the section leaves it out."),
        ("modules_to_save", "modules_to_save", "By the end of their names."),
        ("alpha_pattern", "alpha_pattern", "The first that fits counts, as there."),
        ("r_pattern", "rank_pattern", "The first that fits counts, as there."),
        (
            "init_lora_weights",
            "init",
            "true is default, false random; gaussian, olora, pissa and pissa_niter_N too, and orthogonal. eva and "
            "loftq are coming.",
        ),
    )
)
"""Their defaults count only where the section stands; without it none of them has a value."""

POLICY_MESH: tuple[Key, ...] = (
    translated(
        "policy.parallelism.n_init_replicas",
        batch,
        "train.tasks_per_step",
        "train.parallel.dp_replicate",
        default=1,
        reason=f"{BATCH} Copies that train together. {FITTED}",
    ),
    sized("policy.parallelism.tp_size", "tp", default=2),
    sized("policy.parallelism.cp_size", "cp", default=1),
    sized("policy.parallelism.ep_size", "ep", default=1),
    translated(
        "policy.parallelism.dp_shard_size",
        batch,
        "train.minibatches",
        "train.tasks_per_step",
        "train.parallel.dp_shard",
        default=1,
        reason=f"{BATCH} Ranks that cut tensors. -1 is 1. {FITTED}",
    ),
    sized("policy.parallelism.pp_size", "pp", default=1),
    switch("policy.parallelism.pp_dynamic_shape", "Stages exchange any shapes, always.", default=False),
    size("policy.parallelism.pp_micro_batch_size", _PIECES, default=1),
    translated(
        "policy.parallelism.dp_replicate_size",
        batch,
        "train.tasks_per_step",
        "train.parallel.dp_replicate",
        default=1,
        reason="1 in RL; workers of an SFT job: every one trains on train_batch_per_replica.",
    ),
)

ROLLOUT_MESH: tuple[Key, ...] = (
    sized(
        "rollout.parallelism.n_init_replicas",
        "engines",
        default=1,
        reason="RL jobs; engines, each whole on one GPU; a single one is the trainer's own.",
    ),
    size("rollout.parallelism.tp_size", ENGINES, default=2),
    size("rollout.parallelism.cp_size", ENGINES, default=1),
    size("rollout.parallelism.ep_size", ENGINES, default=1),
    size("rollout.parallelism.dp_shard_size", ENGINES, default=-1, least=-1),
    size("rollout.parallelism.pp_size", ENGINES, default=1),
    switch("rollout.parallelism.pp_dynamic_shape", ENGINES, default=False),
    size("rollout.parallelism.pp_micro_batch_size", ENGINES, default=1),
    size("rollout.parallelism.dp_replicate_size", ENGINES, default=1),
)

ROLLOUT: tuple[Key, ...] = (
    vllm("rollout.enforce_eager", default=True),
    inert(
        "rollout.include_stop_str_in_output",
        "There is no key for stop texts, and an end token is always part of the reply.",
        default=False,
        harmless=EITHER,
    ),
    vllm("rollout.gpu_memory_utilization", default=0.8),
    vllm("rollout.enable_chunked_prefill", default=False),
    translated(
        "rollout.max_response_length",
        lengths,
        "rollout.sampling.max_tokens",
        default=2048,
        reason="And no further than policy.model_max_length.",
    ),
    translated(
        "rollout.n_generation",
        rollout,
        "rollout.group_size",
        "train.tasks_per_step",
        default=16,
        reason=BATCH,
    ),
    vllm("rollout.n_generation_to_batch", default=False),
    size(
        "rollout.batch_size",
        "All prompts of a step are asked for at once; the engine takes what it has room for.",
        default=1,
    ),
    translated(
        "rollout.quantization",
        quantization,
        "rollout.quantization",
        default="none",
        reason="RL jobs. fp8: a copy of the weights for the engine, one scale a row and one a token. Refused where the "
        "GPU has no such products.",
    ),
    translated(
        "rollout.seed", seed, "seed", default=None, reason="The run's seed; train.seed where it is null."
    ),
    vllm("rollout.vllm_use_flashinfer", default=False),
    vllm("rollout.backend", default="vllm", reason="vLLM or TensorRT-LLM (vllm_async, trtllm)"),
    translated(
        "rollout.sampling_config.temperature",
        sampling,
        "rollout.sampling.temperature",
        default=1.0,
        reason="RL jobs only. The trainer divides by train_policy.temperature.",
    ),
    translated(
        "rollout.sampling_config.top_p",
        sampling,
        "rollout.sampling.top_p",
        default=1.0,
        reason="RL jobs only.",
    ),
    translated(
        "rollout.sampling_config.top_k", sampling, "rollout.sampling.top_k", default=-1, reason="-1 is 0."
    ),
    translated(
        "rollout.sampling_config.repetition_penalty",
        sampling,
        "rollout.sampling.repetition_penalty",
        default=1.0,
        reason="RL jobs only.",
    ),
    vllm("rollout.sampling_config.use_flashinfer", default=False),
    coming("rollout.multi_turn_config.enable", TURNS, default=False),
    coming("rollout.multi_turn_config.enable_tools", TURNS, default=False, harmless=EITHER),
    translated(
        "rollout.multi_turn_config.enable_thinking",
        chat,
        "tokenizer.chat_arguments",
        default=False,
        reason="true: passed to the chat template, in conversations of one turn, too; false: the "
        "template's own default.",
    ),
    translated(
        "rollout.multi_turn_config.custom_chat_template_path",
        chat,
        "tokenizer.chat_template",
        default=None,
        reason="RL jobs; read in conversations of one turn, too.",
    ),
    coming("rollout.multi_turn_config.max_assistant_turns", TURNS, default=5, harmless=SIZES),
    coming("rollout.multi_turn_config.add_generation_prompt", TURNS, default=True, harmless=EITHER),
    coming("rollout.multi_turn_config.continue_final_message", TURNS, default=False, harmless=EITHER),
)

PROFILER: tuple[Key, ...] = (
    translated("profiler.enable_profiler", profile, "profile.steps", default=False, reason=PROFILING),
    translated(
        "profiler.enable_nsys",
        profile,
        "profile.tools",
        default=False,
        reason="Ranges for a run under nsys, at the same steps; it needs CUDA, and not both profilers at once.",
    ),
    derived(
        f"{SUB_PROFILER}.do_profile",
        profile,
        default=False,
        reason="A request while the run goes on, there; here a capture is what the other keys say.",
    ),
    *(
        translated(f"{SUB_PROFILER}.{name}", profile, native, default=default, reason=PROFILING)
        for name, native, default in (
            ("active_steps", "profile.steps", 1),
            ("warmup_steps", "profile.warmup", 1),
            ("wait_steps", "profile.steps", 1),
        )
    ),
    derived(
        f"{SUB_PROFILER}.rank_filter",
        profile,
        default=[],
        reason="Rank 0, which [] means too; there is one process.",
    ),
    *(
        translated(f"{SUB_PROFILER}.{name}", profile, f"profile.{native}", default=False, reason=PROFILING)
        for name, native in (
            ("record_shape", "shapes"),
            ("profile_memory", "allocations"),
            ("with_stack", "stack"),
        )
    ),
    switch(
        f"{SUB_PROFILER}.with_modules",
        "torch names the modules of TorchScript alone, and there is none; `stack` names the lines of code.",
        default=False,
    ),
)
