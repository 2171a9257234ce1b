"""Demonstrations among the policy's own rollouts: a separate stream with a fixed number per step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from whet import seeds
from whet.batch import Batch, pack
from whet.config.groups import experts_per_step
from whet.config.recipes import resolve
from whet.config.schema import Config
from whet.config.sources import order_of_demonstrations
from whet.data.replies import reader
from whet.data.tasks import TaskStream, learned_turns
from whet.types import Group, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

log = logging.getLogger(__name__)


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


def open_demonstrations(
    cfg: Config, tokenizer: Tokenizer, *, ends: Collection[int], held_out: Sequence[Task]
) -> Demonstrations | None:
    """The demonstrations of a mix, in their own order; None without a mix. ends: tokens that end the model's own
    replies. held_out: tasks that are left out."""
    count = experts_per_step(cfg, resolve(cfg.algorithm))
    if count == 0:
        return None
    data = cfg.data.model_copy(update={"train": cfg.data.demonstrations})
    stream = TaskStream(
        data.train,
        data,
        tokenizer=tokenizer,
        seed=seeds.key(cfg.seed, "expert"),
        exclude=held_out if data.exclude_eval else (),
        max_response_tokens=cfg.rollout.sampling.max_tokens,
        turns=learned_turns(data, "demonstrations"),
        learned="demonstrations",
        ends=ends,
        order=order_of_demonstrations(data),
    )
    log.info("demonstrations: %s", ", ".join(f"{k} {v}" for k, v in stream.counts.items()))
    read = reader(cfg.model_copy(update={"data": data}), "demonstrations", tokenizer, ends=ends)
    return Demonstrations(stream=stream, read=read, per_step=count)


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
