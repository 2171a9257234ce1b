"""Trinity-RFT's replay buffer: fresh and used experiences in one queue, from which steps are drawn by priority."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.data import apart
from whet.dialects.trinity.mix import bound
from whet.dialects.trinity.presets import online
from whet.dialects.trinity.sync import AHEAD
from whet.dialects.trinity.values import EXPERIENCES, arguments, count, known_as
from whet.types import ConfigError, Json

REPLAY = f"{EXPERIENCES}.replay_buffer"
CONTROLLED = "linear_decay_use_count_control_randomization"
_LIMITED: dict[str, Json] = {"decay": 2.0, "use_count_limit": 3, "sigma": 0.0}
PRIORITIES: dict[str, tuple[str, dict[str, Json]]] = {
    "linear_decay": ("linear_decay", {"decay": 2.0}),
    CONTROLLED: (CONTROLLED, _LIMITED),
    "decay_limit_randomization": (CONTROLLED, _LIMITED),
}
"""Trinity's name: the native one, and the arguments with their defaults. The last is the second's newer name."""


def replay(values: Values) -> Mapping[str, Json]:
    """The one queue. It is the trainer's: an explorer and a bench take no notice of it."""
    if not values[f"{REPLAY}.enable"] or not online(values) or values["mode"] in ("explore", "bench"):
        return {}
    _possible(values)
    oldest = bound(values)
    return {
        "buffer.replay.queue": True,
        "buffer.replay.capacity": count(values, f"{EXPERIENCES}.capacity"),
        **_cooldown(values),
        **_priority(values),
        # step s takes versions from s - max_staleness on, and the trainer is at version s - 1 then
        **({} if oldest is None else {"buffer.replay.max_staleness": oldest - 1}),
    }


def _possible(values: Values) -> None:
    storage, style = values[f"{EXPERIENCES}.storage_type"], str(values["synchronizer.sync_style"])
    if storage == "sql":
        raise NotSupportedYet(
            f"{REPLAY}.enable: true with storage_type: sql, where rows that were read are read again, newest first, is "
            "coming, not built yet; here: storage_type: queue."
        )
    if style == "fixed" and not apart(values):
        raise NotSupportedYet(
            f"{REPLAY}.enable: true with mode: both and sync_style: fixed is coming, not built yet: here a step waits "
            "for its own tasks then, and nothing is drawn in their place; write another sync_style "
            f"({', '.join(AHEAD)}), mode: train and mode: explore, or whet.buffer.replay.share for a share of them."
        )
    if style != "fixed" and values[f"{REPLAY}.reuse_cooldown_time"] is not None and bound(values) is None:
        raise NotSupportedYet(
            f"{REPLAY}.reuse_cooldown_time: rollouts that wait behind any number of steps of used ones are coming, not "
            f"built yet: with sync_style: {style} say how old they may be. Write algorithm.sample_strategy: "
            "staleness_control, with max_staleness above sync_interval by the steps that a rollout takes (2 at least)."
        )


def _cooldown(values: Values) -> dict[str, Json]:
    """Seconds; null: nothing is drawn twice."""
    key = f"{REPLAY}.reuse_cooldown_time"
    seconds = values[key]
    if seconds is None:
        return {"buffer.replay.cooldown_steps": None}
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0:
        raise ConfigError(f"{key}: got {seconds!r}, expected seconds, 0 or more, or null.")
    return {"buffer.replay.cooldown_s": seconds}


def _priority(values: Values) -> dict[str, Json]:
    name = str(values[f"{REPLAY}.priority_fn"])
    known_as(name, PRIORITIES, key=f"{REPLAY}.priority_fn")
    native, defaults = PRIORITIES[name]
    given = arguments(values, f"{REPLAY}.priority_fn_args", defaults)
    limit = given.get("use_count_limit")
    return {
        "buffer.replay.priority": native,
        "buffer.replay.decay": given["decay"],
        **({"buffer.replay.sigma": given["sigma"]} if "sigma" in given else {}),
        **({"buffer.replay.use_limit": limit if limit and limit > 0 else None} if "sigma" in given else {}),
    }
