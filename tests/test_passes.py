"""How a batch is dealt out to optimizer steps: every group once a pass, and a shuffle that is a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batches import ragged
from whet import seeds
from whet.batch import Batch, split
from whet.config.schema import TrainConfig
from whet.training.passes import deal, passes


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
