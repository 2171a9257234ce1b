"""How training is distributed over processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.config.sections.base import Above0, Count, Positive, Section


class ParallelConfig(Section):
    """Layout of the ranks: processes that train together, with one GPU each, or on the CPU. Their number is
    dp_replicate * dp_shard * tp * cp * pp; with all dims 1 there are no ranks, and the process of the run trains. The
    result does not depend on the layout."""

    dp_replicate: Positive = 1
    """Replicas of the models (data parallelism). Each replica trains on a part of the batch, and the gradients are
    summed."""
    dp_shard: int = Field(default=1, ge=-1)
    """Data parallelism with sharded tensors (FSDP2): each rank keeps one shard of every tensor, of its gradient and of
    its optimizer state, which takes less memory and more communication. With dp_replicate there are that many sharded
    replicas. -1: all GPUs of this machine that the other dims leave; on the CPU give a number."""
    tp: Positive = 1
    """Tensor parallelism: number of ranks that share each matrix. It must divide the attention heads, the key/value
    heads and the feed-forward size."""
    cp: Positive = 1
    """Context parallelism: number of ranks that share the tokens of a micro-batch. It must divide the attention
    heads."""
    pp: Positive = 1
    """Pipeline parallelism: number of ranks that share the layers. Micro-batches pass through the ranks one after the
    other (1F1B), so a step should have several: set train.micro_batch_tokens or train.micro_batch_rollouts."""
    pipeline_chunks: Positive = 1
    """Chunks of layers on each rank of pp. More than 1 (the interleaved schedule): ranks wait less for each other and
    send more data. pp * pipeline_chunks is at most the number of layers."""
    ep: Positive = 1
    """Expert parallelism: number of neighbouring dp_shard ranks that share the experts. It must divide dp_shard and the
    number of experts."""
    reshard_after_forward: bool = True
    """Free the gathered tensors of a layer after its forward and gather them again for its backward. false: more
    memory, less communication."""
    wrap_min_num_params: Count = 0
    """Minimum number of parameters of a layer that is gathered separately; smaller layers are gathered together with
    the rest of the model. (verl: wrap_policy.min_num_params) Default: every layer is gathered separately."""
    prefetch: Count = 1
    """Number of layers that are gathered in advance of the current one."""
    separate_ranks: tuple[Literal["critic", "reference"], ...] = ()
    """Models with separate ranks, on additional GPUs: as many ranks as the policy has, with the same layout. The models
    then compute at the same time. Also with all dims 1: one process per model. Default: all models share the ranks of
    the policy."""
    timeout_s: Above0 = 600.0
    """Longest time in which no rank finishes a micro-batch; after it the run ends and logs where each rank is."""
