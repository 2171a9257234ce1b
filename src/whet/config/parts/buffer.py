"""The sections about what stands between exploring and training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.config.parts.base import Above0, Count, Fraction, NonNegative, Positive, Section


class Replay(Section):
    """Training on a group more than once."""

    queue: bool = False
    """Fresh and used groups wait in one queue, and a step is drawn from it by priority as soon as it holds enough: a
    step may be all used ones. For rollout.schedule=async. Fresh groups keep rollout.max_staleness, and in
    any so many steps on end a step's worth of them must have come, or training waits: give it room, 4 or more."""
    share: Fraction = 0.0
    """The part of a step's groups that were trained on before, rounded down. The first steps, when too few were, take
    fresh groups instead. The policy has moved on since they were sampled, so think of algorithm.correction. 0: none."""
    capacity: Positive = 10_000
    """Groups that may wait to be drawn. When it is full, the one of the lowest priority leaves."""
    priority: str = "linear_decay"
    """Which group is drawn first. linear_decay: policy version less `decay` per use, so new and seldom used ones.
    linear_decay_use_count_control_randomization: the same with noise (`sigma`) and at most `use_limit` uses. Or a
    function of yours, 'module:function'."""
    decay: float = 2.0
    """Versions that one use makes a group older by, for its priority."""
    use_limit: Positive | None = 3
    """Most uses of a group. null: no limit. linear_decay takes no notice of it."""
    sigma: NonNegative = 0.0
    """Standard deviation of noise on the priority, in versions. linear_decay has none."""
    cooldown_steps: Positive | None = 1
    """A group trained on at one step may be drawn again from so many steps later. Steps and not seconds, so that a
    resumed run draws what the unbroken one drew. null: no group is drawn again."""
    cooldown_s: NonNegative | None = None
    """The same in seconds of the clock, in place of cooldown_steps: then who is faster says what is drawn. With `queue`
    only. Default: steps are counted."""
    max_staleness: Count | None = None
    """Used groups of which a token was sampled by a policy older than this many versions are not drawn any more.
    Default: there is no limit."""


class Buffer(Section):
    """Where scored groups wait for the trainer."""

    replay: Replay = Field(default_factory=Replay)
    """Training on a group more than once."""

    url: str = "memory"
    """memory: in the trainer's process. For explorers and a trainer of their own: sqlite:///PATH (processes of one
    machine), files:///PATH (a folder that all machines see) or postgresql://USER@HOST:PORT/DATABASE (the password in
    PGPASSWORD). Three slashes before a path from the working directory, four before one from the root."""
    order: Literal["arrival", "newest", "task"] = "arrival"
    """rollout.schedule=async, what is trained on first: what came first; what came last; or the task that was asked
    first, waiting for it."""
    lease_s: Above0 = 300.0
    """Seconds after which an explorer that has not been heard of is given up and its tasks are asked of others."""
    explorer_name: str = "explorer"
    """Name of this explorer; every explorer of a run has its own. One that begins anew under its name goes on at once
    with the tasks it had."""
