"""Aggregation: what one token counts, by hand, against loops, and its laws."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from batches import by_rollout, doubles, make_batch, pair_batch, ragged, reordered
from whet.algos.aggregate import AGGREGATIONS, weights
from whet.batch import Batch
from whet.config.sections.algorithm import Aggregation
from whet.types import ConfigError

SEEDS = range(6)

# Sampled tokens: 1 and 3 in group 0, 2 in group 1; one rollout of group 1 and all of group 2 sampled nothing.
PICTURES = [["pa", "paoaa"], ["paa", "pp"], ["p"]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 6, 1 / 6, 1 / 6]),  # 6 tokens
        ("token-sum", [1, 1, 1]),
        ("token-sum-norm", [1 / 10, 1 / 10, 1 / 10]),  # constant 10
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),  # 3 rollouts
        ("seq-mean-token-mean", [1 / 3, 1 / 9, 1 / 6]),  # 3 rollouts of 1, 3, 2 tokens
        ("seq-mean-token-sum-norm", [1 / 30, 1 / 30, 1 / 30]),  # 3 rollouts, constant 10
        ("prompt-mean", [1 / 8, 1 / 8, 1 / 4]),  # 2 groups of 4 and 2 tokens
    ],
)
def test_weights_by_hand(mode: str, expected: list[float]) -> None:
    batch = make_batch(PICTURES)
    weight_N = weights(batch, mode, norm_tokens=10)
    lists = [x for x in by_rollout(batch, weight_N) if x]
    assert lists == [pytest.approx([w] * n) for w, n in zip(expected, (1, 3, 2), strict=True)]
    assert (weight_N[~batch.mask_N] == 0).all()


def test_pair_mean_by_hand() -> None:
    # 1/2 at the last sampled token of the chosen ones: rollout 1 of pair 0 (4 + 2), 0 of pair 1 (8 + 2).
    batch = make_batch([["paao", "paao"], ["paa", "pa"]], [0, 1, 1, 0])
    assert weights(batch, "pair-mean", norm_tokens=10).nonzero().flatten().tolist() == [6, 10]
    assert weights(batch, "pair-mean", norm_tokens=10)[[6, 10]].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("seed", SEEDS)
def test_weighted_sum_is_the_named_mean(seed: int) -> None:
    batch = ragged(seed)
    x_N = torch.randn(batch.tokens, generator=torch.Generator().manual_seed(seed)).double()
    lists = by_rollout(batch, x_N)
    rows = [x for x in lists if x]
    tokens = [t for x in rows for t in x]
    groups: dict[int, list[float]] = {}
    for x, group in zip(lists, batch.group_R.tolist()):
        if x:
            groups.setdefault(group, []).extend(x)
    expected = {
        "token-mean": sum(tokens) / len(tokens),
        "token-sum": sum(tokens),
        "token-sum-norm": sum(tokens) / 7,
        "seq-mean-token-sum": sum(sum(x) for x in rows) / len(rows),
        "seq-mean-token-mean": sum(sum(x) / len(x) for x in rows) / len(rows),
        "seq-mean-token-sum-norm": sum(sum(x) / 7 for x in rows) / len(rows),
        "prompt-mean": sum(sum(x) / len(x) for x in groups.values()) / len(groups),
    }
    for mode, mean in expected.items():
        got = float((x_N * weights(batch, mode, norm_tokens=7)).sum())
        assert got == pytest.approx(mean, rel=1e-12, abs=1e-14), mode


@pytest.mark.parametrize("block", [1, 2, 3, 100])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_mean_over_blocks_of_rollouts(seed: int, block: int) -> None:
    """As SkyRL's token_mean_legacy normalizes: each block's losses by its tokens, then by the number of blocks."""
    batch = ragged(seed)
    x_N = torch.randn(batch.tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rows: list[list[float]] = [[] for _ in range(batch.rollouts)]
    for x, row, sampled in zip(x_N.tolist(), batch.rollout_N.tolist(), batch.mask_N.tolist()):
        rows[row] += [x] if sampled else []
    blocks = [[x for row in rows[n : n + block] for x in row] for n in range(0, len(rows), block)]
    expected = sum(sum(x) / max(len(x), 1) for x in blocks) / len(blocks)
    got = float((x_N * weights(batch, "token-mean", norm_tokens=7, block=block)).sum())
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
@pytest.mark.parametrize("seed", SEEDS)
def test_means_have_weights_that_sum_to_1(seed: int, mode: str) -> None:
    assert float(weights(ragged(seed), mode, norm_tokens=7).sum()) == pytest.approx(1, rel=1e-13)


def test_pair_mean_sums_to_1() -> None:
    assert float(weights(pair_batch(7), "pair-mean", norm_tokens=7).sum()) == pytest.approx(1, rel=1e-13)


@pytest.mark.parametrize("mode", [m for m in AGGREGATIONS if m != "pair-mean"])
def test_nothing_sampled_has_no_weight_and_no_nan(mode: str) -> None:
    assert weights(make_batch([["pp", "p"]]), mode, norm_tokens=10).tolist() == [0, 0, 0]


def test_weights_are_float32_in_a_batch_as_packed() -> None:
    assert weights(ragged(0, dtype=torch.float32), "token-mean", norm_tokens=10).dtype == torch.float32


def test_an_unknown_mode_is_refused_with_the_right_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        weights(make_batch([["pa"]]), "tokenmean", norm_tokens=10)


# ---------------------------------------------------------------- rollouts that count several times, or not at all

ONLINE = [mode for mode in AGGREGATIONS if mode != "pair-mean"]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [2 / 5, 0, 1.5 / 5]),
        ("seq-mean-token-sum", [2 / 3.5, 0, 1.5 / 3.5]),
        ("seq-mean-token-mean", [2 / 3.5, 0, 1.5 / 7]),
        ("prompt-mean", [2 / (2 * 2), 0, 1.5 / (2 * 3)]),  # groups of 2 * 1 and 1.5 * 2 tokens
        ("token-sum", [2, 0, 1.5]),
    ],
)
def test_counts_by_hand(mode: str, expected: list[float]) -> None:
    # Counts 2, 0, 1.5 of rollouts with 1, 3, 2 tokens: 5 tokens, 3.5 rollouts.
    batch = replace(make_batch(PICTURES), count_R=doubles([2, 0, 1.5, 1, 1]))
    lists = [x for x in by_rollout(batch, weights(batch, mode, norm_tokens=10)) if x]
    assert lists == [pytest.approx([w] * n) for w, n in zip(expected, (1, 3, 2), strict=True)]


def copied(batch: Batch, times: list[int]) -> Batch:
    """The batch in which each rollout stands so many times."""
    return reordered(batch, [r for r, n in enumerate(times) for _ in range(n)])


@pytest.mark.parametrize("mode", ONLINE)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_count_is_that_many_copies(seed: int, mode: str) -> None:
    batch = ragged(seed)
    batch = replace(batch, reward_R=torch.arange(batch.rollouts).double())  # a number to know them by
    times = [(3 * r + seed) % 4 for r in range(batch.rollouts)]
    x_N = batch.logp_sample_N
    counted = replace(batch, count_R=torch.tensor(times).double())
    several = copied(batch, times)
    got = (x_N * weights(counted, mode, norm_tokens=7)).sum()
    expected = (several.logp_sample_N * weights(several, mode, norm_tokens=7)).sum()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", ONLINE)
def test_counts_of_0_leave_no_nan(mode: str) -> None:
    batch = replace(make_batch(PICTURES), count_R=torch.zeros(5).double())
    assert (weights(batch, mode, norm_tokens=10) == 0).all()


def test_the_schema_names_what_there_is() -> None:
    assert {*get_args(Aggregation), "pair-mean"} == set(AGGREGATIONS)
