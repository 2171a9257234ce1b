"""What a config says of demonstrations and labelled replies: how many a step has, what cannot work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from whet.config.recipes import Resolved
from whet.config.schema import Config

Said = tuple[str, str]
"""(key, what is to be said of it)."""


def experts_per_step(cfg: Config, algorithm: Resolved) -> int:
    """Demonstrations among the tasks of one step. The ratio is taken as it is written: 0.1 of 30 is 3, not 4."""
    if algorithm.mix is None:
        return 0
    return math.ceil(Fraction(str(algorithm.mix.demonstration_ratio)) * cfg.train.tasks_per_step)


def given_problems(cfg: Config, algorithm: Resolved) -> Iterator[Said]:
    """What cannot work in one stage."""
    if algorithm.kind == "labels" and cfg.train.tasks_per_step < 2:
        yield (
            "train.tasks_per_step",
            f"{cfg.train.tasks_per_step} reply a step: kto compares each reply with what the policy says of the reply "
            "to another prompt of the step; give 2 or more (16 is usual)",
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
            f"algorithm.name={cfg.algorithm.name} mixes demonstrations among the policy's own rollouts: give their "
            "sources, with the columns prompt and response",
        )
    if min(own, experts) < train.minibatches:
        yield (
            "algorithm.mix.demonstration_ratio",
            f"of train.tasks_per_step={train.tasks_per_step} tasks {experts} are demonstrations and {own} the policy's "
            f"own; each of train.minibatches={train.minibatches} needs at least one of both: raise tasks_per_step, or "
            "choose a ratio nearer to 0.5",
        )
    if train.shuffle_minibatches and train.minibatches > 1:
        yield (
            "train.shuffle_minibatches",
            "a mix deals its demonstrations evenly to the minibatches, and shuffling would undo that: set it false",
        )


def _distill_problems(cfg: Config, algorithm: Resolved) -> Iterator[Said]:
    if cfg.reference.path is None:
        yield (
            "reference.path",
            "distill learns from a teacher, and without a path the reference is the policy itself: give the teacher's "
            "folder",
        )
    for key in ("reset_interval", "reset_interval_epochs"):
        if getattr(cfg.reference, key):
            yield f"reference.{key}", "would put the policy in the teacher's place: leave it out with distill"
    if algorithm.dynamic_sampling and not cfg.rewards:
        yield (
            "algorithm.dynamic_sampling",
            "without rewards every group is uniform: set it false, or give rewards",
        )
