"""verl's keys of generation (main_generation), which its document does not name: replies to a file of prompts.

Nothing of it is built yet; the table is there so that such a file is known for what it is.
"""

from __future__ import annotations

from whet.config.dialects.key import Key, Unbuilt, Values
from whet.config.dialects.verl_rules import Native
from whet.types import Json

_REPLIES = "writing a model's replies to a file of prompts, without training"

_DEFAULTS: dict[str, Json] = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.device": "cuda",
    "data.path": "~/data/rlhf/math/test.parquet",
    "data.prompt_key": "prompt",
    "data.n_samples": 5,
    "data.output_path": "/opt/tiger/math_Qwen2-7B-Instruct.parquet",
    "data.batch_size": 128,
    "model.path": "~/models/Qwen2-7B-Instruct",
    "model.external_lib": None,
    "model.trust_remote_code": False,
    "rollout.name": "vllm",
    "rollout.mode": "sync",
    "rollout.temperature": 1.0,
    "rollout.top_k": 50,
    "rollout.top_p": 0.7,
    "rollout.prompt_length": 1536,
    "rollout.response_length": 512,
    "rollout.dtype": "bfloat16",
    "rollout.gpu_memory_utilization": 0.5,
    "rollout.ignore_eos": False,
    "rollout.enforce_eager": True,
    "rollout.free_cache_engine": True,
    "rollout.load_format": "dummy_dtensor",
    "rollout.tensor_model_parallel_size": 1,
    "rollout.max_num_batched_tokens": 8192,
    "rollout.max_model_len": None,
    "rollout.max_num_seqs": 1024,
    "rollout.log_prob_micro_batch_size": None,
    "rollout.log_prob_micro_batch_size_per_gpu": 8,
    "rollout.use_fire_sampling": False,
    "rollout.do_sample": True,
    "rollout.disable_log_stats": True,
    "rollout.enable_chunked_prefill": True,
    "rollout.n": 1,
    "actor.strategy": "fsdp",
    "actor.ulysses_sequence_parallel_size": 1,
    "actor.fsdp_config.fsdp_size": -1,
    "ray_init.num_cpus": None,
    "ray_init.timeline_json_file": None,
}


def unbuilt(v: Values) -> Native:
    raise Unbuilt(f"data.output_path={v['data.output_path']}: {_REPLIES} is coming, not built yet")


GENERATION: tuple[Key, ...] = tuple(
    Key(
        name=name,
        status="coming",
        default=default,
        reason=_REPLIES,
        translate=unbuilt if name == "data.output_path" else None,
    )
    for name, default in _DEFAULTS.items()
)
