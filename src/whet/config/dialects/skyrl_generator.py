"""SkyRL's keys of the rollout engine and of sampling."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, mapped, translated
from whet.config.dialects.layout import FITTED
from whet.config.dialects.skyrl_learn import groups
from whet.config.dialects.skyrl_loop import EVALUATED, PLACED
from whet.config.dialects.skyrl_parts import dtype, evaluation, rollout_engine, training_sampling
from whet.config.dialects.skyrl_rules import (
    check_engine_memory,
    check_engine_mode,
    check_input_length,
    check_placement,
    check_update_group,
    layout,
)

SIZED = (
    "The embedded engine sizes itself by max_num_seqs and the longest sequence; no value changes a number."
)
SAMPLED = "top_k -1 is 0 here; the trainer divides logits by the training temperature, too."
SHARED_WEIGHTS = "The embedded engine reads the trainer's own weights: there is no update group to set up."

ENGINE: tuple[Key, ...] = (
    translated(
        "generator.model_dtype",
        dtype,
        "model.dtype",
        default="bfloat16",
        reason="bfloat16 on CUDA, float32 on a CPU, which is slower with bfloat16; float32 everywhere if asked for. "
        "Engine and trainer share one copy.",
    ),
    translated(
        "generator.run_engines_locally",
        rollout_engine,
        "rollout.engine",
        default=True,
        reason="The embedded engine stands in; false (inference servers) is coming and refused.",
    ),
    translated(
        "generator.num_inference_engines",
        layout,
        "rollout.replicas",
        default=1,
        reason=f"Engines, each whole on one GPU; a single one is the trainer's own. {PLACED} {FITTED}",
    ),
    translated(
        "generator.backend",
        rollout_engine,
        "rollout.engine",
        default="vllm",
        reason="The embedded engine stands in for vllm; sglang is remote only, as there, and so coming.",
    ),
    derived("generator.weight_sync_backend", check_update_group, default="nccl", reason=SHARED_WEIGHTS),
    derived("generator.inference_engine_tensor_parallel_size", check_placement, default=4, reason=PLACED),
    mapped("generator.n_samples_per_prompt", "rollout.group_size", default=5),
    *(
        derived(
            f"generator.{name}",
            check_engine_mode,
            default=True,
            reason="The embedded engine batches what comes; SkyRL's rule holds: async_engine=false needs batched=true.",
        )
        for name in ("async_engine", "batched")
    ),
    derived(
        "generator.max_input_length",
        check_input_length,
        default="${trainer.max_prompt_length}",
        reason="With one turn it is the prompt's limit, as there; with several at least that.",
    ),
    *(
        Key(
            name=f"generator.{name}",
            status="engine",
            native=("vllm",),
            default=default,
            harmless=(not default,),
            reason="vLLM; how tokens are computed, not which.",
        )
        for name, default in (
            ("enable_prefix_caching", True),
            ("enable_chunked_prefill", True),
            ("enforce_eager", False),
            ("vllm_v1_disable_multiproc", True),
        )
    ),
    derived("generator.max_num_batched_tokens", check_engine_memory, default=8192, reason=SIZED),
    derived("generator.gpu_memory_utilization", check_engine_memory, default=0.8, reason=SIZED),
    mapped("generator.max_num_seqs", "rollout.max_batch", default=1024),
    coming("generator.remote_inference_engine_urls", "inference servers", default=["127.0.0.1:8001"]),
    coming("generator.max_turns", "environments of several turns", default=1),
    derived(
        "generator.override_existing_update_group", check_update_group, default="auto", reason=SHARED_WEIGHTS
    ),
)


def _sampling(section: str, native: str) -> tuple[Key, ...]:
    training = section == "sampling_params"
    function = training_sampling if training else evaluation
    longest = 1024 if training else "${generator.sampling_params.max_generate_length}"
    return tuple(
        translated(
            f"generator.{section}.{name}",
            function,
            f"{native}.{ours}",
            default=default,
            reason=SAMPLED if training else EVALUATED,
        )
        for name, ours, default in (
            ("max_generate_length", "max_tokens", longest),
            ("temperature", "temperature", 1.0),
            ("top_p", "top_p", 1.0),
            ("min_p", "min_p", 0.0),
            ("top_k", "top_k", -1),
            ("*", "*", {}),
        )
    )


SAMPLING: tuple[Key, ...] = (
    mapped("generator.sampling_params", "rollout.sampling", default={}),
    *_sampling("sampling_params", "rollout.sampling"),
    coming(
        "generator.use_conversation_multi_turn",
        "environments of several turns",
        default=False,
        harmless=(True,),
    ),
    mapped("generator.eval_sampling_params", "eval.sampling", default={}),
    *_sampling("eval_sampling_params", "eval.sampling"),
    translated(
        "generator.eval_n_samples_per_prompt", evaluation, "eval.samples", default=1, reason=EVALUATED
    ),
    translated(
        "generator.zero_reward_on_non_stop",
        groups,
        "algorithm.groups.unfinished",
        default=False,
        reason="As the document says, in batched mode, too (which SkyRL leaves out).",
    ),
)
