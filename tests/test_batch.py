"""Packing, cutting and putting together: no token, field or group gets lost or moved."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
import torch

from whet.algos.advantages import token_rewards
from whet.batch import Batch, pack, select, split
from whet.types import Group, Rollout, Task, Turn


def rollout(uid: int, index: int, *, prompt: int, reply: int, reward: float = 0.0) -> Rollout:
    n = prompt + reply
    return Rollout.one_strand(
        task=Task(uid=uid, source="s", prompt="p", token_ids=tuple(range(prompt))),
        index=index,
        token_ids=[*range(prompt), *(100 + uid * 10 + index + t for t in range(reply))],
        mask=[0] * prompt + [1] * reply,
        logprobs=[0.0] * prompt + [-0.5 * (t + 1) for t in range(reply)],
        sample_logprobs=[0.0] * n,
        versions=[-1] * prompt + [3] * reply,
        finish_reason="stop" if index % 2 else "length",
        reward=reward,
    )


def with_turns(r: Rollout, *turns: Turn) -> Rollout:
    return replace(r, strands=(replace(r.strand, turns=turns),))


def groups(count: int = 5, *, seed: int = 0) -> list[Group]:
    rng = random.Random(seed)
    out = []
    for uid in range(count):
        prompt = rng.randint(1, 9)
        rows = [
            rollout(uid, i, prompt=prompt, reply=rng.randint(1, 7), reward=uid + i / 10)
            for i in range(rng.randint(1, 4))
        ]
        out.append(Group(rows[0].task, tuple(rows)))
    return out


def joined(parts: list[Batch]) -> list[list[int]]:
    return [part.token_ids_N[part.rollout_N == r].tolist() for part in parts for r in range(part.rollouts)]


def test_pack_by_hand() -> None:
    batch = pack(
        [
            Group(
                Task(uid=0, source="s", prompt=""),
                (rollout(0, 0, prompt=2, reply=1), rollout(0, 1, prompt=2, reply=2)),
            )
        ]
    )
    assert batch.token_ids_N.tolist() == [0, 1, 100, 0, 1, 101, 102]
    assert batch.mask_N.tolist() == [False, False, True, False, False, True, True]
    assert batch.rollout_N.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.position_N.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.start_S.tolist() == [0, 3]
    assert batch.prompt_S.tolist() == [2, 2]
    assert batch.logp_sample_N.tolist() == [0, 0, -0.5, 0, 0, -0.5, -1.0]
    assert batch.stopped_R.tolist() == [False, True]
    assert batch.sum_R(batch.logp_sample_N).tolist() == [-0.5, -1.5]


def test_select_keeps_every_field_of_the_rows() -> None:
    batch = pack(groups())
    batch = replace(batch, adv_N=torch.arange(batch.tokens).float(), weight_N=torch.rand(batch.tokens))
    rows = torch.tensor([1, 3, 4])
    part = select(batch, rows)
    for field in fields(Batch):
        whole, mine = getattr(batch, field.name), getattr(part, field.name)
        if whole is None:
            assert mine is None
        elif field.name.endswith("_N") and field.name not in ("segment_N", "rollout_N"):
            assert torch.equal(mine, torch.cat([whole[batch.rollout_N == r] for r in rows]))
    assert torch.equal(part.length_S, batch.length_S[rows])
    same = batch.group_R[rows][:, None] == batch.group_R[rows][None, :]
    assert torch.equal(part.group_R[:, None] == part.group_R[None, :], same)
    assert part.group_R[0] == 0


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_split_is_a_partition_into_whole_groups(parts: int) -> None:
    batch = pack(groups(10))
    pieces = [select(batch, rows) for rows in split(batch, parts)]
    assert len(pieces) == parts
    assert joined(pieces) == joined([batch])
    sizes = [int(p.group_R[-1]) + 1 for p in pieces]
    assert sum(sizes) == 10
    assert max(sizes) - min(sizes) <= 1


def test_rewards_of_turns_stand_at_their_last_tokens() -> None:
    """Two rollouts of five tokens: turns [2, 3) and [4, 5) with a reward for the first, and a turn without any."""
    one, other = (rollout(1, n, prompt=2, reply=3, reward=1.0) for n in (0, 1))
    one = with_turns(one, Turn(2, 3, "stop", 0.25), Turn(4, 5, "stop", None))
    other = with_turns(other, Turn(2, 5, "stop", 0.5))
    batch = pack([Group(one.task, (one, other))])
    assert batch.turn_reward_N is not None
    assert batch.turn_reward_N.tolist() == [0, 0, 0.25, 0, 0, 0, 0, 0, 0, 0.5]
    assert token_rewards(batch).tolist() == [0, 0, 0.25, 0, 0.75, 0, 0, 0, 0, 1.0]
    assert pack([Group(one.task, (with_turns(one),))]).turn_reward_N is None


def test_two_rollouts_are_equal_if_their_tokens_are_to_the_bit() -> None:
    one = rollout(4, 1, prompt=3, reply=2, reward=0.1)
    assert one == rollout(4, 1, prompt=3, reply=2, reward=0.1)
    negative = replace(one.strand, logprobs=-one.strand.logprobs)
    assert one != replace(one, strands=(negative,)), "-0.0 is not 0.0"
    assert one != replace(one, reward=0.2)
    assert one != one.task
