"""Numbers of a step: means that know their denominators, and the summary of a step's rollouts.

Names are `stage/what_unit`. `REWARD`, `HELD_OUT` and `LOSS` are the headline metrics for users.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from whet.types import Group, Metrics, Rollout

REWARD = "reward/mean"
"""Mean reward of a step's scored rollouts."""
HELD_OUT = "eval/accuracy"
"""Share of held-out replies that pass."""
LOSS = "train/loss"
"""The loss; the headline where nothing is rewarded (SFT, DPO)."""
ACCURACY = "train/accuracy"
"""Share of pairs whose chosen reply the policy prefers (DPO), or of replies that it judges as labelled (KTO)."""
MARGIN = "train/margin"
"""By how much the implied reward of a chosen reply is above that of the rejected one."""
FAILED = "rollout/failed_count"
"""Rollouts of a step that could not be finished or scored."""


def is_evaluation(line: Iterable[str]) -> bool:
    """Whether the numbers of a line of metrics.jsonl are those of an evaluation; a training step has a line of its own.
    By the names alone: an evaluation without rewards (SFT) has losses, and no `HELD_OUT`."""
    return any(name.startswith("eval/") for name in line)


def reward_of_step(line: Mapping[str, float]) -> float | None:
    """The mean reward in a line of metrics.jsonl. None if there is none, and of given pairs and labels: their rewards
    are 1 and 0, whatever is learned, and have no parts."""
    given = ACCURACY in line and not any(name.startswith("reward/part/") for name in line)
    return None if given else line.get(REWARD)


@dataclass(frozen=True, slots=True)
class Mean:
    """A sum and what it is divided by."""

    total: float
    count: int

    @property
    def value(self) -> float:
        return self.total / self.count

    @staticmethod
    def of(values: Iterable[float]) -> Mean:
        """Of plain numbers. The sum is exact before it is rounded (fsum), so their order does not matter."""
        values = list(values)
        return Mean(math.fsum(values), len(values))


def values(means: Mapping[str, Mean]) -> Metrics:
    """`NAME_mean` and `NAME_count` of each mean. A mean of nothing has a count of 0 and no value."""
    out: Metrics = {}
    for name, mean in means.items():
        out[f"{name}_count"] = mean.count
        if mean.count:
            out[f"{name}_mean"] = mean.value
    return out


def merge(parts: Sequence[Metrics]) -> Metrics:
    """The numbers of a step from those of its optimizer steps: counts and skipped steps are added, of `max`
    and `min` the extreme is taken, everything else is the mean over the optimizer steps that have it."""
    gathered: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            gathered.setdefault(name, []).append(value)
    return {name: _merged(name, numbers) for name, numbers in gathered.items()}


def _merged(name: str, numbers: Sequence[float]) -> float:
    words = re.split(r"[/_]", name)
    if words[-1] in ("count", "sum") or name.endswith("skipped_steps"):
        return math.fsum(numbers)
    if "max" in words or "min" in words:
        unknown = any(map(math.isnan, numbers))  # max and min would pass it over or keep it, as they come
        return math.nan if unknown else max(numbers) if "max" in words else min(numbers)
    return numbers[0] if len(numbers) == 1 else Mean.of(numbers).value


def summarise(groups: Sequence[Group]) -> Metrics:
    """Metrics of a step's rollouts. Rewards are over scored rollouts, all other metrics over all rollouts.

    A mean of nothing is left out; the counts are always there.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    return {**_rewards(rollouts), **_lengths(rollouts), **_failures(rollouts), **_groups(groups)}


def _rewards(rollouts: Sequence[Rollout]) -> Metrics:
    scored = [(r, r.reward) for r in rollouts if r.reward is not None]
    rewards = [reward for _, reward in scored]
    out: Metrics = {"reward/scored_count": len(rewards)}
    if rewards:
        out[REWARD] = Mean.of(rewards).value
        out["reward/std"] = _std(rewards)
        out["reward/min"] = min(rewards)
        out["reward/max"] = max(rewards)
    by_name: dict[str, list[float]] = {}
    for rollout, reward in scored:
        by_name.setdefault(f"reward/source/{rollout.task.source}", []).append(reward)
        for part, value in rollout.reward_parts.items():
            by_name.setdefault(f"reward/part/{part}", []).append(value)
    return {**out, **values({name: Mean.of(numbers) for name, numbers in by_name.items()})}


def _lengths(rollouts: Sequence[Rollout]) -> Metrics:
    out: Metrics = {"rollout/count": len(rollouts)}
    if not rollouts:
        return out
    tokens = [r.tokens for r in rollouts]
    out["rollout/tokens_sum"] = sum(tokens)
    out["rollout/tokens_mean"] = Mean.of(tokens).value
    out["rollout/tokens_max"] = max(tokens)
    if any("env" in r.reward_parts for r in rollouts):
        out["rollout/turns_mean"] = Mean.of(len(r.turns) for r in rollouts).value
        out["rollout/strands_mean"] = Mean.of(len(r.strands) for r in rollouts).value
    stops = Counter(r.stop_reason for r in rollouts if r.stop_reason is not None)
    for stop, count in sorted(stops.items()):
        out[f"rollout/stop_{stop}_frac"] = count / len(rollouts)
    if tooled := [t for r in rollouts for t in r.turns if t.calls is not None]:
        out["rollout/calls_mean"] = sum(turn.calls or 0 for turn in tooled) / len(rollouts)
        # a reply that reached its limit is no mistake of form
        wrong = [t for t in tooled if t.malformed is not None and t.finish_reason != "length"]
        out["rollout/malformed_frac"] = len(wrong) / len(tooled)
    ends = Counter(r.finish_reason for r in rollouts)
    for reason in ("stop", "length", "abort"):
        out[f"rollout/finish_{reason}_frac"] = ends[reason] / len(rollouts)
    return out


def _failures(rollouts: Sequence[Rollout]) -> Metrics:
    failed = [r for r in rollouts if r.error is not None]
    out: Metrics = {FAILED: len(failed)}
    for reason, count in sorted(Counter(reason_of(r.error) for r in failed).items()):
        out[f"rollout/failed/{reason}_count"] = count
    return out


def reason_of(error: str | None) -> str:
    """The kind of a failure: the words of its message before the first colon or number, joined by '_'."""
    head = re.split(r"[:\d\n]", error or "unscored", maxsplit=1)[0]
    words = re.findall(r"[A-Za-z]+", head)
    return "_".join(words[:5]) or "other"


def _groups(groups: Sequence[Group]) -> Metrics:
    """Spread of rewards in groups with at least two scored rollouts. A uniform group has no gradient in GRPO."""
    spreads = []
    for group in groups:
        rewards = [r.reward for r in group.rollouts if r.reward is not None]
        if len(rewards) > 1:
            spreads.append(_std(rewards) if min(rewards) < max(rewards) else 0.0)
    out: Metrics = {"group/count": len(groups), "group/compared_count": len(spreads)}
    if spreads:
        out["group/zero_std_frac"] = spreads.count(0.0) / len(spreads)
        out["group/reward_std_mean"] = Mean.of(spreads).value
    return out


def _std(numbers: Sequence[float]) -> float:
    """Population standard deviation."""
    mean = Mean.of(numbers).value
    return math.sqrt(Mean.of((x - mean) ** 2 for x in numbers).value)
