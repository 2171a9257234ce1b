"""How training is spread over processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.config.parts.base import Above0, Count, Positive, Section


class Parallel(Section):
    """Ranks: processes that train together, with a GPU each, or on one CPU. Their number is dp_replicate * dp_shard *
    tp * cp * pp; with all 1 there are none, and training is in the run's own process. The result does not depend on it.
    """

    dp_replicate: Positive = 1
    """Whole copies of the models. Each learns from a part of the batch, and gradients are added up."""
    dp_shard: int = Field(default=1, ge=-1)
    """The same with every tensor cut, each rank keeping one part of it, its gradient and its optimizer state (FSDP2):
    less memory, more traffic. Together with dp_replicate: as many cut copies. -1: all GPUs of this machine that the
    other dims leave; on the CPU a number is needed."""
    tp: Positive = 1
    """Tensor parallelism: ranks that share each matrix. Divides attention heads, key/value heads and feed-forward
    size."""
    cp: Positive = 1
    """Context parallelism: ranks that share the tokens of a micro-batch. Divides the attention heads."""
    pp: Positive = 1
    """Pipeline parallelism: ranks that share the layers. Micro-batches flow through them one after the other (1F1B), so
    a step should have several: train.micro_batch_tokens or train.micro_batch_rollouts cut them."""
    pipeline_chunks: Positive = 1
    """Parts of the layers on each rank of pp. More (the interleaved schedule): ranks wait less for each other and
    send more. pp * pipeline_chunks is at most the number of layers."""
    ep: Positive = 1
    """Expert parallelism: as many neighbours among the dp_shard ranks share the experts. Divides dp_shard and the
    number of experts."""
    reshard_after_forward: bool = True
    """Free a layer's gathered tensors after its forward and gather them again for its backward. Without: more memory,
    less traffic."""
    wrap_min_num_params: Count = 0
    """Layers with fewer parameters are not gathered by themselves but with the rest of the model, at once. Default:
    every layer by itself."""
    prefetch: Count = 1
    """Layers that are gathered ahead of the one at work."""
    separate_ranks: tuple[Literal["critic", "reference"], ...] = ()
    """Models with ranks of their own, each as many as the policy has and laid out like those, with further GPUs; they
    compute while the others do. Also with all dims 1: one process for each. Default: all models share the policy's."""
    timeout_s: Above0 = 600.0
    """Longest time in which no rank finishes a micro-batch; then the run ends, and says where each rank is."""
