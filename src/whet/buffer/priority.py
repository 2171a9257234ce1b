"""How much a replayed group is worth seeing again. Formulas as in Trinity-RFT's replay buffer.

A priority function is asked when a group comes in, and each time it may come back. It gets a `ReplayEntry` and, by
name, what its signature asks for of:

    noise       a standard normal number that belongs to this group and this use
    its settings              of `buffer.replay.priority`

It returns the priority (the highest is drawn first), or None: the group does not come in.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from whet.guard.foreign import describe, is_number, shown
from whet.tables import check_settings, find
from whet.types import Group, WhetError


@dataclass(slots=True)
class ReplayEntry:
    """A group in replay."""

    group: Group
    version: int
    """The oldest policy version that a token of it was sampled with; -1: none was."""
    uses: int
    """How often it was trained on."""
    serial: int
    """Number of its arrival: the older of two has the smaller."""
    priority: float = 0.0


Priority = Callable[..., float | None]


def linear_decay(entry: ReplayEntry, *, decay: float) -> float:
    """Version less `decay` per use: new and seldom used groups first. A group always comes back."""
    return entry.version - decay * entry.uses


def linear_decay_use_count_control_randomization(
    entry: ReplayEntry, *, decay: float, use_limit: int | None, sigma: float, noise: float
) -> float | None:
    """`linear_decay` plus normal noise of standard deviation `sigma`; a group comes back until it was used
    `use_limit` times (None: always)."""
    if use_limit is not None and entry.uses >= use_limit:
        return None
    return linear_decay(entry, decay=decay) + sigma * noise


PRIORITIES: dict[str, Priority] = {
    "linear_decay": linear_decay,
    "linear_decay_use_count_control_randomization": linear_decay_use_count_control_randomization,
}


def priority(name: str, settings: Mapping[str, Any]) -> Callable[[ReplayEntry, float], float | None]:
    """(entry, noise) -> priority, with the settings bound.

    name: a key of PRIORITIES or 'package.module:function'. Raises ConfigError for an unknown name, for settings that
    the function does not have, and for those that it needs and that are not given. What is returned raises WhetError
    where the function fails, or gives something else than a finite number or None.
    """
    function = find(PRIORITIES, name, what="buffer.replay.priority")
    check_settings(function, settings, key="buffer.replay.priority", name=name, given=1, also=("noise",))
    noisy = "noise" in inspect.signature(function).parameters

    def ranked(entry: ReplayEntry, noise: float) -> float | None:
        uid = entry.group.task.uid
        try:
            found: Any = function(entry, **settings, **({"noise": noise} if noisy else {}))
            value = float(found) if is_number(found) else math.nan
        except WhetError:
            raise
        except (Exception, SystemExit) as error:  # code of the user's: it can fail in any way
            raise WhetError(
                f"buffer.replay.priority {name!r} failed for task {uid}: {describe(error)}"
            ) from error
        if found is None:
            return None
        if not math.isfinite(value):
            raise WhetError(
                f"buffer.replay.priority {name!r} returned {shown(found, 60)} for task {uid}; return a finite number "
                "or None, which leaves the group out"
            )
        return value

    return ranked
