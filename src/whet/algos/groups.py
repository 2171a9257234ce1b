"""Selection in a scored group before training: which rollouts stay, and with which reward. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import isclose
from statistics import pstdev, stdev
from typing import Literal

import numpy as np

from whet.config.recipes import Resolved
from whet.config.sections.algorithm import GroupsConfig
from whet.types import Group, Rollout, Task, WhetError

Dropped = dict[str, int]
"""Rollouts that were dropped from their group, by reason."""
_ROUNDING = 1e-12


def refine(group: Group, cfg: GroupsConfig) -> tuple[Group, Dropped]:
    """The group for training, and the number of rollouts dropped from it. All rollouts must have been scored."""
    if cfg.truncated == "zero":
        group = replace(group, rollouts=tuple(_zero_unfinished(r) for r in group.rollouts))
    dropped: Dropped = {}
    for reason, rule in _rules(cfg):
        kept = rule(group.rollouts)
        dropped[reason] = len(group.rollouts) - len(kept)
        group = replace(group, rollouts=kept)
    if cfg.min_shared_prefix is not None:
        group = mask_shared_prefixes(group, cfg.min_shared_prefix)
    return group, {reason: n for reason, n in dropped.items() if n}


def uninformative(
    group: Group,
    *,
    drop_uniform: bool,
    weights: Mapping[str, float],
    min_std: float | None = None,
    ddof: Literal[1, 0] = 1,
    by: Sequence[str] = (),
    above: float | None = None,
) -> str | None:
    """Why a group is dropped, or None: rewards too close (`flat`) or all equal (`uniform`).

    weights: of the rewards by name, for those that `by` adds up. The others are the settings of
    algorithm.groups.uniform; `above` is correct_threshold of DAPODynamicSamplingFilter, as Trinity-RFT 0.6.0.
    """
    rewards = [_reward(r) for r in group.rollouts]
    if min_std is not None and deviation(rewards, ddof=ddof) <= min_std:
        return "flat"
    if by:
        rewards = [_parts(r, by, weights) for r in group.rollouts]
    if above is not None:
        rewards = [float(reward > above) for reward in rewards]
    return "uniform" if drop_uniform and _equal(rewards) else None


def _equal(rewards: Sequence[float]) -> bool:
    """Whether they are one number, up to the rounding of their sums: 0.1 + 0.2 is 0.3, and 0.1 + 0.2 - 0.3 is 0."""
    return len(rewards) > 0 and isclose(min(rewards), max(rewards), rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def rejection(group: Group, *, algorithm: Resolved, weights: Mapping[str, float], alone: bool) -> str | None:
    """Why a group is not trained on: rewards all equal, with dynamic sampling, or too close; or, after failures, a
    rollout is left without another to be compared with. weights: of the rewards by name. alone: a rollout is compared
    with that of another group."""
    left = len(group.rollouts)
    if not alone and ((left == 1 and algorithm.compares) or (left % 2 and algorithm.pairs)):
        return "alone"
    return uninformative(group, drop_uniform=algorithm.dynamic_sampling, weights=weights, **algorithm.uniform)


def deviation(rewards: Sequence[float], *, ddof: int) -> float:
    """Standard deviation, n - ddof below; 0 of equal rewards and of fewer than two."""
    if len(rewards) < 2 or _equal(rewards):
        return 0.0
    return stdev(rewards) if ddof else pstdev(rewards)


# ---------------------------------------------------------------- rollouts

Rule = Callable[[Sequence[Rollout]], tuple[Rollout, ...]]


def _rules(cfg: GroupsConfig) -> list[tuple[str, Rule]]:
    """The rules that drop rollouts of a group, in order, by the reason for the ledger."""
    rules: list[tuple[str, Rule]] = []
    if cfg.truncated == "drop":
        rules.append(("unfinished", lambda rollouts: tuple(r for r in rollouts if r.finish_reason == "stop")))
    if (least := cfg.min_reward) is not None:
        rules.append(("low_reward", lambda rollouts: tuple(r for r in rollouts if _reward(r) >= least)))
    if cfg.keep_best is not None or cfg.keep_worst is not None:
        rules.append(("rank", lambda rollouts: extremes(rollouts, cfg.keep_best or 0, cfg.keep_worst or 0)))
    return rules


def extremes(rollouts: Sequence[Rollout], best: int, worst: int) -> tuple[Rollout, ...]:
    """The `best` rollouts of highest and the `worst` of lowest reward, in their order; on a tie the earlier one is the
    better.

    Both ends of the rewards carry most of the gradient's variance: arXiv:2504.13818 keeps n / 2 of each.
    """
    by_rank = sorted(range(len(rollouts)), key=lambda i: -_reward(rollouts[i]))
    kept = {*by_rank[:best], *by_rank[max(len(by_rank) - worst, 0) :]}
    return tuple(r for i, r in enumerate(rollouts) if i in kept)


def _zero_unfinished(rollout: Rollout) -> Rollout:
    return rollout if rollout.finish_reason == "stop" else rollout.without_reward()


def _reward(rollout: Rollout) -> float:
    return 0.0 if rollout.reward is None else rollout.reward


def _parts(rollout: Rollout, names: Sequence[str], weights: Mapping[str, float]) -> float:
    if lacks := [name for name in names if name not in rollout.reward_parts]:
        raise WhetError(
            f"algorithm.groups.uniform.by: reward {lacks[0]!r} gave no value for a reply to a row of "
            f"{rollout.task.source!r}"
        )
    return sum(weights[name.partition("/")[0]] * rollout.reward_parts[name] for name in names)


def with_baseline(group: Group, greedy: Rollout, cfg: GroupsConfig) -> Group:
    """Every rollout with the greedy reply's reward beside its own, by the same rule where it is truncated. If that
    failed, none of them can be compared."""
    greedy = _zero_unfinished(greedy) if cfg.truncated == "zero" and greedy.error is None else greedy

    def beside(rollout: Rollout) -> Rollout:
        if rollout.error is None and greedy.error is not None:
            return rollout.scored(None, {}, f"greedy reply: {greedy.error}")
        return replace(rollout, baseline=greedy.reward)

    return replace(group, rollouts=tuple(beside(r) for r in group.rollouts))


# ---------------------------------------------------------------- more groups than a step trains on

Choose = Callable[[list[Group]], tuple[list[Group], list[Group]]]
"""The groups that a step trains on, and the others."""


def chooser(algorithm: Resolved, number: int, longest: Callable[[Task], int]) -> Choose | None:
    """How `number` groups are chosen; None: a step samples what it trains on. longest: tokens of the longest reply to a
    task."""
    if (chosen := algorithm.settings.get("oversample")) is None:
        return None
    said = chosen.settings
    end = longest if said["finished"] else None
    return partial(by_mean_reward, number=number, low=said["low"], high=said["high"], longest=end)


def by_mean_reward(
    groups: list[Group],
    *,
    number: int,
    low: float | None,
    high: float | None,
    longest: Callable[[Task], int] | None,
) -> tuple[list[Group], list[Group]]:
    """(so many of the groups, the others): first those whose mean reward is within the bounds and whose replies all end
    before their last but one token, in their order, then the rest. longest: tokens of the longest reply to a task;
    None: replies may end anywhere. verl's `filter_and_downsample` (recipe `prime`)."""

    def passes(group: Group) -> bool:
        rewards = [_reward(r) for r in group.rollouts]
        mean = sum(rewards) / len(rewards)
        if (low is not None and mean < low) or (high is not None and mean > high):
            return False
        return longest is None or max(map(_tokens, group.rollouts)) < longest(group.task) - 1

    ordered = sorted(groups, key=lambda g: not passes(g))
    return ordered[:number], ordered[number:]


def _tokens(rollout: Rollout) -> int:
    """Of its replies, those that `mask_shared_prefixes` has taken out of the loss among them."""
    return max(rollout.tokens, sum(turn.end - turn.start for turn in rollout.turns))


# ---------------------------------------------------------------- prefixes


def mask_shared_prefixes(group: Group, min_tokens: int) -> Group:
    """Replies with a common prefix of at least `min_tokens` tokens and different rewards: the prefix has no loss.

    In the tree of the group's replies (all tokens of a strand from the first sampled one on) a prefix is shared where
    two or more replies have it, and longest where no two of them continue equally. A reply without a token after it is
    unchanged. First strands are compared with first strands, second ones with second ones. Cosmos-RL
    `min_filter_prefix_tokens`.
    """
    rollouts = list(group.rollouts)
    for place in range(max((len(r.strands) for r in rollouts), default=0)):
        having = [i for i, r in enumerate(rollouts) if place < len(r.strands)]
        starts = [rollouts[i].strands[place].prompt_tokens for i in having]
        replies = [rollouts[i].strands[place].token_ids[s:].tolist() for i, s in zip(having, starts)]
        for members, depth in _longest_shared(replies):
            if depth >= min_tokens and len({_reward(rollouts[having[m]]) for m in members}) > 1:
                for m in members:
                    if depth < len(replies[m]):
                        rollouts[having[m]] = _masked(
                            rollouts[having[m]], place, starts[m], starts[m] + depth
                        )
    return replace(group, rollouts=tuple(rollouts))


def _longest_shared(replies: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """(replies, tokens) of each longest shared beginning: among sorted neighbours, a peak of what they share."""
    order = sorted(range(len(replies)), key=lambda i: replies[i])
    shared = [_shared(replies[a], replies[b]) for a, b in pairwise(order)]
    found: list[tuple[list[int], int]] = []
    first = 0
    while first < len(shared):
        last = first
        while last + 1 < len(shared) and shared[last + 1] == shared[first]:
            last += 1
        beside = [*shared[max(first - 1, 0) : first], *shared[last + 1 : last + 2]]
        if all(x < shared[first] for x in beside):
            found.append((order[first : last + 2], shared[first]))
        first = last + 1
    return found


def _shared(a: list[int], b: list[int]) -> int:
    """How many tokens two replies begin with together."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differs[0]) if len(differs) else n


def _masked(rollout: Rollout, place: int, start: int, end: int) -> Rollout:
    """The same tokens, those from start to end of one strand not trained on: as if the policy had been given them."""

    def put(values: np.ndarray, value: float) -> np.ndarray:
        out = values.copy()
        out[start:end] = value
        return out

    strands = list(rollout.strands)
    strands[place] = replace(
        strands[place],
        mask=put(strands[place].mask, False),
        logprobs=put(strands[place].logprobs, 0.0),
        sample_logprobs=put(strands[place].sample_logprobs, 0.0),
        versions=put(strands[place].versions, -1),
    )
    return replace(rollout, strands=tuple(strands))
