"""Trinity-RFT's explorer beside its trainer: how far ahead it is, when weights go over, what is waited for."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.data import apart
from whet.dialects.trinity.mix import bound
from whet.dialects.trinity.presets import online
from whet.dialects.trinity.replies import in_rounds
from whet.dialects.trinity.values import count, known_as
from whet.types import ConfigError, Json

METHODS = ("nccl", "checkpoint", "memory", "online", "offline")
AHEAD = ("dynamic_by_explorer", "dynamic_by_trainer", "explorer_driven", "trainer_driven", "fully_async")
BY_EXPLORER = ("dynamic_by_explorer", "explorer_driven")


def methods(values: Values) -> Mapping[str, Json]:
    """One process has the weights at hand; processes of their own read them from a folder. Neither changes a number."""
    known_as(str(values["synchronizer.sync_method"]), dict.fromkeys(METHODS), key="synchronizer.sync_method")
    return {}


def ahead(values: Values) -> Mapping[str, Json]:
    """How far exploring is ahead of training.

    fixed: sync_offset steps. In the other styles as far as staleness_control lets it be: rollouts of step s have
    version s - max_staleness at least, of which sync_interval steps lie between two syncs. Without it, as far as one
    more interval: here exploring has a bound, there it has none but the queue.
    """
    style = str(values["synchronizer.sync_style"])
    known_as(style, dict.fromkeys(("fixed", *AHEAD)), key="synchronizer.sync_style")
    offset = count(values, "synchronizer.sync_offset", least=0)
    if not online(values):
        return {}
    if style == "fixed":
        free: dict[str, Json] = {"rollout.schedule": "free", "rollout.partial": False}
        return (free if apart(values) and not in_rounds(values) else {}) | {"rollout.max_staleness": offset}
    if offset:
        raise ConfigError(
            f"synchronizer.sync_offset: {offset} has no meaning with sync_style: {style}; write 0."
        )
    most, interval = bound(values), count(values, "synchronizer.sync_interval")
    if most is not None and most < interval:
        raise NotSupportedYet(
            f"algorithm.sample_strategy_args.max_staleness: {most} is coming, not built yet: with sync_style: {style} "
            f"rollouts are up to sync_interval = {interval} versions old; write {interval} at least."
        )
    return {
        "rollout.schedule": "free",
        "rollout.partial": style == "fully_async",
        "rollout.max_staleness": interval if most is None else most - interval,
        "sync.driven_by": "explorer" if style in BY_EXPLORER else "trainer",
    }


def patience(values: Values) -> Mapping[str, Json]:
    """Seconds that processes of their own wait for one another's weights."""
    seconds = count(values, "synchronizer.sync_timeout")
    return {"sync.timeout_s": seconds} if online(values) and values["mode"] != "both" else {}


def again(values: Values) -> Mapping[str, Json]:
    """Further attempts at a rollout that failed, and a limit that follows the mean of those that did not."""
    at, tries = "explorer.dynamic_timeout", count(values, "explorer.max_retry_times", least=0)
    ratio = values[f"{at}.ratio"]
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or ratio <= 0:
        raise ConfigError(f"{at}.ratio: got {ratio!r}, expected a number above 0.")
    if not online(values):
        return {}
    return {"rollout.retries": tries} | ({"rollout.timeout_factor": ratio} if values[f"{at}.enable"] else {})


def who(values: Values) -> Mapping[str, Json]:
    """The name by which a store knows this explorer."""
    return {"buffer.explorer": str(values["explorer.name"])} if values["mode"] == "explore" else {}


def sync_interval(values: Values) -> Mapping[str, Json]:
    """Steps between weight syncs: rollouts are up to so many versions old, less one."""
    return {"rollout.sync_every": count(values, "synchronizer.sync_interval")} if online(values) else {}
