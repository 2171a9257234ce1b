"""How a batch is dealt out to optimizer steps: every group once a pass, and a shuffle that is a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import ragged
from test_skipping_runs import Door, learn_step, learner, rewarded
from whet import seeds
from whet.algos.aggregate import AGGREGATIONS, weights
from whet.batch import Batch, split
from whet.config.schema import OptimizerConfig, TrainConfig
from whet.training.passes import deal, minibatch, passes


def members(batch: Batch, parts: Sequence[torch.Tensor]) -> list[list[int]]:
    """The groups of each part's rollouts."""
    return [batch.group_R[rows].unique().tolist() for rows in parts]


def test_as_they_came() -> None:
    batch = ragged(0, groups=6)
    parts = list(passes(batch, TrainConfig(tasks_per_step=6, minibatches=3, update_epochs=2), stream=1))
    assert members(batch, parts) == [[0, 1], [2, 3], [4, 5]] * 2
    assert all(torch.equal(a, b) for a, b in zip(parts, split(batch, 3) * 2, strict=True))


def test_shuffled_by_hand() -> None:
    """Group g goes to the place that the permutation gives it; places 0, 1 are the first minibatch."""
    batch = ragged(0, groups=6)
    place = seeds.permutation(seeds.key(7, 0), 6).tolist()
    want = [sorted(g for g in range(6) if place[g] // 2 == part) for part in range(3)]
    parts = deal(batch, 3, stream=seeds.key(7, 0))
    assert members(batch, parts) == want
    for part, groups in zip(parts, want, strict=True):
        rows = torch.nonzero(torch.isin(batch.group_R, torch.tensor(groups))).flatten()
        assert torch.equal(part, rows), "whole groups, in the order of the batch"


@given(st.integers(1, 12), st.integers(1, 6), st.booleans(), st.integers(0, 2**63), st.integers(0, 50))
def test_every_group_once_a_pass(groups: int, parts: int, shuffle: bool, stream: int, seed: int) -> None:
    batch = ragged(seed, groups=groups)
    train = TrainConfig(tasks_per_step=parts, minibatches=parts, shuffle_minibatches=shuffle)
    dealt = members(batch, list(passes(batch, train, stream=stream)))
    assert sorted(chain(*dealt)) == list(range(groups))
    sizes = [len(part) for part in dealt]
    assert len(sizes) == min(parts, groups)
    assert max(sizes) - min(sizes) <= 1


def test_minibatches_that_do_not_divide_the_tasks_cut_groups() -> None:
    """3 groups in 2 minibatches: half of the rollouts each, in order, so the second group is in both."""
    batch = ragged(0, groups=3)
    rollouts = batch.rollouts
    parts = list(passes(batch, TrainConfig(tasks_per_step=3, minibatches=2), stream=1))
    assert torch.equal(torch.cat(parts), torch.arange(rollouts))
    assert abs(len(parts[0]) - len(parts[1])) <= 1
    shuffled = TrainConfig(tasks_per_step=3, minibatches=2, shuffle_minibatches=True)
    one = list(passes(batch, shuffled, stream=1))
    place = seeds.permutation(seeds.key(1, 0), rollouts).tolist()
    first = [r for r in range(rollouts) if place[r] * 2 // rollouts == 0]
    assert one[0].tolist() == first
    assert sorted(torch.cat(one).tolist()) == list(range(rollouts))


def test_every_pass_and_every_step_is_dealt_anew_and_again_the_same() -> None:
    batch, train = ragged(1, groups=8), TrainConfig(minibatches=4, update_epochs=3, shuffle_minibatches=True)

    def dealt(stream: int) -> list[list[int]]:
        return members(batch, list(passes(batch, train, stream=stream)))

    one = dealt(5)
    assert one == dealt(5)
    assert one != dealt(6)
    assert one[:4] != one[4:8] != one[8:]
    assert sorted(chain(*one)) == sorted([*range(8)] * 3)


def test_all_deals_are_equally_likely() -> None:
    """4 groups in 2 minibatches: each of the 6 ways to choose the first has a sixth of 600 draws (4 sigma)."""
    batch = ragged(2, groups=4)
    counts: dict[tuple[int, ...], int] = {}
    for n in range(600):
        first = tuple(members(batch, deal(batch, 2, stream=seeds.key(n, "test")))[0])
        counts[first] = counts.get(first, 0) + 1
    assert len(counts) == 6
    assert max(abs(np.array(list(counts.values())) - 100)) < 4 * np.sqrt(600 * 1 / 6 * 5 / 6)


def test_a_pass_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is asked for once a pass, by the number of the pass."""
    asked: list[int] = []
    whole = seeds.permutation
    monkeypatch.setattr(seeds, "permutation", lambda stream, n: asked.append(stream) or whole(stream, n))
    list(passes(ragged(0), TrainConfig(minibatches=2, update_epochs=3, shuffle_minibatches=True), stream=11))
    assert asked == [seeds.key(11, n) for n in range(3)]


# ---------------------------------------------------------------- fewer groups than minibatches


@given(st.integers(1, 12), st.integers(1, 9), st.booleans(), st.integers(0, 50))
def test_groups_come_again_until_every_minibatch_has_one(
    groups: int, parts: int, shuffle: bool, seed: int
) -> None:
    """Nothing changes where there are enough. Else each group is in as many minibatches as any other, or one more."""
    batch = ragged(seed, groups=groups)
    train = TrainConfig(tasks_per_step=parts, minibatches=parts, update_epochs=2, shuffle_minibatches=shuffle)
    filled = members(batch, list(passes(batch, train, stream=7, fill=True)))
    if groups >= parts:
        assert filled == members(batch, list(passes(batch, train, stream=7)))
        return
    assert len(filled) == 2 * parts
    for epoch in (filled[:parts], filled[parts:]):
        times = [epoch.count([g]) for g in range(groups)]
        assert sum(times) == parts
        assert parts // groups in times
        assert max(times) - min(times) <= 1


@pytest.mark.parametrize("mode", [mode for mode in AGGREGATIONS if mode != "pair-mean"])
def test_copies_count_as_often_as_they_are_wherever_they_stand(mode: str) -> None:
    """Sums of an epoch have each group as often as the batch; a mean of one group does not know how often it counts."""
    counted = ragged(3, groups=2)
    counted = replace(counted, count_R=torch.tensor([5.0, 3.0], dtype=torch.float64)[counted.group_R])
    train = TrainConfig(tasks_per_step=8, minibatches=4, update_epochs=3)
    parts = list(passes(counted, train, stream=1, fill=True))
    found_N = torch.zeros(counted.tokens, dtype=torch.float64)
    for rows in parts[:4]:
        weight_M = weights(minibatch(counted, rows, parts), mode, norm_tokens=8)
        at_N = torch.isin(counted.rollout_N, rows)
        found_N[at_N] += weight_M
        if not mode.startswith("token-sum"):
            alone = minibatch(replace(counted, count_R=None), rows, parts)
            assert torch.allclose(weight_M, weights(alone, mode, norm_tokens=8))
    if mode.startswith("token-sum"):
        assert torch.allclose(found_N, weights(counted, mode, norm_tokens=8))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_step_of_copies_has_the_optimizer_steps_that_are_planned(shuffle: bool) -> None:
    """Two of six groups are left for three minibatches. The learning rate is so small that nothing moves, so the
    gradients of an update epoch add up to that of one minibatch with all copies."""
    train = {"tasks_per_step": 6, "update_epochs": 2, "shuffle_minibatches": shuffle}
    keys = {"refill": "copy", "loss_agg_mode": "token-sum"}
    still = OptimizerConfig(name="sgd", lr=1e-20)
    whole, cut = Door(optimizer=still), Door(optimizer=still)
    for door, number in ((whole, 1), (cut, 3)):
        one = learner(door, skip=True, train={**train, "minibatches": number}, **keys)
        batch, updates = learn_step(one, rewarded(set())[:2])
        assert batch.count_R is not None
        assert float(batch.count_R.sum()) == 6 * 3, "of three rollouts each"
        assert len(updates) == 2 * number
    assert cut.engine.optimizer is not None
    assert cut.engine.optimizer.step_count == 2 * 3
    for name, wanted in whole.gradients[0].items():
        found = sum(step[name] for step in cut.gradients[:3])
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())), name
