"""The critic's value of the state that a limit left: which rollouts have it, what it is, and what GAE does with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whet
from batches import make_batch, ragged
from test_train_torch import random_groups
from tiny import RUN, VOCAB, tiny_model
from whet.algos.advantages import gae, token_rewards
from whet.algos.bootstrap import lengthened
from whet.algos.turns import turn_level_gae
from whet.batch import Batch, pack, select
from whet.models import kernels
from whet.models.load import value_head
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import FinishReason, Group, Rollout, StopReason, Task

# ---------------------------------------------------------------- which rollouts


@pytest.mark.parametrize(
    ("finish", "stop", "truncated"),
    [
        ("length", None, True),
        ("stop", None, False),
        ("stop", "done", False),
        ("length", "done", False),  # the world ended the episode at a reply that was cut
        ("stop", "truncated", True),  # a limit of the world's own
        ("length", "turns", True),
        ("length", "tokens", True),
        ("length", "context", True),
        ("length", "cost", True),
        ("length", "observations", True),
        ("stop", "malformed", False),
    ],
)
def test_a_limit_truncates_and_an_end_does_not(
    finish: FinishReason, stop: StopReason | None, truncated: bool
) -> None:
    task = Task(uid=0, source="s", prompt="q", token_ids=(1,))
    told = {"token_ids": [1, 2], "mask": [0, 1], "logprobs": [0.0] * 2, "sample_logprobs": [0.0] * 2}
    made = Rollout.one_strand(
        **told, versions=[-1, 0], task=task, index=0, finish_reason=finish, stop_reason=stop, reward=1.0
    )
    assert pack([Group(task, (made,))]).truncated_R.tolist() == [truncated]


# ---------------------------------------------------------------- by hand


def cut_short(batch: Batch, rows: list[bool], last: list[float]) -> Batch:
    return replace(batch, truncated_R=torch.tensor(rows), last_value_R=torch.tensor(last).double())


def test_gae_by_hand() -> None:
    # gamma = lam = 0.5, two tokens with values 1 and 2, a reward of 3 at the end, and 4 after it.
    # delta_2 = 3 + 0.5 * 4 - 2 = 3; delta_1 = 0 + 0.5 * 2 - 1 = 0; A_2 = 3, A_1 = 0 + 0.25 * 3; R = A + V.
    # The second rollout ended by itself: delta_2 = 3 - 2 = 1, A_1 = 0.25.
    batch = make_batch([["paa", "paa"]], [3.0, 3.0])
    values = torch.tensor([9, 1, 2] * 2).double()
    batch = cut_short(replace(batch, value_N=values), [True, False], [4.0, 0.0])
    rewards = torch.tensor([0, 0, 3] * 2).double()
    given: dict[str, Any] = {"reward_N": rewards, "gamma": 0.5, "lam": 0.5}
    adv_N, return_N = gae(batch, bootstrap_truncated=True, **given)
    assert adv_N.tolist() == [0, 0.75, 3, 0, 0.25, 1]
    assert return_N is not None
    assert return_N.tolist() == [0, 1.75, 5, 0, 1.25, 3]
    assert gae(batch, **given)[0].tolist() == [0, 0.25, 1, 0, 0.25, 1]


def test_turn_level_gae_by_hand() -> None:
    # gamma = lam = 0.5. Turns of two and one token; values 1 and 2 before them, 4 after; rewards 1 and 3.
    # delta_2 = 3 + 0.5 * 4 - 2 = 3; delta_1 = 1 + 0.5 * 2 - 1 = 1; A_2 = 3, A_1 = 1 + 0.25 * 3 = 1.75; R = A + V.
    batch = make_batch([["paaoao"]], [4.0])
    batch = replace(batch, value_N=torch.tensor([100, 1, 100, 100, 2, 100]).double())
    batch = cut_short(batch, [True], [4.0])
    rewards = torch.tensor([0.0, 0.5, 0.5, 0.0, 3.0, 0.0]).double()
    adv_N, return_N = turn_level_gae(batch, reward_N=rewards, gamma=0.5, lam=0.5, bootstrap_truncated=True)
    assert adv_N.tolist() == [0, 1.75, 1.75, 0, 3, 0]
    assert return_N is not None
    assert return_N.tolist() == [0, 2.75, 2.75, 0, 5, 0]


def random_ends(batch: Batch, seed: int) -> Batch:
    noise = torch.Generator().manual_seed(seed)
    rows = torch.rand(batch.rollouts, generator=noise) < 0.5
    last = torch.where(rows, torch.randn(batch.rollouts, generator=noise).double(), 0.0)
    return replace(batch, truncated_R=rows, last_value_R=last)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.9, 0.0)])
@pytest.mark.parametrize("seed", range(4))
def test_both_against_loops(seed: int, gamma: float, lam: float) -> None:
    batch = random_ends(ragged(seed), seed)
    reward_N = token_rewards(batch, kl_coef=0.2)
    given: dict[str, Any] = {"reward_N": reward_N, "gamma": gamma, "lam": lam, "bootstrap_truncated": True}
    by_token, by_turn = gae(batch, **given)[0], turn_level_gae(batch, **given)[0]
    assert batch.value_N is not None
    mask, segment = batch.mask_N.tolist(), batch.segment_N.tolist()
    for row in range(batch.rollouts):
        at = [n for n in (batch.rollout_N == row).nonzero().flatten().tolist() if mask[n]]
        turns: list[list[int]] = []
        for n in at:
            if turns and turns[-1][-1] == n - 1 and segment[n - 1] == segment[n]:
                turns[-1].append(n)
            else:
                turns.append([n])
        for steps, found in (([[n] for n in at], by_token), (turns, by_turn)):
            advantage, following = 0.0, float(batch.last_value_R[row])  # type: ignore[index]
            for step in reversed(steps):
                value = float(batch.value_N[step[0]])
                delta = sum(float(reward_N[n]) for n in step) + gamma * following - value
                advantage, following = delta + gamma * lam * advantage, value
                for n in step:
                    assert float(found[n]) == pytest.approx(advantage, rel=1e-11, abs=1e-12)


# ---------------------------------------------------------------- the value itself


def a_critic(cut: MicroBatchPolicy) -> TorchEngine:
    return TorchEngine(tiny_model(), kernels.load("auto"), cut=cut, value_head=value_head(32, 0))


def some(seed: int = 0) -> Batch:
    """Rollouts of one and of several strands, every other one truncated."""
    batch = pack(random_groups(seed=seed, strands=True))
    return replace(batch, truncated_R=torch.arange(batch.rollouts) % 2 == 0)


def values_of(batch: Batch, cut: MicroBatchPolicy) -> tuple[Tensor, Tensor]:
    longer = lengthened(batch)
    return longer.parted(a_critic(cut).forward(longer.batch, "values"))


def test_a_truncated_rollout_is_lengthened_at_its_end() -> None:
    batch = make_batch([["paa", "pao", "p"], ["pa|ppaa"]], [1.0, 0.0, 0.0, 1.0])
    longer = lengthened(replace(batch, truncated_R=torch.tensor([True, False, True, True])))
    assert longer.batch.length_S.tolist() == [4, 3, 1, 2, 5], (
        "a rollout that sampled nothing has no last state"
    )
    assert (longer.row_T.tolist(), longer.at_T.tolist()) == ([0, 3], [3, 14])
    assert torch.equal(longer.batch.token_ids_N[longer.at_N], batch.token_ids_N)
    assert torch.equal(longer.batch.rollout_N[longer.at_N], batch.rollout_N)
    assert int(longer.batch.mask_N.sum()) == int(batch.mask_N.sum()) + 2
    assert longer.batch.segment_N.tolist() == [0] * 4 + [1] * 3 + [2] + [3] * 2 + [4] * 5


def close(one: Tensor, other: Tensor) -> bool:
    """Equal, but for the rounding of the head's products, which follows from how many rows there are."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_it_is_the_value_after_the_last_token_and_no_other_value_moves() -> None:
    """Beside transformers' own forward, strand by strand; and beside the batch as it was."""
    batch, cut = some(), MicroBatchPolicy()
    value_N, last_R = values_of(batch, cut)
    assert close(value_N, a_critic(cut).forward(batch, "values"))
    model, head = tiny_model(), value_head(32, 0)
    for row in range(batch.rollouts):
        if not batch.truncated_R[row]:  # type: ignore[index]
            assert last_R[row] == 0
            continue
        sampled = ((batch.rollout_N == row) & batch.mask_N).nonzero().flatten()
        ids = batch.token_ids_N[batch.segment_N == batch.segment_N[sampled[-1]]]
        with torch.no_grad():
            hidden = model.model(input_ids=ids[None]).last_hidden_state[0, -1]  # type: ignore[operator]
            assert float(last_R[row]) == pytest.approx(float(head(hidden)), abs=1e-5)
    assert int((last_R != 0).sum()) == int(batch.truncated_R.sum())  # type: ignore[union-attr]


@pytest.mark.parametrize("cut", [MicroBatchPolicy(forward_tokens=9), MicroBatchPolicy(forward_rollouts=1)])
def test_neither_the_cut_nor_the_company_changes_it(cut: MicroBatchPolicy) -> None:
    batch = some(1)
    whole = values_of(batch, MicroBatchPolicy())
    for one, other in zip(whole, values_of(batch, cut)):
        assert close(one, other)
    rows = torch.tensor([0, 2, 4])
    assert close(values_of(select(batch, rows), cut)[1], whole[1][rows])


def test_the_further_token_is_of_no_effect() -> None:
    longer = lengthened(some())
    longer.batch.token_ids_N[longer.at_T], before = VOCAB - 1, longer.batch.token_ids_N[longer.at_T].clone()
    one = longer.parted(a_critic(MicroBatchPolicy()).forward(longer.batch, "values"))
    longer.batch.token_ids_N[longer.at_T] = before
    other = longer.parted(a_critic(MicroBatchPolicy()).forward(longer.batch, "values"))
    assert all(torch.equal(a, b) for a, b in zip(one, other))


# ---------------------------------------------------------------- in a run


def run(folder: Path, **more: Any) -> list[dict[str, Any]]:
    config = {**RUN, "algorithm": {"name": "ppo", "advantage": {"lam": 0.5, "bootstrap_truncated": True}}}
    config = {**config, "critic": {"normalize_decay": 0.9}, **more}
    whet.train(**config, run_dir=str(folder))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_by_it_whatever_the_cut(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", algorithm={"name": "ppo", "advantage": {"lam": 0.5}})
    one = run(tmp_path / "one")
    other = run(
        tmp_path / "other", train={**RUN["train"], "micro_batch_rollouts": 1, "forward_micro_batch_tokens": 9}
    )
    assert any(line["rollout/finish_length_frac"] > 0 for line in one), "the limit of 4 tokens cuts replies"
    for a, b, without in zip(one, other, plain, strict=True):
        for key in ("critic/loss", "train/grad_norm", "critic/grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-4)
        assert a["critic/loss"] != pytest.approx(without["critic/loss"], rel=1e-3)
