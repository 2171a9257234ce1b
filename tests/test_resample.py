"""How often rollouts count: weights by hand, draws that repeat, frequencies that fit, what the loss makes of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import concat, doubles, logp_now, make_batch, ragged
from sections import algorithm as section
from whet import seeds
from whet.algos.aggregate import weights
from whet.algos.recipes import build
from whet.algos.resample import RESAMPLE, balanced, by_best, by_extremes, by_power, copies, counts
from whet.batch import Batch, Outputs, select
from whet.config import schema

STREAM = seeds.key(1, "resample")


def drawn(batch: Batch, method: str, stream: int = STREAM, **settings: float) -> torch.Tensor:
    settings = {"power": 2.0, **settings} if method == "pow" else settings
    return RESAMPLE[method](batch, stream=stream, **settings)


# ---------------------------------------------------------------- drawing


def test_weights_by_hand() -> None:
    scores = doubles([3.0, -2.0, 0.0, 3.0, 1.0])
    assert by_power(scores, 2.0).tolist() == [9, 4, 0, 9, 1]
    assert by_power(scores, 1.0).tolist() == [3, 2, 0, 3, 1]
    assert by_extremes(scores).tolist() == [1, 1, 0, 1, 0]
    assert by_best(scores).tolist() == pytest.approx([0.4, 0.1, 0.1, 0.4, 0.1])


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_as_many_as_there_are_and_none_that_sampled_nothing(method: str, seed: int) -> None:
    batch = ragged(seed)
    count_R = drawn(batch, method, stream=seed)
    sampled = batch.sum_R(torch.ones(batch.tokens)) > 0
    assert float(count_R.sum()) == float(sampled.sum())
    assert (count_R[~sampled] == 0).all()
    assert count_R.dtype == torch.float32
    assert torch.equal(count_R, drawn(batch, method, stream=seed))


def test_draws_follow_the_inverse_of_the_cumulative_weights() -> None:
    # Weights 1, 0, 9: a uniform number below 0.1 is the first, all others the third (the second's share is 1e-9).
    batch = make_batch([["pa", "pa", "pa"]], [1.0, 0.0, 3.0])
    for stream in range(20):
        u = seeds.uniforms(stream, 0, 3)
        assert drawn(batch, "pow", stream).tolist() == [sum(u < 0.1), 0, sum(u >= 0.1)]


@pytest.mark.parametrize(("method", "share"), [("pow", 0.9), ("max_min", 0.5), ("max_random", 0.8)])
def test_frequencies_fit_the_weights(method: str, share: float) -> None:
    batch = make_batch([["pa", "pa"]], [1.0, 3.0])
    total = sum(float(drawn(batch, method, stream=seeds.key(s, "law"))[1]) for s in range(2000))
    # 4000 draws: the standard error is at most 0.008.
    assert total / 4000 == pytest.approx(share, abs=0.032)


def test_a_batch_of_zeros_is_drawn_from_evenly() -> None:
    batch = make_batch([["pa"] * 4], [0.0] * 4)
    total = sum(drawn(batch, "pow", stream=seeds.key(s, "law")) for s in range(500))
    assert (total / 500).tolist() == pytest.approx([1.0] * 4, abs=0.2)


def test_nothing_sampled_nothing_drawn() -> None:
    assert drawn(make_batch([["p", "pp"]], [1.0, 2.0]), "pow").tolist() == [0, 0]


# ---------------------------------------------------------------- balance


def test_balance_by_hand() -> None:
    # Group 0: mean 0.2, one good and four bad: one bad is left. Group 1: two of each. Group 2: at the mean is good.
    batch = make_batch([["pa"] * 5, ["pa"] * 4, ["pa"] * 3, ["pa"]], [1, 0, 0, 0, 0, 1, 1, 0, 0, 2, 2, 2, -5])
    seen = set()
    for stream in range(30):
        count = balanced(batch, stream=stream).tolist()
        assert count[0] == 1
        assert sum(count[1:5]) == 1
        assert count[5:] == [1] * 8
        seen.add(count.index(1, 1))
    assert seen == {1, 2, 3, 4}


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_balance_leaves_no_more_below_the_mean_than_above(seed: int) -> None:
    batch = replace(ragged(seed, groups=5), reward_R=ragged(seed, groups=5).reward_R.round())
    count_R = balanced(batch, stream=seed)
    sampled = (batch.sum_R(torch.ones(batch.tokens)) > 0).tolist()
    for group in range(5):
        rows = [r for r, g in enumerate(batch.group_R.tolist()) if g == group and sampled[r]]
        rewards = [float(batch.reward_R[r]) for r in rows]
        mean = sum(rewards) / max(len(rows), 1)
        bad = [r for r, x in zip(rows, rewards, strict=True) if x < mean]
        good = len(rows) - len(bad)
        kept = sum(float(count_R[r]) for r in bad)
        assert kept == min(len(bad), good)
        assert all(count_R[r] == 1 for r in rows if r not in bad)


# ---------------------------------------------------------------- copies


def test_copies_stand_for_missing_groups() -> None:
    batch = make_batch([["pa", "pa"], ["pa"], ["pa"]])
    for stream in range(20):
        u = seeds.uniforms(stream, 0, 2)
        extra = [sum(int(x * 3) == g for x in u) for g in range(3)]
        expected = [1 + extra[0], 1 + extra[0], 1 + extra[1], 1 + extra[2]]
        assert copies(batch, stream=stream, groups=5).tolist() == expected
    assert copies(batch, stream=0, groups=3).tolist() == [1] * 4


def test_a_counted_group_is_as_good_as_its_copies() -> None:
    """The loss with counts is that of a batch in which the copies stand."""
    algorithm = build(schema.AlgorithmConfig(name="dapo"), critic=schema.CriticConfig(), max_tokens=20)
    batch = make_batch([["paa", "pa"], ["paaa", "pa"]], [1, 0, 0, 3])
    counted = replace(batch, count_R=torch.tensor([1.0, 1.0, 2.0, 2.0]).double())
    again = select(batch, torch.tensor([2, 3]))

    def loss(b: Batch) -> float:
        b = algorithm.advantage(b, 0.0)
        out = algorithm.loss(b, Outputs(logp_N=b.logp_sample_N))
        return float((out.loss_N * weights(b, "token-mean", norm_tokens=20)).sum())

    assert loss(counted) == pytest.approx(loss(concat([batch, again])), rel=1e-12)
    assert loss(counted) != pytest.approx(loss(batch), rel=1e-3)


# ---------------------------------------------------------------- all together


def test_counts_are_multiplied_and_None_is_once() -> None:
    batch = make_batch([["pa", "pa"], ["pa"]], [1.0, 3.0, 2.0])
    none: dict[str, Any] = {"stream": 3, "groups": 0, "finished_only": False}
    assert counts(batch, None, **none) is None
    stopped = replace(batch, stopped_R=torch.tensor([True, False, True]))
    assert counts(stopped, None, **{**none, "finished_only": True}).tolist() == [1, 0, 1]
    both = counts(
        stopped, partial(RESAMPLE["pow"], power=2.0), **{**none, "groups": 4, "finished_only": True}
    )
    expected = drawn(batch, "pow", 3) * copies(batch, stream=3, groups=4) * torch.tensor([1.0, 0.0, 1.0])
    assert torch.equal(both, expected)


def made(**keys: Any) -> Any:
    return build(
        schema.AlgorithmConfig.model_validate(section(**keys)), critic=schema.CriticConfig(), max_tokens=20
    )


def test_masked_rollouts_give_no_loss_but_count_in_the_mean() -> None:
    algorithm = made(groups={"truncated": "mask"}, normalize_std=False)
    batch = make_batch([["pa", "pa"]], [1.0, 0.0])
    batch = replace(batch, stopped_R=torch.tensor([True, False]), logp_old_N=batch.logp_sample_N)
    batch = algorithm.advantage(algorithm.resample(batch, 5, 1), 0.0)
    assert batch.adv_N is not None
    assert batch.adv_N.tolist() == [0, 0.5, 0, -0.5]
    weight_N = weights(batch, "token-mean", norm_tokens=20)
    assert weight_N.tolist() == [0, 1, 0, 0]
    logp = logp_now(batch)
    (grad,) = torch.autograd.grad((algorithm.loss(batch, Outputs(logp_N=logp)).loss_N * weight_N).sum(), logp)
    assert (grad != 0).tolist() == [False, True, False, False]


def test_settings_reach_resampling_and_bounds() -> None:
    batch = make_batch([["pa", "pa", "pa"]], [1.0, 0.0, 3.0])
    assert made().resample(batch, 5, 9).count_R is None
    got = made(resample={"name": "pow", "power": 1.0}).resample(batch, 5, 1).count_R
    assert torch.equal(got, drawn(batch, "pow", 5, power=1.0))
    got = made(refill="copy").resample(batch, 5, 4).count_R
    assert got.tolist() == [4, 4, 4]
    bounded = made(normalize_std=False, advantage_clip=(-1.0, 0.5)).advantage(batch, 0.0).adv_N
    # 1, 0, 3 less 4/3: -1/3, -4/3, 5/3.
    assert bounded.tolist() == pytest.approx([0, -1 / 3, 0, -1, 0, 0.5])
    white = made(normalize_std=False, whiten="population").advantage(batch, 0.0).adv_N
    # Population deviation of -1/3, -4/3, 5/3: sqrt(42 / 27).
    scale = (42 / 27) ** 0.5
    assert white.tolist() == pytest.approx([0, -1 / 3 / scale, 0, -4 / 3 / scale, 0, 5 / 3 / scale])
