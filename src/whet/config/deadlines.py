"""Longest waits of a run, and the keys that set them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whet.config.engines import SERVED
from whet.config.schema import Config
from whet.config.tree import get


@dataclass(frozen=True)
class Deadline:
    """The longest time of a wait."""

    seconds: float
    keys: str
    """The keys that it is computed from: `rollout.timeout_s=600, ...`."""


def rollout(cfg: Config) -> Deadline:
    """One rollout."""
    return Deadline(cfg.rollout.timeout_s, _said(cfg, "rollout.timeout_s"))


def setup_s(cfg: Config) -> float:
    """The longest set-up of an environment, which is no part of a rollout's time: one call makes it, one asks for its
    first messages."""
    return 0.0 if cfg.rollout.env is None else 2 * cfg.rollout.env.timeout_s


def sync(cfg: Config) -> Deadline:
    """A weight sync: rollouts in flight finish, then the weights are sent."""
    if not cfg.rollout.replicas and cfg.rollout.engine not in SERVED:
        return rollout(cfg)
    keys = _said(cfg, "rollout.timeout_s", "sync.timeout_s")
    return Deadline(cfg.rollout.timeout_s + cfg.sync.timeout_s, keys)


def group(cfg: Config, *, judges: int, times: int = 1, leased: bool = False) -> Deadline:
    """A group of one task: played up to `times` times, and scored by `judges` rewards. leased: by other explorers; the
    tasks of a dead explorer are requested again when its lease ends."""
    played_s = (1 + cfg.rollout.retries) * (setup_s(cfg) + cfg.rollout.timeout_s)
    seconds = times * (played_s + cfg.reward_workers.timeout_s * judges) + MARGIN_S
    keys = ["rollout.timeout_s", "rollout.retries", "reward_workers.timeout_s"]
    keys += ["rollout.env.timeout_s"] * (cfg.rollout.env is not None) + ["buffer.lease_s"] * leased
    return Deadline(seconds + (cfg.buffer.lease_s if leased else 0.0), _said(cfg, *keys))


def silence(cfg: Config, stages: Sequence[Config], *, least_s: float = 0.0) -> float:
    """Longest time of a process without progress: machine.watchdog_timeout_s, but more than any single timeout."""
    longest = [least_s, cfg.rollout.timeout_s + cfg.sync.timeout_s, cfg.cluster.start_timeout_s]
    longest += [sync(cfg).seconds, cfg.rollout.server.start_timeout_s]
    for c in stages:
        longest += [
            group(c, judges=len(c.rewards), times=2, leased=True).seconds,
            c.train.parallel.timeout_s,
        ]
    return max(cfg.machine.watchdog_timeout_s, MARGIN_S + max(longest))


MARGIN_S = 60.0
"""Margin for uncounted work, so that a timeout ends a wait before the watchdog ends the process."""


def _said(cfg: Config, *keys: str) -> str:
    tree = cfg.model_dump(include={key.partition(".")[0] for key in keys})
    return ", ".join(f"{key}={get(tree, tuple(key.split('.'))):g}" for key in keys)
