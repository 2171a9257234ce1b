"""The optimizer and the schedule that SkyRL's strategies build: FSDP and Megatron, each by SkyRL's own code."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from whet.prove import schedules, settings
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs

FSDP = "skyrl.backends.skyrl_train.distributed.fsdp_strategy"
MEGATRON = "skyrl.backends.skyrl_train.distributed.megatron.optimizer"


def scheduler(strategy: str) -> str:
    """What builds the schedule."""
    if strategy == "megatron":
        return f"{MEGATRON}:get_megatron_optimizer_param_scheduler"
    return f"{FSDP}:get_scheduler"


def optimizer_of(strategy: str) -> str:
    """What builds the optimizer."""
    if strategy == "megatron":
        return f"{MEGATRON}:init_megatron_optim_config"
    return f"{FSDP}:FSDPStrategy._fsdp_init_train_model"


def rates(optim: Any, strategy: str, total: int | None, steps: int) -> Tensor:
    """[steps] the learning rate as a fraction of its peak. total: the length of the run that the scheduler is told."""
    optimizer, build = schedules.dummy(optim.lr), theirs("skyrl", scheduler(strategy))
    if strategy == "megatron":
        made = build(optimizer, optim, total or steps)
        return schedules.of_scheduler(made, optimizer, steps, 1) / optim.lr
    made = build(
        optim.scheduler, optimizer, num_warmup_steps=optim.num_warmup_steps, num_training_steps=total
    )
    return schedules.of_scheduler(made, optimizer, steps) / optim.lr


def optimizer(optim: Any, strategy: str, more: Mapping[str, Any]) -> Numbers:
    """The optimizer's numbers. more: options for Megatron-LM."""
    build = theirs("skyrl", optimizer_of(strategy))
    if strategy == "megatron":
        made = build(optim, dict(more))
        return settings.of_megatron(made)
    own = SimpleNamespace(
        _fsdp_init_model=lambda model, **told: model, optimizer_config=optim, total_training_steps=1
    )
    _, made, _ = build(own, torch.nn.Linear(2, 2), None, None)
    return settings.of_optimizer([made], optim.max_grad_norm)
