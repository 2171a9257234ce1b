"""Cosmos-RL, policy and rollout: the model, the devices it lies on, the engine that samples; the profiler."""

from __future__ import annotations

from whet.config.dialects.cosmos_lora import adapters, trainable
from whet.config.dialects.cosmos_profile import SUB_PROFILER, profile
from whet.config.dialects.cosmos_run import chat, lengths, rollout, sampling, seed
from whet.config.dialects.cosmos_shared import BATCH, EITHER, HUB, WHOLE, size, vllm
from whet.config.dialects.cosmos_steps import batch
from whet.config.dialects.key import Key, coming, derived, inert, mapped, translated

TURNS = "conversations of several turns, tools"
PROFILING = (
    "wait_steps, then warmup_steps, then active_steps that are recorded, once, from the run's first step; read where "
    "enable_profiler is true."
)

MODEL: tuple[Key, ...] = (
    mapped(
        "policy.model_name_or_path",
        "model.path",
        default="Qwen/Qwen2.5-VL-7B-Instruct",
        reason="A local folder. Code that comes with a model is never run.",
    ),
    coming("policy.model_revision", HUB, default=None, harmless=("", "main")),
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
    coming(
        "policy.enable_liger_kernel",
        "fused CUDA kernels; they change no number beyond rounding",
        default=False,
        harmless=EITHER,
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
    translated("policy.parallelism.n_init_replicas", batch, "train.tasks_per_step", default=1, reason=BATCH),
    size("policy.parallelism.tp_size", WHOLE, default=2),
    size("policy.parallelism.cp_size", WHOLE, default=1),
    size("policy.parallelism.ep_size", WHOLE, default=1),
    translated(
        "policy.parallelism.dp_shard_size",
        batch,
        "train.minibatches",
        "train.tasks_per_step",
        default=1,
        reason=f"{BATCH} -1 is 1.",
    ),
    size("policy.parallelism.pp_size", WHOLE, default=1),
    coming("policy.parallelism.pp_dynamic_shape", WHOLE, default=False, harmless=EITHER),
    size("policy.parallelism.pp_micro_batch_size", WHOLE, default=1),
    translated(
        "policy.parallelism.dp_replicate_size",
        batch,
        "train.tasks_per_step",
        default=1,
        reason="1 in RL; workers of an SFT job: every one trains on train_batch_per_replica.",
    ),
)

ROLLOUT_MESH: tuple[Key, ...] = (
    size(
        "rollout.parallelism.n_init_replicas",
        "several rollout engines; one here serves all, slower",
        default=1,
    ),
    size("rollout.parallelism.tp_size", WHOLE, default=2),
    size("rollout.parallelism.cp_size", WHOLE, default=1),
    size("rollout.parallelism.ep_size", WHOLE, default=1),
    size("rollout.parallelism.dp_shard_size", WHOLE, default=-1),
    size("rollout.parallelism.pp_size", WHOLE, default=1),
    coming("rollout.parallelism.pp_dynamic_shape", WHOLE, default=False, harmless=EITHER),
    size("rollout.parallelism.pp_micro_batch_size", WHOLE, default=1),
    coming("rollout.parallelism.dp_replicate_size", WHOLE, default=1),
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
        "asking engines for few prompts at once; all prompts of a step are asked for at once",
        default=1,
    ),
    coming("rollout.quantization", "rollouts in 8 bits", default="none"),
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
    size("rollout.multi_turn_config.max_assistant_turns", TURNS, default=5),
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
    coming(f"{SUB_PROFILER}.with_modules", "modules in a trace", default=False, harmless=EITHER),
)
