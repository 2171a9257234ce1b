"""Tasks whose replies are given, as groups of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from whet.config.functions import Kind
from whet.config.schema import Config
from whet.data.tasks import demonstration, labelled, learned_turns, preference_pair
from whet.types import Group, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Read = Callable[[list[Task]], list[Group]]


def reader(cfg: Config, kind: Kind, tokenizer: PreTrainedTokenizerBase, *, ends: Collection[int]) -> Read:
    """Each task's group: a demonstration, labelled or not, or a chosen and a rejected reply. ends: tokens that end the
    model's own replies (`chat.end_of_reply`)."""
    limit, most, overlong = cfg.rollout.sampling.max_tokens, cfg.data.max_total_tokens, cfg.data.overlong
    turns = learned_turns(cfg.data, kind)

    def pair(task: Task) -> Group:
        both = preference_pair(task, tokenizer, limit, overlong=overlong, max_total_tokens=most, ends=ends)
        return Group(task, both)

    def reply(task: Task) -> Group:
        rollout = demonstration(
            task, tokenizer, limit, overlong=overlong, max_total_tokens=most, turns=turns, ends=ends
        )
        return Group(task, (labelled(rollout) if kind == "labels" else rollout,))

    one = pair if kind == "preferences" else reply
    return lambda tasks: [one(task) for task in tasks]
