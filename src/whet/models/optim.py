"""AdamW and its learning-rate schedule.

Parameters that are not float32 get a float32 master copy: at learning rates of RL (1e-6) a bfloat16 weight
would not move at all (its steps are 2^-8 of its size).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from whet.config.schema import Optimizer as OptimizerConfig
from whet.config.schema import Schedule
from whet.types import CheckpointError


def factor(schedule: Schedule, step: int, total: int) -> float:
    """What the peak learning rate is multiplied with in optimizer step `step` (from 0) of `total`."""
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = math.floor(schedule.warmup_fraction * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    low = schedule.min_factor
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "wsd":
        decay = max(1, math.floor(schedule.decay_fraction * total))
        done = min(1.0, max(0.0, (step - (total - decay)) / decay))
        return 1.0 - (1.0 - low) * done
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule.kind == "linear":
        return 1.0 - (1.0 - low) * done
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * done))


class AdamW:
    """torch's AdamW over named parameters, with master weights, clipping and the schedule."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], cfg: OptimizerConfig, *, total_steps: int
    ) -> None:
        self.cfg, self.total_steps, self.step_count = cfg, total_steps, 0
        self.parameters = {name: p for name, p in named if p.requires_grad}
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }
        decayed = [p for p in self.masters.values() if p.ndim > 1]
        plain = [p for p in self.masters.values() if p.ndim <= 1]
        self.inner = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": cfg.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=cfg.lr,
            betas=cfg.betas,
            eps=cfg.eps,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.cfg.lr * factor(self.cfg.schedule, self.step_count, self.total_steps)

    def zero_grad(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def clip(self) -> float:
        """Clip the gradient's norm in place; returns the norm before (float32)."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        value = float(norm)
        if self.cfg.grad_clip is not None and math.isfinite(value) and value > self.cfg.grad_clip:
            torch._foreach_mul_(grads, self.cfg.grad_clip / (value + 1e-6))
        return value

    @torch.no_grad()
    def step(self) -> None:
        for name, p in self.parameters.items():
            if self.masters[name] is not p:
                self.masters[name].grad = None if p.grad is None else p.grad.float()
        for group in self.inner.param_groups:
            group["lr"] = self.lr
        self.inner.step()
        for name, p in self.parameters.items():
            if self.masters[name] is not p:
                p.copy_(self.masters[name])
                self.masters[name].grad = None
        self.step_count += 1

    def skip(self) -> None:
        """Count a step without taking it: the schedule goes on, moments and weights stay."""
        self.step_count += 1

    def state(self) -> dict[str, Tensor]:
        """Flat tensors: `exp_avg.NAME`, `exp_avg_sq.NAME`, `steps.NAME`, and `master.NAME` where there is one."""
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.inner.state.get(master, {}).items():
                out[f"{'steps' if key == 'step' else key}.{name}"] = value.detach()
            if master is not self.parameters[name]:
                out[f"master.{name}"] = master.detach()
        return out

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], step_count: int) -> None:
        self.step_count = step_count
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(_wanted(tensors, f"master.{name}", master))
            if f"steps.{name}" in tensors:
                self.inner.state[master] = {
                    "step": tensors[f"steps.{name}"].clone(),
                    "exp_avg": _wanted(tensors, f"exp_avg.{name}", master).clone(),
                    "exp_avg_sq": _wanted(tensors, f"exp_avg_sq.{name}", master).clone(),
                }


def _wanted(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    found = tensors.get(name)
    if found is None or found.shape != like.shape:
        raise CheckpointError(
            f"optimizer state {name!r}: expected shape {tuple(like.shape)}, "
            f"found {'nothing' if found is None else tuple(found.shape)}; the checkpoint is from another model"
        )
    return found.to(like.device, like.dtype)
