"""The optimizer and the schedule that verl's engines build: FSDP, Megatron and VeOmni, each by verl's own code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from whet.prove import schedules, settings
from whet.prove.checks import NotComparable
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs

CONFIGS = "verl.workers.config.optimizer"
MEGATRON = "verl.utils.megatron.optimizer"
MEGATRON_OPTIONS = "megatron.core.optimizer.optimizer_config"
MEGATRON_SCHEDULER = f"{MEGATRON}:get_megatron_optimizer_param_scheduler"


@dataclass(frozen=True, kw_only=True)
class VerlEngine:
    """Where an engine's code is."""

    section: str
    """verl's class of the section `optim`."""
    path: str
    """The engine's class; empty: Megatron's, which is made by functions."""
    defaults: str
    """The name of verl's default files for it."""

    @property
    def scheduler(self) -> str:
        """What builds the schedule."""
        return f"{self.path}._build_lr_scheduler" if self.path else MEGATRON_SCHEDULER

    @property
    def optimizer(self) -> str:
        """What builds the optimizer."""
        return f"{self.path}._build_optimizer" if self.path else f"{MEGATRON}:init_megatron_optim_config"


FSDP = VerlEngine(
    section="FSDPOptimizerConfig",
    path="verl.workers.engine.fsdp.transformer_impl:FSDPEngine",
    defaults="fsdp",
)
ENGINES: Mapping[str, VerlEngine] = {
    "fsdp": FSDP,
    "fsdp2": FSDP,
    "fsdp_turbo": FSDP,  # with kernels of its own
    "megatron": VerlEngine(section="McoreOptimizerConfig", path="", defaults="megatron"),
    "veomni": VerlEngine(
        section="VeOmniOptimizerConfig",
        path="verl.workers.engine.veomni.transformer_impl:VeOmniEngine",
        defaults="veomni",
    ),
}
"""By the key `strategy`."""


def engine(strategy: str) -> VerlEngine:
    """Raises NotComparable for an engine that is not called here."""
    if strategy not in ENGINES:
        raise NotComparable(f"the proof calls the engines {', '.join(ENGINES)}; this file has {strategy}")
    return ENGINES[strategy]


def read(optim: Mapping[str, Any], strategy: str, total: int, peer: str = "verl") -> Any:
    """verl's own reading of the section `optim`, which knows former names of keys, for a run of `total` steps.
    peer: who uses verl's engines."""
    section = theirs(peer, f"{CONFIGS}:{engine(strategy).section}")
    known = {each.name for each in fields(section)}
    return section(**{**{k: v for k, v in optim.items() if k in known}, "total_training_steps": total})


def rates(optim: Mapping[str, Any], strategy: str, total: int, steps: int, peer: str = "verl") -> Tensor:
    """[steps] the learning rate as a fraction of its peak, by the scheduler of a run of `total` steps."""
    told, called = read(optim, strategy, total, peer), theirs(peer, engine(strategy).scheduler)
    optimizer = schedules.dummy(told.lr)
    if not engine(strategy).path:
        scheduler = called(optimizer, told)
        return schedules.of_scheduler(scheduler, optimizer, steps, 1) / told.lr
    scheduler = called(SimpleNamespace(optimizer_config=told, rank=1), optimizer)
    return schedules.of_scheduler(scheduler, optimizer, steps) / told.lr


def optimizer(optim: Mapping[str, Any], strategy: str, peer: str = "verl") -> Numbers:
    """The optimizer's numbers."""
    told, called = read(optim, strategy, 1, peer), theirs(peer, engine(strategy).optimizer)
    if not engine(strategy).path:
        with mock.patch(f"{MEGATRON_OPTIONS}.is_te_min_version", return_value=True):  # where moments are kept
            made = called(told)
        return settings.of_megatron(made)
    module = torch.nn.Linear(2, 2)
    made = called(SimpleNamespace(optimizer_config=told), module)
    return settings.of_optimizer([made], told.clip_grad)
