"""KL estimators, and the controller of the KL's weight."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batches import by_rollout, doubles, logp_now, ragged
from whet.algos.kl import (
    ESTIMATORS,
    RATIO_ESTIMATORS,
    adapt,
    k1,
    k2,
    k3,
    low_var_kl,
    mean_kl,
    reference_kl,
)
from whet.config.schema import KlConfig, RewardKlConfig
from whet.types import ConfigError, WhetError


def test_estimators_by_hand() -> None:
    d = doubles([-0.5, 0.0, 2.0])
    assert ESTIMATORS["k1"](d).tolist() == [-0.5, 0, 2]
    assert ESTIMATORS["abs"](d).tolist() == [0.5, 0, 2]
    assert ESTIMATORS["k2"](d).tolist() == [0.125, 0, 2]
    # exp(-d) - 1 + d
    assert ESTIMATORS["k3"](d).tolist() == pytest.approx(
        [math.exp(0.5) - 1.5, 0, math.exp(-2) + 1], rel=1e-13
    )


def test_low_var_kl_is_bounded_and_k3_is_not() -> None:
    # d = -5: e^5 - 6 = 142 -> 10; d = 50: exp(-20) - 1 + 20 -> 10. Finite in float32 at any distance.
    inf = math.inf
    far = torch.tensor([-5.0, 50.0, -1e4, 1e4, inf, -inf], requires_grad=True)
    assert low_var_kl(far).tolist() == [10] * 6
    (slope,) = torch.autograd.grad(low_var_kl(far).sum(), far)
    assert slope.tolist() == [0] * 6
    assert k3(far)[:2].tolist() == pytest.approx([math.exp(5) - 6, 49], rel=1e-6)
    assert k3(far)[2].item() == inf


def k3_of(d: float) -> float:
    return math.expm1(-d) + d


ORACLES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": k3_of,
    "low_var_kl": lambda d: min(k3_of(min(max(d, -20.0), 20.0)), 10.0),
    "abs": abs,
}


@pytest.mark.parametrize("name", list(ESTIMATORS))
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=8))
def test_estimators_against_the_formulas(name: str, ds: list[float]) -> None:
    got = ESTIMATORS[name](doubles(ds))
    expected = [ORACLES[name.rstrip("+")](d) for d in ds]
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-13)


@given(
    st.lists(st.floats(-4, 4), min_size=1, max_size=6), st.lists(st.floats(-30, 30), min_size=6, max_size=6)
)
def test_ratio_estimators_against_the_formulas(ds: list[float], moves: list[float]) -> None:
    moves = moves[: len(ds)]
    d, move = doubles(ds), doubles(moves)
    ratio = [math.exp(min(max(m, -20.0), 20.0)) for m in moves]
    corrected = [min(r, 2.0) * k3_of(x) for r, x in zip(ratio, ds, strict=True)]
    unbiased = [min(r * k3_of(x), 10.0) for r, x in zip(ratio, ds, strict=True)]
    assert RATIO_ESTIMATORS["corrected_k3"](d, move).tolist() == pytest.approx(corrected, rel=1e-9, abs=1e-12)
    assert RATIO_ESTIMATORS["unbiased_k3"](d, move).tolist() == pytest.approx(unbiased, rel=1e-9, abs=1e-6)


def test_the_unbiased_one_is_bounded_as_a_product() -> None:
    """At d = 0.5, where k3 = exp(-0.5) - 0.5, a ratio of e^5 lies above the bound: flat there, and 10."""
    move = doubles([0.0, 5.0]).requires_grad_()
    value = RATIO_ESTIMATORS["unbiased_k3"](doubles([0.5, 0.5]), move)
    k3 = math.exp(-0.5) - 0.5
    assert value.tolist() == pytest.approx([k3, 10.0], rel=1e-12)
    assert torch.autograd.grad(value.sum(), move)[0].tolist() == pytest.approx([k3, 0.0], rel=1e-12)


def slopes(name: str, logp: Tensor, batch_ref: Tensor, old: Tensor) -> tuple[list[float], list[float]]:
    """Gradient by autograd, and by central differences, of one estimator at every token."""

    def k(x: Tensor) -> Tensor:
        d = x - batch_ref
        return RATIO_ESTIMATORS[name](d, x - old) if name in RATIO_ESTIMATORS else ESTIMATORS[name](d)

    (exact,) = torch.autograd.grad(k(logp).sum(), logp)
    h = 1e-6
    with torch.no_grad():
        return exact.tolist(), ((k(logp + h) - k(logp - h)) / (2 * h)).tolist()


@pytest.mark.parametrize("name", [*ESTIMATORS, *RATIO_ESTIMATORS])
def test_gradients_by_finite_differences(name: str) -> None:
    """With + the slope is that of k2, d; everything else has the slope of its value."""
    ref, old = doubles([-1.0, -2.0, -0.5, -3.0]), doubles([-1.2, -1.5, -0.9, -2.5])
    logp = doubles([-1.3, -1.1, -0.6, -4.9]).requires_grad_()
    exact, measured = slopes(name, logp, ref, old)
    expected = (logp - ref).tolist() if name.endswith("+") else measured
    assert exact == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_straight_through_by_hand() -> None:
    d = doubles([-0.5, 2.0]).requires_grad_()
    assert ESTIMATORS["k1+"](d).tolist() == [-0.5, 2.0]
    assert torch.autograd.grad(ESTIMATORS["k1+"](d).sum(), d)[0].tolist() == [-0.5, 2.0]
    assert torch.autograd.grad(ESTIMATORS["abs+"](d).sum(), d)[0].tolist() == [-0.5, 2.0]


def test_the_unbiased_one_has_value_and_gradient_of_the_kl() -> None:
    # Over tokens of the old policy q0: E[p/q0 * k3] = KL(p || ref), by logits of p as well.
    logits = doubles([0.3, -0.2, 0.1]).requires_grad_()
    log_p, log_ref, log_old = (
        logits.log_softmax(0), doubles([0.1, 0.4, -0.3]).log_softmax(0), doubles([0.5, 0.1, -0.2]).log_softmax(0),
    )  # fmt: skip
    kl = (log_p.exp() * (log_p - log_ref)).sum()
    estimate = (log_old.exp() * RATIO_ESTIMATORS["unbiased_k3"](log_p - log_ref, log_p - log_old)).sum()
    assert estimate.item() == pytest.approx(kl.item(), rel=1e-12)
    (true,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (found,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-14)


def test_the_schema_names_what_there_is() -> None:
    named = set(get_args(KlConfig.model_fields["estimator"].annotation))
    assert {*ESTIMATORS, *RATIO_ESTIMATORS, "full"} == named, (
        "full needs the whole vocabulary: see test_divergence"
    )
    in_reward = set(get_args(RewardKlConfig.model_fields["estimator"].annotation))
    assert in_reward == {name for name in ESTIMATORS if not name.endswith("+")}, "a value has no gradient"


def test_the_ratio_is_to_the_policy_before_the_step() -> None:
    batch = ragged(3)
    logp = logp_now(batch)
    assert batch.logp_old_N is not None
    assert batch.logp_ref_N is not None
    expected = k3(logp - batch.logp_ref_N) * (logp - batch.logp_old_N).exp().clamp(max=2)
    got = reference_kl(batch, logp, "corrected_k3")
    torch.testing.assert_close(got[batch.mask_N], expected[batch.mask_N], rtol=1e-12, atol=1e-14)
    before = reference_kl(batch, batch.logp_old_N, "corrected_k3")
    assert torch.equal(before, reference_kl(batch, batch.logp_old_N, "k3")), "the ratio is 1 before the step"


def test_an_unknown_estimator_is_refused() -> None:
    batch = ragged(0)
    with pytest.raises(ConfigError, match="did you mean 'low_var_kl'"):
        reference_kl(batch, batch.logp_sample_N, "low_var")


def test_k3_keeps_its_digits_near_zero() -> None:
    # d^2 / 2 to first order; exp(-d) - 1 + d computed as written would be 0 or noise in float32.
    d = torch.tensor([1e-2])
    assert k3(d).item() == pytest.approx(math.expm1(-1e-2) + 1e-2, rel=1e-3)


def test_expectations_over_a_distribution() -> None:
    # Over p, E[k1] = E[k3] = KL(p || q); the gradient of E[k2] by logits, with p held, is that of the KL.
    logits = doubles([0.3, -0.2, 0.1]).requires_grad_()
    log_q = doubles([0.1, 0.4, -0.3]).log_softmax(0)
    log_p = logits.log_softmax(0)
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum()
    assert (p * k1(log_p - log_q)).sum().item() == pytest.approx(kl.item(), rel=1e-12)
    assert (p * k3(log_p - log_q)).sum().item() == pytest.approx(kl.item(), rel=1e-12)
    (true,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((p.detach() * k2(log_p - log_q)).sum(), logits, retain_graph=True)
    (of_k1,) = torch.autograd.grad((p.detach() * k1(log_p - log_q)).sum(), logits)
    torch.testing.assert_close(of_k2, true, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(of_k1, torch.zeros(3).double(), rtol=0, atol=1e-14)  # useless as a loss


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_reference_kl_is_zero_where_not_sampled_and_where_equal(estimator: str) -> None:
    batch = ragged(1)
    assert batch.logp_old_N is not None
    kl_N = reference_kl(batch, batch.logp_old_N, estimator)
    assert (kl_N[~batch.mask_N] == 0).all()
    assert (kl_N[batch.mask_N] != 0).any()
    same = replace(batch, logp_ref_N=batch.logp_old_N)
    assert (reference_kl(same, batch.logp_old_N, estimator) == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_mean_kl_against_a_loop(seed: int) -> None:
    batch = ragged(seed)
    assert batch.logp_old_N is not None
    rows = [x for x in by_rollout(batch, reference_kl(batch, batch.logp_old_N, "k3")) if x]
    expected = sum(sum(x) / len(x) for x in rows) / len(rows)
    assert mean_kl(batch, "k3") == pytest.approx(expected, rel=1e-12)


def test_a_missing_reference_is_named() -> None:
    with pytest.raises(WhetError, match="logp_ref_N"):
        mean_kl(replace(ragged(0), logp_ref_N=None), "k1")


@pytest.mark.parametrize(
    ("kl_now", "expected"),
    [
        (0.1, 0.5),  # on target: unchanged
        (0.11, 0.5 * (1 + 0.1 * 20 / 100)),  # 10% above
        (9.0, 0.5 * (1 + 0.2 * 20 / 100)),  # bounded at 20%
        (0.0, 0.5 * (1 - 0.2 * 20 / 100)),
    ],
)
def test_adaptive_controller_by_hand(kl_now: float, expected: float) -> None:
    assert adapt(0.5, kl_now, target=0.1, horizon=100, rollouts=20) == pytest.approx(expected, rel=1e-12)


def test_a_kl_that_is_not_a_number_does_not_move_the_controller() -> None:
    assert adapt(0.5, math.nan, target=0.1, horizon=100, rollouts=20) == 0.5
    assert adapt(0.5, math.inf, target=0.1, horizon=100, rollouts=20) == pytest.approx(0.52)
