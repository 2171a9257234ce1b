"""Held-out accuracy: mean@k, pass@k and maj@k for every source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from whet.config.schema import Eval
from whet.rewards.combine import RewardSet, check_failures, score
from whet.types import Group, Metrics, Rollout, Task

Play = Callable[[list[Task]], Awaitable[list[Group]]]
"""Tasks to groups of finished rollouts: `play_groups` with everything else already given."""


async def evaluate(
    play: Play, tasks: list[Task], rewards: RewardSet, *, cfg: Eval, at_once: int
) -> tuple[Metrics, list[Group]]:
    """Ask the present policy every held-out task `cfg.samples` times, `at_once` tasks together; score the replies.

    Raises WhetError if more of them cannot be scored than guard.max_failure_rate allows.
    """
    groups: list[Group] = []
    for begin in range(0, len(tasks), at_once):
        part = await score(await play(tasks[begin : begin + at_once]), rewards)
        check_failures(part, rewards)
        groups += part
    return accuracy(groups, success=cfg.success, reward=cfg.reward), groups


def accuracy(groups: Sequence[Group], *, success: float, reward: str | None) -> Metrics:
    """Per source and over all: mean@k (share of replies that pass), pass@k (share of tasks with a passing reply),
    maj@k (share of tasks whose commonest reply passes; the first of equals), and the mean reward.

    A reply that could not be scored does not pass and is counted in `unscored`.
    """
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[group.task.source].append(group)
    out: Metrics = {}
    sets = dict(by_source) if len(by_source) == 1 else {**by_source, "all": list(groups)}
    for source, members in sorted(sets.items()):
        out |= {
            f"eval/{source}/{k}": v for k, v in _of_source(members, success=success, reward=reward).items()
        }
    return out | {"eval/accuracy": _mean(_passes(r, success, reward) for g in groups for r in g.rollouts)}


def _of_source(groups: Sequence[Group], *, success: float, reward: str | None) -> Metrics:
    k = max(len(g.rollouts) for g in groups)
    replies = [r for g in groups for r in g.rollouts]
    out = {f"mean@{k}": _mean(_passes(r, success, reward) for r in replies)}
    if k > 1:
        out[f"pass@{k}"] = _mean(any(_passes(r, success, reward) for r in g.rollouts) for g in groups)
        out[f"maj@{k}"] = _mean(_passes(commonest(g.rollouts), success, reward) for g in groups)
    scored = [r.reward for r in replies if r.reward is not None]
    return out | {
        "reward_mean": _mean(scored),
        "tokens_mean": _mean(r.tokens for r in replies),
        "tasks": float(len(groups)),
        "unscored": float(len(replies) - len(scored)),
    }


def commonest(rollouts: Sequence[Rollout]) -> Rollout:
    """The first rollout whose answer is given most often. The answer is what the reward extracted, else the text."""
    answers = [r.text.strip() if r.answer is None else r.answer for r in rollouts]
    most = Counter(answers).most_common(1)[0][0]
    return rollouts[answers.index(most)]


def _passes(rollout: Rollout, success: float, reward: str | None) -> bool:
    value = rollout.reward if reward is None else rollout.reward_parts.get(reward)
    return rollout.reward is not None and value is not None and value >= success


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
