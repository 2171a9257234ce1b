"""When weights are exchanged, and who waits for whom: pure functions of how far trainer and explorer are.

Steps count from 1 as they are finished; version s is what the trainer has after its step s. At the start, before either
has a step, both sync once. `every` is k, `offset` is o in what follows.

    fixed            The trainer publishes after each k of its steps; the explorer runs o steps ahead, and after its
                     step o + n k waits for version n k. So rollouts are at most k + o - 1 versions old.
    explorer_driven  The explorer asks after each k of its steps; the trainer answers between two steps, or at once
                     while it waits for rollouts, with the version that it has: it may be the one that is there.
    trainer_driven   The trainer publishes after each k of its steps; the explorer takes what is there between two.
    fully_async      As before, but the explorer does not wait for its step to end: rollouts in flight are paused and go
                     on under the new weights, a version on each token. What bounds their age is the buffer's room.

After Trinity-RFT's synchronizer (versions 0.4 to 0.6), except that a peer that does not come in time is an error there
as everywhere here, not a sync left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Style = Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"]


@dataclass(frozen=True)
class Schedule:
    """How often, and whose steps count."""

    style: Style = "fixed"
    every: int = 1
    offset: int = 0
    """Explorer steps before its first sync but the initial one; of style fixed alone."""


@dataclass(frozen=True)
class Explorer:
    """How far an explorer is."""

    step: int
    synced_at: int = 0
    """The step after which it synced last."""
    version: int = 0
    """Of its weights."""


@dataclass(frozen=True)
class Take:
    """What an explorer does now."""

    version: int
    """The least that it takes."""
    waits: bool
    """Until it is there; else only what is there already is taken."""
    asks: bool = False
    """The trainer is asked first, and the version that it answers with is taken, be it this one."""
    finish: bool = True
    """Rollouts in flight end first."""


def explorer_takes(schedule: Schedule, explorer: Explorer) -> Take | None:
    """What sync an explorer makes after the step it has just ended; None: it goes on with the weights it has."""
    every, since = schedule.every, explorer.step - explorer.synced_at
    if schedule.style == "fixed":
        ahead = explorer.step - schedule.offset
        if ahead <= 0 or ahead % every or since == 0:
            return None
        return Take(ahead, waits=True)
    if schedule.style == "explorer_driven":
        return Take(explorer.version, waits=True, asks=True) if since >= every else None
    return Take(explorer.version + 1, waits=False, finish=schedule.style == "trainer_driven")


def trainer_publishes(schedule: Schedule, *, version: int, published: int, asked: bool = False) -> bool:
    """Whether the trainer publishes now: between two steps, and again and again while it waits for rollouts.

    version: its newest; published: the newest that was; asked: an explorer waits for an answer, which it
    gets either way.
    """
    if schedule.style == "explorer_driven":
        return asked and version > published
    return version > published and version % schedule.every == 0


def trainer_waits(schedule: Schedule) -> bool:
    """Whether the trainer, after publishing, waits for the explorers' receipts before its next step."""
    return schedule.style in ("fixed", "explorer_driven")


def oldest(schedule: Schedule) -> int | None:
    """Versions that a rollout can be behind the policy that learns from it, with as many rollouts explored as trained;
    None: only the buffer's room says.
    """
    return schedule.every + schedule.offset - 1 if schedule.style == "fixed" else None
