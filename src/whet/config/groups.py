"""Groups of a step in a config: the demonstrations among them, the rollouts of each that are kept, and problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from whet.config.recipes import Resolved
from whet.config.schema import Config


def experts_per_step(cfg: Config, algorithm: Resolved) -> int:
    """Number of demonstrations in one step. The ratio is an exact decimal: 0.1 of 30 is 3, not 4."""
    if algorithm.mix is None:
        return 0
    return math.ceil(Fraction(str(algorithm.mix.demonstration_ratio)) * cfg.train.tasks_per_step)


def sampled_tasks(own: int, algorithm: Resolved) -> int:
    """Tasks that a step samples in order to train on `own` of them."""
    chosen = algorithm.settings.get("oversample")
    return own if chosen is None else int(own * Fraction(str(chosen.settings["factor"])))


def problems(cfg: Config, algorithm: Resolved) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) in one stage's config."""
    if algorithm.mix is not None:
        yield from _mix_problems(cfg, algorithm, experts_per_step(cfg, algorithm))
    yield from _kept_problems(cfg, algorithm)


def _mix_problems(cfg: Config, algorithm: Resolved, experts: int) -> Iterator[tuple[str, str]]:
    train = cfg.train
    own = train.tasks_per_step - experts
    if min(own, experts) < train.minibatches:
        yield (
            "algorithm.mix.demonstration_ratio",
            f"train.tasks_per_step={train.tasks_per_step} has {experts} demonstrations and {own} own tasks, but each "
            f"of train.minibatches={train.minibatches} needs at least one of both: raise tasks_per_step, or choose a "
            "ratio closer to 0.5",
        )
    if algorithm.needs_critic and own < (cfg.critic.minibatches or 1):
        yield (
            "critic.minibatches",
            f"{cfg.critic.minibatches}, but of train.tasks_per_step={train.tasks_per_step} tasks {experts} are "
            f"demonstrations, which the critic does not learn from: give at most {own}",
        )


def pairs_tasks(cfg: Config, algorithm: Resolved) -> bool:
    """Whether a pair has the replies to two tasks: neighbours are compared, and a task has one reply."""
    return algorithm.pairs_neighbours and cfg.rollout.group_size == 1


def _unscored(cfg: Config, parts: Sequence[str]) -> Iterator[str]:
    """Training sources that a reward does not score, whose parts are compared in every group."""
    for n, source in enumerate(cfg.data.train):
        for name in {part.partition("/")[0]: None for part in parts}:
            if source.rewards is not None and name in cfg.rewards and name not in source.rewards:
                yield (
                    f"'{name}' does not score source {source.name!r} (data.train[{n}].rewards), so its groups cannot "
                    "be compared by it; add it there, or leave it out here"
                )


def _kept_problems(cfg: Config, algorithm: Resolved) -> Iterator[tuple[str, str]]:
    if algorithm.kind != "online":
        return
    groups, size = algorithm.groups, cfg.rollout.group_size
    by = algorithm.uniform.get("by", ())
    for name in by:
        if name.partition("/")[0] not in cfg.rewards:
            known = ", ".join(cfg.rewards) or "there are none"
            yield "algorithm.groups.uniform.by", f"'{name}' is not among rewards: {known}"
    compared = algorithm.settings["advantage"].settings.get("parts", ())
    for key, names in (("groups.uniform.by", by), ("advantage.parts", compared)):
        yield from ((f"algorithm.{key}", why) for why in _unscored(cfg, names))
    kept = (groups.keep_best or 0) + (groups.keep_worst or 0)
    key = "algorithm.groups.keep_best" if groups.keep_best else "algorithm.groups.keep_worst"
    if algorithm.pairs_neighbours and size % 2 and size > 1:
        yield (
            "rollout.group_size",
            f"{size} leaves a reply without another: algorithm.loss.pairs_of=neighbours compares each two that follow "
            f"each other; set it to {size + 1}",
        )
    if pairs_tasks(cfg, algorithm) and cfg.train.tasks_per_step % (2 * cfg.train.minibatches):
        yield (
            "train.tasks_per_step",
            f"{cfg.train.tasks_per_step}: with rollout.group_size=1 a pair has the replies to two tasks, so each of "
            f"train.minibatches={cfg.train.minibatches} needs an even number; give a multiple of "
            f"{2 * cfg.train.minibatches}",
        )
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
