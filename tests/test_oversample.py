"""More tasks are sampled than a step trains on, and their groups chosen by rewards (PRIME)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from test_groups import group, rollout
from test_learning import learn
from whet.algos.groups import by_mean_reward, mask_shared_prefixes
from whet.types import ConfigError, Group, Rollout, Turn


def of(*rewards: float, tokens: int = 3) -> Group:
    return group(*(rollout(n, reply=range(tokens), reward=x) for n, x in enumerate(rewards)))


def chosen(groups: list[Group], number: int, **how: Any) -> tuple[list[int], list[int]]:
    how = {"low": 0.2, "high": 0.8, "longest": None} | how
    if isinstance(most := how["longest"], int):
        how["longest"] = lambda task: most
    kept, others = by_mean_reward(groups, number=number, **how)
    places = {id(g): n for n, g in enumerate(groups)}
    return [places[id(g)] for g in kept], [places[id(g)] for g in others]


def test_groups_within_the_bounds_come_first_in_their_order() -> None:
    groups = [of(0.0, 0.0), of(1.0, 0.0), of(1.0, 1.0), of(0.5, 0.5), of(0.4, 0.0)]
    assert chosen(groups, 2) == ([1, 3], [4, 0, 2])
    assert chosen(groups, 4) == ([1, 3, 4, 0], [2]), "then the others, so that a step is full"
    assert chosen(groups, 3, high=None) == ([1, 2, 3], [4, 0])
    assert chosen(groups, 3, low=None, high=None)[0] == [0, 1, 2]


def test_a_reply_at_the_limit_puts_its_group_behind() -> None:
    groups = [of(1.0, 0.0, tokens=5), of(1.0, 0.0, tokens=4), of(1.0, 0.0)]
    assert chosen(groups, 2, longest=5) == ([2, 0], [1]), "4 of 5 tokens are within a token of it"
    assert chosen(groups, 2, longest=6) == ([1, 2], [0])


def test_a_prefix_without_a_loss_counts_in_a_reply_s_length() -> None:
    """groups.min_shared_prefix takes the tokens that replies share out of the loss before groups are chosen."""

    def turned(reply: Sequence[int], reward: float) -> Rollout:
        made = rollout(int(reward), reply=reply, reward=reward)
        end, start = len(made.strand.mask), made.strand.prompt_tokens
        turns = (Turn(start, end, made.finish_reason),)
        return replace(made, strands=(replace(made.strand, turns=turns),))

    cut = mask_shared_prefixes(group(turned([1, 2, 3, 4, 5], 0.0), turned([1, 2, 3, 4, 6], 1.0)), 2)
    assert [r.tokens for r in cut.rollouts] == [1, 1]
    assert chosen([cut, of(1.0, 0.0)], 1, longest=5) == ([1], [0])


def test_the_limit_is_that_of_the_groups_own_source() -> None:
    """rollout.sources: 3 tokens are cut where 3 is the longest reply, and end where it is 9."""
    most = {"short": 3, "long": 9}
    groups = [replace(g, task=replace(g.task, source=name)) for g, name in zip([of(1.0, 0.0)] * 2, most)]
    assert chosen(groups, 1, longest=lambda task: most[task.source]) == ([1], [0])


TRAIN = {"steps": 4, "tasks_per_step": 4, "optimizer": {"lr": 1e-3}}


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_samples_more_than_it_trains_on(tmp_path: Path, staleness: int) -> None:
    algorithm = {"name": "grpo", "oversample": {"factor": 3.0, "low": 0.05}}
    rollout = {"group_size": 4, "sampling": {"max_tokens": 5}, "max_staleness": staleness}
    lines = learn(tmp_path, algorithm, train=TRAIN, rollout=rollout)
    steps = [m for m in lines if "train/loss" in m]
    assert [m["ledger/trained_rollouts"] for m in steps] == [4 * 4] * 4
    assert [m["ledger/rejected/surplus_rollouts"] for m in steps] == [8 * 4] * 4


def test_an_epoch_ends_by_the_tasks_that_are_sampled(tmp_path: Path) -> None:
    algorithm = {"name": "grpo", "oversample": {"factor": 4.0}}
    train = {"epochs": 1, "tasks_per_step": 2, "drop_last": True, "optimizer": {"lr": 1e-3}}
    data = {"max_prompt_tokens": 8, "train": [{"path": "tests/data/words.jsonl", "limit": 26}]}
    assert len(learn(tmp_path, algorithm, train=train, data=data)) == 3


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"rollout": {"schedule": "async", "max_staleness": 2}}, "set rollout.schedule=deterministic"),
        ({"buffer": {"replay": {"share": 0.5}}}, "leave one of the two out"),
    ],
)
def test_what_has_no_whole_step_is_refused(tmp_path: Path, sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        learn(tmp_path, {"name": "grpo", "oversample": "mean_reward"}, train=TRAIN, **sections)
