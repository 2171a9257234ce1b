"""What follows from a config: everything derived, computed once, before torch is imported.

`plan` looks at one stage; `plans` at a whole run, and reports every problem of all stages at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.console import Group as Lines
from rich.table import Table

from whet.config import sizes
from whet.config.checks import hard_problems, unused
from whet.config.faults import listing, named
from whet.config.load import Loaded, stage_configs
from whet.config.recipes import Resolved, resolve
from whet.config.schema import Config, Optimizer, SamplingConfig
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
    keep: int
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
        """Disk for one checkpoint: weights and moments of every model that learns, and a reference of the run's own."""
        if self.shape is None or self.shape.parameters is None:
            return None
        count = self.shape.parameters
        models = 2 if self.needs_critic else 1
        reference = count * sizes.DTYPE_BYTES[self.dtype] if self.reference_saved else 0
        return models * sizes.checkpoint_bytes(count, self.dtype) + reference


# ---------------------------------------------------------------- making it


def plan(cfg: Config, *, rows: int | None = None, name: str = "main") -> Plan:
    """The plan of one stage's config (`stages` empty). Raises one ConfigError with all that cannot work.

    rows: training rows of one epoch; needed where `train.epochs` is given.
    """
    if cfg.stages:
        raise ConfigError("plan: this config has stages; plan each of `stage_configs(cfg)`, or use `plans`")
    problems = hard_problems(cfg)
    if problems:
        raise ConfigError(listing([("", f"{key}: {text}") for key, text in problems], f"stage '{name}'"))
    return _derive(cfg, rows=rows, name=name)


def plans(run: Loaded | Config, *, rows: Mapping[str, int] | None = None) -> tuple[Plan, ...]:
    """The plans of all stages. Refuses, beside what cannot work, keys that were set and can have no effect.

    rows: training rows of one epoch by stage name. Every problem of every stage stands in one ConfigError.
    """
    config = run.config if isinstance(run, Loaded) else run
    names = tuple(s.name for s in config.stages) or ("main",)
    stages = run.stages if isinstance(run, Loaded) else stage_configs(config)
    tree = config.model_dump(mode="json", exclude_unset=True)
    found: dict[tuple[str, str], str] = {}
    for n, (name, stage) in enumerate(zip(names, stages)):
        for key, text in hard_problems(stage):
            where = run.where(f"stages.{name}.{key}" if config.stages else key) if isinstance(run, Loaded) else ""
            label = f"{key} (stage '{name}')" if config.stages else key
            found.setdefault((where, text if config.stages else key + text), f"{label}: {text}")
    for path, text in unused(tree, stages):
        where = run.where(".".join(map(str, path))) if isinstance(run, Loaded) else ""
        found[(where, named(path, tree))] = f"{named(path, tree)}: {text}"
    problems = [(where, text) for (where, _), text in found.items()]
    problems += [("", f"stages: the name '{n}' is given twice") for n in sorted({n for n in names if names.count(n) > 1})]
    if problems:
        what = str(run.file) if isinstance(run, Loaded) and run.file else "the config"
        raise ConfigError(listing(problems, what))
    return tuple(_derive(s, rows=(rows or {}).get(name), name=name) for name, s in zip(names, stages))


def dtype_on(cfg: Config, device: str) -> Literal["float32", "bfloat16"]:
    """Dtype of the parameters on 'cpu' or 'cuda'."""
    return cfg.model.dtype or ("bfloat16" if device == "cuda" else "float32")
