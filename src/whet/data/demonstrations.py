"""Demonstrations among the policy's own rollouts: a separate stream with a fixed number per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from whet.batch import Batch, pack
from whet.data.tasks import TaskStream
from whet.types import Group, Task


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """Where a step's demonstrations come from. What changes during a run is the stream's position."""

    stream: TaskStream
    read: Callable[[list[Task]], list[Group]]
    """Tasks that hold a reply, as groups of one rollout each."""
    per_step: int

    def among(self, groups: Sequence[Group]) -> Batch:
        """The own groups and the next demonstrations as one batch, with `expert_R`."""
        given = [_unjudged(g) for g in self.read(self.stream.next(self.per_step))]
        return mark(pack(spread(groups, given)))


def _unjudged(group: Group) -> Group:
    """Reward and baseline 0: of a demonstration nothing reads them, but a batch has one for every rollout."""
    return replace(group, rollouts=tuple(replace(r, reward=0.0, baseline=0.0) for r in group.rollouts))


def mark(batch: Batch) -> Batch:
    """The batch with `expert_R`: the rollouts whose trained tokens no policy has sampled (version -1)."""
    return replace(batch, expert_R=batch.sum_R((batch.version_N < 0).long()) > 0)


def spread(own: Sequence[Group], given: Sequence[Group]) -> list[Group]:
    """Both in one list, each in its order, the given ones evenly among the own.

    Cut into m minibatches of as many groups each, everyone has len(given) / m of the given ones, to within one.
    """
    total = len(own) + len(given)
    mine, others = iter(own), iter(given)
    turns = [(i + 1) * len(given) // total > i * len(given) // total for i in range(total)]
    return [next(others) if turn else next(mine) for turn in turns]
