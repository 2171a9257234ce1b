"""Problems of the keys about groups."""

from __future__ import annotations

from collections.abc import Iterator

from whet.config.recipes import Resolved
from whet.config.schema import Config


def problems(cfg: Config, algorithm: Resolved) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) in one stage's config."""
    if algorithm.kind != "online":
        return
    groups, size = algorithm.groups, cfg.rollout.group_size
    for name in groups.uniform_by:
        if name not in cfg.rewards:
            known = ", ".join(cfg.rewards) or "there are none"
            yield "algorithm.groups.uniform_by", f"'{name}' is not among rewards: {known}"
    kept = (groups.keep_best or 0) + (groups.keep_worst or 0)
    key = "algorithm.groups.keep_best" if groups.keep_best else "algorithm.groups.keep_worst"
    if algorithm.pairs:
        return  # the recipe keeps two, which may be all
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
