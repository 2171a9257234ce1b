"""The settings of train.engine=simulated, under which a step waits and nothing is learned. Without torch."""

from __future__ import annotations

from collections.abc import Iterator

from whet.config.faults import argument_problems
from whet.config.schema import Config, TrainConfig
from whet.config.sections.base import NonNegative, Section

KEY = "train.engine_arguments"


class StepLengths(Section):
    """What stands for training."""

    step_s: NonNegative = 30.0
    """Seconds of a training step."""
    sync_s: NonNegative = 0.0
    """Seconds for which sampling pauses before a weight sync."""


def simulated(train: TrainConfig) -> StepLengths | None:
    """None: the engine trains. Raises ValidationError for settings that `problems` tells."""
    return StepLengths.model_validate(train.engine_arguments) if train.engine == "simulated" else None


def problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of train.engine=simulated in one stage's config."""
    if cfg.train.engine == "simulated":
        yield from argument_problems(KEY, StepLengths, cfg.train.engine_arguments)
