"""How DeepSpeed trains, where it is the train engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from whet.config.sections.base import Positive, Section

Place = Literal["none", "cpu", "nvme"]


class DeepSpeedConfig(Section):
    """DeepSpeed's ZeRO, with train.engine=deepspeed: it shards the models over the ranks of train.parallel.dp_shard.
    Batches, optimizer, clipping, schedule and dtypes stay those of `train` and `model`, and gradients stay sums with
    global weights, so numbers differ from train.engine=torch by rounding alone."""

    stage: Literal[1, 2, 3] | None = None
    """What is sharded: 1 optimizer state; 2 gradients, too; 3 parameters, too. Stage 0 of DeepSpeed shards nothing:
    train.engine=torch with train.parallel.dp_replicate. Default: that of `config`, else 3."""
    offload_optimizer: Place | None = None
    """Where moments and float32 weights lie, and are updated: none (on the device), cpu (in the host's memory), nvme
    (stage 3 alone; on a disk, with zero_optimization.offload_optimizer.nvme_path in `config`). Default: that of
    `config`, else none."""
    offload_parameters: Place | None = None
    """Where parameters lie while they do not compute (stage 3). Default: that of `config`, else none."""
    hpz_partition_size: Positive | None = None
    """Stage 3: number of neighbouring ranks, usually those of a machine, that keep a second copy of the parameters
    between them, from which backward gathers (hpZ of ZeRO++). Default: that of `config`, else 1: no second copy."""
    config: str | dict[str, Any] = Field(default_factory=dict)
    """A deepspeed_config: a JSON file, or a table. What whet sets may be left out, "auto", or equal (batch sizes,
    gradient accumulation, clipping, optimizer, bf16); where it differs, or changes what is trained (fp16, schedulers,
    elasticity ...), it is refused. All else is passed on."""
