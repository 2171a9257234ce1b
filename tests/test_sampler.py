"""The sampler: filters worked by hand and against a naive oracle, draws against chi-square."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whet import seeds
from whet.rollout.native import sampler
from whet.rollout.native.sampler import Filters
from whet.types import Sampling

INF = math.inf
LAST_U = 1.0 - 2.0**-53
"""The largest random number there is."""


def logs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


def kept(logits_1V: Tensor) -> list[int]:
    return torch.nonzero(logits_1V[0] > -INF).flatten().tolist()


def filtered(logits_BV: Tensor, *samplings: Sampling, seen: Tensor | None = None) -> Tensor:
    none = torch.zeros_like(logits_BV, dtype=torch.bool)
    seen = none if seen is None else seen
    return sampler.filtered(logits_BV, Filters.of(samplings), seen_BV=seen, banned_BV=none)


# ---------------------------------------------------------------- filters, by hand


def test_top_k_keeps_the_largest_and_ties_of_the_last() -> None:
    logits = logs(0.1, 0.4, 0.2, 0.2, 0.1)
    assert kept(sampler.keep_top_k(logits, torch.tensor([1]), widest=1)) == [1]
    assert kept(sampler.keep_top_k(logits, torch.tensor([2]), widest=2)) == [1, 2, 3]
    assert kept(sampler.keep_top_k(logits, torch.tensor([0]), widest=0)) == [0, 1, 2, 3, 4]
    assert kept(sampler.keep_top_k(logits, torch.tensor([99]), widest=99)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("p", "expected"), [(0.39, [1]), (0.41, [1, 2]), (0.69, [1, 2]), (0.71, [1, 2, 3]), (0.95, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_sufficient_set(p: float, expected: list[int]) -> None:
    logits = logs(0.1, 0.4, 0.3, 0.2)
    assert kept(sampler.keep_top_p(logits, torch.tensor([p], dtype=torch.float64))) == expected


def test_min_p_compares_with_the_likeliest() -> None:
    logits = logs(0.1, 0.4, 0.3, 0.2)
    assert kept(sampler.keep_min_p(logits, torch.tensor([0.7]))) == [1, 2]
    assert kept(sampler.keep_min_p(logits, torch.tensor([0.45]))) == [1, 2, 3]
    assert kept(sampler.keep_min_p(logits, torch.tensor([0.0]))) == [0, 1, 2, 3]


def test_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens() -> None:
    logits = torch.tensor([[3.0, -3.0, 3.0, -3.0]])
    seen = torch.tensor([[True, True, False, False]])
    out = sampler.penalise(logits, torch.tensor([2.0]), seen)
    assert out.tolist() == [[1.5, -6.0, 3.0, -3.0]]


def test_the_order_is_penalty_temperature_top_k_top_p_min_p() -> None:
    logits = logs(0.4, 0.3, 0.2, 0.1)
    # top-k first leaves .571 and .429, of which top-p .5 keeps one; top-p first would keep two
    assert kept(filtered(logits, Sampling(top_k=2, top_p=0.5))) == [0]
    # at temperature 1/2 the probabilities are .533 .3 .133 .033: top-p .5 keeps one, at temperature 1 two
    assert kept(filtered(logits, Sampling(temperature=0.5, top_p=0.5))) == [0]
    assert kept(filtered(logits, Sampling(top_p=0.5))) == [0, 1]
    # min-p sees the temperature too: .3/.533 > .3 > .133/.533, but .2/.4 > .3
    assert kept(filtered(logits, Sampling(temperature=0.5, min_p=0.3))) == [0, 1]
    assert kept(filtered(logits, Sampling(min_p=0.3))) == [0, 1, 2]
    # top-p first: it leaves 0 and 1; min-p .7 keeps both (.75), .8 only the first
    assert kept(filtered(logits, Sampling(top_p=0.6, min_p=0.8))) == [0]
    # the penalty comes before top-k: log .4 (negative) * 3 falls behind the others
    seen = torch.tensor([[True, False, False, False]])
    assert kept(filtered(logits, Sampling(repetition_penalty=3.0, top_k=1), seen=seen)) == [1]


def test_values_after_penalty_and_temperature() -> None:
    seen = torch.tensor([[True, False, True]])
    out = filtered(
        torch.tensor([[2.0, 1.0, -1.0]]), Sampling(repetition_penalty=4.0, temperature=0.5), seen=seen
    )
    assert out.tolist() == [[1.0, 2.0, -8.0]]


def test_banned_tokens_are_gone_before_top_k_counts() -> None:
    logits = logs(0.4, 0.3, 0.2, 0.1)
    banned = torch.tensor([[True, False, False, False]])
    out = sampler.filtered(
        logits, Filters.of([Sampling(top_k=2)]), seen_BV=torch.zeros_like(banned), banned_BV=banned
    )
    assert kept(out) == [1, 2]


def naive_top_p(probabilities: list[float], p: float) -> set[int]:
    """Smallest set of likeliest tokens with mass p, plus those as likely as its last."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    mass, last = 0.0, INF
    for i in order:
        if mass >= p:
            break
        mass += probabilities[i]
        last = probabilities[i]
    return {i for i in order if probabilities[i] >= last}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), p=st.floats(0.01, 0.999), spread=st.floats(0.0, 6.0))
def test_top_p_equals_the_naive_set_by_either_road(seed: int, p: float, spread: float) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * spread
    p_B = torch.full((3,), p, dtype=torch.float64)
    short = sampler.keep_top_p(logits, p_B, head=4)  # most rows need the full sort
    assert torch.equal(short, sampler.keep_top_p(logits, p_B))
    for row in range(3):
        probabilities = logits[row].softmax(-1).tolist()
        assert set(kept(short[row : row + 1])) == naive_top_p(probabilities, p)


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(0))
    samplings = [
        Sampling(top_p=0.999, temperature=0.7),
        Sampling(top_k=3),
        Sampling(temperature=0),
        Sampling(min_p=0.1, top_p=0.5),
        Sampling(repetition_penalty=1.3, top_k=50, top_p=0.9),
        Sampling(),
    ]
    seen = torch.rand(6, 2000, generator=torch.Generator().manual_seed(1)) < 0.1
    uniform = torch.from_numpy(seeds.uniforms(3, 0, 6))
    together = filtered(logits, *samplings, seen=seen)
    tokens, logp = sampler.pick(together, Filters.of(samplings), uniform)
    for i, sampling in enumerate(samplings):
        alone = filtered(logits[i : i + 1], sampling, seen=seen[i : i + 1])
        assert torch.equal(alone[0], together[i])
        token, lp = sampler.pick(alone, Filters.of([sampling]), uniform[i : i + 1])
        assert (int(token), float(lp)) == (int(tokens[i]), float(logp[i]))


def test_only_temperature_is_plain() -> None:
    assert sampler.is_plain(Sampling(temperature=0.7, stop_token_ids=(3,), ignore_eos=False))
    for odd in (
        Sampling(temperature=0),
        Sampling(top_k=1),
        Sampling(top_p=0.9),
        Sampling(min_p=0.1),
        Sampling(repetition_penalty=1.1),
        Sampling(min_tokens=1),
    ):
        assert not sampler.is_plain(odd)


# ---------------------------------------------------------------- draws


def chi_square_z(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard deviations by which the chi-square statistic is above its mean."""
    live = probabilities > 0
    assert counts[~live].sum() == 0, "a token of probability 0 was drawn"
    expected = probabilities[live] * counts.sum()
    statistic = float((((counts[live] - expected) ** 2) / expected).sum())
    freedom = int(live.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(top_k=5),
        Sampling(top_p=0.8),
        Sampling(min_p=0.2),
        Sampling(repetition_penalty=1.5, temperature=1.4, top_k=9, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    n = 40_000
    row = torch.randn(1, 16, generator=torch.Generator().manual_seed(5))
    seen = torch.arange(16)[None] % 2 == 0
    one = filtered(row, sampling, seen=seen)
    probabilities = one.double().softmax(-1)[0].numpy()
    uniform = torch.from_numpy(seeds.uniforms(11, 0, n))
    token, logp = sampler.draw(one.expand(n, -1), uniform)
    counts = np.bincount(token.numpy(), minlength=16)
    assert abs(chi_square_z(counts, probabilities)) < 4
    np.testing.assert_allclose(logp.numpy(), np.log(probabilities[token.numpy()]), atol=1e-6)


def test_a_wrong_distribution_fails_the_chi_square_test() -> None:
    row = torch.randn(1, 16, generator=torch.Generator().manual_seed(5))
    token, _ = sampler.draw(row.expand(40_000, -1), torch.from_numpy(seeds.uniforms(11, 0, 40_000)))
    warmer = (row / 1.05).double().softmax(-1)[0].numpy()
    assert chi_square_z(np.bincount(token.numpy(), minlength=16), warmer) > 4


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.tensor([[-INF, -INF, 0.0, -INF, -200.0, 1.0, -INF, -INF]])
    edge = [0.0, 2.0**-53, 0.2689414213699951, 0.26894142136999516, 0.5, LAST_U]
    uniform = torch.tensor(edge + seeds.uniforms(2, 0, 5000).tolist(), dtype=torch.float64)
    token, logp = sampler.draw(logits.expand(len(uniform), -1), uniform)
    assert set(token.tolist()) == {2, 5}
    assert token[0] == 2
    assert token[5] == 5
    assert bool((logp > -INF).all())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_the_largest_random_number_draws_the_last_possible_token(scale: float) -> None:
    for seed in range(50):
        logits = torch.randn(1, 33, generator=torch.Generator().manual_seed(seed)) * scale
        logits[:, 31:] = -INF
        token, _ = sampler.draw(logits, torch.tensor([LAST_U], dtype=torch.float64))
        weight = (logits - logits.max()).exp()[0]
        below = float(weight.double().cumsum(0)[int(token)])
        assert weight[int(token)] > 0
        assert below == pytest.approx(float(weight.double().sum()), rel=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_of_logits_that_are_no_distribution_the_log_prob_is_nan(bad: float) -> None:
    """On a GPU an index out of range would take the process's device away; the engine asks for the log-prob."""
    logits = torch.zeros(3, 20)
    logits[1] = bad
    token, logp = sampler.draw(logits, torch.full((3,), 0.5, dtype=torch.float64))
    assert token.tolist()[::2] == [10, 10]
    assert 0 <= int(token[1]) < 20
    assert logp.isfinite().tolist() == [True, False, True]


def test_greedy_takes_the_smallest_of_equal_ids_with_log_prob_zero() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 0.0, 5.0, 5.0], [0.0, 1.0, 2.0, 3.0]])
    filters = Filters.of([Sampling(temperature=0), Sampling(temperature=0), Sampling()])
    uniform = torch.tensor([0.99, 0.99, 0.0], dtype=torch.float64)
    token, logp = sampler.pick(logits, filters, uniform)
    assert token.tolist() == [1, 0, 0]
    assert logp[:2].tolist() == [0.0, 0.0]
    assert float(logp[2]) == pytest.approx(-math.log(sum(math.exp(i) for i in range(4))), abs=1e-6)
