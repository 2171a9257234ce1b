"""Problems of the keys about advantages, groups and resampling."""

from __future__ import annotations

from collections.abc import Iterator

from whet.config.recipes import Resolved
from whet.config.schema import Config


def problems(cfg: Config, algorithm: Resolved) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) in one stage's config."""
    if algorithm.kind == "online":
        yield from _advantage(cfg, algorithm)
        yield from _groups(cfg, algorithm)


def _advantage(cfg: Config, algorithm: Resolved) -> Iterator[tuple[str, str]]:
    low, high = algorithm.advantage_low, algorithm.advantage_high
    if low is not None and high is not None and low > high:
        yield (
            "algorithm.advantage_low",
            f"{low} is above advantage_high={high}; lower it, or raise advantage_high",
        )
    if algorithm.advantage == "distill" and cfg.reference.path is None:
        yield (
            "reference.path",
            "is not given, so the policy would be its own teacher and learn nothing: give the folder of the teacher",
        )
    if "baseline" in algorithm.needs and cfg.rollout.sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature",
            f"0 is greedy, as is the baseline reply of advantage={algorithm.advantage}: set it above 0",
        )
    if algorithm.mix is not None:
        for key, off in (("resample", "none"), ("refill", "sample")):
            if getattr(algorithm, key) != off:
                yield (
                    f"algorithm.{key}",
                    f"{getattr(algorithm, key)} would also draw the demonstrations that algorithm.mix adds to the "
                    f"rollouts: set it to {off}",
                )


def _groups(cfg: Config, algorithm: Resolved) -> Iterator[tuple[str, str]]:
    groups, size = algorithm.groups, cfg.rollout.group_size
    for name in groups.uniform_by:
        if name not in cfg.rewards:
            known = ", ".join(cfg.rewards) or "there are none"
            yield "algorithm.groups.uniform_by", f"'{name}' is not among rewards: {known}"
    kept = (groups.keep_best or 0) + (groups.keep_worst or 0)
    key = "algorithm.groups.keep_best" if groups.keep_best else "algorithm.groups.keep_worst"
    if kept >= size:
        yield (
            key,
            f"keeping {kept} rollouts of rollout.group_size={size} keeps all: keep fewer, or leave it out",
        )
    elif kept == 1 and algorithm.compares:
        yield (
            key,
            f"keeps one rollout per group, but advantage={algorithm.advantage} compares several: keep more, or "
            "set algorithm.name=raft",
        )
    if groups.min_std is not None and size == 1:
        yield "algorithm.groups.min_std", "drops every group of one rollout: raise rollout.group_size"
