"""Learning rates by step: a peer's scheduler over a dummy optimizer, and whet's schedule as a function of the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whet.config.derived import Plan
from whet.config.schedules import factor, position


def dummy(lr: float = 1.0) -> torch.optim.Optimizer:
    """An optimizer of one parameter with this peak learning rate."""
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def of_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int, *increment: int) -> Tensor:
    """[steps] the learning rate of each optimizer step. increment: what Megatron's schedulers are told in each."""
    out = []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(*increment)
    return torch.tensor(out, dtype=torch.float64)


def of_updates(plan: Plan, steps: int) -> Tensor:
    """[optimizer steps] whet's learning rate in each, over so many training steps."""
    schedule, lr, each = plan.optimizer.schedule, plan.optimizer.lr, plan.minibatches * plan.passes
    assert lr is not None
    total = position(schedule, steps * each, updates_per_step=each)
    at = [position(schedule, update, updates_per_step=each) for update in range(steps * each)]
    return torch.tensor([lr * factor(schedule, step, total) for step in at], dtype=torch.float64)


def of_steps(plan: Plan, steps: int) -> Tensor:
    """[steps] the same at the begin of each training step."""
    return of_updates(plan, steps)[:: plan.minibatches * plan.passes]
