"""Learning rates by step: a peer's schedule over a dummy optimizer, and whet's as a function of the step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from peers import ours
from peers.cases import Case
from peers.table import Numbers, Row
from whet.config.schedules import factor
from whet.types import Json

TOTAL = 40
"""Steps of the schedule."""


def factors(scheduler: Any, optimizer: torch.optim.Optimizer) -> Numbers:
    """The learning rates of steps 0 to TOTAL - 1; the peak is 1."""
    out = []
    for _ in range(TOTAL):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return {"factor": torch.tensor(out, dtype=torch.float64)}


def dummy() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def by_verl(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """Of `get_*_schedule_with_warmup`, which take what they name of the optimizer's section."""
    mine = {key.rpartition(".")[2]: value for key, value in keys.items()}
    offered = {
        "num_warmup_steps": mine.get("lr_warmup_steps"),
        "num_training_steps": TOTAL,
        "min_lr_ratio": mine.get("min_lr_ratio"),
    }
    taken = inspect.signature(function).parameters
    optimizer = dummy()
    return factors(
        function(optimizer, **{name: value for name, value in offered.items() if name in taken}), optimizer
    )


def schedule(row: Row, case: Case) -> Numbers:
    """Whet's factors of the policy's learning rate."""
    made = ours.config(row).train.optimizer.schedule
    return {"factor": torch.tensor([factor(made, step, TOTAL) for step in range(TOTAL)], dtype=torch.float64)}
