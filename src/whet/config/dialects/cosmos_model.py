"""Cosmos-RL, policy and rollout: the model, the devices it lies on, the engine that samples; the profiler."""

from __future__ import annotations

from whet.config.dialects.cosmos_run import chat, lengths, rollout, sampling, seed
from whet.config.dialects.cosmos_shared import BATCH, EITHER, HUB, WHOLE, size, vllm
from whet.config.dialects.cosmos_steps import batch
from whet.config.dialects.key import Key, coming, inert, mapped, translated

LORA = "low-rank adapters, which the section switches on"
TURNS = "conversations of several turns, tools"
PROFILING = "the profiler"

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
    coming("policy.trainable_map", "training a part of the parameters", default=None, harmless=({},)),
    coming(
        "policy.enable_liger_kernel",
        "fused CUDA kernels; they change no number beyond rounding",
        default=False,
        harmless=EITHER,
    ),
)

ADAPTERS: tuple[Key, ...] = tuple(
    coming(f"policy.lora.{name}", f"{LORA}; {name} is then {default}", default=None)
    for name, default in (
        ("r", 8),
        ("lora_alpha", 8.0),
        ("lora_dropout", 0.0),
        ("target_modules", None),
        ("use_rslora", False),
        ("modules_to_save", None),
        ("alpha_pattern", None),
        ("r_pattern", None),
        ("init_lora_weights", True),
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
    coming("profiler.enable_profiler", PROFILING, default=False),
    coming("profiler.enable_nsys", "Nsight Systems", default=False),
    coming("profiler.sub_profiler_config.do_profile", PROFILING, default=False),
    size("profiler.sub_profiler_config.active_steps", PROFILING, default=1),
    size("profiler.sub_profiler_config.warmup_steps", PROFILING, default=1),
    size("profiler.sub_profiler_config.wait_steps", PROFILING, default=1),
    coming("profiler.sub_profiler_config.rank_filter", PROFILING, default=[], harmless=([0],)),
    coming("profiler.sub_profiler_config.record_shape", PROFILING, default=False, harmless=EITHER),
    coming("profiler.sub_profiler_config.profile_memory", PROFILING, default=False, harmless=EITHER),
    coming("profiler.sub_profiler_config.with_stack", PROFILING, default=False, harmless=EITHER),
    coming("profiler.sub_profiler_config.with_modules", PROFILING, default=False, harmless=EITHER),
)
