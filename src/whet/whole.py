"""Whole models: in the process of the run, or, where nothing in it computes with one, in files.

In files, a model is a structure without values and a folder that has them (`models.published`). What needs a whole one
(to read or initialise it, to attach adapters, to export it) is done by a process that ends with it (`models.apart`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from whet.guard.line import OpenLines
from whet.models.apart import call
from whet.models.lora import refresh, twin
from whet.models.published import filled, structure_of, weights_of, without_values, write_own
from whet.training.engine import TrainEngine

T = TypeVar("T")

Make = Callable[[], PreTrainedModel]
"""Makes a model. To be done elsewhere it is a `functools.partial` of a module's function."""


@dataclass(frozen=True)
class Whole:
    """A whole model."""

    model: PreTrainedModel
    """Without values, if they are in files."""
    weights: Path | None = None
    """The folder that has the values; None: the model has them."""

    def maker(self) -> Make:
        """What gives the model with its values, here or, if they are in files, in any process."""
        if self.weights is None:
            return lambda: self.model
        return partial(_opened, structure_of(self.model), self.weights, self.model.device)

    def copied(self) -> Whole:
        """A frozen model of the same values. Parameters that are never trained are shared."""
        if self.weights is None:
            return Whole(twin(self.model))
        copy = without_values(structure_of(self.model), self.model.device)
        return Whole(copy.requires_grad_(False), self.weights)

    def keep(self, policy: TrainEngine) -> None:
        """Take what a policy has learned that began with this model."""
        if self.weights is None:
            _ = policy.module
        else:
            policy.write_weights(self.weights)


class Place(Protocol):
    """Where whole models are."""

    def made(self, name: str, make: Make) -> Whole:
        """The model of this name, which replaces the last one."""

    def do(self, job: Callable[[], T], *, what: str) -> T:
        """The result of a job that needs a whole model. what: it does, for errors."""

    def clear(self) -> None:
        """Ranks have all models: free what they took here."""


class Here:
    """In this process."""

    def made(self, name: str, make: Make) -> Whole:
        return Whole(make())

    def do(self, job: Callable[[], T], *, what: str) -> T:
        return job()

    def clear(self) -> None: ...


@dataclass(frozen=True)
class InFiles:
    """In files of `folder`, which is empty at first."""

    folder: Path
    device: torch.device
    """On which models are made."""
    threads: int
    imports: tuple[str, ...]
    beat: Callable[[str], object]
    open_lines: OpenLines | None = None
    """Starts the processes; None: as `models.apart.call` does."""

    def __post_init__(self) -> None:
        self.clear()

    def made(self, name: str, make: Make) -> Whole:
        weights = self.folder / name
        structure = self.do(partial(_stored, weights, make), what=f"make the {name}")
        return Whole(without_values(structure, self.device), weights)

    def do(self, job: Callable[[], T], *, what: str) -> T:
        return call(
            job,
            what=what,
            threads=self.threads,
            deterministic=self.device.type == "cpu",
            imports=self.imports,
            beat=self.beat,
            open_lines=self.open_lines,
        )

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _stored(weights: Path, make: Make) -> PreTrainedModel:
    """Write the values of a model, and give its structure."""
    model = make()
    write_own(weights, weights_of(model))
    return structure_of(model)


def _opened(structure: PreTrainedModel, weights: Path, device: torch.device) -> PreTrainedModel:
    model = filled(structure, weights, device)
    refresh(model)
    return model
