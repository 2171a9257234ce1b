"""SkyRL (skyrl-train, configuration overview of June 2025): every key of its document, and what newer files add.

Defaults are the document's. What runs in several processes there runs in one here: sizes of machines only enter
SkyRL's own batch-size rules, since gradients are normalised over the whole mini batch, however it is spread.
"""

from __future__ import annotations

from whet.config.dialects.key import Key
from whet.config.dialects.skyrl_generator import ENGINE, SAMPLING
from whet.config.dialects.skyrl_latest import LATEST
from whet.config.dialects.skyrl_loop import CHECKPOINTS, DATA, EVALUATION, PLACEMENT, TRACKING, TRAINING
from whet.config.dialects.skyrl_models import ALGORITHM, CRITIC, POLICY, REFERENCE
from whet.config.dialects.skyrl_newer import NEWER

SKYRL: tuple[Key, ...] = (
    *DATA,
    *PLACEMENT,
    *TRAINING,
    *EVALUATION,
    *CHECKPOINTS,
    *TRACKING,
    *POLICY,
    *CRITIC,
    *REFERENCE,
    *ALGORITHM,
    *ENGINE,
    *SAMPLING,
    *NEWER,
    *LATEST,
)

_MOVED = (
    "model_dtype",
    "run_engines_locally",
    "backend",
    "weight_sync_backend",
    "async_engine",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enforce_eager",
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "max_num_seqs",
    "vllm_v1_disable_multiproc",
)

ALIASES: dict[str, str] = {
    "train_data": "data.train_data",
    "val_data": "data.val_data",
    "trainer.algorithm.policy_loss_type": "trainer.algorithm.ppo_loss_type",
    "trainer.remove_microbatch_padding": "trainer.use_sample_packing",
    "generator.inference_engine.num_engines": "generator.num_inference_engines",
    "generator.inference_engine.tensor_parallel_size": "generator.inference_engine_tensor_parallel_size",
    "generator.inference_engine.external_server_urls": "generator.remote_inference_engine_urls",
    "generator.inference_engine.external_proxy_url": "generator.remote_inference_engine_urls",
    **{f"generator.inference_engine.{name}": f"generator.{name}" for name in _MOVED},
}
"""A name of a newer version (or of the document's mis-indented sample, the first two) -> the name in `SKYRL`."""
