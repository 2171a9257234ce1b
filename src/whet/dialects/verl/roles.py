"""verl's keys of what its base files say of every role: Megatron's layout, profiles, kernels, the reward model."""

from __future__ import annotations

from whet.dialects.row import Values
from whet.dialects.typed import flag, whole
from whet.dialects.verl.rules import (
    ACTOR,
    ANY,
    NOTHING,
    REF,
    Native,
    mini_batches,
)
from whet.types import ConfigError, Json


def profile(v: Values) -> Native:
    """The training steps that hold the optimizer steps which verl's profiler would record."""
    steps, folders = set[int](), dict[str, Json]()
    for role in (ACTOR, REF):
        at = f"{role}.profile"
        if not flag(v, f"{at}.use_profile"):
            continue
        first, end = (whole(v, f"{at}.{key}", least=ANY) for key in ("step_start", "step_end"))
        if not 0 <= first < end <= first + 1000:
            raise ConfigError(
                f"{at}: step_start={first} must be at least 0, and step_end={end} larger, by at most 1000"
            )
        ranks = v[f"{at}.profile_ranks"]
        if ranks is not None and 0 not in (ranks if isinstance(ranks, list) else [ranks]):
            raise ConfigError(f"{at}.profile_ranks={ranks}: the one process here is rank 0; write [0]")
        each = mini_batches(v, ACTOR) * whole(v, f"{ACTOR}.ppo_epochs")
        steps |= {step // each + 1 for step in range(first, end)}
        folders |= {f"{at}.save_path": path for path in [v[f"{at}.save_path"]] if path}
    if not steps:
        return NOTHING
    if len(set(folders.values())) > 1:
        raise ConfigError(f"{', '.join(folders)}: one folder holds all traces of a run; write the same")
    return {
        "profile.steps": sorted(steps),
        "profile.shapes": True,
        "profile.stack": True,
        "profile.dir": next(iter(folders.values()), None),
    }
