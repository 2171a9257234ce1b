"""What follows from one stage of a config, as numbers. `whet plan FILE` prints them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from whet.config import sizes
from whet.config.recipes import Resolved
from whet.config.schema import Optimizer, SamplingConfig
from whet.config.sizes import Shape
from whet.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One stage, everything decided that needs neither data nor device."""

    name: str
    algorithm: Resolved
    rows: int | None
    """Training rows of one epoch, if they are known."""
    total_steps: int | None
    """None: given as epochs, and the rows are not known yet."""
    tasks_per_step: int
    group_size: int
    """Rollouts of one task: 1 for demonstrations, 2 for preferences."""
    minibatches: int
    passes: int
    critic_warmup_steps: int
    optimizer: Optimizer
    prompt_tokens: int
    reply_tokens: int
    """The longer of training's and evaluation's limit."""
    max_batch: int
    eval_sampling: SamplingConfig
    """Greedy with the training limits, and `eval.sampling` put over it key by key."""
    evaluates: bool
    dtype: Literal["float32", "bfloat16"]
    """Of the parameters; float32 where machine.device=auto leaves it open."""
    dtype_open: bool
    """On CUDA it will be bfloat16."""
    threads: int
    shape: Shape | None
    """None: the model's folder is not on this machine."""
    vocab_is_bound: bool
    """The tokenizer is yet to be built: the vocabulary, and so the parameters, are at most this."""
    keep: int
    """Checkpoints kept."""
    kv_cache_mb: int | None
    """The user's limit."""
    reference_saved: bool

    @property
    def steps(self) -> int:
        """Training steps."""
        if self.total_steps is None:
            raise ConfigError("train.epochs: the number of steps follows from the rows: plan(cfg, rows=...)")
        return self.total_steps

    @property
    def rollouts_per_step(self) -> int:
        return self.tasks_per_step * self.group_size

    @property
    def tasks_per_minibatch(self) -> int:
        return self.tasks_per_step // self.minibatches

    @property
    def rollouts_per_minibatch(self) -> int:
        return self.rollouts_per_step // self.minibatches

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one training step."""
        return self.minibatches * self.passes

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy in the whole stage: what its schedule runs over."""
        return (self.steps - self.critic_warmup_steps) * self.updates_per_step

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps of the policy's linear warm-up."""
        schedule = self.optimizer.schedule
        if schedule.warmup_steps is not None:
            return schedule.warmup_steps
        return math.floor(schedule.warmup_fraction * self.optimizer_steps)

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.needs_reference

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.needs_critic

    @property
    def max_sequence_tokens(self) -> int:
        return self.prompt_tokens + self.reply_tokens

    @property
    def generates(self) -> bool:
        """Whether a rollout engine is needed at all."""
        return self.algorithm.kind == "online" or self.evaluates

    @property
    def kv_cache_bytes(self) -> int | None:
        """What max_batch rows of full length need, or the user's limit."""
        if self.shape is None or not self.generates:
            return None if self.generates else 0
        if self.kv_cache_mb is not None:
            return self.kv_cache_mb * 2**20
        return self.shape.kv_bytes(rows=self.max_batch, tokens=self.max_sequence_tokens, dtype=self.dtype)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by what they are for; empty if the model's size is not known. Activations come on top."""
        if self.shape is None or self.shape.parameters is None:
            return {}
        count = self.shape.parameters
        out = {"policy with gradients and Adam": sizes.train_bytes(count, self.dtype)}
        if self.needs_reference:
            out["reference"] = count * sizes.DTYPE_BYTES[self.dtype]
        if self.needs_critic:
            out["critic with gradients and Adam"] = sizes.train_bytes(count, self.dtype)
        if self.generates:
            out["KV cache"] = self.kv_cache_bytes or 0
        return out

    @property
    def checkpoint_bytes(self) -> int | None:
        """Disk for one checkpoint: weights and moments of all that learns, and the run's own reference."""
        if self.shape is None or self.shape.parameters is None:
            return None
        count = self.shape.parameters
        models = 2 if self.needs_critic else 1
        reference = count * sizes.DTYPE_BYTES[self.dtype] if self.reference_saved else 0
        return models * sizes.checkpoint_bytes(count, self.dtype) + reference
