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
    if algorithm.kind == "labels" and cfg.train.tasks_per_step < 2:
        yield (
            "train.tasks_per_step",
            f"{cfg.train.tasks_per_step} reply per step: kto also needs the log-prob of each reply under another "
            "prompt of the step; give 2 or more (16 is usual)",
        )
    if algorithm.mix is not None:
        yield from _mix_problems(cfg, experts_per_step(cfg, algorithm))
    if algorithm.advantage == "distill":
        yield from _distill_problems(cfg, algorithm)


def _mix_problems(cfg: Config, experts: int) -> Iterator[Said]:
    train = cfg.train
    own = train.tasks_per_step - experts
    if not cfg.data.demonstrations:
        yield (
            "data.demonstrations",
            f"is empty, but algorithm.name={cfg.algorithm.name} mixes demonstrations with own rollouts: give their "
            "sources, with the columns prompt and response",
        )
    if min(own, experts) < train.minibatches:
        yield (
            "algorithm.mix.demonstration_ratio",
            f"train.tasks_per_step={train.tasks_per_step} has {experts} demonstrations and {own} own tasks, but each "
            f"of train.minibatches={train.minibatches} needs at least one of both: raise tasks_per_step, or choose a "
            "ratio closer to 0.5",
        )
    if train.shuffle_minibatches and train.minibatches > 1:
        yield (
            "train.shuffle_minibatches",
            "a mix spreads its demonstrations evenly over the minibatches, which shuffling would undo: set it to false",
        )


def _distill_problems(cfg: Config, algorithm: Resolved) -> Iterator[Said]:
    if cfg.reference.path is None:
        yield (
            "reference.path",
            "distill needs a teacher, and without a path the reference is the policy itself: give the folder of the "
            "teacher",
        )
    for key in ("reset_interval", "reset_interval_epochs"):
        if getattr(cfg.reference, key):
            yield f"reference.{key}", "would replace the teacher by the policy: leave it out with distill"
    if algorithm.dynamic_sampling and not cfg.rewards:
        yield (
            "algorithm.dynamic_sampling",
            "without rewards every group is uniform: set it to false, or give rewards",
        )
