"""Cosmos-RL's profiler: one window of training steps."""

from __future__ import annotations

from whet.dialects.cosmos.values import whole
from whet.dialects.row import Values
from whet.dialects.typed import flag
from whet.types import ConfigError, Json

SUB_PROFILER = "profiler.sub_profiler_config"
MOST = 1000


def profile(values: Values) -> dict[str, Json]:
    """torch's profiler and the ranges for nsys, at the same steps; nothing where neither is enabled."""
    flag(values, f"{SUB_PROFILER}.do_profile")
    tools = [
        name
        for name, key in (("torch", "enable_profiler"), ("nsys", "enable_nsys"))
        if flag(values, f"profiler.{key}")
    ]
    if not tools:
        return {}
    if (
        values[f"{SUB_PROFILER}.rank_filter"] not in (None, [])
        and 0 not in values[f"{SUB_PROFILER}.rank_filter"]
    ):
        raise ConfigError(f"{SUB_PROFILER}.rank_filter: the one process here is rank 0; write [0] or []")
    wait, warmup = (whole(values, f"{SUB_PROFILER}.{key}_steps", least=0) for key in ("wait", "warmup"))
    active = whole(values, f"{SUB_PROFILER}.active_steps", least=1)
    if active > MOST:
        raise ConfigError(
            f"{SUB_PROFILER}.active_steps={active}: no viewer opens such a trace; at most {MOST}"
        )
    return {
        "profile.steps": [wait + warmup + n for n in range(1, active + 1)],
        "profile.tools": tools,
        "profile.warmup": warmup,
        "profile.shapes": flag(values, f"{SUB_PROFILER}.record_shape"),
        "profile.allocations": flag(values, f"{SUB_PROFILER}.profile_memory"),
        "profile.stack": flag(values, f"{SUB_PROFILER}.with_stack"),
    }
