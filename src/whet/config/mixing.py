"""Demonstrations and labelled replies in a config: their number per step, and problems."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from whet.config.recipes import Resolved
from whet.config.schema import Config

Said = tuple[str, str]
"""(key, what is wrong with it)."""


def experts_per_step(cfg: Config, algorithm: Resolved) -> int:
    """Number of demonstrations in one step. The ratio is an exact decimal: 0.1 of 30 is 3, not 4."""
    if algorithm.mix is None:
        return 0
    return math.ceil(Fraction(str(algorithm.mix.demonstration_ratio)) * cfg.train.tasks_per_step)


def given_problems(cfg: Config, algorithm: Resolved) -> Iterator[Said]:
    """Problems of one stage."""
    if algorithm.mix is not None:
        yield from _mix_problems(cfg, experts_per_step(cfg, algorithm))


def _mix_problems(cfg: Config, experts: int) -> Iterator[Said]:
    train = cfg.train
    own = train.tasks_per_step - experts
    if min(own, experts) < train.minibatches:
        yield (
            "algorithm.mix.demonstration_ratio",
            f"train.tasks_per_step={train.tasks_per_step} has {experts} demonstrations and {own} own tasks, but each "
            f"of train.minibatches={train.minibatches} needs at least one of both: raise tasks_per_step, or choose a "
            "ratio closer to 0.5",
        )
