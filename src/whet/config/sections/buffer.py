"""Sections about the buffer between explorers and the trainer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from whet.config.sections.base import Above0, Count, Fraction, Positive, Seconds, Section


class ReplayConfig(Section):
    """Training on a group more than once."""

    queue: bool = False
    """Keep fresh and used groups in one queue. Each step is drawn from the queue by priority as soon as the queue holds
    enough groups; a step may consist of used groups only. Needs rollout.schedule=async. Fresh groups keep to
    rollout.max_staleness, and within every rollout.max_staleness consecutive steps one step's worth of fresh groups
    must arrive, else training waits: set rollout.max_staleness to 4 or more."""
    share: Fraction = 0.0
    """Share of the groups of a step that were trained on before, rounded down. The first steps use fresh groups
    instead, until enough used groups exist. The policy has changed since these groups were sampled, so consider
    algorithm.correction. 0: none."""
    capacity: Positive = 10_000
    """Maximum number of groups that may wait to be drawn. When the buffer is full, the group with the lowest priority
    is removed."""
    priority: str | dict[str, Any] = "linear_decay"
    """Priority function: the group with the highest priority is drawn first. A name, a table of its settings
    ({name: linear_decay, decay: 1.0}), or your own function, 'package.module:name', with the settings of its
    signature."""
    cooldown: Positive | Seconds | None = 1
    """Number of steps after which a group may be drawn again: a resumed run draws the same groups as an uninterrupted
    one. `30 s`: seconds instead, so that the draws depend on the speed of the processes; only with `queue`. A resumed
    run goes on with the seconds that were left; in a trainer with explorers in other processes the time between counts,
    too. null: no group is drawn again."""
    max_staleness: Count | None = None
    """Maximum age of a used group, in versions: a group with a token from an older policy is not drawn any more.
    Default: no limit."""


class BufferConfig(Section):
    """Where scored groups wait until the trainer takes them."""

    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """Training on a group more than once."""

    url: str = "memory"
    """Location of the buffer. memory: in the process of the trainer. For explorers and a trainer in separate processes:
    sqlite:///PATH (processes of one machine), files:///PATH (a folder that all machines can access) or
    postgresql://USER@HOST:PORT/DATABASE (the password in PGPASSWORD). Three slashes precede a path relative to the
    working directory, four an absolute path."""
    order: Literal["arrival", "newest", "task"] = "arrival"
    """Order in which groups of explorers in other processes are trained on, with rollout.schedule=async. arrival: in
    the order of arrival; newest: the latest arrival first; task: in the order of the tasks, and the trainer waits for
    the earliest one."""
    lease_s: Above0 = 300.0
    """Lease of an explorer on its tasks, in seconds: an explorer without a sign of life for this long loses its tasks
    to other explorers."""
    explorer_name: str = "explorer"
    """Name of this explorer, unique within the run. An explorer that restarts under the same name continues at once
    with its tasks."""
