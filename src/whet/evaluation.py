"""Held-out tasks: sample replies, score them, and compute the share that passes, by source."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace

from whet import seeds
from whet.config.engines import engines_of
from whet.config.evaluation import EvalSampling, asked, reward_weights
from whet.config.schema import Config
from whet.rewards.combine import RewardSet, check_columns, check_failures, score
from whet.tables import near
from whet.track.dumps import sample_row
from whet.types import ConfigError, Group, Json, Metrics, Rollout, Task

Play = Callable[[list[Task]], Awaitable[list[Group]]]
"""From tasks to groups of finished rollouts: `play_groups` with all other arguments bound."""

Ask = Callable[[list[Task], EvalSampling], Awaitable[list[Group]]]
"""The same, with the sampling settings still unbound."""


async def evaluate(ask: Ask, tasks: Sequence[Task], rewards: RewardSet, *, cfg: Config) -> list[Group]:
    """Sample and score replies of the current policy to every held-out task, with the settings of its source; in the
    order of the tasks.

    The engines get as many tasks at once as they decode rollouts at once. A reply's reward is the sum that
    `eval.reward` names. Raises WhetError if more replies are unscored than reward_workers.max_failure_rate allows.
    """
    judge = judging(cfg, rewards)
    await check_columns(tasks, judge)
    alike: dict[EvalSampling, list[Task]] = defaultdict(list)
    for task in tasks:
        alike[asked(cfg, task.source)].append(task)
    done: dict[int, Group] = {}
    for how, members in alike.items():
        at_once = max(1, cfg.rollout.max_num_seqs * engines_of(cfg) // how.samples)
        for begin in range(0, len(members), at_once):
            part = await score(await ask(members[begin : begin + at_once], how), judge)
            done |= {group.task.uid: group for group in part}
    groups = [done[task.uid] for task in tasks]
    check_failures(groups, rewards, of="this evaluation")
    return groups


def judging(cfg: Config, rewards: RewardSet) -> RewardSet:
    """What held-out replies are judged by."""
    return replace(rewards, weights=reward_weights(cfg), seconds=defaultdict(float))  # no step's


def check_sources(named: Collection[str], tasks: Sequence[Task]) -> None:
    """ConfigError if eval.sources names a source without a held-out task, or if the numbers of a source would have the
    names of others."""
    there = sorted({task.source for task in tasks})
    for source in there:
        if why := _ambiguous(source, several=len(there) > 1):
            raise ConfigError(
                f"data.eval: held-out tasks have the source '{source}', {why}; give them another one, by the `name` of "
                "their source or in the column that its `label` names"
            )
    for name in named:
        if name not in there:
            raise ConfigError(
                f"eval.sources.{name}: no held-out task has the source '{name}'{near(name, there)}; "
                f"sources: {', '.join(there) or 'none'}"
            )


def _ambiguous(source: str, *, several: bool) -> str:
    """Which other numbers those of a source would be taken for; '' for none."""
    if source == "all" and several:
        return "and the numbers over all sources are called so"
    return "and eval/SOURCE/part/NAME is a part of the rewards" if "/part/" in f"{source}/" else ""


# ---------------------------------------------------------------- numbers


def accuracy(groups: Sequence[Group], *, success: float) -> Metrics:
    """Per source and over all; K is the smallest number of replies of a task there, n = 2, 4, 8 .. K.

    mean@K: share of replies that pass, mean over tasks. pass@n: chance that one of n replies passes.
    maj@K: share of tasks whose most common answer passes (the first on a tie, of the first K replies).
    best@n, worst@n: the highest and lowest reward of n replies; std@K: standard deviation of a task's rewards
    (of the population); reward_mean: over scored replies; part/NAME_mean: the same of each part of the rewards that has
    a value, which a reward of weight 0 has, too.

    pass@n, best@n and worst@n are exact means over all choices of n of a task's replies, not bootstrapped. An
    unscored reply does not pass and is counted in `unscored`. Tasks with fewer than n scored replies are left out of
    best@n and worst@n, tasks with fewer than K out of std@K.
    """
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.task.source].append(group)
    out: Metrics = {}
    sets = dict(by_source) if len(by_source) == 1 else {**by_source, "all": list(groups)}
    for source, members in sorted(sets.items()):
        out |= {f"eval/{source}/{k}": v for k, v in _of_source(members, success=success).items()}
    shares = (_passed(g, success) / len(g.rollouts) for g in groups)
    return out | {"eval/accuracy": _mean(shares)}


def _of_source(groups: Sequence[Group], *, success: float) -> Metrics:
    k = min(len(g.rollouts) for g in groups)
    passed = [(_passed(g, success), len(g.rollouts)) for g in groups]
    scored = [[r.reward for r in g.rollouts if r.reward is not None] for g in groups]
    out = {f"mean@{k}": _mean(c / size for c, size in passed)}
    for n in doublings(k):
        out[f"pass@{n}"] = _mean(pass_at(n, passed=c, replies=size) for c, size in passed)
        if enough := [rewards for rewards in scored if len(rewards) >= n]:
            out[f"best@{n}"] = _mean(best_of(n, rewards) for rewards in enough)
            out[f"worst@{n}"] = _mean(-best_of(n, [-x for x in rewards]) for rewards in enough)
    if k > 1:
        out[f"maj@{k}"] = _mean(passes(commonest(g.rollouts[:k]), success) for g in groups)
        if enough := [rewards for rewards in scored if len(rewards) >= k]:
            out[f"std@{k}"] = _mean(deviation(rewards) for rewards in enough)
    return out | {
        "reward_mean": _mean(x for rewards in scored for x in rewards),
        "tokens_mean": _mean(r.tokens for g in groups for r in g.rollouts),
        "tasks": float(len(groups)),
        "unscored": float(sum(size for _, size in passed) - sum(map(len, scored))),
        **_parts(r for g in groups for r in g.rollouts if r.reward is not None),
    }


def _parts(scored: Iterable[Rollout]) -> Metrics:
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in scored:
        for name, value in rollout.reward_parts.items():
            values[name].append(value)
    return {f"part/{name}_mean": _mean(numbers) for name, numbers in sorted(values.items())}


def doublings(k: int) -> list[int]:
    """2, 4, 8 .. below k, then k itself; nothing for one reply."""
    return [*(2**i for i in range(1, k.bit_length()) if 2**i < k), k] if k > 1 else []


def pass_at(n: int, *, passed: int, replies: int) -> float:
    """Chance that at least one of n replies, drawn without replacement, passes: 1 - C(N-c, n) / C(N, n).

    arXiv:2107.03374 eq. 1, exact.
    """
    return 1.0 - math.comb(replies - passed, n) / math.comb(replies, n)


def best_of(n: int, rewards: Sequence[float]) -> float:
    """Mean over all choices of n of the rewards of the largest: of C(N, n) choices, the i-th smallest reward is the
    largest in C(i-1, n-1)."""
    choices = math.comb(len(rewards), n)
    return math.fsum(x * (math.comb(i, n - 1) / choices) for i, x in enumerate(sorted(rewards)))


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of the population."""
    mean = _mean(values)
    return math.sqrt(_mean((x - mean) ** 2 for x in values))


def commonest(rollouts: Sequence[Rollout]) -> Rollout:
    """The first rollout with the most common answer. The answer is the one that the reward extracted, else the text."""
    answers = [r.text.strip() if r.answer is None else r.answer for r in rollouts]
    most = Counter(answers).most_common(1)[0][0]
    return rollouts[answers.index(most)]


def passes(rollout: Rollout, success: float) -> bool:
    return rollout.reward is not None and rollout.reward >= success


def _passed(group: Group, success: float) -> int:
    return sum(passes(r, success) for r in group.rollouts)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


# ---------------------------------------------------------------- for people


def shown(groups: Sequence[Group], *, count: int, seed: int) -> list[dict[str, Json]]:
    """The first replies to `count` of the tasks, in their order; the seed alone selects the tasks."""
    chosen = seeds.permutation(seeds.key(seed, "eval", "shown"), len(groups))[:count]
    return [sample_row(groups[i].rollouts[0]) for i in sorted(chosen.tolist())]
