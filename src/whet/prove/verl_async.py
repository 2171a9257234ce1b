"""The sizes of verl's fully asynchronous trainer, by its own rollouter, which counts for both."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig, OmegaConf

from whet.config.derived import Plan
from whet.prove.checks import scalars
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs

MODULE = "verl.experimental.fully_async_policy.fully_async_rollouter"
ROLLOUTER = f"{MODULE}:FullyAsyncRollouter"
COUNTS = f"{ROLLOUTER}.set_max_required_samples"


def is_its(config: Any) -> bool:
    """Whether a file, or verl's reading of one, is of the fully asynchronous trainer."""
    return "async_training" in config


def defaults(megatron: bool) -> DictConfig:
    """What its document adds to that of the PPO trainer."""
    folder = Path(theirs("verl", "verl.experimental.fully_async_policy:__file__")).parent / "config"
    found: Any = OmegaConf.load(folder / f"fully_async_ppo{'_megatron' * megatron}_trainer.yaml")
    return OmegaConf.masked_copy(found, [key for key in found if key not in ("hydra", "defaults")])


def counted(config: DictConfig, rows: int) -> Any:
    """A rollouter over so many rows that has counted what it may ask for; nothing of it runs."""
    made = theirs("verl", ROLLOUTER).__ray_metadata__.modified_class
    own = made.__new__(made)
    own._init_dump_executor = lambda: None
    own.llm_server_manager = SimpleNamespace(get_active_server_count=lambda: 1)
    patched = {
        "create_rl_dataset": lambda *given, **named: range(rows),
        "create_rl_sampler": lambda given, rows: torch.utils.data.SequentialSampler(rows),
        "ValidationGenerationsLogger": mock.Mock(),
    }
    with ExitStack() as stack:
        for name, double in patched.items():
            stack.enter_context(mock.patch(f"{MODULE}.{name}", double))
        own.__init__(OmegaConf.create(config), None)

    async def count() -> None:
        own._init_async_objects()
        await own.set_max_required_samples()

    asyncio.run(count())
    return own


def steps(config: DictConfig, rows: int) -> int:
    """The trainer takes required_samples from the queue for a step, and ends where there are fewer."""
    own = counted(config, rows)
    return int(own.total_rollout_steps // own.required_samples)


def tasks(config: DictConfig) -> int:
    """Of a step."""
    return int(counted(config, 1).required_samples)


def ahead(config: DictConfig) -> Numbers:
    """Steps between two weight syncs, and the most steps by which weights are behind those that are trained when the
    last task that was asked of them has its turn."""
    own = counted(config, 1)
    return scalars(
        steps_of_a_sync=config.async_training.trigger_parameter_sync_step,
        most_steps_behind=math.ceil(own.max_required_samples / own.required_samples) - 1,
    )


def our_ahead(plan: Plan) -> Numbers:
    rollout = plan.cfg.rollout
    return scalars(
        steps_of_a_sync=rollout.sync_interval,
        most_steps_behind=rollout.max_staleness + rollout.sync_interval - 1,
    )
